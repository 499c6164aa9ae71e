"""The stand-in cloud refuses what AWS refuses: each rule of order.py, broken once. Runs without an engine."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cloud import Cloud, Refused, Resource
from order import refusals

SUBNET, VPC, NAT = "aws:ec2/subnet:Subnet", "aws:ec2/vpc:Vpc", "aws:ec2/natGateway:NatGateway"
RANGE, GATEWAY = (
    "aws:ec2/vpcIpv4CidrBlockAssociation:VpcIpv4CidrBlockAssociation",
    "aws:ec2/internetGateway:InternetGateway",
)
ROLE, ATTACHMENT = "aws:iam/role:Role", "aws:iam/rolePolicyAttachment:RolePolicyAttachment"
CLUSTER, NODES, ADDON = "aws:eks/cluster:Cluster", "aws:eks/nodeGroup:NodeGroup", "aws:eks/addon:Addon"
LOGS, LUSTRE = "aws:cloudwatch/logGroup:LogGroup", "aws:fsx/lustreFileSystem:LustreFileSystem"
GROUP, INGRESS, EGRESS = (
    "aws:ec2/securityGroup:SecurityGroup",
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
    "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule",
)
RELEASE, POOL = "kubernetes:helm.sh/v3:Release", "kubernetes:karpenter.sh/v1:NodePool"


@pytest.fixture
def cloud() -> Cloud:
    return Cloud(refusals=refusals)


def make(cloud: Cloud, kind: str, label: str = "x", /, **inputs: Any) -> Resource:
    return cloud.create(f"urn:pulumi:dev::llama-trainium::{kind}::{label}", kind, inputs)


def drop(cloud: Cloud, resource: Resource) -> None:
    cloud.delete(resource.urn, resource.type, resource.id)


def role(cloud: Cloud, *policies: str) -> Resource:
    made = make(cloud, ROLE, "-".join(("role", *policies)).lower())
    for policy in policies:
        make(cloud, ATTACHMENT, policy, role=made.id, policyArn=f"arn:aws:iam::aws:policy/{policy}")
    return made


def cluster(cloud: Cloud, **inputs: Any) -> Resource:
    return make(cloud, CLUSTER, name="c", roleArn=role(cloud, "AmazonEKSClusterPolicy").outputs["arn"], **inputs)


def network(cloud: Cloud, way_out: bool = True) -> Resource:
    """A private subnet, with or without its default route."""
    vpc = make(cloud, VPC, cidrBlock="10.0.0.0/16")
    subnet = make(cloud, SUBNET, vpcId=vpc.id, cidrBlock="10.0.0.0/24")
    table = make(cloud, "aws:ec2/routeTable:RouteTable", vpcId=vpc.id)
    make(cloud, "aws:ec2/routeTableAssociation:RouteTableAssociation", subnetId=subnet.id, routeTableId=table.id)
    if way_out:
        make(cloud, "aws:ec2/route:Route", routeTableId=table.id, destinationCidrBlock="0.0.0.0/0")
    return subnet


def nodes(cloud: Cloud, desired: int = 2, way_out: bool = True, *policies: str) -> Resource:
    worker = role(cloud, *(policies or ("AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly")))
    subnet = network(cloud, way_out)
    scaling = {"desiredSize": desired}
    return make(
        cloud, NODES, clusterName="c", nodeRoleArn=worker.outputs["arn"], subnetIds=[subnet.id], scalingConfig=scaling
    )


def test_a_subnet_lies_in_its_vpc_and_overlaps_no_other(cloud: Cloud) -> None:
    vpc = make(cloud, VPC, cidrBlock="10.0.0.0/16")
    with pytest.raises(Refused, match="InvalidSubnet.Range"):
        make(cloud, SUBNET, vpcId=vpc.id, cidrBlock="100.64.0.0/18")
    second = make(cloud, RANGE, vpcId=vpc.id, cidrBlock="100.64.0.0/16")
    pods = make(cloud, SUBNET, "pods", vpcId=vpc.id, cidrBlock="100.64.0.0/18")
    with pytest.raises(Refused, match="InvalidSubnet.Conflict"):
        make(cloud, SUBNET, "more", vpcId=vpc.id, cidrBlock="100.64.32.0/19")
    with pytest.raises(Refused, match="DependencyViolation.*has subnets"):
        drop(cloud, second)
    drop(cloud, pods)
    drop(cloud, second)


def test_nothing_refers_to_what_is_gone_and_nothing_in_use_goes(cloud: Cloud) -> None:
    vpc = make(cloud, VPC, cidrBlock="10.0.0.0/16")
    subnet = make(cloud, SUBNET, vpcId=vpc.id, cidrBlock="10.0.0.0/24")
    with pytest.raises(Refused, match="DependencyViolation.*in use by.*Subnet"):
        drop(cloud, vpc)
    drop(cloud, subnet)
    drop(cloud, vpc)
    with pytest.raises(Refused, match="NotFound.*refers to vpc-"):
        make(cloud, SUBNET, vpcId=vpc.id, cidrBlock="10.0.0.0/24")


def test_a_name_is_given_once(cloud: Cloud) -> None:
    make(cloud, ROLE, name="one")
    with pytest.raises(Refused, match="AlreadyExists"):
        make(cloud, ROLE, "other", name="one")


def test_a_nat_gateway_needs_the_internet_gateway_for_as_long_as_it_is_there(cloud: Cloud) -> None:
    vpc = make(cloud, VPC, cidrBlock="10.0.0.0/16")
    subnet = make(cloud, SUBNET, vpcId=vpc.id, cidrBlock="10.0.0.0/24")
    with pytest.raises(Refused, match="Gateway.NotAttached"):
        make(cloud, NAT, subnetId=subnet.id)
    gateway = make(cloud, GATEWAY, vpcId=vpc.id)
    make(cloud, NAT, subnetId=subnet.id)
    with pytest.raises(Refused, match="DependencyViolation: mapped public addresses"):
        drop(cloud, gateway)


def test_a_cluster_needs_its_roles_policy(cloud: Cloud) -> None:
    with pytest.raises(Refused, match="InvalidParameterException: the role has only"):
        make(cloud, CLUSTER, name="c", roleArn=role(cloud).outputs["arn"])
    cluster(cloud)


@pytest.mark.parametrize(
    ("policies", "way_out", "why"),
    [
        (("AmazonEKSWorkerNodePolicy",), True, "their role has only"),
        (("AmazonEC2ContainerRegistryPullOnly",), True, "their role has only"),
        ((), False, "no default route"),
    ],
)
def test_nodes_that_cannot_join_fail(cloud: Cloud, policies: tuple[str, ...], way_out: bool, why: str) -> None:
    cluster(cloud)
    with pytest.raises(Refused, match=f"NodeCreationFailure.*{why}"):
        nodes(cloud, 1, way_out, *policies)
    # A group that starts with no node has none that could fail.
    nodes(Cloud(refusals=refusals), 0, way_out, *policies)


def test_nodes_need_the_network_of_pods_where_eks_does_not_bring_it(cloud: Cloud) -> None:
    cluster(cloud, bootstrapSelfManagedAddons=False)
    with pytest.raises(Refused, match=r"NodeCreationFailure.*only the add-ons \[\]"):
        nodes(cloud)
    bare = Cloud(refusals=refusals)
    cluster(bare, bootstrapSelfManagedAddons=False)
    for addon in ("vpc-cni", "kube-proxy"):
        make(bare, ADDON, clusterName="c", addonName=addon)
    nodes(bare)


def test_what_runs_in_pods_needs_a_node(cloud: Cloud) -> None:
    cluster(cloud)
    make(cloud, ADDON, clusterName="c", addonName="eks-pod-identity-agent")
    for kind, inputs in ((ADDON, {"clusterName": "c", "addonName": "coredns"}), (RELEASE, {"chart": "volcano"})):
        with pytest.raises(Refused, match="InsufficientNumberOfReplicas"):
            make(cloud, kind, **inputs)
    group = nodes(cloud)
    release = make(cloud, RELEASE, chart="volcano")
    drop(cloud, group)
    with pytest.raises(Refused, match="InsufficientNumberOfReplicas"):
        drop(cloud, release)


def test_a_policy_stays_while_its_role_works(cloud: Cloud) -> None:
    made = cluster(cloud)
    attachment = cloud.of(ATTACHMENT)[0]
    with pytest.raises(Refused, match="still serves"):
        drop(cloud, attachment)
    drop(cloud, made)
    drop(cloud, attachment)


def test_the_log_group_of_a_cluster_comes_first_and_goes_last(cloud: Cloud) -> None:
    group = make(cloud, LOGS, name="/aws/eks/c/cluster")
    made = cluster(cloud, enabledClusterLogTypes=["api"])
    with pytest.raises(Refused, match="ResourceAlreadyExistsException"):
        drop(cloud, group)
    drop(cloud, made)
    drop(cloud, group)
    cluster2 = make(cloud, CLUSTER, name="c", roleArn=cloud.of(ROLE)[0].outputs["arn"], enabledClusterLogTypes=["api"])
    with pytest.raises(Refused, match="ResourceAlreadyExistsException"):
        make(cloud, LOGS, name=f"/aws/eks/{cluster2.id}/cluster")


@pytest.mark.parametrize("way", ["ingress", "egress"])
def test_lustre_needs_its_port_both_ways(cloud: Cloud, way: str) -> None:
    group = make(cloud, GROUP)
    one, other = (INGRESS, EGRESS) if way == "egress" else (EGRESS, INGRESS)
    lustre = {"ipProtocol": "tcp", "fromPort": 988, "toPort": 988, "securityGroupId": group.id}
    make(cloud, one, **lustre)
    make(cloud, other, **(lustre | {"fromPort": 1018, "toPort": 1023}))
    with pytest.raises(Refused, match=f"InvalidNetworkSettings.*{way}"):
        make(cloud, LUSTRE, securityGroupIds=[group.id])
    make(cloud, other, "all", securityGroupId=group.id, ipProtocol="-1")
    make(cloud, LUSTRE, securityGroupIds=[group.id])


def test_a_custom_resource_lives_within_its_operator(cloud: Cloud) -> None:
    with pytest.raises(Refused, match="no matches for kind"):
        make(cloud, POOL, metadata={"name": "cpu"})
    cluster(cloud)
    nodes(cloud)
    make(cloud, RELEASE, "definitions", chart="oci://mirror.test/karpenter-crd", namespace="a", createNamespace=True)
    controller = make(cloud, RELEASE, chart="oci://mirror.test/karpenter", namespace="a")
    pool = make(cloud, POOL, metadata={"name": "cpu"})
    drop(cloud, controller)
    with pytest.raises(Refused, match="no matches for kind.*chart karpenter is not"):
        drop(cloud, pool)


def test_a_namespace_comes_first(cloud: Cloud) -> None:
    config_map = {"metadata": {"name": "a", "namespace": "train"}}
    with pytest.raises(Refused, match='namespaces "train" not found'):
        make(cloud, "kubernetes:core/v1:ConfigMap", **config_map)
    make(cloud, "kubernetes:core/v1:Namespace", metadata={"name": "train"})
    assert make(cloud, "kubernetes:core/v1:ConfigMap", **config_map).id == "train/a"


def test_a_fault_leaves_nothing_behind(cloud: Cloud) -> None:
    cloud.fault = re.compile("::broken$")
    with pytest.raises(Refused, match="injected fault"):
        make(cloud, VPC, "broken", cidrBlock="10.0.0.0/16")
    assert not cloud.live
    assert cloud.events[-1].error


def test_zones_have_names_of_their_own(cloud: Cloud) -> None:
    answer = cloud.answer("aws:index/getAvailabilityZones:getAvailabilityZones", {})
    assert sorted(answer["names"]) == [f"us-west-2{letter}" for letter in "abcd"]
    assert dict(zip(answer["zoneIds"], answer["names"], strict=True))["usw2-az4"] == "us-west-2a"
    with pytest.raises(Refused, match="use1-az6 is not a zone of us-west-2"):
        cloud.zone_name("use1-az6")


def test_an_unknown_data_source_is_not_answered(cloud: Cloud) -> None:
    with pytest.raises(Refused, match="no answer for getPrice"):
        cloud.answer("aws:pricing/getPrice:getPrice", {})
