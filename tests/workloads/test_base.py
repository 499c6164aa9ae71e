"""What stages stand on: security of the namespace, data that outlives the stack, secrets, and who reaches the pods."""

from __future__ import annotations

import json
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from mocks import Recorded, Registered, run
from schemas import definitions, is_object, mistakes

from workloads.base import Base, Secrets, queue_capability
from workloads.network_policies import open_to_load_balancers
from workloads.platform import NodeShape, Platform, VolumeSource
from workloads.settings import Workloads

CLAIM, VOLUME = "kubernetes:core/v1:PersistentVolumeClaim", "kubernetes:core/v1:PersistentVolume"
NAMESPACE, MAP = "kubernetes:core/v1:Namespace", "kubernetes:core/v1:ConfigMap"
POLICY, SECRET = "kubernetes:networking.k8s.io/v1:NetworkPolicy", "kubernetes:core/v1:Secret"
QUEUE = "kubernetes:scheduling.volcano.sh/v1beta1:Queue"
TRN1 = NodeShape("trn1", 4, 120, 480, neuron=16, neuron_cores=32, efa=8)
CPU = NodeShape("core", 1, 4, 8)
FOLDER = VolumeSource("10Gi", host_path="/srv/llama")
PLANTED = {"hugging_face_token": "hf_planted", "ray_token": "ray-planted", "redis_password": "redis-planted"}


def make(volume: VolumeSource = FOLDER, workers: NodeShape = TRN1, given: Any = None, **secrets: str) -> Recorded:
    """What a base with the settings `given` registers, with two stages' settings."""

    def program() -> None:
        operators = pulumi.CustomResource("tests:index:Operators", "operators")
        provider = k8s.Provider("k8s", kubeconfig="{}")
        image = pulumi.Output.from_input("image@sha256:" + "0" * 64)
        platform = Platform(provider, image, volume, workers, CPU, after=[operators])
        settings = Workloads.model_validate(given or {})
        base = Base("base", settings, platform, "dev", Secrets(**secrets))
        base.settings_map("prepare", {"data": {"source": "pydocs"}})
        base.settings_map("train", {"train": {"learning_rate": 0.001}})

    return run(program)


@pytest.fixture(scope="module")
def base() -> Recorded:
    return make(**PLANTED)


def everything_but(*kinds: str, of: Recorded) -> list[Registered]:
    return [each for each in of if is_object(each.type) and each.type not in kinds]


def test_objects_are_what_an_api_server_takes(base: Recorded) -> None:
    crds = definitions()
    for each in everything_but(of=base):
        assert mistakes(each.inputs, crds) == [], each


def test_all_is_made_in_the_cluster_after_what_pods_need_and_goes_before_it(base: Recorded) -> None:
    operators, provider = base.one("tests:index:Operators"), base.one("pulumi:providers:kubernetes")
    namespace = base.one(NAMESPACE)
    for each in everything_but(of=base):
        assert each.provider == provider.urn
        assert base.waits_for(each, operators), each
        if "namespace" in each.inputs["metadata"]:
            assert each.inputs["metadata"]["namespace"] == "llama-trainium"
            assert base.waits_for(each, namespace), each


