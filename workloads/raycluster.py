"""What KubeRay makes of a stage: the spec of its RayCluster, as plain data in Kubernetes' words.

    spec = ray_cluster_spec("train", platform, settings, names, nodes=16, training=training)

prepare is one pod on a core node: the head has the CPUs. For the others the head, on a core node too, has none, so that
nothing runs there but what hands out the work, and each worker pod has a node to itself.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pulumi

from training.config import Settings as TrainingSettings
from workloads.base import REDIS_KEY, TOKEN_KEY
from workloads.labels import DASHBOARD_LABEL, DASHBOARD_PORT, PART_OF, STAGE_LABEL
from workloads.platform import SETTINGS_PATH, USER, VOLUME_PATH, NodeShape, Platform
from workloads.settings import StageName, Workloads
from workloads.sizes import Size, head_size, prepare_size, worker_size
from workloads.versions import RAY

Spec = dict[str, Any]
Text = pulumi.Input[str]

SHARED = "shared"
"""Stands for a stage in the labels of the cluster that stages share."""

WORKER_GROUP = "workers"

STOP_SECONDS = 300
"""How long a run may take to write its last checkpoint when its job is deleted, suspended or past its deadline."""

SUBMITTER = Size(0.1, 0.5)
"""Beside the pods of a gang: KubeRay counts it among what a queue must have room for."""

KEEP_NODE = {
    # A moved pod is a run that starts over: neither autoscaler takes a node away below one.
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}

NEURON_ENV = {
    # Neuron's names for the network between nodes and for numerics, from its guide to training on Trn1.
    "CCOM_SOCKET_IFNAME": "eth0",
    "MALLOC_ARENA_MAX": "64",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
    # Ray would give each worker process the cores it counts; which rank has which core is training's to say.
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",
}
EFA_ENV = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}

LOCKED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "runAsNonRoot": True,
    "runAsUser": USER,
    "runAsGroup": USER,
}
"""Security context of every container that runs the image's programs. Devices come from device plugins, which give a
container the right to them without privileges."""


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


def ray_cluster_spec(
    stage: StageName | None,
    platform: Platform,
    settings: Workloads,
    names: Names,
    nodes: int,
    training: TrainingSettings,
) -> Spec:
    """Spec of the cluster of `stage`, or with None of the one that stages and people share.

    `nodes` are those that train, `training` the settings as pods have them (`on_volume`).
    """
    size = prepare_size(settings, platform.core) if stage == "prepare" else head_size(settings, platform.core)
    spec: Spec = {
        "rayVersion": RAY,
        "authOptions": {"mode": "token", **({"secretName": names.ray_token} if names.ray_token else {})},
        "headGroupSpec": {
            "rayStartParams": _start(size.cpu, 1) if stage == "prepare" else {"num-cpus": "0"},
            "template": _head(stage, platform, size, names, training),
        },
        "workerGroupSpecs": [],
    }
    if stage != "prepare":
        spec["workerGroupSpecs"] = [_workers(stage, platform, settings, names, nodes, training)]
    if stage is None:
        spec["enableInTreeAutoscaling"] = True
        spec["autoscalerOptions"] = {"version": "v2", "idleTimeoutSeconds": 600, "securityContext": LOCKED}
        # The autoscaler, in the head's pod, makes pods; nothing else in our pods talks to the Kubernetes API.
        spec["headGroupSpec"]["template"]["spec"]["automountServiceAccountToken"] = True
    if settings.redis_address:
        spec["gcsFaultToleranceOptions"] = _kept_in_redis(settings.redis_address, names)
    return spec


def submitter_template(stage: StageName, platform: Platform, names: Names, with_settings: bool) -> Spec:
    """Pod template of what hands the job to Ray and follows its log. It outlives the cluster, and the log with it."""
    container: Spec = {
        "name": "ray-job-submitter",
        "image": platform.image,
        "resources": {"requests": SUBMITTER.resources(), "limits": {"memory": "1Gi"}},
        "securityContext": LOCKED,
        "volumeMounts": [SETTINGS_MOUNT] if with_settings else [],
    }
    template = _template(stage, platform.core, container, names, [_settings_volume(names)] if with_settings else [])
    template["spec"]["restartPolicy"] = "Never"
    return template


SETTINGS_MOUNT = {
    "name": "settings",
    "mountPath": str(SETTINGS_PATH),
    # One plain file: a mounted folder of a ConfigMap has links, which Ray's `working_dir` leaves out.
    "subPath": SETTINGS_PATH.name,
    "readOnly": True,
}


def _head(stage: StageName | None, platform: Platform, size: Size, names: Names, training: TrainingSettings) -> Spec:
    run = training.run.dir
    container = _container("ray-head", platform, size, names, stage)
    container["env"] += _env(
        {
            "RAY_USAGE_STATS_ENABLED": "0",
            # From SIGTERM to SIGKILL when a job is stopped; Ray's own 3 s are no time for a checkpoint.
            "RAY_JOB_STOP_WAIT_TIME_S": str(STOP_SECONDS),
        }
    )
    if stage == "prepare":
        container["env"] += _hugging_face(names)
    container["ports"] = [
        {"name": "gcs-server", "containerPort": 6379},
        {"name": "dashboard", "containerPort": DASHBOARD_PORT},
        {"name": "client", "containerPort": 10001},
    ]
    if _trains(stage):
        # While the run's lock is held, training goes on: ask it to stop, and wait until it has.
        lock, stop = shlex.quote(str(run / ".lock")), shlex.quote(str(run / "stop-request"))
        _before_stop(
            container, f"flock -n {lock} true || {{ touch {stop}; timeout {STOP_SECONDS} flock {lock} true; }}"
        )
    template = _template(stage, platform.core, container, names, _volumes(names, size))
    template["metadata"]["labels"] |= DASHBOARD_LABEL
    template["spec"]["initContainers"] = [_owner(platform)]
    if _trains(stage):
        template["spec"]["terminationGracePeriodSeconds"] = STOP_SECONDS + 30
    return template


def _workers(
    stage: StageName | None,
    platform: Platform,
    settings: Workloads,
    names: Names,
    nodes: int,
    training: TrainingSettings,
) -> Spec:
    shape, size = platform.workers, worker_size(settings, platform.workers)
    container = _container("ray-worker", platform, size, names, stage)
    if shape.neuron:
        cache = {"NEURON_COMPILE_CACHE_URL": str(training.cache_dir / "neuron")}
        container["env"] += _env({**NEURON_ENV, **cache, **(EFA_ENV if shape.efa else {})})
    if _trains(stage):
        # A worker that is deleted alone is a lost node: the run goes on without it, and starts over from its last
        # checkpoint. Deleted with its head, it has to stay until the checkpoint is written.
        lock, stop = (shlex.quote(str(training.run.dir / name)) for name in (".lock", "stop-request"))
        _before_stop(container, f"sleep 2; test ! -e {stop} || timeout {STOP_SECONDS} flock {lock} true")
    template = _template(stage, shape, container, names, _volumes(names, size))
    template["spec"]["affinity"] = {"podAntiAffinity": _apart(stage, required=bool(shape.neuron))}
    if _trains(stage):
        template["spec"]["terminationGracePeriodSeconds"] = STOP_SECONDS + 30
    most = settings.ray_cluster.max_nodes or nodes
    fewest = settings.ray_cluster.min_nodes if stage is None else nodes
    return {
        "groupName": WORKER_GROUP,
        "replicas": fewest,
        "minReplicas": fewest,
        "maxReplicas": most if stage is None else nodes,
        "rayStartParams": _start(size.cpu, -(-training.parallel.workers // nodes), shape.neuron_cores),
        "template": template,
    }


def _start(cpus: float, processes: int, neuron_cores: int = 0) -> dict[str, str]:
    """What Ray is told that its node has: at least a CPU for each process there, however few the pod asks for."""
    params = {"num-cpus": str(max(processes, int(cpus)))}
    if neuron_cores:
        # KubeRay tells Ray of the limit `aws.amazon.com/neuroncore` by itself, but not of the devices asked for here.
        # In single quotes: the value goes to a shell, and KubeRay reads it as JSON without them.
        params["resources"] = f"'{json.dumps({'neuron_cores': neuron_cores})}'"
    return params


def _trains(stage: StageName | None) -> bool:
    """Whether a run may be under way in the cluster of `stage`; the shared one is anyone's."""
    return stage in ("train", None)


