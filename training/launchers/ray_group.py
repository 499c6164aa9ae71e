"""What Ray Train does with the workers of each attempt before they train: on any number of nodes, of any device.

Ray's own TorchXLAConfig cannot span two Trn1 nodes (ray#65070), and shares neither NeuronCores nor the order of ranks
between the workers of a node under Train V2. Here Ray only starts the workers and tells each its place; how they find
one another, and the environment with the second address and port that Neuron wants, is `training.launchers.group`'s, as
under any launcher.
"""

from __future__ import annotations

import os
from typing import Any

import ray.train
from ray.train.backend import Backend, BackendConfig

from training.backends import World
from training.launchers.group import attempt_at

MEETING = "LLAMA_TRAINIUM_MEETING"

WORKER_ENV = {
    # Ray would show each worker the core that it counts for it; torch_xla wants those of all workers of the node.
    "RAY_EXPERIMENTAL_NOSET_NEURON_RT_VISIBLE_CORES": "1",
}


class RayGroup(BackendConfig):  # type: ignore[misc]  # ray is not typed
    """Names a place to meet, at the launcher's `address`, for every group of workers that Ray Train starts."""

    def __init__(self, address: str) -> None:
        self.address = address

    @property
    def backend_cls(self) -> type[Backend]:
        """Ray Train calls it in its controller."""
        return _Group


class _Group(Backend):  # type: ignore[misc]
    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: RayGroup) -> None:
        """Ray Train has started all workers of an attempt, the first or one after a fault."""
        worker_group.execute(_meet_at, attempt_at(backend_config.address))


def _meet_at(meeting: str) -> None:
    os.environ[MEETING] = meeting


def world_of_ray() -> World:
    """This worker's place: ranks fill one node after the other, and count within it from 0."""
    context = ray.train.get_context()
    return World(
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        os.environ[MEETING],
    )
