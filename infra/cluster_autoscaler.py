"""cluster-autoscaler: grows and shrinks the managed node groups between their min and max, accelerators from zero.

CPU capacity beyond the core nodes is the core group's own range: stages on CPU ask for one kind of node only.
"""

from __future__ import annotations

from collections.abc import Sequence

import pulumi

from infra.accelerators import FSX_TAINT
from infra.charts import release
from infra.cluster import Cluster
from infra.iam import PodIdentity
from infra.policies_controllers import cluster_autoscaler
from infra.versions import CLUSTER_AUTOSCALER

SERVICE_ACCOUNT = "cluster-autoscaler"
NAMESPACE = "kube-system"


class ClusterAutoscaler(pulumi.ComponentResource):
    """The controller and its role. It finds the node groups by the tags that EKS puts on their Auto Scaling groups."""

    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        region: str,
        cluster: Cluster,
        after: Sequence[pulumi.Resource],
        mirror: str | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`after` is what its pod needs to start: nodes and the cluster's DNS."""
        super().__init__("llama-trainium:infra:ClusterAutoscaler", name, None, opts)
        identity = PodIdentity(
            f"{name}-identity",
            cluster.place,
            SERVICE_ACCOUNT,
            cluster.place.apply(cluster_autoscaler),
            cluster.name,
            pulumi.ResourceOptions(parent=self),
            namespace=NAMESPACE,
        )
        values = {
            "fullnameOverride": SERVICE_ACCOUNT,
            "awsRegion": region,
            "autoDiscovery": {"clusterName": cluster.name},
            "rbac": {"serviceAccount": {"name": SERVICE_ACCOUNT}},
            "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "512Mi"}},
            "extraArgs": {
                # Of the groups that fit, the one that leaves least idle: a pod for a CPU never wakes a Trainium node.
                "expander": "least-waste",
                # Accelerator groups that look alike still differ in zone and price.
                "balance-similar-node-groups": False,
                # Not for pods to tolerate: gone once the FSx driver runs, and until then the node counts as starting.
                "startup-taint": FSX_TAINT.key,
                # A node with a RayCluster's or an MPIJob's pod, or one with a local volume, is never emptied. Pods of
                # plain Jobs are: those that must not be carry cluster-autoscaler.kubernetes.io/safe-to-evict=false.
                "skip-nodes-with-custom-controller-pods": True,
                "skip-nodes-with-local-storage": True,
            },
        }
        chart = release(
            f"{name}-release",
            CLUSTER_AUTOSCALER,
            values,
            NAMESPACE,
            mirror,
            pulumi.ResourceOptions(parent=self, provider=cluster.k8s, depends_on=[identity, *after]),
        )
        self.ready = [chart]
        self.register_outputs({})
