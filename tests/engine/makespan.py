"""The shortest time in which a stack can come up: its longest chain of resources that wait for one another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

# How long AWS takes, in seconds, by type (issue 4). What is not named here takes a few seconds at most.
SECONDS: dict[str, float] = {
    "aws:eks/cluster:Cluster": 600,
    "aws:fsx/lustreFileSystem:LustreFileSystem": 480,
    "docker-build:index:Image": 300,
    "aws:eks/nodeGroup:NodeGroup": 180,
    "aws:ec2/natGateway:NatGateway": 120,
    "aws:eks/addon:Addon": 60,
    "kubernetes:helm.sh/v3:Release": 60,
}


def longest_chain(resources: Iterable[Mapping[str, Any]], seconds: Mapping[str, float]) -> tuple[float, list[str]]:
    """Length in seconds, and URNs from first to last, of the longest chain in a stack's state.

    A resource waits for its dependencies, its provider and a parent that is a resource itself. A component that is
    waited for (only pulumi-eks' are: the SDK resolves our own to what is in them) is done with all that is in it.
    """
    known = {resource["urn"]: resource for resource in resources}
    children: dict[str, list[str]] = defaultdict(list)
    for resource in known.values():
        children[resource.get("parent", "")].append(resource["urn"])
    done: dict[str, tuple[float, list[str]]] = {}

    def end(urn: str) -> tuple[float, list[str]]:
        if urn not in done:
            resource = known[urn]
            if resource.get("custom"):
                before = max((end(one) for one in waits_for(resource, known)), default=(0.0, []))
                done[urn] = (before[0] + seconds.get(resource["type"], 0), [*before[1], urn])
            else:
                done[urn] = max((end(one) for one in children[urn]), default=(0.0, []))
        return done[urn]

    return max((end(urn) for urn in known if known[urn].get("custom")), default=(0.0, []))


def waits_for(resource: Mapping[str, Any], known: Mapping[str, Mapping[str, Any]]) -> set[str]:
    """URNs that a resource waits for before it is made."""
    urns = set(resource.get("dependencies") or [])
    urns |= {urn for of_one in (resource.get("propertyDependencies") or {}).values() for urn in of_one or []}
    if provider := resource.get("provider"):
        urns.add(provider.rsplit("::", 1)[0])
    parent = resource.get("parent")
    if parent and known.get(parent, {}).get("custom"):
        urns.add(parent)
    return urns & known.keys()
