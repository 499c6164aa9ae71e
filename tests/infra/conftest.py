"""What the tests of the platform share: a platform without accelerators, made once."""

from __future__ import annotations

import pytest
from base_platform import ZONES, build_base
from mocks import Recorded, run

from infra import settings


@pytest.fixture(scope="session")
def base() -> Recorded:
    """What `build_base` registers with the default settings, flow logs and two admins."""

    def program() -> None:
        build_base(settings.Network(zones=ZONES, flow_logs=True))

    return run(program)
