"""Gangs on Trainium nodes with the operators themselves: the stack `dev`, on trn1.32xlarge nodes that KWOK pretends.

Real are the program, the engine, the Kubernetes provider, the API server, kube-scheduler, Volcano with the program's
own settings, KubeRay, and the MPI operator with the rights that the program gives it. Not real are AWS, and what runs
in pods (real_operators.py).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import apiserver
import pytest
import real_operators
import stack
import standin
import stub_charts
import yaml
from cloud import Cloud
from operators import PATHS
from order import refusals
from real_operators import Cluster, core, trn1, until
from stack import Run, Stack
from test_apiserver import NAMESPACE, PACKAGES, RELEASE
from test_stages import said

from infra.catalog import GROUP_LABEL
from infra.mpi_operator import NAME as MPI_OPERATOR
from infra.operators import SCHEDULER
from workloads.labels import STAGE_LABEL

REASON = stack.missing() or apiserver.missing() or real_operators.missing()
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(1800)]

GROUP, CORE_TYPE = "trn1", "m5.2xlarge"
NODES = 2
"""That train."""
CONFIG = {
    "coreNodes": {"instanceType": CORE_TYPE, "max": 3},
    "accelerators": [{"name": GROUP, "instanceType": "trn1.32xlarge", "max": 6}],
    "workloads": {"stages": []},
}
PATIENCE = 300
"""Seconds for what takes operators a few, and a node that is gone a minute."""
GIVE_UP = {"RayJob": {"spec": {"activeDeadlineSeconds": 1}}, "MPIJob": {"spec": {"runPolicy": {"suspend": True}}}}
"""What ends a job in whose pods nothing runs that could be asked to."""
QUIET = 10
"""Seconds in which Volcano has looked at a gang ten times."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """An API server with a core node and without any for training."""
    folder = tmp_path_factory.mktemp("kubernetes")
    with apiserver.serving(folder / "server", pods_run=False) as server:
        with real_operators.beside(server, folder / "operators") as running:
            running.add_node("core-a", core(CORE_TYPE))
            yield running


@pytest.fixture(scope="module")
def made(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The stack without stages, and the operators started as it says."""
    folder = tmp_path_factory.mktemp("stack")
    aws = folder / "aws"
    aws.mkdir()
    apiserver.aws_command(aws)
    cloud = Cloud(refusals=refusals)
    cloud.endpoint, cloud.ca = cluster.server.endpoint, cluster.server.ca
    with ExitStack() as exits:
        port = exits.enter_context(standin.serving(cloud))
        mirror = exits.enter_context(stub_charts.charts(folder / "charts", definitions=False))
        config = CONFIG | {"charts": {"mirror": mirror}, "training": training(NODES)}
        env = {"KUBECONFIG": str(cluster.server.kubeconfig)}
        dev = Stack(folder / "dev", "dev", cloud, port, PACKAGES, config, aws, env)
        dev.up().ok()
        (volcano,) = [
            r["inputs"]["values"] for r in dev.resources() if r["type"] == RELEASE and "volcano" in r["inputs"]["chart"]
        ]
        cluster.configure_volcano(volcano["custom"]["scheduler_config_override"])
        cluster.start_operators((MPI_OPERATOR, MPI_OPERATOR))
        yield dev
        dev.destroy().ok()


@pytest.fixture(autouse=True)
def no_stages(made: Stack, cluster: Cluster) -> Iterator[None]:
    """Each test has a cluster without jobs, and leaves it without training nodes."""
    cluster.dashboard.status = "RUNNING"
    yield
    made.change({"workloads": {"stages": []}, "training": training(NODES)})
    made.up().ok()
    until(lambda: None if pods(cluster) else True, PATIENCE, "pods of a stage that is gone")
    for name in cluster.nodes():
        if name.startswith(GROUP):
            cluster.delete_node(name)


@pytest.fixture
def up(made: Stack, cluster: Cluster) -> Iterator[Callable[..., Future[Run]]]:
    """Starts `pulumi up` with these settings of the workloads, and goes on. What runs at the end is given up."""
    with ThreadPoolExecutor(1) as pool:

        def start(**workloads: Any) -> Future[Run]:
            made.change({"workloads": workloads})
            return pool.submit(made.up)

        yield start
        for kind, path in PATHS.items():
            for job in cluster.server.request(path.format(NAMESPACE))["items"]:
                cluster.server.request(f"{path.format(NAMESPACE)}/{job['metadata']['name']}", "PATCH", GIVE_UP[kind])


