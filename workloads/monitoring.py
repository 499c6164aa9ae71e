"""What Prometheus scrapes of the stages, where the platform has one: Ray's metrics, and a run's endpoint under MPI.

One PodMonitor for all of them: every pod of a stage that has a port of this name, for as long as it is there. A run's
own numbers are called the same under either engine (training/exporter.py).
"""

from __future__ import annotations

from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from workloads.base import Base
from workloads.labels import METRICS, METRICS_PORTS, PART_OF, STAGE_LABEL
from workloads.network_policies import Spec
from workloads.platform import Platform

PROMETHEUS_POD = {"app.kubernetes.io/name": "prometheus"}
"""A label that prometheus-operator puts on Prometheus' pods."""
RAY_PREFIX = "ray_(llama_trainium_.*)"
"""Ray puts its own name before those of all metrics, a run's too."""


class Monitoring(pulumi.ComponentResource):
    """The PodMonitor, and the way in for Prometheus; nothing where the platform has none."""

    def __init__(self, name: str, platform: Platform, base: Base, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("llama-trainium:workloads:Monitoring", name, None, opts)
        if platform.prometheus is not None:
            meta = k8s.meta.v1.ObjectMetaArgs(name=METRICS, namespace=base.namespace, labels=PART_OF)
            child = pulumi.ResourceOptions(parent=self, provider=platform.provider)
            k8s.networking.v1.NetworkPolicy(
                f"{name}-policy", metadata=meta, spec=let_in(platform.prometheus.namespace), opts=child
            )
            k8s.apiextensions.CustomResource(
                f"{name}-pods",
                api_version="monitoring.coreos.com/v1",
                kind="PodMonitor",
                metadata=meta,
                spec=pod_monitor(),
                opts=pulumi.ResourceOptions.merge(
                    child, pulumi.ResourceOptions(depends_on=[*platform.prometheus.after])
                ),
            )
        self.register_outputs({})


def let_in(namespace: str) -> Spec:
    """Spec of the policy that lets Prometheus' pods, in their namespace, reach the ports with metrics and no other."""
    there = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    return {
        "podSelector": {"matchExpressions": [{"key": STAGE_LABEL, "operator": "Exists"}]},
        "policyTypes": ["Ingress"],
        "ingress": [
            {
                "from": [{"namespaceSelector": there, "podSelector": {"matchLabels": PROMETHEUS_POD}}],
                "ports": [{"protocol": "TCP", "port": port} for port in METRICS_PORTS],
            }
        ],
    }


def pod_monitor() -> dict[str, Any]:
    """Spec of the PodMonitor."""
    return {
        "selector": {"matchExpressions": [{"key": STAGE_LABEL, "operator": "Exists"}]},
        "podTargetLabels": [STAGE_LABEL, "ray.io/cluster", "ray.io/node-type"],
        "podMetricsEndpoints": [
            {
                "port": METRICS,
                "interval": "15s",
                "relabelings": [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}],
                "metricRelabelings": [
                    {"sourceLabels": ["__name__"], "regex": RAY_PREFIX, "targetLabel": "__name__", "replacement": "$1"}
                ],
            }
        ],
    }
