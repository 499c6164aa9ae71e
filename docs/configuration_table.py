"""Writes docs/configuration.md, every key of a stack file, from the classes of `stack_settings`: `make docs`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Mapping
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from infra.stack_config import fields_by_key, model_in
from stack_settings import SECRETS, AwsStack, ExistingStack, Runs

PAGE = Path(__file__).parent / "configuration.md"
WORDS = {
    str: "text",
    int: "N",
    float: "N",
    bool: "true\\|false",
    IPv4Network: "CIDR",
    SecretStr: "secret",
    Any: "value",
}
HEAD = """# Configuration

Every key of a stack file, `Pulumi.<stack>.yaml`. Written by `make docs` from the classes in `infra/settings.py`,
`workloads/settings.py` and `stack_settings.py`, which also refuse every mistake in `pulumi preview`, before anything is
created: one line each, with the key, the value and what is allowed.

A key in a group is set in the file, or with `--path`; a list's entries have numbers:

    pulumi config set region us-west-2
    pulumi config set --path network.nat per-zone
    pulumi config set --path 'accelerators[0].max' 16
    pulumi config set --path workloads.train.wait finished
    pulumi config set --secret huggingFaceToken

"""
EXISTING = """
# On a cluster that is there

With `platform: existing` a stack has no resource on AWS. It has the secrets and the `workloads` of above, and these
keys in place of the others.

"""


def page() -> str:
    """The whole page."""
    common = list(fields_by_key(Runs))
    existing = {key: field for key, field in fields_by_key(ExistingStack).items() if key not in common}
    parts = [f"{HEAD}## The stack\n", *_groups(fields_by_key(AwsStack), "", 2)]
    parts += [f"{EXISTING}## The stack\n", *_groups(existing, "", 2)]
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


def _groups(fields: Mapping[str, FieldInfo], prefix: str, level: int) -> list[str]:
    """The table of plain keys, then each group of keys under a heading of its own, down to the third level."""
    groups = {key: group for key, field in fields.items() if (group := model_in(field.annotation))}
    parts = [_table(_rows({key: field for key, field in fields.items() if key not in groups}, prefix))]
    for key, group in groups.items():
        several = get_origin(fields[key].annotation) is list
        inner = f"{prefix}{key}[N]." if several else f"{prefix}{key}."
        parts.append(f"\n{'#' * level} `{prefix}{key}`{', a list' if several else ''}\n\n{inspect.getdoc(group)}\n")
        if level < 3:
            parts += _groups(fields_by_key(group), inner, level + 1)
        else:
            parts.append(_table(_rows(fields_by_key(group), inner)))
    return parts


def _table(rows: list[tuple[str, ...]]) -> str:
    lines = ["", "| key | value | default | |", "|---|---|---|---|"]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _rows(fields: Mapping[str, FieldInfo], prefix: str, of: str = "", by_default: str = "") -> list[tuple[str, ...]]:
    """A row for each key, those of groups within included, whose description and default their keys share."""
    rows = []
    for key, field in fields.items():
        meaning, _, derived = (field.description or "").partition(" [default: ")
        derived = derived.rstrip("]") or by_default
        if group := model_in(field.annotation):
            rows += _rows(fields_by_key(group), f"{prefix}{key}.", f"{meaning}: ", derived)
            continue
        words = (of + meaning).replace("|", "\\|")
        rows.append((f"`{prefix}{key}`", f"`{_value(field.annotation)}`", derived or _default(key, field), words))
    return rows


def _value(annotation: Any) -> str:
    if get_origin(annotation) is Literal:
        return "\\|".join(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return "\\|".join(_value(part) for part in get_args(annotation) if part is not types.NoneType)
    if get_origin(annotation) is list:
        return f"[{_value(get_args(annotation)[0])}, ...]"
    if get_origin(annotation) is dict:
        return f"{{key: {_value(get_args(annotation)[1])}}}"
    if hasattr(annotation, "__metadata__"):  # Annotated, inside a list
        return _value(get_args(annotation)[0])
    return WORDS[annotation]


def _default(key: str, field: FieldInfo) -> str:
    if field.is_required():
        return "**required**"
    if key in SECRETS or field.default in (None, "", [], {}) or isinstance(field.default, BaseModel):
        return "none"
    if isinstance(field.default, list):
        return ", ".join(map(str, field.default))
    return str(field.default).lower() if isinstance(field.default, bool) else str(field.default)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
