"""The settings of the run, from a stack's `training`: a preset, changes to it, and what the stack itself answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from training.config import PRESETS, Data, Settings, parse_settings, preset_names, read_yaml
from training.errors import UserError
from training.messages import expected_one_of, shown

GATED = ("meta-llama/", "bigcode/the-stack", "bigcode/starcoderdata", "google/gemma")
"""Beginnings of Hub repositories whose licence must be accepted, so whose reader must say who it is."""

OF_A_CHECKPOINT = ("seed", "global_batch_size", "seq_length")
"""Keys of `train` that a run cannot change and go on with its checkpoints (training.checks.ORDER)."""


class Training(Protocol):
    """The section `training` of a stack, on any platform."""

    @property
    def preset(self) -> str: ...
    @property
    def settings(self) -> dict[str, dict[str, Any]]: ...


def run_settings(training: Training, workers: int, backend: str) -> Settings:
    """Preset, changes, and what follows from the nodes. Folders are relative to the volume. Raises `UserError`.

    The folders' names follow from what is in them: another tokenizer makes another store, and another model does not
    find the checkpoints of this one. What a run may change as it goes on, a learning rate, leaves it where it is.
    """
    values = read_yaml(PRESETS / f"{training.preset}.yaml")
    for section, keys in training.settings.items():
        values[section] = values.get(section, {}) | keys
    values["parallel"] = values.get("parallel", {}) | {"workers": workers}
    values["run"] = values.get("run", {}) | {"backend": backend}
    settings = parse_settings(values)
    data, run = settings.data, settings.run
    if data.output is None:
        made_from = data.model_dump(mode="json", exclude={"output"})
        data = data.model_copy(update={"output": Path("tokens") / _digest(made_from)})
    if "dir" not in training.settings.get("run", {}):
        made_from = {
            "data": data.model_dump(mode="json"),
            "model": settings.model.model_dump(mode="json"),
            "train": settings.train.model_dump(mode="json", include=set(OF_A_CHECKPOINT)),
        }
        run = run.model_copy(update={"dir": Path("runs") / f"{training.preset}-{_digest(made_from)}"})
    return settings.model_copy(update={"data": data, "run": run})


def mistakes(training: Training, workers: int, backend: str, workers_are: str, has_token: bool) -> Iterator[str]:
    """Lines about settings of the run that a stack cannot have; each begins with its key.

    `workers_are` says what the stack has in place of `parallel.workers`.
    """
    if training.preset not in preset_names():
        yield f"training.preset: {shown(training.preset)}{expected_one_of(training.preset, preset_names())}"
        return
    own = (
        ("parallel", "workers", workers_are),
        ("run", "backend", backend),
        ("run", "launcher", "workloads.engine"),
        ("run", "metrics_address", "observability (platform: aws)"),
    )
    for section, key, instead in own:
        if key in training.settings.get(section, {}):
            found = shown(training.settings[section][key])
            yield f"training.settings.{section}.{key}: {found}, expected none: a stack has {instead}"
    try:
        data = run_settings(training, workers, backend).data
    except UserError as error:
        yield from (f"training.settings.{line}" for line in str(error).split("\n"))
        return
    for key, name in from_hub(data).items():
        if name.startswith(GATED) and not has_token:
            yield (
                f"huggingFaceToken: missing, expected a secret (pulumi config set --secret huggingFaceToken): "
                f"data.{key} {shown(name)} is gated"
            )


def from_hub(data: Data) -> dict[str, str]:
    """What the run reads from the Hugging Face Hub: repositories by the key of `data` that names them."""
    named = {"source": data.source.removeprefix("hub:")} if data.source.startswith("hub:") else {}
    is_path = data.tokenizer.startswith((".", "/")) or data.tokenizer.endswith(".json")
    return named if is_path or data.trained_vocab_size is not None else {"tokenizer": data.tokenizer, **named}


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]
