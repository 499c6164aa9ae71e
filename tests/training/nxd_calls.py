"""Which names of neuronx-distributed and torch-xla the training code uses and how it calls them, read from its source.

Run by an interpreter that has them, this prints their signatures, the table `nxd_signatures.json`:

    PYTHONPATH=. $NXD_PYTHON tests/training/nxd_calls.py > tests/training/nxd_signatures.json
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TRAINING = Path(__file__).parents[2] / "training"
ROOTS = ("neuronx_distributed", "torch_xla", "torch_neuronx")


@dataclass(frozen=True)
class Use:
    """One place where a name is used; `call` is None where it is not called, partial where it is by functools."""

    name: str
    where: str
    call: tuple[int, tuple[str, ...]] | None = None
    """Number of positional arguments and the keywords; -1 positional where a star hides the number."""
    partial: bool = False


def uses(sources: dict[str, str] | None = None) -> list[Use]:
    """Every use in `sources` (name: text), by default in all of `training/`."""
    if sources is None:
        sources = {str(path.relative_to(TRAINING)): path.read_text() for path in sorted(TRAINING.rglob("*.py"))}
    return [use for name, text in sources.items() for use in _uses_in(name, ast.parse(text))]


def _uses_in(file: str, tree: ast.AST) -> Iterator[Use]:
    names = dict(_imported(tree))
    bases = {
        node.name: found
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for base in node.bases
        if (found := _resolve(base, names))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name in bases:
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    yield Use(bases[node.name], f"{file}:{call.lineno}", _arguments(call.args, call.keywords))
        if isinstance(node, ast.Call):
            if name := _resolve(node.func, names):
                yield Use(name, f"{file}:{node.lineno}", _arguments(node.args, node.keywords))
            elif ast.unparse(node.func) == "functools.partial" and (name := _resolve(node.args[0], names)):
                yield Use(name, f"{file}:{node.lineno}", _arguments(node.args[1:], node.keywords), partial=True)
        elif isinstance(node, ast.Name | ast.Attribute) and (name := _resolve(node, names)):
            yield Use(name, f"{file}:{node.lineno}")
        elif isinstance(node, ast.ImportFrom | ast.Import):
            for name in (name for _, name in _imported(node)):
                yield Use(name, f"{file}:{node.lineno}")


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """(name in the file, full name) of what is imported from the packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in ROOTS:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in ROOTS:
                    yield (alias.asname, alias.name) if alias.asname else (alias.name.partition(".")[0],) * 2


def _resolve(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute) and (holder := _resolve(node.value, names)):
        return f"{holder}.{node.attr}"
    return None


def _arguments(args: list[ast.expr], keywords: list[ast.keyword]) -> tuple[int, tuple[str, ...]]:
    count = -1 if any(isinstance(arg, ast.Starred) for arg in args) else len(args)
    return count, tuple(keyword.arg for keyword in keywords if keyword.arg)


def mistake(use: Use, table: dict[str, Any]) -> str | None:
    """What is wrong with a use by the table of signatures, in one line; None when it is right."""
    if use.name not in table:
        return f"{use.where}: {use.name} is not in the table"
    signature = table[use.name]["parameters"]
    if use.call is None:
        return None
    if signature is None:
        return f"{use.where}: {use.name} is called, and is no function"
    count, keywords = use.call
    takes = [p["name"] for p in signature if p["kind"] == "POSITIONAL_OR_KEYWORD"]
    for keyword in keywords:
        if keyword not in takes and not any(p["kind"] == "VAR_KEYWORD" for p in signature):
            return f"{use.where}: {use.name} has no parameter {keyword}"
    if count < 0:
        return None
    if count > len(takes) and not any(p["kind"] == "VAR_POSITIONAL" for p in signature):
        return f"{use.where}: {use.name} takes {len(takes)} arguments"
    given = {*takes[:count], *keywords}
    for parameter in signature:
        if not use.partial and parameter["required"] and parameter["name"] not in given:
            return f"{use.where}: {use.name} needs {parameter['name']}"
    return None


def recorded(names: set[str]) -> dict[str, Any]:
    """The table for these names, from what is installed."""
    return {name: {"parameters": _parameters(_find(name))} for name in sorted(names)}


def _find(name: str) -> Any:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise AssertionError(name)


def _parameters(found: Any) -> list[dict[str, Any]] | None:
    if inspect.ismodule(found) or not callable(found):
        return None
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        {"name": p.name, "kind": p.kind.name, "required": p.default is p.empty and p.kind not in kinds}
        for p in inspect.signature(found).parameters.values()
    ]


def main() -> None:
    """Print the table."""
    import torch_xla

    version = importlib.import_module("neuronx_distributed._version").__version__
    versions = {"neuronx_distributed": version, "torch_xla": torch_xla.__version__, "sdk": "2.28.0"}
    table = recorded({use.name for use in uses()})
    json.dump({"versions": versions, "signatures": table}, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main()
