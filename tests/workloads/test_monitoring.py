"""What Prometheus scrapes of the stages: the ports that pods have, who is let in, what a run's numbers are called."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pulumi
import pytest
from mocks import Recorded, run
from schemas import definitions, identity, mistakes
from stages import NAMES, live_platform, platform, training, workloads

from training.config import load_settings
from training.exporter import MEASURES, PREFIX
from workloads.base import Base
from workloads.labels import METRICS, STAGE_LABEL
from workloads.monitoring import Monitoring, let_in, pod_monitor
from workloads.mpijob import mpi_job_spec
from workloads.network_policies import network_policies
from workloads.platform import Platform, Prometheus
from workloads.rayjob import job_names, ray_job_spec

POD_MONITOR = "kubernetes:monitoring.coreos.com/v1:PodMonitor"
POLICY = "kubernetes:networking.k8s.io/v1:NetworkPolicy"


def make(prometheus: bool) -> Recorded:
    def program() -> None:
        chart = pulumi.CustomResource("tests:index:Chart", "chart")
        found: Platform = live_platform()
        if prometheus:
            found = replace(found, prometheus=Prometheus("monitoring", [chart]))
        base = Base("base", workloads(), found, "dev")
        Monitoring("monitoring", found, base)

    return run(program)


@pytest.fixture(scope="module")
def made() -> Recorded:
    return make(prometheus=True)


def watched() -> Platform:
    return replace(platform(), prometheus=Prometheus("monitoring"))


def templates(spec: Any) -> dict[str, Any]:
    """The pod templates of a stage's job, by what runs in them."""
    if "mpiReplicaSpecs" in spec:
        return {kind: each["template"] for kind, each in spec["mpiReplicaSpecs"].items()}
    cluster = spec["rayClusterSpec"]
    found = {"head": cluster["headGroupSpec"]["template"], "submitter": spec["submitterPodTemplate"]}
    return found | {group["groupName"]: group["template"] for group in cluster["workerGroupSpecs"]}


def ports(template: Any) -> dict[str, int]:
    return {
        each["name"]: each["containerPort"]
        for container in template["spec"]["containers"]
        for each in container.get("ports", [])
    }


def test_it_comes_after_its_definition_and_in_the_stages_namespace(made: Recorded) -> None:
    monitor = made.one(POD_MONITOR)
    assert made.waits_for(monitor, made.one("tests:index:Chart"))
    assert monitor.inputs["metadata"]["namespace"] == "llama-trainium"
    assert mistakes(made.one(POLICY, "monitoring-policy").inputs, {}) == []
    defined = definitions()
    if identity(monitor.inputs) in defined:
        assert mistakes(monitor.inputs, defined) == []


def test_without_a_prometheus_there_is_none_of_it() -> None:
    nothing = make(prometheus=False)
    assert not nothing.of(POD_MONITOR)
    assert not [each for each in nothing.of(POLICY) if "monitoring" in each.name]


def test_every_pod_that_the_monitor_names_and_that_has_metrics_is_scraped_once() -> None:
    """Ray: every node of the cluster. MPI: the launcher, which knows the run; its workers have nothing to say."""
    found = watched()
    ray = templates(ray_job_spec("train", found, workloads(), NAMES, 16, training(512)))
    mpi = templates(mpi_job_spec("train", found, workloads(engine="mpi"), NAMES, 16, training(512)))
    (endpoint,) = pod_monitor()["podMetricsEndpoints"]
    scraped = {name: ports(each).get(endpoint["port"]) for name, each in (ray | mpi).items()}
    assert scraped == {"head": 8080, "workers": 8080, "submitter": None, "Launcher": 9400, "Worker": None}
    (selected,) = pod_monitor()["selector"]["matchExpressions"]
    assert selected["operator"] == "Exists"
    assert all(selected["key"] in each["metadata"]["labels"] for each in (ray | mpi).values())


def test_the_launcher_listens_where_the_monitor_asks() -> None:
    spec = mpi_job_spec("train", watched(), workloads(engine="mpi"), NAMES, 16, training(512))
    (launcher,) = templates(spec)["Launcher"]["spec"]["containers"]
    option, address = launcher["command"][-2:]
    assert option == "--run.metrics_address"
    assert address == f"0.0.0.0:{ports(templates(spec)['Launcher'])[METRICS]}"
    assert load_settings(overrides={"run.metrics_address": address}).run.metrics_address == address


def test_who_is_not_watched_opens_no_port() -> None:
    for stage, found in (("train", platform()), ("precompile", watched())):
        spec: Any = mpi_job_spec(stage, found, workloads(engine="mpi"), NAMES, 16, training(512))  # type: ignore[arg-type]
        assert METRICS not in ports(templates(spec)["Launcher"])
        assert "--run.metrics_address" not in templates(spec)["Launcher"]["spec"]["containers"][0]["command"]


def test_a_run_is_the_same_job_watched_or_not() -> None:
    """The name says what decides about the result; who looks at it does not."""
    names = job_names("dev", training(512), "image@sha256:0")
    assert names["train"] == job_names("dev", training(512), "image@sha256:0")["train"]
    ray = [ray_job_spec("train", found, workloads(), NAMES, 16, training(512)) for found in (platform(), watched())]
    assert ray[0] == ray[1]


def test_prometheus_is_let_in_to_the_metrics_alone() -> None:
    spec = let_in("monitoring")
    (rule,) = spec["ingress"]
    (source,) = rule["from"]  # both selectors in one entry: the pods of that namespace, and not either
    assert source["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "monitoring"}
    assert source["podSelector"]["matchLabels"] == {"app.kubernetes.io/name": "prometheus"}
    assert {each["port"] for each in rule["ports"]} == {8080, 9400}
    assert spec["podSelector"]["matchExpressions"] == [{"key": STAGE_LABEL, "operator": "Exists"}]
    others = [source for each in network_policies().values() for rule in each["ingress"] for source in rule["from"]]
    assert source not in others


def test_a_runs_numbers_are_called_the_same_under_ray() -> None:
    (endpoint,) = pod_monitor()["podMetricsEndpoints"]
    (rename,) = endpoint["metricRelabelings"]
    pattern = re.compile(rename["regex"])  # Prometheus anchors it, and knows $1
    assert (rename["sourceLabels"], rename["targetLabel"], rename["replacement"]) == (["__name__"], "__name__", "$1")
    for measure in MEASURES:
        found = pattern.fullmatch(f"ray_{PREFIX}{measure.name}")
        assert found is not None
        assert found[1] == PREFIX + measure.name
    assert not pattern.fullmatch("ray_node_cpu_utilization")
