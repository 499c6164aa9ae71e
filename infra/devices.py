"""What makes a Trainium node's devices usable: the plugins for Neuron and EFA, and the watch over failing devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_kubernetes as k8s

from infra.charts import release
from infra.iam import PodIdentity
from infra.policies import Place, Policy, allow, document
from infra.settings import Settings
from infra.versions import EFA_PLUGIN, NEURON_PLUGIN

if TYPE_CHECKING:
    from infra.cluster import Cluster

NAMESPACE = "kube-system"  # its pods may have the priority system-node-critical
DETECTOR_ACCOUNT = "node-problem-detector"
NEURON_TOLERATION = {"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"}


class DevicePlugins(pulumi.ComponentResource):
    """Daemons of the accelerator nodes. They need no node to be installed, and run on each as it joins."""

    neuron: k8s.helm.v3.Release
    efa: k8s.helm.v3.Release | None
    """None where no group has EFA."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        cluster: Cluster,
        ready: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`ready` is what the charts' pods need: the agent of Pod Identity among it."""
        super().__init__("llama-trainium:infra:DevicePlugins", name, None, opts)
        waits = list(ready)
        if settings.neuron.node_problem_detector:
            recovery = settings.neuron.node_recovery
            waits.append(
                PodIdentity(
                    f"{name}-health",
                    cluster.place,
                    DETECTOR_ACCOUNT,
                    cluster.place.apply(lambda place: device_health(place, recovery)),
                    cluster.name,
                    pulumi.ResourceOptions(parent=self),
                    NAMESPACE,
                )
            )
        child = pulumi.ResourceOptions(parent=self, provider=cluster.k8s, depends_on=waits)
        mirror = settings.charts.mirror
        self.neuron = release(f"{name}-neuron", NEURON_PLUGIN, neuron_values(settings), NAMESPACE, mirror, child)
        with_efa = sorted({group.instance_type for group in settings.accelerators if group.efa_interfaces})
        self.efa = (
            release(f"{name}-efa", EFA_PLUGIN, efa_values(with_efa), NAMESPACE, mirror, child) if with_efa else None
        )
        self.register_outputs({})


def neuron_values(settings: Settings) -> dict[str, Any]:
    """Values of the Neuron chart: the device plugin, and the detector if it is wanted."""
    return {
        # Its own scheduler would know which of a node's devices are neighbours. Training takes whole nodes, and Volcano
        # is the scheduler of its pods.
        "scheduler": {"enabled": False},
        "devicePlugin": {"resources": {"requests": {"cpu": "10m", "memory": "64Mi"}}},
        "npd": {
            "enabled": settings.neuron.node_problem_detector,
            "namespaceOverride": NAMESPACE,
            "serviceAccount": {"name": DETECTOR_ACCOUNT},
            # Off, it still reports errors of devices as a node condition and a CloudWatch metric.
            "nodeRecovery": {"enabled": settings.neuron.node_recovery},
        },
    }


def efa_values(instance_types: Sequence[str]) -> dict[str, Any]:
    """Values of the EFA chart: on our nodes with EFA, whose taint it does not tolerate by itself."""
    return {"tolerations": [NEURON_TOLERATION], "supportedInstanceLabels": {"values": list(instance_types)}}


def device_health(place: Place, recovery: bool) -> Policy:
    """What the detector reports to CloudWatch, and what recovery does: mark an instance unhealthy in its group.

    https://awsdocs-neuron.readthedocs-hosted.com/en/v2.28.1/containers/kubernetes-getting-started.html (permissions)
    """
    report = allow(["cloudwatch:PutMetricData"], "*", {"StringEquals": {"cloudwatch:namespace": "NeuronHealthCheck"}})
    replace = [
        allow(["autoscaling:DescribeAutoScalingInstances", "ec2:DescribeInstances"], "*"),
        allow(
            ["autoscaling:SetInstanceHealth"],
            [place.arn("autoscaling", "autoScalingGroup:*:autoScalingGroupName/*")],
            {"StringEquals": {"aws:ResourceTag/eks:cluster-name": place.cluster}},
        ),
    ]
    return document([report, *(replace if recovery else [])])
