"""How long a checkpoint holds training up: ours against a synchronous save of the same state in the same run.

    python -m benchmarks.checkpoint_stall [--quick]

Both save the whole training state of a Llama of 21 M parameters (252 MB; 7 M and 84 MB with --quick) to the same
disk, synced, hashed and renamed; the synchronous one is `Checkpointer(blocking=True)`, a plain `dcp.save` on the
trainer's thread. Saves of the two alternate, with training steps between. The stall is the time from the end of a
step until the next may begin, gathering the state included. The write then shares the cores with the steps that
follow, so what they lose is counted too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from training.checkpoint import Checkpointer, training_state
from training.config import Model
from training.model import Llama

FOLDER = Path("bench/checkpoint_stall")
GOAL = 0.10
LARGE = Model(hidden_size=512, intermediate_size=1376, vocab_size=8192, num_hidden_layers=4)
SMALL = Model(hidden_size=256, intermediate_size=688, vocab_size=8192, num_hidden_layers=4)


class _Training:
    """Steps of a small Llama, to have something that a checkpoint can hold up."""

    def __init__(self, config: Model) -> None:
        self.model = Llama(config)
        self.model.init_weights(seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.tokens_BS = torch.randint(0, config.vocab_size, (2, 64))

    def step(self) -> float:
        """Seconds of one optimizer step."""
        start = time.perf_counter()
        self.model(self.tokens_BS, self.tokens_BS).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    def save(self, checkpointer: Checkpointer, step: int) -> float:
        """Seconds until training may go on."""
        start = time.perf_counter()
        checkpointer.save(step, training_state(self.model, self.optimizer), {})
        return time.perf_counter() - start


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows of the table: seconds of ours and of the synchronous save, medians over the repetitions."""
    repetitions = 5 if quick else 9
    training = _Training(SMALL if quick else LARGE)
    shutil.rmtree(FOLDER, ignore_errors=True)
    ours = Checkpointer(FOLDER / "ours", keep=1)
    peer = Checkpointer(FOLDER / "peer", keep=1, blocking=True)
    for _ in range(3):
        training.step()
    first_peer = training.save(peer, 0)
    first = training.save(ours, 0)  # makes the buffers that later saves reuse
    ours.wait()

    stalls, syncs, quiet, beside, lost = [], [], [], [], []
    for repetition in range(1, repetitions + 1):
        alone = statistics.median(training.step() for _ in range(5))
        syncs.append(training.save(peer, repetition))
        training.step()
        stalls.append(training.save(ours, repetition))
        steps = []
        while not (FOLDER / "ours" / f"step-{repetition:08d}").exists():
            steps.append(training.step())
        ours.wait()
        quiet.append(alone)
        beside.append(statistics.mean(steps))
        lost.append(stalls[-1] + max(0.0, sum(steps) - alone * len(steps)))
    ours.close()
    peer.close()
    shutil.rmtree(FOLDER)
    return [
        _row("checkpoint stall / synchronous save", stalls, syncs, GOAL),
        _row("checkpoint stall and slower steps / synchronous save", lost, syncs),
        _row("training step during the write / without", beside, quiet),
        _row("first checkpoint's stall / synchronous save", [first], [first_peer]),
    ]


def _row(name: str, ours: list[float], peer: list[float], goal: float | None = None) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(ours, peer, strict=True)]
    ratio = statistics.median(ratios)
    return {
        "name": name,
        "ours": statistics.median(ours),
        "peer": statistics.median(peer),
        "unit": "s",
        "ratio": ratio,
        "spread": f"{min(ratios):.3f}-{max(ratios):.3f} (n={len(ratios)})",
        "goal": None if goal is None else f"<= {goal:.2f}",
        "ok": None if goal is None else ratio <= goal,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller state and fewer repetitions")
    for row in run(parser.parse_args().quick):
        goal = f"  goal {row['goal']}: {'met' if row['ok'] else 'MISSED'}" if row["goal"] else ""
        print(f"{row['name']:<54} {row['ours']:.4f} {row['peer']:.4f} s  {row['ratio']:.3f} [{row['spread']}]{goal}")


if __name__ == "__main__":
    main()
