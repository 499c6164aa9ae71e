"""kubectl and pulumi as processes: what they say as data, what they refuse as one line."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.errors import UserError

Object = dict[str, Any]


@dataclass(frozen=True)
class Kubectl:
    """kubectl in one namespace. `context` is one of the kubeconfig, the current one if it is None."""

    namespace: str
    context: str | None = None

    def command(self, *arguments: str) -> list[str]:
        """The whole command line, for a shell or for `call`."""
        context = ["--context", self.context] if self.context else []
        return ["kubectl", *context, "--namespace", self.namespace, *arguments]

    def items(self, kind: str, selector: str = "") -> list[Object]:
        """All objects of a kind, newest last; [] where the cluster does not know the kind."""
        chosen = ["--selector", selector] if selector else []
        done = _run(self.command("get", kind, *chosen, "--output", "json"))
        if done.returncode:
            if "the server doesn't have a resource type" in done.stderr:
                return []
            raise _refused("kubectl", done)
        found: list[Object] = json.loads(done.stdout)["items"]
        return sorted(found, key=lambda each: str(each["metadata"].get("creationTimestamp", "")))

    def do(self, *arguments: str) -> None:
        """Run to the end without showing what it says. Raises `UserError`."""
        done = _run(self.command(*arguments))
        if done.returncode:
            raise _refused("kubectl", done)

    def call(self, *arguments: str) -> int:
        """Run in the foreground, with the terminal's input and output; returns the exit code."""
        return call(self.command(*arguments))


def call(command: Sequence[str]) -> int:
    """Run a command in the foreground; returns its exit code, 130 after Ctrl-C."""
    _must_have(command[0])
    try:
        return subprocess.call(command)
    except KeyboardInterrupt:
        return 130


def pulumi_json(*arguments: str) -> Any:
    """What `pulumi ... --json` or `pulumi stack export` prints. Raises `UserError`."""
    done = _run(["pulumi", *arguments])
    if done.returncode:
        raise _refused("pulumi", done)
    return json.loads(done.stdout)


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    _must_have(command[0])
    return subprocess.run(command, capture_output=True, text=True)


def _must_have(program: str) -> None:
    if not shutil.which(program):
        raise UserError(f"{program}: not found, expected it on PATH")


def _refused(program: str, done: subprocess.CompletedProcess[str]) -> UserError:
    """kubectl and pulumi say why on their last line that is not empty."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    why = lines[-1].removeprefix("error: ") if lines else f"exit code {done.returncode}"
    return UserError(f"{program}: {why}")
