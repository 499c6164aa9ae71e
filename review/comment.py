"""The comment on a pull request, in GitHub's Markdown: for one stack the changes, the cost, the rules it breaks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from review.costs import Cost
from review.preview import Preview

LONGEST = 60_000
"""Characters; GitHub refuses a comment of more than 65,536."""
MOST_CHANGES = 60
"""Rows of the table; the rest is in the diff."""

ORDER = ("delete", "replace", "update", "create")
SUMS = (("idle", "idle_per_hour"), ("training", "training_per_hour"), ("scaled to zero", "zero_per_hour"))
CENT = 0.005
MARK = re.compile(r"^( +)([-+~])(?= )", re.MULTILINE)


def marker(stack: str) -> str:
    """The first line, by which a later run finds its comment."""
    return f"<!-- preview of {stack} -->"


def comment(preview: Preview, before: Cost | None, after: Cost | None, rules: int) -> str:
    """The whole comment. `before` is None where there is nothing to compare with, `rules` the number in the pack."""
    head = [marker(preview.stack), f"## {preview.stack}: {headline(preview)}", ""]
    body = [*_errors(preview), *_changes(preview), *_cost(before, after), *_policy(preview, rules)]
    text = "\n".join([*head, *body])
    return f"{text}\n{_diff(preview.diff, LONGEST - len(text))}"


def headline(preview: Preview) -> str:
    """In a few words."""
    counted = Counter(change.op for change in preview.changes)
    known = [f"{counted.pop(op)} to {op}" for op in ORDER if op in counted]
    parts = [*known, *(f"{count} to {op}" for op, count in sorted(counted.items()))]
    said = ", ".join([*parts, f"{preview.same} unchanged"]) if parts else "no changes"
    broken = sum(violation.mandatory for violation in preview.violations)
    if preview.failed and not broken:
        return "the preview failed"
    return f"{said}; {_count(broken, 'violation')}" if broken else said


def _errors(preview: Preview) -> Iterator[str]:
    if preview.failed and preview.errors:
        yield from ["### Errors", "", "```text", *(_unfenced(error) for error in preview.errors), "```", ""]


def _changes(preview: Preview) -> Iterator[str]:
    if not preview.changes:
        return
    yield from ["### Changes", "", "| | resource | inputs |", "|---|---|---|"]
    ops = {op: i for i, op in enumerate(ORDER)}
    ordered = sorted(preview.changes, key=lambda each: (ops.get(each.op, len(ops)), each.type, each.name))
    for change in ordered[:MOST_CHANGES]:
        keys = ", ".join(f"`{_cell(key)}`" for key in change.keys)
        yield f"| {change.op} | `{_cell(change.type)}` {_cell(change.name)} | {keys} |"
    if more := ordered[MOST_CHANGES:]:
        yield f"| ... | and {len(more)} more, in the diff | |"
    yield ""


def _cost(before: Cost | None, after: Cost | None) -> Iterator[str]:
    yield from ["### Cost", ""]
    if after is None:
        yield from ["No figures: `python -m infra.cost` could not tell.", ""]
        return
    yield from [f"| {after['currency']} | before | after | change |", "|---|---:|---:|---:|"]
    for name, key in SUMS:
        yield _row(f"{name}, an hour", before[key] if before else None, after[key])
    if run := after.get("run"):
        earlier = before.get("run") if before else None
        yield _row("the run, as planned", earlier["cost"] if earlier else None, run["cost"])
    yield ""
    if changed := list(_items(before, after)):
        yield from ["What changes, an hour while it trains:", "", *changed, ""]
    yield from [f"List prices, the oldest of {after['date']} (`python -m infra.cost {after['stack']}`).", ""]


def _row(name: str, before: float | None, after: float) -> str:
    if before is None:
        return f"| {name} | - | {after:,.2f} | |"
    change = f"{after - before:+,.2f}" if abs(after - before) >= CENT else "0"
    return f"| {name} | {before:,.2f} | {after:,.2f} | {change} |"


def _items(before: Cost | None, after: Cost) -> Iterator[str]:
    if before is None:
        return
    old, new = ({item["name"]: item["training_per_hour"] for item in cost["items"]} for cost in (before, after))
    for name in [*new, *(name for name in old if name not in new)]:
        change = new.get(name, 0.0) - old.get(name, 0.0)
        if abs(change) >= CENT:
            yield f"- {name}: {change:+,.2f}"


def _policy(preview: Preview, rules: int) -> Iterator[str]:
    yield from ["### Policy", ""]
    if preview.violations:
        for each in sorted(preview.violations, key=lambda each: (each.rule, each.resource)):
            level = "" if each.mandatory else " (advice)"
            yield f"- **{each.rule}**{level}: `{_cell(each.resource)}`: {_cell(each.message)}"
    elif preview.failed:
        yield "Not all resources were looked at."
    else:
        yield f"{rules} rules, no violation."
    yield ""


def _diff(diff: str, room: int) -> str:
    # GitHub colours what is marked in the first column; Pulumi marks behind the indentation.
    shown = MARK.sub(lambda line: line[2].replace("~", "!") + line[1], _unfenced(diff))
    if len(shown) > room:
        shown = shown[: max(0, room)].rpartition("\n")[0] + "\n... cut here: the workflow's log has it all"
    return f"<details><summary>diff</summary>\n\n```diff\n{shown}\n```\n\n</details>\n" if diff.strip() else ""


def _unfenced(text: str) -> str:
    """Text that does not end the block that it stands in."""
    return text.replace("```", "'''")


def _cell(text: str) -> str:
    """Text for a cell of a table, or an item of a list: no line breaks, and no other markup than ours."""
    return " ".join(text.split()).replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
