"""The parts that the pods of stages share, whether Ray or MPI starts them: plain data in Kubernetes' words."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pulumi

from training import environment
from workloads.labels import PART_OF, STAGE_LABEL
from workloads.platform import SETTINGS_PATH, USER, VOLUME_PATH, NodeShape, Platform
from workloads.sizes import Size, mebibytes

Spec = dict[str, Any]
Text = pulumi.Input[str]

STOP_SECONDS = 300
"""How long a run may take to write its last checkpoint when its job is deleted, suspended or past its deadline."""
STOP_GRACE = STOP_SECONDS + 30
"""Grace of the pods of a run: that, and the end of its processes."""

KEEP_NODE = {
    # A moved pod is a run that starts over: neither autoscaler takes a node away below one.
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}

LOCKED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
}
"""Security context of every container that runs the image's programs. Devices come from device plugins, which give a
container the right to them without privileges."""


SETTINGS_MOUNT = {
    "name": "settings",
    "mountPath": str(SETTINGS_PATH),
    # One plain file: a mounted folder of a ConfigMap has links, which Ray's `working_dir` leaves out.
    "subPath": SETTINGS_PATH.name,
    "readOnly": True,
}


@dataclass(frozen=True)
class Names:
    """What pods use by name (workloads/base.py makes it)."""

    namespace: Text
    claim: Text
    service_account: Text
    queue: Text
    priority_class: Text
    settings: Text | None = None
    """The ConfigMap of the stage; None where the cluster is not one stage's."""
    token_secret: Text | None = None
    ray_token: Text | None = None
    redis_password: Text | None = None


def container(name: str, platform: Platform, size: Size, names: Names) -> Spec:
    """A container of the image that asks for `size`, with the volume and the settings."""
    resources = size.resources()
    mounts: list[Spec] = [{"name": "data", "mountPath": str(VOLUME_PATH)}, {"name": "shm", "mountPath": "/dev/shm"}]
    return {
        "name": name,
        "image": platform.image,
        "workingDir": str(VOLUME_PATH),
        "resources": {"requests": resources, "limits": resources},
        "securityContext": LOCKED,
        "env": [],
        "volumeMounts": [*mounts, *([SETTINGS_MOUNT] if names.settings is not None else [])],
    }


def template(
    stage: str, shape: NodeShape, container: Spec, names: Names, volumes: Sequence[Spec], grace: int | None = None
) -> Spec:
    """Template of a stage's pod on a node of `shape`. `grace`: seconds from SIGTERM to SIGKILL, if not the usual 30."""
    return {
        "metadata": {"labels": {**PART_OF, STAGE_LABEL: stage}, "annotations": dict(KEEP_NODE)},
        "spec": {
            "serviceAccountName": names.service_account,
            "priorityClassName": names.priority_class,
            "nodeSelector": dict(shape.node_selector),
            "tolerations": [dict(each) for each in shape.tolerations],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": list(volumes),
            **({} if grace is None else {"terminationGracePeriodSeconds": grace}),
        },
    }


def volumes(names: Names, size: Size) -> list[Spec]:
    """The shared volume, the settings, and shared memory for Ray's object store and what processes tell each other."""
    # What is in it counts as the container's memory: a half is more than Ray's object store takes (30 %).
    shm = {"medium": "Memory", "sizeLimit": mebibytes(max(64, round(size.memory_gib * 512)))}
    return [
        {"name": "data", "persistentVolumeClaim": {"claimName": names.claim}},
        {"name": "shm", "emptyDir": shm},
        *([settings_volume(names)] if names.settings is not None else []),
    ]


def settings_volume(names: Names) -> Spec:
    """The stage's ConfigMap, for SETTINGS_MOUNT."""
    return {"name": "settings", "configMap": {"name": names.settings}}


def owner(platform: Platform) -> Spec:
    """What gives the volume to the image's user: a new file system belongs to root, and drivers of volumes for many
    nodes leave it so whatever `fsGroup` says. Only its top: what is in it belongs to who wrote it."""
    small = {"cpu": "100m", "memory": "64Mi"}
    return {
        "name": "owner",
        "image": platform.image,
        "command": ["chown", f"{USER}:{USER}", str(VOLUME_PATH)],
        "resources": {"requests": small, "limits": small},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
            "runAsUser": 0,
        },
        "volumeMounts": [{"name": "data", "mountPath": str(VOLUME_PATH)}],
    }


def apart(labels: Mapping[str, str], required: bool) -> Spec:
    """Affinity of pods with `labels`: one a node. Where workers have no devices of their own it is a wish: a laptop's
    cluster has one node."""
    term = {
        "labelSelector": {"matchLabels": dict(labels)},
        "topologyKey": "kubernetes.io/hostname",
    }
    if required:
        return {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}
    wish = {"weight": 100, "podAffinityTerm": term}
    return {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [wish]}}


def before_stop(container: Spec, script: str) -> None:
    """Run a shell script in the container before it is told to end, for at most its pod's grace."""
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", script]}}}


def ask_to_stop(run: Path) -> str:
    """Script for `before_stop` of a head or launcher: the run writes a checkpoint and ends.

    While its lock is held, training goes on.
    """
    lock, stop = shlex.quote(str(run / ".lock")), shlex.quote(str(run / "stop-request"))
    return f"flock -n {lock} true || {{ touch {stop}; timeout {STOP_SECONDS} flock {lock} true; }}"


def wait_for_stop(run: Path) -> str:
    """Script for `before_stop` of a worker. Deleted with its head, it has to stay until the checkpoint is written.

    A worker that is deleted alone is a lost node: the run goes on without it, from its last checkpoint.
    """
    lock, stop = shlex.quote(str(run / ".lock")), shlex.quote(str(run / "stop-request"))
    return f"sleep 2; test ! -e {stop} || timeout {STOP_SECONDS} flock {lock} true"


def env(values: Mapping[str, str]) -> list[Spec]:
    """Environment variables in Kubernetes' form."""
    return [{"name": name, "value": value} for name, value in values.items()]


def device_env(shape: NodeShape) -> dict[str, str]:
    """What Neuron and EFA read on a node of `shape`; {} on a CPU node.

    Launchers set the same; in the pod it is there for what people run by hand, too.
    """
    if not shape.neuron:
        return {}
    return environment.NEURON | (environment.EFA if shape.efa else {})
