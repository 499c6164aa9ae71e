"""Mistakes of users in one line: where, the value found, what was expected.

Both readers of settings use these words: training.config (`train.steps: x, expected a whole number`) and infra.settings
(`llama-trainium:accelerators[0].max: 0, expected at least 1`).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_WANTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "string": "text",
    "path": "a path",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "finite_number": "a finite number",
    "literal_error": "one of {expected}",
    "list": "a list",
    "dict": "a group of `key: value` lines",
    "too_short": "at least {min_length} of them",
    "too_long": "at most {max_length} of them",
    "model": "a group of `key: value` lines",
}


class Mistakes(ValueError):
    """Several mistakes within one group of settings, each a line that begins with the key inside that group."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = lines

    @classmethod
    def raise_any(cls, lines: Iterable[str]) -> None:
        """Raise when there is a line."""
        if found := list(lines):
            raise cls(found)


def matching(pattern: str, wanted: str, flags: re.RegexFlag = re.ASCII) -> Callable[[str], str]:
    """A validator of text that matches all of `pattern`; `wanted` are the words that refuse the rest."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value, flags):
            raise ValueError(f"expected {wanted}")
        return value

    return check


def explain(key: str, item: Any) -> str:
    """One of pydantic's `ValidationError.errors()` about the value of `key`, as one line."""
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return f"{key}: {shown(item['input'])}, {message}"
    kind = item["type"] if item["type"] in _WANTED else item["type"].partition("_")[0]
    return f"{key}: {shown(item['input'])}, expected {_WANTED.get(kind, message).format(**item.get('ctx', {}))}"


def location(parts: Sequence[str | int]) -> str:
    """Where a value is, from pydantic's `loc`: `accelerators[0].zone`. A key with odd characters is quoted."""
    place = ""
    for part in parts:
        if isinstance(part, int):
            place += f"[{part}]"
        else:
            place += ("." if place else "") + shown(part)
    return place


def expected_one_of(name: str, known: Sequence[str], prefix: str = "") -> str:
    """The end of a message about an unknown name: the known one (behind `prefix`) that it is close to, or all."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f", did you mean {prefix}{near[0]}?" if near else f", expected one of {', '.join(known)}"


def shown(value: object) -> str:
    """A value found, on one line: as it is written in YAML, or quoted where that would not show."""
    text = "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if not text.strip() or not text.isprintable():
        text = ascii(value)
    return text if len(text) <= 100 else f"{text[:90]}... ({len(text)} characters)"


def ranks(numbers: Sequence[int]) -> str:
    """`rank 3`, `ranks 3, 5`, and of many the first ones and how many more."""
    few = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {few}"