def test_the_namespace_admits_no_privileged_pods(base: Recorded) -> None:
    labels = base.one(NAMESPACE).inputs["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "baseline"


def test_pods_have_no_token_of_the_kubernetes_api(base: Recorded) -> None:
    assert base.one("kubernetes:core/v1:ServiceAccount").inputs["automountServiceAccountToken"] is False


@pytest.mark.parametrize("mode", ["ReadWriteMany", "ReadWriteOnce"])
def test_a_folder_becomes_a_volume_that_outlives_its_claim(mode: Any) -> None:
    made = make(VolumeSource("7Gi", host_path="/srv/llama", access_mode=mode))
    volume, claim = made.one(VOLUME), made.one(CLAIM)
    assert volume.inputs["spec"]["persistentVolumeReclaimPolicy"] == "Retain"
    assert volume.inputs["spec"]["hostPath"]["path"] == "/srv/llama"
    assert claim.inputs["spec"]["volumeName"] == volume.inputs["metadata"]["name"]
    # Kubernetes binds the two only where these agree.
    for key in ("storageClassName", "accessModes"):
        assert claim.inputs["spec"][key] == volume.inputs["spec"][key]
    assert volume.inputs["spec"]["capacity"] == {"storage": "7Gi"}
    # Its size must never change (tests/engine/test_apiserver.py), so it is not the volume's.
    assert claim.inputs["spec"]["resources"]["requests"] == {"storage": "1Gi"}
    assert not claim.request.retainOnDelete


def test_the_platforms_volume_is_claimed_by_name() -> None:
    made = make(VolumeSource("1200Gi", pulumi.Output.from_input("storage-volume-1"), storage_class="storage"))
    spec = made.one(CLAIM).inputs["spec"]
    assert made.of(VOLUME) == []
    assert (spec["volumeName"], spec["storageClassName"]) == ("storage-volume-1", "storage")


@pytest.mark.parametrize("storage_class", [None, "standard"])
def test_a_claim_that_is_the_data_stays_on_destroy(storage_class: str | None) -> None:
    made = make(VolumeSource("10Gi", storage_class=storage_class))
    assert made.one(CLAIM).inputs["spec"].get("storageClassName") == storage_class
    assert made.one(CLAIM).request.retainOnDelete
    assert made.one(NAMESPACE).request.retainOnDelete  # which would take it along
    assert [each for each in made if each.request.retainOnDelete] == [made.one(NAMESPACE), made.one(CLAIM)]


def test_secrets_are_in_secrets_and_nowhere_else(base: Recorded) -> None:
    secrets = base.of(SECRET)
    assert sorted(json.dumps(each.inputs["stringData"]) for each in secrets) == sorted(
        json.dumps({key: PLANTED[name]})
        for key, name in (
            ("HF_TOKEN", "hugging_face_token"),
            ("auth_token", "ray_token"),
            ("password", "redis_password"),
        )
    )
    assert all("stringData" in each.secrets for each in secrets)
    for each in everything_but(SECRET, of=base):
        assert "planted" not in json.dumps(each.inputs)


def test_what_is_not_given_makes_no_secret() -> None:
    assert make().of(SECRET) == []


def test_settings_are_immutable_and_named_by_what_is_in_them(base: Recorded) -> None:
    train, prepare = base.one(MAP, "train").inputs, base.one(MAP, "prepare").inputs
    assert train["immutable"] is True
    assert yaml.safe_load(train["data"]["settings.yaml"]) == {"train": {"learning_rate": 0.001}}
    assert train["metadata"]["name"].startswith("settings-train-")
    assert train["metadata"]["name"].split("-")[-1] != prepare["metadata"]["name"].split("-")[-1]
    again = make().one(MAP, "train").inputs
    assert again["metadata"]["name"] == train["metadata"]["name"]


def test_the_queue_holds_the_devices_of_its_nodes_unless_told_otherwise(base: Recorded) -> None:
    assert base.one(QUEUE).inputs["metadata"]["name"] == "dev"
    assert base.one(QUEUE).inputs["spec"] == {
        "weight": 1,
        "reclaimable": False,
        "capability": {"aws.amazon.com/neuron": "64", "vpc.amazonaws.com/efa": "32"},
    }
    told = {"queue": {"name": "research", "weight": 3, "capability": {"aws.amazon.com/neuron": 32}}}
    queue = make(given=told).one(QUEUE).inputs
    assert queue["metadata"]["name"] == "research"
    assert (queue["spec"]["weight"], queue["spec"]["capability"]) == (3, {"aws.amazon.com/neuron": "32"})


def test_without_gangs_volcano_need_not_be_there() -> None:
    assert make(given={"gang": False, "rayCluster": {"enabled": True}}).of(QUEUE) == []


@given(
    nodes=st.integers(1, 1000),
    neuron=st.integers(0, 16),
    efa=st.integers(0, 16),
    asked=st.integers(0, 1000),
)
def test_a_queue_never_holds_up_a_gang_that_its_nodes_hold(nodes: int, neuron: int, efa: int, asked: int) -> None:
    capability = queue_capability(NodeShape("any", nodes, 8, 32, neuron=neuron, efa=efa))
    gang = min(asked, nodes)
    for name, each in (("aws.amazon.com/neuron", neuron), ("vpc.amazonaws.com/efa", efa)):
        assert gang * each <= int(capability.get(name, 10**9))


def test_stages_are_placed_first_and_push_nothing_out(base: Recorded) -> None:
    priority = base.one("kubernetes:scheduling.k8s.io/v1:PriorityClass").inputs
    assert priority["value"] > 0
    assert priority["preemptionPolicy"] == "Never"
    assert not priority.get("globalDefault")


def admits(recorded: Recorded, pod: dict[str, str], own: bool, other: dict[str, str], port: int) -> bool:
    """Whether the policies let a pod with the labels `other`, of the namespace or not, reach `port` of `pod`."""

    def chosen(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
        return selector is not None and all(labels.get(k) == v for k, v in selector.get("matchLabels", {}).items())

    selecting = [each.inputs["spec"] for each in recorded.of(POLICY) if chosen(each.inputs["spec"]["podSelector"], pod)]
    for rule in [rule for spec in selecting for rule in spec["ingress"]]:
        ports = {each["port"] for each in rule.get("ports", [{"port": port}])}
        peers = rule.get("from", [{"namespaceSelector": {}, "podSelector": {}}])
        if port in ports and any((own or "namespaceSelector" in p) and chosen(p["podSelector"], other) for p in peers):
            return True
    return not selecting


def test_only_the_namespace_and_the_operator_talk_to_ray(base: Recorded) -> None:
    head, worker = {"ray.io/node-type": "head"}, {"ray.io/node-type": "worker"}
    operator = {"app.kubernetes.io/name": "kuberay-operator"}
    for port in (6379, 8265, 10001, 22):
        assert admits(base, head, True, worker, port)
        assert admits(base, worker, True, {}, port)
        assert not admits(base, head, False, {}, port)
        assert not admits(base, worker, False, operator, port)
        assert admits(base, head, False, operator, port) == (port == 8265)


def test_a_page_is_open_on_its_own_port_only() -> None:
    spec = open_to_load_balancers({"app": "tensorboard"}, 6006)
    assert spec["podSelector"] == {"matchLabels": {"app": "tensorboard"}}
    assert spec["ingress"] == [{"ports": [{"protocol": "TCP", "port": 6006}]}]
