"""The stack `local` in real pods: `make test-cluster`, in half an hour on two cores.

It needs a cluster to itself, named by TEST_CLUSTER_KUBECONFIG and not by the kubeconfig of whoever runs the tests: one
node with 2 CPUs and 8 GiB, KubeRay with Volcano as its batch scheduler, in pods or beside it, and the image of
training/Dockerfile loaded as `llama-trainium:local`. A stack with `operators: install` and no stages installs them. The
tests are the days of one run: each goes on where the one before it ended.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import in_pods
import pytest
from cloud import Cloud
from in_pods import KUBECONFIG, PATIENCE, Local, running, until
from stack import Stack

from training.metrics import parse_record
from workloads.labels import STAGE_LABEL, TENSORBOARD, TENSORBOARD_PORT
from workloads.settings import STAGES

NAMESPACE = "llama-trainium"
PASSWORD = "tb_password_of_the_cluster_tests"
TRAINING = {"preset": "tiny", "workersPerNode": 1}

Stream = Callable[[str], None]

REASON = in_pods.missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(3600)]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Local]:
    """The stack file `local` on the cluster, with a folder of its node as the volume, a toolbox and TensorBoard."""
    kubectl = in_pods.cluster(NAMESPACE)
    folder = tmp_path_factory.mktemp("cluster")
    volume = {"hostPath": os.environ.get("TEST_CLUSTER_VOLUME", str(folder / "volume")), "sizeGib": 5}
    config: dict[str, Any] = {"operators": "present", "volume": volume}
    made = Stack(folder / "stack", "local", Cloud(), 0, (), config, env={"KUBECONFIG": str(KUBECONFIG)})
    made.change({"workloads": made.config()["llama-trainium:workloads"] | {"toolbox": True}})
    made.secret("tensorboardPassword", PASSWORD)
    found = Local(made, kubectl)
    yield found
    made.destroy()


def test_a_stage_that_fails_ends_the_update_with_its_log(local: Local, figure: Stream) -> None:
    local.stack.change({"training": {**TRAINING, "settings": {"data": {"source": "text:/data/none/*.txt"}}}})
    up = local.stack.up()
    assert up.code != 0
    assert re.search(r"stage prepare: failed \(AppFailed\): .* to run it again: make rerun STAGE=prepare", up.output)
    assert re.search(r"\| error: data\.source: ", up.output), up.output
    assert "Traceback" not in up.output
    until(lambda: not local.pods("prepare"), "its pods give back what they held")
    assert not local.kubectl.items("rayjobs.ray.io", f"{STAGE_LABEL}=train")
    figure(f"cluster: a stage that fails, up to its line in the terminal: {up.seconds:.0f} s")


def test_training_goes_on_without_a_worker_and_ends_when_it_is_told_to(local: Local, figure: Stream) -> None:
    local.stack.change({"training": TRAINING})
    with running(local.stack.up) as up:
        until(lambda: local.records("checkpoint"), "a checkpoint", up)
        saved, (worker,) = local.step(), local.workers("ray.io/node-type=worker")
        lost = time.monotonic()
        local.kubectl.do("delete", "pod", worker, "--wait=false")
        until(lambda: len(local.records("start")) == 2, "training goes on", up)
        back = time.monotonic() - lost
        start = local.records("start")[-1]["step"]
        assert start, "not from the beginning"
        assert worker not in local.pods("train")
        # Further than it was, so that what is stopped is a run that had lost a worker.
        until(lambda: local.step() > max(saved, start), "and gets further", up)
        said = local.control("stop")
        ended = up.result(PATIENCE)
    assert "train: it was asked to write a checkpoint and end" in said
    assert "its nodes are free" in said
    assert ended.code != 0
    assert re.search(r"stage train: stopped.* to run it again: make rerun STAGE=train", ended.output), ended.output
    assert local.records("checkpoint")[-1]["step"] == local.step(), "what was trained is saved"
    assert local.pods("train") == []
    figure(f"cluster: a worker deleted, training goes on after {back:.0f} s from step {start} (it was at {saved})")


def test_the_rerun_goes_on_to_a_model(local: Local, figure: Stream) -> None:
    stopped = local.step()
    local.control("rerun", "--stage", "train", "--yes")
    starts = [record["step"] for record in local.records("start")]
    assert starts[-1] == stopped, "from the checkpoint of the stop"
    status = local.control("status")
    assert [line.split()[:2] for line in status.splitlines()[1:]] == [[stage, "succeeded"] for stage in STAGES]
    entropy = parse_manifest(local.read("manifest.json"))
    loss = local.records("valid")[-1]["loss"]
    assert local.step() == 240
    assert loss < entropy
    assert "240 steps" in local.control("logs", "--stage", "train")
    figure(f"cluster: 240 steps with starts at {starts}, validation loss {loss:.3f}, unigram entropy {entropy:.3f}")


def test_tensorboard_wants_its_password(local: Local) -> None:
    with forwarded(local, f"service/{TENSORBOARD}", TENSORBOARD_PORT) as page:
        assert answer(page) == 401
        assert answer(page, "wrong") == 401
        assert answer(page, PASSWORD) == 200


def test_destroy_leaves_nothing_but_the_data(local: Local, figure: Stream) -> None:
    before = local.records("train")
    destroy = local.stack.destroy().ok()
    assert local.stack.owned(("kubernetes",)) == set()
    assert left(local) == []
    up = local.stack.up().ok()
    assert local.records("train") == before, "all is done already: the data was there"
    again = local.stack.up("--expect-no-changes").ok()
    figure(
        f"cluster: destroy {destroy.seconds:.0f} s, up with three stages that find their work done {up.seconds:.0f} s, "
        f"without a change {again.seconds:.0f} s"
    )


def parse_manifest(text: str) -> float:
    """The entropy of the run's tokens, nats per token."""
    record = parse_record('{"type": "manifest", "manifest": ' + text + "}")
    assert record, text
    return float(record["manifest"]["unigram_entropy"])


def left(local: Local) -> list[str]:
    """What is in the namespace but what Kubernetes puts into each."""
    kinds = "pods,services,jobs.batch,deployments.apps,secrets,configmaps,persistentvolumeclaims,rayjobs.ray.io"
    found = local.kubectl.items(f"{kinds},rayclusters.ray.io,mpijobs.kubeflow.org")
    names = [f"{item['kind']} {item['metadata']['name']}" for item in found]
    return [name for name in names if name != "ConfigMap kube-root-ca.crt"]


@contextmanager
def forwarded(local: Local, what: str, port: int) -> Iterator[str]:
    """The address on this machine of a port in the cluster, as `make tensorboard` opens it."""
    command = local.kubectl.command("port-forward", what, f":{port}")
    with subprocess.Popen(command, env=local.stack.env, text=True, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        found = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found
        try:
            yield f"http://127.0.0.1:{found[1]}/"
        finally:
            process.terminate()


def answer(page: str, password: str | None = None) -> int:
    """The status with which a page answers."""
    request = urllib.request.Request(page)
    if password is not None:
        request.add_header("Authorization", f"Basic {base64.b64encode(f'me:{password}'.encode()).decode()}")
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code
