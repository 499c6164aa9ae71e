"""Layers of the model that are faster on CPU cores than torch's own, at the same mathematics and precision.

`cpu_layers(compiled)` picks what pays on this machine:

- `block_attention`: torch's attention for CPUs takes the products of one head after another, by MKL. Those of all heads
  at once, with the rest compiled, are two to three times as fast for the sequences of this project's small runs.
- `product`: torch hands float32 products to MKL, which keeps to AVX2 on processors that are not Intel's. oneDNN, which
  torch brings along and uses for bfloat16, takes AVX-512 wherever it is: about twice the rate.

Both are chosen by what the machine is and never by timing it: a run that is resumed must compute what it would have.

Shape suffixes as in `training.model`, and G query heads of one key/value head, A rows of a block, C columns of a block;
M, K, N are the rows, inner size and columns of a product.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from training.loss import linear_cross_entropy
from training.model import Layers, attention

BLOCK = 128  # queries: the scores of a block stay in the caches, and a quarter of the masked half is never computed
LONGEST = 1024  # positions: beyond it the blocks make the compiled code long, and torch's attention catches up


@torch.library.custom_op("llama_trainium::product", mutates_args=())
def _product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    # The one op of torch that asks oneDNN for a float32 product; an op of our own, because Inductor would copy
    # transposed operands for it.
    return torch.ops.mkldnn._linear_pointwise(a_MK, b_NK, None, "none", [], "")


@_product.register_fake
def _(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    return a_MK.new_empty(a_MK.shape[0], b_NK.shape[0])


_OP = torch.ops.llama_trainium.product.default


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad_MN: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    a_MK, b_NK = ctx.saved_tensors
    grad_a = _product(grad_MN, b_NK.T) if ctx.needs_input_grad[0] else None
    grad_b = _product(grad_MN.T, a_MK.T) if ctx.needs_input_grad[1] else None
    return grad_a, grad_b


_product.register_autograd(_backward, setup_context=_save)


def product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    """`a_MK @ b_NK.T`, by oneDNN in float32 too. Either may be a transposed view; differentiable."""
    return _product(a_MK, b_NK) if a_MK.dtype == torch.float32 else a_MK @ b_NK.T  # type: ignore[no-any-return]


class ProductLinear(nn.Linear):
    """`nn.Linear` without bias whose float32 products are `product`'s; under autocast it is torch's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_autocast_enabled("cpu") or x.dtype != torch.float32:
            return F.linear(x, self.weight)
        return _product(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])


