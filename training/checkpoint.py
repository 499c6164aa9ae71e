"""Checkpoints: written in the background by torch's distributed checkpoint (DCP), whole or absent, verified.

    checkpointer = Checkpointer(settings.checkpoint_dir, settings.checkpoint.keep)
    checkpointer.save(step, training_state(model, optimizer), meta={"model": settings.model.model_dump(mode="json")})
    ...
    path = latest(settings.checkpoint_dir, on_skip=print)
    meta = restore(path, model, optimizer)

A checkpoint is a folder `step-00000020` of DCP's files (`.metadata` and one `__RANK_0.distcp` per rank, each rank
its own part) and `meta.json`, which lists them with their sizes and sha256. The trainer stands still only while the
state is copied into buffers that are kept between saves; a thread per rank writes them to `.tmp-step-00000020`,
syncs and hashes what it wrote, and rank 0 renames the folder. So a folder under a final name is whole, whenever
the process is killed, and `latest` proves it byte by byte before training goes on from it. DCP stores tensors by
name and slice, so a run may go on with another number of workers.
"""

from __future__ import annotations

import errno
import functools
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from training import checkpoint_files as files
from training.errors import RunFailed, UserError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # what the user can mend by making room
_T = TypeVar("_T")

# What DCP says at every save and load: of a process on its own, and of torch's own use of its storages.
warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
warnings.filterwarnings("ignore", message="TypedStorage is deprecated", module="torch.distributed.checkpoint")


