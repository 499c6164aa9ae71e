"""The questions that the trainer asks a backend, with the answers that most share.

A backend decides the device, the layers of the model, how it is wrapped for several workers, the optimizer, what ends
a step, and how state is saved. The trainer is the same for all.
"""

from __future__ import annotations

import contextlib
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from training.checkpoint import Checkpointer, restore, training_state
from training.compile_cache import inductor_counts
from training.config import Settings
from training.export import load_pretrained
from training.model import Layers, Llama


@dataclass(frozen=True)
class World:
    """This process among the workers of a run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    meeting: str = ""
    """Where the workers of this attempt meet (`training.launchers.group`); of no matter to one on its own."""


class Backend(ABC):
    """One device of one worker."""

    name: ClassVar[str]
    asynchronous: bool
    """Whether the device works on its own, so that reading the results of a step at once would make it wait."""
    layers = Layers()

    def __init__(self, settings: Settings, world: World) -> None:
        self.settings = settings
        self.world = world

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where this worker's tensors live."""

    @property
    @abstractmethod
    def device_name(self) -> str:
        """What a person calls the device."""

    @abstractmethod
    def peak_flops(self) -> tuple[float, str] | None:
        """FLOP/s that MFU is a share of, per worker, and its name; None if unknown."""

    @abstractmethod
    def auto_dtype(self) -> torch.dtype:
        """What `train.dtype: auto` means."""

    @property
    def data_parallel(self) -> tuple[int, int]:
        """Which share of a batch this worker trains on: rank and number of the groups that hold the whole model."""
        return self.world.rank, self.world.size

    @property
    def dtype(self) -> torch.dtype:
        """Compute dtype. Weights, gradients over workers and optimizer state are float32."""
        asked = self.settings.train.dtype
        return self.auto_dtype() if asked == "auto" else getattr(torch, asked)

    @property
    def compiles(self) -> bool:
        """Whether the run uses torch.compile."""
        asked = self.settings.train.compile
        return self.can_compile() if asked == "auto" else asked

    def can_compile(self) -> bool:
        """What `train.compile: auto` means."""
        return True

    def bare_model(self) -> Llama:
        """The model of the settings, its weights not yet filled (`fill`), on the current default device."""
        train = self.settings.train
        return Llama(self.settings.model, self.layers, train.activation_checkpointing, train.loss_chunk)

    def fill(self, model: Llama, assign: Callable[[torch.Tensor, torch.Tensor], Any] | None = None) -> None:
        """Initial weights: from `model.init_from` if it is set, else random by `train.seed`."""
        config = self.settings.model
        model.init_weights(self.settings.train.seed, assign)
        if config.init_from is not None:
            load_pretrained(model, config.init_from, config, assign)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with its initial weights, compiled and wrapped for the workers of this run."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW."""
        train = self.settings.train
        betas, groups = (train.beta1, train.beta2), self.parameter_groups(model)
        return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_eps, fused=True)

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Parameters by their weight decay: norms and biases do not decay."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.settings.train.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward pass."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def gradient_sync(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context of one forward and backward pass; gradients cross workers in the step's `last` one only."""
        return contextlib.nullcontext()

    def clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Scale the gradients to a norm of at most `train.grad_clip`; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings.train.grad_clip)

    def update(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Clip the gradients, take the optimizer's step and drop the gradients; returns their norm, a scalar."""
        grad_norm = self.clip_grad_norm(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return grad_norm

    def step_boundary(self) -> None:  # noqa: B027 - most devices need nothing here
        """Called when all work of an optimizer step, or of a batch of the evaluation, is issued."""

    def read_later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        """Start to bring `values` to the host; the result waits for them, but for no later work of the device."""
        return values.tolist

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the workers, in place."""
        if self.world.size > 1:
            dist.all_reduce(values)
        return values

    def gather(self, value: float) -> list[float]:
        """`value` of every worker, by rank."""
        values = [value] * self.world.size
        if self.world.size > 1:
            dist.all_gather_object(values, value)
        return values

    def checkpointer(self, directory: Path, keep: int) -> Checkpointer:
        """What writes what `training_state` returns."""
        return Checkpointer(directory, keep)

    def training_state(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """What a run needs to go on exactly."""
        return training_state(model, optimizer)

    def restore(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Put the checkpoint at `path` into `model` and `optimizer`, bit for bit."""
        restore(path, model, optimizer)

    def cache_counts(self) -> dict[str, int]:
        """`hits` and `misses`: graphs that this worker found in the cache of compiled code, and that it compiled."""
        return inductor_counts()

    def ingredients(self) -> dict[str, Any]:
        """All that compiled code depends on; plain JSON values."""
        model = self.settings.model.model_dump(
            mode="json", exclude={"init_from", "num_hidden_layers", "initializer_range", "tie_word_embeddings"}
        )
        train = self.settings.train.model_dump(
            mode="json", include={"seq_length", "micro_batch_size", "loss_chunk", "activation_checkpointing"}
        )
        versions = {"torch": torch.__version__, "python": platform.python_version()}
        device = {"backend": self.name, "device": self.device_name, "dtype": str(self.dtype)}
        return {"model": model, "train": train, "device": device, "versions": versions}

    def memory_bytes(self) -> int | None:
        """Peak of device memory so far; None where the device does not say."""
        return None
