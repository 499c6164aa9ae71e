"""docs/configuration.md says of every key what the classes say."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from pydantic import BaseModel

from infra.stack_config import fields_by_key, model_in
from stack_settings import AwsStack, ExistingStack

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_make_docs_writes() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "configuration_table.py"))["page"]()
    assert page == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), "run `make docs`"


@pytest.mark.parametrize("model", [AwsStack, ExistingStack])
def test_every_key_is_described(model: type[BaseModel]) -> None:
    for key, field in fields_by_key(model).items():
        if group := model_in(field.annotation):
            test_every_key_is_described(group)
        else:
            assert field.description, f"{model.__name__}: {key}"


def test_every_key_is_on_the_page() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    for key in (
        "region",
        "accelerators[N].max",
        "workloads.train.wait",
        "workloads.resources.head.cpu",
        "volume.hostPath",
    ):
        assert f"| `{key}` |" in page, key
