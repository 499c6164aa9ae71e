"""The gate: when the wait is over, what is said of a stage that went wrong, and what runs it again."""

from __future__ import annotations

import json
import re
from typing import Any

import mock_cloud
import mocks
import pulumi
import pytest
from mocks import Recorded, Registered, run

from workloads import states
from workloads.gate import LOG_LINES, Stage, failure, wait_for, without_empty
from workloads.settings import STAGES

URN = "urn:pulumi:dev::llama-trainium::llama-trainium:workloads:Pipeline$kubernetes:ray.io/v1:RayJob::stages-train"
METADATA = {"name": "dev-train-0123abcd", "namespace": "llama"}
NEEDS = "a pod of 2 CPUs, 7 GiB, and 16 pods of 112 CPUs, 448 GiB, 16 aws.amazon.com/neuron"
ENDED = {"endTime": "2026-11-21T10:10:00Z", "startTime": "2026-11-21T10:00:00Z"}
GOOD = {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete", **ENDED}
RUNS = {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running", "startTime": ENDED["startTime"]}
LOG = "\n".join(f"step {n}" for n in range(100))
# As KubeRay writes it: the sentence of Ray's job supervisor, and behind it the end of the log.
MESSAGE = (
    "Job entrypoint command failed with exit code 3, last available logs (truncated to 20,000 chars):\n"
    f"{LOG}\n\x1b[31merror: data.source: no such file\x1b[0m\r\n"
)
FAILED = {
    "jobStatus": "FAILED",
    "jobDeploymentStatus": "Failed",
    "reason": "AppFailed",
    "message": MESSAGE,
    **ENDED,
}


def said(status: dict[str, Any], kind: states.Kind = "RayJob") -> str:
    """What the terminal shows of a stage that ended so."""
    return failure("train", kind, NEEDS, URN, METADATA, status, states.job_state(kind, status))


def test_a_failure_is_one_line_with_all_that_one_needs_and_then_the_log() -> None:
    first, *log = said(FAILED).splitlines()
    assert first == (
        "stage train: failed (AppFailed): Job entrypoint command failed with exit code 3; "
        "log: kubectl logs -n llama job/dev-train-0123abcd; "
        f"to run it again: make rerun STAGE=train, or pulumi up --replace '{URN}'"
    )
    assert log[-1] == "  | error: data.source: no such file", "without the colours"
    assert log[-2] == "  | step 99"
    assert len(log) == LOG_LINES


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"jobStatus": "STOPPED", "jobDeploymentStatus": "Complete", **ENDED}, "stage train: stopped; log: "),
        (
            {"jobDeploymentStatus": "ValidationFailed", "reason": "ValidationFailed", "message": "The spec is invalid"},
            "stage train: refused (ValidationFailed): The spec is invalid; ",
        ),
        ({"jobDeploymentStatus": "Suspended"}, "stage train: suspended; "),
        (
            {
                "jobDeploymentStatus": "Failed",
                "reason": "DeadlineExceeded",
                "message": "The RayJob has passed the activeDeadlineSeconds. StartTime: x. ActiveDeadlineSeconds: 60",
            },
            "stage train: failed (DeadlineExceeded): The RayJob has passed the activeDeadlineSeconds. ",
        ),
    ],
)
def test_every_bad_end_is_named(status: dict[str, Any], expected: str) -> None:
    assert said(status).startswith(expected)


def test_a_cluster_that_did_not_come_up_says_how_far_it_came() -> None:
    status = {
        "jobDeploymentStatus": "Failed",
        "reason": "PreRunningDeadlineExceeded",
        "message": "The RayJob has passed the preRunningDeadlineSeconds.",
        "rayClusterStatus": {
            "desiredWorkerReplicas": 16,
            "readyWorkerReplicas": 3,
            "conditions": [
                {"type": "HeadPodReady", "status": "False", "reason": "ImagePullBackOff", "message": "not found"},
                {"type": "RayClusterSuspended", "status": "False", "reason": "RayClusterSuspended"},
            ],
        },
    }
    line = said(status)
    assert "3 of 16 workers ready" in line
    assert "HeadPodReady ImagePullBackOff not found" in line
    assert "Suspended" not in line


def test_a_gang_that_found_no_nodes_says_what_it_needs() -> None:
    # The status of KubeRay 1.7 beside Volcano (tests/engine/test_real_operators.py): one node of the gang was missing.
    waits = "RayCluster Pods are being provisioned for first time"
    conditions = [
        {"type": "HeadPodReady", "status": "False", "reason": "Unknown", "message": ""},
        {"type": "RayClusterProvisioned", "status": "False", "reason": "RayClusterPodsProvisioning", "message": waits},
    ]
    status = {
        "jobDeploymentStatus": "Failed",
        "reason": "PreRunningDeadlineExceeded",
        "message": "The RayJob has passed the preRunningDeadlineSeconds.",
        "rayClusterStatus": {"desiredWorkerReplicas": 16, "conditions": conditions},
    }
    expected = f"(PreRunningDeadlineExceeded, unschedulable: there were never free nodes for {NEEDS}): The RayJob has"
    assert said(status).startswith(f"stage train: failed {expected}")


