"""What the tests in real pods share: the cluster, the stack `local` on it, and waiting for what happens there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import stack
from stack import Run, Stack

from training.metrics import Record, parse_record
from workloads.kubectl import Kubectl
from workloads.labels import STAGE_LABEL, TOOLBOX

KUBECONFIG = os.environ.get("TEST_CLUSTER_KUBECONFIG")
TOOLS = ("pulumi", "pulumi-language-python", "kubectl")
PATIENCE = 900.0
"""Seconds for what has to happen at all."""


def missing() -> str | None:
    """Why these tests cannot run here; None when all is there."""
    if not KUBECONFIG:
        return "no real cluster: TEST_CLUSTER_KUBECONFIG not set"
    absent = [tool for tool in TOOLS if not shutil.which(tool)]
    if not shutil.which("pulumi-resource-kubernetes") and not list(stack.plugins().glob("resource-kubernetes-*")):
        absent.append("the plugin of pulumi-kubernetes (pulumi plugin install resource kubernetes)")
    return f"no real cluster: {', '.join(absent)} not found" if absent else None


def cluster(namespace: str) -> Kubectl:
    """kubectl in an unused namespace of the cluster."""
    assert KUBECONFIG
    os.environ["KUBECONFIG"] = KUBECONFIG  # for kubectl as the tests themselves call it
    kubectl = Kubectl(namespace)
    assert not kubectl.items("pods"), f"the namespace {namespace} of the cluster is in use"
    return kubectl


@dataclass(frozen=True)
class Local:
    """The stack, and the cluster it is on."""

    stack: Stack
    kubectl: Kubectl

    def control(self, *arguments: str) -> str:
        """What a target of the Makefile says, such as `make status`, on both streams."""
        command = [sys.executable, "-m", "workloads.control", *arguments, "--stack", "local"]
        made = self.stack
        done = subprocess.run(command, cwd=made.project, env=made.env, text=True, capture_output=True, timeout=1800)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    def read(self, name: str) -> str:
        """A file of the run that trains; "" while it is not there. Its folder is named after the settings too."""
        command = self.kubectl.command("exec", f"deployment/{TOOLBOX}", "--", "sh", "-c", f"cat runs/tiny-*/{name}")
        done = subprocess.run(command, env=self.stack.env, text=True, capture_output=True)
        return done.stdout if done.returncode == 0 else ""

    def records(self, kind: str) -> list[Record]:
        """The run's records of one type."""
        found = [parse_record(line) for line in self.read("metrics.jsonl").splitlines()]
        return [record for record in found if record and record["type"] == kind]

    def step(self) -> int:
        """The last step that was trained."""
        return max((record["step"] for record in self.records("train")), default=0)

    def pods(self, stage: str) -> list[str]:
        """Names of a stage's pods that have not ended."""
        found = self.kubectl.items("pods", f"{STAGE_LABEL}={stage}")
        return [pod["metadata"]["name"] for pod in found if pod["status"]["phase"] in ("Pending", "Running")]

    def workers(self, selector: str) -> list[str]:
        """Names of the pods that train; `selector` is the operator's label for a worker."""
        found = self.kubectl.items("pods", f"{STAGE_LABEL}=train,{selector}")
        return [pod["metadata"]["name"] for pod in found]


def until(holds: Callable[[], object], what: str, beside: Future[Run] | None = None) -> None:
    """Wait for `what`; whatever runs beside it must not end before."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert beside is None or not beside.done(), f"before {what}: {beside.result().output}"
        assert time.monotonic() < end, f"not within {PATIENCE:.0f} s: {what}"
        time.sleep(1)  # between two looks


@contextmanager
def running(command: Callable[[], Run]) -> Iterator[Future[Run]]:
    """A command on a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(command)
