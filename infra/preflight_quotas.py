"""The quotas that a stack needs, against what the account has and what others in it use already.

What the stack itself has, by its tags, is needed and not used by others: a stack that runs passes its own check.
Capacity blocks have no quota; a reservation was counted against the one for on-demand when it was made.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from botocore.exceptions import ClientError

from infra.account import is_own, pages
from infra.catalog import INSTANCE_TYPES, cpu_node
from infra.preflight_checks import Finding, Subject

STANDARD_FAMILIES = frozenset({"a", "c", "d", "h", "i", "im", "is", "m", "r", "t", "z"})
"""Letters of the types that share one quota. Not inf, trn, hpc, dl and mac, which have their own."""


@dataclass(frozen=True)
class Quota:
    """A quota by the codes of Service Quotas: `aws service-quotas list-service-quotas --service-code ...`.

    The codes are those that public tools ask with, and lists of that command in public repositories, seen 2026-11-21.
    """

    service: str
    code: str
    name: str


TRN = Quota("ec2", "L-2C3B7624", "Running On-Demand Trn instances")
TRN_SPOT = Quota("ec2", "L-6B0D517C", "All Trn Spot Instance Requests")
STANDARD = Quota("ec2", "L-1216C47A", "Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances")
ADDRESSES = Quota("ec2", "L-0263D0A3", "EC2-VPC Elastic IPs")
VPCS = Quota("vpc", "L-F678F1CE", "VPCs per Region")
LUSTRE = Quota("fsx", "L-8F1B9C74", "Lustre Persistent_2 storage capacity")


def vcpus(subject: Subject) -> Iterator[Finding]:
    """vCPUs for the Trainium groups and the core nodes."""
    settings = subject.settings
    for quota, capacity in ((TRN, "on-demand"), (TRN_SPOT, "spot")):
        groups = [group for group in settings.accelerators if group.capacity == capacity]
        needed = sum(
            group.type.vcpus
            * (settings.training.nodes if group.name == settings.training_group.name else group.desired)
            for group in groups
        )
        most = sum(group.type.vcpus * group.max for group in groups)
        if groups:
            used = _running_vcpus(subject, lambda kind: kind.startswith("trn"), capacity == "spot")
            yield _judged(subject, quota, needed, most, used, "vCPUs", "accelerators")
    core = settings.core_nodes
    if _is_standard(core.instance_type):
        each = cpu_node(core.instance_type)[0]
        most = core.max * each + (core.cpu_limit if settings.autoscaler == "karpenter" else 0)
        used = _running_vcpus(subject, _is_standard, False)
        yield _judged(subject, STANDARD, core.desired * each, most, used, "vCPUs", "coreNodes")


def network(subject: Subject) -> Iterator[Finding]:
    """A VPC, and an address for each NAT gateway."""
    ec2, section = subject.clients("ec2"), subject.settings.network
    addresses = ec2.describe_addresses()["Addresses"]
    gateways = len(section.zones) if section.nat == "per-zone" else 1
    yield _judged(subject, ADDRESSES, gateways, gateways, _others(addresses, subject), "addresses", "network.nat")
    vpcs = [vpc for page in pages(ec2, "describe_vpcs") for vpc in page["Vpcs"]]
    yield _judged(subject, VPCS, 1, 1, _others(vpcs, subject), "VPCs", "")


def storage(subject: Subject) -> Iterator[Finding]:
    """GiB of the file system."""
    found = [each for page in pages(subject.clients("fsx"), "describe_file_systems") for each in page["FileSystems"]]
    used = sum(
        each["StorageCapacity"]
        for each in found
        if each.get("LustreConfiguration", {}).get("DeploymentType") == "PERSISTENT_2"
        and not is_own(each, subject.stack)
    )
    size = subject.settings.storage.size_gib
    yield _judged(subject, LUSTRE, size, size, used, "GiB", "storage.sizeGib")


def _judged(subject: Subject, quota: Quota, needed: int, most: int, used: int, unit: str, key: str) -> Finding:
    """`needed` is what the stack cannot do without, `most` what its settings may grow to, `used` what others have."""
    limit = _limit(subject, quota)
    has = f"{quota.name}: {limit:,.0f} {unit}"
    taken = f", {used:,} of them in use by others" if used else ""
    ask = f"aws service-quotas request-service-quota-increase --region {subject.settings.region} "
    ask += f"--service-code {quota.service} --quota-code {quota.code} --desired-value {used + most}"
    if needed + used > limit:
        # Instances of others end one day; a VPC or a file system of others is there to stay.
        passes = unit == "vCPUs" and needed <= limit
        return Finding("quota", "warn" if passes else "fail", f"{has}{taken}, needed: {needed:,}", ask)
    if most + used > limit:
        return Finding("quota", "warn", f"{has}{taken}; {key} may grow to {most:,}", ask)
    return Finding("quota", "pass", f"{has}{taken}, needed: {most:,}")


def _limit(subject: Subject, quota: Quota) -> float:
    """The account's value, or AWS's default where the account has none of its own."""
    client, asked = subject.clients("service-quotas"), {"ServiceCode": quota.service, "QuotaCode": quota.code}
    try:
        answer = client.get_service_quota(**asked)
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchResourceException":
            raise
        answer = client.get_aws_default_service_quota(**asked)
    return float(answer["Quota"]["Value"])


def _others(found: list[dict[str, Any]], subject: Subject) -> int:
    return sum(not is_own(each, subject.stack) for each in found)


def _running_vcpus(subject: Subject, of_quota: Callable[[str], bool], spot: bool) -> int:
    """vCPUs of the instances that others run."""
    running = [{"Name": "instance-state-name", "Values": ["pending", "running"]}]
    reserved = pages(subject.clients("ec2"), "describe_instances", Filters=running)
    instances = [each for page in reserved for group in page["Reservations"] for each in group["Instances"]]
    return sum(
        _vcpus(each["InstanceType"])
        for each in instances
        if of_quota(each["InstanceType"])
        and (each.get("InstanceLifecycle") == "spot") == spot
        and not is_own(each, subject.stack)
    )


def _is_standard(instance_type: str) -> bool:
    letters = re.match("[a-z]+", instance_type)
    return letters is not None and letters[0] in STANDARD_FAMILIES


def _vcpus(instance_type: str) -> int:
    known = INSTANCE_TYPES.get(instance_type)
    return known.vcpus if known else cpu_node(instance_type)[0]
