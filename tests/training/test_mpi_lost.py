"""The MPI launcher by the real mpirun: a rank that stands still, and a launcher that is killed."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from makers import SettingsMaker, TokenStoreMaker, TrainingCommand
from processes import alive, rank_of, records_of, steps_of, weights_of, while_running


def test_a_rank_that_stands_still_is_named_and_the_run_goes_on_without_being_asked(
    tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker, mpi_command: TrainingCommand
) -> None:
    token_store(tmp_path / "data")
    shape = {"parallel__workers": 2, "train__steps": 90_000, "checkpoint__every": 20, "train__eval_every": 90_000}
    # On a busy machine these seconds may pass before the first step, too: that is one of the restarts.
    settings = small_settings(tmp_path, **shape, train__hang_timeout=20, run__max_failures=9)
    process = mpi_command(settings)
    while_running(process, lambda: list(settings.checkpoint_dir.glob("step-*")))
    rank_of(process, 1).suspend()  # as a node that no longer answers
    named = "no word from rank 1"
    while_running(process, lambda: any(named in r["message"] for r in records_of(settings, "failure")))
    failure = records_of(settings, "failure")[-1]
    assert failure["rank"] == 0
    assert failure["message"].startswith("no progress for train.hang_timeout (20 s) while ")

    starts = len(records_of(settings, "start"))
    while_running(process, lambda: len(records_of(settings, "start")) > starts)
    again = records_of(settings, "start")[-1]["step"]
    assert again >= 20
    while_running(process, lambda: max(steps_of(settings)) > again + 5)
    ranks = [rank_of(process, 0), rank_of(process, 1)]
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "stopped after step" in errors
    assert not any(map(alive, ranks))
    step, _ = weights_of(settings)
    assert step == max(steps_of(settings))


def test_a_killed_launcher_takes_its_ranks_along(
    tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker, mpi_command: TrainingCommand
) -> None:
    token_store(tmp_path / "data")
    settings = small_settings(tmp_path, parallel__workers=2, train__steps=90_000, train__eval_every=90_000)
    process = mpi_command(settings)
    while_running(process, lambda: 3 in steps_of(settings))
    ranks = [rank_of(process, 0), rank_of(process, 1)]
    process.kill()
    deadline = time.monotonic() + 60
    while any(map(alive, ranks)):
        assert time.monotonic() < deadline
