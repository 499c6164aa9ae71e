"""How long `up` takes against the longest chain of what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from makespan import SECONDS, longest_chain
from stack import STACKS, Stack, missing

SCALE = 100  # AWS's seconds in one of ours


def resource(name: str, kind: str = "t", *after: str, **more: Any) -> dict[str, Any]:
    return {"urn": name, "type": kind, "custom": True, "dependencies": list(after), **more}


def test_a_chain_is_as_long_as_what_waits_for_what() -> None:
    state = [resource("a", "slow"), resource("b", "fast"), resource("c", "slow", "b"), resource("d", "fast", "a", "c")]
    assert longest_chain(state, {"slow": 10, "fast": 1}) == (12, ["b", "c", "d"])


def test_a_chain_runs_through_providers_parents_and_properties() -> None:
    state = [
        resource("cluster", "slow"),
        resource("urn::provider", "fast", "cluster"),
        resource("release", "slow", provider="urn::provider::id"),
        resource("object", "slow", parent="release"),
        resource("last", "fast", propertyDependencies={"name": ["object"]}),
    ]
    assert longest_chain(state, {"slow": 10, "fast": 1}) == (32, [r["urn"] for r in state])


def test_a_component_is_done_with_all_that_is_in_it() -> None:
    component = {"urn": "component", "type": "eks", "custom": False}
    state = [component, resource("in", "slow", parent="component"), resource("after", "fast", "component")]
    assert longest_chain(state, {"slow": 10, "fast": 1}) == (11, ["in", "after"])


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STACKS)
def test_up_takes_no_longer_than_its_longest_chain(
    name: str, new_stack: Callable[..., Stack], figure: Callable[[str], None]
) -> None:
    stack = new_stack(name)
    delays = {kind: seconds / SCALE for kind, seconds in SECONDS.items()}
    stack.cloud.delays = delays
    stack.up().ok()
    events = stack.cloud.events
    took = max(event.ended for event in events) - min(event.started for event in events)
    chain, urns = longest_chain(stack.resources(), delays)
    slow = " -> ".join(urn.rsplit("::", 1)[-1] for urn in urns if any(f"{kind}::" in urn for kind in SECONDS))
    figure(f"{name}: up {took:.2f} s, longest chain {chain:.2f} s, ratio {took / chain:.3f} (1:{SCALE}): {slow}")
    assert took <= 1.15 * chain