def training(nodes: int) -> dict[str, Any]:
    """Settings of a run on so many trn1.32xlarge, of 32 workers each."""
    sizes = {"global_batch_size": 96, "micro_batch_size": 1}
    return {"preset": "tiny", "nodes": nodes, "settings": {"parallel": {"tensor_parallel_size": 2}, "train": sizes}}


@pytest.mark.parametrize("engine", ["ray", "mpi"])
def test_a_gang_is_placed_whole_or_not_at_all(
    engine: str, cluster: Cluster, made: Stack, up: Callable[..., Future[Run]], figure: Callable[[str], None]
) -> None:
    cluster.add_node("trn1-a", trn1(GROUP))
    running = up(engine=engine, stages=["precompile", "train"], train={"wait": "finished"})
    gang = NODES + (engine == "ray")  # an MPIJob's launcher comes when its workers are there
    waiting = until(lambda: all_looked_at(cluster, gang), PATIENCE, "pods that Volcano has looked at")
    message = conditions(waiting)[0]["message"]
    end = time.monotonic() + QUIET
    while time.monotonic() < end:
        assert {(c["status"], c["reason"]) for c in conditions(pods(cluster))} == {("False", "Unschedulable")}
        time.sleep(0.5)
    assert not any("nodeName" in pod["spec"] for pod in pods(cluster)), "one node is free, and nothing is on it"
    figure(f"gangs, {engine}, one node short: {message}")
    figure(f"gangs, {engine}, one node short, make status: {status(made, 'precompile')}")

    cluster.add_node("trn1-b", trn1(GROUP))
    joined = time.monotonic()
    found = until(lambda: placed(cluster, "precompile"), PATIENCE, "head or launcher, and the workers, on nodes")
    figure(f"gangs, {engine}: all placed {time.monotonic() - joined:.1f} s after the node that was missing")
    assert_where(found, engine)
    end_stage(cluster, "precompile")

    until(lambda: placed(cluster, "train"), PATIENCE, "train on its nodes")
    cluster.delete_node("trn1-b")
    lost = time.monotonic()
    alone = until(lambda: waiting_workers(cluster), PATIENCE, "a worker that waits for a node in place of the lost one")
    message, seconds = conditions(alone)[0]["message"], time.monotonic() - lost
    figure(f"gangs, {engine}, a node lost: {seconds:.1f} s until a worker waits: {message}")
    figure(f"gangs, {engine}, a node lost, make status: {status(made, 'train')}")
    assert len(alone) == 1
    assert not running.done(), "training waits for a node, and so does the update"
    cluster.add_node("trn1-c", trn1(GROUP))
    assert_where(until(lambda: placed(cluster, "train"), PATIENCE, "the worker on the new node"), engine)
    end_stage(cluster, "train")
    done = running.result().ok()
    figure(f"gangs, {engine}: up {done.seconds:.0f} s, with a node that was missing and one that was lost")


def test_the_update_says_that_a_gang_found_no_nodes(
    cluster: Cluster, made: Stack, up: Callable[..., Future[Run]], figure: Callable[[str], None]
) -> None:
    cluster.add_node("trn1-a", trn1(GROUP))
    done = up(stages=["precompile"], precompile={"preRunningDeadlineSeconds": 30}).result()
    assert done.code != 0
    line = said(done)
    figure(f"gangs, one node short: {line}")
    assert line.startswith("stage precompile: failed (PreRunningDeadlineExceeded, unschedulable")
    until(lambda: None if pods(cluster) else True, PATIENCE, "no pods, as the job has ended")


@pytest.mark.parametrize("factor", [SCHEDULER["tiers"][1]["plugins"][0]["arguments"]["overcommit-factor"], None])
def test_an_autoscaler_sees_all_of_a_gang_that_waits(
    factor: float | None, cluster: Cluster, made: Stack, up: Callable[..., Future[Run]], figure: Callable[[str], None]
) -> None:
    """infra/operators.py says why the factor is there: without it five free nodes hide five workers of six."""
    settings = yaml.safe_load(yaml.safe_dump(SCHEDULER))
    if factor is None:
        del settings["tiers"][1]["plugins"][0]["arguments"]
    cluster.configure_volcano(yaml.safe_dump(settings))
    for name in "abcdef":
        cluster.add_node(f"trn1-{name}", trn1(GROUP))
    made.change({"training": training(6)})
    with cluster.occupied("trn1-f"):
        up(stages=["precompile"], precompile={"preRunningDeadlineSeconds": 60})
        until(lambda: all_looked_at(cluster, 7), PATIENCE, "pods that Volcano has looked at")
        time.sleep(QUIET)
        waiting = pods(cluster)
    reasons = sorted(c["reason"] for c in conditions(waiting))
    figure(f"gangs, six nodes and one of them taken, overcommit-factor {factor or 'not set'}: {reasons}")
    assert not any("nodeName" in pod["spec"] for pod in waiting)
    assert (set(reasons) == {"Unschedulable"}) == (factor is not None)


