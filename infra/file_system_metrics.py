"""FSx's own metrics, from CloudWatch to Prometheus: how full the file system is, and how much it is used.

No exporter on the nodes could tell: the CSI driver (1.9) does not say how full its volumes are, and what a client sees
is its own part of the traffic. Names: https://docs.aws.amazon.com/fsx/latest/LustreGuide/fs-metrics.html (2026-11-21).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import pulumi
import yaml

from infra.charts import release
from infra.iam import PodIdentity
from infra.policies import Policy, allow, document
from infra.settings import Settings
from infra.versions import CLOUDWATCH_EXPORTER

if TYPE_CHECKING:
    from infra.cluster import Cluster
    from infra.storage import SharedStorage

ACCOUNT = "cloudwatch-exporter"
PERIOD = 300
"""Seconds over which traffic is summed, and between two looks: a request costs, if little, a hundred-thousandth of a
dollar."""
TRAFFIC = ("DataReadBytes", "DataWriteBytes", "DataReadOperations", "DataWriteOperations", "MetadataOperations")


class FileSystemMetrics(pulumi.ComponentResource):
    """The exporter, with leave to read metrics."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        cluster: Cluster,
        storage: SharedStorage,
        namespace: str,
        after: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions,
    ) -> None:
        """`after` has the namespace, what a pod needs, and the kind ServiceMonitor."""
        super().__init__("llama-trainium:infra:FileSystemMetrics", name, None, opts)
        child = pulumi.ResourceOptions(parent=self)
        identity = PodIdentity(name, cluster.place, ACCOUNT, read_metrics(), cluster.name, child, namespace)
        release(
            f"{name}-exporter",
            CLOUDWATCH_EXPORTER,
            {
                "fullnameOverride": ACCOUNT,
                "serviceAccount": {"name": ACCOUNT},
                "extraArgs": {"scraping-interval": PERIOD},
                "config": storage.file_system.id.apply(lambda found: yaml.safe_dump(jobs(settings.region, found))),
                "serviceMonitor": {"enabled": True, "interval": "60s"},
                "resources": {"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "256Mi"}},
                "podSecurityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 65534,  # the image names its user, which Kubernetes cannot tell from root by that
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
                "testConnection": False,
            },
            namespace,
            settings.charts.mirror,
            pulumi.ResourceOptions(parent=self, provider=cluster.k8s, depends_on=[*after, identity]),
        )
        self.register_outputs({})


def read_metrics() -> Policy:
    """CloudWatch's API for reading a metric knows no resource."""
    return document([allow(["cloudwatch:GetMetricStatistics"], "*")])


def jobs(region: str, file_system: str) -> dict[str, Any]:
    """The exporter's configuration: this file system's metrics, and no search for others."""
    # FSx says every minute, for each of its disks, how much is free: a sum over five minutes would be five times that.
    free = {"name": "FreeDataStorageCapacity", "statistics": ["Sum", "Minimum"], "period": 60, "length": 2 * PERIOD}
    traffic = [{"name": name, "statistics": ["Sum"], "period": PERIOD, "length": 2 * PERIOD} for name in TRAFFIC]
    return {
        "apiVersion": "v1alpha1",
        "static": [
            {
                "name": "data",
                "namespace": "AWS/FSx",
                "regions": [region],
                "dimensions": [{"name": "FileSystemId", "value": file_system}],
                "metrics": [free, *traffic],
            }
        ],
    }
