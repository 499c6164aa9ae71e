"""MPIJobs in real pods: two worker pods, of which one is deleted in training. Part of `make test-cluster`.

It needs what test_pods.py needs, and the MPI operator with gang scheduling by Volcano. Both workers are on the one node
there is; that they have the same folder is said as an administrator would: a volume and its class are made beforehand.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import in_pods
import pytest
import yaml
from cloud import Cloud
from in_pods import KUBECONFIG, PATIENCE, Local, running, until
from stack import Stack

from workloads.labels import STAGE_LABEL

NAMESPACE = "llama-trainium-mpi"
WORKER = "training.kubeflow.org/job-role=worker"
STEPS, EVERY = 60, 10
TRAINING = {
    "preset": "tiny",
    "nodes": 2,
    "workersPerNode": 1,
    "settings": {
        "train": {
            "steps": STEPS,
            "warmup_steps": 5,
            "global_batch_size": 8,
            "micro_batch_size": 4,
            "eval_every": 20,
            "eval_samples": 8,
        },
        "checkpoint": {"every": EVERY},
    },
}
WORKLOADS = {
    "namespace": NAMESPACE,
    "engine": "mpi",
    "resources": {
        "head": {"cpu": 0.3, "memoryGib": 2},
        "prepare": {"cpu": 1, "memoryGib": 2},
        "worker": {"cpu": 0.5, "memoryGib": 2},
    },
    "train": {"wait": "finished"},
    "toolbox": True,
}
RANKS = "cat /proc/[0-9]*/environ 2> /dev/null | tr '\\0' '\\n' | sed -n 's/^OMPI_COMM_WORLD_RANK=//p' | sort -u"
"""Shell line: the ranks among a pod's processes."""

REASON = in_pods.missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """The stack file `local` with MPIJobs on two nodes, as far as it knows, and a volume that both have."""
    kubectl = in_pods.cluster(NAMESPACE)
    folder = tmp_path_factory.mktemp("mpi")
    shared = folder / "shared.yaml"
    shared.write_text(yaml.safe_dump_all(volume(folder / "volume")))
    config = {
        "operators": "present",
        "nodes": {"count": 2, "vcpus": 2, "memoryGib": 7},
        "volume": {"storageClass": NAMESPACE, "sizeGib": 5},
        "training": TRAINING,
        "workloads": WORKLOADS,
    }
    made = Stack(folder / "stack", "local", Cloud(), 0, (), config, env={"KUBECONFIG": str(KUBECONFIG)})
    kubectl.do("apply", "--filename", str(shared))
    yield Local(made, kubectl)
    made.destroy()
    # A claim on a class of volumes is the data, and stays with its namespace.
    kubectl.do("delete", "namespace", NAMESPACE)
    kubectl.do("delete", "--filename", str(shared))


def test_two_pods_train_and_one_of_them_is_lost(local: Local, figure: Callable[[str], None]) -> None:
    with running(local.stack.up) as up:
        until(lambda: local.records("checkpoint"), "a checkpoint", up)
        pods = local.workers(WORKER)
        assert sorted(ranks(local, pod) for pod in pods) == [["0"], ["1"]], "a rank in each of two pods"
        lost, saved = time.monotonic(), local.step()
        local.kubectl.do("delete", "pod", pods[-1], "--wait=false")
        until(lambda: len(local.records("start")) == 2, "training goes on", up)
        back = time.monotonic() - lost
        ended = up.result(PATIENCE).ok()
    start = local.records("start")[-1]["step"]
    assert EVERY <= start <= saved + EVERY, "from the last checkpoint"
    assert local.step() == STEPS
    losses = [record["loss"] for record in local.records("valid")]
    assert losses[-1] < losses[0]
    assert not local.pods("train"), "what they held is given back"
    kinds = {item["kind"] for item in local.kubectl.items("mpijobs.kubeflow.org,rayjobs.ray.io", STAGE_LABEL)}
    assert kinds == {"MPIJob", "RayJob"}, "prepare is one pod, which needs no MPI"
    assert f"{STEPS} steps" in local.control("logs", "--stage", "train")
    status = local.control("status")
    assert re.search(r"^train +succeeded", status, re.MULTILINE), status
    local.stack.up("--expect-no-changes").ok()
    figure(f"cluster, mpi: up {ended.seconds:.0f} s with a worker deleted at step {saved}, validation losses {losses}")
    figure(f"cluster, mpi: training goes on after {back:.0f} s from step {start}; {failures(local)}")


def ranks(local: Local, pod: str) -> list[str]:
    """The ranks that run in a pod."""
    command = local.kubectl.command("exec", pod, "--", "sh", "-c", RANKS)
    return subprocess.run(command, env=local.stack.env, text=True, capture_output=True, check=True).stdout.split()


def failures(local: Local) -> list[str]:
    """What the run says that went wrong."""
    return [f"rank {each['rank']}, step {each['step']}: {each['message']}" for each in local.records("failure")]


def volume(folder: Path) -> list[dict[str, object]]:
    """A class of volumes, and its only one: a folder of the node, for any number of pods."""
    return [
        {
            "apiVersion": "storage.k8s.io/v1",
            "kind": "StorageClass",
            "metadata": {"name": NAMESPACE},
            "provisioner": "kubernetes.io/no-provisioner",
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": NAMESPACE},
            "spec": {
                "capacity": {"storage": "5Gi"},
                "accessModes": ["ReadWriteMany"],
                "persistentVolumeReclaimPolicy": "Retain",
                "storageClassName": NAMESPACE,
                "hostPath": {"path": str(folder), "type": "DirectoryOrCreate"},
            },
        },
    ]
