"""What AWS offers that settings are checked against: Trainium instance types, regions and the zones in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

GROUP_LABEL = "llama-trainium/group"
"""Label of every node with the name of its group; the core nodes' is `core`."""

NEURON_KEY = "aws.amazon.com/neuron"
"""Key of the taint of Trainium nodes, and Kubernetes' name of their devices."""


@dataclass(frozen=True)
class InstanceType:
    """One Trainium instance type.

    Devices, vCPUs, memory, network cards and EFA interfaces are what EC2's DescribeInstanceTypes says, peaks what the
    Neuron documentation's pages of the architectures say (dense bf16).
    """

    name: str
    devices: int
    """Trainium chips: Kubernetes' `aws.amazon.com/neuron`."""
    cores: int
    """NeuronCores as programs see them, so workers of a node: Kubernetes' `aws.amazon.com/neuroncore`. Trn2 joins two
    physical cores into one (logical NeuronCore configuration 2, its default): 64 of 128."""
    vcpus: int
    memory_gib: int
    network_cards: int
    efa_interfaces: int
    """Most EFA interfaces, one a network card: Kubernetes' `vpc.amazonaws.com/efa`. 0: the type has no EFA."""
    instance_store: bool
    """Whether it has NVMe disks of its own."""
    peak_bf16_tflops: float
    """Of the whole node."""


INSTANCE_TYPES = {
    kind.name: kind
    for kind in (
        InstanceType("trn1.2xlarge", 1, 2, 8, 32, 1, 0, True, 190),
        InstanceType("trn1.32xlarge", 16, 32, 128, 512, 8, 8, True, 3040),
        InstanceType("trn1n.32xlarge", 16, 32, 128, 512, 16, 16, True, 3040),
        InstanceType("trn2.48xlarge", 16, 64, 192, 2048, 16, 16, True, 10672),
    )
}

REGIONS = (
    "us-east-1",
    "us-east-2",
    "us-west-2",
    "ap-northeast-1",
    "ap-south-1",
    "ap-southeast-2",
    "ap-southeast-4",
    "eu-north-1",
)
"""Regions with Trainium. Which type is in which zone differs and changes; docs/operations.md has the command to ask."""


_GIB_PER_VCPU = {"c": 2, "m": 4, "t": 4, "r": 8, "x": 16}
_SMALL = {"nano": (2, 0), "micro": (2, 1), "small": (2, 2), "medium": (1, 2), "large": (2, 0), "xlarge": (4, 0)}


def cpu_node(instance_type: str) -> tuple[int, int]:
    """vCPUs and memory (GiB) of an x86 type, by EC2's rule of names: m7i.4xlarge has 4 x 4 vCPUs of 4 GiB each.

    Where the rule does not say it, rather too little than too much: 2 GiB a vCPU, and 48 vCPUs for `metal`, the fewest
    that any has.
    """
    family, _, size = instance_type.partition(".")
    size = size.removeprefix("metal-")
    times = re.fullmatch(r"(\d+)xl(arge)?", size)
    vcpus, memory = (4 * int(times[1]), 0) if times else _SMALL.get(size, (48, 0))
    return vcpus, memory or vcpus * _GIB_PER_VCPU.get(re.split(r"\d", family)[0], 2)


def zone_prefix(region: str) -> str:
    """What the zone ids of a region begin with: `usw2` for us-west-2, `apse4` for ap-southeast-4.

    AWS' rule: the area, the initials of the direction (two for southeast), the number.
    """
    area, direction, number = region.split("-")
    return area + re.sub(r"^(north|south)?(east|west|central|north|south)?$", _initials, direction) + number


def _initials(match: re.Match[str]) -> str:
    return "".join(word[0] for word in match.groups() if word)


def is_zone_of(zone: str, region: str) -> bool:
    """Whether `zone` has the form of a zone id of `region`, such as usw2-az4 in us-west-2.

    Local zones and wavelength zones (usw2-lax1-az1) do not: they have no Trainium and no EKS nodes of this kind.
    """
    return re.fullmatch(rf"{zone_prefix(region)}-az[1-9]", zone) is not None
