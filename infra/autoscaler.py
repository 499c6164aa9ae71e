"""What adds and removes nodes: the choice that the setting `autoscaler` makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pulumi

from infra import settings
from infra.accelerators import AcceleratorGroup
from infra.cluster import Cluster
from infra.cluster_autoscaler import ClusterAutoscaler
from infra.iam import Role
from infra.karpenter import Karpenter
from infra.network import Network


class Autoscaler(pulumi.ComponentResource):
    """cluster-autoscaler, Karpenter or nothing."""

    ready: list[pulumi.Resource]
    """What pods that wait for nodes come after, and go before: a controller outlives the nodes that it brought."""

    def __init__(
        self,
        name: str,
        section: settings.Settings,
        cluster: Cluster,
        network: Network,
        role: Role,
        groups: Sequence[AcceleratorGroup],
        tags: Mapping[str, str],
        after: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`role` is the nodes', `after` is what a controller's pod needs to start: nodes and the cluster's DNS."""
        super().__init__("llama-trainium:infra:Autoscaler", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        self.ready = []
        if section.autoscaler == "cluster-autoscaler":
            self.ready = ClusterAutoscaler(
                f"{name}-ca", section.region, cluster, after, section.charts.mirror, child
            ).ready
        elif section.autoscaler == "karpenter":
            self.ready = Karpenter(
                f"{name}-karpenter",
                section.core_nodes,
                cluster,
                network,
                role,
                groups,
                tags,
                after,
                section.charts.mirror,
                child,
            ).ready
        self.register_outputs({})
