"""How the workers of an attempt find one another, whatever started them: by a store in the launcher's process.

    meeting = Meeting("127.0.0.1")                                 # in the launcher
    world = World(rank, size, ..., meeting.of_attempt())            # handed to each worker
    run_attempt(settings, world, lambda: train(settings, world))    # in each worker

The launcher outlives any worker, so whoever is left can still say who is missing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # which its documents offer
from torch.distributed.distributed_c10d import PrefixStore, Store

from training import environment
from training.backends import World, backend_name, process_group
from training.config import Settings
from training.errors import RunFailed, UserError
from training.launchers import note_once, record_failure
from training.rundir import RunDir
from training.start_checks import Roll, Unlike, check_together

CONNECT_SECONDS = 60.0  # for one worker to reach the store, which is there before it
TELLING_SECONDS = 5.0
SILENCE_SECONDS = 5.0  # beyond `train.hang_timeout`, for workers that began to wait a little later
# The same for collectives, which can only say that they waited: the watch ends a worker sooner, and names who is lost.
COLLECTIVE_SECONDS = 30.0


class Meeting:
    """The store, reachable at `host`: an address of this machine that the workers have a way to."""

    def __init__(self, host: str) -> None:
        listener = socket.create_server((host, 0))  # bound to that address alone, which TCPStore by itself would not
        port = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self._store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())

    def of_attempt(self) -> str:
        """Where the workers of one attempt meet: `host:port/name`, in a name that no other attempt has."""
        return attempt_at(self.address)

    def store(self, meeting: str) -> Store:
        """What the workers of `meeting` see, for the launcher."""
        return PrefixStore(meeting.partition("/")[2], self._store)


def attempt_at(address: str) -> str:
    """See `Meeting.of_attempt`; for a process that is not the launcher's own."""
    return f"{address}/{uuid.uuid4().hex[:12]}"


def started_environment(settings: Settings) -> None:
    """Set here, for the processes that this one starts, what they must have when they start."""
    if backend_name(settings) == "neuron":
        environment.set_defaults(environment.NEURON)


def connect(meeting: str) -> Store:
    """The store of `Meeting.of_attempt`, for one worker. Raises `RunFailed`."""
    address, _, attempt = meeting.partition("/")
    host, _, port = address.rpartition(":")
    try:
        store = TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunFailed(f"the launcher does not answer at {address} ({first_line(error)})") from None
    return PrefixStore(attempt, store)


def address_towards(host: str, port: int = 9) -> str:
    """This machine's address on the way to `host`. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def run_attempt(settings: Settings, world: World, attempt: Callable[[], None]) -> None:
    """One worker's attempt, joined with the others; what a restart cannot mend is handed to the launcher as outcome."""
    try:
        with joined(settings, world):
            attempt()
    except UserError as error:
        run = RunDir(settings.run.dir)
        if world.rank == 0:
            run.write_outcome("user_error", str(error))
        elif not (isinstance(error, Unlike) or _told(run)):
            record_failure(settings, world.rank, str(error))
            raise RunFailed(str(error)) from error


@contextlib.contextmanager
def joined(settings: Settings, world: World) -> Iterator[None]:
    """For the time of the block this process is one of the workers of an attempt.

    Its environment is set, all workers have been checked together, and there is a process group if they are several.
    Raises as `check_together` does, and `RunFailed` when the group cannot be made.
    """
    backend = backend_name(settings)
    if backend == "neuron":
        environment.set_defaults(environment.NEURON | environment.of_node(world.local_size))
        if world.rank == 0:
            note_once(settings, environment.in_force())
    if world.size == 1:
        yield
        return
    store = connect(world.meeting)
    check_together(store, settings, world, backend)
    if backend == "neuron":
        os.environ |= environment.place_of_rank(world, _root(store, world))
    try:
        dist.init_process_group(
            process_group(settings),
            store=PrefixStore("group", store),
            rank=world.rank,
            world_size=world.size,
            timeout=timedelta(seconds=settings.train.hang_timeout + COLLECTIVE_SECONDS),
        )
    except RuntimeError as error:  # torch's errors of the network and of the store are such
        message = f"the workers could not connect to one another ({first_line(error)})"
        record_failure(settings, world.rank, message)
        raise RunFailed(f"rank {world.rank}: {message}") from error
    try:
        yield
    finally:
        dist.destroy_process_group()


def silent_ranks(world: World) -> list[int]:
    """Ranks that do not say within SILENCE_SECONDS that they, too, see nothing going on: lost, or stopped."""
    if not world.meeting:
        return []
    # A connection of its own: the attempt's may be what hangs.
    roll = Roll(connect(world.meeting), world.size)
    roll.sign("hang", world.rank)
    deadline = time.monotonic() + SILENCE_SECONDS
    while (missing := roll.missing("hang")) and time.monotonic() < deadline:
        time.sleep(0.1)
    return missing


def _told(run: RunDir) -> bool:
    """Whether rank 0 says within TELLING_SECONDS what is to be mended: most of it, all ranks find alike."""
    deadline = time.monotonic() + TELLING_SECONDS
    while not (told := bool(run.outcome())) and time.monotonic() < deadline:
        time.sleep(0.1)
    return told


def _root(store: Store, world: World) -> str:
    """Where Neuron's collectives meet: a second address and port, on the node of rank 0."""
    if world.rank == 0:
        host = address_towards(world.meeting.partition(":")[0])
        with socket.create_server((host, 0)) as probe:
            store.set("root", f"{host}:{probe.getsockname()[1]}")
    return store.get("root").decode()


def first_line(error: BaseException) -> str:
    """What an error says first."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
