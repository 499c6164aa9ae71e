"""The watch beside a worker: it ends what hangs and what is orphaned, sees a stop, and leaves alone what works.

Where time matters the watch is given a clock and a waiting that the test moves by hand. What ends a process is proven
on processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from training import watch
from training.metrics import read_metrics
from training.rundir import RunDir
from training.watch import HANG_EXIT_CODE, Watch

ROOT = Path(__file__).parents[2]
TIMEOUT = 600.0


class Ticks:
    """Stands for the event that the watch's thread waits on: each `tick` lets it look once."""

    def __init__(self) -> None:
        self._go, self._waiting, self._closed = threading.Semaphore(0), threading.Semaphore(0), False

    def wait(self, timeout: float) -> bool:
        self._waiting.release()
        self._go.acquire()
        return self._closed

    def set(self) -> None:
        self._closed = True
        self._go.release()

    def tick(self) -> None:
        self._waiting.acquire()
        self._go.release()
        self._waiting.acquire()  # the look is over: it waits again
        self._waiting.release()


class World:
    """The clock and the operating system that the watch sees."""

    def __init__(self, run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.now, self.parent, self.exits = run, 1000.0, 77, [0][:0]
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now, time=lambda: 5.0))
        monkeypatch.setattr(watch, "os", SimpleNamespace(_exit=self.exits.append, getppid=lambda: self.parent))

    def watch(self, rank: int = 0, parent: int | None = None) -> tuple[Watch, Ticks]:
        watching, ticks = Watch(self.run, rank, TIMEOUT, parent), Ticks()
        watching._closed = ticks  # type: ignore[assignment]
        return watching, ticks


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    with monkeypatch.context() as patch:
        yield World(run, patch)


def test_no_beat_ends_the_process_and_says_why(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    watching, ticks = world.watch(rank=3)
    with watching:
        watching.beat(41, "training")
        world.now += TIMEOUT
        ticks.tick()
        assert world.exits == []  # not before the time is over
        world.now += 1
        ticks.tick()
        assert world.exits == [HANG_EXIT_CODE]
    wanted = "no progress for train.hang_timeout (600 s) while training"
    assert read_metrics(world.run.metrics) == [
        {"type": "failure", "time": 5.0, "rank": 3, "step": 41, "message": wanted}
    ]
    line = capsys.readouterr().err
    assert line == f"error: rank 3, step 41: {wanted}; the same command goes on from the last checkpoint\n"


def test_a_worker_that_never_begins_is_ended_too(world: World) -> None:
    watching, ticks = world.watch()
    with watching:
        world.now += TIMEOUT + 1
        ticks.tick()
    assert world.exits == [HANG_EXIT_CODE]
    assert "while starting" in read_metrics(world.run.metrics)[0]["message"]


def test_no_alarm_while_there_are_beats(world: World) -> None:
    """Many times the timeout in all, and each time as long as may be between two beats."""
    watching, ticks = world.watch(parent=world.parent)
    with watching:
        for step in range(20):
            watching.beat(step, "training")
            world.now += TIMEOUT
            ticks.tick()
    assert world.exits == []
    assert not world.run.metrics.exists()


def test_a_hang_ends_although_nothing_can_be_written(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(watch, "append_record", full)
    watching, _ = world.watch()
    with pytest.raises(OSError, match="No space left"):  # `_exit` returns here, and what came before goes on
        watching._end()
    assert world.exits == [HANG_EXIT_CODE]


def test_a_lost_parent_ends_the_worker(world: World) -> None:
    watching, ticks = world.watch(parent=world.parent)
    with watching:
        ticks.tick()
        assert world.exits == []
        world.parent = 1
        ticks.tick()
        assert world.exits == [HANG_EXIT_CODE]


def test_a_request_to_stop_is_seen_and_kept(world: World) -> None:
    watching, ticks = world.watch()
    with watching:
        ticks.tick()
        assert not watching.stop_requested
        world.run.request_stop()
        ticks.tick()
        assert watching.stop_requested
        world.run.begin_attempt()
        ticks.tick()
        assert watching.stop_requested


def test_the_thread_ends_with_the_context(tmp_path: Path) -> None:
    with Watch(RunDir(tmp_path), 0, TIMEOUT) as watching:
        assert watching._thread.is_alive()
    assert not watching._thread.is_alive()


HANG = """
import sys, threading
from pathlib import Path
from training.rundir import RunDir
from training.watch import Watch
with Watch(RunDir(Path(sys.argv[1])), rank=1, hang_timeout=0.2) as watch:
    watch.beat(7, "evaluating")
    threading.Event().wait()
"""

# The launcher starts a worker, says which, and is gone when its standard input ends.
ORPHAN = """
import os, subprocess, sys, threading
from pathlib import Path
from training.rundir import RunDir
from training.watch import Watch
if sys.argv[2] == "launcher":
    child = subprocess.Popen([sys.executable, "-c", sys.argv[3], sys.argv[1], str(os.getpid()), ""])
    sys.stdin.read()
    os._exit(0)
with Watch(RunDir(Path(sys.argv[1])), rank=0, hang_timeout=600, parent=int(sys.argv[2])):
    print("watching", flush=True)
    threading.Event().wait()
"""


def test_a_process_that_hangs_ends(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", HANG, str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == HANG_EXIT_CODE
    wanted = "no progress for train.hang_timeout (0.2 s) while evaluating"
    assert done.stderr.startswith(f"error: rank 1, step 7: {wanted}")
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["type"], record["rank"], record["step"], record["message"]) == ("failure", 1, 7, wanted)


def test_a_worker_ends_with_its_launcher(tmp_path: Path) -> None:
    """Its end of the pipe closes when it does, however it does."""
    argv = [sys.executable, "-c", ORPHAN, str(tmp_path), "launcher", ORPHAN]
    launcher = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "watching\n"
        os.kill(launcher.pid, 9)
        assert launcher.stdout.read() == ""
