"""All comparisons with peers in one go; writes benchmarks/RESULTS.md.

    python -m benchmarks.run [--quick] [--only NAME]      (make bench)

Every benchmark runs in a process of its own, so that its threads and its memory do not disturb the next. Each module
has `run(quick) -> rows`; a row is a dict with

    name     what is compared, and with what
    ours     our median, in `unit`
    peer     the peer's median in the same run, in `unit`
    ratio    of ours to the peer, as the row's name says; median over the interleaved repetitions
    spread   the least and the greatest ratio
    goal     what was aimed at, "" if nothing was
    ok       whether the goal is met, None if there is none or the row was skipped

The page says of every goal whether it was met, and of every benchmark when and where it was measured: `--only` measures
one again and leaves the others as they are. `--quick` (small inputs, few repetitions) prints and writes nothing.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).with_name("RESULTS.md")
DATA = Path(__file__).with_name("results.json")  # what RESULTS.md is rendered from
BENCHMARKS = {
    "data_preparation": "text to a token store: MB of text a second, larger ratios are better",
    "train_step": "one optimizer step at the same shape, dtype, batch and threads: tokens a second, larger is better",
    "loader": "token store to batches: tokens a second, larger is better",
    "checkpoint_stall": "seconds that a checkpoint holds training up, smaller ratios are better",
    "startup": "seconds from the start of a process to its first work, smaller ratios are better",
    "program": "seconds that the Pulumi program takes to evaluate, smaller is better",
    "gpu": "training on one large GPU: tokens a second and share of the bf16 peak, larger is better",
}
PACKAGES = ("torch", "transformers", "ray", "datasets", "tokenizers", "gigatoken", "megatron-core", "numpy")


def measure(name: str, quick: bool) -> list[dict[str, Any]]:
    """The rows of benchmark `name`, from a process of its own; a row that says so when it failed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", "benchmarks.run", "--child", name, file.name, *(["--quick"] if quick else [])]
        ended = subprocess.run(command, check=False)
        if ended.returncode:
            return [{"name": f"{name}: failed with exit code {ended.returncode}", "goal": "to run", "ok": False}]
        rows: list[dict[str, Any]] = json.loads(Path(file.name).read_text())
        return rows


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text: name, ours, peer, ratio, spread, goal, verdict."""

    def number(key: str) -> str:
        value = row.get(key)
        return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value or ""

    unit = f" {row['unit']}" if row.get("unit") else ""
    ours, peer = (f"{number(key)}{unit}" if row.get(key) is not None else "" for key in ("ours", "peer"))
    verdict = {True: "met", False: "**missed**", None: ""}[row.get("ok")]
    return [row["name"], ours, peer, number("ratio"), row.get("spread") or "", row.get("goal") or "", verdict]


HEADER = ["what", "ours", "peer", "ratio", "spread", "goal", "verdict"]


def show(console: Console, name: str, rows: list[dict[str, Any]]) -> None:
    """Print one benchmark's table."""
    table = Table(*HEADER, title=f"{name}: {BENCHMARKS[name]}", title_justify="left")
    for row in rows:
        table.add_row(*(cell.replace("**", "") for cell in cells(row)))
    console.print(table)


def machine() -> str:
    """Processor, cores and memory."""
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{found[1] if found else platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB"


def circumstances(seconds: float) -> str:
    """When, on what and with what a benchmark was measured, in one line."""
    versions = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    return (
        f"{time.strftime('%Y-%m-%d')}, {machine()}, load {os.getloadavg()[1]:.1f}, {seconds / 60:.0f} minutes; "
        f"Python {platform.python_version()}, {versions}"
    )


def page(results: dict[str, dict[str, Any]]) -> str:
    """RESULTS.md, from {benchmark: {"rows": rows, "measured": circumstances}}."""
    lines = [
        "# Results",
        "",
        "Written by `make bench`. Ratios compare with the named peer in the same run, interleaved; absolute figures",
        "are this machine's. A goal that was missed is listed as missed.",
        "",
    ]
    for name, what in BENCHMARKS.items():
        lines += [f"## {name}", "", f"{what[0].upper()}{what[1:]}. `python -m benchmarks.run --only {name}`", ""]
        if name not in results:
            lines += ["Not measured yet.", ""]
            continue
        lines += ["| " + " | ".join(HEADER) + " |", "|---|---:|---:|---:|---|---|---|"]
        for row in results[name]["rows"]:
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells(row)) + " |")
        lines += ["", results[name]["measured"], ""]
    return "\n".join(lines)


def main() -> int:
    """Run what the command line asks for; exit code 1 when a benchmark could not run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small inputs, few repetitions; writes nothing")
    parser.add_argument("--only", choices=BENCHMARKS, help="this one alone")
    parser.add_argument("--child", nargs=2, metavar=("NAME", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, file = options.child
        Path(file).write_text(json.dumps(importlib.import_module(f"benchmarks.{name}").run(options.quick)))
        return 0
    console, failed = Console(), False
    for number, name in enumerate(names := [options.only] if options.only else list(BENCHMARKS), 1):
        console.print(f"{number}/{len(names)} {name} ...", highlight=False)
        started = time.time()
        rows = measure(name, options.quick)
        show(console, name, rows)
        failed = failed or any(row.get("goal") == "to run" for row in rows)
        if not options.quick:
            results = json.loads(DATA.read_text()) if DATA.exists() else {}
            results[name] = {"rows": rows, "measured": circumstances(time.time() - started)}
            DATA.write_text(json.dumps(results, indent=1) + "\n")
            RESULTS.write_text(page(results), encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
