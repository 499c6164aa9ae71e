"""A real Kubernetes API server for the engine's tests: etcd, kube-apiserver and kube-controller-manager on loopback.

No kubelet: pods are declared Ready as they appear, which is what a Deployment's rollout waits for.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

BINARIES = ("etcd", "kube-apiserver", "kube-controller-manager", "openssl", "pulumi-resource-kubernetes")
TOKEN = "engine"
DEFINITIONS_PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


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

    def define(self, made: dict[str, Any]) -> None:
        """Make a custom resource definition, and wait until the server serves it."""
        self.request(DEFINITIONS_PATH, "POST", made)
        path, end = f"{DEFINITIONS_PATH}/{made['metadata']['name']}", time.monotonic() + 30
        while not any(
            (each["type"], each["status"]) == ("Established", "True")
            for each in self.request(path).get("status", {}).get("conditions") or ()
        ):
            assert time.monotonic() < end, f"{path} is not established after 30 s"
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


class Processes:
    """Programs that run until `stack` is closed, each with its log in `folder`."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self._stack = folder, stack

    def start(self, name: str, *flags: str, env: Mapping[str, str] | None = None) -> None:
        """Start the program `name`; `env` is added to its environment."""
        log = self._stack.enter_context((self.folder / f"{name}.log").open("w"))
        process = subprocess.Popen(
            [name, *flags], stdout=log, stderr=log, stdin=subprocess.DEVNULL, env={**os.environ, **(env or {})}
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)


@contextmanager
def serving(folder: Path, pods_run: bool = True) -> Iterator[ApiServer]:
    """An API server with the controllers of Deployments and namespaces, while the block runs.

    `pods_run`: every pod is declared Ready, without a node.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key, public, tokens = folder / "sa.key", folder / "sa.pub", folder / "tokens.csv"
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)
    tokens.write_text(f"{TOKEN},engine,engine,system:masters\n")
    client, peer, port = (free_port() for _ in range(3))
    etcd, server = f"http://127.0.0.1:{client}", ApiServer(folder, port)
    with ExitStack() as stack:
        run = Processes(folder, stack).start
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
            "--allow-privileged=true",  # as EKS does: agents of devices need it
            # Lists by watching need a newer etcd than Debian 12 has, and clients of 1.36 insist on them.
            "--feature-gates=WatchList=false",
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
        if pods_run:
            stop = threading.Event()
            kubelet = threading.Thread(target=server.pods_are_ready, args=(stop,))
            kubelet.start()
            stack.callback(kubelet.join)
            stack.callback(stop.set)
        yield server


def kubeconfig(server: ApiServer, token: str = TOKEN) -> dict[str, Any]:
    """What kubectl and the controllers read."""
    cluster = {"server": server.endpoint, "certificate-authority-data": server.ca}
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "engine", "cluster": cluster}],
        "users": [{"name": "engine", "user": {"token": token}}],
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
