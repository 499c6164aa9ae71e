"""What no single value can tell: settings that do not go together. Each mistake is a line that begins with its key."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Iterator
from ipaddress import IPv4Network, collapse_addresses
from typing import TYPE_CHECKING, Any

from infra import run_settings
from infra.catalog import INSTANCE_TYPES, is_zone_of, zone_prefix
from infra.subnets import MAX_ZONES, SERVICE_CIDR, pod_subnet_cidrs, subnet_cidrs
from infra.values import CARRIER_RANGE, private_range
from training.messages import expected_one_of, shown

if TYPE_CHECKING:
    from infra import settings as stack

# Set by this program, or by EKS and the autoscalers, which find by them what is theirs.
RESERVED_TAGS = re.compile(
    r"project|stack|cost-centre|Name|eks:.*|kubernetes\.io/cluster.*|k8s\.io/cluster-autoscaler.*|karpenter\..*"
)
OTHER_GROUPS = ("core", "cpu")  # infra.nodes.CoreNodes, and the node pool that Karpenter adds
AWS_RESERVES = 5  # addresses of every subnet


def network(net: stack.Network) -> Iterator[str]:
    """Ranges and zones that a VPC cannot have."""
    if not 2 <= len(net.zones) <= MAX_ZONES:
        yield f"zones: {shown(net.zones)}, expected 2 to {MAX_ZONES} zone ids"
    inside = private_range(net.cidr)
    if inside is None:
        yield f"cidr: {net.cidr}, expected a private network: within 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16"
    if not (net.pod_cidr.subnet_of(CARRIER_RANGE) or (inside and net.pod_cidr.subnet_of(inside))):
        # AWS refuses to join a range of another RFC 1918 block to a VPC.
        yield f"podCidr: {net.pod_cidr}, expected a network within {CARRIER_RANGE} or within cidr's {inside}"
    for key, cidr in (("cidr", net.cidr), ("podCidr", net.pod_cidr)):
        if cidr.prefixlen < 16:
            yield f"{key}: {cidr}, expected at most a /16, which is the largest range of a VPC"
        if cidr.overlaps(SERVICE_CIDR):
            yield f"{key}: {cidr}, expected no overlap with {SERVICE_CIDR}, the addresses of Kubernetes services"
    if net.cidr.overlaps(net.pod_cidr):
        yield f"podCidr: {net.pod_cidr}, expected no overlap with cidr ({net.cidr})"
    zones = min(max(len(net.zones), 2), MAX_ZONES)
    for key, cidr, cut in (("cidr", net.cidr, subnet_cidrs), ("podCidr", net.pod_cidr, pod_subnet_cidrs)):
        try:
            cut(cidr, zones)
        except ValueError as error:
            yield f"{key}: {cidr}, {error}"


def public_access(cluster: stack.Cluster) -> Iterator[str]:
    """An API server that the world can reach, or that private networks cannot reach as they seem to."""
    cidrs = cluster.public_access_cidrs
    if IPv4Network("0.0.0.0/0") in collapse_addresses(cidrs) and not cluster.i_know_the_api_is_open_to_the_world:
        yield (
            f"publicAccessCidrs: {', '.join(map(str, cidrs))}, expected your own networks, or with them "
            "iKnowTheApiIsOpenToTheWorld: true"
        )
    for index, cidr in enumerate(cidrs):
        if private_range(cidr) or cidr.subnet_of(CARRIER_RANGE):
            why = "private networks reach the private endpoint"
            yield f"publicAccessCidrs[{index}]: {cidr}, expected a public network: {why}"


def bounds(nodes: stack.CoreNodes | stack.AcceleratorGroup) -> Iterator[str]:
    """min <= desired <= max."""
    if nodes.min > nodes.desired:
        yield f"min: {nodes.min}, expected at most desired ({nodes.desired})"
    if nodes.desired > nodes.max:
        yield f"desired: {nodes.desired}, expected at most max ({nodes.max})"


def accelerators(group: stack.AcceleratorGroup) -> Iterator[str]:
    """What the instance type lacks, and ways of buying that do not go together."""
    if group.name in OTHER_GROUPS:
        yield f"name: {group.name}, expected another: {' and '.join(OTHER_GROUPS)} are the groups of CPU nodes"
    if group.efa and not group.type.efa_interfaces:
        having = [name for name, kind in INSTANCE_TYPES.items() if kind.efa_interfaces]
        yield f"efa: true, expected false: {group.instance_type} has no EFA, {', '.join(having)} have"
    by_id = group.capacity in ("reservation", "capacity-block")
    if by_id and group.reservation_id is None:
        yield f"reservationId: none, expected the id of the {group.capacity}, such as cr-0123456789abcdef0"
    if group.reservation_id is not None and not by_id:
        yield f"reservationId: {group.reservation_id}, expected none with capacity {group.capacity}"
    if group.capacity == "capacity-block" and group.min:
        # Before a block begins and after it ends EC2 launches nothing, and EKS takes the group for broken.
        yield f"min: {group.min}, expected 0 with capacity capacity-block, which begins and ends"
    if group.capacity == "capacity-block" and group.placement_group:
        yield "placementGroup: true, expected false with capacity capacity-block, which has its own placement"


def image(chosen: stack.Image) -> Iterator[str]:
    """An image that is there already and one to build, or nothing to build from."""
    for key in ("context", "base") if chosen.prebuilt else ():
        if (value := getattr(chosen, key)) is not None:
            yield f"{key}: {shown(value)}, expected none with image.prebuilt, with which nothing is built"
    if chosen.context is not None and not chosen.prebuilt and not os.path.isdir(chosen.context):
        yield f"context: {shown(chosen.context)}, expected a folder"


def tags(given: dict[str, str]) -> Iterator[str]:
    """Keys of tags that AWS refuses or that the program sets itself."""
    for key in given:
        if RESERVED_TAGS.fullmatch(key):
            yield f"{key}: {shown(given[key])}, expected another key: the platform sets this one itself"
        elif key.lower().startswith("aws:") or not re.fullmatch(r"[\w .:/=+@-]{1,128}", key):
            wanted = "1 to 128 letters, digits, spaces and _.:/=+-@, not beginning with aws:"
            yield f"{shown(key)}: not a key that AWS takes, expected {wanted}"


def stack_name(name: str) -> Iterator[str]:
    """The cluster is llama-trainium-STACK: 24 characters leave room for names made from it, of which many end at 63."""
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,22}[a-z0-9])?", name):
        yield f"stack: {shown(name)}, expected at most 24 of a-z, 0-9 and -, a letter first and no - last"


def together(settings: stack.Settings) -> Iterator[str]:
    """All that spans groups of settings, which have their derived values by now."""
    zones = settings.network.zones
    for index, zone in enumerate(zones):
        if not is_zone_of(zone, settings.region):
            wanted = f"a zone id of {settings.region}, such as {zone_prefix(settings.region)}-az1"
            yield f"network.zones[{index}]: {shown(zone)}, expected {wanted}"
    names = Counter(group.name for group in settings.accelerators)
    private = dict(zip(zones, subnet_cidrs(settings.network.cidr, len(zones)), strict=True))
    for index, group in enumerate(settings.accelerators):
        key = f"accelerators[{index}]"
        if names[group.name] > 1:
            yield f"{key}.name: {group.name}, expected a name that no other group has"
        if group.zone not in private:
            yield f"{key}.zone: {shown(group.zone)}, expected one of network.zones ({shown(', '.join(zones))})"
            continue
        subnet = private[group.zone].private
        addresses = max(1, group.efa_interfaces if group.efa_layout == "efa" else 1)
        if (most := (subnet.num_addresses - AWS_RESERVES) // addresses) < group.max:
            yield (
                f"{key}.max: {group.max}, expected at most {most}: a node takes {addresses} addresses of {subnet}; "
                "a larger network.cidr has more, and efaLayout efa-only takes 1"
            )
    if settings.storage.zone != settings.training_group.zone:
        group = settings.training_group
        wanted = f"{shown(group.zone)}, the zone of {group.name}, the group that trains"
        yield f"storage.zone: {shown(settings.storage.zone)}, expected {wanted}"
    yield from _training(settings)


def _training(settings: stack.Settings) -> Iterator[str]:
    training, group = settings.training, settings.training_group
    if group.name != training.group:
        names = [known.name for known in settings.accelerators]
        yield f"training.group: {shown(training.group)}{expected_one_of(training.group, names)}"
        return
    if training.nodes > group.max:
        yield f"training.nodes: {training.nodes}, expected at most {group.max}, the max of group {group.name}"
        return
    cores = f"the {group.type.cores} cores of one {group.instance_type}"
    size = _whole(training.settings.get("parallel", {}).get("tensor_parallel_size"))
    if size > 0 and group.type.cores % size:
        yield f"training.settings.parallel.tensor_parallel_size: {size}, expected a divisor of {cores}"
        return
    workers = training.nodes * group.type.cores
    has_token = settings.hugging_face_token is not None
    yield from run_settings.mistakes(training, workers, "neuron", f"nodes x {cores}", has_token)


def _whole(value: Any) -> int:
    """A whole number as training.config would read it; 0 for what it refuses."""
    with contextlib.suppress(ValueError, TypeError, OverflowError):
        return int(value)
    return 0
