"""What Karpenter may launch, as specs of NodePools and EC2NodeClasses: nodes like those of the node groups.

The fields are those of Karpenter 1.14: https://karpenter.sh/v1.14/concepts/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi

from infra import settings
from infra.accelerators import FSX_TAINT, NEURON_TAINT, AcceleratorGroup
from infra.nodes import IMDS_HOP_LIMIT
from infra.versions import AMI_RELEASE

CAPACITY_TYPES = {
    "on-demand": "on-demand",
    "spot": "spot",
    "reservation": "reserved",
    "capacity-block": "reserved",
}

TERMINATION_GRACE = "20m"
"""How long pods may hold up the drain of their node."""


def requirement(key: str, *values: str, operator: str = "In") -> dict[str, Any]:
    """One condition on the nodes of a NodePool."""
    return {"key": key, "operator": operator, "values": list(values)}


def cpu_pool(cpu_limit: int) -> dict[str, Any]:
    """Spec of the NodePool for data preparation and heads: x86, on demand, for a lost head ends a run."""
    requirements = [
        requirement("kubernetes.io/arch", "amd64"),
        requirement("kubernetes.io/os", "linux"),
        requirement("karpenter.sh/capacity-type", "on-demand"),
        requirement("karpenter.k8s.aws/instance-category", "c", "m", "r"),
        requirement("karpenter.k8s.aws/instance-generation", "5", operator="Gt"),
    ]
    return _pool("cpu", requirements, {"cpu": str(cpu_limit)})


def accelerator_pool(section: settings.AcceleratorGroup, node_class: str, labels: Mapping[str, str]) -> dict[str, Any]:
    """Spec of the NodePool for the nodes that a group's node group does not have, from `desired` to `max`."""
    requirements = [
        requirement("node.kubernetes.io/instance-type", section.instance_type),
        requirement("topology.k8s.aws/zone-id", section.zone),
        requirement("karpenter.sh/capacity-type", CAPACITY_TYPES[section.capacity]),
    ]
    pool = _pool(node_class, requirements, {"nodes": str(section.max - section.desired)})
    pool["template"]["metadata"] = {"labels": dict(labels)}
    pool["template"]["spec"]["taints"] = [{"key": NEURON_TAINT.key, "effect": NEURON_TAINT.effect}]
    return pool


def _pool(node_class: str, requirements: list[dict[str, Any]], limits: dict[str, str]) -> dict[str, Any]:
    return {
        "template": {
            "spec": {
                "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": node_class},
                "requirements": requirements,
                "startupTaints": [{"key": FSX_TAINT.key, "effect": FSX_TAINT.effect}],
                # A node's age ends no run.
                "expireAfter": "Never",
                "terminationGracePeriod": TERMINATION_GRACE,
            }
        },
        "limits": limits,
        # Nodes go when they are empty, all at once, and for no other reason: a moved pod is a run that starts over. An
        # old AMI is replaced that way too. The wait spans the pause between two stages.
        "disruption": {
            "consolidationPolicy": "WhenEmpty",
            "consolidateAfter": "10m",
            "budgets": [
                {"nodes": "100%", "reasons": ["Empty"]},
                {"nodes": "0", "reasons": ["Drifted", "Underutilized"]},
            ],
        },
    }


def node_class(
    disk_gib: int,
    profile: pulumi.Input[str],
    subnets: Sequence[pulumi.Input[str]],
    security_groups: Sequence[pulumi.Input[str]],
    tags: Mapping[str, str],
) -> dict[str, Any]:
    """Spec of an EC2NodeClass: what the launch templates of the node groups say, in Karpenter's words."""
    return {
        # One alias for all variants: Karpenter takes the NEURON AMI of the release for Neuron instance types.
        "amiSelectorTerms": [{"alias": f"al2023@v{AMI_RELEASE.partition('-')[2]}"}],
        "instanceProfile": profile,
        "subnetSelectorTerms": [{"id": subnet} for subnet in subnets],
        "securityGroupSelectorTerms": [{"id": group} for group in security_groups],
        "blockDeviceMappings": [
            {
                "deviceName": "/dev/xvda",
                "ebs": {
                    "volumeSize": f"{disk_gib}Gi",
                    "volumeType": "gp3",
                    "encrypted": True,
                    "deleteOnTermination": True,
                },
            }
        ],
        "metadataOptions": {
            "httpEndpoint": "enabled",
            "httpTokens": "required",
            "httpPutResponseHopLimit": IMDS_HOP_LIMIT,
        },
        "tags": dict(tags),
    }


def accelerator_class(
    group: AcceleratorGroup, profile: pulumi.Input[str], subnet: pulumi.Input[str], tags: Mapping[str, str]
) -> dict[str, Any]:
    """Spec of the EC2NodeClass of an accelerator group.

    Karpenter gives a node EFA interfaces on all its cards when a pod asks for `vpc.amazonaws.com/efa`. The layout
    efa-only has to be spelt out, and Karpenter wants a plain interface as the first: card 0 has two.
    """
    section = group.section
    spec = node_class(section.disk_gib, profile, [subnet], group.security_group_ids, tags)
    if section.instance_store and section.type.instance_store:
        spec["instanceStorePolicy"] = "RAID0"
    if section.reservation_id:
        spec["capacityReservationSelectorTerms"] = [{"id": section.reservation_id}]
    if group.placement_group:
        spec["placementGroupSelector"] = {"name": group.placement_group.name}
    if section.efa_interfaces and section.efa_layout == "efa-only":
        spec["networkInterfaces"] = [
            {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"},
            *(
                {"networkCardIndex": card, "deviceIndex": 1, "interfaceType": "efa-only"}
                for card in range(section.efa_interfaces)
            ),
        ]
    return spec
