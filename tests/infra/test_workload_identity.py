"""What pods of the workloads may do in AWS."""

from __future__ import annotations

import json

import pytest
from conftest import ZONES, build_base
from mocks import Recorded, run
from test_policies_controllers import allowed

from infra.settings import Storage
from infra.storage import SharedStorage
from infra.workload_identity import read_bucket, workload_identity

BUCKET = "arn:aws:s3:::storage-data-1a2b"
POLICY = read_bucket(BUCKET)
ASSOCIATION = "aws:eks/podIdentityAssociation:PodIdentityAssociation"


def test_the_bucket_can_be_read() -> None:
    assert allowed(POLICY, "s3:ListBucket", BUCKET)
    assert allowed(POLICY, "s3:GetObject", f"{BUCKET}/runs/dev/checkpoints/step-1/x.distcp")


@pytest.mark.parametrize(
    ("action", "resource"),
    [
        ("s3:PutObject", f"{BUCKET}/a"),
        ("s3:DeleteObject", f"{BUCKET}/a"),
        ("s3:GetObjectVersion", f"{BUCKET}/a"),
        ("s3:PutBucketPolicy", BUCKET),
        ("s3:GetObject", "arn:aws:s3:::storage-data-1a2b-other/a"),
        ("s3:ListBucket", "arn:aws:s3:::storage-data-1a2bc"),
        ("s3:ListAllMyBuckets", "*"),
        ("sts:AssumeRole", "arn:aws:iam::123456789012:role/any"),
    ],
)
def test_and_nothing_else_can_be_done(action: str, resource: str) -> None:
    assert not allowed(POLICY, action, resource)


@pytest.fixture(scope="module")
def made() -> Recorded:
    def program() -> None:
        network, cluster, _, _ = build_base()
        storage = SharedStorage("storage", Storage(zone=ZONES[0]), network, cluster)
        workload_identity("workloads", storage, cluster, "llama", "trainer")

    return run(program)


def test_it_is_of_one_account_in_one_namespace(made: Recorded) -> None:
    association = made.one(ASSOCIATION, "workloads-association")
    assert (association.inputs["namespace"], association.inputs["serviceAccount"]) == ("llama", "trainer")
    role = made.one("aws:iam/role:Role", "workloads-pods-role")
    (statement,) = json.loads(role.inputs["assumeRolePolicy"])["Statement"]
    tags = statement["Condition"]["StringEquals"]
    assert tags["aws:RequestTag/kubernetes-namespace"] == "llama"
    assert tags["aws:RequestTag/kubernetes-service-account"] == "trainer"


def test_the_policy_is_on_the_stacks_own_bucket_before_pods_have_the_role(made: Recorded) -> None:
    bucket = made.one("aws:s3/bucket:Bucket")
    policy = made.one("aws:iam/rolePolicy:RolePolicy", "workloads-pods-policy")
    assert json.loads(policy.inputs["policy"]) == read_bucket(bucket.outputs["arn"])
    assert made.waits_for(made.one(ASSOCIATION, "workloads-association"), policy)
