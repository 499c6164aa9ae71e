"""The comment on a pull request, by its own command, the real engine and the policy pack: a sample change of a stack
that is up. The same sample is what tests/review renders from a record.

    make test-engine ARGS=tests/engine/test_review.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from stack import ROOT, TOKEN, Stack, missing

from policy.rules import POLICIES

pytestmark = [pytest.mark.skipif(missing() is not None, reason=str(missing())), pytest.mark.timeout(1200)]

GOLDEN = ROOT / "tests" / "review" / "sample_comment.md"
SAMPLE = {
    "storage": {"retainOnDelete": False, "sizeGib": 2400},
    "cluster": {"publicAccessCidrs": ["0.0.0.0/0"], "iKnowTheApiIsOpenToTheWorld": True},
}
"""A larger file system, which is a change like any other, and an API server open to the world, which breaks a rule."""
GIT = ("-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "commit.gpgsign=false")


def review(stack: Stack, *args: str) -> subprocess.CompletedProcess[str]:
    """`python -m review` in the project, as `make preview-comment` runs it."""
    command = [sys.executable, "-m", "review", *args]
    return subprocess.run(command, cwd=stack.project, env=stack.env, capture_output=True, text=True, timeout=900)


def make_comment(stack: Stack, output: Path) -> subprocess.CompletedProcess[str]:
    """`make preview-comment`, with the packages of the tests."""
    given = [f"BIN={Path(sys.executable).parent}", "STACK=dev", "BASE=HEAD", f"OUTPUT={output}"]
    command = ["make", "--no-print-directory", "--old-file=setup", "preview-comment", *given]
    return subprocess.run(command, cwd=stack.project, env=stack.env, capture_output=True, text=True, timeout=900)


def git(stack: Stack, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *GIT, *args], cwd=stack.project, check=True, capture_output=True, text=True)


def part(comment: str, title: str) -> str:
    """A section of a comment."""
    return comment.partition(f"### {title}\n")[2].partition("\n### ")[0].partition("<details>")[0].strip()


def test_a_pull_request_is_told_what_changes_and_which_rule_it_breaks(
    new_stack: Callable[..., Stack], tmp_path: Path
) -> None:
    stack = new_stack("dev")
    git(stack, "init", "--quiet")
    git(stack, "add", ".")
    git(stack, "commit", "--quiet", "-m", "before")
    stack.up().ok()
    written = tmp_path / "comments" / "dev.md"

    same = make_comment(stack, written)
    assert same.returncode == 0, same.stderr
    assert written.read_text().startswith("<!-- preview of dev -->\n## dev: no changes\n")
    assert part(written.read_text(), "Policy") == f"{len(POLICIES)} rules, no violation."

    stack.change(SAMPLE)
    told = make_comment(stack, written)
    assert told.returncode != 0, told.stderr
    comment = written.read_text()
    assert re.match(r"<!-- preview of dev -->\n## dev: \d+ to update, \d+ unchanged; 1 violation\n", comment)
    # The stand-in knows no output of what changes, so that more seems to change with it than would.
    rows = part(GOLDEN.read_text(), "Changes").splitlines()[2:]
    assert set(rows) <= set(part(comment, "Changes").splitlines())
    assert part(comment, "Policy") == part(GOLDEN.read_text(), "Policy")
    assert re.search(r"^! +storageCapacity *: 1200 => 2400$", comment, re.MULTILINE), comment
    assert TOKEN not in comment
    copies = git(stack, "worktree", "list").stdout.splitlines()
    assert len(copies) == 1, "the copy of the commit before is gone"


def test_a_mistake_in_the_settings_is_what_the_comment_says(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack("dev", config={"storage": {"sizeGib": 7}})
    git(stack, "init", "--quiet")
    git(stack, "commit", "--quiet", "--allow-empty", "-m", "before")
    told = review(stack, "dev", "--base", "HEAD")
    assert told.returncode == 1, told.stderr
    assert "## dev: the preview failed" in told.stdout
    assert "llama-trainium:storage.sizeGib: 7, expected " in part(told.stdout, "Errors")
    assert part(told.stdout, "Policy") == "Not all resources were looked at."


def test_a_stack_that_pulumi_does_not_know_is_one_line(new_stack: Callable[..., Stack]) -> None:
    stack = new_stack("dev")
    (stack.project / "Pulumi.us-west-2.yaml").symlink_to(ROOT / "Pulumi.us-west-2.yaml")
    git(stack, "init", "--quiet")
    git(stack, "commit", "--quiet", "--allow-empty", "-m", "before")
    told = review(stack, "us-west-2", "--base", "HEAD")
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr == "error: pulumi: no stack named 'us-west-2' found\n"
