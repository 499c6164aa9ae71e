"""neuron-monitor on every accelerator node: utilisation, memory and errors of the NeuronCores, for Prometheus.

After AWS's own manifest (k8s-neuron-monitor-daemonset.yml of aws-neuron-sdk, 2026-08-21), which is no chart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from infra.devices import NEURON_TOLERATION
from infra.versions import NEURON_MONITOR

NAME = "neuron-monitor"
LABELS = {"app.kubernetes.io/name": NAME}
PORT = 8000


class NeuronMonitor(pulumi.ComponentResource):
    """The DaemonSet, its Service and the ServiceMonitor."""

    def __init__(
        self,
        name: str,
        namespace: str,
        instance_types: Sequence[str],
        relabelings: Sequence[Mapping[str, Any]],
        provider: k8s.Provider,
        after: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions,
    ) -> None:
        """`relabelings` are Prometheus', of each target; `after` has the namespace and the kind ServiceMonitor."""
        super().__init__("llama-trainium:infra:NeuronMonitor", name, None, opts)
        child = pulumi.ResourceOptions(parent=self, provider=provider, depends_on=[*after])
        meta = k8s.meta.v1.ObjectMetaArgs(name=NAME, namespace=namespace, labels=LABELS)
        k8s.apps.v1.DaemonSet(f"{name}-agents", metadata=meta, spec=daemon_set(instance_types), opts=child)
        k8s.core.v1.Service(
            f"{name}-service",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name=NAME,
                namespace=namespace,
                labels=LABELS,
                # It has no pods until there is an accelerator node, for which Pulumi would wait.
                annotations={"pulumi.com/skipAwait": "true"},
            ),
            spec={
                "clusterIP": "None",
                "selector": LABELS,
                "ports": [{"name": "metrics", "port": PORT, "targetPort": "metrics"}],
            },
            opts=child,
        )
        k8s.apiextensions.CustomResource(
            f"{name}-monitor",
            api_version="monitoring.coreos.com/v1",
            kind="ServiceMonitor",
            metadata=meta,
            spec={
                "selector": {"matchLabels": LABELS},
                "endpoints": [{"port": "metrics", "interval": "15s", "relabelings": list(relabelings)}],
            },
            opts=child,
        )
        self.register_outputs({})


def daemon_set(instance_types: Sequence[str]) -> Any:
    """Spec of the DaemonSet, as plain data: a pod on each node of these types."""
    types = {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(instance_types)}
    return {
        "selector": {"matchLabels": LABELS},
        # Of 16 nodes, one at a time would take an hour of gaps.
        "updateStrategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": "100%"}},
        "template": {
            "metadata": {"labels": LABELS},
            "spec": {
                "automountServiceAccountToken": False,
                "affinity": {
                    "nodeAffinity": {
                        "requiredDuringSchedulingIgnoredDuringExecution": {
                            "nodeSelectorTerms": [{"matchExpressions": [types]}]
                        }
                    }
                },
                # While the node waits for its file system's driver it may be looked at too.
                "tolerations": [NEURON_TOLERATION, {"key": "fsx.csi.aws.com/agent-not-ready", "operator": "Exists"}],
                "containers": [
                    {
                        "name": NAME,
                        "image": NEURON_MONITOR,
                        "command": ["/opt/bin/entrypoint.sh"],
                        "args": [
                            *("--port", str(PORT)),
                            *("--neuron-monitor-config", "/opt/aws/neuron/bin/neuron-monitor.conf"),
                        ],
                        "ports": [{"name": "metrics", "containerPort": PORT}],
                        "env": [{"name": "GOMEMLIMIT", "value": "160MiB"}],
                        "resources": {
                            "requests": {"cpu": "100m", "memory": "128Mi"},
                            "limits": {"cpu": "500m", "memory": "256Mi"},
                        },
                        # It reads the devices of all pods, which a device plugin gives to one.
                        "securityContext": {"privileged": True},
                    }
                ],
            },
        },
    }
