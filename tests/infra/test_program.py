"""The real __main__.py with each stack file: what it registers, with which provider, and in which order.

`waits_for` holds both ways: what is made after is deleted before.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import pulumi
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mocks import ROOT, Recorded, Registered, load_stack, run_program

STACKS = sorted({path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml")} - {"local"})  # those on AWS
TOKEN = {"llama-trainium:huggingFaceToken": "hf_" + "x" * 34}
# What a node of each type has, as EC2's DescribeInstanceTypes says: EFA interfaces, devices, cores.
TYPES = {
    "trn1.2xlarge": (0, 1, 2),
    "trn1.32xlarge": (8, 16, 32),
    "trn1n.32xlarge": (16, 16, 32),
    "trn2.48xlarge": (16, 16, 64),
}

NODE_GROUP, TEMPLATE = "aws:eks/nodeGroup:NodeGroup", "aws:ec2/launchTemplate:LaunchTemplate"
ADDON, RELEASE = "aws:eks/addon:Addon", "kubernetes:helm.sh/v3:Release"
VOLUME, CUSTOM_CLUSTER = "kubernetes:core/v1:PersistentVolume", "eks:index:Cluster"
ASSOCIATION = "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation"
NODE_POOL, NODE_CLASS = "kubernetes:karpenter.sh/v1:NodePool", "kubernetes:karpenter.k8s.aws/v1:EC2NodeClass"


@pytest.fixture(scope="module", params=STACKS)
def stack(request: pytest.FixtureRequest) -> Recorded:
    """What a stack file registers."""
    return run_program(load_stack(request.param), secrets=TOKEN, stack=request.param)


@pytest.fixture(scope="module")
def all_types() -> Recorded:
    """A stack with a group of every accelerator type."""
    config = load_stack("us-west-2")
    config["llama-trainium:accelerators"] = [
        {"name": kind.replace(".", "-"), "instanceType": kind, "max": 2} for kind in TYPES
    ]
    parallel = {"parallel": {"tensor_parallel_size": 2}}
    config["llama-trainium:training"] = {"preset": "tiny", "group": "trn1-2xlarge", "nodes": 1, "settings": parallel}
    config["llama-trainium:cluster"] = {"loadBalancerController": True}
    return run_program(config, secrets=TOKEN, stack="us-west-2")


@pytest.mark.parametrize("kind", TYPES)
def test_each_accelerator_type_has_its_interfaces_groups_taints_and_tags(all_types: Recorded, kind: str) -> None:
    name = kind.replace(".", "-")
    efa, devices, cores = TYPES[kind]
    template = all_types.one(TEMPLATE, f"{name}-template").inputs
    nodes = all_types.one(NODE_GROUP, f"{name}-nodes").inputs
    groups = [group.id for group in all_types.of("aws:ec2/securityGroup:SecurityGroup", f"{name}-efa")]
    cluster_group = all_types.one(CUSTOM_CLUSTER).outputs["clusterSecurityGroupId"]
    assert len(groups) == (1 if efa else 0)
    if efa:
        assert [
            (each["networkCardIndex"], each["deviceIndex"], each["interfaceType"], each["securityGroups"])
            for each in template["networkInterfaces"]
        ] == [(card, min(card, 1), "efa", [cluster_group, *groups]) for card in range(efa)]
    else:
        assert template["vpcSecurityGroupIds"] == [cluster_group]
        assert not template.get("networkInterfaces")
    assert template["instanceType"] == kind
    assert nodes["amiType"] == "AL2023_x86_64_NEURON"
    assert [(taint["key"], taint["effect"]) for taint in nodes["taints"]] == [
        ("aws.amazon.com/neuron", "NO_SCHEDULE"),
        ("fsx.csi.aws.com/agent-not-ready", "NO_EXECUTE"),
    ]
    tags = {each.inputs["tag"]["key"]: each.inputs["tag"]["value"] for each in scaling_tags(all_types, name)}
    resources = "k8s.io/cluster-autoscaler/node-template/resources/"
    assert tags[f"{resources}aws.amazon.com/neuron"] == str(devices)
    assert tags[f"{resources}aws.amazon.com/neuroncore"] == str(cores)
    assert tags.get(f"{resources}vpc.amazonaws.com/efa") == (str(efa) if efa else None)
    for made in template["tagSpecifications"]:
        assert {"project", "stack", "cost-centre", "Name"} <= set(made["tags"])


def scaling_tags(made: Recorded, group: str) -> list[Registered]:
    """The tags of a group's Auto Scaling group."""
    nodes = made.one(NODE_GROUP, f"{group}-nodes")
    (scaling_group,) = nodes.outputs["resources"][0]["autoscalingGroups"]
    every = made.of("aws:autoscaling/tag:Tag")
    return [each for each in every if each.inputs["autoscalingGroupName"] == scaling_group["name"]]


