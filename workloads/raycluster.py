"""What KubeRay makes of a stage: the spec of its RayCluster, as plain data in Kubernetes' words.

    spec = ray_cluster_spec("train", platform, settings, names, nodes=16, training=training)

prepare is one pod on a core node: the head has the CPUs. For the others the head, on a core node too, has none, so that
nothing runs there but what hands out the work, and each worker pod has a node to itself.
"""

from __future__ import annotations

import json

from training.config import Settings as TrainingSettings
from workloads import pods
from workloads.base import REDIS_KEY, TOKEN_KEY
from workloads.labels import DASHBOARD_LABEL, DASHBOARD_PORT, METRICS, RAY_METRICS_PORT, STAGE_LABEL
from workloads.platform import VOLUME_PATH, Platform
from workloads.pods import (
    LOCKED,
    SETTINGS_MOUNT,
    STOP_GRACE,
    STOP_SECONDS,
    Names,
    Spec,
    apart,
    before_stop,
    device_env,
    env,
    owner,
    settings_volume,
    volumes,
)
from workloads.settings import StageName, Workloads
from workloads.sizes import SUBMITTER, Size, head_size, prepare_size, worker_size
from workloads.versions import RAY

SHARED = "shared"
"""Stands for a stage in the labels of the cluster that stages share."""

WORKER_GROUP = "workers"

RAY_METRICS = {"name": METRICS, "containerPort": RAY_METRICS_PORT}
"""KubeRay adds it where it is missing, and has Ray listen there."""


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
    if stage is not None or not settings.gang:
        spec["headGroupSpec"]["template"]["metadata"]["labels"] |= DASHBOARD_LABEL
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
    template = pods.template(stage, platform.core, container, names, [settings_volume(names)] if with_settings else [])
    template["spec"]["restartPolicy"] = "Never"
    return template


def _head(stage: StageName | None, platform: Platform, size: Size, names: Names, training: TrainingSettings) -> Spec:
    container = pods.container("ray-head", platform, size, names)
    container["env"] += env(
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
        RAY_METRICS,
    ]
    if _trains(stage):
        before_stop(container, pods.ask_to_stop(training.run.dir))
    template = pods.template(
        stage or SHARED, platform.core, container, names, volumes(names, size), STOP_GRACE if _trains(stage) else None
    )
    template["spec"]["initContainers"] = [owner(platform)]
    # The pod's first process is then one that takes leave of the dead. `ray start`, which it would be otherwise, does
    # not, and Ray waits for all that a job has started: a job that is stopped would hold its nodes for STOP_SECONDS.
    template["spec"]["shareProcessNamespace"] = True
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
    container = pods.container("ray-worker", platform, size, names)
    container["ports"] = [RAY_METRICS]
    if shape.neuron:
        # Ray would give each worker process the cores it counts; which rank has which core is training's to say.
        cores = {"RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1"}
        container["env"] += env({**device_env(shape), **cores})
    if _trains(stage):
        before_stop(container, pods.wait_for_stop(training.run.dir))
    grace = STOP_GRACE if _trains(stage) else None
    template = pods.template(stage or SHARED, shape, container, names, volumes(names, size), grace)
    own = {STAGE_LABEL: stage or SHARED, "ray.io/node-type": "worker"}
    template["spec"]["affinity"] = apart(own, required=bool(shape.neuron))
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


def _hugging_face(names: Names) -> list[Spec]:
    """The token, for the one stage that reads from the Hub, and a cache that outlives the pod."""
    variables = env({"HF_HOME": str(VOLUME_PATH / ".cache" / "huggingface")})
    if names.token_secret is not None:
        reference = {"secretKeyRef": {"name": names.token_secret, "key": TOKEN_KEY}}
        variables.append({"name": TOKEN_KEY, "valueFrom": reference})
    return variables


def _kept_in_redis(address: str, names: Names) -> Spec:
    """Options with which a new head goes on where the lost one was."""
    if names.redis_password is None:
        return {"redisAddress": address}
    password = {"valueFrom": {"secretKeyRef": {"name": names.redis_password, "key": REDIS_KEY}}}
    return {"redisAddress": address, "redisPassword": password}
