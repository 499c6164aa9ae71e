"""What the program would make in AWS is made in moto, and every IAM policy of it says no more than it must."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

import pytest
from botocore.exceptions import ClientError, ParamValidationError
from mocks import Recorded, Registered
from moto import mock_aws
from moto_account import NOT_IN_MOTO, Account, of_moto
from moto_translators import TRANSLATORS

# Actions that the Service Authorization Reference lists without a resource type: for them "*" is the only resource.
# ec2:GetSecurityGroupsForVpc is there for what AWS's own policies have (infra/policies_controllers.py).
WITHOUT_RESOURCE = [
    "acm:ListCertificates",
    "autoscaling:Describe*",
    "cloudwatch:GetMetricStatistics",
    "cloudwatch:PutMetricData",
    "ec2:Describe*",
    "ec2:GetSecurityGroupsForVpc",
    "elasticloadbalancing:Describe*",
    "fsx:DescribeFileSystems",
    "pricing:GetProducts",
]


@pytest.fixture(autouse=True)
def no_real_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummy credentials keep a mistake in a test from reaching an account. Moto's 1,300 images take long to load."""
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(key, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "false")


@pytest.fixture
def account() -> Iterator[Account]:
    """An empty account."""
    with mock_aws():
        yield Account("us-west-2")


@pytest.fixture
def account_with_aws_policies() -> Iterator[Account]:
    """An account that has the policies AWS manages; loading them takes seconds."""
    with mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        yield Account("us-west-2", aws_policies=True)


def region_of(recorded: Recorded) -> str:
    return str(recorded.one("pulumi:providers:aws").inputs["region"])


def test_a_stack_is_created(account: Account, stack: Recorded) -> None:
    account.region = region_of(stack)
    account.create(stack)
    ec2 = account.client("ec2")
    subnets = ec2.describe_subnets(Filters=[{"Name": "vpc-id", "Values": [account.real[vpc_of(stack).id]]}])
    assert len(subnets["Subnets"]) == len(stack.of("aws:ec2/subnet:Subnet"))
    assert len(account.client("fsx").describe_file_systems()["FileSystems"]) == 1


def test_everything_is_created(account_with_aws_policies: Account, everything: Recorded) -> None:
    account = account_with_aws_policies
    created = account.create(everything)
    assert created == [each for each in everything if each.type in TRANSLATORS]
    roles = {each["RoleName"] for each in account.client("iam").list_roles()["Roles"]}
    assert roles == {each.outputs["name"] for each in everything.of("aws:iam/role:Role")}


def vpc_of(recorded: Recorded) -> Registered:
    return recorded.one("aws:ec2/vpc:Vpc")


def test_nothing_that_moto_knows_is_left_out(stack: Recorded, everything: Recorded) -> None:
    types = {each.type for recorded in (stack, everything) for each in recorded if of_moto(each)}
    assert types - set(TRANSLATORS) == types & NOT_IN_MOTO


# Mistakes planted into the program's own inputs: moto refuses them as AWS does.


def planted(recorded: Recorded, kind: str, name: str, **inputs: Any) -> list[Registered]:
    """A resource with some of its inputs changed, after all that it needs and the others of its type."""
    wrong = recorded.one(kind, name)
    changed = copy.copy(wrong)
    changed.inputs = wrong.inputs | inputs
    others = [each for each in recorded.of(kind) if each is not wrong]
    needed = {each.urn for each in others}.union(*[recorded.before(each) for each in [*others, wrong]])
    return [*[each for each in recorded if each.urn in needed], changed]


def test_overlapping_subnets_are_refused(account: Account, everything: Recorded) -> None:
    taken = everything.one("aws:ec2/subnet:Subnet", "private-usw2-az4").inputs["cidrBlock"]
    resources = planted(everything, "aws:ec2/subnet:Subnet", "private-usw2-az1", cidrBlock=taken)
    with pytest.raises(ClientError, match=r"InvalidSubnet\.Conflict"):
        account.create(resources)


def test_a_subnet_outside_the_vpc_is_refused(account: Account, everything: Recorded) -> None:
    resources = planted(everything, "aws:ec2/subnet:Subnet", "private-usw2-az1", cidrBlock="192.168.0.0/24")
    with pytest.raises(ClientError, match=r"InvalidSubnet\.Range"):
        account.create(resources)


