"""How long the Pulumi program takes to evaluate: the stack files for AWS under the tests' engine in memory.

    python -m benchmarks.program

Whole processes, so start-up and imports count, as they do in `pulumi preview`; no cloud answers, so nothing else does.
The peer is the floor: importing the modules of Pulumi's SDKs that the program uses. The goal is 5 seconds on 2 cores.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GOAL = 5.0
PROGRAM = """
import sys
sys.path[:0] = [".", "tests/infra"]
from mocks import load_stack, run_program
recorded = run_program(load_stack(sys.argv[1]), {"llama-trainium:huggingFaceToken": "none"}, sys.argv[1])
print(len(recorded.resources), *(name for name in sys.modules if name.startswith("pulumi") and "mocks" not in name))
"""
IMPORTS = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows: seconds of the program and of the bare imports, medians; the ratio is ours / peer."""
    # `local` asks a cluster of the kubeconfig whether it is there, and registers a fraction of what the others do.
    stacks = sorted({path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml")} - {"local"})
    repetitions = 1 if quick else 5
    rows = []
    for stack in stacks[:1] if quick else stacks:
        ours, peer, resources = [], [], ""
        for _ in range(repetitions):
            seconds, said = _run(PROGRAM, stack)
            resources, *modules = said.split()
            ours.append(seconds)
            peer.append(_run(IMPORTS, *modules)[0])
        ratios = sorted(a / b for a, b in zip(ours, peer, strict=True))
        rows.append(
            {
                "name": f"program for {stack}, {resources} resources / the SDKs' modules alone",
                "ours": statistics.median(ours),
                "peer": statistics.median(peer),
                "unit": "s",
                "ratio": statistics.median(ratios),
                "spread": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                "goal": f"ours at most {GOAL:.0f} s",
                "ok": statistics.median(ours) <= GOAL,
            }
        )
    return rows


def _run(code: str, *arguments: str) -> tuple[float, str]:
    started = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return time.perf_counter() - started, ended.stdout.strip()


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(row)
