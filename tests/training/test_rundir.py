"""The folder of a run: one user at a time, whole files, a record of its stages, requests to stop."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.config import Settings, load_settings
from training.errors import UserError
from training.rundir import RunDir, write_atomically

ROOT = Path(__file__).parents[2]

# Holds one of the run's locks until it is killed, as a process that was lost would.
HOLD = """
import sys
from pathlib import Path
from training.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
with run.lock() if sys.argv[2] == "lock" else run.writer_lock(0):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    return run


def hold(run: RunDir, which: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-c", HOLD, str(run.path), which]
    holder = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    return holder


def test_the_lock_is_one_processes_and_dies_with_it(run: RunDir) -> None:
    with hold(run, "lock") as holder:
        with pytest.raises(UserError, match=f"is in use by process {holder.pid} on ") as refusal, run.lock():
            pytest.fail("two held the run")
        assert str(refusal.value).startswith(f"run.dir: {run.path} is in use by ")
        holder.kill()
    with run.lock():
        pass


def test_the_lock_is_free_after_use_and_after_an_error(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "not" / "there" / "yet")
    for error in (KeyboardInterrupt, UserError):
        with pytest.raises(error), run.lock():
            raise error
    with run.lock(), pytest.raises(UserError, match=f"process {os.getpid()} on "), RunDir(run.path).lock():
        pytest.fail("two held the run")


def test_an_error_inside_the_lock_is_not_taken_for_the_locks(run: RunDir) -> None:
    with pytest.raises(OSError, match="broken"), run.lock():
        raise OSError("broken")


def test_the_writer_lock_waits_and_then_says_so(run: RunDir) -> None:
    with hold(run, "writer") as holder:
        with pytest.raises(UserError, match="is still written to by an earlier attempt after 0 s"), run.writer_lock(0):
            pytest.fail("two wrote to the run")
        holder.kill()
        with run.writer_lock(60):  # returns when the one before is gone
            pass


def test_the_two_locks_are_different(run: RunDir) -> None:
    with run.lock(), run.writer_lock(0):
        pass


def test_stages_are_recorded_as_they_end(run: RunDir) -> None:
    assert run.stages() == {}
    with run.stage("prepare") as done:
        assert run.stages()["prepare"]["status"] == "running"
        done("12 documents")
    with pytest.raises(ValueError, match="x"), run.stage("train") as done:
        raise ValueError("x")
    with pytest.raises(KeyboardInterrupt), run.stage("report") as done:
        raise KeyboardInterrupt
    stages = run.stages()
    assert {name: stage["status"] for name, stage in stages.items()} == {
        "prepare": "done",
        "train": "failed",
        "report": "failed",
    }
    assert stages["prepare"]["summary"] == "12 documents"
    assert all(set(stage) == {"status", "started", "seconds", "summary"} for stage in stages.values())
    with run.stage("train") as done:
        done("5 steps")
    assert run.stages()["train"]["status"] == "done"
    assert run.stages()["prepare"] == stages["prepare"]


def test_two_stages_at_a_time_do_not_lose_one_another(run: RunDir) -> None:
    """`report` runs beside `train`: each writes the file that the other writes too."""
    with RunDir(run.path).stage("train") as trained:
        with RunDir(run.path).stage("report") as reported:
            trained("5 steps")
            reported("page")
    assert {name: stage["summary"] for name, stage in run.stages().items()} == {"train": "5 steps", "report": "page"}


@pytest.mark.parametrize("content", ["", "{", "\0"])
def test_a_file_that_is_not_ours_is_named(run: RunDir, content: str) -> None:
    (run.path / "stages.json").write_text(content)
    with pytest.raises(UserError, match=r"stages\.json: not JSON, expected"):
        run.stages()


def test_settings_are_written_as_yaml_that_reads_back(run: RunDir) -> None:
    settings = load_settings(preset="tiny", overrides={"run.dir": "runs/ü", "train.seed": "7"})
    run.write_settings(settings)
    assert load_settings(config=run.settings).resolved() == settings.resolved()
    run.write_settings(Settings())
    assert load_settings(config=run.settings).resolved() == Settings().resolved()


@pytest.mark.parametrize("broken", ["os.fsync", "os.replace"])
def test_a_write_that_fails_leaves_what_was_there(run: RunDir, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    path = run.path / "file"
    write_atomically(path, "first")

    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(broken, full)
    with pytest.raises(UserError, match=r"file: cannot be written \(No space left on device\)"):
        write_atomically(path, "second")
    assert path.read_text() == "first"
    assert list(run.path.iterdir()) == [path]


def test_a_stop_is_asked_for_once(run: RunDir) -> None:
    assert not run.stop_requested()
    run.request_stop()
    assert RunDir(run.path).stop_requested()
    run.write_outcome("stopped", "after step 3")
    assert run.outcome() == {"status": "stopped", "message": "after step 3"}
    run.begin_attempt()
    assert not run.stop_requested()
    assert run.outcome() == {}
    RunDir(run.path / "gone").request_stop()  # in a signal handler: never an error


def test_storage_that_fails_to_say_is_no_stop(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def stale(path: Path) -> bool:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(Path, "exists", stale)
    assert not run.stop_requested()
