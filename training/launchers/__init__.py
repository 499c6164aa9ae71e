"""What starts the same `train()` on every worker of a run."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator

from training.config import Settings
from training.errors import RunFailed, UserError
from training.metrics import append_record, read_metrics
from training.rundir import RunDir


class Stopped(Exception):
    """Training ended early because it was asked to, after writing a checkpoint. `exit_code` is that of the signal."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch_train(settings: Settings) -> str:
    """Train to the end by the launcher of the settings; returns a one-line summary.

    The first SIGINT or SIGTERM asks the run to write a checkpoint and end, which raises `Stopped`; a second SIGINT is
    a KeyboardInterrupt at once. Raises `RunFailed` when the run gave up and `UserError` for what a restart cannot mend.
    """
    if settings.run.launcher == "ray":
        from training.launchers.ray import connect
        from training.launchers.ray import train_on_ray as start

        # Before our handlers are in place: a process that connects to Ray is given one for SIGTERM, which ends it.
        connect(settings.parallel.workers)
    elif settings.run.launcher == "mpi":
        from training.launchers.mpi import train_on_mpi as start
    else:
        from training.launchers.local import train_locally as start
    run = RunDir(settings.run.dir)
    run.begin_attempt()
    with _stop_on_signals(run) as received:
        start(settings)
    outcome = run.outcome()
    if outcome.get("status") == "user_error":
        raise UserError(outcome["message"])
    if outcome.get("status") == "stopped":
        raise Stopped(outcome["message"], 128 + (received[0] if received else signal.SIGTERM))
    if outcome.get("status") != "done":
        raise RunFailed("training ended without an outcome; the same command goes on from the last checkpoint")
    return str(outcome["message"])


def gave_up(settings: Settings, since: float, fallback: str) -> RunFailed:
    """The error of a run whose restarts are used up: the last failure recorded after time `since`, or `fallback`."""
    records = read_metrics(RunDir(settings.run.dir).metrics)
    failures = [r for r in records if r["type"] == "failure" and r["time"] >= since]
    what = "rank {rank}, step {step}: {message}".format(**failures[-1]) if failures else fallback
    return RunFailed(f"{what}; the same command goes on from the last checkpoint")


def record_failure(settings: Settings, rank: int, message: str) -> None:
    """Record the failure of a worker that could not do it itself; the step is the last that was recorded."""
    path = RunDir(settings.run.dir).metrics
    step = max((r["step"] for r in read_metrics(path) if r["type"] == "train"), default=0)
    append_record(path, {"type": "failure", "time": time.time(), "rank": rank, "step": step, "message": message})


def note_once(settings: Settings, message: str) -> None:
    """Record a line for whoever looks at the run, unless the run has it already."""
    path = RunDir(settings.run.dir).metrics
    if not any(r["type"] == "note" and r["message"] == message for r in read_metrics(path)):
        append_record(path, {"type": "note", "time": time.time(), "step": 0, "message": message})


@contextlib.contextmanager
def _stop_on_signals(run: RunDir) -> Iterator[list[int]]:
    received: list[int] = []

    def handle(number: int, frame: object) -> None:
        if received and number == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(number)
        run.request_stop()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
