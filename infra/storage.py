"""Shared storage: FSx for Lustre in the accelerators' zone, an S3 bucket behind it, the volume that workloads claim.

What a run writes goes to the file system, and from there to the bucket by itself (the data repository association). The
bucket is what lasts: a stack that is destroyed with `retainOnDelete` keeps the bucket and nothing else, because a file
system that stayed would keep its network interfaces, and with them its subnet and the VPC, from being deleted. A file
system that replaces another (in another zone, say) starts with what is in the bucket, and loads each file when it is
first read.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra.network import Network, cluster_name
from infra.settings import Storage

if TYPE_CHECKING:
    from infra.cluster import Cluster

LUSTRE_VERSION = "2.15"  # the newest FSx offers, and the client of Amazon Linux 2023
LNET_PORTS = ((988, 988), (1018, 1023))
"""TCP ports between Lustre clients and servers, in both directions:
https://docs.aws.amazon.com/fsx/latest/LustreGuide/limit-access-security-groups.html"""

MOUNT_OPTIONS = [
    # A run holds its folder by flock(2). A Lustre client without this option refuses the call (ENOSYS) or, with
    # localflock, grants it on every node; with it the lock is one for all nodes (mount.lustre(8)).
    "flock",
    # Reading a token store must not write to the metadata server.
    "noatime",
]
OLD_VERSION_DAYS = 7
"""For how long S3 keeps an overwritten or deleted object: long enough to notice a mistake, and no longer, since every
rotated checkpoint becomes an old version of hundreds of gigabytes."""
LOG_DAYS = 30


