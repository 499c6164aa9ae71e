"""Operators and plugins: which charts with which values, in which order, and how a chart is installed."""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pytest
import yaml
from base_platform import ZONES, build_base
from mocks import Recorded, Registered, run

from infra import versions
from infra.devices import DevicePlugins
from infra.ingress import LoadBalancerController
from infra.mpi_operator import DEFINITION
from infra.operators import Operators
from infra.settings import Settings

RELEASE, NAMESPACE = "kubernetes:helm.sh/v3:Release", "kubernetes:core/v1:Namespace"
DEPLOYMENT, FILE = "kubernetes:apps/v1:Deployment", "kubernetes:yaml/v2:ConfigFile"
GROUPS = [
    {"name": "small", "instance_type": "trn1.2xlarge", "max": 1},
    {"name": "large", "instance_type": "trn1.32xlarge", "max": 4},
]


def make(gang: bool = True, **given: Any) -> Recorded:
    """What operators, plugins and the ingress controller register on the platform."""
    section = {
        "region": "us-west-2",
        "cost_centre": "research",
        "network": {"zones": ZONES},
        "accelerators": GROUPS,
        **given,
    }
    settings = Settings.model_validate(section).with_derived()

    def program() -> None:
        network, cluster, core, addons = build_base()
        ready: list[pulumi.Resource] = [core.node_group, addons.dns]
        Operators("operators", settings, cluster.k8s, ready, gang)
        DevicePlugins("devices", settings, cluster, ready)
        LoadBalancerController("ingress", settings, network, cluster, ready)

    return run(program)


@pytest.fixture(scope="module")
def made() -> Recorded:
    return make()


def release(recorded: Recorded, name: str) -> Registered:
    found = [each for each in recorded.of(RELEASE) if each.inputs["name"] == name]
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def test_every_chart_is_pinned_and_from_its_own_repository(made: Recorded) -> None:
    seen = {
        each.inputs["name"]: (
            each.inputs["chart"],
            each.inputs.get("repositoryOpts", {}).get("repo"),
            each.inputs["version"],
        )
        for each in made.of(RELEASE)
    }
    charts = [
        versions.KUBERAY,
        versions.VOLCANO,
        versions.EFA_PLUGIN,
        versions.NEURON_PLUGIN,
        versions.LOAD_BALANCER_CONTROLLER,
    ]
    expected = {}
    for chart in charts:
        oci = chart.repository.startswith("oci://")
        expected[chart.name] = (
            f"{chart.repository}/{chart.name}" if oci else chart.name,
            None if oci else chart.repository,
            chart.version,
        )
    assert seen == expected


@pytest.mark.parametrize("mirror", ["https://charts.example.com/all", "http://127.0.0.1:8879"])
def test_a_mirror_stands_in_for_every_repository(mirror: str) -> None:
    recorded = make(charts={"mirror": mirror})
    for each in recorded.of(RELEASE):
        assert each.inputs["chart"] == each.inputs["name"]
        assert each.inputs["repositoryOpts"] == {"repo": mirror}
    assert recorded.one(FILE).inputs["file"] == f"{mirror}/mpi-operator-{versions.MPI_OPERATOR}.yaml"


def test_a_registry_as_a_mirror_has_charts_but_no_files() -> None:
    recorded = make(charts={"mirror": "oci://registry.example.com/charts"})
    for each in recorded.of(RELEASE):
        assert each.inputs["chart"] == f"oci://registry.example.com/charts/{each.inputs['name']}"
        assert "repositoryOpts" not in each.inputs
    assert recorded.one(FILE).inputs["file"] == DEFINITION


def test_the_definition_of_mpijob_is_of_the_operators_version() -> None:
    assert f"/v{versions.MPI_OPERATOR}/" in DEFINITION


def test_a_failed_release_leaves_nothing_that_stops_the_next(made: Recorded) -> None:
    for each in made.of(RELEASE):
        assert each.inputs["atomic"] is True
        assert each.inputs["cleanupOnFail"] is True
        assert each.inputs["timeout"] >= 300
        # A namespace that Helm makes stays behind on destroy.
        assert not each.inputs.get("createNamespace")


