"""How the tests run training in processes of their own: to be killed, to hang, to be several.

Children are forked from a server that has torch and the trainer imported, so that each costs milliseconds and not the
seconds of an import.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist

from training import trainer
from training.backends import World
from training.checkpoint import latest, load, training_state
from training.config import Settings
from training.data.samples import Loader, Samples
from training.errors import RunFailed, UserError
from training.launchers import Stopped, launch_train
from training.metrics import read_metrics
from training.model import Llama

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["training.trainer", "training.launchers.local", "training.checks"])


def start(target: Callable[..., Any], *args: Any) -> multiprocessing.process.BaseProcess:
    """A started child that runs `target(*args)`; its standard error is the test's."""
    child = context.Process(target=target, args=args)
    child.start()
    return child


def launch(settings: Settings) -> None:
    """What the command line does for `train`, by exit code: 0 done, 128 + signal stopped, 1 failed, 2 refused."""
    try:
        launch_train(settings)
    except Stopped as stopped:
        os._exit(stopped.exit_code)
    except RunFailed:
        os._exit(1)
    except UserError:
        os._exit(2)


def train_and_block(settings: Settings, step: int) -> None:
    """Train on one worker, and stand still for ever where the batch of `step` (from 1) is asked for."""
    FAULTS["block"](World(), step)
    trainer.train(settings, World())


def train_on(settings: Settings, fault: str = "", argument: Any = None) -> list[int | None]:
    """Train on `parallel.workers` children with a fault planted in each; their exit codes when all have ended."""
    size = settings.parallel.workers
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = [start(_worker, settings, World(rank, size, rank, size), port, fault, argument) for rank in range(size)]
    for child in children:
        child.join(300)
        assert child.exitcode is not None, "a worker did not end within five minutes"
    return [child.exitcode for child in children]


def _worker(settings: Settings, world: World, port: int, fault: str, argument: Any) -> None:
    if fault:
        FAULTS[fault](world, argument)
    if world.size > 1:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        dist.init_process_group("gloo", rank=world.rank, world_size=world.size)
    try:
        trainer.train(settings, world)
    except RunFailed as error:
        (settings.run.dir / f"error-{world.rank}").write_text(str(error))
        os._exit(1)
    os._exit(0)


def _block_before(world: World, step: int) -> None:
    """The loader of the last rank never gives the batch of this step (counted from the attempt's start)."""
    ready = Loader.next
    taken = 0

    def next_batch(self: Loader) -> torch.Tensor:
        nonlocal taken
        taken += 1
        if taken == step and world.rank == world.size - 1:
            threading.Event().wait()
        return ready(self)

    Loader.next = next_batch  # type: ignore[method-assign]


def _nan_from_call(world: World, call: int) -> None:
    """The loss of the last rank is NaN from this forward pass on."""
    forward = Llama.forward
    calls = 0

    def spoiled(self: Llama, *args: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        loss = forward(self, *args)
        return loss * float("nan") if calls >= call and world.rank == world.size - 1 else loss

    Llama.forward = spoiled  # type: ignore[method-assign]


def _log_samples(world: World, folder: Path) -> None:
    """Append the sample numbers of every batch that is read for training to `folder/RANK`, a line a batch."""
    batch = Samples.batch

    def logged(self: Samples, indices: Any) -> Any:
        if threading.current_thread().name == "loader":
            with (folder / str(world.rank)).open("a") as file:
                file.write(" ".join(map(str, indices)) + "\n")
        return batch(self, indices)

    Samples.batch = logged  # type: ignore[method-assign]


FAULTS: dict[str, Callable[[World, Any], None]] = {
    "block": _block_before,
    "nan": _nan_from_call,
    "log": _log_samples,
}


def until(condition: Callable[[], Any], child: Any, seconds: float = 300) -> Any:
    """The first true value of `condition`, looked at every 2 ms while `child` lives; fails when it ends before."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            child.kill()
            raise AssertionError(f"not within {seconds} s")
        ended = wait([child.sentinel], 0.002)
        assert not ended or condition(), f"the child ended with {child.exitcode}"
    return value


def while_running(process: subprocess.Popen[str], condition: Callable[[], Any]) -> Any:
    """The first true value of `condition` while `process` lives."""
    descriptor = os.pidfd_open(process.pid)
    try:
        return until(condition, SimpleNamespace(sentinel=descriptor, exitcode="its own code", kill=process.kill))
    finally:
        os.close(descriptor)


def rank_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """The process of one rank."""
    for below in psutil.Process(process.pid).children(recursive=True):
        if below.environ().get("OMPI_COMM_WORLD_RANK") == str(rank):
            return below
    raise AssertionError(f"there is no rank {rank}")


def alive(process: psutil.Process) -> bool:
    """Whether it runs: one that has ended and has no parent to notice may be listed for ever."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def steps_of(settings: Settings) -> list[int]:
    """Steps that metrics.jsonl has a training record of."""
    return [r["step"] for r in read_metrics(settings.run.dir / "metrics.jsonl") if r["type"] == "train"]


def losses_of(settings: Settings) -> dict[int, float]:
    """Training loss by step."""
    return {r["step"]: r["loss"] for r in read_metrics(settings.run.dir / "metrics.jsonl") if r["type"] == "train"}


def records_of(settings: Settings, kind: str) -> list[dict[str, Any]]:
    """Records of one type."""
    return [r for r in read_metrics(settings.run.dir / "metrics.jsonl") if r["type"] == kind]


def weights_of(settings: Settings) -> tuple[int, dict[str, torch.Tensor]]:
    """Step and every tensor (weights, both moments) of the newest whole checkpoint."""
    skipped: list[str] = []
    path = latest(settings.checkpoint_dir, on_skip=skipped.append)
    assert path is not None
    assert not skipped, skipped
    model = Llama(settings.model)
    state = training_state(model, torch.optim.AdamW(model.parameters()))
    meta = load(path, {"model": state["model"]} | {"optimizer": {"state": state["optimizer"]["state"]}})
    return meta["step"], dict(_tensors(state))


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor) and not name.startswith(".rng"):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}")
