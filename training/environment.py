"""The environment that Neuron and EFA read, in one place. What the pod or the user has set already wins.

`NEURON` is the same for all processes of a run and has to be there before one starts: the C library reads
MALLOC_ARENA_MAX then. `of_node` and `place_of_rank` are for each worker, before it imports torch_xla. (Where compiled
code is, depends on what is compiled: training/compile_cache.py.)
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from training.backends import World

# From AWS's guide to training on several Trn1 nodes, and NxD's own runs of Llama: the network between them, numerics,
# the compiler, and how far the host runs ahead of the device.
NEURON = {
    "CCOM_SOCKET_IFNAME": "eth0",
    "MALLOC_ARENA_MAX": "64",
    "NEURON_CC_FLAGS": "--model-type transformer",
    "NEURON_FUSE_SOFTMAX": "1",
    "NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS": "3",
    "NEURON_RT_STOCHASTIC_ROUNDING_EN": "1",
    # Without it torch_xla writes the numbers 0 and 1 into the code, and a learning rate of 0 is another program.
    "XLA_NO_SPECIAL_SCALARS": "1",
}
EFA = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}


def of_node(workers: int, devices: Path = Path("/dev/infiniband")) -> dict[str, str]:
    """What the workers of one node have: its cores, and EFA where its container was given any.

    All of the node's cores, not the worker's own: torch_xla 2.9 (torch_xla/_internal/neuron.py) refuses any number but
    LOCAL_WORLD_SIZE, and takes the one of number LOCAL_RANK.
    """
    cores = {"NEURON_RT_VISIBLE_CORES": "0" if workers == 1 else f"0-{workers - 1}"}
    return cores | (EFA if any(devices.glob("uverbs*")) else {})


def place_of_rank(world: World, root: str) -> dict[str, str]:
    """One worker's place among the others, as torchrun sets it: torch_xla reads it where TORCHELASTIC_RUN_ID is set.

    `root` is the `host:port` on the node of rank 0 where Neuron's collectives meet. By default each node takes an
    address of its own for that, which is why Ray's TorchXLAConfig does not reach a second node (ray#65070).
    """
    address, _, attempt = world.meeting.partition("/")
    host, _, port = address.rpartition(":")
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_size),
        "MASTER_ADDR": host,
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": attempt,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "NEURON_RT_ROOT_COMM_ID": root,
    }


def set_defaults(values: Mapping[str, str]) -> None:
    """Set in this process what is not set yet."""
    for name, value in values.items():
        os.environ.setdefault(name, value)


def ours(name: str) -> bool:
    """Whether a variable of this name is about the accelerator, its network or its numerics."""
    return name.startswith(("NEURON_", "FI_", "CCOM_", "XLA_", "NXD_", "MALLOC_ARENA_MAX"))


def handed_over() -> dict[str, str]:
    """What this process has of them, for workers that do not inherit from it."""
    return {name: value for name, value in os.environ.items() if ours(name)}


def in_force() -> str:
    """One line that says what this process has; not where this attempt meets, which is another place each time."""
    shown = sorted(name for name in os.environ if ours(name) and name != "NEURON_RT_ROOT_COMM_ID")
    return "environment: " + " ".join(f"{name}={shlex.quote(os.environ[name])}" for name in shown)
