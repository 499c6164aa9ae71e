"""What controllers in the cluster made in AWS, and left behind: taken away by the tags that say whose it was.

`pulumi destroy` removes what Pulumi made, and controllers remove what they made while they run. Left over is what they
could not: load balancers and volumes of objects that somebody applied by hand, network interfaces of nodes that went
away in a hurry, nodes of a Karpenter that was killed, the log group that EKS makes anew with its last lines. They hold
the subnets and the VPC, so `infra.destroy` sweeps between two attempts. As long as there is the cluster, all of it may
be in use, and nothing is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from botocore.exceptions import ClientError

from infra.account import Clients, cluster_of, pages, tag_filters

HELD = ("DependencyViolation", "InvalidParameterValue", "VolumeInUse", "ResourceInUse", "InvalidNetworkInterface.InUse")
"""AWS's words for what something else still uses."""
CONTROLLER_TAG = "elbv2.k8s.aws/cluster"
"""Of the load balancer controller's balancers, target groups and security groups; the value is the cluster."""
CNI_TAG = "cluster.k8s.amazonaws.com/name"
"""Of the interfaces that VPC CNI makes for pods."""
KARPENTER_TAG, VOLUME_TAG = "karpenter.sh/nodepool", "ebs.csi.aws.com/cluster"
"""Keys of Karpenter's instances and of the EBS driver's volumes, which have the stack's tags too (infra/addons.py)."""
_TAGS_AT_ONCE = 20


@dataclass
class Swept:
    """What was taken away, and what AWS has not let go yet."""

    removed: list[str] = field(default_factory=list)
    waiting: list[str] = field(default_factory=list)

    def attempt(self, what: str, remove: Callable[[], object]) -> None:
        """Remove a thing, or note that it is held. Raises botocore's other errors."""
        try:
            remove()
        except ClientError as error:
            code = error.response["Error"]["Code"]
            if code in HELD:
                self.waiting.append(what)
            elif "NotFound" not in code:
                raise
        else:
            self.removed.append(what)


def sweep(clients: Clients, stack: str) -> Swept:
    """Take away what is left of the stack outside of Pulumi. What is held by something else is for the next time."""
    swept = Swept()
    if cluster_is_gone(clients, stack):
        # In an order in which each is freed by those before it.
        for kind in (_load_balancers, _instances, _volumes, _interfaces, _security_groups, _log_group):
            kind(clients, stack, swept)
    return swept


def cluster_is_gone(clients: Clients, stack: str) -> bool:
    """Whether EKS has no cluster of the stack."""
    try:
        clients("eks").describe_cluster(name=cluster_of(stack))
    except ClientError as error:
        if error.response["Error"]["Code"] != "ResourceNotFoundException":
            raise
        return True
    return False


def volumes_of_claims(clients: Clients, stack: str) -> list[dict[str, Any]]:
    """EBS volumes that claims in the cluster have made."""
    filters = [*tag_filters(stack), {"Name": "tag-key", "Values": [VOLUME_TAG]}]
    return [each for page in pages(clients("ec2"), "describe_volumes", Filters=filters) for each in page["Volumes"]]


def _load_balancers(clients: Clients, stack: str, swept: Swept) -> None:
    """Those of the controller, and classic ones, which EKS makes for a Service without it."""
    new, classic = clients("elbv2"), clients("elb")
    arns = [each["LoadBalancerArn"] for p in pages(new, "describe_load_balancers") for each in p["LoadBalancers"]]
    for arn in _of_cluster(new, "ResourceArns", "ResourceArn", arns, stack):
        swept.attempt(f"load balancer {arn}", partial(new.delete_load_balancer, LoadBalancerArn=arn))
    arns = [each["TargetGroupArn"] for p in pages(new, "describe_target_groups") for each in p["TargetGroups"]]
    for arn in _of_cluster(new, "ResourceArns", "ResourceArn", arns, stack):
        swept.attempt(f"target group {arn}", partial(new.delete_target_group, TargetGroupArn=arn))
    balancers = [each for p in pages(classic, "describe_load_balancers") for each in p["LoadBalancerDescriptions"]]
    names = [each["LoadBalancerName"] for each in balancers]
    for name in _of_cluster(classic, "LoadBalancerNames", "LoadBalancerName", names, stack):
        swept.attempt(f"load balancer {name}", partial(classic.delete_load_balancer, LoadBalancerName=name))


