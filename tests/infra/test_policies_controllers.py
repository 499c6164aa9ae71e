"""What the controllers' policies let them do, asked of a small evaluator of IAM's rules."""

from __future__ import annotations

import json
from fnmatch import fnmatchcase
from typing import Any

import pytest

from infra.policies import Place, Policy
from infra.policies_controllers import (
    cluster_autoscaler,
    interruption_queue,
    karpenter,
    load_balancer_controller,
)

PLACE = Place(region="us-west-2", account="123456789012", cluster="llama-trainium-dev")
NODE_ROLE = "arn:aws:iam::123456789012:role/core-role-1a2b3c4"
QUEUE = "arn:aws:sqs:us-west-2:123456789012:interruptions-1a2b3c4"
KARPENTER = karpenter(PLACE, NODE_ROLE, QUEUE)
BALANCERS = load_balancer_controller(PLACE, "vpc-0abc", "sg-0nodes")
AUTOSCALER = cluster_autoscaler(PLACE)

EC2 = "arn:aws:ec2:us-west-2:123456789012"
ELB = "arn:aws:elasticloadbalancing:us-west-2:123456789012"
OWNED = "kubernetes.io/cluster/llama-trainium-dev"
TAGS = {f"aws:RequestTag/{OWNED}": "owned", "aws:RequestTag/eks:eks-cluster-name": PLACE.cluster}
POOL = {"aws:RequestTag/karpenter.sh/nodepool": "trn1"}


def allowed(policy: Policy, action: str, resource: str, context: dict[str, Any] | None = None) -> bool:
    """Whether a statement of `policy` allows `action` on `resource`, by IAM's rules for what these policies use."""
    return any(
        statement["Effect"] == "Allow"
        and any(fnmatchcase(action, pattern) for pattern in statement["Action"])
        and any(fnmatchcase(resource, pattern) for pattern in _list(statement["Resource"]))
        and all(_holds(operator, keys, context or {}) for operator, keys in statement.get("Condition", {}).items())
        for statement in policy["Statement"]
    )


def _list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def _holds(operator: str, keys: dict[str, Any], context: dict[str, Any]) -> bool:
    if operator == "ForAllValues:StringEquals":
        return all(value in _list(wanted) for key, wanted in keys.items() for value in context.get(key, []))
    assert operator in ("StringEquals", "StringLike"), operator
    match = fnmatchcase if operator == "StringLike" else str.__eq__
    return all(
        key in context and any(match(context[key], pattern) for pattern in _list(wanted))
        for key, wanted in keys.items()
    )


@pytest.mark.parametrize("action", ["SetDesiredCapacity", "TerminateInstanceInAutoScalingGroup"])
def test_cluster_autoscaler_scales_the_groups_of_this_cluster_only(action: str) -> None:
    group = "arn:aws:autoscaling:us-west-2:123456789012:autoScalingGroup:6f1:autoScalingGroupName/eks-trn1-nodes"
    own = {"aws:ResourceTag/k8s.io/cluster-autoscaler/llama-trainium-dev": "owned"}
    other = {"aws:ResourceTag/k8s.io/cluster-autoscaler/llama-trainium-us-west-2": "owned"}
    assert allowed(AUTOSCALER, f"autoscaling:{action}", group, own)
    assert not allowed(AUTOSCALER, f"autoscaling:{action}", group, other)
    assert not allowed(AUTOSCALER, f"autoscaling:{action}", group)


def test_cluster_autoscaler_asks_for_the_node_groups_of_this_cluster_only() -> None:
    own = "arn:aws:eks:us-west-2:123456789012:nodegroup/llama-trainium-dev/trn1-nodes-1a2b3c4/5ac"
    assert allowed(AUTOSCALER, "eks:DescribeNodegroup", own)
    assert not allowed(AUTOSCALER, "eks:DescribeNodegroup", own.replace("-dev", "-us-west-2"))


@pytest.mark.parametrize("kind", ["fleet", "instance", "volume", "network-interface", "spot-instances-request"])
def test_karpenter_launches_only_what_it_tags_as_its_own(kind: str) -> None:
    resource = f"{EC2}:{kind}/new"
    for action in ("ec2:RunInstances", "ec2:CreateFleet"):
        assert allowed(KARPENTER, action, resource, TAGS | POOL)
        assert not allowed(KARPENTER, action, resource, TAGS)
        assert not allowed(KARPENTER, action, resource, POOL)
    created = TAGS | POOL | {"ec2:CreateAction": "CreateFleet"}
    assert allowed(KARPENTER, "ec2:CreateTags", resource, created)
    assert not allowed(KARPENTER, "ec2:CreateTags", resource, TAGS | POOL)