def pods(cluster: Cluster, stage: str | None = None) -> list[dict[str, Any]]:
    """The pods of a stage, or of all, that have not ended."""
    return [
        pod
        for pod in cluster.pods(NAMESPACE)
        if pod["status"]["phase"] in ("Pending", "Running")
        and "deletionTimestamp" not in pod["metadata"]
        and stage in (None, pod["metadata"]["labels"].get(STAGE_LABEL))
    ]


def conditions(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the scheduler says of each pod, as an autoscaler reads it."""
    return [c for pod in found for c in pod["status"].get("conditions", []) if c["type"] == "PodScheduled"]


def all_looked_at(cluster: Cluster, count: int) -> list[dict[str, Any]] | None:
    """The pods of a gang of so many, once the scheduler has said something of each."""
    found = pods(cluster)
    return found if len(found) == len(conditions(found)) == count else None


def on_nodes(cluster: Cluster, stage: str) -> list[dict[str, Any]]:
    """The pods of a stage that are Ready on nodes that exist."""
    nodes = cluster.nodes()
    return [
        pod
        for pod in pods(cluster, stage)
        if pod["spec"].get("nodeName") in nodes
        and any((c["type"], c["status"]) == ("Ready", "True") for c in pod["status"].get("conditions", []))
    ]


def placed(cluster: Cluster, stage: str) -> list[dict[str, Any]] | None:
    """The pods of a stage, once a head or launcher and as many workers as there should be are on nodes."""
    found = on_nodes(cluster, stage)
    training = [pod for pod in found if pod["spec"]["nodeName"].startswith(GROUP)]
    return found if len(training) == NODES < len(found) else None


def waiting_workers(cluster: Cluster) -> list[dict[str, Any]] | None:
    """Workers of which the scheduler says that there is no node for them."""
    found = [pod for pod in pods(cluster) if pod["spec"].get("nodeSelector") == {GROUP_LABEL: GROUP}]
    return [pod for pod in found if any(c["status"] == "False" for c in conditions([pod]))] or None


def assert_where(found: list[dict[str, Any]], engine: str) -> None:
    """Workers, and nothing else, are on Trainium nodes, one on each, with all of its devices."""
    workers = [pod for pod in found if pod["spec"]["nodeName"].startswith(GROUP)]
    assert len(workers) == len({pod["spec"]["nodeName"] for pod in workers}) == NODES
    role = ("ray.io/node-type", "worker") if engine == "ray" else ("training.kubeflow.org/job-role", "worker")
    for pod in found:
        (container,) = pod["spec"]["containers"]
        limits = container["resources"].get("limits", {})
        devices = {name: limits.get(name) for name in ("aws.amazon.com/neuron", "vpc.amazonaws.com/efa")}
        if pod in workers:
            assert set(devices.values()) == {"16", "8"}
            assert role in pod["metadata"]["labels"].items()
        else:
            assert set(devices.values()) == {None}
            assert pod["spec"]["nodeName"] == "core-a"


def end_stage(cluster: Cluster, stage: str) -> None:
    """What runs in a stage ends well: Ray says so, and the pod of its submitter or launcher is done."""
    cluster.dashboard.status = "SUCCEEDED"
    submitter = until(
        lambda: [pod for pod in on_nodes(cluster, stage) if is_of_a_job(pod)] or None, PATIENCE, "submitter or launcher"
    )
    cluster.end_pod(submitter[0])
    until(lambda: None if pods(cluster, stage) else True, PATIENCE, f"pods of {stage}, which has ended")
    cluster.dashboard.status = "RUNNING"


def is_of_a_job(pod: dict[str, Any]) -> bool:
    """Whether it is Ray's submitter or MPI's launcher."""
    return any(owner["kind"] == "Job" for owner in pod["metadata"].get("ownerReferences", []))


def status(made: Stack, stage: str) -> str:
    """The line of a stage in `make status`."""
    command = [sys.executable, "-m", "workloads.control", "status", "--stack", made.name]
    done = subprocess.run(command, cwd=made.project, env=made.env, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return next(line for line in done.stdout.splitlines() if line.startswith(stage))
