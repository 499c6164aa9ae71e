"""The comment on a pull request: a sample change as the real engine told it (sample_events.jsonl and sample_diff.txt,
cut from the run that tests/engine/test_review.py makes again), and what else a preview may come to.

    REWRITE=1 pytest tests/review/test_comment.py    # writes sample_comment.md anew, to be read before it is committed
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pulumi.automation import EngineEvent

from policy.rules import POLICIES
from review.comment import LONGEST, comment, headline
from review.costs import Cost
from review.preview import Change, Preview, Violation, take

FOLDER = Path(__file__).parent
GOLDEN = FOLDER / "sample_comment.md"


def cost(gib: int, run: float | None = 12.5) -> Cost:
    """The cost of a stack like `dev` in three items, in the form of `python -m infra.cost dev --json`."""
    hourly = {"control plane": 0.10, "core nodes": 0.40, "file system, GiB": gib * 0.145 / 730}
    always = sum(hourly.values())
    return {
        "stack": "dev",
        "currency": "USD",
        "date": "2026-08-01",
        "idle_per_hour": always,
        "training_per_hour": always + 1.34,
        "zero_per_hour": always,
        "run": None if run is None else {"cost": run},
        "items": [
            {"name": name, "idle_per_hour": each, "training_per_hour": each, "zero_per_hour": each}
            for name, each in [*hourly.items(), ("trn1", 0.0)]
        ],
    }


def sample() -> Preview:
    found = Preview("dev", diff=(FOLDER / "sample_diff.txt").read_text(encoding="utf-8"), failed=True)
    for line in (FOLDER / "sample_events.jsonl").read_text(encoding="utf-8").splitlines():
        take(EngineEvent.from_json(json.loads(line)), found)
    return found


def test_the_comment_of_the_sample_is_the_one_in_the_repository() -> None:
    text = comment(sample(), cost(1200), cost(2400), len(POLICIES))
    if os.environ.get("REWRITE"):
        GOLDEN.write_text(text, encoding="utf-8")
    assert text == GOLDEN.read_text(encoding="utf-8")


def test_the_engines_events_are_read_as_what_they_say() -> None:
    found = sample()
    assert found.same == 4, "the stack itself is no resource"
    assert Change("update", "aws:fsx/lustreFileSystem:LustreFileSystem", "storage-lustre", ("storageCapacity",)) in (
        found.changes
    )
    (violation,) = found.violations
    assert (violation.rule, violation.resource, violation.mandatory) == (
        "no-public-eks-endpoint",
        "cluster-eksCluster",
        True,
    )
    assert violation.message.startswith("vpcConfig.publicAccessCidrs: 0.0.0.0/0")
    assert found.errors == [], "that a preview with violations failed is no error of its own"


def step(op: str) -> EngineEvent:
    metadata = {"op": op, "urn": "urn:pulumi:dev::p::t::name", "type": "t", "provider": "", "old": None, "new": None}
    return EngineEvent.from_json(
        {"sequence": 1, "timestamp": 1, "resourcePreEvent": {"metadata": metadata, "planning": True}}
    )


def test_a_replacement_counts_once() -> None:
    found = Preview("dev")
    for op in ("create-replacement", "replace", "delete-replaced"):
        take(step(op), found)
    assert found.changes == [Change("replace", "t", "name")]


def test_the_headline_begins_with_what_hurts_most() -> None:
    ops = ("create", "create", "update", "delete", "replace", "import")
    found = Preview("dev", changes=[Change(op, "t", str(i)) for i, op in enumerate(ops)], same=1)
    assert headline(found) == "1 to delete, 1 to replace, 1 to update, 2 to create, 1 to import, 1 unchanged"


def test_nothing_to_change_is_said_in_two_words() -> None:
    text = comment(Preview("dev", same=164), cost(1200), cost(1200), 12)
    assert "## dev: no changes\n" in text
    assert "### Changes" not in text
    assert "| idle, an hour | 0.74 | 0.74 | 0 |" in text
    assert "12 rules, no violation." in text
    assert "<details>" not in text


def test_a_preview_that_fails_says_why_and_claims_nothing() -> None:
    text = comment(Preview("dev", errors=["llama-trainium:region: x, expected ..."], failed=True), None, None, 12)
    assert "## dev: the preview failed\n" in text
    assert "```text\nllama-trainium:region: x, expected ...\n```" in text
    assert "no violation" not in text
    assert "No figures" in text


def test_a_new_stack_has_a_cost_and_nothing_to_compare_it_with() -> None:
    text = comment(Preview("new"), None, cost(1200, run=None), 12)
    assert "| idle, an hour | - | 0.74 | |" in text
    assert "the run" not in text
    assert "What changes" not in text


def test_what_no_longer_costs_anything_is_a_saving() -> None:
    after = cost(1200)
    after["items"] = after["items"][:1]
    assert "- core nodes: -0.40" in comment(Preview("dev"), cost(1200), after, 12)


def test_advice_does_not_count_as_a_violation() -> None:
    found = Preview("dev", violations=[Violation("a-rule", "name", "might be better", mandatory=False)])
    assert headline(found) == "no changes"
    assert "- **a-rule** (advice): `name`: might be better" in comment(found, None, None, 12)


def test_names_and_messages_stay_in_their_cells() -> None:
    hostile = "a | b\n## `x` <img src=y>"
    found = Preview("dev", changes=[Change("create", hostile, hostile, (hostile,))])
    found.violations.append(Violation("a-rule", hostile, hostile, mandatory=True))
    text = comment(found, None, None, 12)
    assert "\n## `x`" not in text
    assert "<img" not in text
    assert "| create | `a \\| b ## 'x' &lt;img src=y>` a \\| b" in text


def test_a_long_diff_is_cut_to_what_github_takes_and_cannot_leave_its_block() -> None:
    line = "    + ``` " + "x" * 90
    text = comment(Preview("dev", diff="\n".join([line] * 2000)), None, None, 12)
    assert LONGEST - 1000 < len(text) < 65_536
    assert text.count("```") == 2
    assert "... cut here" in text
    assert text.rstrip().endswith("</details>")


def test_many_changes_are_counted_and_not_all_listed() -> None:
    found: Any = Preview("dev", changes=[Change("create", "t", str(i)) for i in range(200)])
    text = comment(found, None, None, 12)
    assert "## dev: 200 to create, 0 unchanged" in text
    assert "| ... | and 140 more, in the diff | |" in text