@pytest.mark.parametrize(
    "resource",
    [
        "arn:aws:ec2:us-west-2::image/ami-1",
        "arn:aws:ec2:us-west-2::snapshot/snap-1",
        "arn:aws:ec2:us-west-2:999999999999:capacity-reservation/cr-1",
        f"{EC2}:placement-group/trn1",
        f"{EC2}:security-group/sg-1",
        f"{EC2}:subnet/subnet-1",
    ],
)
def test_karpenter_launches_from_what_others_made(resource: str) -> None:
    assert allowed(KARPENTER, "ec2:RunInstances", resource)
    assert allowed(KARPENTER, "ec2:CreateFleet", resource)
    assert not allowed(KARPENTER, "ec2:TerminateInstances", resource)


def test_karpenter_terminates_its_own_instances_and_no_others() -> None:
    node = f"{EC2}:instance/i-1"
    own = {f"aws:ResourceTag/{OWNED}": "owned", "aws:ResourceTag/karpenter.sh/nodepool": "cpu"}
    assert allowed(KARPENTER, "ec2:TerminateInstances", node, own)
    # A node of a managed group carries the cluster's tag too, but no NodePool's.
    assert not allowed(KARPENTER, "ec2:TerminateInstances", node, {f"aws:ResourceTag/{OWNED}": "owned"})
    assert allowed(KARPENTER, "ec2:CreateTags", node, own | {"aws:TagKeys": ["Name", "karpenter.sh/nodeclaim"]})
    assert not allowed(KARPENTER, "ec2:CreateTags", node, own | {"aws:TagKeys": ["Name", OWNED]})


def test_karpenter_gives_nodes_their_role_and_no_other() -> None:
    to_ec2 = {"iam:PassedToService": "ec2.amazonaws.com"}
    assert allowed(KARPENTER, "iam:PassRole", NODE_ROLE, to_ec2)
    assert not allowed(KARPENTER, "iam:PassRole", NODE_ROLE, {"iam:PassedToService": "lambda.amazonaws.com"})
    assert not allowed(KARPENTER, "iam:PassRole", "arn:aws:iam::123456789012:role/Admin", to_ec2)
    assert not allowed(KARPENTER, "iam:CreateInstanceProfile", "arn:aws:iam::123456789012:instance-profile/x")


def test_only_the_rule_writes_to_the_queue_and_nothing_without_tls() -> None:
    rule = "arn:aws:events:us-west-2:123456789012:rule/interruptions-1a2b3c4"
    write, deny = interruption_queue(QUEUE, rule)["Statement"]
    assert write["Principal"] == {"Service": "events.amazonaws.com"}
    assert write["Action"] == ["sqs:SendMessage"]
    assert write["Condition"] == {"ArnEquals": {"aws:SourceArn": rule}}
    assert deny["Effect"] == "Deny"
    assert deny["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}


def test_load_balancer_controller_changes_only_what_is_tagged_for_this_cluster() -> None:
    tag = "elbv2.k8s.aws/cluster"
    own, other = {f"aws:ResourceTag/{tag}": PLACE.cluster}, {f"aws:ResourceTag/{tag}": "another"}
    asked = {f"aws:RequestTag/{tag}": PLACE.cluster}
    balancer, target = f"{ELB}:loadbalancer/app/k8s-dash-1/50d", f"{ELB}:targetgroup/k8s-dash-1/73e"
    group, vpc = f"{EC2}:security-group/sg-1", f"{EC2}:vpc/vpc-0abc"
    for action, resource in [
        ("elasticloadbalancing:DeleteLoadBalancer", balancer),
        ("elasticloadbalancing:CreateListener", balancer),
        ("elasticloadbalancing:RegisterTargets", target),
        ("ec2:DeleteSecurityGroup", group),
        ("ec2:AuthorizeSecurityGroupIngress", group),
    ]:
        assert allowed(BALANCERS, action, resource, own)
        assert not allowed(BALANCERS, action, resource, other)
        assert not allowed(BALANCERS, action, resource)
    assert allowed(BALANCERS, "elasticloadbalancing:CreateLoadBalancer", balancer, asked)
    assert not allowed(BALANCERS, "elasticloadbalancing:CreateLoadBalancer", balancer)
    assert not allowed(BALANCERS, "elasticloadbalancing:CreateLoadBalancer", f"{ELB}:loadbalancer/net/k8s-1/1", asked)
    assert allowed(BALANCERS, "ec2:CreateSecurityGroup", vpc)
    assert not allowed(BALANCERS, "ec2:CreateSecurityGroup", f"{EC2}:vpc/vpc-0other")
    # Its way to the pods is the nodes' own group, which carries none of its tags.
    assert allowed(BALANCERS, "ec2:AuthorizeSecurityGroupIngress", f"{EC2}:security-group/sg-0nodes")


@pytest.mark.parametrize("policy", [KARPENTER, BALANCERS, AUTOSCALER], ids=["karpenter", "balancers", "autoscaler"])
def test_policies_fit_into_a_role(policy: Policy) -> None:
    # IAM counts a role's inline policies without their white space and takes 10,240 characters.
    assert len(json.dumps(policy, separators=(",", ":"))) <= 10_240
