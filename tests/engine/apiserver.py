"""A real Kubernetes API server for the engine's tests: etcd, kube-apiserver and kube-controller-manager on loopback.

No kubelet: pods are declared Ready as they appear, which is what a Deployment's rollout waits for. Charts come from a
repository of stubs, one ConfigMap each, that stands in for the operators' own through the setting charts.mirror.
"""

from __future__ import annotations

import base64
import functools
import http.server
import io
import json
import shutil
import socket
import ssl
import subprocess
import tarfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import yaml
from schemas import CRD_DIR

from infra import versions

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "openssl", "pulumi-resource-kubernetes")
TOKEN = "engine"
DEFINITIONS_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
# The custom resources that the program itself makes, by the chart that brings their definitions: group, kind, plural.
DEFINITIONS = {
    "karpenter-crd": [
        ("karpenter.sh", "NodePool", "nodepools"),
        ("karpenter.k8s.aws", "EC2NodeClass", "ec2nodeclasses"),
    ],
    "kuberay-operator": [("ray.io", "RayJob", "rayjobs"), ("ray.io", "RayCluster", "rayclusters")],
    "volcano": [("scheduling.volcano.sh", "Queue", "queues")],
}
MPI_JOB = ("kubeflow.org", "MPIJob", "mpijobs")
# The version of each that the program asks for, and whether its objects are in a namespace.
VERSIONS = {"scheduling.volcano.sh": "v1beta1", "kubeflow.org": "v2beta1"}
NAMESPACED = ("ray.io", "kubeflow.org")


def missing() -> str | None:
    """What this machine lacks for a real API server, as the reason to skip a test; None when all is there."""
    absent = [binary for binary in BINARIES if not shutil.which(binary)]
    return f"no real API server: {', '.join(absent)} not found" if absent else None


def free_port() -> int:
    """A TCP port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


class ApiServer:
    """A running API server: its address, its CA in base64 as EKS gives it, and requests to it as JSON."""

    def __init__(self, folder: Path, port: int) -> None:
        self.endpoint = f"https://127.0.0.1:{port}"
        self.certificate = folder / "certs" / "apiserver.crt"
        self.kubeconfig = folder / "kubeconfig"

    @property
    def ca(self) -> str:
        """The certificate that the server made for itself."""
        return base64.b64encode(self.certificate.read_bytes()).decode()

    def request(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """What the server answers; urllib's errors are the caller's."""
        data = None if body is None else json.dumps(body).encode()
        kind = "application/merge-patch+json" if method == "PATCH" else "application/json"
        headers = {"Authorization": f"Bearer {TOKEN}"} | ({"Content-Type": kind} if data else {})
        request = urllib.request.Request(self.endpoint + path, data, headers, method=method)
        context = ssl.create_default_context(cafile=str(self.certificate))
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            text = answer.read().decode()
        return json.loads(text) if text.startswith("{") else text

    def define(self, file: Path) -> None:
        """Make the custom resource definition in `file`, and wait until the server serves it."""
        made = yaml.safe_load(file.read_text())
        self.request(DEFINITIONS_PATH, "POST", made)
        path, end = f"{DEFINITIONS_PATH}/{made['metadata']['name']}", time.monotonic() + 30
        while not any(
            (each["type"], each["status"]) == ("Established", "True")
            for each in self.request(path).get("status", {}).get("conditions") or ()
        ):
            assert time.monotonic() < end, f"{file} is not established after 30 s"
            time.sleep(0.1)

    def everything(self) -> dict[str, Any]:
        """All objects that the server has, by the path of their list."""
        roots = ["/api/v1"]
        roots += [f"/apis/{group['preferredVersion']['groupVersion']}" for group in self.request("/apis")["groups"]]
        return {
            f"{root}/{kind['name']}": self.request(f"{root}/{kind['name']}")["items"]
            for root in roots
            for kind in self.request(root)["resources"]
            if "list" in kind["verbs"]
        }

    def wait(self, seconds: float = 60) -> None:
        """Until it is ready, or TimeoutError."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if self.certificate.exists() and self.request("/readyz") == "ok":
                    return
            except OSError:
                pass
            time.sleep(0.2)
        raise TimeoutError(f"{self.endpoint} is not ready after {seconds} s")

    def pods_are_ready(self, stop: threading.Event) -> None:
        """Declare every pod Ready, as a kubelet would, until told to stop."""
        ready = {
            "phase": "Running",
            "conditions": [{"type": "Ready", "status": "True"}],
            "podIP": "192.0.2.1",  # without one it is no endpoint of a Service
            "podIPs": [{"ip": "192.0.2.1"}],
        }
        while not stop.wait(0.3):
            try:
                for pod in self.request("/api/v1/pods?fieldSelector=status.phase%3DPending")["items"]:
                    meta = pod["metadata"]
                    path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}/status"
                    self.request(path, "PATCH", {"status": ready})
            except OSError:
                continue  # gone between the list and the patch, or the server is going


