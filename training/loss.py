"""Cross-entropy of the output head without the logits.

With 128k rows in the head, the logits of one 8192-token sample are 4 GB in float32, and their gradient as much again.
Here the head and the loss are one operation, done for a chunk of tokens at a time; the gradient of each chunk is taken
while its logits are at hand, so nothing is computed twice (the method of Hsu et al. 2024, Liger Kernel, section 3.2).

Shape suffixes: N tokens, C tokens of one chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _loss_and_grad(
    logits_CV: torch.Tensor, targets_C1: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the chunk's cross-entropies (float32), and `scale` times its gradient by the logits: softmax - one-hot."""
    dtype, logits_CV = logits_CV.dtype, logits_CV.float()
    top_C1 = logits_CV.amax(-1, keepdim=True)
    exp_CV = (logits_CV - top_C1).exp_()
    sum_C1 = exp_CV.sum(-1, keepdim=True)
    loss = (top_C1 + sum_C1.log() - logits_CV.gather(-1, targets_C1)).sum()
    # The one-hot as a comparison and not as a scatter: compiled, this is then one pass that writes the gradient once.
    hot_CV = torch.arange(logits_CV.shape[-1], device=logits_CV.device) == targets_C1
    return loss, exp_CV.mul_(scale / sum_C1).add_(hot_CV, alpha=-scale).to(dtype)


@functools.cache
def _step(compiled: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    return torch.compile(_loss_and_grad, dynamic=False) if compiled else _loss_and_grad


def _chunks(tokens: int, size: int) -> list[slice]:
    """Chunks of at most `size` tokens whose lengths differ by one at most: one or two shapes to compile for."""
    count = math.ceil(tokens / size)
    edges = [tokens * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def _product(a_MK: torch.Tensor, b_NK: torch.Tensor) -> torch.Tensor:
    return a_MK @ b_NK.T


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: torch.Tensor,
        head_VD: torch.Tensor,
        targets_N: torch.Tensor,
        chunk: int,
        compiled: bool,
        product: Product,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        # Summed in float32 over the chunks, whatever the compute dtype.
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32)
        for part in _chunks(len(hidden_ND), chunk):
            logits_CV = product(hidden_ND[part], head_VD)
            loss, grad_CV = _step(compiled)(logits_CV, targets_N[part, None], 1.0 / len(hidden_ND))
            total += loss
            grad_hidden_ND[part] = product(grad_CV, head_VD.T)
            grad_head_VD += product(grad_CV.T, hidden_ND[part].T)
        ctx.save_for_backward(grad_hidden_ND, grad_head_VD.to(head_VD.dtype))
        return total / len(hidden_ND)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden_ND, grad_head_VD = ctx.saved_tensors
        return grad_hidden_ND * grads[0].to(grad_hidden_ND.dtype), grad_head_VD * grads[0], None, None, None, None


def linear_cross_entropy(
    hidden_ND: torch.Tensor,
    head_VD: torch.Tensor,
    targets_N: torch.Tensor,
    chunk: int,
    compiled: bool = False,
    product: Product = _product,
) -> torch.Tensor:
    """Mean cross-entropy in nats (float32 scalar) of `softmax(hidden_ND @ head_VD.T)` against `targets_N` (int64).

    At most `chunk` x V logits exist at a time. Differentiable once, by `hidden_ND` and `head_VD`. Under autocast the
    products, each `product(a, b)` = a @ b.T, are taken in its dtype. `compiled` makes the element-wise work of a chunk
    one pass over its logits.
    Without gradients (evaluation), targets of -100 are left out of the mean.
    """
    device = hidden_ND.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden_ND, head_VD = hidden_ND.to(dtype), head_VD.to(dtype)
    if torch.is_grad_enabled():
        return _LinearCrossEntropy.apply(hidden_ND, head_VD, targets_N, chunk, compiled, product)  # type: ignore[no-untyped-call]
    total = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
    for part in _chunks(len(hidden_ND), chunk):
        logits_CV = product(hidden_ND[part], head_VD).float()
        total += torch.nn.functional.cross_entropy(logits_CV, targets_N[part], reduction="sum")
    return total / (targets_N >= 0).sum().clamp(min=1)
