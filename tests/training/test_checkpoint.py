"""Checkpoints: exact, whole or absent, and verified - against injected faults, kills and other worker counts."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from training import checkpoint_files
from training.checkpoint import Checkpointer, latest, load, read_meta, restore, training_state
from training.errors import RunFailed, UserError

KILLS = 20


class Toy(nn.Module):
    """Two layers with a tied head and dropout, so that a wrong random state shows in the weights."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 12, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(nn.functional.dropout(self.inner(self.embed(tokens)).tanh(), 0.2))
        return out


def toy(seed: int, width: int = 16, fused: bool = True) -> tuple[Toy, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Toy(width)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": [model.inner.bias], "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.01, fused=fused)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (step + 1)
        tokens = torch.randint(0, 12, (4, 8), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from leaves(value[key], f"{name}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}.{index}")
    else:
        yield name, value


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    ours, theirs = dict(leaves(ours)), dict(leaves(theirs))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if torch.is_tensor(value) else value == theirs[name]
        assert same, f"{name}: {value} {theirs[name]}"


def save(directory: Path, step: int, state: dict[str, Any], keep: int = 2) -> Path:
    checkpointer = Checkpointer(directory, keep)
    checkpointer.save(step, state, {"step": step})
    checkpointer.close()
    return directory / f"step-{step:08d}"


def filled(step: int, size: int = 1000) -> dict[str, Any]:
    """A state in which every number tells the step."""
    return {"model": {name: torch.full((size,), float(step + i)) for i, name in enumerate("abc")}, "note": str(step)}


def assert_filled(path: Path, size: int = 1000) -> int:
    """Load the checkpoint and check that all of it is of the step in its name, which is returned."""
    step = int(path.name.removeprefix("step-"))
    state = filled(-1, size)
    assert load(path, state) == {"step": step}
    assert_same(state, filled(step, size))
    return step


@pytest.fixture
def skipped() -> list[str]:
    return []


# --- exact


@pytest.mark.parametrize("fused", [True, False])
def test_training_goes_on_bit_for_bit(fused: bool, tmp_path: Path) -> None:
    model, optimizer = toy(seed=1, fused=fused)
    train(model, optimizer, range(5))
    path = save(tmp_path, 5, training_state(model, optimizer))
    train(model, optimizer, range(5, 10))
    straight = training_state(model, optimizer)

    again, its_optimizer = toy(seed=2, fused=fused)
    assert restore(path, again, its_optimizer) == {"step": 5}
    assert [group["lr"] for group in its_optimizer.param_groups] == [0.01 / 5] * 2
    train(again, its_optimizer, range(5, 10))
    assert_same(training_state(again, its_optimizer), straight)


def test_what_changes_after_save_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer goes on while the write has not begun."""
    go = threading.Event()
    make_room = checkpoint_files.make_room

    def held_up(*args: Path) -> bool:
        assert go.wait(60)
        return make_room(*args)

    monkeypatch.setattr(checkpoint_files, "make_room", held_up)
    checkpointer = Checkpointer(tmp_path, keep=3)
    state = filled(1)
    for step in (1, 2, 3):  # the second and third time into the kept buffers
        go.clear()
        for i, tensor in enumerate(state["model"].values()):
            tensor.fill_(step + i)
        state["note"] = str(step)
        checkpointer.save(step, state, {"step": step})
        assert not (tmp_path / f"step-{step:08d}").exists()
        for tensor in state["model"].values():
            tensor.zero_()
        go.set()
        checkpointer.wait()
    checkpointer.close()
    assert [assert_filled(tmp_path / f"step-{step:08d}") for step in (1, 2, 3)] == [1, 2, 3]


def test_the_newest_are_kept(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=2)
    for step in (1, 2, 30, 200):
        checkpointer.save(step, filled(step), {"step": step})
    checkpointer.close()
    assert sorted(os.listdir(tmp_path)) == ["step-00000030", "step-00000200"]
    assert checkpointer.stall_seconds > 0


def test_a_kill_while_pruning_leaves_no_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Removing a folder takes time; before it begins the folder has lost its final name."""
    save(tmp_path, 1, filled(1), keep=1)
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    save(tmp_path, 2, filled(2), keep=1)
    assert sorted(os.listdir(tmp_path)) == [".tmp-pruned-step-00000001", "step-00000002"]


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    path = save(tmp_path, 4, filled(4))
    before = path.stat().st_mtime_ns
    save(tmp_path, 4, filled(4))
    assert path.stat().st_mtime_ns == before
    assert os.listdir(tmp_path) == [path.name]


def test_blocking_save_is_published_at_once(tmp_path: Path) -> None:
    checkpointer = Checkpointer(tmp_path, keep=1, blocking=True)
    checkpointer.save(7, filled(7), {"step": 7})
    assert assert_filled(tmp_path / "step-00000007") == 7
    checkpointer.close()


# --- verified


def flip_a_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize(
    ("name", "damage", "reason"),
    [
        ("__0_0.distcp", lambda path: os.truncate(path, 1000), "__0_0.distcp is truncated (1000 of "),
        ("__0_0.distcp", lambda path: path.open("ab").write(b"x"), "__0_0.distcp is altered ("),
        ("__0_0.distcp", flip_a_byte, "__0_0.distcp is altered (not the sha256 that was written)"),
        ("__0_0.distcp", Path.unlink, "__0_0.distcp is missing"),
        (".metadata", flip_a_byte, ".metadata is altered"),
        (".metadata", Path.unlink, ".metadata is missing"),
        ("meta.json", flip_a_byte, "meta.json "),
        ("meta.json", lambda path: os.truncate(path, 20), "meta.json cannot be read"),
        ("meta.json", lambda path: path.write_text("[]"), "meta.json is altered"),
        ("meta.json", lambda path: path.write_text(path.read_text().replace("40", "41", 1)), "meta.json is altered"),
        ("meta.json", Path.unlink, "meta.json is missing"),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_passed_over(
    name: str, damage: Callable[[Path], object], reason: str, tmp_path: Path, skipped: list[str]
) -> None:
    directory = tmp_path / "checkpoints"
    good, bad = save(directory, 20, filled(20)), save(directory, 40, filled(40))
    damage(bad / name)
    assert latest(directory, skipped.append, mend=False) == good
    assert bad.exists()
    assert latest(directory, skipped.append) == good
    assert assert_filled(good) == 20
    for line in skipped:
        assert line.startswith(f"checkpoints/step-00000040: {reason}"), line
        assert "\n" not in line
    assert skipped[0].endswith(", using step-00000020")
    assert skipped[1].endswith(", using step-00000020 (kept as altered-step-00000040)")
    assert sorted(os.listdir(directory)) == ["altered-step-00000040", "step-00000020"]
    assert assert_filled(save(directory, 40, filled(40))) == 40  # its step can be saved again
    damage(bad / name)
    assert latest(directory, skipped.append) == good
    assert sorted(os.listdir(directory)) == ["altered-step-00000040", "altered-step-00000040.2", "step-00000020"]


def test_no_checkpoint_at_all(tmp_path: Path, skipped: list[str]) -> None:
    assert latest(tmp_path / "none", skipped.append) is None
    assert skipped == []
    (save(tmp_path, 3, filled(3)) / "meta.json").unlink()
    assert latest(tmp_path, skipped.append) is None
    assert skipped[0].endswith("no whole checkpoint is left (kept as altered-step-00000003)")


def test_leftovers_are_removed_by_the_owner_alone(tmp_path: Path) -> None:
    good = save(tmp_path, 20, filled(20))
    shutil.copytree(good, tmp_path / ".tmp-step-00000040")
    assert latest(tmp_path, pytest.fail, mend=False) == good
    assert (tmp_path / ".tmp-step-00000040").exists()
    assert latest(tmp_path, pytest.fail) == good
    assert os.listdir(tmp_path) == [good.name]


def test_another_model_is_a_clear_line(tmp_path: Path) -> None:
    path = save(tmp_path, 5, training_state(*toy(seed=1)))
    with pytest.raises(UserError, match=r"is not a checkpoint of this model .*embed.weight") as error:
        restore(path, *toy(seed=1, width=32))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"is not a checkpoint of this model .*model.unknown"):
        load(path, {"model": {"unknown": torch.zeros(1)}})
    with pytest.raises(UserError, match=r"step-00000006: meta.json is missing"):
        read_meta(tmp_path / "step-00000006")


# --- whole or absent


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """A real write error half-way through a file: the kernel refuses what goes beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("keep", [1, 2])
def test_a_full_disk_leaves_the_older_ones(keep: int, tmp_path: Path) -> None:
    good = save(tmp_path, 20, filled(20), keep)
    checkpointer = Checkpointer(tmp_path, keep)
    with files_of_at_most(6000):
        checkpointer.save(40, filled(40), {"step": 40})
        with pytest.raises(UserError, match=f"^{tmp_path}: no room for step-00000040 ") as error:
            checkpointer.wait()
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == [good.name]
    assert assert_filled(good) == 20
    checkpointer.save(60, filled(60), {"step": 60})  # once there is room, the run goes on
    checkpointer.close()
    assert latest(tmp_path, pytest.fail) == tmp_path / "step-00000060"


def test_an_error_of_the_write_is_raised_by_the_next_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(checkpoint_files, "publish", broken)
    checkpointer = Checkpointer(tmp_path, keep=1)
    checkpointer.save(20, filled(20), {"step": 20})
    with pytest.raises(RunFailed, match=r"step-00000020 could not be written .*Input/output error"):
        checkpointer.save(40, filled(40), {"step": 40})
    checkpointer.close()
    assert os.listdir(tmp_path) == []


# Imports once, then forks a saver for each line it reads: the step to go on from. It has no threads when it forks.
_SAVERS = """
import os, sys
from pathlib import Path
from tests.training.test_checkpoint import filled
from training.checkpoint import Checkpointer
directory = Path(sys.argv[1])
Checkpointer(directory / "warm", keep=1, blocking=True).save(0, filled(0), {})
for line in sys.stdin:
    if pid := os.fork():
        os.waitpid(pid, 0)
        print("ended", flush=True)
        continue
    print(os.getpid(), flush=True)
    checkpointer, step = Checkpointer(directory, keep=1), int(line)
    while True:
        step += 1
        checkpointer.save(step, filled(step, 20_000), {"step": step})
        print(step, flush=True)
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """kill -9 of a process that saves at every step and keeps one: what is found is whole, and never goes back.

    The moment is drawn as a number of saves and then of turns of an empty loop, which fall anywhere in a write.
    """
    choose = random.Random(7)
    step, torn = 0, 0
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", _SAVERS, str(tmp_path)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, bufsize=1
    ) as savers:
        assert savers.stdin is not None
        assert savers.stdout is not None
        for _ in range(KILLS):
            savers.stdin.write(f"{step}\n")
            pid = int(savers.stdout.readline())
            saves = choose.randint(2, 6)
            for _ in range(saves):
                assert int(savers.stdout.readline()) > step
            for _ in range(choose.randint(0, 300_000)):
                pass
            os.kill(pid, signal.SIGKILL)
            while savers.stdout.readline() != "ended\n":
                pass
            torn += any(tmp_path.glob(".tmp-*"))
            path = latest(tmp_path, pytest.fail)
            assert path is not None
            found = assert_filled(path, 20_000)
            assert found >= step + saves - 1, "save(n) returns once n - 1 is published"
            step = found
        savers.stdin.close()
    assert torn > KILLS // 4, "the kills did not fall into writes: the test shows nothing"


# --- other numbers of workers


KINDS = ["ddp", "fsdp"]


def wrapped(seed: int, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = toy(seed)[0]
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(model), torch.optim.AdamW(model.parameters(), lr=0.01)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def whole(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights and moments by name, gathered from the ranks that share them."""
    tensors = {name: value for name, value in leaves(state) if torch.is_tensor(value) and not name.startswith(".rng")}
    return {n: value.full_tensor() if isinstance(value, DTensor) else value.clone() for n, value in tensors.items()}


def _two_workers(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=2)
    for kind in KINDS:
        result: dict[str, Any] = {"said": []}
        model, optimizer = wrapped(2, kind)
        path = latest(directory / "one", result["said"].append, mend=False)
        assert path is not None
        torch.manual_seed(300 + rank)
        result["meta"] = restore(path, model, optimizer)
        result["rng"] = torch.get_rng_state()
        result["restored"] = whole(training_state(model, optimizer))

        checkpointer = Checkpointer(directory / kind, keep=1)
        for step in (4, 5):
            torch.manual_seed(100 * step + rank)
            checkpointer.save(step, training_state(model, optimizer), {"step": step})
            train(model, optimizer, range(step, step + 1))
        result["straight"] = whole(training_state(model, optimizer))
        checkpointer.wait()
        if rank == 1:  # the fault of one rank is every rank's
            checkpoint_files.checksums = _no_room
        checkpointer.save(6, training_state(model, optimizer), {"step": 6})
        try:
            checkpointer.close()
        except UserError as error:
            result["error"] = str(error)
        checkpoint_files.checksums = _CHECKSUMS
        torch.save(result, directory / f"{kind}-{rank}.pt")
    dist.destroy_process_group()
    if rank == 0:
        _go_on_alone(directory / "alone")


def _go_on_alone(directory: Path) -> None:
    model, optimizer = toy(seed=2)
    path = latest(directory, pytest.fail)
    assert path is not None
    restore(path, model, optimizer)
    train(model, optimizer, range(4, 10))
    save(directory, 10, training_state(model, optimizer))


_CHECKSUMS = checkpoint_files.checksums


def _no_room(*args: object) -> dict[str, dict[str, Any]]:
    raise OSError(28, "No space left on device")


@pytest.fixture(scope="module")
def two_workers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where one worker saved step 4 and a damaged step 9, and two new processes went on from it.

    They do so as each kind of two workers, and then rank 0 alone: starting processes is what takes time here.
    """
    directory = tmp_path_factory.mktemp("workers")
    model = toy(seed=1)[0]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(4))
    torch.save(whole(training_state(model, optimizer)), directory / "one.pt")
    save(directory / "one", 4, training_state(model, optimizer))
    (save(directory / "one", 9, training_state(model, optimizer)) / ".metadata").unlink()
    model, optimizer = toy(seed=1)
    train(model, optimizer, range(4))
    save(directory / "alone", 4, training_state(model, optimizer))
    mp.spawn(_two_workers, args=(directory,), nprocs=2)
    return directory


def test_training_goes_on_bit_for_bit_in_a_new_process(two_workers: Path) -> None:
    model, optimizer = toy(seed=1)
    train(model, optimizer, range(10))
    straight = training_state(model, optimizer)
    state = training_state(*toy(seed=3))
    load(two_workers / "alone" / "step-00000010", state)
    assert_same(state, straight)


@pytest.mark.parametrize("kind", KINDS)
def test_one_worker_to_two(kind: str, two_workers: Path) -> None:
    results = [torch.load(two_workers / f"{kind}-{rank}.pt") for rank in (0, 1)]
    for rank, result in enumerate(results):
        assert_same(result["restored"], torch.load(two_workers / "one.pt"))
        assert result["meta"] == {"step": 4}
        own = torch.Generator().manual_seed(300 + rank).get_state()
        assert torch.equal(result["rng"], own) == (rank == 1), "rank 1 has no saved random state and keeps its own"
    assert [len(result["said"]) for result in results] == [1, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_two_workers_to_one(kind: str, two_workers: Path) -> None:
    path = latest(two_workers / kind, pytest.fail)
    assert path == two_workers / kind / "step-00000005"
    assert {"__0_0.distcp", "__1_0.distcp"} <= set(os.listdir(path)), "each rank writes its part"
    model = toy(seed=3)[0]
    optimizer = torch.optim.AdamW(model.parameters())
    assert restore(path, model, optimizer) == {"step": 5}
    assert torch.equal(torch.get_rng_state(), torch.Generator().manual_seed(500).get_state())
    state = {"rng": {"cpu-1": torch.zeros_like(torch.get_rng_state())}}
    load(path, state)
    assert torch.equal(state["rng"]["cpu-1"], torch.Generator().manual_seed(501).get_state())


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_of_one_rank_is_every_ranks(kind: str, two_workers: Path) -> None:
    for rank in (0, 1):
        assert "no room for step-00000006" in torch.load(two_workers / f"{kind}-{rank}.pt")["error"]
    assert os.listdir(two_workers / kind) == ["step-00000005"]
