"""Which stages a change of a stack's settings runs again, from the stack file's keys to the names of the jobs."""

from __future__ import annotations

from typing import Any

import pytest
from stack_configs import GOOD, changed, raw_config, read_raw

from workloads.platform import on_volume
from workloads.rayjob import job_names
from workloads.settings import STAGES

CHANGES = [
    ("training/settings/train/learning_rate", 5e-4, ["train"]),
    ("training/settings/train/steps", 500, ["train"]),
    ("training/settings/train/seed", 7, ["precompile", "train"]),  # another run, whose folder both name
    ("training/settings/model", {"num_hidden_layers": 2}, ["precompile", "train"]),
    ("training/settings/data", {"tokenizer": "train:1024"}, ["prepare", "precompile", "train"]),
    ("training/nodes", 1, ["precompile", "train"]),
    ("storage/sizeGib", 2400, []),
    ("coreNodes/instanceType", "m7i.4xlarge", []),
    ("workloads/train/wait", "finished", []),
    ("workloads/resources/head/cpu", 2, []),
]


def names(config: dict[str, Any]) -> dict[Any, str]:
    settings = read_raw(raw_config(config))
    assert settings.workloads.name
    return job_names(settings.workloads.name, on_volume(settings.training_settings()), "image@sha256:0")


@pytest.mark.parametrize(("key", "value", "again"), CHANGES, ids=[key for key, _, _ in CHANGES])
def test_a_change_runs_again_what_it_affects(key: str, value: Any, again: list[str]) -> None:
    before, after = names(GOOD), names(changed({key: value}))
    assert [stage for stage in STAGES if before[stage] != after[stage]] == again
