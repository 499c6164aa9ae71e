"""IAM policies as data: functions from a `Place` to a policy document. infra/iam.py makes roles of them.

A statement names `"*"` as its resource where the action's API knows none, such as EC2's describe calls (the Service
Authorization Reference lists them without a resource type), and nowhere else: a test holds every policy to that.
Controllers' policies are in infra/policies_controllers.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

VERSION = "2012-10-17"  # of the policy language

Statement = dict[str, Any]
Policy = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where a stack lives: what the ARNs of its resources are made of. AWS has Trainium in its partition `aws` only."""

    region: str
    account: str  # 12 digits
    cluster: str  # name of the EKS cluster

    def arn(self, service: str, resource: str) -> str:
        """The ARN of a resource of this region and account; `resource` may hold wildcards."""
        return f"arn:aws:{service}:{self.region}:{self.account}:{resource}"

    @property
    def cluster_arn(self) -> str:
        """The ARN of the EKS cluster, known before there is one."""
        return self.arn("eks", f"cluster/{self.cluster}")


def document(statements: Sequence[Statement]) -> Policy:
    """A policy document."""
    return {"Version": VERSION, "Statement": list(statements)}


def allow(
    actions: Sequence[str], resources: Sequence[str] | str, conditions: dict[str, dict[str, Any]] | None = None
) -> Statement:
    """One statement that allows `actions` on `resources`."""
    statement: Statement = {"Effect": "Allow", "Action": list(actions), "Resource": resources}
    return statement | ({"Condition": conditions} if conditions else {})


def service_trust(service: str, conditions: dict[str, dict[str, Any]] | None = None) -> Policy:
    """Lets an AWS service (`ec2.amazonaws.com`) assume a role."""
    statement: Statement = {"Effect": "Allow", "Principal": {"Service": service}, "Action": ["sts:AssumeRole"]}
    return document([statement | ({"Condition": conditions} if conditions else {})])


def pod_trust(place: Place, namespace: str, service_account: str) -> Policy:
    """Lets the pods of one service account of this cluster assume a role, through EKS Pod Identity.

    EKS sets the session tags of the conditions itself, from the pod that asks:
    https://docs.aws.amazon.com/eks/latest/userguide/pod-id-abac.html
    """
    return document(
        [
            {
                "Effect": "Allow",
                "Principal": {"Service": "pods.eks.amazonaws.com"},
                "Action": ["sts:AssumeRole", "sts:TagSession"],
                "Condition": {
                    "StringEquals": {
                        "aws:RequestTag/eks-cluster-arn": place.cluster_arn,
                        "aws:RequestTag/kubernetes-namespace": namespace,
                        "aws:RequestTag/kubernetes-service-account": service_account,
                    }
                },
            }
        ]
    )


def flow_logs_trust(place: Place) -> Policy:
    """Lets the flow logs of this account and region, and of no other, assume their role."""
    return service_trust(
        "vpc-flow-logs.amazonaws.com",
        {
            "StringEquals": {"aws:SourceAccount": place.account},
            "ArnLike": {"aws:SourceArn": place.arn("ec2", "vpc-flow-log/*")},
        },
    )


def flow_logs(log_group_arn: str) -> Policy:
    """Writes flow logs into their log group, which exists."""
    actions = ["logs:CreateLogStream", "logs:PutLogEvents", "logs:DescribeLogStreams"]
    return document([allow(actions, [log_group_arn, f"{log_group_arn}:*"])])


