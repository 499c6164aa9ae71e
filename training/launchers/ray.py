"""Workers as actors of Ray Train: on an embedded Ray of this machine, or on the cluster that RAY_ADDRESS names.

Ray Train starts the group again after a lost worker; where training goes on is decided by the run's own checkpoints,
so nothing of the state goes through Ray.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any

from training import environment
from training.backends import backend_name
from training.config import Settings
from training.errors import RunFailed, UserError
from training.launchers import gave_up, record_failure
from training.launchers.group import Meeting, run_attempt
from training.rundir import RunDir

OBJECT_STORE_BYTES = 256 << 20  # of an embedded Ray: nothing large goes through it
DEVICES = {"cuda": {"GPU": 1}, "neuron": {"neuron_cores": 1}}
"""What a worker asks Ray for beside its CPUs, by backend."""
STARTS = 3  # of an embedded Ray: it gives its processes 30 s, which a machine that is busy or cold may not keep to


def connect(workers: int = 1) -> None:
    """Connect this process to Ray: to the cluster of RAY_ADDRESS, else to one embedded in this process.

    `workers`: processes that must find a CPU each. Does nothing when connected already. Raises `UserError` where no
    cluster answers at RAY_ADDRESS, and `RunFailed` where the embedded Ray does not start.
    """
    os.environ.setdefault("RAY_TRAIN_V2_ENABLED", "1")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return
    if "RAY_ADDRESS" in os.environ:
        try:
            ray.init(logging_level=logging.WARNING)
        except (ConnectionError, ValueError) as error:
            address, why = os.environ["RAY_ADDRESS"], str(error).strip().partition("\n")[0]
            raise UserError(f"RAY_ADDRESS: {address}, expected the address of a running Ray ({why})") from None
        return
    for attempt in range(1, STARTS + 1):
        try:
            ray.init(
                num_cpus=max(len(os.sched_getaffinity(0)), workers),
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
            return
        except Exception as error:
            if type(error) is not Exception:  # which is what Ray raises when its processes take their time
                raise
            ray.shutdown()
            if attempt == STARTS:
                why = str(error).strip().partition(". ")[0]
                raise RunFailed(f"Ray did not start on this machine in {STARTS} attempts ({why})") from None


def precompile_on_ray(settings: Settings) -> str:
    """`precompile` as a task on a node that has the device."""
    connect(settings.parallel.workers)
    import ray

    from training.precompile import precompile

    backend = backend_name(settings)
    device = dict(DEVICES.get(backend, {}))
    task = ray.remote(
        num_cpus=_cpus_of_worker(settings),
        num_gpus=device.pop("GPU", 0),
        resources=device,
        runtime_env=_runtime_env(backend),
    )(precompile)
    summary: str = ray.get(task.remote(settings))
    return summary


def _runtime_env(backend: str) -> dict[str, dict[str, str]]:
    """The environment of workers and of what compiles for them: the same, since compiled code depends on it."""
    from training.launchers.ray_group import WORKER_ENV

    neuron = WORKER_ENV | environment.NEURON | environment.handed_over()
    return {"env_vars": neuron if backend == "neuron" else {}}


def _cpus_of_worker(settings: Settings) -> int:
    """CPUs of one worker, which Ray makes its number of threads: an even share of the cluster's."""
    import ray

    return max(1, int(ray.cluster_resources().get("CPU", 1)) // settings.parallel.workers)


def train_on_ray(settings: Settings) -> None:
    """Train on `parallel.workers` workers of Ray Train. Raises `RunFailed` after `run.max_failures` restarts."""
    settings = settings.absolute()  # Ray Train starts its workers in a folder of its own
    workers, since = settings.parallel.workers, time.time()
    connect(workers)
    import ray
    from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError, UserCallback
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

    from training.launchers.ray_group import RayGroup

    class RecordFailures(UserCallback):  # type: ignore[misc]  # ray is not typed
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            for rank, error in worker_exceptions.items():
                if isinstance(error, RunFailed):
                    continue  # recorded where it was raised
                error = getattr(error, "health_check_failure", error)  # Ray Train wraps what happened to an actor
                lost = isinstance(error, ray.exceptions.RayActorError)
                what = "the worker was lost" if lost else type(error).__name__
                record_failure(settings, rank, f"{what} ({str(error).strip().partition(chr(10))[0]})")

    backend = backend_name(settings)
    device = DEVICES.get(backend, {})
    meeting = Meeting(ray.util.get_node_ip_address())
    run = RunDir(settings.run.dir)
    trainer = DataParallelTrainer(
        _worker,
        train_loop_config={"settings": settings.model_dump(mode="json")},
        backend_config=RayGroup(meeting.address),
        scaling_config=ScalingConfig(
            num_workers=workers,
            use_gpu=backend == "cuda",
            resources_per_worker={"CPU": _cpus_of_worker(settings)} | device,
        ),
        run_config=RunConfig(
            name=settings.run.dir.name,
            storage_path=str(settings.run.dir / "ray"),
            failure_config=FailureConfig(max_failures=settings.run.max_failures),
            callbacks=[RecordFailures()],
            worker_runtime_env=_runtime_env(backend),
        ),
    )
    # On a thread of its own: Ray Train would otherwise take SIGINT for itself and end the run without a checkpoint.
    ended: list[BaseException | None] = []

    def fit() -> None:
        try:
            trainer.fit()
            ended.append(None)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            ended.append(error)

    thread = threading.Thread(target=fit, name="ray-train", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)  # short waits, so that a signal's handler runs at once
    if isinstance(ended[0], TrainingFailedError):
        if run.outcome():  # it ended, and a worker was lost on its way out
            return
        raise gave_up(settings, since, str(ended[0]).strip()) from ended[0]
    if ended[0] is not None:
        raise ended[0]


def _worker(config: dict[str, Any]) -> None:
    """What every Ray Train worker runs."""
    from training.launchers.ray_group import world_of_ray
    from training.trainer import train

    settings = Settings.model_validate(config["settings"])
    world = world_of_ray()
    run_attempt(settings, world, lambda: train(settings, world))
