"""Every stack file through the real engine: previewed, made, made again, broken anywhere and mended, destroyed.

    make test-engine

ENGINE_FAULTS=all injects a fault into every resource in turn (default: one of each type).
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable

import pytest
from stack import PACKAGES, STACKS, TOKEN, Stack, missing

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
    assert TOKEN not in json.dumps(resources), "a secret stays encrypted in the state"
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


@pytest.mark.parametrize("name", STACKS[:1])
def test_up_goes_on_after_a_fault_anywhere(name: str, new_stack: NewStack, figure: Figure) -> None:
    whole = new_stack(name)
    whole.up().ok()
    resources = [r for r in whole.resources() if r.get("custom") and r["type"].split(":")[0] in PACKAGES]
    kinds: dict[str, list[str]] = {}
    for resource in resources:
        kinds.setdefault(resource["type"], []).append(resource["urn"])
    everywhere = os.environ.get("ENGINE_FAULTS") == "all"
    urns = [urn for found in kinds.values() for urn in (found if everywhere else [random.Random(4).choice(found)])]

    for urn in urns:
        stack = new_stack(name)
        stack.cloud.fault = re.compile(re.escape(urn) + "$")
        broken = stack.up()
        assert broken.code != 0, f"{urn}: up did not notice the fault"
        assert "injected fault" in broken.output, f"{urn}: the reason is lost\n{broken.output}"
        assert "Traceback" not in broken.output, f"{urn}: the user reads a traceback\n{broken.output}"
        assert stack.owned() == set(stack.cloud.live), f"{urn}: the state lost something"

        stack.cloud.fault = None
        mended = stack.up()
        assert mended.code == 0, f"{urn}: the next up does not go on\n{mended.output}"
        assert stack.owned() == set(stack.cloud.live), f"{urn}: something was made twice"
        assert len(stack.cloud.live) == len(resources), f"{urn}: something was not made"
    figure(f"{name}: faults in {len(urns)} of {len(resources)} resources, all {len(kinds)} types; the next up went on")
