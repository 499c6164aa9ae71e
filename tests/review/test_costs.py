"""The cost before a change is that of the commit before, by its own prices and settings; and the command's mistakes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from review.__main__ import main
from review.costs import cost, cost_at

PRICE = """
import json, sys
from pathlib import Path
print(json.dumps({"stack": sys.argv[1], "idle_per_hour": float(Path(f"Pulumi.{sys.argv[1]}.yaml").read_text())}))
"""
"""Stands for infra/cost.py: a stack file is its cost."""


def git(folder: Path, *args: str) -> str:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "commit.gpgsign=false")
    done = subprocess.run(["git", *who, *args], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Three commits: no way to tell a cost, a cost of 1, and now one of 2."""
    (tmp_path / "infra").mkdir()
    git(tmp_path, "init", "--quiet")
    for name, text in {"Pulumi.dev.yaml": "1", "infra/cost.py": PRICE, "Pulumi.dev.yaml ": "2"}.items():
        (tmp_path / name.strip()).write_text(text)
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "--quiet", "-m", name)
    return tmp_path


def test_each_commit_tells_its_own_cost_and_leaves_no_copy(repository: Path) -> None:
    assert cost("dev", repository) == {"stack": "dev", "idle_per_hour": 2}
    assert cost_at("HEAD", "dev", repository) == {"stack": "dev", "idle_per_hour": 2}
    assert cost_at("HEAD^1", "dev", repository) == {"stack": "dev", "idle_per_hour": 1}
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_what_cannot_tell_a_cost_has_none(repository: Path) -> None:
    assert cost_at("HEAD~2", "dev", repository) is None, "before there was a command for it"
    assert cost_at("HEAD", "new", repository) is None, "before there was such a stack"
    assert len(git(repository, "worktree", "list").splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nowhere", "--base", "HEAD"], "error: STACK: nowhere, expected one of dev, us-east-1, us-east-2, us-west-2"),
        (["local", "--base", "HEAD"], "error: STACK: local, expected one of "),
        (["dev", "--base", "no-such-commit"], "error: BASE: no-such-commit, expected a commit"),
        (["dev"], "error: Missing option '--base'."),
        ([], "error: Missing argument 'STACK'."),
    ],
)
def test_a_mistake_in_the_command_is_one_line(args: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(said)
    assert len(told.err.splitlines()) == 1
