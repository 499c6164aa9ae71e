"""The operators themselves beside the API server of apiserver.py, and nodes that are not there for their pods.

    with beside(server, folder) as cluster:
        cluster.add_node("trn1-a", TRN1)
        ...                                     # the stack brings the MPI operator's account, and Volcano's settings
        cluster.start_operators(settings, account)

Real are kube-scheduler, Volcano (scheduler and controllers), KubeRay and the MPI operator. KWOK keeps the nodes Ready,
and a pod that is placed on one runs at once. Nothing is in a pod: a test ends a Job's pod by `end_pod`, and the
dashboard of Ray that KubeRay asks about a job is `Dashboard`, which says of each what the test told it to.
"""

from __future__ import annotations

import http.server
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from apiserver import ApiServer, Processes, free_port, kubeconfig
from loopback import Quiet, served
from schemas import CRD_DIR
from stub_charts import MPI_JOB, any_fields

from infra.catalog import GROUP_LABEL, INSTANCE_TYPES, NEURON_KEY, cpu_node

BINARIES = ("kube-scheduler", "kwok", "vc-scheduler", "vc-controller-manager", "kuberay-operator", "mpi-operator")
FSX_DRIVER = "fsx.csi.aws.com"
SIMULATED = "llama-trainium/simulated"
"""Annotation of the nodes that KWOK looks after."""

# What the operators watch and the program does not make: group, version, kind, plural, namespaced.
WATCHED = (
    ("batch.volcano.sh", "v1alpha1", "CronJob", "cronjobs", True),
    ("batch.volcano.sh", "v1alpha1", "Job", "jobs", True),
    ("bus.volcano.sh", "v1alpha1", "Command", "commands", True),
    ("config.volcano.sh", "v1alpha1", "ColocationConfiguration", "colocationconfigurations", True),
    ("flow.volcano.sh", "v1alpha1", "JobFlow", "jobflows", True),
    ("flow.volcano.sh", "v1alpha1", "JobTemplate", "jobtemplates", True),
    ("nodeinfo.volcano.sh", "v1alpha1", "Numatopology", "numatopologies", False),
    ("ray.io", "v1", "RayCronJob", "raycronjobs", True),
    ("ray.io", "v1", "RayService", "rayservices", True),
    ("shard.volcano.sh", "v1alpha1", "NodeShard", "nodeshards", False),
    ("topology.volcano.sh", "v1alpha1", "HyperNode", "hypernodes", False),
)

# What happens to nodes and to pods on them, in KWOK's words: a pod runs until it is deleted, or until a test ends it.
_RUNS = """
conditions:
- {type: Initialized, status: "True", lastTransitionTime: {{ Now | Quote }}}
- {type: ContainersReady, status: "True", lastTransitionTime: {{ Now | Quote }}}
- {type: Ready, status: "True", lastTransitionTime: {{ Now | Quote }}}
containerStatuses:
{{ range .spec.containers }}
- name: {{ .name | Quote }}
  image: {{ .image | Quote }}
  ready: true
  restartCount: 0
  state: {running: {startedAt: {{ Now | Quote }}}}
{{ end }}
phase: Running
podIP: 192.0.2.1
startTime: {{ Now | Quote }}
"""


_READY = """
conditions:
- type: Ready
  status: "True"
  reason: KubeletReady
  lastHeartbeatTime: {{ Now | Quote }}
  lastTransitionTime: {{ Now | Quote }}
"""


def _stage(name: str, kind: str, then: Mapping[str, Any], *when: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "apiVersion": "kwok.x-k8s.io/v1alpha1",
        "kind": "Stage",
        "metadata": {"name": name},
        "spec": {
            "resourceRef": {"apiGroup": "v1", "kind": kind},
            "selector": {"matchExpressions": list(when)},
            "next": dict(then),
        },
    }


_DELETED = ".metadata.deletionTimestamp"
STAGES = [
    _stage(
        "ready",
        "Node",
        {"statusTemplate": _READY},
        {"key": '.status.conditions.[] | select(.type == "Ready") | .status', "operator": "NotIn", "values": ["True"]},
    ),
    _stage(
        "runs",
        "Pod",
        {"statusTemplate": _RUNS},
        {"key": _DELETED, "operator": "DoesNotExist"},
        {"key": ".status.podIP", "operator": "DoesNotExist"},
    ),
    _stage("goes", "Pod", {"delete": True}, {"key": _DELETED, "operator": "Exists"}),
]

T = TypeVar("T")


