"""Which stacks a change touches, as a JSON list for a workflow's matrix. Needs git and Python's own library only.

python3 -m review.touched HEAD^1        # ["dev", "us-west-2"]
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]

ELSEWHERE = (
    ".ci/",
    ".github/",
    "benchmarks/",
    "docs/",
    "review/",
    "tests/",
    ".gitignore",
    "LICENSE",
    "Makefile",
    "README.md",
    "pyproject.toml",
    "requirements-dev.txt",
)
"""What no stack is made of. Everything else is in all of them: what is new touches too much rather than too little."""

STACK_FILE = re.compile(r"Pulumi\.([^./]+)\.yaml")
ON_A_CLUSTER_THAT_IS_THERE = re.compile(r"""^ *llama-trainium:platform: *["']?existing""", re.MULTILINE)


def stacks_on_aws(root: Path) -> list[str]:
    """The stacks that have a file and resources on AWS: a cluster of a kubeconfig is out of a workflow's reach."""
    files = {match[1]: path for path in root.iterdir() if (match := STACK_FILE.fullmatch(path.name))}
    return sorted(name for name, path in files.items() if not ON_A_CLUSTER_THAT_IS_THERE.search(path.read_text()))


def touched(changed: Iterable[str], stacks: Iterable[str]) -> list[str]:
    """Those of `stacks` that the changed files (paths in the repository) are a part of."""
    own, every = set(), False
    for path in changed:
        if match := STACK_FILE.fullmatch(path):
            own.add(match[1])
        elif not path.startswith(ELSEWHERE):
            every = True
    return [name for name in stacks if every or name in own]


def changed_since(base: str, root: Path) -> list[str]:
    """Paths that differ between the commit `base` and HEAD; a renamed file counts with both names."""
    command = ["git", "diff", "--name-only", "--no-renames", "-z", f"{base}..HEAD"]
    found = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [path for path in found.split("\0") if path]


def main() -> int:
    """Print the list; returns the exit code."""
    if len(sys.argv) != 2:
        print("error: BASE: missing, expected a commit: python3 -m review.touched HEAD^1", file=sys.stderr)
        return 2
    try:
        print(json.dumps(touched(changed_since(sys.argv[1], ROOT), stacks_on_aws(ROOT))))
    except subprocess.CalledProcessError:
        print(f"error: BASE: {sys.argv[1]}, expected a commit of this repository", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
