"""What the pods of the workloads may do in AWS: read the stack's bucket, by EKS Pod Identity, and nothing else.

Data reaches pods as files of the file system, and what they write goes to the bucket by itself (infra/storage.py). So
they need no AWS; people in the toolbox do, to see whether the bucket has caught up, and what an earlier stack left
there. To write past the file system would be to change its files behind its back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pulumi

from infra.iam import PodIdentity
from infra.policies import Policy, allow, document

if TYPE_CHECKING:
    from infra.cluster import Cluster
    from infra.storage import SharedStorage


def read_bucket(bucket_arn: str) -> Policy:
    """Read a bucket: list it, and get the newest version of its objects."""
    return document([allow(["s3:ListBucket"], bucket_arn), allow(["s3:GetObject"], f"{bucket_arn}/*")])


def workload_identity(
    name: str,
    storage: SharedStorage,
    cluster: Cluster,
    namespace: str,
    service_account: str,
    opts: pulumi.ResourceOptions | None = None,
) -> PodIdentity:
    """The identity of the pods of `service_account`. EKS gives it to pods that start after it is there."""
    policy = storage.bucket.arn.apply(read_bucket)
    return PodIdentity(name, cluster.place, service_account, policy, cluster.name, opts, namespace)
