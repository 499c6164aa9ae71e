"""Settings of a stack: what is valid, in which words the rest is refused, and that nothing else ever happens."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given
from hypothesis import settings as effort
from hypothesis import strategies as st
from stack_configs import GOOD, changed, raw_config, read_raw

from stack_settings import SECRETS, AwsStack
from training.errors import UserError

ROOT = Path(__file__).parents[2]
STACK_FILES = sorted({*ROOT.glob("Pulumi.*.yaml")} - {ROOT / "Pulumi.local.yaml"})  # those on AWS
DIGEST = "registry.example.com/team/train@sha256:" + "0" * 64


def read(config: dict[str, Any] = GOOD, **more: Any) -> AwsStack:
    return aws(read_raw(raw_config(config), **more))


def aws(settings: object) -> AwsStack:
    assert isinstance(settings, AwsStack)
    return settings


def refusal(config: dict[str, Any], **more: Any) -> str:
    with pytest.raises(UserError) as caught:
        read(config, **more)
    return str(caught.value)


GROUP = "accelerators/0"
NO_CIDR = "expected a network such as 10.40.0.0/20"
BAD = yaml.safe_load((Path(__file__).parent / "bad_configurations.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", BAD, ids=[case["says"][:60] for case in BAD])
def test_a_bad_configuration_is_refused(case: dict[str, Any]) -> None:
    assert refusal(changed(case["set"])) == f"llama-trainium:{case['says']}"


def test_there_are_as_many_bad_configurations_as_the_issue_asks_for() -> None:
    assert len({case["says"] for case in BAD}) >= 40


def test_too_many_tags_are_refused() -> None:
    tags = {f"key{number}": "" for number in range(41)}
    found = refusal(changed({"tags": tags}))
    assert (
        found == f"llama-trainium:tags: {str(tags)[:90]}... ({len(str(tags))} characters), expected at most 40 of them"
    )


def test_every_mistake_has_its_line() -> None:
    config = changed(
        {"network/cidr": "x", "storage/sizeGib": 1, "nettwork": 1, f"{GROUP}/min": 5, "region": "us-west-2"}
    )
    assert refusal(config, stack="Dev").split("\n") == [
        "llama-trainium:nettwork: unknown key, did you mean network?",
        "stack: Dev, expected at most 24 of a-z, 0-9 and -, a letter first and no - last",
        f"llama-trainium:network.cidr: x, {NO_CIDR}",
        "llama-trainium:accelerators[0].min: 5, expected at most desired (0)",
        "llama-trainium:storage.sizeGib: 1, expected 1200, 2400 or a larger multiple of 2400, which FSx offers",
    ]


def test_mistakes_over_several_groups_come_together_too() -> None:
    config = changed({"network/zones/1": "use1-az6", "storage/zone": "usw2-az9", "training/nodes": 9})
    assert len(refusal(config).split("\n")) == 3


def test_two_groups_of_one_name_are_refused() -> None:
    group = {"name": "trn1", "instanceType": "trn1.2xlarge", "max": 1}
    lines = refusal(changed({"accelerators/1": group})).split("\n")
    assert lines == [
        f"llama-trainium:accelerators[{index}].name: trn1, expected a name that no other group has" for index in (0, 1)
    ]


def test_a_key_of_another_project_that_looks_like_this_one() -> None:
    raw = raw_config(GOOD) | {"lama-trainium:region": "us-east-1", "aws:region": "us-east-1", "pulumi:disable": "x"}
    with pytest.raises(UserError) as caught:
        read_raw(raw)
    assert str(caught.value) == "lama-trainium:region: unknown project, did you mean llama-trainium:region?"


def test_odd_keys_and_values_stay_on_their_line() -> None:
    lines = refusal(changed({"a\nb": 1, "tags": {"c\nd": "e", "f": "g\nh"}, "network/zones/1": "i\nj"})).split("\n")
    assert [line.split(" ")[0] for line in lines] == ["llama-trainium:'a\\nb':", "llama-trainium:tags.f:"]
    assert refusal(changed({"training/settings/train": {"a\nb": 1}})).startswith(
        "llama-trainium:training.settings.train.'a\\nb': unknown setting, expected one of seq_length"
    )


def test_structured_values_may_be_typed_as_yaml() -> None:
    raw = raw_config(GOOD) | {"llama-trainium:network": "zones: [usw2-az4, usw2-az3]\nnat: per-zone"}
    assert read_raw(raw).network.nat == "per-zone"


def test_an_unquoted_version_is_taken() -> None:
    assert read(changed({"cluster": {"version": 1.35}})).cluster.version == "1.35"


def test_an_empty_group_is_as_good_as_none() -> None:
    assert read(changed({"storage": None, "charts": {}})) == read()


GOOD_VALUES = [
    ("charts/mirror", "https://charts.example.com/all/", "https://charts.example.com/all"),
    ("charts/mirror", "oci://registry.example.com:5000/charts", "oci://registry.example.com:5000/charts"),
    ("charts/mirror", "http://127.0.0.1:8080", "http://127.0.0.1:8080"),
    ("image/prebuilt", DIGEST, DIGEST),
    ("image/base", "registry.example.com:5000/neuron:2.28", "registry.example.com:5000/neuron:2.28"),
    (
        "image/base",
        "public.ecr.aws/neuron/train:1@sha256:" + "0" * 64,
        "public.ecr.aws/neuron/train:1@sha256:" + "0" * 64,
    ),
    ("cluster/admins", ["arn:aws:iam::123456789012:role/team/Admin"], ["arn:aws:iam::123456789012:role/team/Admin"]),
    ("coreNodes/instanceType", "c7i-flex.8xlarge", "c7i-flex.8xlarge"),
    ("coreNodes/instanceType", "m6id.metal", "m6id.metal"),
    ("tags", {"team": "", "Grüße": "an alle: a/b=c"}, {"team": "", "Grüße": "an alle: a/b=c"}),
    ("storage/sizeGib", "4800", 4800),
]


@pytest.mark.parametrize(("path", "value", "read_as"), GOOD_VALUES, ids=[f"{path}={v}" for path, v, _ in GOOD_VALUES])
def test_a_good_value_is_taken(path: str, value: Any, read_as: Any) -> None:
    found: Any = read(changed({path: value})).model_dump(by_alias=True)
    for part in path.split("/"):
        found = found[part]
    assert found == read_as


def test_the_world_may_reach_the_api_by_consent_only() -> None:
    open_to_all = {"cluster/publicAccessCidrs": ["0.0.0.0/0"], "cluster/iKnowTheApiIsOpenToTheWorld": True}
    assert str(read(changed(open_to_all)).cluster.public_access_cidrs[0]) == "0.0.0.0/0"


def test_what_is_left_out_is_derived() -> None:
    small = {"name": "small", "instanceType": "trn1.2xlarge", "max": 1, "zone": "usw2-az3"}
    settings = read(changed({"accelerators/1": small}))
    trn1, other = settings.accelerators
    assert (trn1.zone, trn1.efa, trn1.efa_interfaces) == ("usw2-az4", True, 8)
    assert (other.zone, other.efa, other.efa_interfaces) == ("usw2-az3", False, 0)
    assert (settings.training.group, settings.training.nodes, settings.storage.zone) == ("trn1", 2, "usw2-az4")
    tiny = {"preset": "tiny", "group": "small", "settings": {"parallel": {"tensor_parallel_size": 2}}}
    second = read(changed({"accelerators/1": small, "training": tiny}))
    assert (second.storage.zone, second.training.nodes) == ("usw2-az3", 1)
    assert second.training_settings().parallel.workers == 2


def test_efa_may_be_switched_off() -> None:
    assert read(changed({f"{GROUP}/efa": False})).accelerators[0].efa_interfaces == 0


def test_training_settings_are_the_presets_with_the_nodes_workers() -> None:
    training = read(changed({"training/settings/train/steps": 77})).training_settings()
    assert (training.parallel.workers, training.parallel.data_parallel_size, training.run.backend) == (64, 16, "neuron")
    assert (training.train.steps, training.model.hidden_size) == (77, 256)


def test_every_resource_gets_the_tags() -> None:
    assert read(changed({"tags": {"team": "llm"}})).all_tags("dev") == {
        "project": "llama-trainium",
        "stack": "dev",
        "cost-centre": "research",
        "team": "llm",
    }


def test_the_token_is_read_as_a_secret_and_never_shown() -> None:
    raw = raw_config(GOOD) | {"llama-trainium:huggingFaceToken": "hf_abc"}
    settings = read_raw(raw, ["llama-trainium:huggingFaceToken"])
    assert settings.hugging_face_token is not None
    assert settings.hugging_face_token.get_secret_value() == "hf_abc"
    assert "hf_abc" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"


@pytest.mark.parametrize("token", ["two words", "", "line\n", "\ud800", "ü"])
def test_a_token_that_is_none_is_refused_without_showing_it(token: str) -> None:
    with pytest.raises(UserError, match=r"^llama-trainium:huggingFaceToken: expected (one word|printable)") as caught:
        read_raw(raw_config(GOOD) | {"llama-trainium:huggingFaceToken": token}, ["llama-trainium:huggingFaceToken"])
    assert not token or token not in str(caught.value)


def test_only_secrets_are_given_as_secrets() -> None:
    with pytest.raises(UserError) as caught:
        read_raw(raw_config(GOOD), ["llama-trainium:region"])
    assert str(caught.value) == (
        "llama-trainium:region: a secret, expected plain text: it ends in the plain state of resources"
    )


@pytest.mark.parametrize("name", ["Dev", "1st", "a-", "a" * 25, "", "a.b", "a\nb"])
def test_a_stack_whose_names_aws_would_refuse(name: str) -> None:
    assert refusal(GOOD, stack=name).startswith("stack: ")


@pytest.mark.parametrize("path", STACK_FILES, ids=[path.stem for path in STACK_FILES])
def test_stack_files_are_valid(path: Path) -> None:
    """Each with the token that its first lines ask for, and none with more than those ask for."""
    text = path.read_text(encoding="utf-8")
    raw = {key: v if isinstance(v, str) else json.dumps(v) for key, v in yaml.safe_load(text)["config"].items()}
    secrets = {"llama-trainium:huggingFaceToken": "hf_x"} if "huggingFaceToken" in text else {}
    stack = path.name.split(".")[1]
    settings = read_raw(raw | secrets, list(secrets), stack)
    assert settings.region in ("us-west-2", stack)
    assert settings.cluster.public_access_cidrs == []
    assert settings.training_settings().parallel.workers % settings.training_group.type.cores == 0
    if secrets:
        with pytest.raises(UserError, match="huggingFaceToken: missing"):
            read_raw(raw, [], stack)


def test_the_stack_files_that_the_issue_names() -> None:
    assert {"dev", "us-east-1", "us-east-2", "us-west-2"} <= {path.name.split(".")[1] for path in STACK_FILES}
    seven = yaml.safe_load((ROOT / "Pulumi.us-west-2.yaml").read_text(encoding="utf-8"))["config"]
    settings = read_raw(
        raw_config({key.partition(":")[2]: value for key, value in seven.items()} | {"huggingFaceToken": "x"}),
        ["llama-trainium:huggingFaceToken"],
    )
    parallel = settings.training_settings().parallel
    assert (settings.training.nodes, parallel.tensor_parallel_size, parallel.data_parallel_size) == (16, 8, 64)


# Anything at all: a stack's config is text by key, most of it JSON.
MARK = "hf-S3cret-Mark"
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
words = st.sampled_from(
    ["trn1", "trn1.2xlarge", "10.0.0.0/8", "usw2-az4", "none", "efa", "0", "-1", "1e400", "a\nb", "~", ""]
)
anything = st.recursive(
    scalars | words,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words | st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PATHS = sorted({path for case in BAD for path in case["set"]})


@st.composite
def any_config(draw: st.DrawFn) -> tuple[dict[str, str], list[str]]:
    """A good config with some values replaced by anything, some of them not even JSON; and which keys are secrets."""
    config = copy.deepcopy(GOOD)
    for path in draw(st.lists(st.sampled_from(PATHS), min_size=1, max_size=4)):
        value = draw(anything)
        try:
            config = changed({path: value}, config)
        except (AttributeError, TypeError, ValueError, IndexError):  # an earlier change left no group there
            continue
    raw = raw_config(config)
    if draw(st.booleans()):
        raw[f"llama-trainium:{draw(st.sampled_from(['network', 'storage', 'training', 'odd']))}"] = draw(
            st.text(max_size=40)
        )
    if draw(st.booleans()):
        raw["llama-trainium:huggingFaceToken"] = draw(
            st.sampled_from([MARK, f"{MARK} {MARK}", f"{MARK}\n", f"ü{MARK}"])
        )
    hidden = draw(st.sampled_from([None, "storage", "costCentre", "network"]))
    secrets = ["llama-trainium:huggingFaceToken"] if draw(st.booleans()) else []
    if hidden:
        raw[f"llama-trainium:{hidden}"] = draw(st.sampled_from([MARK, json.dumps({"zone": MARK}), json.dumps([MARK])]))
        secrets.append(f"llama-trainium:{hidden}")
    return raw, secrets


@given(any_config())
@example(({"llama-trainium:network": "[" * 100_000}, []))
@example(({"llama-trainium:network": "&a [*a]"}, []))
@example(({"llama-trainium:network": '{"cidr": ' + "9" * 5000 + "}"}, []))
@example(({"llama-trainium:network": '{"cidr": "' + "9" * 5000 + '/9"}'}, []))
@effort(max_examples=300, deadline=None)
def test_any_config_ends_in_settings_or_in_lines(given: tuple[dict[str, str], list[str]]) -> None:
    raw, secrets = given
    try:
        settings = read_raw(raw, secrets)
    except UserError as error:
        said = str(error)
    else:
        said = ""
        training = settings.training_settings()
        assert training.parallel.workers == settings.training.nodes * settings.training_group.type.cores
        assert MARK not in repr(settings)
    assert MARK not in said
    for line in said.splitlines():
        assert re.match(r"llama-trainium:\S", line), line
        assert re.search(r"expected |did you mean ", line), line
        assert line.isprintable()
        assert len(line) < 1000


def test_secrets_are_keys_of_the_settings() -> None:
    assert set(SECRETS) <= {field.alias for field in AwsStack.model_fields.values()}
