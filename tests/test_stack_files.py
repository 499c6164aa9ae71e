"""A stack file read without the engine says what the engine would read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mocks import ROOT
from pulumi.runtime.config import CONFIG
from stack_configs import GOOD, changed, raw_config, read_raw

from stack_files import read_stack_file
from training.errors import UserError

SECURE = {"secure": "v1:aaaa:bbbb"}


def written(folder: Path, config: dict[str, object], stack: str = "dev") -> None:
    lines = {f"llama-trainium:{key}": value for key, value in config.items()}
    (folder / f"Pulumi.{stack}.yaml").write_text(json.dumps({"config": lines}), encoding="utf-8")


def test_it_reads_what_the_engine_reads(tmp_path: Path) -> None:
    config = changed({"cluster/version": "1.35", "coreNodes/max": 5, "network/flowLogs": True})
    written(tmp_path, config)
    file = read_stack_file("dev", tmp_path)
    by_engine = read_raw(
        {**raw_config(config), "llama-trainium:huggingFaceToken": "x"}, ["llama-trainium:huggingFaceToken"]
    )
    hidden = {"hugging_face_token"}
    assert file.settings().model_dump(exclude=hidden) == by_engine.model_dump(exclude=hidden)
    assert file.settings().core_nodes.max == 5


@pytest.mark.parametrize("stack", ["dev", "us-east-1", "us-east-2", "us-west-2"])
def test_the_files_of_this_project_are_read(stack: str) -> None:
    file = read_stack_file(stack)
    assert file.on_aws
    assert file.settings().workloads.name == stack
    assert not file.given


def test_reading_leaves_no_config_behind() -> None:
    before = dict(CONFIG.get())
    read_stack_file("dev").settings()
    assert dict(CONFIG.get()) == before


def test_a_secret_is_there_or_not_and_is_not_decrypted(tmp_path: Path) -> None:
    written(tmp_path, {**GOOD, "huggingFaceToken": SECURE})
    file = read_stack_file("dev", tmp_path)
    assert file.given == {"huggingFaceToken"}
    assert file.settings().hugging_face_token is not None
    assert "v1:aaaa" not in repr(file)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"huggingFaceToken": "hf_plain"}, "llama-trainium:huggingFaceToken: in plain text, expected a secret"),
        ({"costCentre": SECURE}, "llama-trainium:costCentre: a secret, expected plain text"),
        ({"network/zones": [SECURE]}, "llama-trainium:network: a secret, expected plain text"),
        ({"region": "us-west-3"}, "llama-trainium:region: us-west-3, did you mean us-west-"),
        ({"stroage": {}}, "llama-trainium:stroage: unknown key, did you mean storage?"),
        ({"platform": "existing"}, "STACK: dev, expected a stack on AWS: this one has platform: existing"),
    ],
)
def test_a_mistake_is_refused_in_the_words_of_the_program(change: dict[str, object], says: str, tmp_path: Path) -> None:
    config = changed(change)
    if "network/zones" in change:
        config["network"] = {"zones": [SECURE]}
    written(tmp_path, config)
    with pytest.raises(UserError) as caught:
        read_stack_file("dev", tmp_path).settings()
    assert str(caught.value).startswith(says)


def test_an_unknown_stack_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match="^STACK: uswest2, did you mean us-west-2\\?$"):
        read_stack_file("uswest2")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("config: [", "Pulumi.dev.yaml: .*, expected a stack file in YAML"),
        ("- a", "Pulumi.dev.yaml: no config, expected the group `config` of a stack file"),
        ("", "Pulumi.dev.yaml: no config, expected the group `config` of a stack file"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "Pulumi.dev.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=f"^{says}$"):
        read_stack_file("dev", tmp_path)


def test_the_stack_on_an_existing_cluster_is_known_as_such() -> None:
    assert not read_stack_file("local", ROOT).on_aws