def test_everything_in_aws_is_made_with_the_stacks_tags_and_region(stack: Recorded) -> None:
    provider = stack.one("pulumi:providers:aws", "aws")
    tags = json.loads(provider.inputs["defaultTags"])["tags"]
    assert {"project", "stack", "cost-centre"} <= set(tags)
    made = [each for each in stack if each.type.startswith("aws:") and each.request.custom and not in_eks(stack, each)]
    assert len(made) > 80
    assert [each for each in made if each.provider != provider.urn] == []
    assert all(providers.startswith(provider.urn) for providers in stack.one(CUSTOM_CLUSTER).request.providers.values())


def in_eks(made: Recorded, each: Registered) -> bool:
    """Whether pulumi-eks makes it, with the providers that its component is given."""
    return each.parent == made.one(CUSTOM_CLUSTER).urn


def test_everything_in_kubernetes_is_made_in_the_stacks_cluster(stack: Recorded) -> None:
    provider = stack.one("pulumi:providers:kubernetes")
    made = [each for each in stack if each.type.startswith("kubernetes:")]
    assert len(made) > 10
    assert [each for each in made if provider.urn not in {each.provider, *component_providers(each)}] == []
    assert "kubeconfig" in provider.secrets


def component_providers(each: Registered) -> set[str]:
    """The providers that a component made elsewhere is given: URNs."""
    return {reference.rpartition("::")[0] for reference in each.request.providers.values()}


def test_every_component_and_resource_has_a_parent(stack: Recorded) -> None:
    roots = [each for each in stack if each.parent.split("::")[2] == "pulumi:pulumi:Stack"]
    assert all(each.type.startswith("llama-trainium:") or each.type == "pulumi:providers:aws" for each in roots)


def test_nodes_come_after_what_makes_them_nodes(stack: Recorded) -> None:
    for nodes in stack.of(NODE_GROUP):
        for add_on in ("vpc-cni", "kube-proxy", "pod-identity"):
            assert stack.waits_for(nodes, stack.one(ADDON, add_on)), (nodes, add_on)
        for route in stack.of("aws:ec2/route:Route"):
            assert stack.waits_for(nodes, route), "nodes pull images through the NAT gateway"


def test_charts_come_after_nodes_and_names(stack: Recorded) -> None:
    core, dns = stack.one(NODE_GROUP, "core-group"), stack.one(ADDON, "coredns")
    for release in stack.of(RELEASE):
        if "crd" in release.name:  # definitions have no pods
            continue
        assert stack.waits_for(release, core), release
        assert stack.waits_for(release, dns), release


def test_the_volume_comes_after_its_data_and_its_open_ports(stack: Recorded) -> None:
    volume = stack.one(VOLUME)
    assert stack.waits_for(volume, stack.one(ASSOCIATION))
    rules = [*stack.of("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule", "from-lustre-988")]
    assert rules
    assert all(stack.waits_for(volume, rule) for rule in rules)


