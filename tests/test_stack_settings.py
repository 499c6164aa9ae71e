"""Settings that span the rooms, on both platforms: what is valid, what is refused and in which words."""

from __future__ import annotations

import copy
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pulumi
import pytest
import yaml
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from mocks import Recorded, run_program
from stack_configs import GOOD, GOOD_EXISTING, changed, raw_config, read_raw

from infra.catalog import INSTANCE_TYPES, cpu_node
from infra.run_settings import OF_A_CHECKPOINT
from stack_settings import SECRETS, AwsStack, ExistingStack, usable
from training.checks import ORDER
from training.errors import UserError
from workloads.sizes import gang_sizes

ROOT = Path(__file__).parents[1]
BAD = yaml.safe_load((Path(__file__).parent / "bad_stacks.yaml").read_text(encoding="utf-8"))
MARK = "S3cret-Mark"


@pytest.fixture(scope="module", autouse=True)
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A kubeconfig with a cluster that answers, one that does not, and one without an address."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as closed, pytest.MonkeyPatch.context() as m:
        closed.bind(("127.0.0.1", 0))  # and not listening: connections are refused for as long as it is open
        ports = {"here": server.getsockname()[1], "closed": closed.getsockname()[1]}
        clusters = [{"name": n, "cluster": {"server": f"http://127.0.0.1:{port}"}} for n, port in ports.items()]
        contexts = [{"name": n, "context": {"cluster": n, "user": n}} for n in (*ports, "nowhere")]
        file = tmp_path_factory.mktemp("kube") / "config"
        file.write_text(yaml.safe_dump({"clusters": clusters, "contexts": contexts}))
        m.setenv("KUBECONFIG", str(file))
        yield {"KUBECONFIG": str(file), "CLOSED": str(ports["closed"])}


def read(config: dict[str, Any], secrets: dict[str, str] | None = None, stack: str = "dev") -> Any:
    hidden = {f"llama-trainium:{key}": value for key, value in (secrets or {}).items()}
    return read_raw(raw_config(config) | hidden, list(hidden), stack)


@pytest.mark.parametrize("case", BAD, ids=[case["says"].split(",")[0] for case in BAD])
def test_a_bad_stack_is_refused(case: dict[str, Any], places: dict[str, str]) -> None:
    base = GOOD_EXISTING if case.get("platform") == "existing" else GOOD
    with pytest.raises(UserError) as caught:
        read(changed(case["set"], base), case.get("secrets"))
    said = case["says"]
    for word, value in places.items():
        said = said.replace(word, value)
    assert str(caught.value) == f"llama-trainium:{said}"


REFUSED_BY_PROGRAM = [case for case in BAD if "would wait for ever" in case["says"] or "does not (C" in case["says"]]


@pytest.mark.parametrize("case", REFUSED_BY_PROGRAM, ids=[case["says"].split(",")[0] for case in REFUSED_BY_PROGRAM])
def test_the_program_registers_nothing_for_a_bad_stack(case: dict[str, Any]) -> None:
    base = GOOD_EXISTING if case.get("platform") == "existing" else GOOD
    config = {f"llama-trainium:{key}": value for key, value in changed(case["set"], base).items()}
    recorded = Recorded()
    with pytest.raises(pulumi.RunError, match="llama-trainium:"):
        run_program(config, recorded=recorded)
    assert recorded.resources == []


def test_all_mistakes_come_at_once() -> None:
    config = changed(
        {"context": "closed", "training/preset": "x", "volume/hostPath": "/d", "workloads/resources/head/cpu": 5},
        GOOD_EXISTING,
    )
    with pytest.raises(UserError) as caught:
        read(config)
    assert [line.split(" ")[0] for line in str(caught.value).split("\n")] == [
        "llama-trainium:training.preset:",
        "llama-trainium:workloads.resources.head.cpu:",
        "llama-trainium:volume.hostPath:",
        "llama-trainium:context:",
    ]


def test_what_is_left_out_is_derived() -> None:
    found = read(GOOD, stack="lab").workloads
    assert (found.name, found.queue.name, found.ray_cluster.max_nodes) == ("lab", "lab", 2)
    assert found.tensorboard.enabled is False
    assert found.stages == ["prepare", "precompile", "train"]
    named = read(changed({"workloads": {"name": "seven"}}), {"tensorboardPassword": "open"}, "lab").workloads
    assert (named.name, named.queue.name, named.tensorboard.enabled) == ("seven", "seven", True)


