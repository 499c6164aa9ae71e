"""Training on GPUs: one as it is, several through FSDP2 (weights, gradients and optimizer state sharded)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from training.backends.base import Backend, World
from training.config import Settings
from training.metrics import peak_flops
from training.model import Llama


def shard(model: Llama, device_type: str, workers: int, dtype: torch.dtype) -> None:
    """Shard `model` over all workers by FSDP2: each layer on its own, the rest together.

    Products are in `dtype`, sums of gradients over workers in float32.
    """
    mesh = init_device_mesh(device_type, (workers,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    # The head and the loss come right after the last layer, and the embedding's gradient last of all: gathering them
    # again for the backward pass would save little.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def assign_sharded(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this worker's part of `full`, which every worker has alike, into a sharded parameter."""
    assert isinstance(parameter, DTensor)
    parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements, src_data_rank=None))


class CudaBackend(Backend):
    """One GPU: number `local_rank` of those that this process sees."""

    name = "cuda"
    asynchronous = True

    def __init__(self, settings: Settings, world: World) -> None:
        super().__init__(settings, world)
        # Ray shows each worker its own GPU only, as number 0; torchrun shows all to all.
        self._device = torch.device("cuda", world.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(self._device)
        torch.set_float32_matmul_precision("high")

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def device_name(self) -> str:
        return torch.cuda.get_device_name(self._device)

    def peak_flops(self) -> tuple[float, str] | None:
        return peak_flops(self.device_name)

    def auto_dtype(self) -> torch.dtype:
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32

    def build_model(self) -> nn.Module:
        alone = self.world.size == 1
        with torch.device(self._device if alone else "meta"):
            model = self.bare_model()
        if self.compiles:
            model.compile_layers()
        if not alone:
            shard(model, "cuda", self.world.size, self.dtype)
            model.to_empty(device=self._device)
        self.fill(model, None if alone else assign_sharded)
        return model

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        return super().autocast() if self.world.size == 1 else contextlib.nullcontext()  # FSDP2 casts by itself

    def gradient_sync(self, model: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()

    def clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        norm = super().clip_grad_norm(model)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def read_later(self, values: torch.Tensor) -> Callable[[], list[float]]:
        # A copy on the stream now, waited for by its event later: `.tolist()` later would wait for the next step too.
        host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()

        def read() -> list[float]:
            arrived.synchronize()
            return host.tolist()

        return read

    def memory_bytes(self) -> int | None:
        return torch.cuda.max_memory_allocated(self._device)
