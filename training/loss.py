"""Cross-entropy of the output head without the logits.

With 128k rows in the head, the logits of one 8192-token sample are 4 GB in float32, and their gradient as much again.
Here the head and the loss are one operation, done for a chunk of tokens at a time; the gradient of each chunk is taken
while its logits are at hand, so nothing is computed twice (the method of Hsu et al. 2024, Liger Kernel, section 3.2).
"""

from __future__ import annotations

from typing import Any

import torch


def _chunk_loss(hidden_CD: torch.Tensor, head_VD: torch.Tensor, targets_C: torch.Tensor) -> torch.Tensor:
    """Sum of the chunk's cross-entropies, float32."""
    logits_CV = (hidden_CD @ head_VD.T).float()
    return (logits_CV.logsumexp(-1) - logits_CV.gather(-1, targets_C[:, None]).squeeze(-1)).sum()


def _chunk_loss_and_grad(
    hidden_CD: torch.Tensor, head_VD: torch.Tensor, targets_C: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sum of the chunk's cross-entropies, and `scale` times its gradient by the logits (softmax - one-hot)."""
    logits_CV = (hidden_CD @ head_VD.T).float()
    lse_C = logits_CV.logsumexp(-1)
    loss = (lse_C - logits_CV.gather(-1, targets_C[:, None]).squeeze(-1)).sum()
    columns = torch.arange(logits_CV.shape[1], device=logits_CV.device)
    one_hot_CV = columns == targets_C[:, None]
    grad_CV = ((logits_CV - lse_C[:, None]).exp() - one_hot_CV.float()) * scale
    return loss, grad_CV.to(hidden_CD.dtype)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int, compiled: bool
    ) -> torch.Tensor:
        step = torch.compile(_chunk_loss_and_grad, dynamic=False) if compiled else _chunk_loss_and_grad
        total = hidden_ND.new_zeros((), dtype=torch.float32)
        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_head_VD = torch.zeros_like(head_VD, dtype=torch.float32)
        head = head_VD.to(hidden_ND.dtype)
        for start in range(0, len(hidden_ND), chunk):
            part = slice(start, start + chunk)
            loss, grad_CV = step(hidden_ND[part], head, targets_N[part], 1.0 / len(hidden_ND))
            total += loss
            torch.mm(grad_CV, head, out=grad_hidden_ND[part])
            if head.dtype == torch.float32:
                grad_head_VD.addmm_(grad_CV.T, hidden_ND[part])
            else:
                grad_head_VD += grad_CV.T @ hidden_ND[part]
        ctx.save_for_backward(grad_hidden_ND, grad_head_VD.to(head_VD.dtype))
        return total / len(hidden_ND)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        (grad,) = grads
        grad_hidden_ND, grad_head_VD = ctx.saved_tensors
        return grad_hidden_ND * grad.to(grad_hidden_ND.dtype), grad_head_VD * grad, None, None, None


# Set once by `training.backends` when the run compiles; the chunk's element-wise work then becomes one pass.
compile_chunks = False


def linear_cross_entropy(
    hidden_ND: torch.Tensor, head_VD: torch.Tensor, targets_N: torch.Tensor, chunk: int
) -> torch.Tensor:
    """Mean cross-entropy in nats (float32 scalar) of `softmax(hidden_ND @ head_VD.T)` against `targets_N`.

    At most `chunk` x V logits exist at a time. Differentiable once, by `hidden_ND` and `head_VD`.
    """
    raise NotImplementedError
