"""Each room knows the rooms that it may know: what a file imports, anywhere in it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
WHOLE = {"stack_settings", "stack_files"}
"""What knows all rooms, beside `__main__.py`."""
NEVER = {
    "infra": {"workloads"} | WHOLE,
    "workloads": {"infra", "pulumi_aws", "pulumi_eks"} | WHOLE,
    "policy": {"infra", "workloads", "training", "pulumi_aws", "pulumi_kubernetes"} | WHOLE,
    "training": {"infra", "workloads", "pulumi", "pulumi_aws", "pulumi_kubernetes"} | WHOLE,
}
COMMANDS = {"infra.cost", "infra.destroy", "infra.preflight"}
"""Started by a user with a stack's name, as `__main__.py` is by Pulumi: they read the whole stack, and nothing imports
them."""
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
        assert not modules & COMMANDS, file
        never = NEVER[room] - (WHOLE if ".".join(file.relative_to(ROOT).with_suffix("").parts) in COMMANDS else set())
        assert not {name.partition(".")[0] for name in modules} & never, file
        known = MAY.get(room)
        from_training = {".".join(name.split(".")[:2]) for name in modules if name.partition(".")[0] == "training"}
        assert known is None or from_training <= known, file


def test_an_import_is_seen_wherever_it_is() -> None:
    assert imported("def f():\n    from infra import x\n    import training.data.store as s") == {
        "infra",
        "infra.x",
        "training.data.store",
    }
