"""Autoscalers: what they are told, in which order they come and go, and what Karpenter may launch."""

from __future__ import annotations

import json
from typing import Any

import pytest
from base_platform import TAGS
from mocks import Recorded, Registered
from small_platform import group, platform

RELEASE = "kubernetes:helm.sh/v3:Release"
CLASS, POOL = "kubernetes:karpenter.k8s.aws/v1:EC2NodeClass", "kubernetes:karpenter.sh/v1:NodePool"
ASSOCIATION = "aws:eks/podIdentityAssociation:PodIdentityAssociation"
ROLE_POLICY = "aws:iam/rolePolicy:RolePolicy"
CLUSTER_GROUP = "sg-0c105e70000000000"


def pool(made: Recorded, name: str = "trn1") -> dict[str, Any]:
    """The spec of a NodePool."""
    found: dict[str, Any] = made.one(POOL, f"{name}-pool").inputs["spec"]
    return found


def node_class(made: Recorded, name: str = "trn1") -> dict[str, Any]:
    """The spec of an EC2NodeClass."""
    found: dict[str, Any] = made.one(CLASS, f"{name}-class").inputs["spec"]
    return found


def requirements(spec: dict[str, Any]) -> dict[str, list[str]]:
    """What a NodePool asks of its nodes, by label."""
    return {each["key"]: each["values"] for each in spec["template"]["spec"]["requirements"]}


def identity(made: Recorded, release: Registered) -> list[Registered]:
    """The association and the policy of the service account that the pods of a release run as."""
    account = (release.inputs["values"].get("serviceAccount") or release.inputs["values"]["rbac"]["serviceAccount"])[
        "name"
    ]
    association = next(each for each in made.of(ASSOCIATION) if each.inputs["serviceAccount"] == account)
    assert association.inputs["namespace"] == release.inputs["namespace"]
    role = next(each for each in made.of("aws:iam/role:Role") if each.outputs["arn"] == association.inputs["roleArn"])
    policy = next(each for each in made.of(ROLE_POLICY) if each.inputs["role"] == role.outputs["name"])
    return [association, policy]


def test_none_installs_nothing() -> None:
    made = platform(autoscaler="none")
    assert not made.of(RELEASE)
    assert not made.of(POOL)


def test_cluster_autoscaler_is_told_its_cluster_and_what_a_starting_node_looks_like() -> None:
    made = platform()
    (release,) = made.of(RELEASE)
    values = release.inputs["values"]
    assert release.inputs["version"] == "9.59.0"
    assert values["autoDiscovery"] == {"clusterName": "llama-trainium-dev"}
    assert values["awsRegion"] == "us-west-2"
    assert values["extraArgs"]["startup-taint"] == "fsx.csi.aws.com/agent-not-ready"
    assert values["extraArgs"]["expander"] == "least-waste"
    # The tag in the policy's condition and the tags by which groups are discovered name the same cluster.
    _, policy = identity(made, release)
    scale = [each for each in json.loads(policy.inputs["policy"])["Statement"] if "Condition" in each]
    assert [list(each["Condition"]["StringEquals"]) for each in scale] == [
        ["aws:ResourceTag/k8s.io/cluster-autoscaler/llama-trainium-dev"]
    ]


@pytest.mark.parametrize("autoscaler", ["cluster-autoscaler", "karpenter"])
def test_a_controller_outlives_nothing_that_it_needs(autoscaler: str) -> None:
    made = platform(autoscaler=autoscaler)
    controller = made.of(RELEASE)[-1]
    needed = [
        *identity(made, controller),
        made.one("aws:eks/nodeGroup:NodeGroup", "core-group"),
        made.one("aws:eks/addon:Addon", "coredns"),
        made.one("aws:eks/addon:Addon", "pod-identity"),
    ]
    assert [each for each in needed if not made.waits_for(controller, each)] == []


