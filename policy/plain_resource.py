"""A resource as rules see it: plain data, with UNKNOWN where a preview does not know a value yet.

The SDK raises at the first unknown value that is read, and the policy is then not run at all. Rules judge what is known
in a preview, and the rest in `pulumi up`, which knows it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pulumi_policy import ResourceValidationArgs
from pulumi_policy.proxy import UnknownValueError


class Unknown:
    """The value that a preview does not know."""

    def __repr__(self) -> str:
        return "not known yet"


UNKNOWN = Unknown()

Props = dict[str, Any]


@dataclass(frozen=True)
class Resource:
    """What the program asks for; keys are camelCase, as the engine has them."""

    type: str
    name: str
    props: Props
    default_tags: Props
    """The tags that the resource's AWS provider gives it."""

    @classmethod
    def of(cls, args: ResourceValidationArgs) -> Resource:
        """The resource in a policy's arguments."""
        provider = plain(args.provider.props) if args.provider else {}
        return cls(args.resource_type, args.name, plain(args.props), _default_tags(provider))

    @property
    def in_kubernetes(self) -> bool:
        """Whether it is an object of the cluster, and not a chart: what a chart makes, the engine never sees."""
        return self.type.startswith("kubernetes:") and not self.type.startswith("kubernetes:helm.sh/")


def plain(value: Any) -> Any:
    """Dicts, lists and scalars, with UNKNOWN for what is not known."""
    if isinstance(value, Mapping):
        return {key: _item(value, key) for key in value}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_item(value, index) for index in range(len(value))]
    return value


def _item(value: Any, key: Any) -> Any:
    try:
        return plain(value[key])
    except UnknownValueError:
        return UNKNOWN


def _default_tags(provider: Props) -> Props:
    """Inputs of a provider that are no text are JSON."""
    given = provider.get("defaultTags")
    read = json.loads(given) if isinstance(given, str) else given
    tags = read.get("tags") if isinstance(read, dict) else None
    return tags if isinstance(tags, dict) else {}


def section(value: Any, *path: str) -> Any:
    """What is at `path` in nested dicts: {} where something on the way is missing, UNKNOWN where it is not known."""
    for key in path:
        if not isinstance(value, dict):
            return value if value is UNKNOWN else {}
        value = value.get(key)
    return {} if value is None else value


def entries(value: Any) -> list[Any]:
    """The known entries of a list, or of the one entry that stands for it."""
    found = value if isinstance(value, list) else [value]
    return [entry for entry in found if entry is not None and entry is not UNKNOWN and entry != {}]


def everything(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every value in nested data with its path, the outer ones first."""
    yield path, value
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        step = f"[{key}]" if isinstance(value, list) else f".{key}" if path else str(key)
        yield from everything(each, path + step)
