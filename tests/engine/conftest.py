"""What the engine's tests share: stacks on clouds of their own."""

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


@pytest.fixture
def new_stack(tmp_path: Path) -> Iterator[Callable[..., Stack]]:
    """Makes a stack by its name, on an empty cloud; arguments are those of Stack."""
    with ExitStack() as stack:

        def make(name: str, **arguments: Any) -> Stack:
            cloud = Cloud(refusals=refusals)
            port = stack.enter_context(serving(cloud))
            return Stack(tmp_path / f"{name}-{port}", name, cloud, port, **arguments)

        yield make
