"""How a stage is, from the `status` of its RayJob or MPIJob, in one set of words for both.

    job_state("RayJob", job["status"]).state      # "running"

KubeRay's words: ray-operator/apis/ray/v1/rayjob_types.go; the MPI operator's: pkg/apis/kubeflow/v2beta1/types.go.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

State = Literal["waiting", "running", "retrying", "suspended", "succeeded", "failed", "stopped", "refused"]
"""waiting: for nodes, images, its turn. stopped: ended because it was asked to. refused: the operator does not take it,
and it stays so without ever ending."""

ENDED = frozenset({"succeeded", "failed", "stopped"})
Kind = Literal["RayJob", "MPIJob"]

_DEPLOYMENT: dict[str, State] = {
    "Running": "running",
    "Retrying": "retrying",
    "Suspending": "suspended",
    "Suspended": "suspended",
    "ValidationFailed": "refused",
    "Failed": "failed",
}
_COMPLETE: dict[str, State] = {"SUCCEEDED": "succeeded", "STOPPED": "stopped"}


@dataclass(frozen=True)
class JobState:
    """What became of a stage so far."""

    state: State
    reason: str = ""
    """The operator's word, such as AppFailed or DeadlineExceeded; empty while all is well."""
    message: str = ""
    """The operator's sentences; KubeRay's have the last lines of the log."""
    started: datetime | None = None
    ended: datetime | None = None

    @property
    def has_ended(self) -> bool:
        """Whether its accelerators are given back and nothing more happens by itself."""
        return self.state in ENDED

    def seconds(self, now: datetime) -> float | None:
        """From its start, waiting included, to its end, or to `now`; None before its start."""
        return ((self.ended or now) - self.started).total_seconds() if self.started else None


def job_state(kind: Kind, status: Mapping[str, Any] | None) -> JobState:
    """The state of a job from its `status`, which is None or empty before an operator has seen it."""
    status = status or {}
    started = _time(status.get("startTime"))
    if kind == "RayJob":
        return JobState(
            _ray_state(status),
            status.get("reason") or "",
            (status.get("message") or "").strip(),
            started,
            _time(status.get("endTime")),
        )
    state, condition = _mpi_state(status)
    ended = _time(status.get("completionTime")) if state in ENDED else None
    if state in ("succeeded", "running", "waiting"):
        return JobState(state, started=started, ended=ended)
    return JobState(state, condition.get("reason") or "", (condition.get("message") or "").strip(), started, ended)


def _ray_state(status: Mapping[str, Any]) -> State:
    deployment = status.get("jobDeploymentStatus") or ""
    if deployment == "Complete":  # the job has ended, and was not `Failed` by KubeRay: it says itself how it went
        return _COMPLETE.get(status.get("jobStatus") or "", "failed")
    return _DEPLOYMENT.get(deployment, "waiting")


def _mpi_state(status: Mapping[str, Any]) -> tuple[State, Mapping[str, Any]]:
    true = {each["type"]: each for each in status.get("conditions") or () if each.get("status") == "True"}
    if "Succeeded" in true:
        return "succeeded", true["Succeeded"]
    # An evicted worker is a failure in the operator's eyes too, while the launcher goes on: the end has a time.
    if "Failed" in true and status.get("completionTime"):
        return "failed", true["Failed"]
    for kind, state in _MPI_STATES:
        if kind in true:
            return state, true[kind]
    return "waiting", {}


_MPI_STATES: tuple[tuple[str, State], ...] = (
    ("Suspended", "suspended"),
    ("Restarting", "retrying"),
    ("Running", "running"),
)


def _time(text: str | None) -> datetime | None:
    return datetime.fromisoformat(text) if text else None