@contextmanager
def serving(folder: Path) -> Iterator[ApiServer]:
    """An API server with the controllers of Deployments and namespaces, while the block runs."""
    folder.mkdir(parents=True, exist_ok=True)
    key, public, tokens = folder / "sa.key", folder / "sa.pub", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    tokens.write_text(f"{TOKEN},engine,engine,system:masters\n")
    client, peer, port = (free_port() for _ in range(3))
    etcd, server = f"http://127.0.0.1:{client}", ApiServer(folder, port)
    with ExitStack() as stack:

        def run(name: str, *flags: str) -> None:
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            process = subprocess.Popen([name, *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)

        run(
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
            f"--initial-cluster=default=http://127.0.0.1:{peer}",
        )
        run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            "--endpoint-reconciler-type=none",
            f"--secure-port={port}",
            f"--cert-dir={folder / 'certs'}",
            f"--token-auth-file={tokens}",
            f"--service-account-key-file={public}",
            f"--service-account-signing-key-file={key}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
        )
        server.wait()
        server.kubeconfig.write_text(json.dumps(kubeconfig(server)))
        run(
            "kube-controller-manager",
            f"--kubeconfig={server.kubeconfig}",
            f"--service-account-private-key-file={key}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--secure-port={free_port()}",
            f"--cert-dir={folder / 'certs'}",
        )
        stop = threading.Event()
        kubelet = threading.Thread(target=server.pods_are_ready, args=(stop,))
        kubelet.start()
        stack.callback(kubelet.join)
        stack.callback(stop.set)
        yield server


def kubeconfig(server: ApiServer) -> dict[str, Any]:
    """What kubectl and the controllers read."""
    cluster = {"server": server.endpoint, "certificate-authority-data": server.ca}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "engine", "cluster": cluster}],
        "users": [{"name": "engine", "user": {"token": TOKEN}}],
        "contexts": [{"name": "engine", "context": {"cluster": "engine", "user": "engine"}}],
        "current-context": "engine",
    }


def aws_command(folder: Path) -> None:
    """The AWS CLI that an EKS kubeconfig calls for a token, put into `folder` as `aws`."""
    credential = {"apiVersion": "client.authentication.k8s.io/v1beta1", "kind": "ExecCredential", "spec": {}}
    answer = json.dumps(credential | {"status": {"token": TOKEN}})
    script = folder / "aws"
    script.write_text(f"#!/bin/sh\ncase \"$*\" in *--version*) echo aws-cli/2.31.0 ;; *) echo '{answer}' ;; esac\n")
    script.chmod(0o755)


def chart_archive(chart: versions.Chart) -> bytes:
    """A chart of that name and version with one ConfigMap, and the definitions that the program needs."""
    about = {"apiVersion": "v2", "name": chart.name, "version": chart.version}
    marker = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{chart.name}-stub"}}
    files = {"Chart.yaml": about, "templates/stub.yaml": marker}
    # Templates, as in Karpenter's own chart of definitions: Helm never removes what comes in a folder crds/.
    files |= {f"templates/{names[2]}.yaml": definition(*names) for names in DEFINITIONS.get(chart.name, [])}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, content in files.items():
            data = json.dumps(content).encode()
            entry = tarfile.TarInfo(f"{chart.name}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def definition(group: str, kind: str, plural: str) -> dict[str, Any]:
    """The definition of a custom resource: the operators' own where CRD_DIR has it, or one that takes any fields."""
    own = CRD_DIR / f"{group}_{plural}.yaml"
    if own.exists():
        found: dict[str, Any] = yaml.safe_load(own.read_text())
        return found
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {
        "name": VERSIONS.get(group, "v1"),
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced" if group in NAMESPACED else "Cluster",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [version],
        },
    }


@contextmanager
def charts(folder: Path) -> Iterator[str]:
    """The address of a mirror that has a stub of every chart in infra/versions.py."""
    folder.mkdir(parents=True)
    found = [value for value in vars(versions).values() if isinstance(value, versions.Chart)]
    entries: dict[str, Any] = {}
    for chart in found:
        archive = folder / f"{chart.name}-{chart.version}.tgz"
        archive.write_bytes(chart_archive(chart))
        entries[chart.name] = [
            {"apiVersion": "v2", "name": chart.name, "version": chart.version, "urls": [archive.name]}
        ]
    (folder / "index.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "entries": entries}))
    # The MPI operator has no chart: its definition lies beside them (infra/mpi_operator.py).
    (folder / f"mpi-operator-{versions.MPI_OPERATOR}.yaml").write_text(yaml.safe_dump(definition(*MPI_JOB)))

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