def test_charts_wait_for_nodes_and_dns_and_are_in_their_own_namespaces(made: Recorded) -> None:
    ready = [made.one("aws:eks/nodeGroup:NodeGroup"), made.one("aws:eks/addon:Addon", "coredns")]
    provider = made.one("pulumi:providers:kubernetes")
    for each in made.of(RELEASE):
        assert all(made.waits_for(each, other) for other in ready), each
        assert each.provider == provider.urn
        assert each.inputs["namespace"] in ("kube-system", "volcano-system", "ray-system")
    for name in ("volcano-system", "ray-system", "mpi-operator"):
        (namespace,) = (each for each in made.of(NAMESPACE) if each.inputs["metadata"]["name"] == name)
        users = [each for each in made if each.inputs.get("namespace") == name]
        users += [each for each in made if each.inputs.get("metadata", {}).get("namespace") == name]
        assert users
        assert all(made.waits_for(user, namespace) for user in users)


def test_volcano_is_there_before_those_that_watch_its_gangs(made: Recorded) -> None:
    volcano = release(made, "volcano")
    assert made.waits_for(release(made, "kuberay-operator"), volcano)
    assert made.waits_for(made.one(DEPLOYMENT), volcano)
    assert made.waits_for(made.one(DEPLOYMENT), made.one(FILE))
    # And nothing else waits for anything it does not need.
    for name in ("neuron-helm-chart", "aws-efa-k8s-device-plugin", "aws-load-balancer-controller"):
        assert not made.waits_for(release(made, name), volcano)


def test_a_gang_that_does_not_fit_whole_never_reaches_allocation(made: Recorded) -> None:
    """Volcano 1.15 marks the part of a gang that fits as schedulable, and an autoscaler then adds no nodes."""
    values = release(made, "volcano").inputs["values"]["custom"]
    scheduler = yaml.safe_load(values["scheduler_config_override"])
    actions = [action.strip() for action in scheduler["actions"].split(",")]
    assert actions.index("enqueue") < actions.index("allocate")
    plugins = {plugin["name"]: plugin for tier in scheduler["tiers"] for plugin in tier["plugins"]}
    assert {"gang", "overcommit", "predicates", "proportion"} <= set(plugins)
    assert plugins["overcommit"]["arguments"] == {"overcommit-factor": 1.0}
    assert values["leader_elect_enable"] is True


def test_jobs_may_share_a_cluster_where_there_are_no_gangs() -> None:
    """With any batch scheduler KubeRay refuses a RayJob with a clusterSelector (FACTS of KubeRay 1.7)."""
    assert release(make(gang=False), "kuberay-operator").inputs["values"]["batchScheduler"] == {"name": ""}


def test_the_operators_make_gangs(made: Recorded) -> None:
    assert release(made, "kuberay-operator").inputs["values"]["batchScheduler"] == {"name": "volcano"}
    (container,) = made.one(DEPLOYMENT).inputs["spec"]["template"]["spec"]["containers"]
    assert "--gang-scheduling=volcano" in container["args"]
    assert container["image"].endswith(f":{versions.MPI_OPERATOR}")


def test_what_is_ours_has_requests_and_limits(made: Recorded) -> None:
    volcano = release(made, "volcano").inputs["values"]["custom"]
    (container,) = made.one(DEPLOYMENT).inputs["spec"]["template"]["spec"]["containers"]
    resources = [volcano[f"{part}_resources"] for part in ("scheduler", "controller", "admission")]
    resources += [release(made, "kuberay-operator").inputs["values"]["resources"], container["resources"]]
    for each in resources:
        assert set(each["requests"]) == {"cpu", "memory"}
        assert "memory" in each["limits"]


