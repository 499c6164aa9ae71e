"""Settings of the workloads that do not go with the nodes they run on. Each mistake is a line that begins with its key.

Kubernetes would say none of it: a pod that fits no node and a gang that its queue never admits wait for ever.
"""

from __future__ import annotations

from collections.abc import Iterator

from training.messages import shown
from workloads.platform import NodeShape
from workloads.settings import StageName, Workloads
from workloads.sizes import SUBMITTER, Size, gang_sizes, head_size, prepare_size, worker_size

_UNITS = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
_UNITS |= {f"{unit}i": 1024.0**power for power, unit in enumerate("KMGTP", 1)}


def mistakes(settings: Workloads, nodes: int, core: NodeShape, workers: NodeShape) -> Iterator[str]:
    """Lines about `settings`, which have their derived values; `nodes` train."""
    yield from _requests(settings, core, workers)
    if core == workers:
        yield from _together(settings, nodes, core)
    yield from _cluster(settings, nodes, workers)
    yield from _queue(settings, nodes, core, workers)


def quantity(text: str) -> float:
    """A Kubernetes quantity as a number: bytes, CPUs or devices. `text` has been checked."""
    number = text.rstrip("mkKMGTPi")
    return float(number) * _UNITS.get(text[len(number) :], 1.0)


def _requests(settings: Workloads, core: NodeShape, workers: NodeShape) -> Iterator[str]:
    pods = (
        ("head", head_size(settings, core), core),
        ("prepare", prepare_size(settings, core), core),
        ("worker", worker_size(settings, workers), workers),
    )
    for name, size, node in pods:
        kind = f"{node.instance_type} of group {node.name}" if node.instance_type else "node"
        for key, asked, most in (("cpu", size.cpu, node.vcpus), ("memoryGib", size.memory_gib, node.memory_gib)):
            if asked > most:
                wanted = f"at most {most}, what pods can have of one {kind}"
                yield f"resources.{name}.{key}: {asked:g}, expected {wanted}"


def _together(settings: Workloads, nodes: int, node: NodeShape) -> Iterator[str]:
    """Heads and workers on the same nodes."""
    for stage in settings.stages:
        sizes = _all_pods(settings, stage, nodes, node, node)
        for key, asked, most in (
            ("cpu", sum(size.cpu for size in sizes), node.nodes * node.vcpus),
            ("memoryGib", sum(size.memory_gib for size in sizes), node.nodes * node.memory_gib),
        ):
            if asked > most:
                wanted = f"at most {most}, what all nodes have together"
                yield f"resources: all pods of {stage} ask for {key} {asked:g}, expected {wanted}"


def _cluster(settings: Workloads, nodes: int, workers: NodeShape) -> Iterator[str]:
    cluster = settings.ray_cluster
    if not cluster.enabled:
        return
    trains = any(stage != "prepare" for stage in settings.stages)
    if cluster.max_nodes > workers.nodes:
        yield f"rayCluster.maxNodes: {cluster.max_nodes}, expected at most {workers.nodes}, the max of {workers.name}"
    if trains and settings.gang and cluster.min_nodes + nodes > workers.nodes:
        left = f"{workers.nodes - nodes}: of the {workers.nodes} nodes of {workers.name}, {nodes} train"
        yield f"rayCluster.minNodes: {cluster.min_nodes}, expected at most {left}"
    if trains and not settings.gang and cluster.max_nodes < nodes:
        yield (f"rayCluster.maxNodes: {cluster.max_nodes}, expected at least training.nodes ({nodes}) with gang: false")


def _queue(settings: Workloads, nodes: int, core: NodeShape, workers: NodeShape) -> Iterator[str]:
    if not settings.gang:  # no pod is in the queue
        return
    for resource, text in settings.queue.capability.items():
        needs = {
            stage: sum(_amount(size, resource) for size in _all_pods(settings, stage, nodes, core, workers))
            for stage in settings.stages
        }
        stage, most = max(needs.items(), key=lambda item: item[1], default=("", 0.0))
        if most > quantity(text):
            enough = f"{most / 2**30:g}Gi" if resource == "memory" else f"{most:g}"
            yield (
                f"queue.capability.{resource}: {shown(text)}, expected at least {enough}, "
                f"which all pods of {stage} ask for together: they would wait for ever"
            )


def _all_pods(settings: Workloads, stage: StageName, nodes: int, core: NodeShape, workers: NodeShape) -> list[Size]:
    submits = settings.engine == "ray" or stage == "prepare"
    return [*gang_sizes(settings, stage, nodes, core, workers), *([SUBMITTER] if submits else [])]


def _amount(size: Size, resource: str) -> float:
    if resource == "cpu":
        return size.cpu
    if resource == "memory":
        return size.memory_gib * 2**30
    return size.devices.get(resource, 0)
