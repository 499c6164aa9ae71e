"""Every check of preflight, passing and failing, on an account of moto's."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator

import pytest
from intercepted import refused
from preflight_account import (
    BLOCK,
    DIGEST,
    GATED,
    OWN,
    QUOTAS,
    REGION,
    RESERVATION,
    RESERVED,
    account_with_amis,
    client,
    ecr_image,
    file_system,
    found,
    limit,
    quotas,
    reserved,
    running,
    trn,
)

from infra import preflight
from infra.preflight_checks import Finding

Case = tuple[str, str, str, Callable[[], list[Finding]]]
CASES: list[Case] = [
    # check, status, part of what it says, what it is asked about
    ("credentials", "pass", "account 123456789012, arn:aws:sts::123456789012:user/moto", lambda: found("credentials")),
    (
        "credentials",
        "fail",
        "the token is old",
        lambda: found("credentials", answers={"GetCallerIdentity": refused("ExpiredToken", "the token is old")}),
    ),
    (
        "credentials",
        "warn",
        "cluster.admins names arn:aws:iam::123456789012:role/team/Admin",
        lambda: found(
            "credentials",
            {"cluster/admins": ["arn:aws:iam::123456789012:role/team/Admin", "arn:aws:iam::123456789012:user/Admin"]},
            {
                "GetCallerIdentity": {
                    "Account": "123456789012",
                    "Arn": "arn:aws:sts::123456789012:assumed-role/Admin/me",
                }
            },
        ),
    ),
    ("zones", "pass", "trn1.32xlarge of group trn1 is offered in usw2-az4", lambda: found("zones")),
    (
        "zones",
        "fail",
        "trn1.32xlarge of group trn1 is not offered in usw2-az3",
        lambda: found("zones", {"network/zones": ["usw2-az3", "usw2-az4"]}),
    ),
    (
        "zones",
        "fail",
        "usw2-az9 is not in this account",
        lambda: found("zones", {"network/zones": ["usw2-az4", "usw2-az9"]}),
    ),
    ("zones", "fail", "m99i.large is in no zone", lambda: found("zones", {"coreNodes/instanceType": "m99i.large"})),
    (
        "zones",
        "warn",
        "trn1.32xlarge is not offered in usw2-az2: core nodes are in the others",
        lambda: found("zones", {"coreNodes/instanceType": "trn1.32xlarge", "network/zones": ["usw2-az4", "usw2-az2"]}),
    ),
    ("vCPU quota", "pass", "Running On-Demand Trn instances: 256 vCPUs, needed: 256", lambda: found("vCPU quota")),
    ("vCPU quota", "fail", "Trn instances: 128 vCPUs, needed: 256", lambda: found("vCPU quota", answers=trn(128))),
    (
        "vCPU quota",
        "warn",
        "accelerators may grow to 512",
        lambda: found("vCPU quota", {"accelerators/0/max": 4, "training/nodes": 2}),
    ),
    (
        "vCPU quota",
        "fail",
        "All Trn Spot Instance Requests: 0 vCPUs",
        lambda: found("vCPU quota", {"accelerators/0/capacity": "spot"}, limit("L-6B0D517C", 0)),
    ),
    (
        "vCPU quota",
        "fail",
        "Standard (A, C, D, H, I, M, R, T, Z) instances: 8 vCPUs, needed: 16",
        lambda: found("vCPU quota", answers=limit("L-1216C47A", 8)),
    ),
    (
        "vCPU quota",
        "warn",
        "coreNodes may grow to 160",
        lambda: found("vCPU quota", {"autoscaler": "karpenter"}),
    ),
    (
        "vCPU quota",
        "warn",
        "256 vCPUs, 8 of them in use by others, needed: 256",
        lambda: [running("trn1.2xlarge"), *found("vCPU quota")][1:],
    ),
    ("vCPU quota", "pass", "256 vCPUs, needed: 256", lambda: [running("trn1.2xlarge", OWN), *found("vCPU quota")][1:]),
    (
        "vCPU quota",
        "pass",
        "64 vCPUs, 4 of them in use by others",
        lambda: [running("m5.xlarge"), *found("vCPU quota")][1:],
    ),
    (
        "network quota",
        "pass",
        "VPCs per Region: 5 VPCs, 1 of them in use by others, needed: 1",
        lambda: found("network quota"),
    ),
    (
        "network quota",
        "fail",
        "VPCs per Region: 1 VPCs, 1 of them",
        lambda: found("network quota", answers=limit("L-F678F1CE", 1)),
    ),
    (
        "network quota",
        "fail",
        "EC2-VPC Elastic IPs: 1 addresses, needed: 2",
        lambda: found("network quota", {"network/nat": "per-zone"}, limit("L-0263D0A3", 1)),
    ),
    (
        "storage quota",
        "pass",
        "Lustre Persistent_2 storage capacity: 100,800 GiB, needed: 1,200",
        lambda: found("storage quota"),
    ),
    (
        "storage quota",
        "fail",
        "100,800 of them in use by others, needed: 1,200",
        lambda: [file_system(), *found("storage quota")][1:],
    ),
    ("storage quota", "pass", "100,800 GiB, needed: 1,200", lambda: [file_system(OWN), *found("storage quota")][1:]),
    (
        "reservation",
        "pass",
        f"{RESERVATION} is active: 2 x trn1.32xlarge, usw2-az4, 2026-11-01",
        lambda: found("reservation", RESERVED, reserved()),
    ),
    (
        "reservation",
        "pass",
        "is active",
        lambda: found("reservation", BLOCK, reserved(ReservationType="capacity-block")),
    ),
    (
        "reservation",
        "fail",
        "is expired, expected active",
        lambda: found("reservation", RESERVED, reserved(State="expired")),
    ),
    (
        "reservation",
        "warn",
        "has not begun: 2026-11-01 00:00 UTC to 2026-11-08",
        lambda: found(
            "reservation",
            BLOCK,
            reserved(
                State="scheduled",
                ReservationType="capacity-block",
                EndDate=datetime.datetime(2026, 11, 8, tzinfo=datetime.UTC),
            ),
        ),
    ),
    (
        "reservation",
        "fail",
        "it is in usw2-az1",
        lambda: found("reservation", RESERVED, reserved(AvailabilityZoneId="usw2-az1")),
    ),
    (
        "reservation",
        "fail",
        "it is for trn1.2xlarge",
        lambda: found("reservation", RESERVED, reserved(InstanceType="trn1.2xlarge")),
    ),
    ("reservation", "fail", "it is no capacity block", lambda: found("reservation", BLOCK, reserved())),
    (
        "reservation",
        "fail",
        "it is a capacity block",
        lambda: found("reservation", RESERVED, reserved(ReservationType="capacity-block")),
    ),
    (
        "reservation",
        "warn",
        "has 1 instances for max 2",
        lambda: found("reservation", RESERVED, reserved(TotalInstanceCount=1)),
    ),
    (
        "reservation",
        "fail",
        f"{RESERVATION} is not in us-west-2",
        lambda: found(
            "reservation", RESERVED, {"DescribeCapacityReservations": refused("InvalidCapacityReservationId.NotFound")}
        ),
    ),
    ("AMI", "pass", "amazon-eks-node-al2023-x86_64-neuron-1.35-v20260728: ami-neuron", lambda: found("AMI")),
    (
        "AMI",
        "fail",
        "amazon-eks-node-al2023-x86_64-neuron-1.35-v20260728 is not in us-west-2",
        lambda: [client("ec2").deregister_image(ImageId="ami-neuron"), *found("AMI")][1:],
    ),
    ("image", "pass", "https://public.ecr.aws/v2/ answers", lambda: found("image")),
    (
        "image",
        "fail",
        "https://public.ecr.aws/v2/: no route",
        lambda: found("image", unreachable=lambda url: "no route"),
    ),
    (
        "image",
        "fail",
        "ServerException: busy",
        lambda: found("image", answers={"GetAuthorizationToken": refused("ServerException", "busy")}),
    ),
    ("image", "pass", "llama is in ECR", lambda: found("image", {"image/prebuilt": ecr_image()})),
    (
        "image",
        "fail",
        "is not in ECR",
        lambda: found("image", {"image/prebuilt": f"123456789012.dkr.ecr.{REGION}.amazonaws.com/llama@{DIGEST}"}),
    ),
    (
        "image",
        "pass",
        "https://registry-1.docker.io/v2/ answers",
        lambda: found("image", {"image/prebuilt": f"me/llama@{DIGEST}"}),
    ),
    ("Hugging Face", "pass", "nothing is read from the Hub", lambda: found("Hugging Face")),
    ("Hugging Face", "pass", "huggingFaceToken is set", lambda: found("Hugging Face", GATED, token_given=True)),
    (
        "Hugging Face",
        "fail",
        "huggingFaceToken is not set, and data.tokenizer meta-llama/Llama-2-7b-hf is gated",
        lambda: found("Hugging Face", GATED),
    ),
    (
        "Hugging Face",
        "warn",
        "https://huggingface.co: no route",
        lambda: found("Hugging Face", GATED, token_given=True, unreachable=lambda url: "no route"),
    ),
    (
        "Hugging Face",
        "pass",
        "no token, and nothing is gated",
        lambda: found("Hugging Face", {"training/settings/data": {"source": "hub:wikicorpus/raw_en"}}),
    ),
]


@pytest.fixture(autouse=True)
def account() -> Iterator[None]:
    with account_with_amis():
        yield


@pytest.mark.parametrize(
    ("check", "status", "says", "ask"), CASES, ids=[f"{case[0]}: {case[2]}"[:60] for case in CASES]
)
def test_a_check(check: str, status: str, says: str, ask: Callable[[], list[Finding]]) -> None:
    said = ask()
    assert [each for each in said if each.status == status and says in each.detail], said
    if status == "fail":
        mended = [each.fix for each in said if each.status == "fail"]
        assert all(mended) or "busy" in says, said
    else:
        assert not [each for each in said if each.status == "fail"], said
    if status == "pass":
        assert {each.status for each in said} == {"pass"}, said


def test_every_check_has_a_passing_and_a_failing_case() -> None:
    for check in ("credentials", *preflight.CHECKS):
        assert {"pass", "fail"} <= {case[1] for case in CASES if case[0] == check}, check


@pytest.mark.parametrize(
    "check", ["zones", "vCPU quota", "network quota", "storage quota", "reservation", "AMI", "image"]
)
def test_what_may_not_be_asked_is_a_warning(check: str) -> None:
    operations = (
        "DescribeAvailabilityZones",
        "GetServiceQuota",
        "DescribeCapacityReservations",
        "DescribeImages",
        "GetAuthorizationToken",
    )
    denied = {operation: refused("UnauthorizedOperation") for operation in operations}
    (said,) = found(check, RESERVED, denied)
    assert said.status == "warn"
    assert "is not allowed for these credentials" in said.detail


def test_a_quota_that_the_account_has_no_value_of_its_own_for_is_awss_default() -> None:
    answers = {"GetServiceQuota": refused("NoSuchResourceException"), "GetAWSDefaultServiceQuota": quotas(QUOTAS)}
    assert {each.status for each in found("storage quota", answers=answers)} == {"pass"}
