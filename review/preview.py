"""What `pulumi up` would do to a stack, from the engine's own events: changes, broken rules of the pack, errors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from pulumi import automation
from pulumi.automation import EngineEvent, OpType

PACK = "policy"

SAME = (OpType.SAME, OpType.READ, OpType.REFRESH)
PARTS_OF_REPLACE = (OpType.CREATE_REPLACEMENT, OpType.DELETE_REPLACED)
"""The steps that a replacement is made of: it counts once."""


@dataclass(frozen=True)
class Change:
    """One resource that would change."""

    op: str
    type: str
    name: str
    keys: tuple[str, ...] = ()
    """Paths of the inputs that differ, and cause a replacement if `op` is one; none where all is new or goes."""


@dataclass(frozen=True)
class Violation:
    """A rule that a resource breaks."""

    rule: str
    resource: str
    message: str
    mandatory: bool


@dataclass
class Preview:
    """All of it."""

    stack: str
    changes: list[Change] = field(default_factory=list)
    same: int = 0
    violations: list[Violation] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    diff: str = ""
    """What `pulumi preview --diff` says; secrets are masked by the engine."""
    failed: bool = False


def preview(stack: str, root: Path) -> Preview:
    """Preview the stack of the project in `root` with the policy pack. Raises what Pulumi says where there is no such
    stack, no login, no engine; a preview that fails is a result."""
    found = Preview(stack)
    selected = automation.select_stack(stack, work_dir=str(root))
    lines: list[str] = []
    try:
        selected.preview(
            diff=True,
            policy_packs=[str(root / PACK)],
            color="never",
            suppress_progress=True,
            on_output=lines.append,
            on_event=lambda event: take(event, found),
        )
    except automation.CommandError:
        found.failed = True
    found.diff = "\n".join(lines)
    return found


def take(event: EngineEvent, into: Preview) -> None:
    """Take from an event what a reviewer wants to know."""
    if event.resource_pre_event:
        step = event.resource_pre_event.metadata
        if step.op in SAME:
            into.same += step.type != "pulumi:pulumi:Stack"
        elif step.op not in PARTS_OF_REPLACE and step.type != "pulumi:pulumi:Stack":
            keys = tuple(sorted(step.detailed_diff or step.diffs or ()))
            into.changes.append(Change(step.op.value, step.type, _name(step.urn), keys))
    if event.policy_event:
        said = event.policy_event
        message = said.message.strip().splitlines()[-1]  # the rule's description comes first
        mandatory = said.enforcement_level == "mandatory"
        into.violations.append(Violation(said.policy_name, _name(said.resource_urn or ""), message, mandatory))
    told = event.diagnostic_event
    if (
        told and told.severity == "error" and told.message.strip() != "preview failed"
    ):  # which says nothing of the cause
        into.errors.append(told.message.strip())


def _name(urn: str) -> str:
    return urn.rpartition("::")[2]