class SharedStorage(pulumi.ComponentResource):
    """The file system, its bucket and its volume."""

    file_system: aws.fsx.LustreFileSystem
    bucket: aws.s3.Bucket
    security_group: aws.ec2.SecurityGroup
    volume: k8s.core.v1.PersistentVolume
    volume_name: pulumi.Output[str]
    """For a claim's `volumeName`."""
    storage_class: str
    """For a claim's `storageClassName`. There is no such class: the name keeps claims that do not mean this volume, and
    the cluster's default class, away from it."""
    capacity: str
    """For a claim's request."""

    def __init__(
        self,
        name: str,
        settings: Storage,
        network: Network,
        cluster: Cluster,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`settings.zone` is the id of one of `network`'s zones, the accelerators' (infra/settings.py sees to it)."""
        super().__init__("llama-trainium:infra:SharedStorage", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        self.capacity = f"{settings.size_gib}Gi"
        self.storage_class = name

        self.bucket, protection = _bucket(f"{name}-data", settings.retain_on_delete, child)
        self.security_group = aws.ec2.SecurityGroup(
            f"{name}-lustre", description="FSx for Lustre", vpc_id=network.vpc_id, opts=child
        )
        log = aws.cloudwatch.LogGroup(
            # FSx writes to groups of this prefix only. Failed exports are told nowhere else.
            f"{name}-log",
            name_prefix=f"/aws/fsx/{name}-",
            retention_in_days=LOG_DAYS,
            opts=child,
        )
        own_rules = self._open(name, "servers", self.security_group.id, child)
        self.file_system = aws.fsx.LustreFileSystem(
            f"{name}-lustre",
            subnet_ids=network.private_subnets[settings.zone].id,
            security_group_ids=[self.security_group.id],
            deployment_type="PERSISTENT_2",
            storage_type="SSD",
            storage_capacity=settings.size_gib,
            per_unit_storage_throughput=settings.throughput,
            data_compression_type=settings.compression,
            file_system_type_version=LUSTRE_VERSION,
            # FSx takes no backups of a file system with a data repository: the bucket is the copy.
            automatic_backup_retention_days=0,
            # Sunday 03:00 UTC rather than an hour that AWS picks: the file system stops for minutes, and a run with it.
            weekly_maintenance_start_time="7:03:00",
            tags={"Name": cluster_name()},
            log_configuration=aws.fsx.LustreFileSystemLogConfigurationArgs(destination=log.arn, level="WARN_ERROR"),
            # FSx looks at the group's rules when it creates the file system, and refuses a group without them.
            opts=pulumi.ResourceOptions(parent=self, depends_on=own_rules),
        )
        link = aws.fsx.DataRepositoryAssociation(
            f"{name}-bucket",
            file_system_id=self.file_system.id,
            file_system_path="/",
            data_repository_path=self.bucket.bucket.apply(lambda bucket: f"s3://{bucket}"),
            batch_import_meta_data_on_create=True,  # what an earlier file system left in the bucket
            s3=aws.fsx.DataRepositoryAssociationS3Args(
                auto_export_policy=aws.fsx.DataRepositoryAssociationS3AutoExportPolicyArgs(
                    events=["NEW", "CHANGED", "DELETED"]
                ),
                # An object deleted by mistake does not take the file of a running stage with it.
                auto_import_policy=aws.fsx.DataRepositoryAssociationS3AutoImportPolicyArgs(events=["NEW", "CHANGED"]),
            ),
            opts=pulumi.ResourceOptions(parent=self, depends_on=protection),
        )
        node_rules = self._open(name, "nodes", cluster.security_group_id, child)
        node_rules += [
            _rule(
                aws.vpc.SecurityGroupIngressRule,
                f"{name}-from-lustre-{low}",
                cluster.security_group_id,
                self.security_group.id,
                (low, high),
                child,
            )
            for low, high in LNET_PORTS
        ]
        self.volume = k8s.core.v1.PersistentVolume(
            f"{name}-volume",
            metadata=k8s.meta.v1.ObjectMetaArgs(labels={"app.kubernetes.io/part-of": "llama-trainium"}),
            spec=k8s.core.v1.PersistentVolumeSpecArgs(
                capacity={"storage": self.capacity},
                volume_mode="Filesystem",
                access_modes=["ReadWriteMany"],
                persistent_volume_reclaim_policy="Retain",
                storage_class_name=self.storage_class,
                mount_options=MOUNT_OPTIONS,
                csi=k8s.core.v1.CSIPersistentVolumeSourceArgs(
                    driver="fsx.csi.aws.com",
                    volume_handle=self.file_system.id,
                    volume_attributes={
                        "dnsname": self.file_system.dns_name,
                        "mountname": self.file_system.mount_name,
                    },
                ),
            ),
            # A claim finds the bucket's contents in place, and can mount them.
            opts=pulumi.ResourceOptions(parent=self, provider=cluster.k8s, depends_on=[link, *node_rules]),
        )
        self.volume_name = self.volume.metadata.name
        self.register_outputs({"bucket": self.bucket.bucket, "fileSystem": self.file_system.id})

    def _open(
        self, name: str, whom: str, other: pulumi.Input[str], opts: pulumi.ResourceOptions
    ) -> list[pulumi.Resource]:
        """Let the file system's security group and `other` reach each other, as far as this group decides it."""
        kinds: list[tuple[str, Any]] = [
            ("from", aws.vpc.SecurityGroupIngressRule),
            ("to", aws.vpc.SecurityGroupEgressRule),
        ]
        return [
            _rule(kind, f"{name}-lustre-{direction}-{whom}-{ports[0]}", self.security_group.id, other, ports, opts)
            for direction, kind in kinds
            for ports in LNET_PORTS
        ]


def _rule(
    kind: Any,
    name: str,
    group: pulumi.Input[str],
    other: pulumi.Input[str],
    ports: tuple[int, int],
    opts: pulumi.ResourceOptions,
) -> pulumi.Resource:
    rule: pulumi.Resource = kind(
        name,
        description="Lustre",
        security_group_id=group,
        referenced_security_group_id=other,
        ip_protocol="tcp",
        from_port=ports[0],
        to_port=ports[1],
        opts=opts,
    )
    return rule


def _bucket(name: str, retain: bool, opts: pulumi.ResourceOptions) -> tuple[aws.s3.Bucket, list[pulumi.Resource]]:
    """The bucket, and what protects it. A bucket that is kept keeps its protection."""
    kept = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(retain_on_delete=retain))
    # It may outlive the stack, so its name says whose it was. S3 leaves 37 characters before its own suffix.
    bucket = aws.s3.Bucket(name, bucket_prefix=f"{cluster_name()[:36]}-", force_destroy=not retain, opts=kept)
    closed = aws.s3.BucketPublicAccessBlock(
        f"{name}-private",
        bucket=bucket.bucket,
        block_public_acls=True,
        block_public_policy=True,
        ignore_public_acls=True,
        restrict_public_buckets=True,
        opts=kept,
    )
    # S3 refuses two changes of a bucket's access at one time (OperationAborted).
    after = pulumi.ResourceOptions.merge(kept, pulumi.ResourceOptions(depends_on=[closed]))
    return bucket, [
        closed,
        aws.s3.BucketPolicy(
            f"{name}-tls",
            bucket=bucket.bucket,
            policy=bucket.arn.apply(lambda arn: json.dumps(tls_only(arn))),
            opts=after,
        ),
        aws.s3.BucketOwnershipControls(
            f"{name}-owner",
            bucket=bucket.bucket,
            rule=aws.s3.BucketOwnershipControlsRuleArgs(object_ownership="BucketOwnerEnforced"),
            opts=after,
        ),
        aws.s3.BucketVersioning(
            f"{name}-versions",
            bucket=bucket.bucket,
            versioning_configuration=aws.s3.BucketVersioningVersioningConfigurationArgs(status="Enabled"),
            opts=kept,
        ),
        aws.s3.BucketServerSideEncryptionConfiguration(
            f"{name}-encryption",
            bucket=bucket.bucket,
            rules=[
                aws.s3.BucketServerSideEncryptionConfigurationRuleArgs(
                    # S3's own key: one of ours would have to outlive the stack together with the bucket.
                    apply_server_side_encryption_by_default=(
                        aws.s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(
                            sse_algorithm="AES256"
                        )
                    )
                )
            ],
            opts=kept,
        ),
        aws.s3.BucketLifecycleConfiguration(
            f"{name}-lifecycle",
            bucket=bucket.bucket,
            rules=[
                aws.s3.BucketLifecycleConfigurationRuleArgs(
                    id="old-versions",
                    status="Enabled",
                    filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=""),
                    noncurrent_version_expiration=(
                        aws.s3.BucketLifecycleConfigurationRuleNoncurrentVersionExpirationArgs(
                            noncurrent_days=OLD_VERSION_DAYS
                        )
                    ),
                    # The marker of a deleted object whose last version has gone.
                    expiration=aws.s3.BucketLifecycleConfigurationRuleExpirationArgs(expired_object_delete_marker=True),
                    abort_incomplete_multipart_upload=(
                        aws.s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
                            days_after_initiation=OLD_VERSION_DAYS
                        )
                    ),
                )
            ],
            opts=kept,
        ),
    ]


def tls_only(bucket_arn: str) -> dict[str, Any]:
    """The policy that refuses every request without TLS, whoever makes it."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "TlsOnly",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:*",
                "Resource": [bucket_arn, f"{bucket_arn}/*"],
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            }
        ],
    }
