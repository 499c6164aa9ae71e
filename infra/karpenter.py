"""Karpenter: adds single nodes for pending pods, CPU nodes of any fitting type and Trainium nodes beyond a group's own.

A managed node group keeps its `desired` nodes; a NodePool of the same kind of node may add those up to `max`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra import settings
from infra.accelerators import AcceleratorGroup
from infra.charts import release
from infra.cluster import Cluster
from infra.iam import PodIdentity, Role
from infra.network import Network, cluster_name
from infra.node_pools import accelerator_class, accelerator_pool, cpu_pool, node_class
from infra.policies_controllers import interruption_queue, karpenter
from infra.versions import KARPENTER, KARPENTER_CRD

SERVICE_ACCOUNT = "karpenter"
NAMESPACE = "kube-system"

DELETE_TIMEOUT = "40m"
"""How long `pulumi destroy` waits for nodes to go: twice what pods may hold them up."""

# The kinds of events by which EC2 and AWS Health announce that an instance goes.
INTERRUPTIONS = {
    "source": ["aws.ec2", "aws.health"],
    "detail-type": [
        "AWS Health Event",
        "EC2 Capacity Reservation Instance Interruption Warning",
        "EC2 Instance Rebalance Recommendation",
        "EC2 Instance State-change Notification",
        "EC2 Spot Instance Interruption Warning",
    ],
}


class Karpenter(pulumi.ComponentResource):
    """The controller, its role and queue, and a NodePool with its EC2NodeClass for CPU and for each group.

    On destroy NodePools go first and EC2NodeClasses next, both held by finalizers until their instances are gone; then
    the controller, and only then its role, the instance profile and what the instances stood in.
    """

    ready: list[pulumi.Resource]
    """The NodePools: pods that wait for nodes come after them, and are gone before them."""

    def __init__(
        self,
        name: str,
        core: settings.CoreNodes,
        cluster: Cluster,
        network: Network,
        role: Role,
        groups: Sequence[AcceleratorGroup],
        tags: Mapping[str, str],
        after: Sequence[pulumi.Resource],
        mirror: str | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`role` is the nodes', `after` is what its pods need to start: nodes and the cluster's DNS."""
        super().__init__("llama-trainium:infra:Karpenter", name, None, opts)
        self._name, self._cluster = name, cluster
        self._child = pulumi.ResourceOptions(parent=self)
        queue = self._make_queue()
        controller = self._install(role, queue, min(2, max(1, core.desired)), after, mirror)

        # Ours and not one of Karpenter's making, which would need the right to make and change profiles.
        profile = aws.iam.InstanceProfile(f"{name}-nodes", role=role.name, opts=self._child)
        self.ready = []
        if core.cpu_limit:
            subnets = [subnet.id for subnet in network.private_subnets.values()]
            spec = node_class(
                core.disk_gib, profile.name, subnets, [cluster.security_group_id], self._named(tags, "cpu")
            )
            self._make_pool("cpu", spec, cpu_pool(core.cpu_limit), controller)
        for group in groups:
            if group.section.max > group.section.desired:
                pool = group.section.name  # settings refuse "cpu"
                subnet = network.private_subnets[group.section.zone].id
                spec = accelerator_class(group, profile.name, subnet, self._named(tags, pool))
                self._make_pool(pool, spec, accelerator_pool(group.section, pool, group.labels), controller)
        self.register_outputs({})

    def _named(self, tags: Mapping[str, str], suffix: str) -> dict[str, str]:
        return {**tags, "Name": f"{cluster_name()}-{suffix}"}

    def _make_queue(self) -> aws.sqs.Queue:
        """Where EventBridge puts what announces the end of an instance."""
        queue = aws.sqs.Queue(
            f"{self._name}-interruptions",
            message_retention_seconds=300,  # Two minutes after a spot warning its message is history.
            sqs_managed_sse_enabled=True,
            opts=self._child,
        )
        rule = aws.cloudwatch.EventRule(
            f"{self._name}-interruptions", event_pattern=json.dumps(INTERRUPTIONS), opts=self._child
        )
        aws.cloudwatch.EventTarget(f"{self._name}-interruptions", rule=rule.name, arn=queue.arn, opts=self._child)
        aws.sqs.QueuePolicy(
            f"{self._name}-interruptions",
            queue_url=queue.url,
            policy=pulumi.Output.all(queue.arn, rule.arn).apply(lambda arns: json.dumps(interruption_queue(*arns))),
            opts=self._child,
        )
        return queue

    def _install(
        self,
        role: Role,
        queue: aws.sqs.Queue,
        replicas: int,
        after: Sequence[pulumi.Resource],
        mirror: str | None,
    ) -> pulumi.Resource:
        policy = pulumi.Output.all(self._cluster.place, role.arn, queue.arn).apply(lambda known: karpenter(*known))
        identity = PodIdentity(
            f"{self._name}-identity",
            self._cluster.place,
            SERVICE_ACCOUNT,
            policy,
            self._cluster.name,
            self._child,
            namespace=NAMESPACE,
        )
        # A chart of their own: Helm never upgrades definitions that come in a chart's crds/ folder.
        definitions = release(
            f"{self._name}-crds",
            KARPENTER_CRD,
            {},
            NAMESPACE,
            mirror,
            pulumi.ResourceOptions(parent=self, provider=self._cluster.k8s),
        )
        values = {
            "replicas": replicas,
            "serviceAccount": {"name": SERVICE_ACCOUNT},
            "settings": {
                "clusterName": self._cluster.name,
                "interruptionQueue": queue.name,
                # Pods have no addresses on a node's first interface: VPC CNI's custom networking.
                "reservedENIs": "1",
            },
            "controller": {
                "env": [{"name": "AWS_REGION", "value": self._cluster.place.apply(lambda place: place.region)}],
                "resources": {"requests": {"cpu": "250m", "memory": "512Mi"}, "limits": {"memory": "1Gi"}},
            },
        }
        return release(
            f"{self._name}-release",
            KARPENTER,
            values,
            NAMESPACE,
            mirror,
            pulumi.ResourceOptions(parent=self, provider=self._cluster.k8s, depends_on=[identity, definitions, *after]),
        )

    def _make_pool(
        self, name: str, class_spec: dict[str, Any], pool_spec: dict[str, Any], controller: pulumi.Resource
    ) -> None:
        timeouts = pulumi.CustomTimeouts(delete=DELETE_TIMEOUT)
        made_of = k8s.apiextensions.CustomResource(
            f"{self._name}-{name}-class",
            api_version="karpenter.k8s.aws/v1",
            kind="EC2NodeClass",
            metadata={"name": name},
            spec=class_spec,
            opts=pulumi.ResourceOptions(
                parent=self, provider=self._cluster.k8s, depends_on=[controller], custom_timeouts=timeouts
            ),
        )
        pool = k8s.apiextensions.CustomResource(
            f"{self._name}-{name}-pool",
            api_version="karpenter.sh/v1",
            kind="NodePool",
            metadata={"name": name},
            spec=pool_spec,
            opts=pulumi.ResourceOptions(
                parent=self, provider=self._cluster.k8s, depends_on=[made_of], custom_timeouts=timeouts
            ),
        )
        self.ready.append(pool)
