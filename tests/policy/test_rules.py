"""Each rule lets what keeps it pass and says what breaks it, as the engine would ask it; what a preview does not know
is left to the update."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import judging
import pytest
from mocks import ROOT
from planted import TAGS, Case, Props
from planted_pods import CASES, DEPLOYMENT, POD
from pulumi_policy import Secret
from pulumi_policy.deserialize import serialize_properties
from pulumi_policy.proxy import UNKNOWN_STRING_VALUE
from stack_configs import changed

from policy import pod_rules
from policy.named_exceptions import MOVING_TAGS, PRIVILEGED_DAEMONS, UNPINNED_IMAGES
from policy.rules import POLICIES

NAMES = [policy.name for policy in POLICIES]


def violations(kind: str, props: Props, default_tags: bool = True) -> dict[str, list[str]]:
    """The rules that a planted resource breaks, each with what they say."""
    wire: Any = serialize_properties(props)
    return judging.violations(kind, wire, {"defaultTags": {"tags": TAGS}} if default_tags else {})


def bad(cases: list[Case] = CASES) -> Iterator[Any]:
    """Every planted resource that breaks a rule."""
    for case in cases:
        for what, props in case.broken().items():
            yield pytest.param(case, props, what, id=f"{case.rule}-{case.type.split(':')[-1]}-{what}")


def test_every_rule_has_cases_and_a_name_of_its_own() -> None:
    assert {case.rule for case in CASES} == set(NAMES)
    assert len(set(NAMES)) == len(NAMES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.type.split(':')[-1]}")
def test_what_keeps_a_rule_passes_them_all(case: Case) -> None:
    assert violations(case.type, case.good, case.default_tags) == {}


@pytest.mark.parametrize(("case", "props", "what"), bad())
def test_what_breaks_a_rule_is_said(case: Case, props: Props, what: str) -> None:
    found = violations(case.type, props, case.default_tags)
    beside = {"images-by-digest"} if case.rule == "no-latest" else set()
    assert {case.rule} <= set(found) <= {case.rule} | beside
    assert all(", expected " in line or ", which means " in line for line in found[case.rule])


def test_a_secret_is_said_without_its_value() -> None:
    found = violations("kubernetes:core/v1:ConfigMap", {"data": {"a": "hf_" + "x" * 34}})["no-plain-secrets"]
    assert found == ["data.a: a Hugging Face token in plain, expected a Pulumi secret (pulumi.Output.secret)"]


def test_what_holds_a_secret_deep_inside_is_looked_through() -> None:
    props = {"values": {"list": [{"password": Secret("a")}, {"password": "b"}], "whole": Secret({"password": "c"})}}
    (line,) = violations("kubernetes:helm.sh/v3:Release", props)["no-plain-secrets"]
    assert line.startswith("values.list[1].password: ")


@pytest.mark.parametrize(
    ("kind", "props"),
    [
        ("aws:ec2/launchTemplate:LaunchTemplate", dict.fromkeys(
            ("blockDeviceMappings", "metadataOptions", "tagSpecifications"), UNKNOWN_STRING_VALUE
        )),
        ("aws:eks/cluster:Cluster", dict.fromkeys(("vpcConfig", "encryptionConfig"), UNKNOWN_STRING_VALUE)),
        ("aws:s3/bucketPolicy:BucketPolicy", {"policy": UNKNOWN_STRING_VALUE}),
        ("aws:s3/bucket:Bucket", {"acl": UNKNOWN_STRING_VALUE, "tags": UNKNOWN_STRING_VALUE}),
        ("aws:ec2/securityGroup:SecurityGroup", {"ingress": [{"cidrBlocks": [UNKNOWN_STRING_VALUE]}]}),
        ("aws:ecr/repository:Repository", {"imageTagMutability": UNKNOWN_STRING_VALUE}),
        ("aws:ebs/volume:Volume", {"encrypted": UNKNOWN_STRING_VALUE}),
        ("kubernetes:karpenter.k8s.aws/v1:EC2NodeClass", {"spec": UNKNOWN_STRING_VALUE}),
        ("kubernetes:core/v1:Secret", {"stringData": {"a": UNKNOWN_STRING_VALUE}}),
        ("kubernetes:apps/v1:Deployment", {"spec": UNKNOWN_STRING_VALUE}),
        (
            "kubernetes:apps/v1:Deployment",
            changed(
                {
                    f"{POD}/containers/0/image": UNKNOWN_STRING_VALUE,
                    f"{POD}/containers/0/resources": UNKNOWN_STRING_VALUE,
                    f"{POD}/containers/0/securityContext": UNKNOWN_STRING_VALUE,
                },
                DEPLOYMENT,
            ),
        ),
    ],
)  # fmt: skip
def test_what_is_not_known_yet_breaks_no_rule(kind: str, props: Props) -> None:
    assert violations(kind, props) == {}


def test_what_is_known_is_judged_beside_what_is_not() -> None:
    props = {"ingress": [{"cidrBlocks": [UNKNOWN_STRING_VALUE, "0.0.0.0/0"]}]}
    assert list(violations("aws:ec2/securityGroup:SecurityGroup", props)) == ["no-open-security-group"]


def test_a_named_daemon_may_be_privileged_and_its_namesake_elsewhere_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pod_rules, "PRIVILEGED_DAEMONS", {("planted", "planted"): "a test"})
    kind, rights = "kubernetes:apps/v1:DaemonSet", {f"{POD}/containers/0/securityContext/privileged": True}
    props = changed(rights, DEPLOYMENT)
    assert violations(kind, props) == {}
    assert violations(kind, changed({"metadata/namespace": UNKNOWN_STRING_VALUE}, props)) == {}
    assert list(violations(kind, changed({"metadata/namespace": "other"}, props))) == ["no-privileged-pods"]
    assert list(violations("kubernetes:apps/v1:Deployment", props)) == ["no-privileged-pods"]


def test_exceptions_are_names_and_have_reasons() -> None:
    for listed in (PRIVILEGED_DAEMONS, UNPINNED_IMAGES, MOVING_TAGS):
        for name, reason in listed.items():
            assert "*" not in str(name)
            assert len(reason.split()) > 5


def test_no_module_of_the_pack_hides_another() -> None:
    """The engine starts Python in the pack's folder, so that what is there is found before what is installed."""
    own = {path.stem for path in (ROOT / "policy").glob("*.py")} - {"__init__", "__main__"}
    assert not own & sys.stdlib_module_names
    assert [name for name in own if importlib.util.find_spec(name)] == []
