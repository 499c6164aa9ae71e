"""The training loop: exact resume, kills, faults, requests to stop, the same run on other numbers of workers."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from makers import SettingsMaker, TokenStoreMaker
from processes import launch, losses_of, records_of, start, steps_of, train_and_block, train_on, until, weights_of

from training.backends import World
from training.checkpoint import latest
from training.config import Settings, load_settings
from training.data.samples import SampleOrder, Samples
from training.data.store import MANIFEST, ShardWriter, TokenStore, read_manifest, write_json
from training.errors import RunFailed, UserError
from training.trainer import learning_rate, train
from training.watch import HANG_EXIT_CODE

Make = Callable[..., Settings]


@pytest.fixture
def make(tmp_path: Path, token_store: TokenStoreMaker, small_settings: SettingsMaker) -> Make:
    """`make("a", train__steps=3)`: settings of run `a`, all runs of a test on one store."""
    token_store(tmp_path / "data")

    def settings(run: str = "run", **overrides: object) -> Settings:
        return small_settings(tmp_path, **{"run.dir": tmp_path / run, **overrides})

    return settings


def test_a_killed_run_goes_on_exactly(make: Make) -> None:
    """40 steps straight, and 20 steps + kill -9 + the rest: equal losses, weights and moments."""
    shape = {"train__steps": 40, "checkpoint__every": 20, "train__eval_every": 20}
    straight, killed = make("straight", **shape), make("killed", **shape)
    train(straight, World())

    child = start(train_and_block, killed, 28)
    until(lambda: 27 in steps_of(killed), child)
    until(lambda: latest(killed.checkpoint_dir, on_skip=print, mend=False), child)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    train(killed, World())

    assert [r["step"] for r in records_of(killed, "start")] == [0, 20]
    assert losses_of(killed) == losses_of(straight)
    assert list(losses_of(killed)) == list(range(1, 41))
    assert [r["loss"] for r in records_of(killed, "valid")] == [r["loss"] for r in records_of(straight, "valid")]
    (step, one), (other_step, other) = weights_of(straight), weights_of(killed)
    assert step == other_step == 40
    assert one.keys() == other.keys()
    assert len(one) > 60  # 19 weights and as many of each moment, and steps
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_twenty_kills_at_random_moments(make: Make) -> None:
    """A run that checkpoints every step is killed twenty times; it always goes on from a whole checkpoint."""
    shape = {"train__steps": 160, "train__eval_every": 50}
    straight, killed = make("straight", **shape, checkpoint__every=160), make("killed", **shape, checkpoint__every=1)
    train(straight, World())

    moments = random.Random(20)
    reached = 0
    for _ in range(20):
        attempts = len(records_of(killed, "start"))
        child = start(launch, killed)
        until(lambda n=attempts: len(records_of(killed, "start")) > n, child)
        from_step = records_of(killed, "start")[-1]["step"]
        assert from_step >= reached, "a whole checkpoint was lost"
        more = moments.randrange(10)
        until(lambda s=from_step, m=more: max(steps_of(killed), default=0) >= s + m, child)
        for _ in range(moments.randrange(20_000)):  # somewhere within the step, or the write of its checkpoint
            pass
        os.kill(child.pid, signal.SIGKILL)
        child.join()
        assert child.exitcode == -signal.SIGKILL
        skipped: list[str] = []
        path = latest(killed.checkpoint_dir, on_skip=skipped.append, mend=False)
        assert not skipped, "a checkpoint under its final name was not whole"
        reached = int(path.name.removeprefix("step-")) if path else 0
    assert reached > 20

    train(killed, World())
    assert losses_of(killed) == losses_of(straight)
    (_, one), (_, other) = weights_of(straight), weights_of(killed)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_two_workers_go_on_with_the_samples_of_one(make: Make, tmp_path: Path) -> None:
    shape = {"train__steps": 12, "checkpoint__every": 6, "train__eval_samples": 7}
    straight, alone, both = (
        make("straight", **shape),
        make("moved", **shape),
        make("moved", **shape, parallel__workers=2),
    )
    train(straight, World())

    child = start(train_and_block, alone, 7)
    until(lambda: latest(alone.checkpoint_dir, on_skip=print, mend=False), child)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    assert train_on(both, "log", tmp_path) == [0, 0]

    store = TokenStore.open(straight.data_dir, "train")
    order = SampleOrder(len(Samples(store, straight.train.seq_length)), straight.train.seed)
    read = [[list(map(int, line.split())) for line in (tmp_path / rank).read_text().splitlines()] for rank in "01"]
    for index, step in enumerate(range(6, 12)):
        assert read[0][index] + read[1][index] == order.step(step, 4).tolist()

    assert [r["step"] for r in records_of(both, "start")] == [0, 6]
    expected, losses = losses_of(straight), losses_of(both)
    assert losses.keys() == expected.keys()
    assert all(abs(losses[step] - expected[step]) < 1e-4 for step in expected)
    valid = [[r["loss"] for r in records_of(settings, "valid")] for settings in (straight, both)]
    np.testing.assert_allclose(valid[0], valid[1], atol=1e-4)


def test_accumulation_changes_the_passes_and_not_the_step(make: Make) -> None:
    whole, parts = make("whole", train__micro_batch_size=4), make("parts", train__micro_batch_size=1)
    train(whole, World())
    train(parts, World())
    np.testing.assert_allclose(list(losses_of(whole).values()), list(losses_of(parts).values()), atol=1e-5)


def test_it_learns_what_there_is_to_learn(tmp_path: Path, make: Make) -> None:
    """Each token follows from the one before: the loss goes to nothing, on text that was not trained on too."""
    folder = tmp_path / "data"
    manifest = read_manifest(folder)
    assert manifest is not None
    for split, shift in (("train", 3), ("valid", 5)):
        (folder / f"{split}.bin").unlink()
        (folder / f"{split}.idx").unlink()
        ids = ((np.arange(4000) * 7 + shift) % 512).astype(np.uint16)
        with ShardWriter(folder, split, np.dtype("<u2")) as shard:
            shard.add(ids, np.array([len(ids)]))
            manifest["splits"][split] = {"documents": 1, "tokens": len(ids), "shards": [shard.finish()]}
    write_json(folder / MANIFEST, manifest)
    settings = make(train__steps=150, train__learning_rate=1e-2, train__eval_every=150, train__global_batch_size=16)
    train(settings, World())
    assert losses_of(settings)[1] > 6.0  # ln 512 = 6.24
    assert records_of(settings, "valid")[-1]["loss"] < 1.0


def test_a_loss_that_is_not_finite_names_rank_and_step_and_is_never_saved(make: Make) -> None:
    settings = make(train__learning_rate=1e30, train__steps=8, checkpoint__every=1, train__warmup_steps=0)
    with pytest.raises(RunFailed, match=r"rank 0, step 2: the (loss|gradient norm) is (nan|inf), expected a finite"):
        train(settings, World())
    failure = records_of(settings, "failure")[-1]
    assert (failure["rank"], failure["step"]) == (0, 2)
    step, _ = weights_of(settings)
    assert step == 1


def test_every_worker_names_the_rank_whose_loss_is_not_finite(make: Make) -> None:
    settings = make(parallel__workers=2, train__steps=6)
    # two samples each by micro batches of two: one pass a step, so the third pass is step 3
    assert train_on(settings, "nan", 3) == [1, 1]
    for rank in (0, 1):
        assert "rank 1, step 3: the loss is nan" in (settings.run.dir / f"error-{rank}").read_text()


def test_a_step_without_progress_ends_every_worker(make: Make) -> None:
    settings = make(parallel__workers=2, train__steps=6, train__hang_timeout=3)
    codes = train_on(settings, "block", 3)
    assert codes[1] == HANG_EXIT_CODE  # the one that hangs, by its own watch
    assert codes[0] in (HANG_EXIT_CODE, 1)  # the one that waits for it, by its own or by losing the other
    failures = records_of(settings, "failure")
    assert {f["rank"] for f in failures} <= {0, 1}
    assert failures
    assert all(f["step"] == 3 and "no progress for train.hang_timeout (3 s)" in f["message"] for f in failures)


@pytest.mark.parametrize(("number", "workers"), [(signal.SIGINT, 1), (signal.SIGTERM, 2)])
def test_a_signal_writes_a_checkpoint_first(make: Make, number: signal.Signals, workers: int) -> None:
    shape = {"train__steps": 90_000, "checkpoint__every": 100_000, "train__eval_every": 100_000}
    settings = make(**shape, parallel__workers=workers)
    child = start(launch, settings)
    until(lambda: 3 in steps_of(settings), child)
    os.kill(child.pid, number)
    child.join(300)
    assert child.exitcode == 128 + number
    step, _ = weights_of(settings)
    assert step == max(steps_of(settings)) >= 3

    more = make(**shape)
    child = start(launch, more)
    until(lambda: step + 1 in steps_of(more), child)
    assert records_of(more, "start")[-1]["step"] == step
    os.kill(child.pid, signal.SIGKILL)
    child.join()


def test_a_killed_worker_is_restarted_from_the_last_checkpoint(make: Make) -> None:
    """The local launcher with two workers: the group starts again and trains every step that there is to train."""
    shape = {"parallel__workers": 2, "train__steps": 90_000, "checkpoint__every": 20, "train__eval_every": 90_000}
    settings = make(**shape, run__max_failures=1)
    child = start(launch, settings)
    until(lambda: list(settings.checkpoint_dir.glob("step-*")), child)  # the first is written in the background
    os.kill(_children_of(child.pid)[-1], signal.SIGKILL)
    until(lambda: len(records_of(settings, "start")) == 2, child)
    again = records_of(settings, "start")[1]["step"]
    assert again >= 20
    until(lambda: max(steps_of(settings)) > again + 5, child)
    assert "the worker was lost (SIGKILL)" in records_of(settings, "failure")[0]["message"]
    os.kill(child.pid, signal.SIGTERM)
    child.join(300)
    assert child.exitcode == 128 + signal.SIGTERM
    step, _ = weights_of(settings)
    assert list(losses_of(settings)) == list(range(1, step + 1))


def _children_of(pid: int) -> list[int]:
    import psutil

    return [p.pid for p in psutil.Process(pid).children() if "spawn_main" in " ".join(p.cmdline())]


def test_a_damaged_checkpoint_is_passed_over_and_said(make: Make) -> None:
    settings = make(train__steps=6, checkpoint__every=2, checkpoint__keep=3)
    train(settings, World())
    expected = losses_of(settings)
    damaged = next((settings.checkpoint_dir / "step-00000006").glob("*.distcp"))
    with damaged.open("r+b") as file:
        file.seek(damaged.stat().st_size // 2)
        file.write(b"\xff" * 64)
    train(settings, World())
    assert records_of(settings, "start")[-1]["step"] == 4
    assert "step-00000006" in records_of(settings, "note")[-1]["message"]
    assert losses_of(settings) == expected


def test_a_finished_run_trains_no_further_unless_asked_to(make: Make) -> None:
    train(make(), World())
    before = losses_of(make())
    train(make(), World())
    assert losses_of(make()) == before
    train(make(train__steps=8), World())
    assert list(losses_of(make())) == list(range(1, 9))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model__intermediate_size", 64, r"model.intermediate_size: 64, but .*step-00000006 was made with 48"),
        ("model__rope_theta", 500, r"model.rope_theta: 500.0, but .* was made with 10000.0"),
        ("train__seed", 1, r"train.seed: 1, but .* was made with 1234"),
        ("train__seq_length", 8, r"train.seq_length: 8, but .* was made with 16"),
        ("train__steps", 3, r"train.steps: 3, but .* is at step 6; expected at least that"),
    ],
)
def test_a_resume_that_could_not_go_on_is_refused(make: Make, key: str, value: int, message: str) -> None:
    train(make(), World())
    with pytest.raises(UserError, match=message):
        train(make(**{key: value}), World())


@given(warmup=st.integers(0, 50), more=st.integers(1, 200), peak=st.floats(1e-6, 1.0), low=st.floats(0, 1))
def test_schedule_rises_then_falls_between_its_bounds(warmup: int, more: int, peak: float, low: float) -> None:
    steps = warmup + more
    keys = {"steps": steps, "warmup_steps": warmup, "learning_rate": peak, "min_learning_rate": peak * low}
    settings = load_settings(overrides={f"train.{key}": str(value) for key, value in keys.items()})
    rates = [learning_rate(settings, step) for step in range(1, steps + 1)]
    assert all(0 < rate <= peak * (1 + 1e-12) for rate in rates[:-1])
    assert all(a < b for a, b in itertools.pairwise(rates[:warmup]))
    assert all(a >= b for a, b in itertools.pairwise(rates[warmup:]))
    assert math.isclose(rates[-1], peak * low, rel_tol=1e-9, abs_tol=1e-15)
    if warmup:
        assert math.isclose(rates[warmup - 1], peak)