def vpc_cni(place: Place, vpc_arn: str, pod_subnet_arns: Sequence[str]) -> Policy:
    """What the VPC CNI agent of a node does: network interfaces in the pods' subnets, attached to the cluster's nodes.

    The calls are those of https://github.com/aws/amazon-vpc-cni-k8s/blob/master/docs/iam-policy.md, narrowed from every
    interface of the account to those of this VPC.
    """
    interfaces, groups = place.arn("ec2", "network-interface/*"), place.arn("ec2", "security-group/*")
    in_vpc = {"ArnEquals": {"ec2:Vpc": vpc_arn}}
    return document(
        [
            allow(
                [
                    "ec2:DescribeInstances",
                    "ec2:DescribeInstanceTypes",
                    "ec2:DescribeNetworkInterfaces",
                    "ec2:DescribeSecurityGroups",
                    "ec2:DescribeSubnets",
                    "ec2:DescribeTags",
                ],
                "*",
            ),
            # The subnets say where an interface can be made; it does not exist yet, so nothing is known of it. The
            # security group is the cluster's own, which EKS makes later than this policy.
            allow(["ec2:CreateNetworkInterface"], [*pod_subnet_arns, interfaces]),
            allow(["ec2:CreateNetworkInterface"], [groups], in_vpc),
            # On starting, the agent also tags the interfaces that came with the node.
            allow(["ec2:CreateTags"], [interfaces]),
            allow(
                [
                    "ec2:AssignPrivateIpAddresses",
                    "ec2:AttachNetworkInterface",
                    "ec2:DeleteNetworkInterface",
                    "ec2:DetachNetworkInterface",
                    "ec2:ModifyNetworkInterfaceAttribute",
                    "ec2:UnassignPrivateIpAddresses",
                ],
                [interfaces],
                in_vpc,
            ),
            # These name the other end too: a node of the cluster, which EKS and Karpenter tag so, or a security group.
            allow(
                [
                    "ec2:AttachNetworkInterface",
                    "ec2:DetachNetworkInterface",
                    "ec2:ModifyNetworkInterfaceAttribute",
                ],
                [place.arn("ec2", "instance/*")],
                {"StringEquals": {f"aws:ResourceTag/kubernetes.io/cluster/{place.cluster}": "owned"}},
            ),
            allow(["ec2:ModifyNetworkInterfaceAttribute"], [groups], in_vpc),
        ]
    )


def ebs_csi(place: Place) -> Policy:
    """What the EBS CSI driver does: volumes that it made, told by their tag. No snapshots: nothing asks for them.

    The driver puts `ebs.csi.aws.com/cluster: "true"` on every volume it creates:
    https://github.com/kubernetes-sigs/aws-ebs-csi-driver/blob/master/docs/example-iam-policy.json
    """
    volumes, instances = place.arn("ec2", "volume/*"), place.arn("ec2", "instance/*")
    tag = "ebs.csi.aws.com/cluster"
    return document(
        [
            allow(
                [
                    "ec2:DescribeAvailabilityZones",
                    "ec2:DescribeInstances",
                    "ec2:DescribeInstanceTypes",
                    "ec2:DescribeSnapshots",
                    "ec2:DescribeTags",
                    "ec2:DescribeVolumes",
                    "ec2:DescribeVolumesModifications",
                    "ec2:DescribeVolumeStatus",
                ],
                "*",
            ),
            allow(["ec2:CreateVolume"], [volumes], {"StringEquals": {f"aws:RequestTag/{tag}": "true"}}),
            allow(["ec2:CreateTags"], [volumes], {"StringEquals": {"ec2:CreateAction": "CreateVolume"}}),
            allow(
                ["ec2:AttachVolume", "ec2:DetachVolume", "ec2:DeleteVolume", "ec2:ModifyVolume"],
                [volumes],
                {"StringEquals": {f"aws:ResourceTag/{tag}": "true"}},
            ),
            # Attaching names the instance too, which has no such tag.
            allow(["ec2:AttachVolume", "ec2:DetachVolume"], [instances]),
        ]
    )


def fsx_csi() -> Policy:
    """What the FSx CSI driver does for a volume that exists already: it looks at the file system.

    Pulumi makes and deletes the file system (infra/storage.py), so the driver may not.
    """
    return document([allow(["fsx:DescribeFileSystems"], "*")])
