"""How long `up` takes, in AWS's time, against the longest chain of what waits for what."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from clock import StillClock
from makespan import SECONDS, longest_chain
from stack import STACKS, Stack, missing


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


def test_the_clock_stands_still_and_jumps() -> None:
    clock = StillClock()
    ends: dict[str, float] = {}

    def work(name: str, *waits: float) -> None:
        for seconds in waits:
            clock.wait(seconds)
        ends[name] = clock.now()

    with clock.running():
        threads = [Thread(target=work, args=("long", 600, 60)), Thread(target=work, args=("short", 480, 0))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ends == {"long": 660, "short": 480}


@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the clock reads /proc")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", STACKS)
def test_up_takes_no_longer_than_its_longest_chain(
    name: str, new_stack: Callable[..., Stack], figure: Callable[[str], None]
) -> None:
    stack = new_stack(name)
    clock = StillClock()
    stack.cloud.clock, stack.cloud.delays = clock, SECONDS
    with clock.running():
        up = stack.up().ok()
    events = stack.cloud.events
    took = max(event.ended for event in events) - min(event.started for event in events)
    chain, urns = longest_chain(stack.resources(), SECONDS)
    slow = [urn for urn in urns if urn.split("::")[2].split("$")[-1] in SECONDS]
    work = sum(SECONDS.get(event.type, 0) for event in events)
    figure(
        f"{name}: up {took:.0f} s of AWS's time, longest chain {chain:.0f} s, ratio {took / chain:.3f}; one after the "
        f"other {work:.0f} s; here {up.seconds:.0f} s; {' -> '.join(urn.rsplit('::', 1)[-1] for urn in slow)}"
    )
    assert took <= 1.15 * chain
    # What does not need the cluster is made beside it, so that the chain is the cluster's own.
    beside = ("LustreFileSystem", "Image", "NatGateway")
    assert not [urn for urn in slow if urn.split("::")[2].endswith(beside)]
