"""The folder of a run: who may use it, what its stages did, how a running one is asked to stop.

    run = RunDir(settings.run.dir)
    with run.lock(), run.stage("train") as done:
        ...
        done("300 steps")

The lock is the operating system's, so it is gone with the process that held it, however that ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock, Timeout

from training.config import Settings
from training.errors import UserError


def write_atomically(path: Path, text: str) -> None:
    """Replace `path` by `text` at once: a reader, or a killed writer, never leaves half of it."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


class RunDir:
    """Paths and small files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = path / "metrics.jsonl"
        self.manifest = path / "manifest.json"
        self.settings = path / "settings.yaml"
        self._stages = path / "stages.json"
        self._outcome = path / "outcome.json"
        self._stop = path / "stop-request"

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run for this process. Makes the folder; raises `UserError` when a live process holds it."""
        owner = self.path / ".lock.owner"
        with contextlib.ExitStack() as stack:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                stack.enter_context(FileLock(self.path / ".lock", timeout=0))
                owner.write_text(f"process {os.getpid()} on {socket.gethostname()}")
            except Timeout:
                who = owner.read_text() if owner.exists() else "another process"
                raise UserError(f"run.dir: {self.path} is in use by {who}, expected a run that is not live") from None
            except OSError as error:
                raise UserError(
                    f"run.dir: {self.path} cannot be used ({error.strerror or error}), expected a folder to write to"
                ) from None
            yield

    @contextlib.contextmanager
    def writer_lock(self, timeout: float) -> Iterator[None]:
        """Held by rank 0 while it trains, so that what a killed launcher left behind never writes beside its successor.

        Waits `timeout` seconds for the one before to be gone, then raises `UserError`.
        """
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(FileLock(self.path / ".lock.writer", timeout=timeout))
            except Timeout:
                raise UserError(
                    f"run.dir: {self.path} is still written to by an earlier attempt after {timeout:.0f} s, "
                    "expected to be alone"
                ) from None
            yield

    def write_settings(self, settings: Settings) -> None:
        """Every resolved setting, as YAML that `--config` takes."""
        write_atomically(self.settings, yaml.safe_dump(settings.resolved(), sort_keys=False))

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Record in `stages.json` when stage `name` ran, for how long and how it ended.

        The block calls what it is given with a one-line summary; without that call the stage counts as failed.
        """
        started, summary = time.time(), ""

        def done(text: str) -> None:
            nonlocal summary
            summary = text

        self._record(name, {"status": "running", "started": started, "seconds": 0.0, "summary": ""})
        try:
            yield done
        finally:
            status = "done" if summary else "failed"
            seconds = round(time.time() - started, 3)
            self._record(name, {"status": status, "started": started, "seconds": seconds, "summary": summary})

    def stages(self) -> dict[str, dict[str, Any]]:
        """What `stage` recorded, by stage; {} before the first."""
        return self._read_json(self._stages)

    def _record(self, name: str, entry: dict[str, Any]) -> None:
        with FileLock(self.path / ".lock.stages"):  # `report` may run beside `train`
            write_atomically(self._stages, json.dumps({**self.stages(), name: entry}, indent=2) + "\n")

    def request_stop(self) -> None:
        """Ask the run to write a checkpoint and end. Safe in a signal handler."""
        with contextlib.suppress(OSError):
            self._stop.touch()

    def stop_requested(self) -> bool:
        """Whether `request_stop` was called since `begin_attempt`; shared storage that fails to say means no."""
        try:
            return self._stop.exists()
        except OSError:
            return False

    def begin_attempt(self) -> None:
        """Forget a stop request and an outcome of an earlier launch."""
        self._stop.unlink(missing_ok=True)
        self._outcome.unlink(missing_ok=True)

    def write_outcome(self, status: str, message: str) -> None:
        """How training ended, from rank 0 to the launcher: `done`, `stopped` or `user_error`."""
        write_atomically(self._outcome, json.dumps({"status": status, "message": message}) + "\n")

    def outcome(self) -> dict[str, Any]:
        """What `write_outcome` wrote; {} when the attempt did not get that far."""
        return self._read_json(self._outcome)

    @staticmethod
    def _read_json(path: Path) -> dict[str, Any]:
        if not path.exists():
            return {}
        try:
            values: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            raise UserError(f"{path}: not JSON, expected the file that a stage writes: delete it to go on") from None
        return values