def test_the_mpi_operator_may_do_what_it_does_and_no_more(made: Recorded) -> None:
    role = made.one("kubernetes:rbac.authorization.k8s.io/v1:ClusterRole")
    rules = role.inputs["rules"]
    verbs = {
        (group, resource): set(rule["verbs"])
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert not any("*" in part for rule in rules for part in (rule["apiGroups"], rule["resources"], rule["verbs"]))
    assert verbs[("kubeflow.org", "mpijobs")] == {"get", "list", "watch"}
    assert "delete" in verbs[("", "pods")]
    assert "delete" not in verbs[("", "secrets")]
    own = made.one("kubernetes:rbac.authorization.k8s.io/v1:Role")
    assert own.inputs["metadata"]["namespace"] == "mpi-operator"
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        binding = made.one(f"kubernetes:rbac.authorization.k8s.io/v1:{kind}")
        (subject,) = binding.inputs["subjects"]
        assert (subject["name"], subject["namespace"]) == ("mpi-operator", "mpi-operator")
        # It is gone before its permissions are.
        assert made.waits_for(made.one(DEPLOYMENT), binding)


def test_operators_that_are_present_are_left_alone() -> None:
    recorded = make(operators="present")
    assert {each.inputs["name"] for each in recorded.of(RELEASE)} == {
        "neuron-helm-chart",
        "aws-efa-k8s-device-plugin",
        "aws-load-balancer-controller",
    }
    assert not recorded.of(DEPLOYMENT)
    assert not recorded.of(FILE)
    assert not recorded.of(NAMESPACE)


def test_the_efa_plugin_runs_on_the_groups_with_efa(made: Recorded) -> None:
    values = release(made, "aws-efa-k8s-device-plugin").inputs["values"]
    assert values["supportedInstanceLabels"] == {"values": ["trn1.32xlarge"]}
    assert {"key": "aws.amazon.com/neuron", "operator": "Exists", "effect": "NoSchedule"} in values["tolerations"]
    without = make(accelerators=GROUPS[:1])
    assert "aws-efa-k8s-device-plugin" not in {each.inputs["name"] for each in without.of(RELEASE)}


def policies(recorded: Recorded) -> list[dict[str, Any]]:
    return [
        json.loads(each.inputs["policy"])
        for each in recorded.of("aws:iam/rolePolicy:RolePolicy")
        if recorded.inside(each, "llama-trainium:infra:DevicePlugins")
    ]


def actions_of(policy: dict[str, Any]) -> set[str]:
    return {action for statement in policy["Statement"] for action in statement["Action"]}


@pytest.mark.parametrize(
    ("detector", "recovery", "allowed"),
    [
        (False, False, None),
        (True, False, {"cloudwatch:PutMetricData"}),
        (
            True,
            True,
            {
                "cloudwatch:PutMetricData",
                "autoscaling:DescribeAutoScalingInstances",
                "autoscaling:SetInstanceHealth",
                "ec2:DescribeInstances",
            },
        ),
    ],
)
def test_detector_and_recovery_are_switchable(detector: bool, recovery: bool, allowed: set[str] | None) -> None:
    recorded = make(neuron={"node_problem_detector": detector, "node_recovery": recovery})
    values = release(recorded, "neuron-helm-chart").inputs["values"]
    assert values["npd"]["enabled"] is detector
    assert values["npd"]["nodeRecovery"]["enabled"] is recovery
    assert values["scheduler"]["enabled"] is False
    assert [actions_of(policy) for policy in policies(recorded)] == ([allowed] if allowed else [])


def test_recovery_touches_instances_of_this_cluster_only() -> None:
    recorded = make(neuron={"node_recovery": True})
    (policy,) = policies(recorded)
    (statement,) = (each for each in policy["Statement"] if "autoscaling:SetInstanceHealth" in each["Action"])
    assert statement["Condition"] == {"StringEquals": {"aws:ResourceTag/eks:cluster-name": "llama-trainium-dev"}}


def test_pods_with_permissions_start_after_they_have_them(made: Recorded) -> None:
    associations = {
        each.inputs["serviceAccount"]: each for each in made.of("aws:eks/podIdentityAssociation:PodIdentityAssociation")
    }
    for account, chart in (
        ("node-problem-detector", "neuron-helm-chart"),
        ("aws-load-balancer-controller", "aws-load-balancer-controller"),
    ):
        association = associations[account]
        assert association.inputs["namespace"] == release(made, chart).inputs["namespace"] == "kube-system"
        assert made.waits_for(release(made, chart), association)
    assert release(made, "neuron-helm-chart").inputs["values"]["npd"]["namespaceOverride"] == "kube-system"


def test_the_load_balancer_controller_asks_no_node_where_it_is(made: Recorded) -> None:
    values = release(made, "aws-load-balancer-controller").inputs["values"]
    assert values["region"] == "us-west-2"
    assert values["vpcId"] == made.one("aws:ec2/vpc:Vpc").id
    assert values["clusterName"] == "llama-trainium-dev"
    assert values["serviceAccount"] == {"name": "aws-load-balancer-controller"}
    # It would refuse other charts' services until it is ready.
    assert values["enableServiceMutatorWebhook"] is False