def test_karpenters_nodes_go_before_karpenter_and_all_they_stand_in_after() -> None:
    made = platform(group(placement_group=True), autoscaler="karpenter")
    crds, controller = made.one(RELEASE, "crds"), made.one(RELEASE, "release")
    assert made.waits_for(controller, crds)
    assert {each.name for each in made.of(POOL)} == {
        "autoscaler-karpenter-cpu-pool",
        "autoscaler-karpenter-trn1-pool",
    }
    stands_in = [
        made.one("aws:iam/instanceProfile:InstanceProfile"),
        made.one("aws:ec2/securityGroup:SecurityGroup", "trn1-efa"),
        made.one("aws:ec2/placementGroup:PlacementGroup"),
        made.one("aws:ec2/subnet:Subnet", "private-usw2-az4"),
        made.one("aws:sqs/queue:Queue"),
        *identity(made, controller),
    ]
    for each in made.of(POOL):
        (own_class,) = [kind for kind in made.of(CLASS) if kind.name == each.name.replace("-pool", "-class")]
        assert each.inputs["spec"]["template"]["spec"]["nodeClassRef"]["name"] == own_class.inputs["metadata"]["name"]
        assert made.waits_for(each, own_class), "a class is deleted when the nodes of its pool are gone"
        assert made.waits_for(own_class, controller), "whose finalizers only the controller takes off"
        assert each.request.customTimeouts.delete == own_class.request.customTimeouts.delete == "40m"
    trn1 = made.one(POOL, "trn1-pool")
    assert [each for each in stands_in if not made.waits_for(trn1, each)] == []
    # Not the managed nodes of the same group: both may come at the same time.
    assert not made.waits_for(trn1, made.one("aws:eks/nodeGroup:NodeGroup", "trn1-nodes"))


def test_karpenters_interruptions_come_from_its_rule() -> None:
    made = platform(autoscaler="karpenter")
    queue, rule = made.one("aws:sqs/queue:Queue"), made.one("aws:cloudwatch/eventRule:EventRule")
    controller = made.one(RELEASE, "release").inputs["values"]
    assert controller["settings"]["interruptionQueue"] == queue.outputs["name"]
    target = made.one("aws:cloudwatch/eventTarget:EventTarget").inputs
    assert (target["rule"], target["arn"]) == (rule.outputs["name"], queue.outputs["arn"])
    assert "EC2 Spot Instance Interruption Warning" in json.loads(rule.inputs["eventPattern"])["detail-type"]
    policy = json.loads(made.one("aws:sqs/queuePolicy:QueuePolicy").inputs["policy"])
    assert policy["Statement"][0]["Condition"] == {"ArnEquals": {"aws:SourceArn": rule.outputs["arn"]}}


@pytest.mark.parametrize(("desired", "replicas"), [(1, 1), (2, 2), (5, 2)])
def test_karpenter_has_no_more_replicas_than_there_are_nodes_for(desired: int, replicas: int) -> None:
    core = {"min": 1, "desired": desired, "max": 5}
    made = platform(autoscaler="karpenter", core_nodes=core)
    assert made.one(RELEASE, "release").inputs["values"]["replicas"] == replicas


def test_karpenter_adds_what_the_group_lacks_of_its_max() -> None:
    made = platform(group(desired=1, max=4), autoscaler="karpenter")
    spec = pool(made)
    assert spec["limits"] == {"nodes": "3"}
    assert requirements(spec) == {
        "node.kubernetes.io/instance-type": ["trn1.32xlarge"],
        "topology.k8s.aws/zone-id": ["usw2-az4"],
        "karpenter.sh/capacity-type": ["on-demand"],
    }
    full = platform(group(desired=4, max=4), autoscaler="karpenter")
    assert [each.inputs["metadata"]["name"] for each in full.of(POOL)] == ["cpu"]