def _container(name: str, platform: Platform, size: Size, names: Names, stage: StageName | None) -> Spec:
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


def _template(
    stage: StageName | None, shape: NodeShape, container: Spec, names: Names, volumes: Sequence[Spec]
) -> Spec:
    return {
        "metadata": {"labels": {**PART_OF, STAGE_LABEL: stage or SHARED}, "annotations": dict(KEEP_NODE)},
        "spec": {
            "serviceAccountName": names.service_account,
            "priorityClassName": names.priority_class,
            "nodeSelector": dict(shape.node_selector),
            "tolerations": [dict(each) for each in shape.tolerations],
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": list(volumes),
        },
    }


def _volumes(names: Names, size: Size) -> list[Spec]:
    """The shared volume, the settings, and shared memory for Ray's object store and what processes tell each other."""
    # What is in it counts as the container's memory: a half is more than Ray's object store takes (30 %).
    shm = {"medium": "Memory", "sizeLimit": f"{max(64, round(size.memory_gib * 512))}Mi"}
    return [
        {"name": "data", "persistentVolumeClaim": {"claimName": names.claim}},
        {"name": "shm", "emptyDir": shm},
        *([_settings_volume(names)] if names.settings is not None else []),
    ]


def _settings_volume(names: Names) -> Spec:
    return {"name": "settings", "configMap": {"name": names.settings}}


def _owner(platform: Platform) -> Spec:
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


def _apart(stage: StageName | None, required: bool) -> Spec:
    """One worker a node. Where workers have no devices of their own it is a wish: a laptop's cluster has one node."""
    term = {
        "labelSelector": {"matchLabels": {STAGE_LABEL: stage or SHARED, "ray.io/node-type": "worker"}},
        "topologyKey": "kubernetes.io/hostname",
    }
    if required:
        return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100, "podAffinityTerm": term}]}


def _before_stop(container: Spec, script: str) -> None:
    container["lifecycle"] = {"preStop": {"exec": {"command": ["/bin/sh", "-c", script]}}}


def _env(values: Mapping[str, str]) -> list[Spec]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _hugging_face(names: Names) -> list[Spec]:
    """The token, for the one stage that reads from the Hub, and a cache that outlives the pod."""
    env = _env({"HF_HOME": str(VOLUME_PATH / ".cache" / "huggingface")})
    if names.token_secret is not None:
        reference = {"secretKeyRef": {"name": names.token_secret, "key": TOKEN_KEY}}
        env.append({"name": TOKEN_KEY, "valueFrom": reference})
    return env


def _kept_in_redis(address: str, names: Names) -> Spec:
    """Options with which a new head goes on where the lost one was."""
    if names.redis_password is None:
        return {"redisAddress": address}
    password = {"valueFrom": {"secretKeyRef": {"name": names.redis_password, "key": REDIS_KEY}}}
    return {"redisAddress": address, "redisPassword": password}
