"""What of a stack costs money by the hour, and how much of it there is: idle, while it trains, scaled to zero.

    items(settings, Use(load_balancers=1))

The numbers are those of the settings that the program makes its resources from; a test holds them against what it
registers. Idle: no job runs, and each group has the nodes that its settings keep. Training: the group that trains has
the nodes that the run needs. Scaled to zero: no group has a node, whatever `min` and `desired` say.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from infra.network import ENDPOINT_SERVICES
from infra.observability import DISK_GIB
from infra.settings import AcceleratorGroup, CoreNodes, Settings


@dataclass(frozen=True)
class Use:
    """What the workloads of a stack add to its platform."""

    load_balancers: int = 0
    held_nodes: int = 0
    """Nodes of the group that trains which a RayCluster that stays holds, idle or not."""
    trains_on_held: bool = False
    """Whether the run is on that cluster; otherwise its nodes are others."""


@dataclass(frozen=True)
class Item:
    """One kind of thing that is paid for."""

    name: str
    key: str | None
    """Of its price (infra/prices.py); None: it costs nothing by the hour."""
    idle: float
    training: float
    zero: float
    note: str = ""


def items(settings: Settings, use: Use) -> list[Item]:
    """Everything that is paid by the hour. `settings` have their derived values."""
    network = settings.network
    gateways = len(network.zones) if network.nat == "per-zone" else 1
    endpoints = len(network.zones) * sum(len(ENDPOINT_SERVICES[key]) for key in network.endpoints)
    found = [_always("control plane", "eks-cluster", 1), *_core(settings.core_nodes, settings.autoscaler)]
    for group in settings.accelerators:
        found += _group(settings, group, use)
    found += [
        _always("file system, GiB", f"fsx-{settings.storage.throughput}", settings.storage.size_gib),
        _always("NAT gateways", "nat-gateway", gateways),
        _always("their addresses", "public-ipv4", gateways),
        _always("interface endpoints, each in a zone", "interface-endpoint", endpoints),
        _always("load balancers", "load-balancer", use.load_balancers),
        _always("key of the secrets", "kms-key", 1),
        _always("Grafana's password", "secret", int(settings.observability != "none")),
        _always("Prometheus' disk, GiB", "gp3", DISK_GIB if settings.observability == "full" else 0),
    ]
    return [item for item in found if item.training or item.idle or item.zero]


def _always(name: str, key: str, count: float) -> Item:
    return Item(name, key, count, count, count)


def _core(nodes: CoreNodes, autoscaler: str) -> Iterator[Item]:
    """The core nodes: cluster-autoscaler leaves `min` of them when nothing runs, otherwise there are `desired`."""
    idle = nodes.min if autoscaler == "cluster-autoscaler" else nodes.desired
    yield Item("core nodes", nodes.instance_type, idle, nodes.desired, idle)
    yield _disks("core disks, GiB", nodes.disk_gib, idle, nodes.desired, idle)


def _group(settings: Settings, group: AcceleratorGroup, use: Use) -> Iterator[Item]:
    trains = group.name == settings.training_group.name
    kept = group.min if settings.autoscaler == "cluster-autoscaler" else group.desired
    busy = kept
    if trains:
        beside = 0 if use.trains_on_held else use.held_nodes
        busy = max(kept, use.held_nodes, settings.training.nodes + beside)
        kept = max(kept, use.held_nodes)
    name = f"{group.name} nodes"
    if group.capacity == "capacity-block":
        yield Item(name, None, kept, busy, 0, "a capacity block is paid when it is bought, and not in here")
    elif group.capacity == "reservation":
        note = f"a reservation is billed used or not; its size is taken to be max, {group.max}"
        yield Item(name, group.instance_type, group.max, group.max, group.max, note)
    else:
        note = "at the on-demand price, which spot is below" if group.capacity == "spot" else ""
        yield Item(name, group.instance_type, kept, busy, 0, note)
    yield _disks(f"{group.name} disks, GiB", group.disk_gib, kept, busy, 0)


def _disks(name: str, gib: int, idle: int, training: int, zero: int) -> Item:
    return Item(name, "gp3", gib * idle, gib * training, gib * zero)
