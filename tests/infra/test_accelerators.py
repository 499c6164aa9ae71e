"""Accelerator groups: interfaces, security groups, taints and tags exactly as each instance type needs them."""

from __future__ import annotations

import base64
import email
from typing import Any

import pytest
import yaml
from base_platform import TAGS
from mocks import Recorded
from small_platform import group, platform

from infra.accelerators import instance_store_user_data, node_template
from infra.settings import AcceleratorGroup

# EFA interfaces, devices and cores of a node, as EC2's DescribeInstanceTypes has them.
TYPES = {
    "trn1.2xlarge": (0, 1, 2),
    "trn1.32xlarge": (8, 16, 32),
    "trn1n.32xlarge": (16, 16, 32),
    "trn2.48xlarge": (16, 16, 64),
}
CLUSTER_GROUP = "sg-0c105e70000000000"
TEMPLATE, NODE_GROUP = "aws:ec2/launchTemplate:LaunchTemplate", "aws:eks/nodeGroup:NodeGroup"
SECURITY_GROUP, TAG = "aws:ec2/securityGroup:SecurityGroup", "aws:autoscaling/tag:Tag"
INGRESS = "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule"
EGRESS = "aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"
PREFIX = "k8s.io/cluster-autoscaler/node-template"


def template(made: Recorded) -> dict[str, Any]:
    return made.one(TEMPLATE, "trn1-template").inputs


def node_group(made: Recorded) -> dict[str, Any]:
    return made.one(NODE_GROUP, "trn1-nodes").inputs


def section(instance_type: str = "trn1.32xlarge", **given: Any) -> AcceleratorGroup:
    return AcceleratorGroup.model_validate({"zone": "usw2-az4", **group(instance_type, **given)})


@pytest.mark.parametrize("layout", ["efa", "efa-only"])
@pytest.mark.parametrize("instance_type", [kind for kind, (efa, *_) in TYPES.items() if efa])
def test_one_interface_on_each_card_in_both_security_groups(instance_type: str, layout: str) -> None:
    made = platform(group(instance_type, efa_layout=layout))
    efa_group = made.one(SECURITY_GROUP, "trn1-efa").id
    first, *others = template(made)["networkInterfaces"]
    common = {"securityGroups": [CLUSTER_GROUP, efa_group], "deleteOnTermination": "true"}
    assert first == {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "efa", **common}
    assert others == [
        {"networkCardIndex": card, "deviceIndex": 1, "interfaceType": layout, **common}
        for card in range(1, TYPES[instance_type][0])
    ]
    assert "vpcSecurityGroupIds" not in template(made), "EC2 takes groups in one place only"


@pytest.mark.parametrize("settings", [group("trn1.2xlarge"), group(efa=False)], ids=["has none", "switched off"])
def test_without_efa_there_is_one_plain_interface_in_the_clusters_group(settings: dict[str, Any]) -> None:
    made = platform(settings)
    assert template(made)["vpcSecurityGroupIds"] == [CLUSTER_GROUP]
    assert not template(made).get("networkInterfaces")
    assert not made.of(SECURITY_GROUP, "trn1-efa")


def test_efa_traffic_stays_within_the_group() -> None:
    made = platform()
    efa_group = made.one(SECURITY_GROUP, "trn1-efa")
    own = {"securityGroupId": efa_group.id, "ipProtocol": "-1"}
    rules = [*made.of(INGRESS), *made.of(EGRESS)]
    assert [{key: value for key, value in rule.inputs.items() if key != "description"} for rule in rules] == [
        {**own, "referencedSecurityGroupId": efa_group.id},
        {**own, "referencedSecurityGroupId": efa_group.id},
        {**own, "cidrIpv4": "0.0.0.0/0"},
    ]
    nodes = made.one(NODE_GROUP, "trn1-nodes")
    assert all(made.waits_for(nodes, rule) for rule in rules)


def test_the_node_group() -> None:
    made = platform(group(min=1, desired=2))
    inputs = node_group(made)
    assert inputs["amiType"] == "AL2023_x86_64_NEURON"
    assert inputs["releaseVersion"].startswith("1.35.")
    assert inputs["scalingConfig"] == {"minSize": 1, "desiredSize": 2, "maxSize": 4}
    assert inputs["subnetIds"] == [made.one("aws:ec2/subnet:Subnet", "private-usw2-az4").id], "one zone"
    assert inputs["labels"] == {"llama-trainium/group": "trn1"}
    assert inputs["taints"] == [
        {"key": "aws.amazon.com/neuron", "effect": "NO_SCHEDULE"},
        {"key": "fsx.csi.aws.com/agent-not-ready", "effect": "NO_EXECUTE"},
    ]
    assert inputs["nodeRepairConfig"] == {"enabled": True}
    assert inputs["nodeRoleArn"] == made.one("aws:iam/role:Role", "core-role").outputs["arn"]
    # The type is the template's: EKS refuses it in both places.
    assert "instanceTypes" not in inputs
    assert template(made)["instanceType"] == "trn1.32xlarge"


@pytest.mark.parametrize("instance_type", TYPES)
def test_what_every_node_has(instance_type: str) -> None:
    inputs = template(platform(group(instance_type, disk_gib=300)))
    assert inputs["metadataOptions"]["httpTokens"] == "required"
    (disk,) = inputs["blockDeviceMappings"]
    assert disk["ebs"] == {
        "volumeSize": 300,
        "volumeType": "gp3",
        "encrypted": "true",
        "deleteOnTermination": "true",
    }
    assert inputs["userData"] == instance_store_user_data()
    tagged = {each["resourceType"]: each["tags"] for each in inputs["tagSpecifications"]}
    assert set(tagged) == {"instance", "volume", "network-interface"}
    assert all(tags == {**TAGS, "Name": "llama-trainium-dev-trn1"} for tags in tagged.values())
    # EKS sets these and refuses a template that does.
    assert not {"imageId", "iamInstanceProfile", "keyName", "instanceInitiatedShutdownBehavior"} & set(inputs)


