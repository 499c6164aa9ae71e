"""What the engine's tests share: stacks on clouds of their own, and the figures of what was run, told at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cloud import Cloud
from order import refusals
from stack import Stack
from standin import serving

FIGURES: list[str] = []


@pytest.fixture
def figure() -> Callable[[str], None]:
    """Add a line to the figures that are printed when all tests have run."""
    return FIGURES.append


@pytest.fixture
def new_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Makes a stack by its name, on an empty cloud; arguments are those of Stack."""
    with ExitStack() as stack:

        def make(name: str, **arguments: Any) -> Stack:
            cloud = Cloud(refusals=refusals)
            port = stack.enter_context(serving(cloud))
            return Stack(tmp_path / f"{name}-{port}", name, cloud, port, **arguments)

        yield make


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The figures, for docs/verification.md."""
    for line in FIGURES:
        terminalreporter.write_line(line)
