"""The workflows of .github: actions pinned by commit, no right beyond what a job does, no key that lasts."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEXTS = {file.name: file.read_text(encoding="utf-8") for file in FILES}
WORKFLOWS: dict[str, Any] = {name: yaml.safe_load(text) for name, text in TEXTS.items()}
JOBS = {f"{name}: {job}": found for name, workflow in WORKFLOWS.items() for job, found in workflow["jobs"].items()}

# What an action or a command needs of the token of its job. Whoever uses another says here what it needs.
RIGHTS_OF_ACTIONS: dict[str, dict[str, str]] = {
    "actions/checkout": {"contents": "read"},
    "actions/setup-python": {},
    "actions/upload-artifact": {},
    "actions/download-artifact": {},  # of its own run
    "pulumi/actions": {},  # without `command` it installs Pulumi, and no more
    "aws-actions/configure-aws-credentials": {"id-token": "write"},
}
RIGHTS_OF_COMMANDS = {"gh api": {"pull-requests": "write"}}

ACTIONLINT = shutil.which("actionlint", path=f"{os.environ['PATH']}{os.pathsep}{Path(sys.executable).parent}")


def steps(job: Any) -> Iterator[Any]:
    yield from job["steps"]


def rights(job: Any) -> dict[str, str]:
    """What the steps of a job need."""
    needed: dict[str, str] = {}
    for step in steps(job):
        if "uses" in step:
            needed |= RIGHTS_OF_ACTIONS[step["uses"].partition("@")[0]]
        for command, right in RIGHTS_OF_COMMANDS.items():
            if command in step.get("run", ""):
                needed |= right
    return needed


@pytest.mark.skipif(ACTIONLINT is None, reason="actionlint not found (make workflows builds it with Go)")
def test_actionlint_finds_nothing() -> None:
    assert ACTIONLINT
    done = subprocess.run([ACTIONLINT, "-no-color", *map(str, FILES)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.parametrize("name", TEXTS)
def test_every_action_is_pinned_by_commit_and_says_its_version(name: str) -> None:
    used = re.findall(r"^\s*(?:- )?uses: *(.*)$", TEXTS[name], re.MULTILINE)
    assert len(used) == sum("uses" in step for job in WORKFLOWS[name]["jobs"].values() for step in steps(job))
    assert [each for each in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", each)] == []


def test_an_action_has_one_commit_everywhere() -> None:
    used = {each for text in TEXTS.values() for each in re.findall(r"uses: (.*)", text)}
    assert len({each.partition("@")[0] for each in used}) == len(used)


@pytest.mark.parametrize("name", JOBS)
def test_a_job_has_the_rights_that_it_uses_and_no_other(name: str) -> None:
    assert JOBS[name]["permissions"] == rights(JOBS[name])


def test_no_right_is_given_to_all_jobs() -> None:
    assert {name: workflow["permissions"] for name, workflow in WORKFLOWS.items()} == {name: {} for name in WORKFLOWS}


@pytest.mark.parametrize("name", TEXTS)
def test_there_is_no_key_to_steal(name: str) -> None:
    assert "secrets." not in TEXTS[name]
    for job in WORKFLOWS[name]["jobs"].values():
        for step in steps(job):
            given = step.get("with") or {}
            if step.get("uses", "").startswith("aws-actions/"):
                assert set(given) <= {"role-to-assume", "aws-region", "role-duration-seconds"}
            if step.get("uses", "").startswith("actions/checkout@"):
                assert given["persist-credentials"] is False


@pytest.mark.parametrize("name", JOBS)
def test_no_expression_is_pasted_into_a_shell(name: str) -> None:
    assert [step["run"] for step in steps(JOBS[name]) if "${{" in step.get("run", "")] == []


def test_a_fork_gets_no_role_and_whoever_may_comment_runs_none_of_the_requests_code() -> None:
    events = {name: workflow[True] for name, workflow in WORKFLOWS.items()}  # YAML 1.1 reads `on` as true
    assert not [name for name, on in events.items() if "pull_request_target" in on or "workflow_run" in on]
    preview = WORKFLOWS["preview.yml"]["jobs"]
    assert "head.repo.full_name == github.repository" in preview["stacks"]["if"]
    assert preview["preview"]["needs"] == "stacks"
    for job in JOBS.values():
        if job["permissions"].get("pull-requests") == "write":
            assert not [step for step in steps(job) if "checkout" in step.get("uses", "")]


def test_an_update_is_of_main_and_waits_for_an_approval() -> None:
    updates = {
        name: job for name, job in JOBS.items() if any("pulumi up" in step.get("run", "") for step in steps(job))
    }
    assert list(updates) == ["deploy.yml: up"]
    (job,) = updates.values()
    assert WORKFLOWS["deploy.yml"][True] == {"push": {"branches": ["main"]}}
    assert job["environment"] == "${{ matrix.stack }}"
    assert job["concurrency"]["cancel-in-progress"] is False
    (command,) = [step["run"] for step in steps(job) if "pulumi up" in step.get("run", "")]
    assert command.endswith("--policy-pack policy")


def test_pulumi_is_of_the_version_of_its_sdk() -> None:
    pins = dict(re.findall(r"^(pulumi[\w-]*)==(.*)$", (ROOT / "requirements.txt").read_text(), re.MULTILINE))
    found = {str(step["with"]["pulumi-version"]) for job in JOBS.values() for step in steps(job) if _installs(step)}
    assert found == {pins["pulumi"]}
    assert f"pulumi plugin install resource eks {pins['pulumi-eks']}" in TEXTS["tests.yml"]


def _installs(step: Any) -> bool:
    return bool(step.get("uses", "").startswith("pulumi/actions@"))


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq not found, which gh has built in")
@pytest.mark.parametrize("earlier", [None, 7])
def test_a_comment_is_posted_once_and_then_replaced(earlier: int | None, tmp_path: Path) -> None:
    (tmp_path / "comments").mkdir()
    (tmp_path / "comments" / "dev.md").write_text("<!-- preview of dev -->\nnew")
    there = [{"id": 5, "user": {"login": "somebody"}, "body": "<!-- preview of dev -->\nquoted"}]
    there += [{"id": 6, "user": {"login": "github-actions[bot]"}, "body": "<!-- preview of dev2 -->\r\nanother"}]
    if earlier:
        there.append(
            {"id": earlier, "user": {"login": "github-actions[bot]"}, "body": "<!-- preview of dev -->\r\nold"}
        )
    (tmp_path / "there.json").write_text(json.dumps(there))
    gh = tmp_path / "gh"
    gh.write_text(
        '#!/bin/bash\nif [[ $* == *--jq* ]]; then jq -r "${@: -1}" there.json; else printf "%s\\n" "$@" > asked; fi\n'
    )
    gh.chmod(0o755)
    (script,) = [step["run"] for step in steps(JOBS["preview.yml: comment"]) if "run" in step]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "COMMENTS": "repos/o/r/issues/1/comments"}
    shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]  # as GitHub runs it
    subprocess.run(shell, cwd=tmp_path, env=env | {"GITHUB_REPOSITORY": "o/r"}, check=True)
    asked = (tmp_path / "asked").read_text().splitlines()
    way = ["PATCH", "repos/o/r/issues/comments/7"] if earlier else ["POST", "repos/o/r/issues/1/comments"]
    assert asked == ["api", "--silent", "--method", *way, "-F", "body=@comments/dev.md"]