def test_nothing_waits_that_need_not(stack: Recorded) -> None:
    """The long ways side by side: cluster, file system, image."""
    cluster = stack.one(CUSTOM_CLUSTER)
    file_system = stack.one("aws:fsx/lustreFileSystem:LustreFileSystem")
    image = stack.one("docker-build:index:Image")
    for one in (cluster, file_system, image):
        for other in (cluster, file_system, image):
            assert one is other or not stack.waits_for(one, other), (one, other)
    nat = stack.of("aws:ec2/natGateway:NatGateway")
    assert not any(stack.waits_for(one, each) for one in (cluster, file_system, image) for each in nat)
    groups = stack.of(NODE_GROUP)
    assert not any(stack.waits_for(one, other) for one in groups for other in groups if one is not other)


def test_controllers_outlive_what_they_clean_up() -> None:
    """Karpenter its NodePools, the CNI its nodes, Volcano the operators that make PodGroups."""
    made = run_program(load_stack("us-east-1"), secrets=TOKEN, stack="us-east-1")
    controller = made.one(RELEASE, "karpenter-release")
    pools, classes = made.of(NODE_POOL), made.of(NODE_CLASS)
    assert len(pools) == len(classes) >= 2
    for each in [*pools, *classes]:
        assert made.waits_for(each, controller), each
    volcano = made.one(RELEASE, "volcano")
    assert made.waits_for(made.one(RELEASE, "kuberay"), volcano)
    assert made.waits_for(made.one("kubernetes:apps/v1:Deployment", "mpi-operator"), volcano)


def test_the_load_balancer_controller_is_there_when_it_is_asked_for(all_types: Recorded, stack: Recorded) -> None:
    assert all_types.of(RELEASE, "ingress-controller")
    assert not stack.of(RELEASE, "ingress-controller")


def test_operators_that_are_present_are_not_installed() -> None:
    made = run_program({**load_stack("dev"), "llama-trainium:operators": "present"})
    assert not [each for each in made.of(RELEASE) if "operators" in each.name]
    assert made.of(RELEASE, "devices-neuron"), "the device plugin is no operator"


def test_no_secret_is_in_plain_inputs(stack: Recorded) -> None:
    (token,) = TOKEN.values()
    assert not [each for each in stack if token in json.dumps(each.inputs) and not each.secrets]


def test_the_composition_fits_on_a_page() -> None:
    assert len((ROOT / "__main__.py").read_text().splitlines()) <= 66


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=4,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in nested plain values."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, inner in items for place in paths(inner, (*path, key)))]


@st.composite
def broken_stacks(draw: st.DrawFn) -> tuple[str, dict[str, object]]:
    """A stack file in which one to three places are dropped, renamed or hold junk."""
    name = draw(st.sampled_from(STACKS))
    config: Any = copy.deepcopy(load_stack(name))
    for _ in range(draw(st.integers(1, 3))):
        *way, last = draw(st.sampled_from([place for place in paths(config) if place]))
        inner = config
        for key in way:
            inner = inner[key]
        how = draw(st.sampled_from(["junk", "drop", "rename"]))
        if how == "junk":
            inner[last] = draw(JUNK)
        else:
            value = inner.pop(last)
            if how == "rename" and isinstance(inner, dict):
                inner[f"{last}x"] = value
    return name, config


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(broken_stacks())
def test_no_broken_stack_registers_anything_or_ends_in_a_traceback(broken: tuple[str, dict[str, object]]) -> None:
    name, config = broken
    recorded = Recorded()
    try:
        run_program(config, secrets=TOKEN, stack=name, recorded=recorded)
    except pulumi.RunError as error:  # which the language host prints as it is
        assert recorded.resources == [], yaml.safe_dump(config)
        lines = str(error).splitlines()
        assert lines
        assert all(line.startswith("llama-trainium:") for line in lines), lines
