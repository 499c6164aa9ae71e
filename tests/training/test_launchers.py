"""The command line on an embedded Ray: the same losses as without it, a lost worker, a Ctrl-C."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from makers import SettingsMaker, TokenStoreMaker
from processes import launch, losses_of, records_of, start, steps_of, until, weights_of, while_running

from training.config import Settings
from training.errors import RunFailed

ROOT = Path(__file__).parents[2]
Command = Callable[[Settings], subprocess.Popen[str]]


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[[Settings], subprocess.Popen[str]]]:
    """Starts `python -m training train --launcher ray` in a process group of its own, as a terminal does."""
    started: list[subprocess.Popen[str]] = []

    def run(settings: Settings) -> subprocess.Popen[str]:
        file = tmp_path / f"{settings.run.dir.name}.yaml"
        file.write_text(yaml.safe_dump(settings.resolved()))
        line = [sys.executable, "-m", "training", "train", "--config", str(file), "--launcher", "ray"]
        started.append(subprocess.Popen(line, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True))
        return started[-1]

    yield run
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def train_workers(process: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of Ray's actors that train, below the command."""
    below = psutil.Process(process.pid).children(recursive=True)
    return [p for p in below if any("RayTrainWorker" in part for part in p.cmdline())]


def test_ray_restarts_a_lost_worker_and_stops_on_ctrl_c(
    tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker, command: Command
) -> None:
    token_store(tmp_path / "data")
    shape = {"train__steps": 2000, "checkpoint__every": 10, "train__eval_every": 2000, "parallel__workers": 2}
    settings = small_settings(tmp_path, **shape, run__max_failures=1)
    process = command(settings)
    while_running(process, lambda: list(settings.checkpoint_dir.glob("step-*")))  # written in the background
    workers = train_workers(process)
    assert len(workers) == 2
    workers[1].kill()

    while_running(process, lambda: len(records_of(settings, "start")) == 2)
    again = records_of(settings, "start")[1]["step"]
    assert again >= 10
    failures = records_of(settings, "failure")  # the other rank's collective fails too, or it is ended first
    assert [f["rank"] for f in failures if "the worker was lost" in f["message"]] == [1]
    assert all(f["step"] >= 10 for f in failures)

    while_running(process, lambda: max(steps_of(settings)) > again + 5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "stopped after step" in errors
    assert "Traceback" not in errors
    step, _ = weights_of(settings)
    assert step == max(steps_of(settings))

    # Without Ray, the run goes on from there; and all of it is what two workers without Ray and faults give.
    rest = small_settings(tmp_path, **shape | {"train__steps": 2000}, run__dir=tmp_path / "plain")
    child = start(launch, rest)
    until(lambda: max(steps_of(rest), default=0) > step, child)
    os.kill(child.pid, signal.SIGTERM)
    wait([child.sentinel], 120)
    expected = losses_of(rest)
    assert losses_of(settings) == {number: expected[number] for number in range(1, step + 1)}


def test_sigterm_is_the_run_s_and_not_ray_s(
    tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker, command: Command
) -> None:
    token_store(tmp_path / "data")
    settings = small_settings(tmp_path, train__steps=2000, checkpoint__every=1000, train__eval_every=2000)
    process = command(settings)
    while_running(process, lambda: max(steps_of(settings), default=0) > 5)
    process.terminate()  # as `ray job stop` does
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 128 + signal.SIGTERM
    assert "stopped after step" in errors
    step, _ = weights_of(settings)
    assert step == max(steps_of(settings))


def test_a_run_that_keeps_failing_gives_up_with_one_line(
    tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker, command: Command
) -> None:
    token_store(tmp_path / "data")
    diverging = {"train__learning_rate": 1e30, "train__warmup_steps": 0, "train__steps": 50}
    settings = small_settings(tmp_path, **diverging, run__max_failures=1)
    process = command(settings)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 1
    assert len(records_of(settings, "failure")) == 2
    assert errors.count("error: ") == 1
    assert "rank 0, step 2: " in errors
    assert "expected a finite number; the same command goes on from the last checkpoint" in errors
    assert "Traceback" not in errors


def test_a_slow_embedded_ray_gets_more_than_one_chance(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    from training.launchers.ray import STARTS, connect

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    calls: list[str] = []

    def init(failures: int) -> Callable[..., None]:
        def start_ray(**_: Any) -> None:
            calls.append("init")
            if calls.count("init") <= failures:
                raise Exception("The current node timed out during startup. More words.")

        return start_ray

    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(ray, "init", init(STARTS - 1))
    connect()
    assert calls == [*["init", "shutdown"] * (STARTS - 1), "init"]

    calls.clear()
    monkeypatch.setattr(ray, "init", init(STARTS))
    with pytest.raises(RunFailed, match=r"^Ray did not start on this machine in \d attempts \(The current node timed"):
        connect()
    assert calls == ["init", "shutdown"] * STARTS


def test_a_wrong_ray_address_is_one_line(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_ADDRESS": "nonsense"}
    line = [sys.executable, "-m", "training", "precompile", "--preset", "tiny", "--launcher", "ray"]
    line += ["--run.dir", str(tmp_path / "run")]
    ended = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: RAY_ADDRESS: nonsense, expected the address of a running Ray")
    assert ended.stderr.count("\n") == 1