class Checkpointer:
    """Saves checkpoints of one run. Every rank makes one, at the same point, and calls `save` at the same steps.

    With `blocking=True` a save returns when the checkpoint is published: the plain `dcp.save` that the benchmark
    compares with.
    """

    def __init__(self, directory: Path, keep: int, *, blocking: bool = False) -> None:
        assert keep >= 1
        self.directory = directory
        self.keep = keep
        self.stall_seconds = 0.0
        """Seconds for which the last `save` held the trainer up."""
        self._team = _Team()  # its own group: its collectives run beside the trainer's, in the writing thread
        self._blocking = blocking
        pinned = torch.cuda.is_available()
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=pinned, use_non_blocking_copy=pinned, use_shared_memory=False, use_async_staging=False
            )
        )
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None

    def save(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
        """Copy `state` (see `training_state`) and write it in the background as `step-{step:08d}`.

        `meta` is plain JSON values, the same on every rank; the trainer puts its model settings there as `model`,
        which `export` and a resume read. Waits for the save before, and raises what that one ended with (see
        `wait`). The checkpoint of a step is written once: saving a published step again changes nothing.
        """
        start = time.perf_counter()
        self.wait()
        if self._blocking:
            self._write(step, state, meta)
        else:
            with _one_thread():
                staged = self._stager.stage(state)
            assert isinstance(staged, dict)
            self._writing = self._thread.submit(self._write, step, staged, meta)
        self.stall_seconds = time.perf_counter() - start

    @property
    def unwritten(self) -> bool:
        """Whether this rank has files of the last save to write before `publish` may be called."""
        return False

    def publish(self) -> None:
        """Called on every rank after the same step, when no rank has files to write: here the thread does it all."""

    def wait(self) -> None:
        """Return when the last save is published.

        Raises `UserError` when the disk was full and `RunFailed` for any other fault, on every rank alike; older
        checkpoints are untouched then, and nothing of the failed one is left.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def close(self) -> None:
        """Wait for the last save and stop the thread; raises as `wait` does."""
        try:
            self.wait()
        finally:
            self._thread.shutdown()

    def _write(self, step: int, state: dict[str, Any], meta: dict[str, Any]) -> None:
        final = self.directory / f"step-{step:08d}"
        temporary = self.directory / f"{files.TEMPORARY}{final.name}"
        try:
            if self._team.on_first(lambda: files.make_room(temporary, final)):
                self._write_files(temporary, state)
                self._seal(step, temporary, final, meta, lambda: files.written_by(self._team.rank, temporary))
        except Exception as error:
            if self._team.rank == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            raise explain(error, final) from error

    def _seal(
        self, step: int, temporary: Path, final: Path, meta: dict[str, Any], mine: Callable[[], list[str]]
    ) -> None:
        """Publish what is in `temporary`, of which this rank puts the files `mine` into the record."""
        listed: dict[str, Any] = {}
        for entries in self._team.gather(lambda: files.checksums(temporary, mine())):
            listed |= entries
        record = {"step": step, "world_size": self._team.size, "meta": meta, "files": listed}
        self._team.on_first(lambda: files.publish(temporary, final, record))
        self._team.on_first(lambda: files.prune(self.directory, self.keep))

    def _write_files(self, folder: Path, state: dict[str, Any]) -> None:
        # per_thread_copy_ahead=0: the state is on the CPU already, so leave the GPU's streams alone
        writer = FileSystemWriter(folder, sync_files=True, per_thread_copy_ahead=0)
        try:
            dcp_save(state, storage_writer=writer, process_group=self._team.group, no_dist=self._team.group is None)
        except CheckpointException as error:  # a BaseException around what happened, the same on every rank
            raise _cause(error) from error


def training_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What a run needs to go on exactly: `model` and `optimizer` by parameter name, `rng` by device and rank.

    Names are those of the bare model, whatever wraps it (DDP, FSDP2, torch.compile). The tensors are the live
    ones, not copies.
    """
    weights, moments = get_state_dict(model, optimizer)
    rank = dist.get_rank() if dist.is_initialized() else 0
    rng = {f"cpu-{rank}": torch.get_rng_state()}
    if torch.cuda.is_available():
        rng[f"cuda-{rank}"] = torch.cuda.get_rng_state()
    return {"model": weights, "optimizer": moments, "rng": rng}


def restore(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Put the checkpoint at `path` into `model` and `optimizer`, bit for bit, and set the random states.

    Returns the `meta` that it was saved with, and raises as `load` does. A rank that the saving run did not have
    keeps the random state it has.
    """
    state = training_state(model, optimizer)
    meta = load(path, state)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for name, value in state["rng"].items():
        if name.startswith("cpu"):
            torch.set_rng_state(value)
        else:
            torch.cuda.set_rng_state(value)
    return meta


def load(path: Path, state: dict[str, Any]) -> dict[str, Any]:
    """Read the checkpoint at `path` into the tensors of `state`, in place, and return its `meta`.

    `state` may be a part of what was saved, and may be spread over another number of ranks. Entries of `rng` that
    were not saved keep their values. Raises `UserError` naming the first tensor that is missing or has another
    size, `RunFailed` when a file cannot be read.
    """
    meta = read_meta(path)
    reader = FileSystemReader(path)
    saved = reader.read_metadata().state_dict_metadata
    wanted = {name: value for name, value in state.items() if name != "rng"}
    if rng := {name: value for name, value in state.get("rng", {}).items() if f"rng.{name}" in saved}:
        wanted["rng"] = rng
    group = _reading_team().group
    try:
        dcp_load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        cause = _cause(error)
        if isinstance(cause, OSError):
            raise RunFailed(f"{path}: cannot be read ({cause})") from error
        reason = str(cause).strip().partition("\n")[0]
        raise UserError(f"{path}: is not a checkpoint of this model ({reason})") from error
    for name, value in wanted.items():  # DCP puts what is no tensor into the dict it was given
        state[name] = {**state[name], **value} if name == "rng" else value
    return meta


def read_meta(path: Path) -> dict[str, Any]:
    """The `meta` that the checkpoint at `path` was saved with. Raises `UserError` when it cannot be read."""
    try:
        meta: dict[str, Any] = files.read_record(path)["meta"]
    except ValueError as error:
        raise UserError(f"{path}: {error}, expected a whole checkpoint") from None
    return meta


def latest(directory: Path, on_skip: Callable[[str], None], *, mend: bool = True) -> Path | None:
    """The newest whole checkpoint in `directory`, or None. Reads every byte of it.

    Rank 0 decides for all. Each damaged checkpoint that is passed over is told to `on_skip` (on rank 0), in one
    line with the reason and what is used instead. With `mend` (for the one process that owns the run) a damaged
    checkpoint is moved aside to `altered-step-...` and what a killed save left is removed.
    """
    return _reading_team().on_first(lambda: _latest(directory, on_skip, mend))


def _latest(directory: Path, on_skip: Callable[[str], None], mend: bool) -> Path | None:
    if mend:
        files.remove_temporary(directory)
    skipped: list[tuple[Path, str]] = []
    found = None
    for path in reversed(files.published(directory)):
        problem = files.problem(path)
        if problem is None:
            found = path
            break
        skipped.append((path, problem))
    instead = f"using {found.name}" if found else "no whole checkpoint is left"
    for path, problem in skipped:
        aside = files.move_aside(path) if mend else path
        kept = f" (kept as {aside.name})" if aside != path else ""
        on_skip(f"{directory.name}/{path.name}: {problem}, {instead}{kept}")
    return found


@contextmanager
def _one_thread() -> Iterator[None]:
    """Copy on the trainer's thread alone: one core moves memory nearly as fast as two, and is not held up when the
    others are busy (on 2 busy cores, 252 MB: 0.04 s, where both took 0.47 to 0.79 s)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _cause(error: CheckpointException) -> BaseException:
    """What happened on the first rank that failed; an OSError from below torch's own errors if there is one."""
    cause: BaseException | None = error.failures[min(error.failures)][0]
    first = cause
    while cause is not None:
        if isinstance(cause, OSError):
            return cause
        cause = cause.__cause__ or cause.__context__
    assert first is not None
    return first


def explain(error: Exception, final: Path) -> Exception:
    """What a fault in writing the checkpoint `final` is to the user."""
    if isinstance(error, OSError) and error.errno in _FULL:
        return UserError(
            f"{final.parent}: no room for {final.name} ({error.strerror}), expected space for checkpoint.keep + 1 "
            "checkpoints; the older ones are whole"
        )
    reason = str(error).strip().partition("\n")[0] or type(error).__name__
    return RunFailed(f"{final.parent}: {final.name} could not be written ({reason}); the older ones are whole")


class _Team:
    """The ranks that share a checkpoint, over a gloo group of their own, or this process alone."""

    def __init__(self) -> None:
        together = dist.is_available() and dist.is_initialized()
        self.group = dist.new_group(backend="gloo") if together else None
        self.rank = dist.get_rank() if together else 0
        self.size = dist.get_world_size() if together else 1

    def gather(self, work: Callable[[], _T]) -> list[_T]:
        """What `work` returns on each rank, on all of them; what it raises on one is raised on all."""
        result: _T | None = None
        error: Exception | None = None
        try:
            result = work()
        except Exception as raised:  # noqa: BLE001 - raised again below, on every rank
            error = raised
        outcomes: list[tuple[_T, Exception | None]] = [(result, error)] * self.size  # type: ignore[list-item]
        if self.group is not None:
            dist.all_gather_object(outcomes, (result, error), group=self.group)
        for _, raised_there in outcomes:
            if raised_there is not None:
                raise raised_there
        return [value for value, _ in outcomes]

    def on_first(self, work: Callable[[], _T]) -> _T:
        """Do `work` on rank 0; all ranks return or raise what it does."""
        return self.gather(lambda: work() if self.rank == 0 else None)[0]  # type: ignore[return-value]


def _reading_team() -> _Team:
    return _team_of(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)


@functools.lru_cache(maxsize=1)
def _team_of(world: Any) -> _Team:
    """One team for reading per process group: every new gloo group costs connections."""
    return _Team()
