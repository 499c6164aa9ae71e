"""Which stacks a change touches: each file of the repository is known to touch all, one or none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from review import touched
from review.touched import ELSEWHERE, ROOT, stacks_on_aws

STACKS = ["dev", "us-west-2"]


@pytest.mark.parametrize(
    ("changed", "stacks"),
    [
        (["Pulumi.dev.yaml"], ["dev"]),
        (["Pulumi.dev.yaml", "README.md"], ["dev"]),
        (["Pulumi.gone.yaml"], []),
        (["Pulumi.local.yaml"], []),
        (["Pulumi.yaml"], STACKS),
        (["infra/storage.py"], STACKS),
        (["training/trainer.py"], STACKS),  # it is in the image
        (["policy/rules.py"], STACKS),
        (["constraints.txt"], STACKS),
        (["something/new.py"], STACKS),
        (["docs/operations.md", "tests/infra/mocks.py", "Makefile", ".github/workflows/tests.yml"], []),
        ([], []),
    ],
)
def test_a_change_touches_what_it_is_a_part_of(changed: list[str], stacks: list[str]) -> None:
    assert touched.touched(changed, STACKS) == stacks


def test_what_touches_no_stack_exists_and_no_stack_is_made_of_it() -> None:
    assert [path for path in ELSEWHERE if not (ROOT / path).exists()] == []
    program = ("__main__.py", "infra", "platforms.py", "policy", "stack_settings.py", "training", "workloads")
    assert [path for path in program if f"{path}/x".startswith(ELSEWHERE)] == []


def test_stacks_on_aws_are_those_that_the_program_takes_for_such() -> None:
    files = {path.name.split(".")[1]: yaml.safe_load(path.read_text()) for path in ROOT.glob("Pulumi.*.yaml")}
    on_aws = [name for name, file in files.items() if file["config"].get("llama-trainium:platform", "aws") == "aws"]
    assert stacks_on_aws(ROOT) == sorted(on_aws)
    assert "local" not in on_aws


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the command in it, a stack, and two commits: in the second the stack's file has changed."""
    (tmp_path / "review").mkdir()
    for name in ("__init__.py", "touched.py"):
        (tmp_path / "review" / name).write_text((ROOT / "review" / name).read_text())
    (tmp_path / "Pulumi.dev.yaml").write_text("config: {}\n")
    (tmp_path / "docs").mkdir()
    (tmp_path / "infra.py").write_text("")
    for change in ("one", "two"):
        (tmp_path / "Pulumi.dev.yaml").write_text(f"config: {{x: {change}}}\n")
        (tmp_path / "docs" / "page.md").write_text(change)
        commit(tmp_path)
    return tmp_path


def commit(repository: Path) -> None:
    who = ("-c", "user.name=tests", "-c", "user.email=tests@example.com", "-c", "commit.gpgsign=false")
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "x"]):
        subprocess.run(["git", *who, *command], cwd=repository, check=True)


def ask(repository: Path, *args: str) -> subprocess.CompletedProcess[str]:
    # As a workflow does, without the project's packages.
    command = [sys.executable, "-S", "-m", "review.touched", *args]
    return subprocess.run(command, cwd=repository, capture_output=True, text=True)


def test_the_command_prints_what_a_matrix_reads(repository: Path) -> None:
    assert json.loads(ask(repository, "HEAD^1").stdout) == ["dev"]
    assert json.loads(ask(repository, "HEAD").stdout) == []


def test_a_file_that_moves_out_of_a_stack_touches_it(repository: Path) -> None:
    (repository / "infra.py").rename(repository / "docs" / "infra.py")
    commit(repository)
    assert json.loads(ask(repository, "HEAD^1").stdout) == ["dev"]


@pytest.mark.parametrize("args", [(), ("nothing",)])
def test_a_mistake_is_one_line(args: tuple[str, ...], repository: Path) -> None:
    told = ask(repository, *args)
    assert (told.returncode, told.stdout) == (2, "")
    assert told.stderr.startswith("error: BASE: ")
    assert len(told.stderr.splitlines()) == 1
