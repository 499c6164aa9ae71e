"""What shows the platform and a run on it: Prometheus, Grafana with our dashboards, alerts, and with `full` the logs.

    make grafana            # opens it; the password is in the stack's output grafanaPassword and in Secrets Manager

The chart kube-prometheus-stack brings Prometheus, its operator, Grafana, node-exporter and kube-state-metrics. Beside
it: neuron-monitor on the accelerator nodes, FSx's metrics from CloudWatch, dashboards and alerts. Every query of these
is held against what the exporters say (tests/infra/exporters.yaml). Runs are scraped by workloads/monitoring.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s
import pulumi_random as random
import yaml

from infra.charts import release
from infra.file_system_metrics import FileSystemMetrics
from infra.network import cluster_name
from infra.neuron_monitor import NeuronMonitor
from infra.pod_logs import PodLogs
from infra.settings import Settings
from infra.versions import PROMETHEUS

if TYPE_CHECKING:
    from infra.cluster import Cluster
    from infra.storage import SharedStorage

NAMESPACE = "monitoring"
DASHBOARDS = Path(__file__).parent / "dashboards"
ALERTS = Path(__file__).parent / "alerts.yaml"
EFA_COUNTERS = Path(__file__).parent / "efa_counters.sh"
ADMIN = "grafana-admin"
"""The Secret with Grafana's user and password."""
DISK_GIB = 50
"""Of Prometheus with `full`: two weeks of 16 trn1.32xlarge are about a half of it."""

NODE_LABEL = [{"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}]
"""Puts the node's name on every series, by which those of different exporters are put together."""


class Observability(pulumi.ComponentResource):
    """All of it, in a namespace of its own."""

    ready: list[pulumi.Resource]
    """What a PodMonitor comes after: its definition is the chart's."""
    password: pulumi.Output[str]
    """Grafana's, of the user `admin`; a secret."""

    def __init__(
        self,
        name: str,
        settings: Settings,
        cluster: Cluster,
        storage: SharedStorage,
        after: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`after` is what the charts' pods need: nodes, DNS, the driver of their disks."""
        super().__init__("llama-trainium:infra:Observability", name, None, opts)
        self._name = name
        child = pulumi.ResourceOptions(parent=self)
        self._child = pulumi.ResourceOptions(parent=self, provider=cluster.k8s)
        full = settings.observability == "full"
        mirror = settings.charts.mirror
        self._space = k8s.core.v1.Namespace(
            f"{name}-namespace", metadata=k8s.meta.v1.ObjectMetaArgs(name=NAMESPACE), opts=self._child
        )
        # Prometheus and Alertmanager ask for no password. What scrapes is inside, what looks comes by port-forward.
        k8s.networking.v1.NetworkPolicy(
            f"{name}-within",
            metadata=self._meta("within-the-namespace"),
            spec={"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": {}}]}]},
            opts=self._child,
        )
        self.password = self._make_password(child)
        pods_run = [self._space, *after]
        prometheus = release(
            f"{name}-prometheus",
            PROMETHEUS,
            prometheus_values(full),
            self._space.metadata.name,
            mirror,
            pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(depends_on=[*pods_run, self._login])),
        )
        self.ready = [prometheus]
        scraped = [*pods_run, prometheus]
        types = sorted({group.instance_type for group in settings.accelerators})
        NeuronMonitor(f"{name}-neuron", NAMESPACE, types, NODE_LABEL, cluster.k8s, scraped, child)
        FileSystemMetrics(f"{name}-fsx", settings, cluster, storage, NAMESPACE, scraped, child)
        self._make_dashboards()
        k8s.apiextensions.CustomResource(
            f"{name}-alerts",
            api_version="monitoring.coreos.com/v1",
            kind="PrometheusRule",
            metadata=self._meta("llama-trainium"),
            spec=alerts(settings.storage.size_gib),
            opts=pulumi.ResourceOptions.merge(self._child, pulumi.ResourceOptions(depends_on=[prometheus])),
        )
        if full:
            PodLogs(f"{name}-logs", settings, cluster, NAMESPACE, pods_run, child)
        self.register_outputs({})

    def _meta(self, name: str, **labels: str) -> k8s.meta.v1.ObjectMetaArgs:
        return k8s.meta.v1.ObjectMetaArgs(name=name, namespace=self._space.metadata.name, labels=labels or None)

    def _make_password(self, child: pulumi.ResourceOptions) -> pulumi.Output[str]:
        """Made once and kept in the state, encrypted; another one is `pulumi up --replace` of it."""
        password = pulumi.Output.secret(
            random.RandomPassword(f"{self._name}-grafana", length=32, special=False, opts=child).result
        )
        kept = aws.secretsmanager.Secret(
            f"{self._name}-grafana",
            name_prefix=f"{cluster_name()}-grafana-",  # a name that is deleted is taken for a week
            description=f"Grafana of {cluster_name()}: user and password",
            recovery_window_in_days=7,
            opts=child,
        )
        login = pulumi.Output.secret(password.apply(lambda text: json.dumps({"username": "admin", "password": text})))
        aws.secretsmanager.SecretVersion(f"{self._name}-grafana", secret_id=kept.id, secret_string=login, opts=child)
        self._login = k8s.core.v1.Secret(
            f"{self._name}-grafana",
            metadata=self._meta(ADMIN),
            string_data={"admin-user": "admin", "admin-password": password},
            opts=self._child,
        )
        return password

    def _make_dashboards(self) -> None:
        """A ConfigMap for each, which Grafana finds by its label."""
        for path in sorted(DASHBOARDS.glob("*.json")):
            k8s.core.v1.ConfigMap(
                f"{self._name}-dashboard-{path.stem}",
                metadata=self._meta(f"dashboard-{path.stem}", grafana_dashboard="1"),
                data={f"llama-trainium-{path.stem}.json": path.read_text(encoding="utf-8")},
                opts=self._child,
            )


