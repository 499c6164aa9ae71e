"""The files of a checkpoint that neuronx-distributed wrote, for who reads them without it: the stage `export`.

    step-00000020/nxd/model/dp_rank_00_tp_rank_RR_pp_rank_00.pt     a tensor-parallel rank's parts, by name
    step-00000020/nxd/optim/dp_rank_DD_tp_rank_RR_pp_rank_00.pt     a rank's optimizer; without ZeRO-1 for DD = 00

Which dimension a tensor is split along follows from its part's shape and the whole's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from training.config import Model
from training.errors import UserError
from training.model import Llama

TAG = "nxd"

Weights = tuple[dict[str, torch.Tensor], Callable[[list[str]], dict[str, torch.Tensor]]]
"""Every weight of a checkpoint as a tensor without data, and what reads the weights of these names whole."""


def wrote(checkpoint: Path) -> bool:
    """Whether NxD wrote this checkpoint."""
    return (checkpoint / TAG).is_dir()


def part_files(checkpoint: Path, kind: str) -> list[Path]:
    """Files of `model` or `optim`: by data-parallel rank, and by tensor-parallel rank within it."""
    return sorted((checkpoint / TAG / kind).glob("dp_rank_*_tp_rank_*_pp_rank_00.pt"))


def weights(checkpoint: Path, config: Model) -> Weights:
    """The weights, from the parts of the tensor-parallel ranks. Raises `UserError` when they do not make a whole."""
    parts = [
        torch.load(path, map_location="cpu", mmap=True, weights_only=True) for path in part_files(checkpoint, "model")
    ]
    if not parts:
        raise UserError(f"{checkpoint}: no weights, expected {TAG}/model/dp_rank_00_tp_rank_00_pp_rank_00.pt")
    with torch.device("meta"):
        whole = Llama(config).state_dict()
    tensors = {name: torch.empty_like(value, dtype=parts[0][name].dtype) for name, value in whole.items()}
    split = {name: _split_dimension(checkpoint, name, parts, value.shape) for name, value in whole.items()}

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        return {name: _joined([part[name] for part in parts], split[name]) for name in names}

    return tensors, read


def _split_dimension(
    checkpoint: Path, name: str, parts: list[dict[str, torch.Tensor]], whole: torch.Size
) -> int | None:
    """The dimension along which the parts make the whole; None when each is the whole."""
    shape = parts[0][name].shape
    if shape == whole:
        return None
    for dimension, length in enumerate(shape):
        if length * len(parts) == whole[dimension] and [*shape[:dimension], *shape[dimension + 1 :]] == [
            *whole[:dimension],
            *whole[dimension + 1 :],
        ]:
            return dimension
    raise UserError(f"{checkpoint}: {len(parts)} parts {list(shape)} of {name}, expected a whole {list(whole)}")


def _joined(parts: list[torch.Tensor], dimension: int | None) -> torch.Tensor:
    return parts[0].clone() if dimension is None else torch.cat(parts, dim=dimension)
