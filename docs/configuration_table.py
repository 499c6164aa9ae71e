"""Writes docs/configuration.md, every key of a stack file, from the classes of `infra.settings`: `make docs`."""

from __future__ import annotations

import inspect
import types
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from infra.settings import SECRETS, Settings
from infra.stack_config import fields_by_key, model_in

PAGE = Path(__file__).parent / "configuration.md"
WORDS = {str: "text", int: "N", bool: "true\\|false", IPv4Network: "CIDR", SecretStr: "secret", Any: "value"}
HEAD = """# Configuration

Every key of a stack file, `Pulumi.<stack>.yaml`. Written by `make docs` from the classes in `infra/settings.py`, which
also refuse every mistake in `pulumi preview`, before anything is created: one line each, with the key, the value and
what is allowed.

A key in a group is set in the file, or with `--path`; a list's entries have numbers:

    pulumi config set region us-west-2
    pulumi config set --path network.nat per-zone
    pulumi config set --path 'accelerators[0].max' 16
    pulumi config set --secret huggingFaceToken

"""


def page() -> str:
    """The whole page."""
    groups = {key: group for key, field in fields_by_key(Settings).items() if (group := model_in(field.annotation))}
    plain = {key: field for key, field in fields_by_key(Settings).items() if key not in groups}
    parts = [f"{HEAD}## The stack\n", _table(plain, "")]
    for key, group in groups.items():
        several = get_origin(Settings.model_fields[_name(key)].annotation) is list
        parts.append(f"\n## `{key}`{', a list' if several else ''}\n\n{inspect.getdoc(group)}\n")
        parts.append(_table(fields_by_key(group), f"{key}[N]." if several else f"{key}."))
    return "\n".join(part.rstrip("\n") for part in parts) + "\n"


def _name(key: str) -> str:
    return next(name for name, field in Settings.model_fields.items() if field.alias == key)


def _table(fields: Any, prefix: str) -> str:
    lines = ["", "| key | value | default | |", "|---|---|---|---|"]
    for key, field in fields.items():
        meaning, _, derived = (field.description or "").partition(" [default: ")
        cells = (f"`{prefix}{key}`", f"`{_value(field.annotation)}`", derived.rstrip("]") or _default(key, field))
        lines.append("| " + " | ".join((*cells, meaning.replace("|", "\\|"))) + " |")
    return "\n".join(lines)


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