@pytest.mark.parametrize(
    ("capacity", "capacity_type", "market"),
    [
        ("on-demand", "ON_DEMAND", None),
        ("spot", "SPOT", None),
        ("reservation", "ON_DEMAND", None),
        ("capacity-block", "CAPACITY_BLOCK", {"marketType": "capacity-block"}),
    ],
)
def test_how_the_nodes_are_bought(capacity: str, capacity_type: str, market: dict[str, str] | None) -> None:
    reserved = capacity in ("reservation", "capacity-block")
    given = {"reservation_id": "cr-0123456789abcdef0"} if reserved else {}
    made = platform(group(capacity=capacity, **given))
    assert node_group(made)["capacityType"] == capacity_type
    assert template(made).get("instanceMarketOptions") == market
    target = {"capacityReservationTarget": {"capacityReservationId": "cr-0123456789abcdef0"}}
    assert template(made).get("capacityReservationSpecification") == (target if reserved else None)


def test_a_placement_group_is_there_when_it_is_asked_for() -> None:
    made = platform(group(placement_group=True))
    placement = made.one("aws:ec2/placementGroup:PlacementGroup")
    assert placement.inputs["strategy"] == "cluster"
    assert template(made)["placement"] == {"groupName": placement.outputs["name"]}
    assert not platform(group()).of("aws:ec2/placementGroup:PlacementGroup")


def test_without_an_instance_store_there_is_no_user_data() -> None:
    assert "userData" not in template(platform(group(instance_store=False)))


def test_user_data_is_mime_that_nodeadm_reads_and_the_same_every_time() -> None:
    message = email.message_from_bytes(base64.b64decode(instance_store_user_data()))
    (part,) = message.get_payload()
    assert message.get_content_type() == "multipart/mixed"
    assert part.get_content_type() == "application/node.eks.aws"
    config = yaml.safe_load(part.get_payload())
    assert (config["apiVersion"], config["kind"]) == ("node.eks.aws/v1alpha1", "NodeConfig")
    assert config["spec"] == {"instance": {"localStorage": {"strategy": "RAID0"}}}
    assert instance_store_user_data() == instance_store_user_data()


@pytest.mark.parametrize("instance_type", TYPES)
def test_an_empty_group_tells_cluster_autoscaler_what_its_nodes_have(instance_type: str) -> None:
    efa, devices, cores = TYPES[instance_type]
    expected = {
        f"{PREFIX}/label/llama-trainium/group": "trn1",
        f"{PREFIX}/taint/aws.amazon.com/neuron": ":NoSchedule",
        f"{PREFIX}/taint/fsx.csi.aws.com/agent-not-ready": ":NoExecute",
        f"{PREFIX}/resources/aws.amazon.com/neuron": str(devices),
        f"{PREFIX}/resources/aws.amazon.com/neuroncore": str(cores),
        f"{PREFIX}/resources/ephemeral-storage": "170Gi",
    }
    if efa:
        expected[f"{PREFIX}/resources/vpc.amazonaws.com/efa"] = str(efa)
    made = platform(group(instance_type))
    tags = [each.inputs for each in made.of(TAG)]
    assert {each["tag"]["key"]: each["tag"]["value"] for each in tags} == expected
    assert not any(each["tag"]["propagateAtLaunch"] for each in tags)
    nodes = made.one(NODE_GROUP, "trn1-nodes")
    scaling_group = nodes.outputs["resources"][0]["autoscalingGroups"][0]["name"]
    assert {each["autoscalingGroupName"] for each in tags} == {scaling_group}
    assert all(len(key) <= 128 for key in expected), "the longest key that Auto Scaling takes"


def test_without_efa_no_efa_is_promised() -> None:
    assert not [key for key in node_template(section(efa=False), {}) if "efa" in key]


@pytest.mark.parametrize("autoscaler", ["karpenter", "none"])
def test_where_no_one_else_scales_the_group_the_setting_counts(autoscaler: str) -> None:
    made = platform(autoscaler=autoscaler)
    assert not made.of(TAG)
    assert not made.one(NODE_GROUP, "trn1-nodes").request.ignoreChanges
    scaled = platform().one(NODE_GROUP, "trn1-nodes")
    assert list(scaled.request.ignoreChanges) == ["scalingConfig.desiredSize"]


def test_groups_wait_for_the_network_and_the_cni_and_not_for_one_another() -> None:
    made = platform(group(), group("trn1n.32xlarge", name="second"))
    first, second = made.one(NODE_GROUP, "trn1-nodes"), made.one(NODE_GROUP, "second-nodes")
    cni = made.one("aws:eks/addon:Addon", "vpc-cni")
    assert all(made.waits_for(nodes, cni) for nodes in (first, second))
    core = made.one(NODE_GROUP, "core-group")
    for one, other in [(first, second), (second, first), (first, core), (core, first)]:
        assert not made.waits_for(one, other)


def test_everything_is_inside_its_component_and_goes_to_the_explicit_provider() -> None:
    made = platform(group(placement_group=True))
    component = "llama-trainium:infra:AcceleratorGroup"
    parts = [each for each in made if made.inside(each, component) and each.type != component]
    assert {each.type for each in parts} >= {TEMPLATE, NODE_GROUP, SECURITY_GROUP, INGRESS, EGRESS, TAG}
    provider = made.one("pulumi:providers:aws").urn
    assert {each.provider for each in parts} == {provider}