def missing() -> str | None:
    """What this machine lacks of the operators, as the reason to skip a test; None when all is there."""
    absent = [binary for binary in (*BINARIES, "kubectl") if not shutil.which(binary)]
    if not CRD_DIR.is_dir():
        absent.append(str(CRD_DIR))
    return f"no real operators: {', '.join(absent)} not found" if absent else None


def until(found: Callable[[], T | None], seconds: float, what: str) -> T:
    """What `found` returns once it is not None; an AssertionError that says `what` after so many seconds."""
    end = time.monotonic() + seconds
    while (value := found()) is None:
        assert time.monotonic() < end, f"after {seconds:.0f} s: {what}"
        time.sleep(0.3)
    return value


def trn1(group: str) -> tuple[dict[str, str], dict[str, str]]:
    """Labels and resources of a trn1.32xlarge of a group, as its kubelet and the device plugins tell them."""
    kind = INSTANCE_TYPES["trn1.32xlarge"]
    devices = {NEURON_KEY: kind.devices, f"{NEURON_KEY}core": kind.cores, "vpc.amazonaws.com/efa": kind.efa_interfaces}
    resources = {"cpu": kind.vcpus, "memory": f"{kind.memory_gib}Gi", **devices}
    labels = {GROUP_LABEL: group, "node.kubernetes.io/instance-type": kind.name}
    return labels, {name: str(amount) for name, amount in resources.items()}


def core(instance_type: str) -> tuple[dict[str, str], dict[str, str]]:
    """The same of a core node."""
    vcpus, memory_gib = cpu_node(instance_type)
    labels = {GROUP_LABEL: "core", "node.kubernetes.io/instance-type": instance_type}
    return labels, {"cpu": str(vcpus), "memory": f"{memory_gib}Gi"}


