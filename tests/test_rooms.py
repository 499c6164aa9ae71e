"""Each room knows the rooms that it may know: what a file imports, anywhere in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEVER = {
    "infra": {"workloads", "stack_settings"},
    "workloads": {"infra", "stack_settings", "pulumi_aws", "pulumi_eks"},
    "policy": {"infra", "workloads", "training", "stack_settings", "pulumi_aws", "pulumi_kubernetes"},
    "training": {"infra", "workloads", "stack_settings", "pulumi", "pulumi_aws", "pulumi_kubernetes"},
}
MAY = {"workloads": {"training.config", "training.environment", "training.messages", "training.errors", "training"}}
"""Of another room, where only parts of it are known."""


def imported(source: str) -> set[str]:
    """Modules that the source imports; `from a import b` counts as a and as a.b."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | ({f"{node.module}.{alias.name}" for alias in node.names} - {node.module})
    return found


@pytest.mark.parametrize("room", NEVER)
def test_a_room_knows_only_what_it_may(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    for file in files:
        modules = imported(file.read_text(encoding="utf-8"))
        assert not {name.partition(".")[0] for name in modules} & NEVER[room], file
        known = MAY.get(room)
        from_training = {".".join(name.split(".")[:2]) for name in modules if name.partition(".")[0] == "training"}
        assert known is None or from_training <= known, file


def test_an_import_is_seen_wherever_it_is() -> None:
    assert imported("def f():\n    from infra import x\n    import training.data.store as s") == {
        "infra",
        "infra.x",
        "training.data.store",
    }
