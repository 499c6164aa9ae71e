"""What is checked before training starts, in the launcher's process and again on every worker."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from training.backends import backend_name
from training.checkpoint import read_meta
from training.config import Settings
from training.data.samples import Samples
from training.data.store import TokenStore
from training.errors import UserError
from training.messages import shown

# Settings of `train` that choose which samples a step holds: a resumed run must keep them to go on where it was.
ORDER = ("seed", "global_batch_size", "seq_length")


def checkpoint_meta(settings: Settings, step: int, tokenizer_sha256: str) -> dict[str, Any]:
    """What a checkpoint says of the run that wrote it; plain JSON values."""
    return {
        "step": step,
        "model": settings.model.model_dump(mode="json", exclude={"init_from"}),
        "train": settings.train.model_dump(mode="json", include=set(ORDER)),
        "tokenizer_sha256": tokenizer_sha256,
    }


def check_store(settings: Settings) -> TokenStore:
    """The training part of the store, fit for this model. Raises `UserError`."""
    store = TokenStore.open(settings.data_dir, "train")
    made_with = store.manifest["tokenizer"]
    if made_with != settings.data.tokenizer:
        raise UserError(
            f"data.tokenizer: {settings.data.tokenizer}, but the store in {settings.data_dir} was made with "
            f"{made_with}; expected the same, or another data.output"
        )
    if store.manifest["vocab_size"] > settings.model.vocab_size:
        raise UserError(
            f"model.vocab_size: {settings.model.vocab_size}, expected at least {store.manifest['vocab_size']}, "
            f"the size of the tokenizer of {settings.data_dir}"
        )
    Samples(store, settings.train.seq_length, folder=settings.data_dir)
    return store


def check_run(settings: Settings) -> None:
    """Refuse settings with which the run in `run.dir` cannot go on, before any of its files is touched.

    Raises `UserError`.
    """
    if found := _newest(settings):
        check_settings(settings, *found)


def check_before_launch(settings: Settings) -> None:
    """Refuse in the launcher's process what every worker would refuse after it was started. Raises `UserError`."""
    backend_name(settings)
    check_store(settings)
    if found := _newest(settings):
        check_resume(settings, *found)


def _newest(settings: Settings) -> tuple[dict[str, Any], Path] | None:
    """The newest checkpoint that can say what it is of. The workers verify its files, and may take one before it."""
    for path in sorted(settings.checkpoint_dir.glob("step-*"), reverse=True):
        with contextlib.suppress(UserError):
            return read_meta(path), path
    return None


def check_resume(settings: Settings, meta: dict[str, Any], path: Path) -> None:
    """Raise `UserError` naming the first way in which this run differs from the checkpoint at `path`."""
    check_settings(settings, meta, path)
    store = TokenStore.open(settings.data_dir, "train")
    if store.manifest["tokenizer_sha256"] != meta["tokenizer_sha256"]:
        raise UserError(
            f"data.output: the store in {settings.data_dir} has another tokenizer than the one that {path} was trained "
            "with; expected the same, or another run.dir"
        )


def check_settings(settings: Settings, meta: dict[str, Any], path: Path) -> None:
    """Raise `UserError` naming the first setting in which this run differs from the checkpoint at `path`."""
    now = checkpoint_meta(settings, meta["step"], meta["tokenizer_sha256"])
    for section in ("model", "train"):
        for key, saved in meta[section].items():
            if now[section][key] != saved:
                raise UserError(
                    f"{section}.{key}: {shown(now[section][key])}, but {path} was made with {shown(saved)}; "
                    "expected the same, or another run.dir"
                )
    if meta["step"] > settings.train.steps:
        raise UserError(
            f"train.steps: {settings.train.steps}, but {path} is at step {meta['step']}; expected at least that"
        )
