"""The layers of neuronx-distributed as the model takes them: matrices split over tensor-parallel ranks, and between
them the sequence (Korthikanti et al. 2022, "Reducing activation recomputation", section 4.2). Imports NxD, so only the
Neuron backend imports this module.

Shape suffixes as in `training.model`; a rank holds S / ranks positions between the layers when the sequence is split.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from neuronx_distributed.parallel_layers.layers import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    linear_with_async_allreduce,
)
from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy
from neuronx_distributed.parallel_layers.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from neuronx_distributed.parallel_layers.parallel_state import (
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_size,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from training.config import Settings
from training.model import Layers
from training.trainium import flash_kernel_takes

SEQUENCE = 1  # the dimension of x_BSD that is split


class _Embedding(ParallelEmbedding):  # type: ignore[misc]  # NxD is not typed
    """Rows split over ranks; the output summed over them, or summed and split over the sequence."""

    def __init__(self, rows: int, columns: int, split: bool, dtype: torch.dtype) -> None:
        # NxD's own way to split the output would turn [B, S, D] into [S, B, D].
        super().__init__(rows, columns, dtype=dtype, collect_output=not split)
        self.split = split

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = super().forward(tokens_BS)
        return reduce_scatter_to_sequence_parallel_region(x_BSD, SEQUENCE) if self.split else x_BSD


class _Row(RowParallelLinear):  # type: ignore[misc]
    """Inputs split over ranks; the output summed over them, or summed and split over the sequence, in float32."""

    def __init__(self, inputs: int, outputs: int, split: bool, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False, input_is_parallel=True, dtype=dtype, reduce_output=False)
        self.split = split

    def forward(self, x_BSF: torch.Tensor) -> torch.Tensor:
        part_BSD = _with_whole_gradient(super().forward(x_BSF.contiguous()))
        if self.split:
            return reduce_scatter_to_sequence_parallel_region(part_BSD.float(), SEQUENCE).to(x_BSF.dtype)
        return reduce_from_tensor_model_parallel_region(part_BSD.float()).to(x_BSF.dtype)


def _with_whole_gradient(output: torch.Tensor) -> torch.Tensor:
    """`output`, whose gradient NxD's product gets in one block of memory: it views it, as its input, as a matrix."""
    if output.requires_grad:
        output.register_hook(torch.Tensor.contiguous)
    return output


def project(
    split: bool, dtype: torch.dtype, x_BSD: torch.Tensor, columns: Sequence[nn.Module], unit: int
) -> list[torch.Tensor]:
    """The outputs of several column layers by one product: their input is brought together once and not once for each.

    Only its part of the sequence is kept for the backward pass, which brings it together anew. Of an output with less
    than `unit` features a rank (key/value heads, fewer than ranks) every rank gets the whole unit that it needs.
    """
    weights = [column.get_parameter("weight") for column in columns]
    ranks = get_tensor_model_parallel_size()
    if split:  # the layout that NxD's product brings together without a copy
        x_BSD = x_BSD.transpose(0, 1).contiguous()
    y = linear_with_async_allreduce(
        input=x_BSD,
        weight=torch.cat(tuple(weights)),
        bias=None,
        async_grad_allreduce=ranks > 1 and not split,
        sequence_parallel_enabled=split,
        sequence_dimension=0,
        process_group=get_tensor_model_parallel_group(),
        # Unsplit, NxD 0.17 sums a copy in this dtype and goes on with the original: it must be the original's.
        reduce_dtype=torch.float32 if split else dtype,
    )
    y = _with_whole_gradient(y)
    if split:
        y = y.transpose(0, 1)
    return [_whole_unit(part, unit) for part in y.split([len(weight) for weight in weights], dim=-1)]


def _whole_unit(y_BSF: torch.Tensor, unit: int) -> torch.Tensor:
    if y_BSF.shape[-1] >= unit:
        return y_BSF
    sharing = unit // y_BSF.shape[-1]  # ranks that hold, and need, the same unit
    # Its backward sums what all ranks send back, and so the gradients of those that share a unit.
    y_BSUF = gather_from_sequence_parallel_region(y_BSF.contiguous(), 2).unflatten(-1, (-1, unit))
    # Chosen by a product and not by an index: the same graph, and the same compiled code, on every rank.
    units_U1 = torch.arange(y_BSUF.shape[2], device=y_BSF.device)[:, None]
    mine_U1 = units_U1 == get_tensor_model_parallel_rank() // sharing
    return (y_BSUF * mine_U1.to(y_BSUF.dtype)).sum(2)


