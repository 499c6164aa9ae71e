"""Every check of preflight, passing and failing, on an account of moto's."""

from __future__ import annotations

import datetime
import http.server
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import boto3
import pytest
from intercepted import Answer, intercepted, refused
from moto import mock_aws
from moto.ec2.models import amis
from stack_configs import changed, raw_config, read_raw

from infra import preflight, preflight_checks
from infra.account import clients_of
from infra.preflight_checks import Finding, Subject, no_answer, run_check
from stack_settings import AwsStack

REGION = "us-west-2"
RESERVATION = "cr-0123456789abcdef0"
DIGEST = "sha256:" + "a" * 64
RESERVED = {"accelerators/0/capacity": "reservation", "accelerators/0/reservationId": RESERVATION}
BLOCK = {**RESERVED, "accelerators/0/capacity": "capacity-block"}
GATED = {
    "training/settings/data": {"tokenizer": "meta-llama/Llama-2-7b-hf"},
    "training/settings/model": {"vocab_size": 32000},
}
QUOTAS = {
    "L-2C3B7624": 256,
    "L-6B0D517C": 256,
    "L-1216C47A": 64,
    "L-0263D0A3": 5,
    "L-F678F1CE": 5,
    "L-8F1B9C74": 100800,
}
"""The stack of `GOOD` needs 2 x 128 vCPUs of Trn, and 4 nodes of 8 of the others."""
CONFIG = changed({"network/zones": ["usw2-az4", "usw2-az1"]})


def quotas(values: Mapping[str, float]) -> Answer:
    def answer(params: dict[str, Any]) -> Mapping[str, Any]:
        code = json.loads(params["body"])["QuotaCode"]
        return {"Quota": {"Value": float(values[code])}} if code in values else refused("NoSuchResourceException")

    return answer


def image(variant: str) -> dict[str, Any]:
    return {
        "ami_id": f"ami-{variant}",
        "name": f"amazon-eks-node-al2023-x86_64-{variant}-1.35-v20260728",
        "owner_id": "602401143452",
        "owner_alias": "amazon",
        "architecture": "x86_64",
        "virtualization_type": "hvm",
        "hypervisor": "xen",
        "description": "",
    }


