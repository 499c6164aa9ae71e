"""How long each stage takes to its first work, against the bare libraries that it starts.

    python -m benchmarks.startup

Seconds of whole processes, ours and the peer's in turn. There is no goal; a ratio near 1 means that a stage starts
about as fast as the libraries below it can. What is small and run already is found done, so what is left is start-up.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path("bench/startup")
SMALL = """
    --data.source text:{folder}/text/*.txt --data.tokenizer train:300 --run.dir {folder}/run --model.vocab_size 300
    --model.hidden_size 64 --model.intermediate_size 128 --train.seq_length 32 --train.steps 1 --train.warmup_steps 1
    --train.global_batch_size 2 --train.micro_batch_size 2 --data.validation_fraction 0.2 --train.eval_samples 2
"""
TRANSFORMERS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4))
tokens = torch.zeros(2, 32, dtype=torch.long)
model(input_ids=tokens, labels=tokens).loss.backward()
"""
RAY_TRAIN = """
import ray
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer
ray.init(include_dashboard=False, log_to_driver=False, logging_level="ERROR")
TorchTrainer(lambda: None, scaling_config=ScalingConfig(num_workers=1)).fit()
"""


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows: seconds of ours and of the peer, medians; the ratio is ours / peer."""
    repetitions = 1 if quick else 3
    shutil.rmtree(FOLDER, ignore_errors=True)
    (FOLDER / "text").mkdir(parents=True)
    for number in range(20):
        (FOLDER / "text" / f"{number}.txt").write_text(f"Text number {number}. " + "Some words to train on. " * 40)
    arguments = SMALL.format(folder=FOLDER).split()
    _seconds(["-m", "training", "prepare", *arguments])
    _seconds(["-m", "training", "precompile", *arguments])
    pairs: dict[str, tuple[list[str], list[str]]] = {
        "prepare, done already / import datasets": (["prepare"], ["-c", "import datasets"]),
        "precompile, all found / import torch": (["precompile"], ["-c", "import torch"]),
        "train, one compiled step / transformers, one step": (["train"], ["-c", TRANSFORMERS]),
        "train, done already / import torch": (["train", "again"], ["-c", "import torch"]),
    }
    if not quick:
        pairs["train on Ray, one step / bare TorchTrainer"] = (["train", "--launcher", "ray"], ["-c", RAY_TRAIN])
    rows = []
    for name, ((stage, *how), peer) in pairs.items():
        ours, theirs = [], []
        for _ in range(repetitions):
            if stage == "train" and "again" not in how:
                shutil.rmtree(FOLDER / "run" / "checkpoints", ignore_errors=True)
            launcher = [word for word in how if word != "again"]
            ours.append(_seconds(["-m", "training", stage, *arguments, *launcher]))
            theirs.append(_seconds(peer))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        rows.append(
            {
                "name": name,
                "ours": statistics.median(ours),
                "peer": statistics.median(theirs),
                "unit": "s",
                "ratio": statistics.median(ratios),
                "spread": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
                "goal": "",
                "ok": None,
            }
        )
    return rows


def _seconds(arguments: list[str]) -> float:
    started = time.perf_counter()
    ended = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, f"{arguments}: {ended.stderr}"
    return time.perf_counter() - started


if __name__ == "__main__":
    for row in run(quick="--quick" in sys.argv):
        print(row)