def test_a_node_of_karpenter_is_like_one_of_the_group() -> None:
    made = platform(group(), autoscaler="karpenter")
    nodes = made.one("aws:eks/nodeGroup:NodeGroup", "trn1-nodes").inputs
    template = made.one("aws:ec2/launchTemplate:LaunchTemplate", "trn1-template").inputs
    spec, kind = pool(made)["template"], node_class(made)
    assert spec["metadata"]["labels"] == nodes["labels"]
    effects = {"NoSchedule": "NO_SCHEDULE", "NoExecute": "NO_EXECUTE"}
    taints = [*spec["spec"]["taints"], *spec["spec"]["startupTaints"]]
    assert [{**taint, "effect": effects[taint["effect"]]} for taint in taints] == nodes["taints"]
    assert kind["amiSelectorTerms"] == [{"alias": "al2023@v" + nodes["releaseVersion"].split("-")[1]}]
    assert [each["id"] for each in kind["subnetSelectorTerms"]] == nodes["subnetIds"]
    groups = template["networkInterfaces"][0]["securityGroups"]
    assert [each["id"] for each in kind["securityGroupSelectorTerms"]] == groups
    assert kind["instanceStorePolicy"] == "RAID0"
    assert kind["tags"] == {**TAGS, "Name": "llama-trainium-dev-trn1"} == template["tagSpecifications"][0]["tags"]
    (disk,), (other,) = kind["blockDeviceMappings"], template["blockDeviceMappings"]
    assert disk["deviceName"] == other["deviceName"]
    assert disk["ebs"]["volumeSize"] == f"{other['ebs']['volumeSize']}Gi"
    assert disk["ebs"]["encrypted"] is True
    options = {key: value for key, value in kind["metadataOptions"].items() if key != "httpEndpoint"}
    assert options.items() <= template["metadataOptions"].items()


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [("on-demand", "on-demand"), ("spot", "spot"), ("reservation", "reserved"), ("capacity-block", "reserved")],
)
def test_karpenter_buys_as_the_group_does(capacity: str, expected: str) -> None:
    reserved = expected == "reserved"
    given = {"reservation_id": "cr-0123456789abcdef0"} if reserved else {}
    made = platform(group(capacity=capacity, **given), autoscaler="karpenter")
    assert requirements(pool(made))["karpenter.sh/capacity-type"] == [expected]
    terms = [{"id": "cr-0123456789abcdef0"}] if reserved else None
    assert node_class(made).get("capacityReservationSelectorTerms") == terms


def test_karpenter_is_told_the_layout_of_interfaces_only_where_it_has_to_be() -> None:
    assert "networkInterfaces" not in node_class(platform(group(), autoscaler="karpenter"))
    made = platform(group(efa_layout="efa-only"), autoscaler="karpenter")
    interfaces = node_class(made)["networkInterfaces"]
    assert interfaces[0] == {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}
    assert [each["networkCardIndex"] for each in interfaces[1:]] == list(range(8))
    assert {(each["deviceIndex"], each["interfaceType"]) for each in interfaces[1:]} == {(1, "efa-only")}


def test_karpenter_removes_only_empty_nodes() -> None:
    made = platform(autoscaler="karpenter")
    for name in ("cpu", "trn1"):
        spec = pool(made, name)
        assert spec["disruption"]["consolidationPolicy"] == "WhenEmpty"
        assert spec["template"]["spec"]["expireAfter"] == "Never"
        allowed = {reason: each["nodes"] for each in spec["disruption"]["budgets"] for reason in each["reasons"]}
        assert allowed == {"Empty": "100%", "Drifted": "0", "Underutilized": "0"}


def test_cpu_nodes_are_bounded_and_in_every_zone() -> None:
    made = platform(autoscaler="karpenter", core_nodes={"cpu_limit": 64})
    assert pool(made, "cpu")["limits"] == {"cpu": "64"}
    assert requirements(pool(made, "cpu"))["karpenter.sh/capacity-type"] == ["on-demand"]
    subnets = {each.id for each in made.of("aws:ec2/subnet:Subnet") if "private" in each.name}
    assert {each["id"] for each in node_class(made, "cpu")["subnetSelectorTerms"]} == subnets
    assert node_class(made, "cpu")["securityGroupSelectorTerms"] == [{"id": CLUSTER_GROUP}]
    none = platform(autoscaler="karpenter", core_nodes={"cpu_limit": 0})
    assert [each.inputs["metadata"]["name"] for each in none.of(POOL)] == ["trn1"]


@pytest.mark.parametrize("autoscaler", ["cluster-autoscaler", "karpenter"])
def test_everything_in_kubernetes_goes_to_the_cluster(autoscaler: str) -> None:
    made = platform(autoscaler=autoscaler)
    (provider,) = [each.urn for each in made.of("pulumi:providers:kubernetes")]
    parts = [each for each in made if made.inside(each, "llama-trainium:infra:Autoscaler")]
    assert {each.provider for each in parts if each.type.startswith("kubernetes:")} == {provider}
    assert {each.provider for each in parts if each.type.startswith("aws:")} == {made.one("pulumi:providers:aws").urn}


def test_charts_come_from_the_mirror() -> None:
    mirror = "https://charts.example.org"
    made = platform(autoscaler="karpenter", charts={"mirror": mirror})
    assert {each.inputs["repositoryOpts"]["repo"] for each in made.of(RELEASE)} == {mirror}
