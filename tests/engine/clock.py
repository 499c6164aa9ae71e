"""A clock that stands still while the engine works, and jumps to the next thing to be done when it waits.

AWS's minutes then cost nothing, and what the machine takes to start Python and plugins is not mistaken for AWS's: at
1:100 it would be a third of the whole. The engine waits when no process of its run has been running, and none has
asked the cloud for anything, for a while.
"""

from __future__ import annotations

import heapq
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SAMPLE = 0.02  # seconds between two looks at the processes
QUIET = 30  # looks in a row that must find nothing running


class RealClock:
    """The machine's own time, for waits that really take it."""

    def now(self) -> float:
        """Seconds."""
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)

    def touch(self) -> None:
        """Somebody asked the cloud for something."""


class StillClock(RealClock):
    """Seconds of AWS. `run` keeps it going while the engine runs."""

    def __init__(self) -> None:
        self.time = 0.0
        self.touched = 0
        self.alarms: list[tuple[float, int, threading.Event]] = []
        self.lock = threading.Lock()

    def now(self) -> float:
        """Seconds of AWS since the start."""
        return self.time

    def wait(self, seconds: float) -> None:
        """Until the clock has come that far; at once for no time."""
        self.touch()
        if seconds:
            done = threading.Event()
            with self.lock:
                heapq.heappush(self.alarms, (self.time + seconds, id(done), done))
            done.wait()

    def touch(self) -> None:
        """Something happens: it does not stand still."""
        self.touched += 1

    @contextmanager
    def running(self) -> Iterator[None]:
        """Jump ahead whenever nothing runs below this process, while the block does."""
        stop = threading.Event()
        thread = threading.Thread(target=self._run, args=(stop,))
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def _run(self, stop: threading.Event) -> None:
        quiet, seen = 0, -1
        while not stop.wait(SAMPLE):
            quiet = 0 if busy() or seen != self.touched else quiet + 1
            seen = self.touched
            if quiet >= QUIET and self.alarms:
                quiet = 0
                with self.lock:
                    self.time = self.alarms[0][0]
                    while self.alarms and self.alarms[0][0] <= self.time:
                        heapq.heappop(self.alarms)[2].set()


def busy() -> bool:
    """Whether a process below this one is running, ready to run, or waiting for a disk."""
    parents, states = {}, {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                for thread in (entry / "task").iterdir():
                    state, parent = (thread / "stat").read_text().rpartition(")")[2].split()[:2]
                    parents[int(entry.name)] = int(parent)
                    states.setdefault(int(entry.name), set()).add(state)
            except OSError:
                continue  # gone while we looked

    def below(pid: int) -> bool:
        while pid in parents:
            pid = parents[pid]
            if pid == os.getpid():
                return True
        return False

    return any(state & {"R", "D"} and below(pid) for pid, state in states.items())
