"""Workers on this machine, without Ray: this process itself for one worker, else one process each."""

from __future__ import annotations

import os
import signal
import time

from torch.multiprocessing.spawn import ProcessException, ProcessExitedException, start_processes

from training.backends import World
from training.config import Settings
from training.errors import RunFailed
from training.launchers import gave_up, record_failure
from training.launchers.group import Meeting, run_attempt, started_environment
from training.rundir import RunDir
from training.trainer import train
from training.watch import HANG_EXIT_CODE


def train_locally(settings: Settings) -> None:
    """Train on `parallel.workers` processes of this machine, restarting them after a fault.

    Raises `RunFailed` after `run.max_failures` restarts.
    """
    since = time.time()
    for attempt in range(settings.run.max_failures + 1):
        try:
            if settings.parallel.workers == 1:
                run_attempt(settings, World(), lambda: train(settings, World()))
            else:
                _start_workers(settings)
            return
        except (RunFailed, ProcessException) as error:
            _record_lost(settings, error)
            run = RunDir(settings.run.dir)
            if run.outcome():  # it ended, and a worker was lost on its way out
                return
            if attempt == settings.run.max_failures or run.stop_requested():
                raise gave_up(settings, since, str(error)) from error


def _start_workers(settings: Settings) -> None:
    started_environment(settings)
    meeting = Meeting("127.0.0.1")
    # The first worker that fails takes the others down with it; all of them take part in the next attempt.
    args = (settings, meeting.of_attempt(), os.getpid())
    start_processes(_worker, args=args, nprocs=settings.parallel.workers, start_method="spawn")


def _worker(rank: int, settings: Settings, meeting: str, parent: int) -> None:
    # gloo announces its connections on standard output; what a worker has to say is in the run's folder.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    # A signal from the terminal reaches every process of the group; the launcher alone acts on it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    size = settings.parallel.workers
    world = World(rank, size, rank, size, meeting)
    run_attempt(settings, world, lambda: train(settings, world, parent))


def _record_lost(settings: Settings, error: Exception) -> None:
    if isinstance(error, ProcessExitedException) and error.exit_code != HANG_EXIT_CODE:
        how = error.signal_name or f"exit code {error.exit_code}"
        record_failure(settings, error.error_index, f"the worker was lost ({how})")
