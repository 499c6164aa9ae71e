"""Every stack file through the real engine: previewed, made, made again, broken anywhere and mended, destroyed.

    make test-engine

ENGINE_FAULTS says where faults are injected: into one resource of that many types (default 6), of all `types` (as
`make test-engine` does), or into `all` resources.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable

import pytest
from cloud import PASSWORD
from stack import STACKS, TOKEN, Stack, missing

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.timeout(7200)]

NewStack = Callable[..., Stack]
Figure = Callable[[str], None]


@pytest.mark.parametrize("name", STACKS)
def test_a_stack_comes_up_stays_and_goes(name: str, new_stack: NewStack, figure: Figure) -> None:
    stack = new_stack(name)
    preview = stack.preview().ok()
    assert not stack.cloud.events, "a preview makes nothing"

    up = stack.up().ok()
    resources = stack.resources()
    assert stack.owned() == set(stack.cloud.live), "the state holds all that was made, and nothing else"
    for secret in (TOKEN, PASSWORD):
        assert secret not in json.dumps(resources), "a secret stays encrypted in the state"
    made = len(stack.cloud.events)

    again = stack.up("--expect-no-changes").ok()
    assert len(stack.cloud.events) == made, "a second up changes nothing"

    kept = {(r["type"], r["id"]) for r in resources if r.get("retainOnDelete")}
    destroy = stack.destroy().ok()
    assert stack.resources() == [], "destroy empties the state"
    assert set(stack.cloud.live) <= kept, "destroy leaves only what the settings keep"
    figure(
        f"{name}: {len(resources)} resources; preview {preview.seconds:.1f} s, up {up.seconds:.1f} s, "
        f"second up {again.seconds:.1f} s, destroy {destroy.seconds:.1f} s, kept {len(stack.cloud.live)}"
    )


def test_a_mistake_in_the_settings_ends_in_one_line(new_stack: NewStack) -> None:
    stack = new_stack(STACKS[0], config={"storage": {"sizeGib": 7}})
    refused = stack.preview()
    assert refused.code != 0
    assert "error: llama-trainium:storage.sizeGib: 7, expected " in refused.output
    assert "Traceback" not in refused.output
    assert stack.up().code != 0
    assert not stack.cloud.events


@pytest.mark.parametrize("name", STACKS[:1])
def test_up_goes_on_after_a_fault_anywhere(name: str, new_stack: NewStack, figure: Figure) -> None:
    whole = new_stack(name)
    whole.up().ok()
    made = [event for event in whole.cloud.events if event.op == "create"]
    todo = targets([(event.type, event.urn) for event in made])
    tried, rounds = len(todo), 0

    while todo:
        # One fault after another in one stack, each where nothing has been made yet: every `up` has to go on from what
        # the one before it left. What came up too early to be broken has its turn in the next round.
        stack, rounds = new_stack(name), rounds + 1
        for urn in todo.copy():
            if urn in {event.urn for event in stack.cloud.events if not event.error}:
                continue
            stack.cloud.fault = re.compile(re.escape(urn) + "$")
            broken = stack.up()
            assert broken.code != 0, f"{urn}: up did not notice the fault"
            assert f"injected fault at {urn}" in broken.output, f"{urn}: another error\n{broken.output}"
            assert stack.owned() == set(stack.cloud.live), f"{urn}: the state is not what was made"
            todo.remove(urn)
        stack.cloud.fault = None
        stack.up().ok()
        assert stack.owned() == set(stack.cloud.live), "the state is not what was made"
        assert {r.urn for r in stack.cloud.live.values()} == {event.urn for event in made}, "something was not made"
        assert len(stack.cloud.live) == len(made), "something was made twice"
        stack.destroy().ok()
    kinds = {event.type for event in made}
    figure(
        f"{name}: faults in {tried} of {len(made)} resources of {len(kinds)} types, {rounds} stacks; each up went on"
    )


def targets(made: list[tuple[str, str]]) -> list[str]:
    """URNs to break, of what was made as (type, URN), in that order."""
    which = os.environ.get("ENGINE_FAULTS", "6")
    if which == "all":
        return [urn for _, urn in made]
    seeded = random.Random(4)
    kinds = sorted({kind for kind, _ in made})
    if which != "types":
        kinds = seeded.sample(kinds, int(which))
    chosen = {seeded.choice([urn for kind, urn in made if kind == one]) for one in kinds}
    return [urn for _, urn in made if urn in chosen]
