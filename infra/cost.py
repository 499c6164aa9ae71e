"""What a stack costs: dollars an hour by resource, idle, while it trains and scaled to zero, and dollars a run.

    python -m infra.cost us-west-2              # a table, and what scale-to-zero saves
    python -m infra.cost us-west-2 --json       # the same for programs
    python -m infra.cost us-west-2 --refresh    # asks AWS for the prices first, and writes infra/prices.yaml

List prices before taxes and discounts, from the checked-in table; without `--refresh` nothing is asked of anyone.
A run is the time that training.plan predicts. What is paid by use (data through NAT, the bucket, logs) is not in it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console

from infra import command
from infra.cost_table import print_report
from infra.estimate import Report, report
from infra.price_refresh import refreshed
from infra.prices import read_prices, unit_of, write_prices
from infra.quantities import Use, items
from stack_files import read_stack_file
from stack_settings import AwsStack


def use_of(settings: AwsStack) -> Use:
    """What the workloads of the stack add: their pages share one load balancer (workloads/ingress.py)."""
    workloads = settings.workloads
    exposed = workloads.dashboard.host or (workloads.tensorboard.host and workloads.tensorboard.enabled)
    held = workloads.ray_cluster.min_nodes if workloads.ray_cluster.enabled else 0
    return Use(load_balancers=int(bool(exposed)), held_nodes=held, trains_on_held=not workloads.gang)


def as_json(found: Report) -> dict[str, Any]:
    """The report for programs. Dollars; `date` is that of the oldest price; `run` is null where none is predicted."""
    run = found.run and {
        "hours": found.run.hours,
        "cost": found.run.cost,
        "steps": found.run.plan.settings.train.steps,
        "nodes": found.run.plan.place.nodes,
    }
    return {
        "stack": found.stack,
        "region": found.region,
        "currency": "USD",
        "date": str(found.prices[0].date) if found.prices else None,
        "idle_per_hour": found.idle,
        "training_per_hour": found.training,
        "zero_per_hour": found.zero,
        "run": run,
        "items": [
            {
                "name": line.item.name,
                "key": line.item.key,
                "price": line.price and line.price.usd,
                "unit": line.item.key and unit_of(line.item.key),
                "date": line.price and str(line.price.date),
                "source": line.price and line.price.source,
                "idle": line.item.idle,
                "training": line.item.training,
                "zero": line.item.zero,
                "idle_per_hour": line.idle,
                "training_per_hour": line.training,
                "zero_per_hour": line.zero,
                "note": line.item.note,
            }
            for line in found.lines
        ],
    }


@click.command("cost", context_settings={"max_content_width": 120})
@click.argument("stack")
@click.option("--json", "machine", is_flag=True, help="print JSON")
@click.option("--refresh", is_flag=True, help="ask AWS's pricing API, and write infra/prices.yaml")
def cli(stack: str, machine: bool, refresh: bool) -> None:
    """What STACK costs, in dollars an hour and dollars a run."""
    file = read_stack_file(stack)
    if not file.on_aws:
        found, table = Report(stack, None), None
    else:
        settings = file.settings()
        use, table = use_of(settings), read_prices()
        if refresh:
            keys = {item.key for item in items(settings, use) if item.key}
            table, not_found = refreshed(table, settings.region, keys)
            write_prices(table)
            for line in not_found:
                click.echo(line, err=True)
        found = report(stack, settings, use, table)
    if machine:
        click.echo(json.dumps(as_json(found), indent=2))
    else:
        console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else 120)
        print_report(console, found, table.sources if table else {})


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command.run(cli, argv)


if __name__ == "__main__":
    sys.exit(main())
