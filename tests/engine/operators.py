"""What KubeRay and the MPI operator do to jobs as far as the API server sees it: their `status`, step by step.

    with operating(server, "llama-trainium") as operators:
        operators.ends["prepare"] = FAILED
        ...                                  # jobs get their status as they appear
    operators.jobs                           # in the order in which they appeared

No pod is started. The steps and their words are those of ray-operator/controllers/ray/rayjob_controller.go (1.7.0) and
pkg/controller/mpi_job_controller.go (0.8). How a stage ends is for the test to say; without a word it ends well.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from apiserver import ApiServer

from workloads.labels import STAGE_LABEL

Status = dict[str, Any]

PATHS = {
    "RayJob": "/apis/ray.io/v1/namespaces/{}/rayjobs",
    "MPIJob": "/apis/kubeflow.org/v2beta1/namespaces/{}/mpijobs",
}
TICK = 0.2
"""Seconds between two looks, and between two steps of a job."""

# How a RayJob ends; the operator adds the times.
SUCCEEDED: Status = {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete", "message": "Job finished."}
STOPPED: Status = {"jobStatus": "STOPPED", "jobDeploymentStatus": "Complete", "message": "Job was stopped."}
FAILED: Status = {
    "jobStatus": "FAILED",
    "jobDeploymentStatus": "Failed",
    "reason": "AppFailed",
    "message": "Job entrypoint command failed with exit code 3, last available logs (truncated to 20,000 chars):\n"
    "reading the source\nerror: data.source: /data/none, expected a file that exists\n",
}
LATE: Status = {
    "jobStatus": "",
    "jobDeploymentStatus": "Failed",
    "reason": "PreRunningDeadlineExceeded",
    "message": "The RayJob has passed the preRunningDeadlineSeconds.",
}
# Has no end time, then or ever, and no step comes before it.
REFUSED: Status = {
    "jobDeploymentStatus": "ValidationFailed",
    "reason": "ValidationFailed",
    "message": "The RayJob spec is invalid: a rule that the schema does not have",
}
RUNNING: Status = {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running"}

# How an MPIJob ends: its last condition.
MPI_SUCCEEDED: Status = {"type": "Succeeded", "reason": "MPIJobSucceeded", "message": "MPIJob successfully completed."}
MPI_FAILED: Status = {
    "type": "Failed",
    "reason": "BackoffLimitExceeded",
    "message": "Job has reached the specified backoff limit",
}
MPI_RUNNING: Status = {"type": "Running", "reason": "MPIJobRunning", "message": "MPIJob is running."}


@dataclass
class Job:
    """A job that appeared, and when it got its last status: seconds of time.monotonic()."""

    stage: str
    kind: str
    name: str
    uid: str
    appeared: float
    steps: deque[Status] = field(repr=False)
    ended: float | None = None


class Operators:
    """Both operators, for the jobs of one namespace."""

    def __init__(self, server: ApiServer, namespace: str) -> None:
        self._server, self._namespace = server, namespace
        self.ends: dict[str, Status] = {}
        """The last status of a stage, by its name; RUNNING and MPI_RUNNING leave it running."""
        self.jobs: list[Job] = []

    def run(self, stop: threading.Event) -> None:
        """Look after the jobs until told to stop."""
        while not stop.wait(TICK):
            try:
                for kind, path in PATHS.items():
                    for item in self._server.request(path.format(self._namespace))["items"]:
                        self._step(kind, item)
            except OSError:
                continue  # no definition yet, a job that has just gone, or the server is going

    def _step(self, kind: str, item: dict[str, Any]) -> None:
        meta = item["metadata"]
        job = next((each for each in self.jobs if each.uid == meta["uid"]), None)
        if job is None:
            stage = meta["labels"][STAGE_LABEL]
            steps = deque(_ray_steps(self.ends.get(stage, SUCCEEDED)))
            if kind == "MPIJob":
                steps = deque(_mpi_steps(self.ends.get(stage, MPI_SUCCEEDED)))
            job = Job(stage, kind, meta["name"], meta["uid"], time.monotonic(), steps)
            self.jobs.append(job)
        if job.steps:
            last, status = len(job.steps) == 1, job.steps[0]
            changed = time.monotonic()
            path = f"{PATHS[kind].format(self._namespace)}/{job.name}/status"
            self._server.request(path, "PATCH", {"status": status})
            job.steps.popleft()
            job.ended = changed if last else None


def _ray_steps(end: Status) -> Iterator[Status]:
    if end is REFUSED:
        yield end
        return
    yield {
        "jobDeploymentStatus": "Initializing",
        "startTime": _now(),
        "rayClusterName": "stand-in",
        "jobId": "stand-in",
    }
    if end is not LATE:
        yield {"jobDeploymentStatus": "Running", "jobStatus": "PENDING"}
        yield RUNNING
    if end is not RUNNING:
        yield {**end, "endTime": _now()}


def _mpi_steps(end: Status) -> Iterator[Status]:
    created = _condition({"type": "Created", "reason": "MPIJobCreated", "message": "MPIJob is created."})
    yield {"startTime": _now(), "conditions": [created]}
    yield {"conditions": [created, _condition(MPI_RUNNING)]}
    if end is not MPI_RUNNING:
        stopped = {**_condition(MPI_RUNNING), "status": "False"}
        yield {"conditions": [created, stopped, _condition(end)], "completionTime": _now()}


def _condition(said: Status) -> Status:
    return {**said, "status": "True", "lastUpdateTime": _now(), "lastTransitionTime": _now()}


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


@contextmanager
def operating(server: ApiServer, namespace: str) -> Iterator[Operators]:
    """The operators at work in a namespace while the block runs."""
    operators, stop = Operators(server, namespace), threading.Event()
    thread = threading.Thread(target=operators.run, args=(stop,))
    thread.start()
    try:
        yield operators
    finally:
        stop.set()
        thread.join()
