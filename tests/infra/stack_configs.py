"""Configs of stacks for tests: a good one of each platform, changes to them, and reading them as Pulumi would."""

from __future__ import annotations

import copy
import json
from typing import Any

import pulumi
from pulumi.runtime import set_all_config

from stack_settings import AwsStack, ExistingStack, read_stack

GOOD: dict[str, Any] = {
    "region": "us-west-2",
    "costCentre": "research",
    "network": {"zones": ["usw2-az4", "usw2-az3"]},
    "accelerators": [{"name": "trn1", "instanceType": "trn1.32xlarge", "max": 2}],
    "training": {
        "preset": "tiny",
        "settings": {"parallel": {"tensor_parallel_size": 4}, "train": {"micro_batch_size": 1}},
    },
}

GOOD_EXISTING: dict[str, Any] = {
    "platform": "existing",
    "context": "here",
    "image": {"prebuilt": "llama-trainium:local"},
    "nodes": {"count": 2, "vcpus": 4, "memoryGib": 8},
    "training": {"settings": {"train": {"micro_batch_size": 1}}},
}
"""Where the kubeconfig has a context `here`, which answers."""


def changed(changes: dict[str, Any], base: dict[str, Any] = GOOD) -> dict[str, Any]:
    """The config with values at paths such as `network/zones/0`; "REMOVED" removes a key."""
    config = copy.deepcopy(base)
    for path, value in changes.items():
        *above, last = path.split("/")
        place: Any = config
        for part in above:
            place = place[int(part)] if isinstance(place, list) else place.setdefault(part, {})
        if isinstance(place, list):
            place[int(last) : int(last) + 1] = [value]
        elif value == "REMOVED":
            del place[last]
        else:
            place[last] = value
    return config


def read_raw(raw: dict[str, str], secret: list[str] | None = None, stack: str = "dev") -> AwsStack | ExistingStack:
    """The settings in config values as Pulumi has them; `secret` are keys of secrets."""
    set_all_config(raw, secret or [])
    try:
        return read_stack(pulumi.Config("llama-trainium"), stack)
    finally:
        set_all_config({}, [])


def raw_config(config: dict[str, Any]) -> dict[str, str]:
    """As Pulumi hands a stack file over: text as it is, everything else as JSON."""
    return {f"llama-trainium:{key}": v if isinstance(v, str) else json.dumps(v) for key, v in config.items()}
