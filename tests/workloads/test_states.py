"""How a stage is, from the statuses that KubeRay and the MPI operator write."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from schemas import definitions

from workloads.states import ENDED, Kind, job_state

START, END = "2026-11-21T10:00:00Z", "2026-11-21T10:01:30Z"


@pytest.mark.parametrize(
    ("deployment", "job", "state"),
    [
        ("", "", "waiting"),
        ("Initializing", "", "waiting"),
        ("Waiting", "", "waiting"),
        ("Running", "PENDING", "running"),
        ("Running", "RUNNING", "running"),
        ("Retrying", "FAILED", "retrying"),
        ("Suspended", "", "suspended"),
        ("Complete", "SUCCEEDED", "succeeded"),
        ("Complete", "STOPPED", "stopped"),
        ("Complete", "FAILED", "failed"),
        ("Failed", "FAILED", "failed"),
        ("Failed", "RUNNING", "failed"),  # a deadline
        ("ValidationFailed", "", "refused"),
    ],
)
def test_a_rayjob(deployment: str, job: str, state: str) -> None:
    assert job_state("RayJob", {"jobDeploymentStatus": deployment, "jobStatus": job}).state == state


def test_success_is_success_of_both() -> None:
    """A job that KubeRay gave up has not succeeded, whatever Ray said last."""
    assert job_state("RayJob", {"jobDeploymentStatus": "Failed", "jobStatus": "SUCCEEDED"}).state == "failed"
    assert job_state("RayJob", {"jobDeploymentStatus": "Running", "jobStatus": "SUCCEEDED"}).state == "running"


def test_what_kuberay_says_about_a_failure() -> None:
    status = {
        "jobDeploymentStatus": "Failed",
        "jobStatus": "FAILED",
        "reason": "AppFailed",
        "message": "Job entrypoint command failed with exit code 3\n",
        "startTime": START,
        "endTime": END,
    }
    state = job_state("RayJob", status)
    assert (state.reason, state.message) == ("AppFailed", "Job entrypoint command failed with exit code 3")
    assert state.seconds(datetime(2030, 1, 1, tzinfo=UTC)) == 90


def conditions(*true: str, **more: Any) -> dict[str, Any]:
    every = ("Created", "Running", "Suspended", "Succeeded", "Failed")
    return {
        "startTime": START,
        "conditions": [
            {"type": each, "status": "True" if each in true else "False", "reason": f"MPIJob{each}", "message": each}
            for each in every
        ],
        **more,
    }


@pytest.mark.parametrize(
    ("status", "state"),
    [
        (conditions(), "waiting"),
        (conditions("Created"), "waiting"),
        (conditions("Created", "Running"), "running"),
        (conditions("Created", "Suspended"), "suspended"),
        (conditions("Created", "Succeeded", completionTime=END), "succeeded"),
        (conditions("Created", "Failed", completionTime=END), "failed"),
        (conditions("Created", "Running", "Failed"), "running"),  # a worker was evicted, and the operator goes on
    ],
)
def test_an_mpijob(status: dict[str, Any], state: str) -> None:
    assert job_state("MPIJob", status).state == state


def test_what_the_mpi_operator_says_about_a_failure() -> None:
    state = job_state("MPIJob", conditions("Created", "Failed", completionTime=END))
    assert (state.reason, state.message) == ("MPIJobFailed", "Failed")
    assert state.seconds(datetime(2030, 1, 1, tzinfo=UTC)) == 90


@pytest.mark.parametrize("kind", ["RayJob", "MPIJob"])
@pytest.mark.parametrize("status", [None, {}])
def test_a_job_that_no_operator_has_seen_waits(kind: Kind, status: Any) -> None:
    state = job_state(kind, status)
    assert (state.state, state.has_ended, state.seconds(datetime.now(UTC))) == ("waiting", False, None)


words = st.text(st.characters(codec="ascii"), max_size=12)


@given(
    deployment=st.sampled_from(["", "Initializing", "Running", "Complete", "Failed", "Retrying", "Suspended"]) | words,
    job=st.sampled_from(["", "PENDING", "RUNNING", "STOPPED", "SUCCEEDED", "FAILED"]) | words,
    ended=st.booleans(),
)
def test_an_unknown_word_is_never_success(deployment: str, job: str, ended: bool) -> None:
    status = {"jobDeploymentStatus": deployment, "jobStatus": job} | ({"endTime": END} if ended else {})
    state = job_state("RayJob", status)
    assert (state.state == "succeeded") == (deployment == "Complete" and job == "SUCCEEDED")
    assert state.has_ended == (deployment in ("Complete", "Failed")) == (state.state in ENDED)


def test_the_definitions_have_the_fields_that_are_read() -> None:
    crds = definitions()
    ray = crds["ray.io/v1", "RayJob"]["properties"]["status"]["properties"]
    assert {"jobDeploymentStatus", "jobStatus", "reason", "message", "startTime", "endTime"} <= set(ray)
    mpi = crds["kubeflow.org/v2beta1", "MPIJob"]["properties"]["status"]["properties"]
    assert {"conditions", "startTime", "completionTime"} <= set(mpi)
