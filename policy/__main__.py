"""Serves the pack to the Pulumi engine, which starts it: pulumi preview --policy-pack policy."""

import sys
from pathlib import Path

# The engine puts this folder where Python looks first. Ours are named from the repository's, as in all rooms.
sys.path[0] = str(Path(__file__).resolve().parents[1])

from pulumi_policy import EnforcementLevel, PolicyPack  # noqa: E402 (after the path)

from policy.rules import POLICIES  # noqa: E402

PolicyPack("llama-trainium", list(POLICIES), enforcement_level=EnforcementLevel.MANDATORY)