def test_no_stage_at_all_is_a_platform() -> None:
    assert read(changed({"workloads/stages": []})).workloads.stages == []


def test_a_queue_may_hold_just_what_its_largest_gang_asks_for() -> None:
    enough = {"aws.amazon.com/neuron": 32, "vpc.amazonaws.com/efa": 16, "cpu": "225850m", "memory": "903.5Gi"}
    assert read(changed({"workloads/queue/capability": enough})).workloads.queue.capability["cpu"] == "225850m"


def test_nodes_are_described_as_pods_find_them() -> None:
    stack = read(GOOD)
    core, workers = stack.core_shape(), stack.worker_shape()
    assert (core.nodes, core.vcpus, core.memory_gib, core.neuron) == (4, 7, 28, 0)
    assert (workers.nodes, workers.vcpus, workers.memory_gib) == (2, 112, 448)
    assert (workers.neuron, workers.neuron_cores, workers.efa) == (16, 32, 8)
    assert workers.node_selector == {"llama-trainium/group": "trn1"}
    assert [each["key"] for each in workers.tolerations] == ["aws.amazon.com/neuron"]


def test_karpenter_adds_core_nodes() -> None:
    assert read(changed({"autoscaler": "karpenter"})).core_shape().nodes == 4 + 128 // 8


@pytest.mark.parametrize("kind", INSTANCE_TYPES)
def test_a_worker_leaves_room_on_its_node(kind: str) -> None:
    """What EKS keeps: https://github.com/awslabs/amazon-eks-ami, nodeadm's reserved resources, for 250 pods."""
    one = {"name": "one", "instanceType": kind, "max": 1}
    parallel = {"parallel": {"tensor_parallel_size": 2}, "train": {"micro_batch_size": 1, "global_batch_size": 64}}
    config = changed({"accelerators": [one], "training": {"preset": "tiny", "settings": parallel}})
    config["workloads"] = {"stages": ["prepare"]}  # a platform can have types that nothing trains on yet
    shape, machine = read(config).worker_shape(), INSTANCE_TYPES[kind]
    kept_cpus = 0.06 + 0.01 + 2 * 0.005 + 0.0025 * (machine.vcpus - 4)
    agents_cpus = 0.3
    assert machine.vcpus - kept_cpus - agents_cpus >= shape.vcpus > machine.vcpus / 2
    kept_gib = (255 + 11 * 250 + 100) / 1024
    assert machine.memory_gib * 0.98 - kept_gib >= shape.memory_gib - 1 > machine.memory_gib / 2


@pytest.mark.parametrize(
    ("kind", "has"),
    [
        ("m7i.2xlarge", (8, 32)),
        ("c7i-flex.8xlarge", (32, 64)),
        ("r6id.large", (2, 16)),
        ("t3.medium", (1, 2)),
        ("m6id.metal", (48, 192)),
        ("c8i.metal-48xl", (192, 384)),
        ("hpc7a.12xlarge", (48, 96)),
    ],
)
def test_core_nodes_have_what_their_names_say(kind: str, has: tuple[int, int]) -> None:
    assert cpu_node(kind) == has


@given(st.integers(1, 1024), st.integers(1, 32768))
def test_there_is_always_something_to_use(vcpus: int, memory_gib: int) -> None:
    found = usable(vcpus, memory_gib)
    assert min(found) >= 1
    assert all(part <= max(1, whole * 7 / 8) for part, whole in zip(found, (vcpus, memory_gib), strict=True))


FOLDERS = [
    # what changes, and whether store and run are others then
    ({"train": {"learning_rate": 5e-4}}, False, False),
    ({"train": {"steps": 100}}, False, False),
    ({"checkpoint": {"every": 7}}, False, False),
    ({"train": {"seed": 7}}, False, True),
    ({"model": {"num_hidden_layers": 2}}, False, True),
    ({"data": {"tokenizer": "train:1024"}}, True, True),
]


@pytest.mark.parametrize(("change", "store", "run"), FOLDERS, ids=[str(change) for change, _, _ in FOLDERS])
def test_folders_are_others_where_the_old_ones_could_not_be_gone_on_with(
    change: dict[str, Any], store: bool, run: bool
) -> None:
    before, after = (
        read(changed({"training/settings": settings}, GOOD_EXISTING)).training_settings() for settings in ({}, change)
    )
    assert (before.data.output != after.data.output) == store
    assert (before.run.dir != after.run.dir) == run


