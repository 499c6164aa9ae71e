"""A stage as an MPIJob: its spec, as plain data in Kubernetes' words. The twin of rayjob.py.

    spec = mpi_job_spec("train", platform, settings, names, nodes=16, training=training)

The launcher, on a core node, runs the stage's own command, which starts processes on the workers by mpirun over ssh and
again from the last checkpoint where one is lost; a worker pod has a node to itself, and is an sshd until then.
"""

from __future__ import annotations

from pathlib import Path

from training.config import Settings as TrainingSettings
from workloads import pods
from workloads.labels import METRICS, RUN_METRICS_PORT, STAGE_LABEL
from workloads.platform import SETTINGS_PATH, Platform
from workloads.pods import STOP_GRACE, Names, Spec, apart, before_stop, device_env, env, owner, volumes
from workloads.settings import StageName, Workloads
from workloads.sizes import Size, head_size, worker_size

SSH_PORT = 2222  # below 1024 only root may listen
SSH_KEYS = "/etc/mpi-ssh"
"""Where the operator puts the job's key, made for this job, into all of its pods."""

SSH = (
    # The operator's own OMPI_MCA_plm_rsh_args comes behind ours and wins; what runs ssh is ours to say.
    f"ssh -p {SSH_PORT} -i {SSH_KEYS}/id_rsa -o IdentitiesOnly=yes -o BatchMode=yes -o LogLevel=ERROR "
    # Host keys are made when pods start. The way to them is the job's own Service, and the network policy's.
    "-o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
)
OPEN_MPI = {
    "OMPI_MCA_plm_rsh_agent": SSH,
    # Ranks have threads of their own, which binding would put on one CPU.
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def mpi_job_spec(
    stage: StageName,
    platform: Platform,
    settings: Workloads,
    names: Names,
    nodes: int,
    training: TrainingSettings,
) -> Spec:
    """Spec of the MPIJob of precompile or train; prepare is one pod, which needs no MPI.

    `nodes` are those that train, `training` the settings as pods have them (`on_volume`).
    """
    limits = settings.stage(stage)
    head, worker = head_size(settings, platform.core), worker_size(settings, platform.workers)
    policy: Spec = {
        # The accelerators are given back at the end, however it ended. The launcher stays, with its log.
        "cleanPodPolicy": "All",
        "backoffLimit": limits.backoff_limit,
        "schedulingPolicy": {
            # All workers or none. The launcher comes when they are ready, so the gang must not wait for it.
            "minAvailable": nodes,
            # The operator's own sum for that number takes the launcher for one of the workers, and a gang that is one
            # node short would be let in (infra/operators.py says what an autoscaler then does not see).
            "minResources": _sum(head, worker, nodes).resources(),
            "queue": names.queue,
            "priorityClass": names.priority_class,
        },
    }
    if limits.active_deadline_seconds is not None:
        policy["activeDeadlineSeconds"] = limits.active_deadline_seconds
    return {
        "mpiImplementation": "OpenMPI",
        "slotsPerWorker": -(-training.parallel.workers // nodes),
        "sshAuthMountPath": SSH_KEYS,
        # On nodes that have just been added, workers are minutes apart: a launcher would give up before the last.
        "launcherCreationPolicy": "WaitForWorkersReady",
        "runPolicy": policy,
        "mpiReplicaSpecs": {
            "Launcher": {
                "replicas": 1,
                "restartPolicy": "Never",
                "template": _launcher(stage, platform, head, names, training),
            },
            "Worker": {
                "replicas": nodes,
                "restartPolicy": "OnFailure",
                "template": _worker(stage, platform, worker, names, training),
            },
        },
    }


def _launcher(stage: StageName, platform: Platform, size: Size, names: Names, training: TrainingSettings) -> Spec:
    container = pods.container("mpi-launcher", platform, size, names)
    container["command"] = ["python3", "-m", "training", stage, "--config", str(SETTINGS_PATH), "--launcher", "mpi"]
    container["env"] += env(OPEN_MPI)
    if stage == "train":
        before_stop(container, pods.ask_to_stop(training.run.dir))
        if platform.prometheus is not None:
            # On the command line and not among the settings, which decide about the job's name: a run is not begun
            # anew because somebody looks at it.
            container["command"] += ["--run.metrics_address", f"0.0.0.0:{RUN_METRICS_PORT}"]
            container["ports"] = [{"name": METRICS, "containerPort": RUN_METRICS_PORT}]
    grace = STOP_GRACE if stage == "train" else None
    template = pods.template(stage, platform.core, container, names, volumes(names, size), grace)
    template["spec"]["initContainers"] = [owner(platform)]
    return template


def _worker(stage: StageName, platform: Platform, size: Size, names: Names, training: TrainingSettings) -> Spec:
    shape = platform.workers
    container = pods.container("mpi-worker", platform, size, names)
    container["command"] = ["python3", "-c", Path(__file__).with_name("mpi_worker.py").read_text(encoding="utf-8")]
    container["env"] += env({**device_env(shape), "SSH_PORT": str(SSH_PORT), "SSH_KEYS": SSH_KEYS})
    container["ports"] = [{"name": "ssh", "containerPort": SSH_PORT}]
    container["readinessProbe"] = {"tcpSocket": {"port": "ssh"}, "periodSeconds": 5}
    if stage == "train":
        before_stop(container, pods.wait_for_stop(training.run.dir))
    grace = STOP_GRACE if stage == "train" else None
    template = pods.template(stage, shape, container, names, volumes(names, size), grace)
    own = {STAGE_LABEL: stage, "training.kubeflow.org/job-role": "worker"}
    template["spec"]["affinity"] = apart(own, required=bool(shape.neuron))
    return template


def _sum(head: Size, worker: Size, nodes: int) -> Size:
    devices = {name: count * nodes for name, count in worker.devices.items()}
    return Size(head.cpu + nodes * worker.cpu, head.memory_gib + nodes * worker.memory_gib, devices)
