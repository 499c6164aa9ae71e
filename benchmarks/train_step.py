"""One optimizer step against transformers, at the same shape, dtype, batch and threads.

    python -m benchmarks.train_step [--quick]

Ours is what the trainer does: forward, backward, clipping, AdamW, compiled. The peer is LlamaForCausalLM with torch's
attention, the same fused AdamW and the same clipping, eager and compiled whole; the better of the two counts. All take
turns, one step each; a ratio is that of one turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from training.backends import World, make_backend
from training.config import Model, Settings, load_settings

GOAL = 1.2
SHAPES = {
    "5 M": {"train.micro_batch_size": "16"},
    "30 M": {
        "model.hidden_size": "384",
        "model.intermediate_size": "1024",
        "model.num_attention_heads": "6",
        "model.num_key_value_heads": "6",
        "model.vocab_size": "32000",
        "train.micro_batch_size": "8",
        "train.global_batch_size": "8",
    },
}
Step = Callable[[torch.Tensor], torch.Tensor]


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows: tokens a second of ours and of the better peer, medians over the turns."""
    rows = []
    for shape in ["5 M"] if quick else SHAPES:
        for dtype in ("float32", "bfloat16"):
            overrides = SHAPES[shape] | {"train.dtype": dtype, "run.backend": "cpu"}
            rows.append(_row(shape, load_settings("tiny", overrides=overrides), turns=3 if quick else 11))
    return rows


def _row(shape: str, settings: Settings, turns: int) -> dict[str, Any]:
    # Else the row before makes the compiler take this row's sizes for changing ones, the peer's more than ours.
    torch._dynamo.reset()
    batch, length = settings.train.micro_batch_size, settings.train.seq_length
    tokens_BS1 = torch.randint(settings.model.vocab_size, (batch, length + 1))
    contenders = {
        "ours": our_step(settings),
        "eager": transformers_step(settings, compiled=False),
        "compiled": transformers_step(settings, compiled=True),
    }
    rates: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(-2, turns):  # two to warm up, where things are compiled
        for name, step in contenders.items():
            started = time.perf_counter()
            step(tokens_BS1)
            if turn >= 0:
                rates[name].append(batch * length / (time.perf_counter() - started))
    best = max(("eager", "compiled"), key=lambda name: statistics.median(rates[name]))
    ratios = sorted(a / b for a, b in zip(rates["ours"], rates[best], strict=True))
    ratio = statistics.median(ratios)
    threads = torch.get_num_threads()
    return {
        "name": f"{shape} parameters, {settings.train.dtype}, {batch} x {length} tokens, {threads} threads, "
        f"against transformers {best}",
        "ours": round(statistics.median(rates["ours"])),
        "peer": round(statistics.median(rates[best])),
        "unit": "tokens/s",
        "ratio": ratio,
        "spread": f"{ratios[0]:.2f} to {ratios[-1]:.2f} (n={turns})",
        "goal": f">= {GOAL}",
        "ok": ratio >= GOAL,
    }


def our_step(settings: Settings) -> Step:
    """One optimizer step of the trainer's own pieces."""
    backend = make_backend(settings, World())
    model = backend.build_model()
    optimizer = backend.optimizer(model)

    def step(tokens_BS1: torch.Tensor) -> torch.Tensor:
        with backend.autocast():
            loss: torch.Tensor = model(tokens_BS1[:, :-1], tokens_BS1[:, 1:])
        loss.backward()  # type: ignore[no-untyped-call]
        backend.clip_grad_norm(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def transformers_step(settings: Settings, compiled: bool) -> Step:
    """The same step with LlamaForCausalLM and torch's attention, compiled whole or not at all."""
    from transformers import LlamaForCausalLM

    backend = make_backend(settings, World())
    with torch.device(backend.device):
        model = LlamaForCausalLM(transformers_config(settings.model))
    forward = torch.compile(model) if compiled else model
    optimizer = backend.optimizer(model)

    def step(tokens_BS1: torch.Tensor) -> torch.Tensor:
        inputs_BS, targets_BS = tokens_BS1[:, :-1].contiguous(), tokens_BS1[:, 1:].contiguous()
        with backend.autocast():
            loss: torch.Tensor = forward(input_ids=inputs_BS, labels=targets_BS, shift_labels=targets_BS).loss
        loss.backward()  # type: ignore[no-untyped-call]
        backend.clip_grad_norm(model)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def transformers_config(config: Model) -> Any:
    """The same shape for transformers; training needs no cache of keys and values."""
    from transformers import LlamaConfig

    return LlamaConfig(**config.model_dump(exclude={"init_from"}), use_cache=False, attn_implementation="sdpa")


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(row)