def test_what_a_checkpoint_keeps_is_what_training_says() -> None:
    assert set(OF_A_CHECKPOINT) == set(ORDER)


def test_folders_that_are_given_are_kept() -> None:
    given = {"run": {"dir": "runs/mine"}, "data": {"output": "/data/tokens/mine"}}
    found = read(changed({"training/settings": given}, GOOD_EXISTING)).training_settings()
    assert (str(found.run.dir), str(found.data.output)) == ("runs/mine", "/data/tokens/mine")


def test_secrets_are_keys_of_both_platforms() -> None:
    for model in (AwsStack, ExistingStack):
        assert set(SECRETS) <= {field.alias for field in model.model_fields.values()}
    config = changed({"workloads": {"redisAddress": "redis.example.com:6379"}}, GOOD_EXISTING)
    found = read(config, dict.fromkeys(SECRETS, MARK))
    assert found.redis_password.get_secret_value() == MARK
    assert MARK not in f"{found!r} {found} {found.model_dump_json()}"


def test_the_local_stack_fits_its_node() -> None:
    """With room left for what else runs on it; what does not fit at all is refused."""
    config = yaml.safe_load((ROOT / "Pulumi.local.yaml").read_text(encoding="utf-8"))["config"]
    raw = {key: value if isinstance(value, str) else json.dumps(value) for key, value in config.items()}
    found = read_raw(raw | {"llama-trainium:context": "here"}, [], "local")
    assert isinstance(found, ExistingStack)
    node = found.core_shape()
    assert (node.nodes, node.vcpus) == (1, 2)
    for stage in found.workloads.stages:
        assert sum(size.cpu for size in gang_sizes(found.workloads, stage, 1, node, node)) <= 1.5
    assert found.training_settings().run.backend == "cpu"
    assert found.workloads.train.wait == "finished"


def test_defaults_fit_a_cluster_of_one_node() -> None:
    read(changed({"nodes": {"count": 1}}, GOOD_EXISTING))


def test_a_kubeconfig_in_several_files(tmp_path: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As kubectl joins them: the first that has a name has it."""
    other = tmp_path / "other"
    cluster = {"name": "closed", "cluster": {"server": "http://127.0.0.1:1"}}
    other.write_text(yaml.safe_dump({"current-context": "closed", "clusters": [cluster]}))
    monkeypatch.setenv("KUBECONFIG", f"{places['KUBECONFIG']}:{other}:{tmp_path / 'none'}")
    read(GOOD_EXISTING)
    with pytest.raises(UserError, match=f"127.0.0.1:{places['CLOSED']}"):
        read(changed({"context": "REMOVED"}, GOOD_EXISTING))


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10) | st.sampled_from(["1Gi", "train"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
PATHS = sorted({(case.get("platform", "aws"), path) for case in BAD for path in case["set"]})


@given(st.data())
@effort(max_examples=300, deadline=None)
def test_any_stack_ends_in_settings_or_in_lines(data: st.DataObject) -> None:
    platform = data.draw(st.sampled_from(["aws", "existing"]))
    config = copy.deepcopy(GOOD if platform == "aws" else GOOD_EXISTING)
    paths = [path for on, path in PATHS if on == platform or path.startswith("workloads")]
    for path in data.draw(st.lists(st.sampled_from(paths), min_size=1, max_size=4)):
        try:
            config = changed({path: data.draw(anything)}, config)
        except (AttributeError, TypeError, ValueError, IndexError, KeyError):  # an earlier change left no group there
            continue
    secrets = {key: MARK for key in SECRETS if data.draw(st.booleans())}
    try:
        found = read(config, secrets)
    except UserError as error:
        for line in str(error).splitlines():
            assert re.match(r"llama-trainium:\S", line), line
            assert re.search(r"expected |did you mean ", line), line
            assert line.isprintable()
            assert MARK not in line
    else:
        core, workers = found.core_shape(), found.worker_shape()
        for stage in found.workloads.stages:
            first, *others = gang_sizes(found.workloads, stage, found.training.nodes, core, workers)
            assert first.cpu <= core.vcpus
            assert all(size.cpu <= workers.vcpus and size.memory_gib <= workers.memory_gib for size in others)
