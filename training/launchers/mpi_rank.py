"""One rank of `training.launchers.mpi`: `python -m training.launchers.mpi_rank MEETING TASK`, started by mpirun."""

from __future__ import annotations

import os
import signal
import sys
import time

from torch.distributed.distributed_c10d import Store

from training.backends import World
from training.config import Settings
from training.errors import RunFailed, UserError
from training.launchers import record_failure
from training.launchers.group import connect, first_line, run_attempt

LOST_RANK_SECONDS = 5.0


def world_of_mpi(meeting: str) -> World:
    """This process's place, by the variables that Open MPI gives each rank."""
    names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    rank, size, local_rank, local_size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in names)
    return World(rank, size, local_rank, local_size, meeting)


def main(meeting: str, task: str) -> int:
    """Do `train` or `precompile` with the settings that the launcher has left where the ranks meet."""
    # gloo announces its connections on standard output; what a worker has to say is in the run's folder.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    world = world_of_mpi(meeting)
    store = connect(meeting)
    settings = Settings.model_validate_json(store.get("settings"))
    try:
        if task == "precompile":
            _precompile(settings, store)
        else:
            _train(settings, world)
    except UserError as error:  # of precompile: `run_attempt` has its own way
        store.set("refused", str(error))
        return UserError.exit_code
    except RunFailed as error:  # recorded where it was raised
        print(f"error: {error}", file=sys.stderr)
        return RunFailed.exit_code
    except Exception as error:
        # A lost rank breaks the collectives of all others, which mpirun ends now: it is to hear of that one first.
        time.sleep(LOST_RANK_SECONDS)
        record_failure(settings, world.rank, f"{type(error).__name__} ({first_line(error)})")
        raise  # Python's exit code for it is 1, too
    return 0


def _precompile(settings: Settings, store: Store) -> None:
    from training.precompile import precompile

    store.set("summary", precompile(settings))


def _train(settings: Settings, world: World) -> None:
    from training.trainer import train

    parent = os.getppid()  # mpirun, or what it has on this host: a rank never outlives it
    run_attempt(settings, world, lambda: train(settings, world, parent))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
