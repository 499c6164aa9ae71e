"""Checkpoints of the Neuron backend: NxD writes and reads the parts, ours is what makes them whole or absent.

NxD copies a rank's state to the host, which is all that training waits for, and writes it on a thread, in the layout of
`training.neuron_files`. That all ranks have written is known from the step's own sums (`Checkpointer.unwritten`); then
the files are hashed and the folder gets its final name, as `training.checkpoint` has it. NxD's own mark of a finished
checkpoint, the file `done`, decides nothing: it carries no digests.
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import neuronx_distributed as nxd
import neuronx_distributed.trainer.checkpoint as nxd_checkpoint
import torch
import torch_xla.core.xla_model as xla_model
from neuronx_distributed.parallel_layers import parallel_state
from torch import nn

from training import checkpoint_files as files
from training.backends.neuron import cpu_mode
from training.checkpoint import Checkpointer, explain
from training.errors import UserError
from training.neuron_files import TAG, part_files

WRITERS = 32  # ranks of a node that write or read at a time: all of them


class NeuronCheckpointer(Checkpointer):
    """`Checkpointer` on NxD's files. `state` is what `NeuronBackend.training_state` returns."""

    def __init__(self, directory: Path, keep: int) -> None:
        super().__init__(directory, keep)
        self._issued: tuple[int, Path, Path, dict[str, Any]] | None = None

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
        start = time.perf_counter()
        self.wait()
        final = self.directory / f"step-{step:08d}"
        temporary = self.directory / f"{files.TEMPORARY}{final.name}"
        if self._team.on_first(lambda: _make_room(temporary, final)):
            if cpu_mode():  # NxD takes what is on the host already as it is
                state = copy.deepcopy(state)
            with _local_workers():
                nxd.save_checkpoint(
                    str(temporary),
                    TAG,
                    model=state["model"],
                    optimizer=state["optimizer"],
                    zero1_optimizer="base_state" in state["optimizer"],
                    num_workers=WRITERS,
                    async_save=True,
                )
            self._issued = (step, temporary, final, meta)
        self.stall_seconds = time.perf_counter() - start

    @property
    def unwritten(self) -> bool:
        task = self._task() if self._issued else None
        return task is not None and not task.done()

    def publish(self) -> None:
        issued, self._issued = self._issued, None
        if issued is None:
            return
        step, temporary, final, meta = issued
        try:
            # A fault is told to all ranks before the device's collectives, in which they would wait for this one.
            self._team.gather(self._result)
            nxd.finalize_checkpoint()
        except Exception as error:
            nxd_checkpoint.g_iostate = None
            if self._team.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise explain(error, final) from error
        self._writing = self._thread.submit(self._publish, step, temporary, final, meta)

    def wait(self) -> None:
        self.publish()
        super().wait()

    def close(self) -> None:
        try:
            super().close()
        finally:
            # At exit NxD would put its mark into a folder that has another name by now.
            atexit.unregister(nxd.CheckpointIOState.wait_all)

    def _publish(self, step: int, temporary: Path, final: Path, meta: dict[str, Any]) -> None:
        try:
            names = self._team.on_first(
                lambda: sorted(str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file())
            )
            mine = names[self._team.rank :: self._team.size]
            for name in mine:
                files.sync(temporary / name)
            self._seal(step, temporary, final, meta, lambda: mine)
        except Exception as error:
            if self._team.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise explain(error, final) from error

    @staticmethod
    def _task() -> Any:
        """The future of NxD's writing thread; None when this rank had nothing to write."""
        state = nxd_checkpoint.g_iostate
        return None if state is None else state._save_task

    def _result(self) -> None:
        if task := self._task():
            task.result()


def meet() -> None:
    """Wait for all ranks on their devices, as NxD does around its files: a graph of its own."""
    xla_model.rendezvous("precompile")


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, tensor_parallel_size: int) -> None:
    """Read the checkpoint at `path`. Raises `UserError` when it was saved by groups of another size."""
    saved = len(part_files(path, "model"))
    if saved != tensor_parallel_size:
        raise UserError(
            f"parallel.tensor_parallel_size: {tensor_parallel_size}, but {path} was saved with {saved}; expected the "
            "same, or model.init_from with what `export` makes of it"
        )
    shards, groups = len(part_files(path, "optim")) // saved, parallel_state.get_data_parallel_size()
    if shards not in (1, groups):
        raise UserError(
            f"parallel.workers: {groups * saved}, but {path} has the optimizer's shards of {shards * saved}; expected "
            "as many, or model.init_from with what `export` makes of it"
        )
    with _local_workers():
        nxd.load_checkpoint(str(path), TAG, model=model, optimizer=optimizer, num_workers=WRITERS)


def _make_room(temporary: Path, final: Path) -> bool:
    room = files.make_room(temporary, final)
    if room:  # both here: in CPU mode the ranks do not wait for the one that makes them
        for kind in ("model", "optim"):
            (temporary / TAG / kind).mkdir(parents=True)
    return room


@contextlib.contextmanager
def _local_workers() -> Iterator[None]:
    """Let NxD find one worker a machine in CPU mode: it takes XLA's number of devices, 1, over this variable."""
    before = os.environ.get("LOCAL_WORLD_SIZE")
    if cpu_mode():
        os.environ["LOCAL_WORLD_SIZE"] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ["LOCAL_WORLD_SIZE"] = before