def whole(split: bool, x_BSD: torch.Tensor) -> torch.Tensor:
    """All positions, on every rank; the backward sums the gradients that the ranks' parts of the head give."""
    if split:
        return gather_from_sequence_parallel_region(x_BSD, SEQUENCE)
    return copy_to_tensor_model_parallel_region(x_BSD)


def cross_entropy(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int, compiled: bool
) -> torch.Tensor:
    """`training.loss.linear_cross_entropy` with the rows of the head split over ranks.

    In one piece: a rank's share of the logits is small.
    """
    loss_N = parallel_cross_entropy(F.linear(hidden_ND, head_VD).float(), targets_N)
    real_N = (targets_N >= 0).float()
    return (loss_N * real_N).sum() / real_N.sum().clamp(min=1)


def core_attention(q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> torch.Tensor:
    """`training.model.attention` in plain operations, the softmax in float32."""
    k_BHSE, v_BHSE = (_each_query_its_own(x, q_BHSE.shape[1]) for x in (k_BKSE, v_BKSE))
    scores_BHSS = (q_BHSE @ k_BHSE.transpose(-1, -2)).float() * q_BHSE.shape[-1] ** -0.5
    positions_S = torch.arange(q_BHSE.shape[2], device=q_BHSE.device)
    scores_BHSS = scores_BHSS.masked_fill(positions_S > positions_S[:, None], torch.finfo(torch.float32).min)
    return scores_BHSS.softmax(-1).to(v_BHSE.dtype) @ v_BHSE


def flash_attention(q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> torch.Tensor:
    """`training.model.attention` by the SDK's kernel, which takes [B, H, E, S] and gives [B, H, S, E]."""
    from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func

    k_BHSE, v_BHSE = (_each_query_its_own(x, q_BHSE.shape[1]) for x in (k_BKSE, v_BKSE))
    return nki_flash_attn_func(*(x.transpose(-1, -2) for x in (q_BHSE, k_BHSE, v_BHSE)), causal=True)


def _each_query_its_own(x_BKSE: torch.Tensor, heads: int) -> torch.Tensor:
    groups = heads // x_BKSE.shape[1]
    return x_BKSE.repeat_interleave(groups, dim=1) if groups > 1 else x_BKSE


def _checkpoint(on_device: bool) -> Callable[..., torch.Tensor]:
    if not on_device:
        return functools.partial(checkpoint, use_reentrant=False)
    # Without its barriers XLA would find the second computation to be the first, and keep that one's results. It knows
    # the reentrant kind alone.
    from torch_xla.utils.checkpoint import checkpoint as checkpoint_xla

    return functools.partial(checkpoint_xla, use_reentrant=True)


def neuron_layers(settings: Settings, dtype: torch.dtype, on_device: bool) -> Layers:
    """The layers for these settings, with weights of `dtype`; `on_device`: not under NXD_CPU_MODE.

    `selective` activation checkpointing computes attention again (as Korthikanti et al. 2022, section 5), unless it is
    the kernel's, which keeps no scores.
    """
    split = splits_sequence(settings)
    again = _checkpoint(on_device)
    attention: Callable[..., torch.Tensor] = core_attention
    if on_device and flash_kernel_takes(settings.train.seq_length, settings.model.head_dim):
        attention = flash_attention
    elif settings.train.activation_checkpointing == "selective":
        attention = functools.partial(again, core_attention)

    def recompute(how: str, costly: frozenset[object], layer: Callable[..., Any], *args: torch.Tensor) -> torch.Tensor:
        return again(layer, *args) if how == "full" else layer(*args)

    return Layers(
        column=functools.partial(ColumnParallelLinear, bias=False, gather_output=True, dtype=dtype),
        row=functools.partial(_Row, split=split, dtype=dtype),
        embedding=functools.partial(_Embedding, split=split, dtype=dtype),
        project=functools.partial(project, split, dtype),
        attention=attention,
        whole=functools.partial(whole, split),
        loss=cross_entropy,
        recompute=recompute,
        full_shape=full_shape,
    )


def splits_sequence(settings: Settings) -> bool:
    """Whether the sequence is split between the layers."""
    return settings.parallel.sequence_parallel and settings.parallel.tensor_parallel_size > 1


def full_shape(parameter: torch.Tensor) -> list[int]:
    """Shape of the whole of which this rank holds a part, by the marks that NxD's layers put on their weights."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= parameter.num_partitions  # type: ignore[attr-defined]
    return shape


def assign_part(parameter: torch.Tensor, full: torch.Tensor) -> None:
    """Copy this rank's part of `full` into a parameter."""
    if getattr(parameter, "tensor_model_parallel", False):
        parts = full.chunk(parameter.num_partitions, parameter.partition_dim)  # type: ignore[attr-defined]
        full = parts[get_tensor_model_parallel_rank()]
    parameter.copy_(full)
