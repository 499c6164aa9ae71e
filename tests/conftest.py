"""What tests of all rooms share: no example has a time limit, and the figures of what was run are told at the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings

# A busy machine is no finding.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

FIGURES: list[str] = []


@pytest.fixture(scope="session")
def figure() -> Callable[[str], None]:
    """Add a line to the figures that are printed when all tests have run."""
    return FIGURES.append


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The figures, for docs/verification.md."""
    for line in FIGURES:
        terminalreporter.write_line(line)
