"""The questions that the trainer asks a backend, with the answers that most share.

A backend decides the device, the layers of the model, how it is wrapped for several workers, the optimizer, what ends
a step, and how state is saved. The trainer is the same for all.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from training.checkpoint import Checkpointer
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

    @classmethod
    def from_env(cls) -> World:
        """Read the variables that torchrun, Ray Train and `training.launchers.local` all set."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
        return cls(*(int(os.environ.get(name, default)) for name, default in zip(names, (0, 1, 0, 1), strict=True)))


class Backend(ABC):
    """One device of one worker."""

    name: ClassVar[str]
    asynchronous: ClassVar[bool]
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
            load_pretrained(model, config.init_from, config)

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with its initial weights, compiled and wrapped for the workers of this run."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW; norms and biases do not decay."""
        train = self.settings.train
        parameters = [p for p in model.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": train.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (train.beta1, train.beta2)
        return torch.optim.AdamW(groups, lr=train.learning_rate, betas=betas, eps=train.adam_eps, fused=True)

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Context of a forward pass."""
        return torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32)

    def gradient_sync(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Context of one forward and backward pass; gradients cross workers in the step's `last` one only."""
        return contextlib.nullcontext()

    def clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Scale the gradients to a norm of at most `train.grad_clip`; returns the norm before."""
        return torch.nn.utils.clip_grad_norm_(model.parameters(), self.settings.train.grad_clip)

    def step_boundary(self) -> None:  # noqa: B027 - most devices need nothing here
        """Called when all work of an optimizer step is issued."""

    def read_later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        """Start to bring `values` to the host; the result waits for them, but for no later work of the device."""
        return values.tolist

    def sum_(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the workers, in place."""
        if self.world.size > 1:
            dist.all_reduce(values)
        return values

    def checkpointer(self, directory: Path, keep: int) -> Checkpointer:
        """What saves and restores this backend's state."""
        return Checkpointer(directory, keep)

    def memory_bytes(self) -> int | None:
        """Peak of device memory so far; None where the device does not say."""
        return None
