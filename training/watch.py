"""A thread beside the training loop of every worker: ends an attempt that hangs, sees requests to stop.

A collective that waits for a lost worker, or a device that does not answer, cannot be interrupted from Python; the one
remedy is to end the process, say why, and let the launcher start the group again from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from training.messages import ranks
from training.metrics import append_record
from training.rundir import RunDir

POLL_SECONDS = 0.25
HANG_EXIT_CODE = 3
ASKING_SECONDS = 10.0  # at most, for who else is there: nothing may keep a process that hangs from ending


class Watch:
    """Watches one worker while the context is open.

    Args:
        run: its folder; failures are recorded in its metrics file.
        rank: for the message.
        hang_timeout: seconds between two calls of `beat` after which the process is ended.
        parent: process id that must stay the parent (a launcher that is killed takes its workers along), or None.
        silent: called when the time is over, gives the ranks that say nothing any more.
    """

    def __init__(
        self,
        run: RunDir,
        rank: int,
        hang_timeout: float,
        parent: int | None = None,
        silent: Callable[[], list[int]] = list,
    ) -> None:
        self.stop_requested = False
        """A stop was asked for; rank 0 tells the others, so that all end after the same step."""
        self._run, self._rank, self._timeout, self._parent = run, rank, hang_timeout, parent
        self._silent = silent
        self._step, self._doing = 0, "starting"
        self._beat_at = time.monotonic()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="watch", daemon=True)

    def beat(self, step: int, doing: str) -> None:
        """Progress was made: the worker now does `doing` of `step`."""
        self._step, self._doing, self._beat_at = step, doing, time.monotonic()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closed.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._closed.wait(min(POLL_SECONDS, self._timeout / 4)):
            self.stop_requested = self.stop_requested or self._run.stop_requested()
            if self._parent is not None and os.getppid() != self._parent:
                os._exit(HANG_EXIT_CODE)
            if time.monotonic() - self._beat_at > self._timeout:
                self._end()

    def _end(self) -> None:
        message = f"no progress for train.hang_timeout ({self._timeout:g} s) while {self._doing}{self._lost()}"
        record = {"type": "failure", "time": time.time(), "rank": self._rank, "step": self._step, "message": message}
        where = f"rank {self._rank}, step {self._step}"
        try:
            print(f"error: {where}: {message}; the same command goes on from the last checkpoint", file=sys.stderr)
            sys.stderr.flush()
            append_record(self._run.metrics, record)
        finally:  # whatever cannot be written, the process ends: the launcher waits for that
            os._exit(HANG_EXIT_CODE)

    def _lost(self) -> str:
        """`, no word from rank 3`, if others say nothing any more: what ends them all is with those."""
        silent: list[int] = []

        def ask() -> None:
            with contextlib.suppress(Exception):  # whom it would ask may be what is lost
                silent.extend(self._silent())

        asking = threading.Thread(target=ask, name="silent-ranks", daemon=True)
        asking.start()
        asking.join(ASKING_SECONDS)
        return f", no word from {ranks(silent)}" if silent else ""