def test_a_reference_to_what_is_not_there_is_refused(account: Account, everything: Recorded) -> None:
    resources = planted(everything, "aws:ec2/routeTable:RouteTable", "private-usw2-az1", vpcId="vpc-0123456789abcdef0")
    with pytest.raises(ClientError, match=r"InvalidVpcID\.NotFound"):
        account.create(resources)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ({"Effect": "Permit", "Action": "s3:GetObject", "Resource": "*"}, "Syntax errors in policy"),
        ({"Effect": "Allow", "Action": "s3:GetObject"}, "resources"),
        ({"Effect": "Allow", "Action": "GetObject", "Resource": "*"}, "vendor"),
    ],
)
def test_a_malformed_policy_is_refused(
    account: Account, everything: Recorded, statement: dict[str, str], message: str
) -> None:
    policy = json.dumps({"Version": "2012-10-17", "Statement": [statement]})
    resources = planted(everything, "aws:iam/rolePolicy:RolePolicy", "ebs-csi-policy", policy=policy)
    with pytest.raises(ClientError, match=message):
        account.create(resources)


def test_an_unknown_managed_policy_is_refused(account_with_aws_policies: Account, everything: Recorded) -> None:
    arn = "arn:aws:iam::aws:policy/AmazonEKSWorkerNodesPolicy"
    resources = planted(
        everything, "aws:iam/rolePolicyAttachment:RolePolicyAttachment", "WorkerNodePolicy", policyArn=arn
    )
    with pytest.raises(ClientError, match="NoSuchEntity"):
        account_with_aws_policies.create(resources)


def test_a_wrong_parameter_is_refused(account: Account, everything: Recorded) -> None:
    resources = planted(everything, "aws:kms/key:Key", "secrets", description=7)
    with pytest.raises(ParamValidationError, match="Description"):
        account.create(resources)


# What policies allow.


def policies_in(value: Any) -> Iterator[dict[str, Any]]:
    """Every policy document in inputs, which hold them as JSON."""
    if isinstance(value, dict):
        if "Statement" in value:
            yield value
        for inner in value.values():
            yield from policies_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from policies_in(inner)
    elif isinstance(value, str) and '"Statement"' in value:
        yield from policies_in(json.loads(value))


def statements(recorded: Recorded) -> Iterator[tuple[str, dict[str, Any]]]:
    for resource in recorded:
        for policy in policies_in(resource.inputs):
            assert policy["Version"] == "2012-10-17", resource
            for statement in policy["Statement"]:
                yield resource.name, statement


def as_list(value: str | list[str]) -> list[str]:
    return [value] if isinstance(value, str) else value


def too_much(statement: dict[str, Any]) -> list[str]:
    """What a statement allows beyond what it must: any action of a service, or any resource where the API knows one."""
    if statement["Effect"] != "Allow":
        return []
    actions = as_list(statement["Action"])
    found = [action for action in actions if action.endswith("*")]
    if "*" in as_list(statement.get("Resource", [])):
        found += [each for each in actions if not any(fnmatchcase(each, known) for known in WITHOUT_RESOURCE)]
    return found


def test_no_policy_allows_more_than_it_must(stack: Recorded, everything: Recorded) -> None:
    seen = 0
    for recorded in (stack, everything):
        for name, statement in statements(recorded):
            assert not too_much(statement), name
            assert "*" not in as_list(statement["Action"]), name
            seen += 1
    assert seen > 30


@pytest.mark.parametrize(
    "statement",
    [
        {"Effect": "Allow", "Action": "*", "Resource": ["arn:aws:s3:::bucket"]},
        {"Effect": "Allow", "Action": ["s3:*"], "Resource": ["arn:aws:s3:::bucket"]},
        {"Effect": "Allow", "Action": ["ec2:DescribeVpcs", "ec2:TerminateInstances"], "Resource": "*"},
        {"Effect": "Allow", "Action": ["ec2:TerminateInstances"], "Resource": ["arn:aws:ec2:::x", "*"]},
    ],
)
def test_the_check_of_policies_finds(statement: dict[str, Any]) -> None:
    assert too_much(statement)
