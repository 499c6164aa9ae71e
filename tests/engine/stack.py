"""One stack of this project under the real Pulumi engine, on a state folder and a cloud of its own.

The project is linked, its stack file copied: the engine writes into it, and a test may set other values. Nothing leaves
the machine: what the stand-in answers for is attached by port, no plugin is downloaded, the backend is a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cloud import Cloud, Props

ROOT = Path(__file__).parents[2]
STACKS = sorted({path.name.split(".")[1] for path in ROOT.glob("Pulumi.*.yaml")} - {"local"})
"""Those on AWS."""
# Whole packages that the stand-in answers for. pulumi-eks is always the real one: what it makes is what we test.
PACKAGES = ("aws", "docker-build", "kubernetes", "random")
PASSPHRASE = "engine"
TOKEN = "hf_secret_of_the_engine_tests"
PACK = "policy"


def missing() -> str | None:
    """What the engine's tests need and this machine lacks, as the reason to skip them; None when all is there."""
    absent = [tool for tool in ("pulumi", "pulumi-language-python") if not shutil.which(tool)]
    if not shutil.which("pulumi-resource-eks") and not list(plugins().glob("resource-eks-*")):
        absent.append("the plugin of pulumi-eks (pulumi plugin install resource eks)")
    return f"no real engine: {', '.join(absent)} not found" if absent else None


def plugins() -> Path:
    """Where `pulumi plugin install` puts plugins."""
    return Path(os.environ.get("PULUMI_HOME") or Path.home() / ".pulumi") / "plugins"


@dataclass(frozen=True)
class Run:
    """One run of the `pulumi` command."""

    args: tuple[str, ...]
    code: int
    output: str
    seconds: float
    ended: float
    """time.monotonic()"""

    def ok(self) -> Run:
        """This run, or a failure that shows what the engine said."""
        assert self.code == 0, f"pulumi {' '.join(self.args)}: exit code {self.code}\n{self.output}"
        return self


class Stack:
    """A stack in `folder`; `config` replaces keys of the stack file, commands in `path` are found first.

    `packages` are those that the stand-in answers for; `env` is added to the environment of the commands.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        cloud: Cloud,
        port: int,
        packages: tuple[str, ...] = PACKAGES,
        config: Mapping[str, Any] | None = None,
        path: Path | None = None,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.cloud, self.project = name, cloud, folder / "project"
        tools = folder / "bin"
        for made in (self.project, tools, folder / "state", folder / "home"):
            made.mkdir(parents=True)
        for place, made in ((ROOT, self.project), (ROOT / PACK, self.project / PACK)):
            made.mkdir(exist_ok=True)
            for entry in place.iterdir():
                if not entry.name.startswith((".", "Pulumi")) and entry.name != PACK:
                    (made / entry.name).symlink_to(entry)
        for file in ("Pulumi.yaml", f"{PACK}/PulumiPolicy.yaml"):
            settings = yaml.safe_load((ROOT / file).read_text())
            # The interpreter of the tests has the SDKs; the project's own .venv may not be there.
            settings["runtime"] = {"name": "python", "options": {"virtualenv": sys.prefix}}
            (self.project / file).write_text(yaml.safe_dump(settings))
        self.file = self.project / f"Pulumi.{name}.yaml"
        shutil.copyfile(ROOT / self.file.name, self.file)
        self.change(config or {})
        cloud.region = self.config().get("llama-trainium:region", cloud.region)
        for package in packages:
            # The engine wants to see a plugin before it attaches to a running one.
            plugin = tools / f"pulumi-resource-{package}"
            plugin.write_text("#!/bin/sh\nexit 1\n")
            plugin.chmod(0o755)
        if plugins().is_dir():
            (folder / "home" / "plugins").symlink_to(plugins())
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("AWS_", "PULUMI_"))},
            "PATH": os.pathsep.join([str(tools), *([str(path)] if path else []), os.environ["PATH"]]),
            "PULUMI_HOME": str(folder / "home"),
            "PULUMI_BACKEND_URL": f"file://{folder / 'state'}",
            "PULUMI_CONFIG_PASSPHRASE": PASSPHRASE,
            "PULUMI_DISABLE_AUTOMATIC_PLUGIN_ACQUISITION": "true",
            "PULUMI_SKIP_UPDATE_CHECK": "true",
            **(env or {}),
        }
        if packages:
            self.env["PULUMI_DEBUG_PROVIDERS"] = ",".join(f"{package}:{port}" for package in packages)
        self.run("stack", "init", name).ok()
        self.secret("huggingFaceToken", TOKEN)

    def config(self) -> dict[str, Any]:
        """The stack file's values."""
        found: dict[str, Any] = yaml.safe_load(self.file.read_text())["config"]
        return found

    def change(self, config: Mapping[str, Any]) -> None:
        """Replace keys of the stack file."""
        values = yaml.safe_load(self.file.read_text())
        values["config"] |= {f"llama-trainium:{key}": value for key, value in config.items()}
        self.file.write_text(yaml.safe_dump(values))

    def secret(self, key: str, value: str) -> None:
        """`pulumi config set --secret`."""
        self.run("config", "set", "--secret", key, value, "--stack", self.name).ok()

    def run(self, *args: str) -> Run:
        """`pulumi ARGS` in the project."""
        started = time.monotonic()
        command = ["pulumi", *args, "--non-interactive", "--color=never"]
        # A run that hangs is a finding too, and must not hang the tests.
        done = subprocess.run(
            command,
            cwd=self.project,
            env=self.env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=900,
        )
        ended = time.monotonic()
        return Run(args, done.returncode, done.stdout, ended - started, ended)

    def preview(self) -> Run:
        """`pulumi preview`."""
        return self.run("preview", "--stack", self.name)

    def up(self, *flags: str) -> Run:
        """`pulumi up` without asking."""
        return self.run("up", "--yes", "--skip-preview", "--stack", self.name, *flags)

    def destroy(self) -> Run:
        """`pulumi destroy` without asking."""
        return self.run("destroy", "--yes", "--skip-preview", "--stack", self.name)

    def exported(self) -> str:
        """The state, as `pulumi stack export` writes it."""
        path = self.project / "state.json"
        self.run("stack", "export", "--stack", self.name, "--file", str(path)).ok()
        return path.read_text()

    def resources(self) -> list[Props]:
        """The resources in the state, each with what it depends on."""
        found: list[Props] = json.loads(self.exported())["deployment"].get("resources") or []
        return found

    def owned(self, packages: tuple[str, ...] = PACKAGES) -> set[tuple[str, str]]:
        """Type and id of what the state says this stack has made in the cloud."""
        return {
            (r["type"], r["id"])
            for r in self.resources()
            if r.get("custom") and not r.get("external") and r["type"].split(":")[0] in packages
        }
