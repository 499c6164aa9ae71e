"""Pulumi's config as plain values, and pydantic's errors about them as lines with the stack's own keys."""

from __future__ import annotations

import difflib
import inspect
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeVar, get_args, get_origin

import pulumi
import yaml
from pulumi.runtime.config import CONFIG, get_config_env, is_config_secret
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from training.errors import UserError
from training.messages import Mistakes, expected_one_of, explain, location

M = TypeVar("M", bound=BaseModel)
Loc = tuple[int | str, ...]


def read_settings(
    config: pulumi.Config,
    model: type[M],
    secrets: Collection[str],
    lines_before: Iterable[str],
    derive: Callable[[M], M],
    mistakes: Callable[[M], Iterable[str]],
) -> M:
    """The settings of a stack as `model` has them, `derive`d. Raises `UserError` with one line per mistake.

    `secrets` are the keys whose values must be Pulumi secrets, and the only ones whose values may be: anywhere else a
    secret would end in plain state. No line shows the value of one. `mistakes` finds what no single group of settings
    can tell; its lines begin with a key. `lines_before` are mistakes that are none of the config.
    """
    given, refused = read(config, model, secrets)
    prefix = f"{config.name}:"
    lines = [*refused.values(), *lines_before]
    try:
        settings = derive(model.model_validate(given, by_alias=True, by_name=False))
    except ValidationError as error:
        lines += explained(error, model, prefix, refused, secrets)
    else:
        lines += [prefix + line for line in mistakes(settings)]
    if lines:
        raise UserError("\n".join(dict.fromkeys(lines)))
    return settings


def read(
    config: pulumi.Config, model: type[BaseModel], secrets: Collection[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The values of the keys of `model` that the stack sets, and a line for each key that is refused as it is.

    `secrets` are the keys whose values must be Pulumi secrets, and the only ones whose values may be.
    """
    fields = fields_by_key(model)
    values: dict[str, Any] = {}
    refused: dict[str, str] = {}
    for full_key in sorted({*CONFIG.get(), *get_config_env()}):
        project, _, name = full_key.partition(":")
        if project == config.name and name not in fields:
            refused[name] = f"{config.name}:{location([name])}: unknown key{expected_one_of(name, list(fields))}"
        elif project != config.name and difflib.get_close_matches(project, [config.name], cutoff=0.8):
            refused[full_key] = (
                f"{location([full_key])}: unknown project, did you mean {config.name}:{location([name])}?"
            )
    for name, field in fields.items():
        key, text = config.full_key(name), config.get(name)
        if text is None:
            continue
        if name in secrets and not is_config_secret(key):
            refused[name] = f"{key}: in plain text, expected a secret: pulumi config set --secret {name}"
        elif name not in secrets and is_config_secret(key):
            refused[name] = f"{key}: a secret, expected plain text: it ends in the plain state of resources"
        elif model_in(field.annotation) or get_origin(field.annotation) is dict:
            if (value := _parsed(text)) is not None:
                values[name] = value
        else:
            values[name] = text
    return values, refused


def explained(
    error: ValidationError, model: type[BaseModel], prefix: str, refused: Collection[str], secrets: Collection[str]
) -> list[str]:
    """One line per mistake in an error of `model`, without those of keys that are `refused` already."""
    lines = []
    for item in error.errors():
        loc, place = item["loc"], prefix + location(item["loc"])
        above = fields_by_key(model_at(model, loc[:-1]))
        cause = item.get("ctx", {}).get("error")
        if loc[0] in refused:
            continue
        if isinstance(cause, Mistakes):
            lines += [f"{place}.{line}" for line in cause.lines]
        elif item["type"] == "extra_forbidden":
            within = location([*loc[:-1], ""]).removesuffix("''")
            lines.append(f"{place}: unknown key{expected_one_of(str(loc[-1]), list(above), within)}")
        elif item["type"] == "missing":
            lines.append(f"{place}: missing, expected {_purpose(above[str(loc[-1])])}")
        elif item["type"] == "not_shown" or loc[0] in secrets:
            lines.append(f"{place}: {item['msg'].removeprefix('Value error, ')}")
        else:
            lines.append(explain(place, item))
    return lines


def fields_by_key(model: type[BaseModel]) -> Mapping[str, FieldInfo]:
    """The fields of a group of settings by the names that the stack file uses."""
    return {field.alias or name: field for name, field in model.model_fields.items()}


def model_in(annotation: Any) -> type[BaseModel] | None:
    """The group of settings that a field holds, alone or in a list; None for a plain value."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := model_in(part))), None)


def model_at(model: type[BaseModel], loc: Loc) -> type[BaseModel]:
    """The group of settings at a place of `model`."""
    for part in loc:
        if isinstance(part, str):
            field = fields_by_key(model).get(part)
            model = (field and model_in(field.annotation)) or model
    return model


def _purpose(field: FieldInfo) -> str:
    group = model_in(field.annotation)
    if field.description or group is None:
        return field.description or "a value"
    needed = [name for name, part in fields_by_key(group).items() if part.is_required()]
    return f"a group with {', '.join(needed)}"


def _parsed(text: str) -> object:
    """What a structured value says: the JSON that Pulumi makes of a stack file, or the YAML that someone typed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(yaml.safe_load(text), default=str))
    except (ValueError, TypeError, RecursionError, yaml.YAMLError):
        return text