def _of_cluster(client: Any, asked: str, key: str, things: list[str], stack: str) -> Iterator[str]:
    """Those of the things that have a tag of the stack's cluster."""
    cluster = cluster_of(stack)
    for start in range(0, len(things), _TAGS_AT_ONCE):
        for found in client.describe_tags(**{asked: things[start : start + _TAGS_AT_ONCE]})["TagDescriptions"]:
            tags = {tag["Key"]: tag.get("Value") for tag in found["Tags"]}
            if tags.get(CONTROLLER_TAG) == cluster or f"kubernetes.io/cluster/{cluster}" in tags:
                yield found[key]


def _instances(clients: Clients, stack: str, swept: Swept) -> None:
    ec2 = clients("ec2")
    filters = [*tag_filters(stack), {"Name": "tag-key", "Values": [KARPENTER_TAG]}]
    for page in pages(ec2, "describe_instances", Filters=filters):
        for instance in [each for reservation in page["Reservations"] for each in reservation["Instances"]]:
            name, state = instance["InstanceId"], instance["State"]["Name"]
            if state in ("pending", "running", "stopping", "stopped"):
                ec2.terminate_instances(InstanceIds=[name])
                swept.removed.append(f"instance {name}")
                swept.waiting.append(f"instance {name}")  # its interfaces and volumes are free when it has ended
            elif state == "shutting-down":
                swept.waiting.append(f"instance {name}")


def _volumes(clients: Clients, stack: str, swept: Swept) -> None:
    ec2 = clients("ec2")
    for volume in volumes_of_claims(clients, stack):
        name = volume["VolumeId"]
        if volume["State"] == "available":
            swept.attempt(f"volume {name}", partial(ec2.delete_volume, VolumeId=name))
        elif volume["State"] == "in-use":
            swept.waiting.append(f"volume {name}")


def _interfaces(clients: Clients, stack: str, swept: Swept) -> None:
    """Interfaces that nothing uses are deleted; those that AWS's services still hold are waited for."""
    ec2, cluster = clients("ec2"), cluster_of(stack)
    found: dict[str, dict[str, Any]] = {}
    for where in ({"Name": "vpc-id", "Values": _vpcs(ec2, stack)}, {"Name": f"tag:{CNI_TAG}", "Values": [cluster]}):
        for page in pages(ec2, "describe_network_interfaces", Filters=[where]) if where["Values"] else ():
            found |= {each["NetworkInterfaceId"]: each for each in page["NetworkInterfaces"]}
    for name, interface in found.items():
        if interface["Status"] == "available":
            swept.attempt(
                f"network interface {name}",
                partial(ec2.delete_network_interface, NetworkInterfaceId=name),
            )
        elif interface.get("RequesterManaged"):
            swept.waiting.append(f"network interface {name} ({interface.get('Description') or 'of AWS'})")


def _security_groups(clients: Clients, stack: str, swept: Swept) -> None:
    ec2, cluster = clients("ec2"), cluster_of(stack)
    if not (vpcs := _vpcs(ec2, stack)):
        return
    keys = {"Name": "tag-key", "Values": [CONTROLLER_TAG, f"kubernetes.io/cluster/{cluster}"]}
    filters = [{"Name": "vpc-id", "Values": vpcs}, keys]
    for page in pages(ec2, "describe_security_groups", Filters=filters):
        for name in [group["GroupId"] for group in page["SecurityGroups"] if group["GroupName"] != "default"]:
            swept.attempt(f"security group {name}", partial(ec2.delete_security_group, GroupId=name))


def _log_group(clients: Clients, stack: str, swept: Swept) -> None:
    """The control plane's last lines come after its end, and EKS makes their group anew, without an end to its logs."""
    logs, name = clients("logs"), log_group_of(stack)
    for page in pages(logs, "describe_log_groups", logGroupNamePrefix=name):
        if any(group["logGroupName"] == name for group in page["logGroups"]):
            swept.attempt(f"log group {name}", partial(logs.delete_log_group, logGroupName=name))


def log_group_of(stack: str) -> str:
    """The name of the log group that EKS writes to (infra/cluster.py)."""
    return f"/aws/eks/{cluster_of(stack)}/cluster"


def _vpcs(ec2: Any, stack: str) -> list[str]:
    found = pages(ec2, "describe_vpcs", Filters=tag_filters(stack))
    return [vpc["VpcId"] for page in found for vpc in page["Vpcs"]]
