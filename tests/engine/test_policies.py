"""The policy pack (policy/) in the real engine: on the real program with every stack file, and on what is planted.

make test-engine ARGS=tests/engine/test_policies.py
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from planted_pods import CASES
from stack import PACK, STACKS, Stack, missing

from policy.rules import POLICIES

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.timeout(1200)]

NewStack = Callable[..., Stack]
PROGRAM = Path(__file__).with_name("planted_program.py")
RULES = {policy.name for policy in POLICIES}


@dataclass(frozen=True)
class Judged:
    """A run with the pack."""

    code: int
    output: str
    violations: list[dict[str, Any]]
    looked_at: set[str]
    """URNs."""


def judge(stack: Stack, command: str, *flags: str) -> Judged:
    """Run `pulumi COMMAND` with the pack, and read the engine's own record of it."""
    log = stack.project.parent / f"{command}.events"
    done = stack.run(command, *flags, "--stack", stack.name, "--policy-pack", PACK, "--event-log", str(log))
    events = [json.loads(line) for line in log.read_text().splitlines()]

    def of(kind: str) -> list[dict[str, Any]]:
        return [event[kind] for event in events if kind in event]

    looked_at = {each["resourceUrn"] for each in of("policyAnalyzeSummaryEvent")}
    return Judged(done.code, done.output, of("policyEvent"), looked_at)


def new_judged_stack(name: str, new_stack: NewStack, **env: str) -> Stack:
    """A stack whose engine writes what happened into a file."""
    return new_stack(name, env={"PULUMI_DEBUG_COMMANDS": "true", **env})


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[str]:
    """A kubeconfig whose cluster takes connections: the stack `local` looks before it begins."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster = {"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.getsockname()[1]}"}}
        context = {"name": "here", "context": {"cluster": "here", "user": "here"}}
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps({"clusters": [cluster], "contexts": [context], "current-context": "here"}))
        yield str(file)


@pytest.mark.parametrize("name", [*STACKS, "local"])
def test_no_stack_breaks_a_rule(name: str, new_stack: NewStack, kubeconfig: str, figure: Callable[[str], None]) -> None:
    stack = new_judged_stack(name, new_stack, KUBECONFIG=kubeconfig)
    if name == "local":
        stack.cloud.refusals = None  # of a cluster that is there the nodes are there too
    preview = judge(stack, "preview")
    assert (preview.code, preview.violations) == (0, []), preview.output
    up = judge(stack, "up", "--yes", "--skip-preview")
    assert (up.code, up.violations) == (0, []), up.output
    made = {r["urn"] for r in stack.resources() if r["type"] != "pulumi:pulumi:Stack"}
    assert made - up.looked_at == set(), "the pack looked at everything"
    figure(f"{name}: {len(RULES)} rules, {len(up.looked_at)} resources, no violation in preview and up")


def test_the_engine_catches_what_is_planted_and_nothing_else(
    new_stack: NewStack, figure: Callable[[str], None]
) -> None:
    stack = new_judged_stack(STACKS[0], new_stack)
    program = stack.project / "__main__.py"
    program.unlink()
    program.symlink_to(PROGRAM)
    found = judge(stack, "preview")
    assert found.code != 0, found.output
    assert not stack.cloud.events
    assert {each["enforcementLevel"] for each in found.violations} == {"mandatory"}, found.output[-4000:]

    said = {(each["policyName"], each["resourceUrn"].split("::")[-1]) for each in found.violations}
    planted = {(case.rule, f"{case.rule}/{i}/{what}") for i, case in enumerate(CASES) for what in case.bad}
    assert planted - said == set(), "not caught"
    beside = {("images-by-digest", name) for rule, name in planted if rule == "no-latest"}
    assert said - planted <= beside, "caught without cause"
    assert {rule for rule, _ in said} == RULES
    figure(f"planted: {len(planted)} violations of {len(RULES)} rules caught, {len(CASES)} that keep them let pass")


def test_an_update_ends_at_the_first_violation(new_stack: NewStack) -> None:
    """What a preview did not know, or nobody looked at, is not made either."""
    stack = new_judged_stack(STACKS[0], new_stack)
    program = stack.project / "__main__.py"
    program.unlink()
    program.symlink_to(PROGRAM)
    up = judge(stack, "up", "--yes", "--skip-preview")
    assert up.code != 0
    broken = {each["resourceUrn"] for each in up.violations}
    assert broken
    assert not broken & {event.urn for event in stack.cloud.events}
