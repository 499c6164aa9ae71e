"""docs/configuration.md says of every key what the classes say."""

from __future__ import annotations

import runpy
from pathlib import Path

from infra.settings import Settings
from infra.stack_config import fields_by_key, model_in

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_make_docs_writes() -> None:
    page = runpy.run_path(str(ROOT / "docs" / "configuration_table.py"))["page"]()
    assert page == (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8"), "run `make docs`"


def test_every_key_is_described() -> None:
    for key, field in fields_by_key(Settings).items():
        group = model_in(field.annotation)
        for name, described in (fields_by_key(group) if group else {key: field}).items():
            assert len((described.description or "").split()) >= 2, f"{key}.{name}"
