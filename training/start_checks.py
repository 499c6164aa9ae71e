"""What the workers of an attempt check together before step 0: that all are there, and alike, and that they add up.

Each worker signs a roll in the attempt's store (`training.launchers.group`) and reports what it sees; rank 0 waits for
all reports, compares them with its own and tells the others the verdict. `check_sum`, on the device, comes when there
is a backend. A failure names the ranks: on hundreds of workers "it hangs" is no place to begin.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import uuid
from collections.abc import Sequence
from datetime import timedelta
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from training.backends import neuron
from training.backends.base import Backend, World
from training.config import Settings
from training.errors import RunFailed, UserError
from training.launchers import record_failure
from training.messages import ranks, shown

SLACK_SECONDS = 10.0  # that the others give rank 0 beyond its own time-out, to tell them
CORES_PER_DEVICE = 2  # of Trn1's /dev/neuron0 and so on
LIBRARIES = ("torch", "torch-xla", "torch-neuronx", "libneuronxla", "neuronx-cc", "neuronx-distributed", "numpy", "ray")

Report = dict[str, Any]


class Unlike(UserError):
    """The workers are not alike. Raised on all of them; rank 0 tells the launcher."""


class Roll:
    """Who has come to a point, by the store of the attempt."""

    def __init__(self, store: Store, size: int) -> None:
        self._store, self._size = store, size

    def sign(self, point: str, rank: int) -> None:
        """Rank `rank` has come to `point`."""
        self._store.set(f"{point}/{rank}", "here")

    def missing(self, point: str) -> list[int]:
        """Ranks that have not."""
        return [rank for rank in range(self._size) if not self._store.check([f"{point}/{rank}"])]


def report(settings: Settings, world: World, backend: str, token: str) -> Report:
    """What this worker sees; plain JSON values."""
    return {
        "host": socket.gethostname(),
        "settings": settings.resolved(),
        "code": _code(),
        "libraries": {name: _version(name) for name in LIBRARIES},
        "volume": _volume(settings, token),
        "core": _core(world) if backend == "neuron" else None,
        "devices": _devices(backend),
    }


def difference(reports: Sequence[Report]) -> str | None:
    """The first way in which the reports (by rank) are not those of one run, as one line; None if there is none."""
    first = reports[0]
    taken: dict[tuple[str, int], int] = {}
    for rank, other in enumerate(reports):
        who = f"rank {rank} on {other['host']}"
        there = f"rank 0 on {first['host']} has"
        for section, keys in first["settings"].items():
            for key, value in keys.items():
                if (found := other["settings"].get(section, {}).get(key)) != value:
                    return f"{section}.{key}: {shown(found)} for {who}, {there} {shown(value)}; expected the same"
        for name, version in first["libraries"].items():
            if other["libraries"][name] != version:
                return (
                    f"{name}: {other['libraries'][name]} for {who}, {there} {version}; "
                    "expected the same image on all nodes"
                )
        if other["code"] != first["code"]:
            return f"training: {who} has other code than rank 0; expected the same image on all nodes"
        for folder, content in first["volume"].items():
            if other["volume"][folder] != content:
                return f"{folder}: {who} does not find there what rank 0 does; expected one volume for all nodes"
        if other["devices"] == 0:
            return f"run.backend: {who} sees no device of it; expected one for each worker"
        if other["core"] is not None:
            if other["devices"] is not None and other["core"] >= other["devices"]:
                return (
                    f"NEURON_RT_VISIBLE_CORES: core {other['core']} for {who}, which has {other['devices']}; "
                    "expected no more workers on a node than it has cores"
                )
            mine = taken.setdefault((other["host"], other["core"]), rank)
            if mine != rank:
                return (
                    f"NEURON_RT_VISIBLE_CORES: core {other['core']} of {other['host']} for {ranks([mine, rank])}; "
                    "expected a core for each"
                )
    return None


def check_together(store: Store, settings: Settings, world: World, backend: str) -> None:
    """Return when all workers are there and alike.

    Raises `Unlike` on all of them, or `RunFailed` on those that are there when others have not come within
    `train.hang_timeout`.
    """
    timeout = settings.train.hang_timeout
    Roll(store, world.size).sign("start", world.rank)
    mark: Path | None = None
    try:
        if world.rank == 0:
            token = uuid.uuid4().hex
            mark = _mark(settings, token)
            mark.parent.mkdir(parents=True, exist_ok=True)
            mark.write_text(token)
            store.set("token", token)
        else:
            _wait(store, ["token"], timeout, settings, world, "start")
            token = store.get("token").decode()
        store.set(f"report/{world.rank}", json.dumps(report(settings, world, backend, token)))
        if world.rank == 0:
            names = [f"report/{rank}" for rank in range(world.size)]
            try:
                _wait(store, names, timeout, settings, world, "report")
            except RunFailed as error:
                store.set("verdict", json.dumps({"failed": str(error)}))
                raise
            unlike = difference([json.loads(store.get(name)) for name in names])
            store.set("verdict", json.dumps({"unlike": unlike} if unlike else {}))
        else:
            _wait(store, ["verdict"], timeout + SLACK_SECONDS, settings, world, "report")
    finally:
        if mark is not None:
            with contextlib.suppress(OSError):
                mark.unlink(missing_ok=True)
    verdict = json.loads(store.get("verdict"))
    if "failed" in verdict:
        raise RunFailed(verdict["failed"])
    if "unlike" in verdict:
        raise Unlike(verdict["unlike"])


def _wait(store: Store, names: list[str], timeout: float, settings: Settings, world: World, point: str) -> None:
    try:
        store.wait(names, timedelta(seconds=timeout))
    except dist.DistStoreError:
        missing = Roll(store, world.size).missing(point) or [0]  # all are there, and rank 0 says nothing
        others = f", nor did {ranks(missing[1:])}" if missing[1:] else ""
        message = f"did not start within train.hang_timeout ({settings.train.hang_timeout:g} s){others}"
        if world.rank == next(rank for rank in range(world.size) if rank not in missing):
            record_failure(settings, missing[0], message)
        raise RunFailed(f"rank {missing[0]} {message}") from None
    except dist.DistNetworkError:
        raise RunFailed(f"rank {world.rank}: the launcher is gone") from None


def check_sum(backend: Backend) -> None:
    """Add up over all workers, on their devices, what can only come out right. Raises `RunFailed`."""
    world = backend.world
    if world.size == 1:
        return
    values_2 = torch.tensor([1.0, world.rank + 1.0], device=backend.device)
    found, expected = backend.sum_(values_2).tolist(), [world.size, world.size * (world.size + 1) / 2]
    if found != expected:
        message = f"a sum over all workers is {found}, expected {expected}: the network between the devices is at fault"
        record_failure(backend.settings, world.rank, message)
        raise RunFailed(f"rank {world.rank}: {message}")


def _mark(settings: Settings, token: str) -> Path:
    return settings.run.dir / f".start-{token}"  # a new name each time: shared storage may remember an absence


def _volume(settings: Settings, token: str) -> dict[str, str]:
    """What this worker finds in the folders that all share, by the setting that names them."""
    found = {}
    for key, file in (("run.dir", _mark(settings, token)), ("data.output", settings.data_dir / "manifest.json")):
        try:
            found[key] = hashlib.sha256(file.read_bytes()).hexdigest()
        except OSError as error:
            found[key] = str(error.strerror)
    return found


@functools.cache
def _code() -> str:
    """A digest of this package: two images that differ in it train two programs."""
    folder = Path(__file__).parent
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(str(file.relative_to(folder)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "none"


def _core(world: World) -> int:
    """The NeuronCore that this worker will have, of those that NEURON_RT_VISIBLE_CORES lists ("0-31", "4,6")."""
    cores: list[int] = []
    for part in os.environ["NEURON_RT_VISIBLE_CORES"].split(","):
        low, _, high = part.partition("-")
        cores += range(int(low), int(high or low) + 1)
    return cores[world.local_rank % len(cores)]


def _devices(backend: str) -> int | None:
    """GPUs or NeuronCores that this worker sees; None where there are none to see: on CPUs, for Neuron's NxD too."""
    if backend == "cuda":
        return torch.cuda.device_count()
    if backend == "neuron" and not neuron.cpu_mode():
        return CORES_PER_DEVICE * len(list(Path("/dev").glob("neuron[0-9]*")))
    return None