@dataclass
class Dashboard:
    """Ray's dashboard as KubeRay asks it, through HTTP_PROXY: the same answer for all jobs until another is set."""

    status: str = "RUNNING"
    asked: set[str] = field(default_factory=set)
    """Paths, with the host."""

    @contextmanager
    def serving(self) -> Iterator[str]:
        """Its address."""
        dashboard = self

        class Handler(Quiet, http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                dashboard.asked.add(self.path)
                body = json.dumps({"status": dashboard.status, "message": f"it is {dashboard.status}"}).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_POST = do_GET  # noqa: N815 (a job is asked to stop)

        with served(Handler) as address:
            yield address


class Cluster:
    """An API server with nodes and operators."""

    def __init__(self, server: ApiServer, processes: Processes, proxy: str, dashboard: Dashboard) -> None:
        self.server, self.dashboard = server, dashboard
        self._processes, self._proxy = processes, proxy
        # In a folder of its own: the scheduler reads it again at every write to its folder, and logs are written there.
        self._settings = processes.folder / "volcano" / "scheduler.yaml"

    def add_node(self, name: str, shape: tuple[dict[str, str], dict[str, str]]) -> None:
        """A node joins, Ready."""
        labels, resources = shape
        labels = labels | {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
        taints = [{"key": NEURON_KEY, "effect": "NoSchedule"}] if NEURON_KEY in resources else []
        meta = {"name": name, "labels": labels, "annotations": {SIMULATED: "true"}}
        made = self.server.request("/api/v1/nodes", "POST", {"metadata": meta, "spec": {"taints": taints}})
        # Its volume driver, as the kubelet tells of it. Volcano takes a node without for one that has no such volumes.
        owner = {"apiVersion": "v1", "kind": "Node", "name": name, "uid": made["metadata"]["uid"]}
        driver = {"name": FSX_DRIVER, "nodeID": name, "topologyKeys": []}
        volumes = {"metadata": {"name": name, "ownerReferences": [owner]}, "spec": {"drivers": [driver]}}
        self.server.request("/apis/storage.k8s.io/v1/csinodes", "POST", volumes)
        has = resources | {"pods": "110"}
        status = {"status": {"capacity": has, "allocatable": has}}
        self.server.request(f"/api/v1/nodes/{name}/status", "PATCH", status)

    @contextmanager
    def occupied(self, node: str) -> Iterator[None]:
        """All devices of a Trainium node are another's, while the block runs."""
        taken = {"limits": {NEURON_KEY: str(INSTANCE_TYPES["trn1.32xlarge"].devices)}}
        spec = {"nodeName": node, "containers": [{"name": "other", "image": "other:1", "resources": taken}]}
        path = "/api/v1/namespaces/default/pods"
        self.server.request(path, "POST", {"metadata": {"name": "other"}, "spec": spec})
        try:
            yield
        finally:
            self.server.request(f"{path}/other?gracePeriodSeconds=0", "DELETE")

    def delete_node(self, name: str) -> None:
        """A node goes, as one does that AWS has taken away."""
        self.server.request(f"/api/v1/nodes/{name}", "DELETE")

    def nodes(self) -> list[str]:
        """Names of the nodes."""
        return [node["metadata"]["name"] for node in self.server.request("/api/v1/nodes")["items"]]

    def pods(self, namespace: str) -> list[dict[str, Any]]:
        """The pods in a namespace."""
        found: list[dict[str, Any]] = self.server.request(f"/api/v1/namespaces/{namespace}/pods")["items"]
        return found

    def end_pod(self, pod: Mapping[str, Any]) -> None:
        """A pod's containers end well, as those of a Job do."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
        done = {
            "terminated": {
                "exitCode": 0,
                "reason": "Completed",
                "finishedAt": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            }
        }
        ended = [each | {"ready": False, "state": done} for each in pod["status"]["containerStatuses"]]
        self.server.request(path, "PATCH", {"status": {"phase": "Succeeded", "containerStatuses": ended}})

    def configure_volcano(self, settings: str) -> None:
        """The settings of Volcano's scheduler; it reads them again when they change."""
        self._settings.parent.mkdir(exist_ok=True)
        self._settings.write_text(settings)

    def start_operators(self, account: tuple[str, str]) -> None:
        """Volcano, KubeRay, and the MPI operator as a service account (namespace, name) with that account's rights."""
        config, local = f"--kubeconfig={self.server.kubeconfig}", "127.0.0.1"
        quiet = ["--leader-elect=false", config]
        ports = {name: f"{local}:{free_port()}" for name in ("scheduler", "controllers", "metrics", "probes")}
        start = self._processes.start
        start(
            "vc-scheduler",
            *quiet,
            f"--scheduler-conf={self._settings}",
            f"--listen-address={ports['scheduler']}",
            "-v=3",
        )
        start("vc-controller-manager", *quiet, f"--listen-address={ports['controllers']}")
        # The chart's flag for batchScheduler.name: volcano. A proxy is for its questions to Ray; loopback goes without.
        start(
            "kuberay-operator",
            "--batch-scheduler=volcano",
            "--enable-leader-election=false",
            f"--metrics-addr={ports['metrics']}",
            f"--health-probe-bind-address={ports['probes']}",
            env={"KUBECONFIG": str(self.server.kubeconfig), "HTTP_PROXY": self._proxy},
        )
        namespace, name = account
        path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token"
        token = self.server.request(path, "POST", {"spec": {"expirationSeconds": 7200}})["status"]["token"]
        own = self._processes.folder / "mpi-operator.kubeconfig"
        own.write_text(json.dumps(kubeconfig(self.server, token)))
        pods = self.pods(namespace)
        flags = pods[0]["spec"]["containers"][0]["args"]
        start("mpi-operator", f"--kubeConfig={own}", *flags)


@contextmanager
def beside(server: ApiServer, folder: Path) -> Iterator[Cluster]:
    """Nodes for the pods of a server without any, and the definitions that operators need, while the block runs."""
    folder.mkdir(parents=True)
    for file in sorted(CRD_DIR.glob("*.yaml")):
        if not re.fullmatch(f"{MPI_JOB[0]}_{MPI_JOB[2]}", file.stem):  # the program brings this one itself
            server.define(yaml.safe_load(file.read_text()))
    for group, version, kind, plural, namespaced in WATCHED:
        server.define(any_fields(group, version, kind, plural, namespaced))
    stages = folder / "stages.yaml"
    stages.write_text(yaml.safe_dump_all(STAGES))
    dashboard = Dashboard()
    with ExitStack() as stack:
        processes, proxy = Processes(folder, stack), stack.enter_context(dashboard.serving())
        config = f"--kubeconfig={server.kubeconfig}"
        nodes = f"--manage-nodes-with-annotation-selector={SIMULATED}=true"
        leases = "--node-lease-duration-seconds=40"  # a node without is taken for lost after that, and its pods with it
        processes.start("kwok", config, "--manage-all-nodes=false", nodes, leases, f"--config={stages}")
        processes.start(
            "kube-scheduler",
            config,
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={folder / 'certs'}",
            f"--authentication-kubeconfig={server.kubeconfig}",
            f"--authorization-kubeconfig={server.kubeconfig}",
        )
        yield Cluster(server, processes, proxy, dashboard)
