"""How much of a stack there is to pay for, held against what the program registers."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from mocks import Recorded

from infra import cost
from infra.quantities import Use, items
from stack_files import read_stack_file

# What AWS bills by use or not at all. A new type of resource belongs here, or into infra/quantities.py.
NOT_BY_THE_HOUR = {
    "autoscaling/tag:Tag",
    "cloudwatch/eventRule:EventRule",
    "cloudwatch/eventTarget:EventTarget",
    "cloudwatch/logGroup:LogGroup",
    "ec2/defaultSecurityGroup:DefaultSecurityGroup",
    "ec2/flowLog:FlowLog",
    "ec2/internetGateway:InternetGateway",
    "ec2/launchTemplate:LaunchTemplate",
    "ec2/placementGroup:PlacementGroup",
    "ec2/route:Route",
    "ec2/routeTable:RouteTable",
    "ec2/routeTableAssociation:RouteTableAssociation",
    "ec2/securityGroup:SecurityGroup",
    "ec2/subnet:Subnet",
    "ec2/tag:Tag",
    "ec2/vpc:Vpc",
    "ec2/vpcIpv4CidrBlockAssociation:VpcIpv4CidrBlockAssociation",
    "ecr/lifecyclePolicy:LifecyclePolicy",
    "ecr/repository:Repository",
    "eks/addon:Addon",
    "eks/podIdentityAssociation:PodIdentityAssociation",
    "fsx/dataRepositoryAssociation:DataRepositoryAssociation",
    "iam/instanceProfile:InstanceProfile",
    "iam/role:Role",
    "iam/rolePolicy:RolePolicy",
    "iam/rolePolicyAttachment:RolePolicyAttachment",
    "kms/alias:Alias",
    "s3/bucket:Bucket",
    "s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration",
    "s3/bucketOwnershipControls:BucketOwnershipControls",
    "s3/bucketPolicy:BucketPolicy",
    "s3/bucketPublicAccessBlock:BucketPublicAccessBlock",
    "s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration",
    "s3/bucketVersioning:BucketVersioning",
    "secretsmanager/secretVersion:SecretVersion",
    "sqs/queue:Queue",
    "sqs/queuePolicy:QueuePolicy",
    "vpc/securityGroupEgressRule:SecurityGroupEgressRule",
    "vpc/securityGroupIngressRule:SecurityGroupIngressRule",
}
BY_THE_HOUR = {
    "ec2/eip:Eip",
    "ec2/natGateway:NatGateway",
    "ec2/vpcEndpoint:VpcEndpoint",
    "eks/cluster:Cluster",
    "eks/nodeGroup:NodeGroup",
    "fsx/lustreFileSystem:LustreFileSystem",
    "kms/key:Key",
    "secretsmanager/secret:Secret",
}


def of(recorded: Recorded, kind: str) -> list[Any]:
    return [each.inputs for each in recorded.of(f"aws:{kind}")]


def test_every_type_of_resource_is_priced_or_known_to_be_paid_by_use(stack: Recorded, everything: Recorded) -> None:
    for recorded in (stack, everything):
        kinds = {each.type.removeprefix("aws:") for each in recorded if each.type.startswith("aws:")}
        assert kinds - NOT_BY_THE_HOUR == BY_THE_HOUR


def test_quantities_are_those_that_the_program_registers(stack: Recorded) -> None:
    tags = json.loads(stack.one("pulumi:providers:aws").inputs["defaultTags"])["tags"]
    found = read_stack_file(tags["stack"]).settings()
    counts = {item.key: item.zero for item in items(found, cost.use_of(found)) if item.key != "gp3"}
    (lustre,) = of(stack, "fsx/lustreFileSystem:LustreFileSystem")
    interfaces = [each for each in of(stack, "ec2/vpcEndpoint:VpcEndpoint") if each["vpcEndpointType"] == "Interface"]
    groups = of(stack, "eks/nodeGroup:NodeGroup")
    (core,) = [group for group in groups if "instanceTypes" in group]
    expected = {
        "eks-cluster": len(of(stack, "eks/cluster:Cluster")),
        "nat-gateway": len(of(stack, "ec2/natGateway:NatGateway")),
        "public-ipv4": len(of(stack, "ec2/eip:Eip")),
        "interface-endpoint": sum(len(each["subnetIds"]) for each in interfaces),
        "kms-key": len(of(stack, "kms/key:Key")),
        "secret": len(of(stack, "secretsmanager/secret:Secret")),
        f"fsx-{lustre['perUnitStorageThroughput']}": lustre["storageCapacity"],
        core["instanceTypes"][0]: core["scalingConfig"]["minSize"],
    }
    templates = {
        each.name.removesuffix("-template"): each.inputs for each in stack.of("aws:ec2/launchTemplate:LaunchTemplate")
    }
    expected |= {each["instanceType"]: 0 for name, each in templates.items() if name != "core"}
    assert counts == expected
    disks = {name: each["blockDeviceMappings"][0]["ebs"]["volumeSize"] for name, each in templates.items()}
    trained = {item.name: item.training for item in items(found, Use()) if item.key == "gp3"}
    nodes = {"core": core["scalingConfig"]["desiredSize"], found.training.group: found.training.nodes}
    expected_disks = {f"{name} disks, GiB": disks[name] * nodes[name] for name in disks}
    # What charts claim, of the default class: an EBS volume each.
    charts = json.dumps([each.inputs for each in stack.of("kubernetes:helm.sh/v3:Release")])
    if claims := [int(gib) for gib in re.findall(r'"requests": \{"storage": "(\d+)Gi"\}', charts)]:
        expected_disks["Prometheus' disk, GiB"] = sum(claims)
    assert trained == expected_disks


def test_nothing_in_the_cluster_makes_a_load_balancer_that_is_not_counted(
    stack: Recorded, everything: Recorded
) -> None:
    for recorded in (stack, everything):
        assert not recorded.of("kubernetes:networking.k8s.io/v1:Ingress")
        types = Counter(each.inputs["spec"].get("type") for each in recorded.of("kubernetes:core/v1:Service"))
        assert "LoadBalancer" not in types
