"""The stage `plan`: its options, its table and the formulas under it."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path

import click
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from training.config import load_settings
from training.errors import UserError
from training.footprint import FORMULAS
from training.messages import explain
from training.options import StageCommand, help_of, metavar, once, write_options
from training.plan import NODES, RESERVED_BYTES, Place, Plan, make_plan
from training.progress import amount, summary_table
from training.trainium import CORE_BYTES

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
_SHOWN = ("model", "train", "parallel.tensor_parallel_size", "checkpoint")


class PlanCommand(StageCommand):
    """`plan`: all settings as options, and those of `Place`."""

    def __init__(self) -> None:
        super().__init__("plan", lambda settings: None, "what a run needs on Trainium: memory, time", shown=_SHOWN)
        self.place_options = [
            click.Option(
                [f"--{key.replace('_', '-')}", key],
                multiple=True,
                metavar=metavar(field.annotation),
                help=help_of(field),
            )
            for key, field in Place.model_fields.items()
        ]
        self.params += self.place_options

    def _run(self, preset: tuple[str, ...], config: tuple[str, ...], **given: tuple[str, ...]) -> None:
        name, path, chosen = self.chosen(preset, config, given)
        if "parallel.workers" in chosen:
            raise UserError(f"parallel.workers: {chosen['parallel.workers']}, expected none: --nodes says how many")
        values = {key: once(key.replace("_", "-"), given[key]) for key in Place.model_fields}
        print_plan(name, path, chosen, _place({key: value for key, value in values.items() if value is not None}))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(ctx, formatter, "Where the run is to be", self.place_options)
        super().format_options(ctx, formatter)


def _place(values: dict[str, str]) -> Place:
    try:
        return Place.model_validate(values)
    except ValidationError as error:
        lines = [explain(f"--{str(item['loc'][0]).replace('_', '-')}", item) for item in error.errors()]
        raise UserError("\n".join(lines)) from None


def print_plan(preset: str | None, config: Path | None, overrides: dict[str, str], place: Place) -> None:
    """Print the table and the formulas.

    Raises `UserError` when the number of nodes that was asked for does not fit, or none of several does.
    """
    plans: dict[int, Plan | None] = {}
    problems: dict[int, str] = {}
    for nodes in (place.nodes,) if place.nodes is not None else NODES:
        plans[nodes], problem = make_plan(lambda more: load_settings(preset, config, overrides | more), place, nodes)
        if problem is not None:
            problems[nodes] = f"{nodes} node{'s' if nodes != 1 else ''}: {problem}"
    console = Console(highlight=False)
    if any(plans.values()):
        console.print(plan_table(preset or str(config or "the defaults"), plans, problems.keys()))
        console.print()
        console.print(summary_table(FORMULAS.items(), "bytes per core"))
    if len(problems) == len(plans):
        raise UserError("\n".join(problems.values()))
    for line in problems.values():
        console.print(line, style="yellow", markup=False, soft_wrap=True)


def plan_table(title: str, plans: Mapping[int, Plan | None], refused: Container[int]) -> Table:
    """One column per number of nodes; `-` where the settings do not go together, `no` where they do not fit."""
    table = Table(
        title=f"{title} on trn1.32xlarge", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold"
    )
    table.add_column("nodes", no_wrap=True)
    for nodes in plans:
        table.add_column(str(nodes), justify="right", no_wrap=True)
    for label, cell in _ROWS.items():
        table.add_row(label, *("-" if made is None else cell(made) for made in plans.values()))
    table.add_row("fits", *("no" if nodes in refused else "yes" for nodes in plans), style="bold")
    return table


def _layout(made: Plan) -> str:
    parallel = made.settings.parallel
    return f"{parallel.data_parallel_size} x {parallel.tensor_parallel_size}"


def _gib(part: Callable[[Plan], int]) -> Callable[[Plan], str]:
    return lambda made: f"{part(made) / 2**30:.2f}"


def _time(seconds: float) -> str:
    """In one unit, so that a column stays narrow."""
    size, unit = next(((size, unit) for size, unit in _UNITS if seconds >= 2 * size), (1, "s"))
    return f"{seconds / size:,.0f} {unit}" if seconds >= 100 * size else f"{seconds / size:.3g} {unit}"


_ROWS: dict[str, Callable[[Plan], str]] = {
    "cores": lambda made: f"{made.settings.parallel.workers:,}",
    "data x tensor parallel": _layout,
    "micro-batches a worker": lambda made: f"{made.settings.accumulation_steps:,}",
    "GiB a core: weights": _gib(lambda made: made.footprint.weights),
    "  gradients": _gib(lambda made: made.footprint.gradients),
    "  optimizer": _gib(lambda made: made.footprint.optimizer),
    "  activations": _gib(lambda made: made.footprint.activations),
    "  joined weights": _gib(lambda made: made.footprint.joined),
    "  a layer at work": _gib(lambda made: made.footprint.layer),
    "  head and loss": _gib(lambda made: made.footprint.loss),
    "  left to the runtime": _gib(lambda made: RESERVED_BYTES),
    f"  sum, of {CORE_BYTES / 2**30:.0f}": _gib(lambda made: made.core_bytes),
    "tokens per step": lambda made: amount(made.tokens_per_step),
    "MFU": lambda made: f"{made.mfu:.1%}",
    "time per step": lambda made: _time(made.step_seconds),
    "tokens/s": lambda made: amount(made.tokens_per_step / made.step_seconds),
    "all steps": lambda made: _time(made.run_seconds),
    "checkpoint, GiB": _gib(lambda made: made.checkpoint_bytes),
    "  written in": lambda made: _time(made.checkpoint_seconds),
    "  one every": lambda made: _time(made.settings.checkpoint.every * made.step_seconds),
}
