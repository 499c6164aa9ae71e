"""Writes the plans of the presets into docs/trainium.md, by `python -m training plan`: `make docs`."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from training.config import load_settings, preset_names
from training.plan import NODES, Place, make_plan
from training.plan_table import plan_table

PAGE = Path(__file__).parent / "trainium.md"
BEGIN, END = "<!-- plan: written by `make docs` -->\n", "<!-- end of plan -->"


def figures() -> str:
    """The table of every preset, each with the reasons of what does not fit."""
    parts = []
    for preset in preset_names():
        plans, problems = {}, {}
        for nodes in NODES:
            plans[nodes], problem = make_plan(lambda more, name=preset: load_settings(name, None, more), Place(), nodes)
            if problem is not None:
                problems[nodes] = f"{nodes} node{'s' if nodes > 1 else ''}: {problem}"
        console = Console(file=io.StringIO(), width=80)
        if any(plans.values()):
            console.print(plan_table(preset, plans, problems))
        else:
            console.print(f"{preset} fits on none of these numbers of nodes")
        table = [line.rstrip() for line in console.file.getvalue().splitlines()]
        parts.append("\n".join(["```", *table, *problems.values(), "```", ""]))
    return "\n".join(parts)


if __name__ == "__main__":
    text = PAGE.read_text(encoding="utf-8")
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}{figures()}{END}{after}", encoding="utf-8")
