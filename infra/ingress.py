"""The AWS load balancer controller: application load balancers for ingresses. Only where something is exposed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pulumi
import pulumi_kubernetes as k8s

from infra.charts import release
from infra.iam import PodIdentity
from infra.policies_controllers import load_balancer_controller
from infra.settings import Settings
from infra.versions import LOAD_BALANCER_CONTROLLER

if TYPE_CHECKING:
    from infra.cluster import Cluster
    from infra.network import Network

NAMESPACE = "kube-system"
ACCOUNT = LOAD_BALANCER_CONTROLLER.name


class LoadBalancerController(pulumi.ComponentResource):
    """The controller with its permissions. An ingress depends on it: the controller removes its load balancer."""

    controller: k8s.helm.v3.Release

    def __init__(
        self,
        name: str,
        settings: Settings,
        network: Network,
        cluster: Cluster,
        ready: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`ready` is what the chart's pods need: nodes, DNS, the agent of Pod Identity."""
        super().__init__("llama-trainium:infra:LoadBalancerController", name, None, opts)
        policy = pulumi.Output.all(cluster.place, network.vpc_id, cluster.security_group_id).apply(
            lambda found: load_balancer_controller(*found)
        )
        identity = PodIdentity(
            name, cluster.place, ACCOUNT, policy, cluster.name, pulumi.ResourceOptions(parent=self), NAMESPACE
        )
        self.controller = release(
            f"{name}-controller",
            LOAD_BALANCER_CONTROLLER,
            {
                "clusterName": cluster.name,
                "region": settings.region,
                "vpcId": network.vpc_id,
                "serviceAccount": {"name": ACCOUNT},
                # Not in its policy.
                "enableShield": False,
                "enableWaf": False,
                "enableWafv2": False,
                # It would refuse every Service of the cluster until the controller is ready, those of the charts that
                # are installed meanwhile too; it is for network load balancers, which nothing here uses.
                "enableServiceMutatorWebhook": False,
                "resources": {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
            },
            NAMESPACE,
            settings.charts.mirror,
            pulumi.ResourceOptions(parent=self, provider=cluster.k8s, depends_on=[*ready, identity]),
        )
        self.register_outputs({})
