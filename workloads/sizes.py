"""What the pods of a stage ask for: the stack's `workloads.resources`, else shares of the nodes they are meant for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from workloads.platform import NodeShape
from workloads.settings import EFA, NEURON, Pod, StageName, Workloads

HEAD_SHARE = 0.25
PREPARE_SHARE = 0.5
"""Of a core node: the rest is for the operators, the add-ons and the head that runs beside it."""


@dataclass(frozen=True)
class Size:
    """What one pod asks for."""

    cpu: float
    memory_gib: float
    devices: Mapping[str, int] = field(default_factory=dict)
    """Extended resources by Kubernetes' name."""

    def resources(self) -> dict[str, str]:
        """As Kubernetes writes it, for `requests` and `limits`."""
        return {
            "cpu": millis(round(self.cpu * 1000)),
            "memory": mebibytes(round(self.memory_gib * 1024)),
            **{name: str(count) for name, count in self.devices.items()},
        }


def millis(count: int) -> str:
    """Thousandths of a CPU in Kubernetes' canonical form: 1500m, but 2.

    Operators write the jobs that they are given back, in this form (k8s.io/apimachinery's `Quantity`). Anything else
    would be theirs from then on, and the next `pulumi up` a conflict over who may write it.
    """
    return f"{count}m" if count % 1000 else f"{count // 1000}"


def mebibytes(count: int) -> str:
    """Memory in Kubernetes' canonical form, as `millis`: 1536Mi, but 2Gi."""
    for unit in ("Mi", "Gi"):
        if count % 1024:
            return f"{count}{unit}"
        count //= 1024
    return f"{count}Ti"


SUBMITTER = Size(0.1, 0.5)
"""The pod that hands a RayJob to its cluster. It is not placed with the others, but their queue counts it."""


def head_size(settings: Workloads, core: NodeShape) -> Size:
    """Ray's head, or MPI's launcher: neither works, and memory grows with the number of workers it knows."""
    return _share(settings.resources.head, core, HEAD_SHARE)


def prepare_size(settings: Workloads, core: NodeShape) -> Size:
    """Data preparation, which uses every CPU that it is given."""
    return _share(settings.resources.prepare, core, PREPARE_SHARE)


def worker_size(settings: Workloads, workers: NodeShape) -> Size:
    """A worker pod, which has its node to itself: all devices, and what the node can give."""
    asked = _share(settings.resources.worker, workers, 1)
    devices = {name: count for name, count in ((NEURON, workers.neuron), (EFA, workers.efa)) if count}
    return Size(asked.cpu, asked.memory_gib, devices)


def gang_sizes(settings: Workloads, stage: StageName, nodes: int, core: NodeShape, workers: NodeShape) -> list[Size]:
    """All pods of a stage that are placed together: a head and `nodes` workers, or the one pod of the preparation."""
    if stage == "prepare":
        return [prepare_size(settings, core)]
    return [head_size(settings, core), *[worker_size(settings, workers)] * nodes]


def in_words(sizes: Sequence[Size]) -> str:
    """What pods of these sizes ask for together: "a pod of 2 CPUs, 7 GiB, and 2 pods of 112 CPUs, ..."."""
    said = []
    for size, same in groupby(sizes):
        count = len(list(same))
        asked = [f"{size.cpu:g} CPUs", f"{size.memory_gib:g} GiB", *(f"{n} {name}" for name, n in size.devices.items())]
        said.append(f"{'a pod' if count == 1 else f'{count} pods'} of {', '.join(asked)}")
    return ", and ".join(said)


def _share(asked: Pod, node: NodeShape, share: float) -> Size:
    return Size(asked.cpu or node.vcpus * share, asked.memory_gib or node.memory_gib * share)
