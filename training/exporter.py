"""A run's numbers for Prometheus: among Ray's own metrics where Ray runs it, and at an endpoint where one is asked for.

    python -m training train --preset tiny --run.metrics_address 127.0.0.1:9400
    curl http://127.0.0.1:9400/metrics

The launcher's process has them from the run's `metrics.jsonl` (`training.progress.FollowMetrics`): the workers know
nothing of it, so that neither a slow scrape nor a package that is not there can hold up or end a run. There is one
endpoint a run, wherever rank 0 is. Ray puts `ray_` before the names, which Prometheus takes off again
(workloads/monitoring.py).
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from training.config import Settings
from training.errors import UserError
from training.metrics import Record

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

PREFIX = "llama_trainium_"


@dataclass(frozen=True)
class Measure:
    """A gauge, and the records that it is read from: those of type `record`, at `key`; none: see `RunMetrics`."""

    name: str
    help: str
    record: str = ""
    key: str = ""


# Gauges all of them, also of what only grows: a run that goes on from a checkpoint is some steps back again, which
# Prometheus would take for the restart of a counter.
MEASURES = (
    Measure("training", "1 while the launcher trains, 0 when it has ended"),
    Measure("target_steps", "steps of the whole run (train.steps)"),
    Measure("last_progress_timestamp_seconds", "when the run last got on: started, made a step, evaluated, saved"),
    Measure("restarts", "times that training was begun again, by itself or by the same command"),
    Measure("workers", "workers of the run", "start", "workers"),
    Measure("step", "optimizer steps done", "train", "step"),
    Measure("tokens", "tokens trained on", "train", "tokens"),
    Measure("loss", "training loss of the last step", "train", "loss"),
    Measure("learning_rate", "learning rate of the last step", "train", "lr"),
    Measure("grad_norm", "norm of the gradient before clipping", "train", "grad_norm"),
    Measure("tokens_per_second", "tokens a second over all workers, of the last step", "train", "tokens_per_second"),
    Measure("step_seconds", "seconds of the last step", "train", "step_seconds"),
    Measure("mfu_ratio", "model FLOPs utilisation of the last step, a share of 1", "train", "mfu"),
    Measure("data_wait_seconds", "seconds that the last step waited for data on rank 0", "train", "data_wait_seconds"),
    Measure("validation_loss", "loss of the last evaluation", "valid", "loss"),
    Measure("checkpoint_step", "step of the last checkpoint", "checkpoint", "step"),
    Measure(
        "checkpoint_stall_seconds", "seconds that training stood still for it on rank 0", "checkpoint", "stall_seconds"
    ),
)
PROGRESS = ("start", "train", "valid", "checkpoint")
"""Types of records that say that a run gets on."""

Sink = Callable[[dict[str, float]], None]
"""Takes the newest values by name, without PREFIX."""


class RunMetrics:
    """The newest value of each measure, from records in the order in which the run wrote them."""

    def __init__(self, settings: Settings, sinks: Sequence[Sink], clock: Callable[[], float] = time.time) -> None:
        self.values: dict[str, float] = {
            "training": 1,
            "target_steps": settings.train.steps,
            "last_progress_timestamp_seconds": clock(),
        }
        self._starts: set[float] = set()  # by time: a run that resumes writes its history anew
        self._sinks = sinks

    def take(self, records: Sequence[Record]) -> None:
        """What the run's file has gained."""
        for record in records:
            for measure in MEASURES:
                value = record.get(measure.key) if measure.record == record["type"] else None
                if isinstance(value, int | float):
                    self.values[measure.name] = value
            if record["type"] == "start":
                self._starts.add(record["time"])
                self.values["restarts"] = len(self._starts) - 1
            if record["type"] in PROGRESS:
                at = "last_progress_timestamp_seconds"
                self.values[at] = max(self.values[at], record["time"])
        self._show()

    def end(self) -> None:
        """The launcher has no more to say of the run."""
        self.values["training"] = 0
        self._show()

    def _show(self) -> None:
        for sink in self._sinks:
            sink(self.values)


@contextlib.contextmanager
def exporting(settings: Settings) -> Iterator[RunMetrics]:
    """What a launcher hands the records of its run to. Raises `UserError` where the endpoint cannot be had."""
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if settings.run.launcher == "ray":
            sinks.append(_ray_sink(settings.run.dir.name))
        if settings.run.metrics_address is not None:
            sinks.append(stack.enter_context(_endpoint(settings.run.metrics_address, settings.run.dir.name)))
        metrics = RunMetrics(settings, sinks)
        stack.callback(metrics.end)
        yield metrics


def _ray_sink(run: str) -> Sink:
    """Ray's metrics, of which the agent of this node tells Prometheus."""
    gauges: dict[str, Any] = {}

    def show(values: dict[str, float]) -> None:
        ray = sys.modules.get("ray")
        if ray is None or not ray.is_initialized():  # a gauge that is made before has no effect, then or later
            return
        from ray.util.metrics import Gauge

        if not gauges:
            for measure in MEASURES:
                gauges[measure.name] = Gauge(PREFIX + measure.name, description=measure.help, tag_keys=("run",))
        for name, value in values.items():
            gauges[name].set(value, tags={"run": run})

    return show


@contextlib.contextmanager
def _endpoint(address: str, run: str) -> Iterator[Sink]:
    """http://ADDRESS/metrics while the block runs."""
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        wanted = "none without the package prometheus-client, or that package (requirements-training.txt)"
        raise UserError(f"run.metrics_address: {address}, expected {wanted}") from None
    host, _, port = address.rpartition(":")
    registry = CollectorRegistry()
    gauges = _gauges(registry)

    def show(values: dict[str, float]) -> None:
        for name, value in values.items():
            gauges[name].labels(run=run).set(value)

    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except OSError as error:
        why = error.strerror or error
        raise UserError(
            f"run.metrics_address: {address}, expected an address that is free on this machine ({why})"
        ) from None
    try:
        yield show
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _gauges(registry: CollectorRegistry) -> dict[str, Any]:
    from prometheus_client import Gauge

    return {each.name: Gauge(PREFIX + each.name, each.help, ["run"], registry=registry) for each in MEASURES}
