"""A stack and an account for preflight's tests: what a check says about the good stack, with changes to either."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import boto3
import pytest
from intercepted import Answer, intercepted, refused
from moto import mock_aws
from moto.ec2.models import amis
from stack_configs import changed, raw_config, read_raw

from infra import preflight, preflight_checks
from infra.account import clients_of
from infra.preflight_checks import Finding, Subject, run_check
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
    """Service Quotas' answers, by code; it knows no others."""

    def answer(params: dict[str, Any]) -> Mapping[str, Any]:
        code = json.loads(params["body"])["QuotaCode"]
        return {"Quota": {"Value": float(values[code])}} if code in values else refused("NoSuchResourceException")

    return answer


def image(variant: str) -> dict[str, Any]:
    """An AMI of the pinned release, as moto keeps it."""
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


@contextmanager
def account_with_amis() -> Iterator[None]:
    """An account with nothing in it, whose AWS has the pinned AMIs."""
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        for key in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            patch.setenv(key, "testing")
        patch.delenv("AWS_PROFILE", raising=False)
        patch.setenv("MOTO_EC2_LOAD_DEFAULT_AMIS", "true")
        patch.setattr(amis, "AMIS", [image("standard"), image("neuron")])
        yield


def client(service: str) -> Any:
    """boto3's client in the region."""
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
    """An instance that runs."""
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
    """A file system that takes all of the quota."""
    subnet = client("ec2").describe_subnets()["Subnets"][0]["SubnetId"]
    client("fsx").create_file_system(
        FileSystemType="LUSTRE",
        StorageCapacity=100800,
        SubnetIds=[subnet],
        LustreConfiguration={"DeploymentType": "PERSISTENT_2", "PerUnitStorageThroughput": 125},
        **({"Tags": [{"Key": k, "Value": v} for k, v in tags.items()]} if tags else {}),
    )


def ecr_image() -> str:
    """An image in ECR, by digest."""
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
    """The quota for Trn, and the others as they are."""
    return {"GetServiceQuota": quotas({**QUOTAS, "L-2C3B7624": vcpus})}


def limit(code: str, value: float) -> dict[str, Answer]:
    """One quota, and the others as they are."""
    return {"GetServiceQuota": quotas({**QUOTAS, code: value})}