def alerts(size_gib: int) -> dict[str, Any]:
    """Spec of the PrometheusRule: infra/alerts.yaml, and the file system's size, which no metric tells."""
    groups = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    size = {"record": "llama_trainium:fsx_capacity_bytes", "expr": f"vector({size_gib * 2**30})"}
    return {"groups": [{"name": "llama-trainium-sizes", "rules": [size]}, *groups]}


def prometheus_values(full: bool) -> dict[str, Any]:
    """Values of kube-prometheus-stack; `full`: with a disk for Prometheus."""
    everywhere = {
        f"{kind}SelectorNilUsesHelmValues": False  # those of every namespace, and not the chart's own alone
        for kind in ("podMonitor", "serviceMonitor", "rule", "probe", "scrapeConfig")
    }
    spec: dict[str, Any] = {
        **everywhere,
        "retention": "15d" if full else "3d",
        "retentionSize": f"{DISK_GIB - 10}GB" if full else "8GB",
        "resources": {"requests": {"cpu": "200m", "memory": "1Gi"}, "limits": {"memory": "4Gi"}},
    }
    if full:
        claim = {
            "storageClassName": "gp3",
            "accessModes": ["ReadWriteOnce"],
            "resources": {"requests": {"storage": f"{DISK_GIB}Gi"}},
        }
        spec["storageSpec"] = {"volumeClaimTemplate": {"spec": claim}}
        # The disk goes with the stack; Kubernetes would keep it.
        spec["persistentVolumeClaimRetentionPolicy"] = {"whenDeleted": "Delete", "whenScaled": "Retain"}
    else:
        spec["storageSpec"] = {"emptyDir": {"sizeLimit": "10Gi"}}
    small = {"requests": {"cpu": "50m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}}
    return {
        # EKS runs these itself, out of reach.
        **{part: {"enabled": False} for part in ("kubeControllerManager", "kubeScheduler", "kubeEtcd", "kubeProxy")},
        "prometheus": {"prometheusSpec": spec},
        "alertmanager": {
            "alertmanagerSpec": {
                "resources": small,
                # An AlertmanagerConfig says where all alerts go, and not only those about its own namespace.
                "alertmanagerConfigMatcherStrategy": {"type": "None"},
            }
        },
        "prometheusOperator": {
            # It would check rules as they are applied, at the price of a certificate and of pods that must answer.
            "admissionWebhooks": {"enabled": False},
            "tls": {"enabled": False},
            "resources": small,
        },
        "grafana": {
            "fullnameOverride": "grafana",
            "admin": {"existingSecret": ADMIN},
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "1Gi"}},
            # The chart's own pod of `helm test`, of which there is no need in a cluster.
            "testFramework": {"enabled": False},
        },
        "kube-state-metrics": {"resources": small},
        "prometheus-node-exporter": node_exporter_values(),
    }


def node_exporter_values() -> dict[str, Any]:
    """node-exporter, with a container beside it that writes down EFA's counters, which it does not know.

    Its collector `infiniband` reads the names of other vendors' counters (prometheus/procfs 0.21, class_infiniband.go).
    """
    return {
        # The usual image has no shell for the second container.
        "image": {"distroless": False},
        "extraArgs": [
            "--collector.filesystem.mount-points-exclude=^/(dev|proc|sys|run/containerd/.+|var/lib/kubelet/.+)($|/)",
            "--collector.filesystem.fs-types-exclude=^(autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|"
            "devtmpfs|fusectl|hugetlbfs|iso9660|mqueue|nsfs|overlay|proc|procfs|pstore|rpc_pipefs|securityfs|"
            "selinuxfs|squashfs|sysfs|tracefs|erofs)$",
            "--collector.textfile.directory=/efa",
            "--no-collector.infiniband",
        ],
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}},
        "sidecars": [
            {
                "name": "efa-counters",
                "command": [
                    "/bin/sh",
                    "-c",
                    f"while :; do\n{EFA_COUNTERS.read_text(encoding='utf-8')}sleep 15\ndone\n",
                ],
                "env": [{"name": "SYS", "value": "/host/sys"}, {"name": "OUT", "value": "/efa/efa.prom"}],
                "volumeMounts": [{"name": "sys", "mountPath": "/host/sys", "readOnly": True}],
                "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}, "limits": {"memory": "64Mi"}},
            }
        ],
        "sidecarVolumeMount": [{"name": "efa", "mountPath": "/efa", "readOnly": False}],
        "prometheus": {"monitor": {"relabelings": NODE_LABEL}},
    }
