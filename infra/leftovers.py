"""What AWS still has of a stack, by its tags: after a `destroy`, what was left behind.

    leftovers(clients, "dev", keeps_bucket=True)

The resource groups tagging API lists everything in the region that has the stack's tags, or those by which controllers
mark what is the cluster's. It knows a thing for a while after its end, so what can be asked is asked itself. IAM is not
in it: roles are the only kind of the program's resources that it does not list, and they cost nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from botocore.exceptions import ClientError

from infra.account import Clients, cluster_of, pages
from infra.settings import PROJECT
from infra.sweep import CNI_TAG, CONTROLLER_TAG, log_group_of

ENDED = {"terminated", "shutting-down", "deleted", "deleting"}


@dataclass(frozen=True)
class Leftover:
    """One thing that is still there."""

    arn: str
    state: Literal["left", "kept", "going"]
    """left: somebody pays for it, or it is in the way; kept: as the settings say; going: AWS removes it by itself."""
    note: str = ""


def leftovers(clients: Clients, stack: str, keeps_bucket: bool) -> list[Leftover]:
    """All that is there, by ARN. `keeps_bucket` is the setting storage.retainOnDelete."""
    cluster = cluster_of(stack)
    of_stack = [{"Key": "project", "Values": [PROJECT]}, {"Key": "stack", "Values": [stack]}]
    queries: list[list[dict[str, Any]]] = [
        of_stack,
        [{"Key": f"kubernetes.io/cluster/{cluster}", "Values": ["owned"]}],
        [{"Key": CONTROLLER_TAG, "Values": [cluster]}],
        [{"Key": CNI_TAG, "Values": [cluster]}],
    ]
    client = clients("resourcegroupstaggingapi")
    arns = {
        each["ResourceARN"]
        for filters in queries
        for page in pages(client, "get_resources", TagFilters=filters)
        for each in page["ResourceTagMappingList"]
    }
    # EKS makes it without tags.
    prefix = log_group_of(stack)
    for page in pages(clients("logs"), "describe_log_groups", logGroupNamePrefix=prefix):
        arns |= {group["arn"].removesuffix(":*") for group in page["logGroups"] if group["logGroupName"] == prefix}
    return [found for arn in sorted(arns) if (found := _look(clients, arn, keeps_bucket))]


def _look(clients: Clients, arn: str, keeps_bucket: bool) -> Leftover | None:
    """What is to be said of a thing; None when it is gone."""
    _, _, service, _, _, resource = arn.split(":", 5)
    if service == "s3":
        return _bucket(clients, arn, resource, keeps_bucket)
    if service == "kms":
        return _key(clients, arn)
    if service == "secretsmanager":
        return _secret(clients, arn)
    if service == "logs":
        return _log_group(clients, arn, resource.removeprefix("log-group:"))
    if service == "ec2":
        return _of_ec2(clients, arn, *resource.partition("/")[::2])
    return Leftover(arn, "left")


def _bucket(clients: Clients, arn: str, name: str, keeps: bool) -> Leftover | None:
    try:
        clients("s3").head_bucket(Bucket=name)
    except ClientError as error:
        if error.response["Error"]["Code"] in ("404", "NoSuchBucket"):
            return None
    return Leftover(arn, "kept", "the data; storage.retainOnDelete") if keeps else Leftover(arn, "left")


def _key(clients: Clients, arn: str) -> Leftover | None:
    try:
        found = clients("kms").describe_key(KeyId=arn)["KeyMetadata"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NotFoundException":
            raise
        return None
    if found["KeyState"] == "PendingDeletion":
        return Leftover(arn, "going", f"deleted on {found['DeletionDate']:%Y-%m-%d}")
    return Leftover(arn, "left")


def _secret(clients: Clients, arn: str) -> Leftover | None:
    try:
        found = clients("secretsmanager").describe_secret(SecretId=arn)
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceNotFoundException":
            raise
        return None
    if "DeletedDate" in found:
        return Leftover(arn, "going", f"deleted on {found['DeletedDate']:%Y-%m-%d}")
    return Leftover(arn, "left")


def _log_group(clients: Clients, arn: str, name: str) -> Leftover | None:
    found = pages(clients("logs"), "describe_log_groups", logGroupNamePrefix=name)
    there = any(group["logGroupName"] == name for page in found for group in page["logGroups"])
    return Leftover(arn, "left") if there else None


def _of_ec2(clients: Clients, arn: str, kind: str, name: str) -> Leftover | None:
    """EC2 forgets the tags of what is gone at once, but for instances and NAT gateways, which it shows for an hour."""
    ec2 = clients("ec2")
    if not ec2.describe_tags(Filters=[{"Name": "resource-id", "Values": [name]}])["Tags"]:
        return None
    state = ""
    if kind == "instance":
        reservations = ec2.describe_instances(InstanceIds=[name])["Reservations"]
        state = next((each["State"]["Name"] for group in reservations for each in group["Instances"]), "terminated")
    elif kind == "natgateway":
        gateways = ec2.describe_nat_gateways(NatGatewayIds=[name])["NatGateways"]
        state = gateways[0]["State"] if gateways else "deleted"
    return None if state in ENDED else Leftover(arn, "left", state)
