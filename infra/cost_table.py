"""The cost of a stack as a table, and in words what scale-to-zero saves and what a run costs."""

from __future__ import annotations

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from infra.estimate import Line, Report
from infra.prices import HOURS_PER_MONTH, unit_of
from training.progress import duration

BY_USE = "data through NAT and endpoints, the bucket, the registry's images, logs, requests to keys, queues and metrics"
"""What a stack pays for by use, which no setting tells."""


def print_report(console: Console, found: Report, sources: Mapping[str, str]) -> None:
    """Print all that there is to say."""
    if found.region is None:
        console.print(f"{found.stack}: platform: existing, a stack without resources on AWS: 0.00 dollars an hour")
        return
    console.print(cost_table(found))
    for line in (*_notes(found), *_saved(found), *_run(found), f"Paid by use, and not in here: {BY_USE}."):
        console.print(f"\n{line}", markup=False)
    console.print("\nPrices: list prices in US dollars, before taxes and discounts.")
    for source, text in sorted(sources.items()):
        if dates := sorted({str(price.date) for price in found.prices if price.source == source}):
            span = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
            console.print(f"  {source}, {span}: {text}", markup=False)


def cost_table(found: Report) -> Table:
    """One row for each kind of resource, dollars an hour."""
    table = Table(
        title=f"{found.stack}, {found.region}: dollars an hour",
        title_justify="left",
        box=None,
        padding=(0, 2, 0, 0),
        header_style="bold",
    )
    table.add_column("", no_wrap=True)
    for name in ("how many", "price", "idle", "training", "scaled to zero"):
        table.add_column(name, justify="right", no_wrap=True)
    for line in found.lines:
        dollars = (line.idle, line.training, line.zero)
        table.add_row(f"{line.item.name}{_kind(line)}", _count(line), _price(line), *map(_dollars, dollars))
    totals = (found.idle, found.training, found.zero)
    monthly = [_dollars(total * HOURS_PER_MONTH) for total in totals]
    table.add_row("an hour", "", "", *map(_dollars, totals), style="bold")
    table.add_row(f"a month of {HOURS_PER_MONTH} hours", "", "", *monthly)
    return table


def _notes(found: Report) -> list[str]:
    return [f"{line.item.name}: {line.item.note}." for line in found.lines if line.item.note]


def _saved(found: Report) -> list[str]:
    saved = found.training - found.zero
    share = f" ({saved / found.training:.0%})" if found.training else ""
    lines = [
        f"Scale-to-zero saves {_dollars(saved)} dollars{share} of every hour without a job, next to nodes that stay."
    ]
    if (kept := found.idle - found.zero) > 0:
        lines.append(
            f"These settings keep nodes while no job runs: min and desired 0 would save {_dollars(kept)} an hour."
        )
    return lines


def _run(found: Report) -> list[str]:
    if found.run is None:
        return [f"No run is predicted: {found.no_run}."]
    plan = found.run.plan
    nodes = f"{plan.place.nodes} node{'s' if plan.place.nodes != 1 else ''}"
    return [
        f"A run of {plan.settings.train.steps:,} steps takes {duration(plan.run_seconds)} on {nodes} at an MFU of "
        f"{plan.mfu:.1%} (training.plan), and costs {_dollars(found.run.cost)} dollars. Starts, compilation, "
        "evaluations and restarts come on top."
    ]


def _kind(line: Line) -> str:
    key = line.item.key
    return f", {key}" if key and ("." in key or key == "gp3" or key.startswith("fsx")) else ""


def _price(line: Line) -> str:
    if line.price is None or line.item.key is None:
        return "-"
    return f"{line.price.usd:g} / {unit_of(line.item.key)}"


def _count(line: Line) -> str:
    """One number, or those of the three states where they differ."""
    counts = (line.item.idle, line.item.training, line.item.zero)
    return " / ".join(f"{count:,g}" for count in counts[: 3 if len(set(counts)) > 1 else 1])


def _dollars(amount: float) -> str:
    """Two digits behind the point, three where that would be nothing."""
    return f"{amount:,.2f}" if amount == 0 or abs(amount) >= 0.1 else f"{amount:.4f}"
