"""The shared storage: who reaches it, what lasts, and in which order it comes and goes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from base_platform import ZONES, build_base
from mocks import Recorded, Registered, run

from infra.settings import Storage
from infra.storage import SharedStorage, tls_only

LUSTRE = "aws:fsx/lustreFileSystem:LustreFileSystem"
LINK = "aws:fsx/dataRepositoryAssociation:DataRepositoryAssociation"
BUCKET, VOLUME = "aws:s3/bucket:Bucket", "kubernetes:core/v1:PersistentVolume"
INGRESS, EGRESS = (
    "aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule",
    ("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule"),
)
COMPONENT = "llama-trainium:infra:SharedStorage"


def make(**settings: Any) -> Recorded:
    """What the storage registers in the second zone, with the platform it needs."""
    section = Storage.model_validate({"zone": ZONES[1], **settings})

    def program() -> None:
        network, cluster, _, _ = build_base()
        SharedStorage("storage", section, network, cluster)

    return run(program)


@pytest.fixture(scope="module")
def storage() -> Recorded:
    return make(size_gib=4800, throughput=250)


def own(recorded: Recorded, kind: str) -> list[Registered]:
    return [each for each in recorded.of(kind) if recorded.inside(each, COMPONENT)]


def test_the_file_system_is_what_the_settings_say(storage: Recorded) -> None:
    subnet = storage.one("aws:ec2/subnet:Subnet", f"private-{ZONES[1]}")
    given = storage.one(LUSTRE).inputs
    assert given["subnetIds"] == subnet.id
    assert (given["deploymentType"], given["storageType"], given["fileSystemTypeVersion"]) == (
        "PERSISTENT_2",
        "SSD",
        "2.15",
    )
    assert (given["storageCapacity"], given["perUnitStorageThroughput"], given["dataCompressionType"]) == (
        4800,
        250,
        "LZ4",
    )
    # FSx refuses backups of a file system with a data repository.
    assert given["automaticBackupRetentionDays"] == 0


def test_lustre_ports_are_open_among_servers_and_nodes_and_to_nobody_else(storage: Recorded) -> None:
    group = storage.one("aws:ec2/securityGroup:SecurityGroup", "storage-lustre")
    nodes = "sg-0c105e70000000000"
    assert "ingress" not in group.inputs
    assert "egress" not in group.inputs

    def reach(kind: str) -> set[tuple[str, str, int, int]]:
        rules = [rule.inputs for rule in own(storage, kind)]
        assert all(rule["ipProtocol"] == "tcp" for rule in rules)
        return {
            (rule["securityGroupId"], rule["referencedSecurityGroupId"], rule["fromPort"], rule["toPort"])
            for rule in rules
        }

    ports = [(988, 988), (1018, 1023)]
    within = {(group.id, group.id, *pair) for pair in ports}
    assert reach(EGRESS) == within | {(group.id, nodes, *pair) for pair in ports}
    assert reach(INGRESS) == within | {(group.id, nodes, *pair) for pair in ports} | {
        (nodes, group.id, *pair) for pair in ports
    }


def test_the_file_system_waits_for_its_own_rules_but_not_for_the_cluster(storage: Recorded) -> None:
    system = storage.one(LUSTRE)
    group = storage.one("aws:ec2/securityGroup:SecurityGroup", "storage-lustre")
    within = [
        rule
        for rule in own(storage, INGRESS) + own(storage, EGRESS)
        if rule.inputs["securityGroupId"] == rule.inputs["referencedSecurityGroupId"] == group.id
    ]
    assert len(within) == 4
    assert all(storage.waits_for(system, rule) for rule in within)
    # Eight minutes of the one beside ten of the other.
    assert not storage.waits_for(system, storage.one("eks:index:Cluster"))
    assert not storage.waits_for(system, storage.one(BUCKET))


def test_the_bucket_is_private_encrypted_versioned_and_tls_only(storage: Recorded) -> None:
    bucket = storage.one(BUCKET)
    name = bucket.outputs["bucket"]

    def setting(kind: str) -> dict[str, Any]:
        found = storage.one(f"aws:s3/{kind[0].lower()}{kind[1:]}:{kind}").inputs
        assert found["bucket"] == name
        return found

    closed = setting("BucketPublicAccessBlock")
    assert all(
        closed[key] is True
        for key in ("blockPublicAcls", "blockPublicPolicy", "ignorePublicAcls", "restrictPublicBuckets")
    )
    assert setting("BucketVersioning")["versioningConfiguration"] == {"status": "Enabled"}
    (encryption,) = setting("BucketServerSideEncryptionConfiguration")["rules"]
    assert encryption["applyServerSideEncryptionByDefault"] == {"sseAlgorithm": "AES256"}
    assert setting("BucketOwnershipControls")["rule"] == {"objectOwnership": "BucketOwnerEnforced"}
    assert json.loads(setting("BucketPolicy")["policy"]) == tls_only(bucket.outputs["arn"])
    (rule,) = setting("BucketLifecycleConfiguration")["rules"]
    assert rule["noncurrentVersionExpiration"] == {"noncurrentDays": 7}
    assert rule["abortIncompleteMultipartUpload"] == {"daysAfterInitiation": 7}
    assert "days" not in rule["expiration"]  # nothing that is current ever expires


def test_the_policy_refuses_requests_without_tls() -> None:
    (statement,) = tls_only("arn:aws:s3:::one")["Statement"]
    assert statement["Effect"] == "Deny"
    assert statement["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert statement["Resource"] == ["arn:aws:s3:::one", "arn:aws:s3:::one/*"]


@pytest.mark.parametrize("retain", [True, False])
def test_of_a_destroyed_stack_the_bucket_stays_whole_or_goes_with_its_contents(retain: bool) -> None:
    recorded = make(retain_on_delete=retain)
    stay = {str(each) for each in recorded if each.request.retainOnDelete}
    of_bucket = {str(each) for each in recorded if each.type.startswith("aws:s3/")}
    # With it its policy, its encryption and the block of public access; and never what would hold the VPC.
    assert stay == (of_bucket if retain else set())
    assert len(of_bucket) == 7
    assert recorded.one(BUCKET).inputs["forceDestroy"] is not retain


def test_all_of_the_file_system_goes_to_the_bucket_and_comes_back(storage: Recorded) -> None:
    link, bucket = storage.one(LINK), storage.one(BUCKET)
    assert link.inputs["fileSystemId"] == storage.one(LUSTRE).id
    assert link.inputs["fileSystemPath"] == "/"
    assert link.inputs["dataRepositoryPath"] == f"s3://{bucket.outputs['bucket']}"
    assert link.inputs["batchImportMetaDataOnCreate"] is True
    assert link.inputs["s3"] == {
        "autoExportPolicy": {"events": ["NEW", "CHANGED", "DELETED"]},
        "autoImportPolicy": {"events": ["NEW", "CHANGED"]},
    }
    for protection in storage:
        if protection.type.startswith("aws:s3/"):
            assert storage.waits_for(link, protection), protection


def test_the_volume_is_claimed_by_name_and_locks_across_nodes(storage: Recorded) -> None:
    volume, system = storage.one(VOLUME), storage.one(LUSTRE)
    spec = volume.inputs["spec"]
    assert spec["capacity"] == {"storage": "4800Gi"}
    assert spec["accessModes"] == ["ReadWriteMany"]
    assert spec["persistentVolumeReclaimPolicy"] == "Retain"
    assert "flock" in spec["mountOptions"]
    assert spec["storageClassName"] == "storage"
    assert spec["csi"] == {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": system.id,
        "volumeAttributes": {"dnsname": system.outputs["dnsName"], "mountname": system.outputs["mountName"]},
    }
    # The name is Pulumi's: a volume's file system cannot change, so a new one is made beside the old.
    assert "name" not in volume.inputs["metadata"]
    assert volume.provider == storage.one("pulumi:providers:kubernetes").urn


def test_a_claim_finds_the_data_and_can_mount_it(storage: Recorded) -> None:
    volume = storage.one(VOLUME)
    assert storage.waits_for(volume, storage.one(LINK))
    for rule in own(storage, INGRESS) + own(storage, EGRESS):
        assert storage.waits_for(volume, rule)


def test_everything_belongs_to_the_component(storage: Recorded) -> None:
    component = storage.one(COMPONENT)
    mine = [each for each in storage if component.urn == each.parent]
    assert {LUSTRE, LINK, BUCKET, VOLUME} <= {each.type for each in mine}
    assert all(each.name.startswith("storage-") for each in mine)
