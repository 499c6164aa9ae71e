"""The types of the fixtures in conftest.py. (A conftest is not for importing: each folder of tests has one.)"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Protocol

from training.config import Settings


class TokenStoreMaker(Protocol):
    """See the fixture `token_store`."""

    def __call__(
        self, path: Path, vocab_size: int = 512, tokens: int = 20_000, tokenizer: str | None = None, seed: int = 0
    ) -> Path: ...


class SettingsMaker(Protocol):
    """See the fixture `small_settings`."""

    def __call__(self, tmp_path: Path, **overrides: object) -> Settings: ...


class TrainingCommand(Protocol):
    """See the fixture `mpi_command`."""

    def __call__(self, settings: Settings, stage: str = "train") -> subprocess.Popen[str]: ...