@pytest.fixture(autouse=True)
def account(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty account whose AWS has the pinned AMIs."""
    for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.setenv(key, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    monkeypatch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "true")
    monkeypatch.setattr(amis, "AMIS", [image("standard"), image("neuron")])
    with mock_aws():
        yield


def client(service: str) -> Any:
    return boto3.client(service, region_name=REGION)


def found(
    check: str, changes: Mapping[str, Any] | None = None, answers: Mapping[str, Answer] | None = None, **given: Any
) -> list[Finding]:
    """What a check of the good stack with changes says; quotas are those of QUOTAS."""
    settings = read_raw(raw_config(changed(dict(changes or {}), CONFIG)) | SECRET, list(SECRET))
    assert isinstance(settings, AwsStack)
    checks = {"credentials": preflight_checks.credentials, **preflight.CHECKS}
    with intercepted({"GetServiceQuota": quotas(QUOTAS), **(answers or {})}):
        subject = Subject(
            "dev", settings, clients_of(REGION), **{"token_given": False, "unreachable": lambda url: None, **given}
        )
        return run_check(check, checks[check], subject)


SECRET = {"llama-trainium:huggingFaceToken": "x"}  # so that settings are read; whether it was given is the subject's


def reserved(**given: Any) -> dict[str, Answer]:
    """EC2's answer about a reservation that fits the stack, with changes."""
    answer = {
        "CapacityReservationId": RESERVATION,
        "State": "active",
        "InstanceType": "trn1.32xlarge",
        "AvailabilityZoneId": "usw2-az4",
        "TotalInstanceCount": 2,
        "ReservationType": "default",
        "StartDate": datetime.datetime(2026, 11, 1, tzinfo=datetime.UTC),
        **given,
    }
    return {"DescribeCapacityReservations": {"CapacityReservations": [answer]}}


def running(kind: str, tags: Mapping[str, str] | None = None) -> None:
    specification = [{"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in (tags or {}).items()]}]
    client("ec2").run_instances(
        ImageId="ami-standard",
        InstanceType=kind,
        MinCount=1,
        MaxCount=1,
        **({"TagSpecifications": specification} if tags else {}),
    )


OWN = {"project": "llama-trainium", "stack": "dev"}


def file_system(tags: Mapping[str, str] | None = None) -> None:
    subnet = client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
    client("fsx").create_file_system(
        FileSystemType="LUSTRE",
        StorageCapacity=100800,
        SubnetIds=[subnet],
        LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
        **({"Tags": [{"Key": k, "Value": v} for k, v in tags.items()]} if tags else {}),
    )


def ecr_image() -> str:
    ecr = client("ecr")
    ecr.create_repository(repositoryName="llama")
    manifest = {
        "schemaVersion": 2,
        "mediaType": "application/vnd.oci.image.manifest.v1+json",
        "config": {},
        "layers": [],
    }
    put = ecr.put_image(repositoryName="llama", imageManifest=json.dumps(manifest), imageTag="a")
    return f"123456789012.dkr.ecr.{REGION}.amazonaws.com/llama@{put['image']['imageId']['imageDigest']}"


def trn(vcpus: float) -> dict[str, Answer]:
    return {"GetServiceQuota": quotas({**QUOTAS, "L-2C3B7624": vcpus})}


def limit(code: str, value: float) -> dict[str, Answer]:
    return {"GetServiceQuota": quotas({**QUOTAS, code: value})}


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


def test_without_credentials_aws_is_asked_nothing_more() -> None:
    settings = read_raw(raw_config(CONFIG) | SECRET, list(SECRET))
    assert isinstance(settings, AwsStack)
    with intercepted({"GetCallerIdentity": refused("ExpiredToken")}) as called:
        subject = Subject("dev", settings, clients_of(REGION), False, lambda url: None)
        said = preflight.findings(subject)
    assert called == ["GetCallerIdentity"]
    assert [(each.check, each.status) for each in said] == [("credentials", "fail"), ("Hugging Face", "pass")]


def test_a_server_that_answers_is_reached_whatever_it_says() -> None:
    class Refuses(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(401)

        def log_message(self, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Refuses) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert no_answer(f"http://127.0.0.1:{server.server_port}/v2/") is None
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # and not listening
        assert "refused" in str(no_answer(f"http://127.0.0.1:{closed.getsockname()[1]}/v2/"))


def command(monkeypatch: pytest.MonkeyPatch, stack: str, values: Mapping[str, float]) -> int:
    monkeypatch.setattr(preflight, "no_answer", lambda url: None)
    with intercepted({"GetServiceQuota": quotas(values)}):
        return preflight.main([stack])


def test_the_command_ends_with_0_when_nothing_fails(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    assert command(monkeypatch, "dev", QUOTAS) == 0
    out = capsys.readouterr().out
    assert "preflight of dev in us-west-2" in out
    assert out.splitlines()[-1].endswith(" 0 fail")


def test_the_command_ends_with_1_when_something_fails_and_says_what_mends_it(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert command(monkeypatch, "us-west-2", {**QUOTAS, "L-2C3B7624": 128}) == 1
    out = capsys.readouterr().out
    assert "--quota-code L-2C3B7624 --desired-value 2048" in out
    assert "pulumi config set --secret huggingFaceToken --stack us-west-2" in out
    assert out.splitlines()[-1].endswith(" 2 fail")


@pytest.mark.parametrize(
    ("stack", "says"),
    [("uswest2", "STACK: uswest2, did you mean us-west-2?"), ("local", "STACK: local, expected a stack on AWS")],
)
def test_a_bad_stack_is_one_line_and_exit_code_2(stack: str, says: str, capsys: Any) -> None:
    assert preflight.main([stack]) == 2
    assert capsys.readouterr().err.startswith(f"error: {says}")
