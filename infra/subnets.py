"""How the VPC's two address ranges are cut into subnets; without Pulumi, so that settings can refuse what is too small.

Every zone gets a fixed quarter of each range, whatever the number of zones: adding a zone never renumbers a subnet that
exists, which would replace the subnet and every node in it.
"""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import NamedTuple

MAX_ZONES = 4

# Addresses of Kubernetes services. They exist inside the cluster only, but nothing that pods reach may have one.
SERVICE_CIDR = IPv4Network("172.20.0.0/16")

# A load balancer wants a subnet of /27 or more with 8 free addresses: the public eighth of a quarter of /22.
LONGEST_PREFIX = 22
# VPC CNI takes pods' addresses by /28 blocks and keeps one in reserve on every node: a quarter of /18 has 255 of them.
LONGEST_POD_PREFIX = 18


class ZoneCidrs(NamedTuple):
    """The subnets of one zone in the VPC's primary range."""

    private: IPv4Network
    public: IPv4Network


def subnet_cidrs(cidr: IPv4Network, zones: int) -> list[ZoneCidrs]:
    """The subnets of `zones` zones in `cidr`, in order.

    Of its quarter a zone uses the lower half for nodes and the eighth after it for load balancers and NAT; the rest is
    free. Raises ValueError when there are more than 4 zones or `cidr` is smaller than /22.
    """
    return [
        ZoneCidrs(private=next(quarter.subnets(1)), public=list(quarter.subnets(3))[4])
        for quarter in _quarters(cidr, zones, LONGEST_PREFIX)
    ]


def pod_subnet_cidrs(pod_cidr: IPv4Network, zones: int) -> list[IPv4Network]:
    """The pods' subnets of `zones` zones: a quarter of `pod_cidr` each, in order.

    Raises ValueError when there are more than 4 zones or `pod_cidr` is smaller than /18.
    """
    return _quarters(pod_cidr, zones, LONGEST_POD_PREFIX)


def _quarters(cidr: IPv4Network, zones: int, longest_prefix: int) -> list[IPv4Network]:
    if zones > MAX_ZONES:
        raise ValueError(f"expected at most {MAX_ZONES} zones")
    if cidr.prefixlen > longest_prefix:
        raise ValueError(f"expected at least a /{longest_prefix} for {zones} zones")
    return list(cidr.subnets(2))[:zones]
