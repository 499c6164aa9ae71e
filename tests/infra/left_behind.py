"""An account of moto's in which a stack `dev` was destroyed, and things that controllers made are still there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import boto3
import pytest
from intercepted import intercepted
from moto import mock_aws

REGION = "us-west-2"
OWN = {"project": "llama-trainium", "stack": "dev", "cost-centre": "research"}
CLUSTER = "llama-trainium-dev"
OF_CLUSTER = {f"kubernetes.io/cluster/{CLUSTER}": "owned"}
OF_CONTROLLER = {"elbv2.k8s.aws/cluster": CLUSTER}
KARPENTERS = {**OWN, "karpenter.sh/nodepool": "cpu"}
CLAIMS = {**OWN, "ebs.csi.aws.com/cluster": "true"}
OTHER = {**OWN, "stack": "us-west-2"}
LOGS = f"/aws/eks/{CLUSTER}/cluster"


@contextmanager
def empty_account() -> Iterator[None]:
    """An account of moto's, and credentials that reach no other. Moto's 1,300 images take long to load."""
    with pytest.MonkeyPatch.context() as patch, mock_aws(), intercepted({}):
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            patch.setenv(key, "testing")
        patch.delenv("AWS_PROFILE", raising=False)
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")
        yield


def client(service: str) -> Any:
    """boto3's client in the region."""
    return boto3.client(service, region_name=REGION)


def tag_list(tags: dict[str, str]) -> list[dict[str, str]]:
    """Tags as AWS takes them."""
    return [{"Key": key, "Value": value} for key, value in tags.items()]


def tags_of(kind: str, tags: dict[str, str]) -> list[dict[str, Any]]:
    """Tags of what EC2 makes."""
    return [{"ResourceType": kind, "Tags": tag_list(tags)}]


@dataclass
class Network:
    """A VPC with two subnets, and in it what a stack's cluster leaves behind."""

    tags: dict[str, str] = field(default_factory=lambda: dict(OWN))
    vpc: str = ""
    subnets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        ec2 = client("ec2")
        made = ec2.create_vpc(CidrBlock="10.40.0.0/20", TagSpecifications=tags_of("vpc", self.tags))
        self.vpc = made["Vpc"]["VpcId"]
        for number, zone in enumerate("ab"):
            subnet = ec2.create_subnet(VpcId=self.vpc, CidrBlock=f"10.40.{number}.0/24", AvailabilityZone=REGION + zone)
            self.subnets.append(subnet["Subnet"]["SubnetId"])

    def load_balancer(self, name: str, tags: dict[str, str]) -> str:
        """An application load balancer."""
        made = client("elbv2").create_load_balancer(Name=name, Subnets=self.subnets, Tags=tag_list(tags))
        return str(made["LoadBalancers"][0]["LoadBalancerArn"])

    def target_group(self, name: str, tags: dict[str, str]) -> str:
        """Its target group."""
        made = client("elbv2").create_target_group(
            Name=name, Protocol="HTTP", Port=80, VpcId=self.vpc, Tags=tag_list(tags)
        )
        return str(made["TargetGroups"][0]["TargetGroupArn"])

    def classic(self, name: str, tags: dict[str, str]) -> str:
        """A classic load balancer, of a Service without the controller."""
        listeners = [{"Protocol": "tcp", "LoadBalancerPort": 80, "InstanceProtocol": "tcp", "InstancePort": 80}]
        client("elb").create_load_balancer(
            LoadBalancerName=name, Listeners=listeners, Subnets=self.subnets, Tags=tag_list(tags)
        )
        return name

    def interface(self) -> str:
        """A network interface that nothing uses."""
        made = client("ec2").create_network_interface(SubnetId=self.subnets[0])
        return str(made["NetworkInterface"]["NetworkInterfaceId"])

    def security_group(self, name: str, tags: dict[str, str]) -> str:
        """A security group."""
        made = client("ec2").create_security_group(
            GroupName=name, Description=name, VpcId=self.vpc, TagSpecifications=tags_of("security-group", tags)
        )
        return str(made["GroupId"])

    def instance(self, tags: dict[str, str]) -> str:
        """A node."""
        made = client("ec2").run_instances(
            ImageId="ami-12c6146b",
            InstanceType="m5.xlarge",
            MinCount=1,
            MaxCount=1,
            SubnetId=self.subnets[0],
            TagSpecifications=tags_of("instance", tags),
        )
        return str(made["Instances"][0]["InstanceId"])


def volume(tags: dict[str, str]) -> str:
    """A volume of 8 GiB."""
    made = client("ec2").create_volume(
        AvailabilityZone=f"{REGION}a", Size=8, VolumeType="gp3", TagSpecifications=tags_of("volume", tags)
    )
    return str(made["VolumeId"])


def log_group(name: str) -> None:
    """A log group without tags, as EKS makes it."""
    client("logs").create_log_group(logGroupName=name)


def bucket(tags: dict[str, str]) -> None:
    """The bucket llama-data."""
    client("s3").create_bucket(Bucket="llama-data", CreateBucketConfiguration={"LocationConstraint": REGION})
    client("s3").put_bucket_tagging(Bucket="llama-data", Tagging={"TagSet": tag_list(tags)})


def cluster(network: Network) -> None:
    """The stack's cluster."""
    client("eks").create_cluster(
        name=CLUSTER, roleArn="arn:aws:iam::123456789012:role/x", resourcesVpcConfig={"subnetIds": network.subnets}
    )
