"""What shows the platform: the charts and their values, Grafana's password, and what each kind has."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from mock_cloud import PASSWORD
from mocks import Recorded, Registered, load_stack, run_program

from infra import versions
from infra.file_system_metrics import jobs, read_metrics
from infra.observability import ADMIN, ALERTS, DASHBOARDS, NAMESPACE, prometheus_values
from infra.pod_logs import FILTERS, INPUTS, output, write_logs

RELEASE, GROUP = "kubernetes:helm.sh/v3:Release", "aws:cloudwatch/logGroup:LogGroup"
COMPONENT = "llama-trainium:infra:Observability"
TOKEN = {"llama-trainium:huggingFaceToken": "hf_" + "x" * 34}


def make(kind: str, **more: object) -> Recorded:
    changed = {f"llama-trainium:{key}": value for key, value in {"observability": kind, **more}.items()}
    return run_program({**load_stack("us-west-2"), **changed}, TOKEN, "us-west-2")


@pytest.fixture(scope="module")
def full() -> Recorded:
    return make("full")


@pytest.fixture(scope="module")
def basic() -> Recorded:
    return make("basic")


def own(made: Recorded) -> list[Registered]:
    return [each for each in made if made.inside(each, COMPONENT)]


def charts(made: Recorded) -> dict[str, Registered]:
    return {each.inputs["name"]: each for each in own(made) if each.type == RELEASE}


def test_none_makes_nothing_and_lets_nobody_in() -> None:
    nothing = make("none")
    assert own(nothing) == []
    assert not [each for each in nothing if "monitoring" in each.name and each.custom]
    assert not [each for each in nothing if "monitoring.coreos.com" in each.type]
    assert "grafanaPassword" not in nothing.exports


def test_full_is_basic_with_the_logs(basic: Recorded, full: Recorded) -> None:
    more = {each.urn for each in own(full)} - {each.urn for each in own(basic)}
    assert {each.urn for each in own(basic)} < {each.urn for each in own(full)}
    assert all("-logs" in urn for urn in more)
    assert charts(basic).keys() == {versions.PROMETHEUS.name, versions.CLOUDWATCH_EXPORTER.name}
    assert charts(full).keys() == charts(basic).keys() | {versions.FLUENT_BIT.name}


def test_the_charts_are_pinned_mirrored_and_in_their_namespace(full: Recorded) -> None:
    mirrored = charts(make("full", charts={"mirror": "https://charts.example.com/all"}))
    namespace = full.one("kubernetes:core/v1:Namespace", "observability-namespace")
    for chart in (versions.PROMETHEUS, versions.CLOUDWATCH_EXPORTER, versions.FLUENT_BIT):
        made = charts(full)[chart.name]
        assert (made.inputs["version"], made.inputs["repositoryOpts"]["repo"]) == (chart.version, chart.repository)
        assert mirrored[chart.name].inputs["repositoryOpts"] == {"repo": "https://charts.example.com/all"}
        assert made.inputs["namespace"] == NAMESPACE == namespace.inputs["metadata"]["name"]
        assert full.waits_for(made, namespace)
        assert full.waits_for(made, full.one("aws:eks/nodeGroup:NodeGroup", "core-group"))


def test_what_is_scraped_comes_after_the_kinds_of_the_operator(full: Recorded) -> None:
    prometheus = charts(full)[versions.PROMETHEUS.name]
    kinds = [each for each in full if each.type.startswith("kubernetes:monitoring.coreos.com/")]
    assert {each.inputs["kind"] for each in kinds} == {"ServiceMonitor", "PodMonitor", "PrometheusRule"}
    assert all(full.waits_for(each, prometheus) for each in kinds)
    assert full.waits_for(charts(full)[versions.CLOUDWATCH_EXPORTER.name], prometheus), "it has a ServiceMonitor"


def test_prometheus_asks_everything_that_has_a_monitor() -> None:
    spec = prometheus_values(full=True)["prometheus"]["prometheusSpec"]
    for kind in ("podMonitor", "serviceMonitor", "rule"):
        assert spec[f"{kind}SelectorNilUsesHelmValues"] is False


def test_the_disk_of_prometheus_is_one_that_goes_with_the_stack(full: Recorded, basic: Recorded) -> None:
    claimed = charts(full)[versions.PROMETHEUS.name]
    spec = claimed.inputs["values"]["prometheus"]["prometheusSpec"]
    claim = spec["storageSpec"]["volumeClaimTemplate"]["spec"]
    assert claim["storageClassName"] == full.one("kubernetes:storage.k8s.io/v1:StorageClass").inputs["metadata"]["name"]
    assert spec["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete"
    assert full.waits_for(claimed, full.one("aws:eks/addon:Addon", "ebs-csi")), "its driver outlives it"
    size, kept = int(claim["resources"]["requests"]["storage"].removesuffix("Gi")), spec["retentionSize"]
    assert int(kept.removesuffix("GB")) * 10**9 < 0.9 * size * 2**30  # the log of writes is beside what is kept
    there = charts(basic)[versions.PROMETHEUS.name].inputs["values"]["prometheus"]["prometheusSpec"]["storageSpec"]
    assert list(there) == ["emptyDir"]


def test_grafanas_password_is_made_and_is_nowhere_in_plain(full: Recorded) -> None:
    made = full.one("random:index/randomPassword:RandomPassword")
    assert made.inputs["length"] >= 24
    secret = full.one("kubernetes:core/v1:Secret", "observability-grafana")
    assert secret.inputs["metadata"]["name"] == ADMIN
    assert secret.inputs["stringData"] == {"admin-user": "admin", "admin-password": PASSWORD}
    kept = full.one("aws:secretsmanager/secretVersion:SecretVersion")
    assert json.loads(kept.inputs["secretString"]) == {"username": "admin", "password": PASSWORD}
    holders = [each for each in full if PASSWORD in json.dumps(each.inputs)]
    assert {each.urn for each in holders} == {secret.urn, kept.urn}
    assert "stringData" in secret.secrets
    assert "secretString" in kept.secrets
    values = charts(full)[versions.PROMETHEUS.name].inputs["values"]
    assert values["grafana"]["admin"] == {"existingSecret": ADMIN}
    assert full.waits_for(charts(full)[versions.PROMETHEUS.name], secret)
    assert full.exports["grafanaPassword"] == PASSWORD


def test_the_next_stack_of_this_name_can_have_its_secret_too(full: Recorded) -> None:
    secret = full.one("aws:secretsmanager/secret:Secret").inputs
    assert "name" not in secret, "a deleted secret holds its name for days"
    assert 7 <= secret["recoveryWindowInDays"] <= 30  # what Secrets Manager takes


def test_every_dashboard_is_where_grafana_finds_it(full: Recorded) -> None:
    maps = [each.inputs for each in own(full) if each.type == "kubernetes:core/v1:ConfigMap"]
    assert len(maps) == len(list(DASHBOARDS.glob("*.json"))) == 5
    for each in maps:
        assert each["metadata"]["labels"] == {"grafana_dashboard": "1"}  # the chart's sidecar.dashboards.label
        ((name, text),) = each["data"].items()
        assert name.endswith(".json")
        assert json.loads(text)["panels"]


def test_the_rules_are_those_of_the_file(full: Recorded) -> None:
    (size, *groups) = full.one("kubernetes:monitoring.coreos.com/v1:PrometheusRule").inputs["spec"]["groups"]
    assert groups == yaml.safe_load(ALERTS.read_text())["groups"]
    assert size["rules"][0]["expr"] == f"vector({4800 * 2**30})"


def test_neuron_monitor_is_on_accelerator_nodes_and_on_no_other(full: Recorded) -> None:
    spec = full.one("kubernetes:apps/v1:DaemonSet", "neuron-agents").inputs["spec"]["template"]["spec"]
    (term,) = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [
        {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": ["trn1.32xlarge"]}
    ]
    taints = {
        taint["key"] for group in full.of("aws:eks/nodeGroup:NodeGroup") for taint in group.inputs.get("taints", [])
    }
    assert taints <= {each["key"] for each in spec["tolerations"]}
    (container,) = spec["containers"]
    assert container["image"] == versions.NEURON_MONITOR
    assert {"requests", "limits"} <= set(container["resources"])


def test_neuron_monitor_is_scraped_with_the_nodes_name(full: Recorded) -> None:
    monitor = full.one("kubernetes:monitoring.coreos.com/v1:ServiceMonitor").inputs["spec"]
    service = full.one("kubernetes:core/v1:Service", "neuron-service").inputs
    pods = full.one("kubernetes:apps/v1:DaemonSet", "neuron-agents").inputs["spec"]["template"]
    (endpoint,) = monitor["endpoints"]
    assert monitor["selector"]["matchLabels"] == service["metadata"]["labels"]
    assert service["spec"]["selector"] == pods["metadata"]["labels"]
    (port,) = service["spec"]["ports"]
    (container,) = pods["spec"]["containers"]
    assert (endpoint["port"], port["targetPort"]) == (port["name"], container["ports"][0]["name"])
    assert [each["targetLabel"] for each in endpoint["relabelings"]] == ["node"]


def test_the_exporter_may_read_metrics_and_asks_for_those_of_this_file_system(full: Recorded) -> None:
    values = charts(full)[versions.CLOUDWATCH_EXPORTER.name].inputs["values"]
    file_system = full.one("aws:fsx/lustreFileSystem:LustreFileSystem")
    assert yaml.safe_load(values["config"]) == jobs("us-west-2", file_system.id)
    (statement,) = read_metrics()["Statement"]
    assert statement["Action"] == ["cloudwatch:GetMetricStatistics"]  # what its static jobs call
    identities = full.of("aws:eks/podIdentityAssociation:PodIdentityAssociation", "observability-fsx-association")
    (identity,) = (each.inputs for each in identities)
    assert (identity["namespace"], identity["serviceAccount"]) == (NAMESPACE, values["serviceAccount"]["name"])


def test_free_space_is_not_summed_over_minutes() -> None:
    (static,) = jobs("us-west-2", "fs-1")["static"]
    (free,) = (metric for metric in static["metrics"] if metric["name"] == "FreeDataStorageCapacity")
    assert free["period"] == 60


def test_logs_go_to_a_group_that_forgets_and_to_no_other(full: Recorded) -> None:
    group = full.one(GROUP, "logs-group")
    assert group.inputs["name"] == "/llama-trainium/us-west-2/pods"
    assert group.inputs["retentionInDays"] == 30  # cluster.logRetentionDays
    fluent_bit = charts(full)[versions.FLUENT_BIT.name]
    config = fluent_bit.inputs["values"]["config"]
    assert config == {"inputs": INPUTS, "filters": FILTERS, "outputs": output("us-west-2", group.inputs["name"])}
    assert "auto_create_group Off" in config["outputs"]
    (statement,) = write_logs(group.outputs["arn"])["Statement"]
    assert all(resource.startswith(group.outputs["arn"]) for resource in statement["Resource"])
    assert full.waits_for(
        fluent_bit, full.one("aws:eks/podIdentityAssociation:PodIdentityAssociation", "logs-association")
    )
    assert fluent_bit.inputs["values"]["tolerations"] == [{"operator": "Exists"}]


def test_nobody_outside_reaches_what_asks_for_no_password(full: Recorded) -> None:
    policy = full.one("kubernetes:networking.k8s.io/v1:NetworkPolicy", "observability-within").inputs
    assert policy["metadata"]["namespace"] == NAMESPACE
    assert policy["spec"] == {
        "podSelector": {},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {}}]}],
    }


def test_what_is_ours_asks_for_resources() -> None:
    values: Any = prometheus_values(full=True)
    for resources in (
        values["prometheus"]["prometheusSpec"]["resources"],
        values["alertmanager"]["alertmanagerSpec"]["resources"],
        values["prometheusOperator"]["resources"],
        values["grafana"]["resources"],
        values["kube-state-metrics"]["resources"],
        values["prometheus-node-exporter"]["resources"],
    ):
        assert set(resources["requests"]) == {"cpu", "memory"}
        assert "memory" in resources["limits"]


def test_stages_do_not_wait_for_it(full: Recorded) -> None:
    """What only looks on holds up no run."""
    jobs_made = full.of("kubernetes:ray.io/v1:RayJob")
    assert jobs_made
    assert not any(full.waits_for(job, charts(full)[versions.PROMETHEUS.name]) for job in jobs_made)