def test_an_mpi_jobs_log_is_its_launchers() -> None:
    status = {
        "completionTime": "2026-11-21T10:10:00Z",
        "conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "gave up"}],
    }
    line = said(status, "MPIJob")
    assert line.startswith("stage train: failed (BackoffLimitExceeded): gave up; ")
    assert "job/dev-train-0123abcd-launcher" in line


@pytest.mark.parametrize("kind", ["RayJob", "MPIJob"])
@pytest.mark.parametrize("wait", ["running", "finished"])
def test_the_condition_is_one_that_pulumi_reads(kind: Any, wait: Any) -> None:
    """pulumi-kubernetes cuts it at every single `=` and at the first `}` (provider/pkg/jsonpath)."""
    text = wait_for(kind, wait)
    path = re.fullmatch(r"jsonpath=\{(.*?)\}", text)
    assert path
    assert "=" not in path[1].replace("==", "")
    assert "}" not in path[1]
    assert ("Running" in path[1] or "RUNNING" in path[1]) == (wait == "running")
    with pytest.raises(json.JSONDecodeError):  # or it would be taken for a list of conditions
        json.loads(text)


def make(
    statuses: list[Any], monkeypatch: pytest.MonkeyPatch, wait: Any = "finished", recorded: Recorded | None = None
) -> Recorded:
    """What a program registers whose stages end with these statuses, each made from the one before."""
    ends = dict(zip(STAGES, statuses, strict=False))
    monkeypatch.setattr(mocks, "outputs_of", lambda kind, name, *more: outputs(kind, name, *more, status=ends[name]))

    def program() -> None:
        before: pulumi.Output[str] = pulumi.Output.from_input("first")
        for stage in ends:
            name = before.apply(lambda earlier, stage=stage: f"{stage}-after-{earlier}"[:40])
            made = Stage(
                stage, stage, "RayJob", {"name": name, "namespace": "llama"}, {"entrypoint": "x"}, wait, 60, NEEDS
            )
            before = made.checked
        pulumi.export("result", made.result)

    return run(program, recorded=recorded)


def outputs(*asked: Any, status: Any) -> dict[str, Any]:
    """What the API server would say of a job."""
    return {**mock_cloud.outputs_of(*asked), "status": status}


def jobs(recorded: Recorded) -> list[Registered]:
    """The stages' jobs."""
    return recorded.of("kubernetes:ray.io/v1:RayJob")


def test_a_stage_is_made_from_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = make([GOOD, GOOD, GOOD], monkeypatch)
    assert [job.inputs["metadata"]["name"] for job in jobs(recorded)] == [
        "prepare-after-first",
        "precompile-after-prepare-after-first",
        "train-after-precompile-after-prepare-after-first"[:40],
    ]
    for before, after in zip(jobs(recorded), jobs(recorded)[1:], strict=False):
        assert recorded.waits_for(after, before)
    assert recorded.exports["result"] == {
        "job": "train-after-precompile-after-prepare-after-first"[:40],
        "state": "succeeded",
        "seconds": 600,
    }


BAD = [
    FAILED,
    {"jobStatus": "STOPPED", "jobDeploymentStatus": "Complete", **ENDED},
    {"jobDeploymentStatus": "ValidationFailed"},
    {"jobDeploymentStatus": "Suspended"},
    RUNS,
    {},
    None,
]


@pytest.mark.parametrize("status", BAD, ids=[str(n) for n in range(len(BAD))])
def test_nothing_is_made_behind_a_stage_that_went_wrong(status: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pulumi.RunError, match=r"^stage prepare: .*pulumi up --replace 'urn:pulumi:.*::prepare'"):
        make([status, GOOD], monkeypatch)


def test_the_job_that_failed_is_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded()
    with pytest.raises(pulumi.RunError, match="^stage precompile: failed"):
        make([GOOD, FAILED, GOOD], monkeypatch, recorded=recorded)
    assert [job.name for job in jobs(recorded)] == ["prepare", "precompile"]


def test_one_that_need_only_run_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert make([RUNS], monkeypatch, wait="running").exports["result"] == {
        "job": "prepare-after-first",
        "state": "running",
        "seconds": None,
    }
    with pytest.raises(pulumi.RunError, match="^stage prepare: failed"):
        make([FAILED], monkeypatch, wait="running")


def test_a_job_is_replaced_only_when_its_nodes_are_free(monkeypatch: pytest.MonkeyPatch) -> None:
    (job,) = jobs(make([GOOD], monkeypatch))
    assert job.request.deleteBeforeReplace
    assert job.request.customTimeouts.create == job.request.customTimeouts.update == "60s"
    assert job.inputs["metadata"]["annotations"]["pulumi.com/waitFor"] == wait_for("RayJob", "finished")


def test_nothing_empty_is_sent_that_kuberay_would_not_send_back() -> None:
    spec = {
        "a": [],
        "b": {"c": {}, "d": [{"e": [], "f": 0}]},
        "volumes": [{"emptyDir": {}}],
        "rayStartParams": {},
        "g": False,
    }
    assert without_empty(spec) == {
        "b": {"d": [{"f": 0}]},
        "volumes": [{"emptyDir": {}}],
        "rayStartParams": {},
        "g": False,
    }
