"""What a stack costs and would cost: `python -m infra.cost STACK --json` in a copy of the commit before, and here."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

Cost = dict[str, Any]
"""What infra.cost prints: stack, currency, date, idle_per_hour, training_per_hour, zero_per_hour, run, items."""


def cost(stack: str, root: Path) -> Cost | None:
    """The cost of the stack of the project in `root`; None where that has no such stack, or cannot tell."""
    command = [sys.executable, "-m", "infra.cost", stack, "--json"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode:
        return None
    found: Cost = json.loads(done.stdout)
    return found


def cost_at(commit: str, stack: str, root: Path) -> Cost | None:
    """The cost at a commit of the repository in `root`, by the prices and the settings of that time."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", copy, commit], cwd=root, check=True)
        try:
            return cost(stack, copy)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", copy], cwd=root, check=True)
