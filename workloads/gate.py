"""A stage's job as a Pulumi resource that is there when the job has ended, and that ends the update when it went wrong.

    prepare = Stage("prepare", "prepare", "RayJob", metadata, spec, wait="finished", timeout=3600, needs="1 pod")
    prepare.checked        # name of the job, once it has succeeded: what the next stage is made from

Pulumi waits for the condition in the annotation `pulumi.com/waitFor`, which is true at every end and not at a good one
only: a stage that fails ends the update within a second of it, not at the wait's timeout. What the end was is looked at
here. The next stage is made from the checked name, so it does not exist before, and is made anew when this one is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

import pulumi

from workloads.states import JobState, Kind, job_state

API_VERSIONS: dict[Kind, str] = {"RayJob": "ray.io/v1", "MPIJob": "kubeflow.org/v2beta1"}
Wait = Literal["running", "finished"]

# Selects the object's `status`, the only member with such fields, when one of these holds. A RayJob that KubeRay
# refuses (ValidationFailed) and a job that someone suspended never get an end time: they count as ends.
_ENDED: dict[Kind, list[str]] = {
    "RayJob": ["@.endTime", '@.jobDeploymentStatus=="ValidationFailed"', '@.jobDeploymentStatus=="Suspended"'],
    "MPIJob": ["@.completionTime", '@.conditions[?@.type=="Suspended" && @.status=="True"]'],
}
_RUNS: dict[Kind, str] = {
    "RayJob": '@.jobStatus=="RUNNING"',
    "MPIJob": '@.conditions[?@.type=="Running" && @.status=="True"]',
}

LOG_LINES = 20
"""Of a failed stage, in the terminal."""
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f]")
"""Colours and other control characters of a log, which would go on in the terminal."""


def wait_for(kind: Kind, wait: Wait) -> str:
    """The value of `pulumi.com/waitFor` with which a job has ended, or runs: a JSONPath of RFC 9535."""
    holds = _ENDED[kind] + ([_RUNS[kind]] if wait == "running" else [])
    return f"jsonpath={{$[?{' || '.join(holds)}]}}"


class Stage(pulumi.CustomResource):
    """A RayJob or an MPIJob."""

    urn: pulumi.Output[str]
    metadata: pulumi.Output[Mapping[str, Any]]
    status: pulumi.Output[Mapping[str, Any] | None]
    checked: pulumi.Output[str]
    """The job's name, once it went well: nothing that is made from it exists before."""
    result: pulumi.Output[dict[str, Any]]
    """What became of it: job, state, seconds; as of the last update that waited for it."""

    def __init__(
        self,
        name: str,
        stage: str,
        kind: Kind,
        metadata: Mapping[str, Any],
        spec: Mapping[str, Any],
        wait: Wait,
        timeout: int,
        needs: str,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`timeout`: seconds after which Pulumi stops waiting. The job itself goes on; the next update waits on.
        `needs`: what the pods ask for, in words, for when there are no nodes for them.

        `metadata` must say the whole name: Pulumi's own suffixes would hide that a job is the one that is there.
        """
        annotations = {
            **metadata.get("annotations", {}),
            "pulumi.com/waitFor": wait_for(kind, wait),
            # KubeRay has written the job back by the time a limit of it is changed, and owns its lists since.
            "pulumi.com/patchForce": "true",
        }
        props = {
            "apiVersion": API_VERSIONS[kind],
            "kind": kind,
            "metadata": {**metadata, "annotations": annotations},
            "spec": without_empty(spec),
            "status": None,  # named, so that it is an output
        }
        limit = f"{timeout}s"
        own = pulumi.ResourceOptions(
            custom_timeouts=pulumi.CustomTimeouts(create=limit, update=limit, delete=f"{DELETE_SECONDS}s"),
            # The job that is replaced holds the nodes that the new one needs.
            delete_before_replace=True,
        )
        super().__init__(
            f"kubernetes:{API_VERSIONS[kind]}:{kind}", name, props, pulumi.ResourceOptions.merge(opts, own)
        )
        looked_at = pulumi.Output.all(self.urn, self.metadata, self.status).apply(
            lambda made: _look_at(stage, kind, wait, needs, made[0], made[1], made[2])
        )
        self.checked = looked_at.apply(lambda result: str(result["job"]))
        self.result = looked_at


MEANT_EMPTY = frozenset({"emptyDir", "rayStartParams"})
"""Where {} says something."""


def without_empty(value: Any) -> Any:
    """The same without empty lists and mappings: KubeRay writes a job back without them, which would be a change to
    Pulumi at every update."""
    if isinstance(value, Mapping):
        kept = {key: each if key in MEANT_EMPTY else without_empty(each) for key, each in value.items()}
        return {key: each for key, each in kept.items() if key in MEANT_EMPTY or not _is_empty(each)}
    return [without_empty(each) for each in value] if isinstance(value, list | tuple) else value


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping | list) and not value


DELETE_SECONDS = 1200
"""Deleting a job waits for its pods, which write a checkpoint first, and for Volcano and KubeRay to notice."""


def _look_at(
    stage: str,
    kind: Kind,
    wait: Wait,
    needs: str,
    urn: str,
    metadata: Mapping[str, Any],
    status: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What became of a job. Raises `pulumi.RunError`, which ends the update without a traceback."""
    found = job_state(kind, status)
    if found.state != "succeeded" and not (wait == "running" and found.state == "running"):
        raise pulumi.RunError(failure(stage, kind, needs, urn, metadata, status or {}, found))
    seconds = (found.ended - found.started).total_seconds() if found.started and found.ended else None
    return {"job": metadata["name"], "state": found.state, "seconds": seconds}


def failure(
    stage: str,
    kind: Kind,
    needs: str,
    urn: str,
    metadata: Mapping[str, Any],
    status: Mapping[str, Any],
    found: JobState,
) -> str:
    """One line with what happened, where the log is and what runs the stage again; then the last lines of the log."""
    what, log = _message(found.message)
    reasons = [found.reason] if found.reason else []
    if found.reason == "PreRunningDeadlineExceeded":
        reasons += _not_ready(status, needs)
    why = f" ({', '.join(reasons)})" if reasons else ""
    namespace, name = metadata.get("namespace", "default"), metadata["name"]
    # A RayJob's submitter follows the log and outlives the cluster; an MPIJob's launcher has the log itself.
    job = name if kind == "RayJob" else f"{name}-launcher"
    line = (
        f"stage {stage}: {found.state}{why}{what and f': {what}'}; log: kubectl logs -n {namespace} job/{job}; "
        f"to run it again: make rerun STAGE={stage}, or pulumi up --replace '{urn}'"
    )
    return "\n".join([line, *(f"  | {text}" for text in log)])


def _message(message: str) -> tuple[str, list[str]]:
    """The operator's sentence, and the last lines of the log that KubeRay puts behind it."""
    first, _, rest = _ESCAPES.sub("", message.replace("\r", "\n")).partition("\n")
    sentence = re.sub(r",? *last available logs.*", "", first).strip().rstrip(":.")
    return sentence, [line for line in rest.splitlines() if line.strip()][-LOG_LINES:]


def _not_ready(status: Mapping[str, Any], needs: str) -> list[str]:
    """Why the cluster of a RayJob did not come up, as far as its conditions say: no node, an image, a container."""
    cluster = status.get("rayClusterStatus") or {}
    conditions = {each["type"]: each for each in cluster.get("conditions") or () if each.get("status") == "False"}
    # KubeRay's word for a head of which no kubelet has said anything: it is on no node, and so is none of its gang.
    if conditions.get("HeadPodReady", {}).get("reason") == "Unknown":
        return [f"unschedulable: there were never free nodes for {needs}"]
    wanted, there = cluster.get("desiredWorkerReplicas") or 0, cluster.get("readyWorkerReplicas") or 0
    said = [
        " ".join(filter(None, (kind, each.get("reason"), each.get("message"))))
        for kind, each in conditions.items()
        if kind in ("HeadPodReady", "RayClusterProvisioned")
    ]
    return [
        *([f"{there} of {wanted} workers ready"] if there < wanted else []),
        *said,
        *filter(None, [cluster.get("reason")]),
    ]
