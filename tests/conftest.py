"""What tests of all rooms share: the figures of what was run, told at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

FIGURES: list[str] = []


@pytest.fixture(scope="session")
def figure() -> Callable[[str], None]:
    """Add a line to the figures that are printed when all tests have run."""
    return FIGURES.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The figures, for docs/verification.md."""
    for line in FIGURES:
        terminalreporter.write_line(line)
