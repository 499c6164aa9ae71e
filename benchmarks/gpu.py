"""Training on one large GPU: the share of its bf16 peak that does the model's work, against compiled transformers.

    python -m benchmarks.gpu

Preset llama-1b (1.26 B parameters), sequence 4096, bf16 products, float32 weights and optimizer, AdamW (fused) and
clipping on both sides, the same micro batch. MFU is `training.metrics.flops_per_token` (6 N + 12 layers x hidden x
sequence) x tokens/s / peak. Needs torch, transformers, pydantic and PyYAML; without a GPU it says so.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch

from benchmarks.train_step import Step, our_step, transformers_step
from training.backends import World, make_backend
from training.config import Settings, load_settings
from training.metrics import flops_per_token

GOAL = 0.51


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows: tokens/s against transformers, MFU of both, peak memory of both. One row "skipped" without a GPU."""
    if not torch.cuda.is_available():
        return [{"name": "skipped: torch sees no GPU", "goal": f"MFU >= {GOAL}", "ok": None}]
    return compare(load_settings("llama-1b"), blocks=2 if quick else 7, steps=2 if quick else 6)


def compare(settings: Settings, blocks: int, steps: int) -> list[dict[str, Any]]:
    """Blocks of steps of ours and of the peer in turn, on this machine's device, both models in its memory."""
    backend = make_backend(settings, World())
    shape = (settings.train.micro_batch_size, settings.train.seq_length + 1)
    tokens_BS1 = torch.randint(settings.model.vocab_size, shape, device=backend.device)
    contenders: dict[str, Step] = {}
    memory, rates = {}, {}
    for name in ("ours", "peer"):
        before = _allocated()
        contenders[name] = our_step(settings) if name == "ours" else transformers_step(settings, backend.compiles)
        for _ in range(3):
            contenders[name](tokens_BS1)
        memory[name], rates[name] = (_peak() - before) / 2**30, list[float]()
    for _ in range(blocks):
        for name, step in contenders.items():
            _wait()
            started = time.perf_counter()
            for _ in range(steps):
                step(tokens_BS1)
            _wait()
            rates[name].append(steps * settings.train.micro_batch_size * settings.train.seq_length / _since(started))
    ours, theirs = (statistics.median(rates[name]) for name in ("ours", "peer"))
    ratios = sorted(a / b for a, b in zip(rates["ours"], rates["peer"], strict=True))
    rows: list[dict[str, Any]] = [
        {
            "name": f"tokens/s on {backend.device_name}, {settings.model.num_parameters() / 1e9:.2f} B parameters",
            "ours": round(ours),
            "peer": round(theirs),
            "unit": "tokens/s",
            "ratio": statistics.median(ratios),
            "spread": f"{ratios[0]:.2f} to {ratios[-1]:.2f} (n={blocks})",
            "goal": "",
            "ok": None,
        },
        {"name": "peak memory", "ours": memory["ours"], "peer": memory["peer"], "unit": "GiB", "goal": "", "ok": None},
    ]
    if peak := backend.peak_flops():
        share = flops_per_token(settings.model, settings.train.seq_length) / peak[0]
        rows.append(
            {
                "name": f"MFU, (6 N + 12 layers x hidden x sequence) x tokens/s over {peak[1]}",
                "ours": ours * share,
                "peer": theirs * share,
                "unit": "",
                "ratio": ours / theirs,
                "spread": f"{min(rates['ours']) * share:.3f} to {max(rates['ours']) * share:.3f}",
                "goal": f">= {GOAL}",
                "ok": ours * share >= GOAL,
            }
        )
    return rows


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _since(started: float) -> float:
    return time.perf_counter() - started


def _allocated() -> int:
    if not torch.cuda.is_available():
        return 0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(row)