class _BlockAttention(torch.autograd.Function):
    """Causal attention by blocks of queries over the keys they see, the probabilities computed again in the backward.

    The method of Dao et al. 2022 (FlashAttention, algorithms 1 and 4) without blocks of keys: scores of a block and all
    its keys exist at a time. Query heads of one key/value head are rows of one product.
    """

    @staticmethod
    def forward(ctx: Any, q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> torch.Tensor:
        outputs, normalizers = [], []
        for first, q_BKGAE in _query_blocks(q_BHSE, k_BKSE.shape[1]):
            scores_BKGAC = _scores(q_BKGAE, k_BKSE, first)
            top_BKGA1 = scores_BKGAC.amax(-1, keepdim=True)
            exp_BKGAC = (scores_BKGAC - top_BKGA1).exp()
            sum_BKGA1 = exp_BKGAC.sum(-1, keepdim=True)
            weights_BKGAC = (exp_BKGAC / sum_BKGA1).to(q_BHSE.dtype)
            outputs.append(_grouped(weights_BKGAC, v_BKSE[:, :, : weights_BKGAC.shape[-1]]))
            normalizers.append(top_BKGA1 + sum_BKGA1.log())
        y_BHSE = torch.cat(outputs, dim=3).flatten(1, 2)
        ctx.save_for_backward(q_BHSE, k_BKSE, v_BKSE, y_BHSE, torch.cat(normalizers, dim=3))
        return y_BHSE

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q_BHSE, k_BKSE, v_BKSE, y_BHSE, normalizer_BKGS1 = ctx.saved_tensors
        (grad_BHSE,) = grads
        kv_heads = k_BKSE.shape[1]
        # Row sums of weights x gradient of weights (FlashAttention, appendix B.4).
        inner_BHS1 = (grad_BHSE.float() * y_BHSE.float()).sum(-1, keepdim=True)
        inner_BKGS1 = inner_BHS1.unflatten(1, (kv_heads, -1))
        grad_k = torch.zeros_like(k_BKSE, dtype=torch.float32)
        grad_v = torch.zeros_like(v_BKSE, dtype=torch.float32)
        grad_q = []
        blocks = zip(_query_blocks(q_BHSE, kv_heads), _query_blocks(grad_BHSE, kv_heads), strict=True)
        for (first, q_BKGAE), (_, grad_BKGAE) in blocks:
            rows = slice(first, first + q_BKGAE.shape[3])
            keys, values = k_BKSE[:, :, : rows.stop], v_BKSE[:, :, : rows.stop]
            weights_BKGAC = (_scores(q_BKGAE, k_BKSE, first) - normalizer_BKGS1[:, :, :, rows]).exp()
            grad_weights_BKGAC = _grouped(grad_BKGAE, values.transpose(-1, -2)).float()
            scale = q_BHSE.shape[-1] ** -0.5
            grad_scores_BKGAC = weights_BKGAC * (grad_weights_BKGAC - inner_BKGS1[:, :, :, rows]) * scale
            grad_scores_BKGAC = grad_scores_BKGAC.to(q_BHSE.dtype)
            grad_v[:, :, : rows.stop] += _over_groups(weights_BKGAC.to(q_BHSE.dtype), grad_BKGAE)
            grad_k[:, :, : rows.stop] += _over_groups(grad_scores_BKGAC, q_BKGAE)
            grad_q.append(_grouped(grad_scores_BKGAC, keys))
        return torch.cat(grad_q, dim=3).flatten(1, 2), grad_k.to(k_BKSE.dtype), grad_v.to(v_BKSE.dtype)


def _query_blocks(x_BHSE: torch.Tensor, kv_heads: int) -> list[tuple[int, torch.Tensor]]:
    """(first position, rows [B, K, G, A, E]) of each block."""
    blocks = x_BHSE.unflatten(1, (kv_heads, -1)).split(BLOCK, dim=3)
    return [(index * BLOCK, block) for index, block in enumerate(blocks)]


def _grouped(x_BKGAM: torch.Tensor, y_BKMN: torch.Tensor) -> torch.Tensor:
    """`x @ y` with the groups as more rows: one product per key/value head, nothing repeated. [B, K, G, A, N]"""
    return (x_BKGAM.flatten(2, 3) @ y_BKMN).unflatten(2, x_BKGAM.shape[2:4])


def _over_groups(x_BKGAC: torch.Tensor, y_BKGAE: torch.Tensor) -> torch.Tensor:
    """`x.T @ y`, summed over groups and rows: [B, K, C, E]."""
    return x_BKGAC.flatten(2, 3).transpose(-1, -2) @ y_BKGAE.flatten(2, 3)


def _scores(q_BKGAE: torch.Tensor, k_BKSE: torch.Tensor, first: int) -> torch.Tensor:
    """Scaled scores in float32 of the queries at positions `first`.. over the keys up to theirs, -inf where masked."""
    last = first + q_BKGAE.shape[3]
    scores_BKGAC = _grouped(q_BKGAE, k_BKSE[:, :, :last].transpose(-1, -2)).float() * q_BKGAE.shape[-1] ** -0.5
    visible_AC = torch.arange(last) <= torch.arange(first, last)[:, None]
    return torch.where(visible_AC, scores_BKGAC, -torch.inf)


def block_attention(q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> torch.Tensor:
    """`training.model.attention` by `_BlockAttention` up to `LONGEST` positions. Fast when compiled."""
    if q_BHSE.shape[2] > LONGEST:
        return attention(q_BHSE, k_BKSE, v_BKSE)
    return _BlockAttention.apply(q_BHSE, k_BKSE, v_BKSE)  # type: ignore[no-any-return, no-untyped-call]


@functools.cache
def onednn_is_faster() -> bool:
    """Whether oneDNN's float32 products use instructions that MKL's do not use on this processor."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    try:
        vendor = re.search(r"vendor_id\s*:\s*(\S+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        return False
    avx512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
    return avx512 and vendor is not None and vendor[1] != "GenuineIntel"


def cpu_layers(compiled: bool) -> Layers:
    """The layers for this machine; `compiled`: whether the model will be."""
    layers = Layers(attention=block_attention if compiled else attention)
    if not onednn_is_faster():
        return layers
    loss = functools.partial(linear_cross_entropy, product=product)
    return dataclasses.replace(layers, column=ProductLinear, row=ProductLinear, loss=loss, costly=frozenset((_OP,)))
