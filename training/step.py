"""One optimizer step and one evaluation: what the trainer repeats, and what `precompile` needs the graphs of."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from training.backends import Backend
from training.config import Settings


def train_step(
    backend: Backend,
    settings: Settings,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    tokens_BS1: torch.Tensor,
    rate: float,
    flags: tuple[bool, ...],
) -> Callable[[], list[float]]:
    """Issue one step on this worker's part of the batch, at the learning rate `rate`.

    What it returns waits for the step and gives: the sum over workers of the loss, and of each of `flags`, the norm of
    the gradient before clipping, this worker's own loss.
    """
    for group in optimizer.param_groups:
        group["lr"] = rate
    passes = settings.accumulation_steps
    loss = torch.zeros((), device=backend.device)
    for index, micro_BS1 in enumerate(tokens_BS1.split(settings.train.micro_batch_size)):
        micro_BS1 = micro_BS1.to(backend.device, non_blocking=True)
        with backend.gradient_sync(model, last=index == passes - 1):
            with backend.autocast():
                micro_loss = model(micro_BS1[:, :-1], micro_BS1[:, 1:]) / passes
            micro_loss.backward()
        loss += micro_loss.detach()
    grad_norm = backend.update(model, optimizer)
    # As data and not as numbers: XLA makes another graph where two numbers become equal, or cease to be.
    flags_F = torch.tensor(flags, dtype=loss.dtype).to(backend.device)
    shared = backend.sum_(torch.cat((loss[None], flags_F)))
    read = backend.read_later(torch.stack((*shared, grad_norm.detach(), loss)))
    backend.step_boundary()
    return read


@torch.no_grad()
def evaluate(backend: Backend, model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """Mean loss over the samples of `batches` (see `training.data.samples.validation_batches`) on all workers."""
    model.eval()
    total = torch.zeros(2, device=backend.device)
    for tokens_BS1, weights_B in batches:
        tokens_BS1, weights_B = tokens_BS1.to(backend.device), weights_B.to(backend.device)
        targets_BS = tokens_BS1[:, 1:].masked_fill(weights_B[:, None] == 0, -100)
        with backend.autocast():
            mean = model(tokens_BS1[:, :-1], targets_BS)
        total += torch.stack((mean * weights_B.sum(), weights_B.sum()))
        backend.step_boundary()
    loss_sum, count = backend.sum_(total).tolist()
    model.train()
    return float(loss_sum / count)
