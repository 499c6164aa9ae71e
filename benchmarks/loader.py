"""Tokens a second that reach the trainer: our loader against Megatron-Core's GPTDataset in torch's DataLoader.

    python -m benchmarks.loader [--quick]

Both read the same `.bin/.idx` (documents of 50 to 1,500 tokens, uint16, in the page cache), shuffle it, and hand out
int64 batches to a consumer that does nothing else, on the CPU. The peer is given 0, 1 and 2 worker processes and its
best counts; it also makes labels, loss mask and positions, which it cannot be told to leave out. Passes of all
contenders alternate. The last row is the time from a prepared store to the first batch: Megatron builds and saves its
document, sample and shuffle indices then, we compute the order.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Generator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.data.samples import Loader, SampleOrder, Samples
from training.data.store import MANIFEST, ShardWriter, TokenStore, dtype_for, write_json

FOLDER = Path("bench/loader")
GOAL = 1.0
VOCABULARY = 32_000
SHAPES = ((256, 16), (4096, 32))  # sequence length, batch: the tiny preset's, and a step of a real run on one node
PEER_WORKERS = (0, 1, 2)

Batches = Generator[torch.Tensor, None, None]


class _Tokenizer:
    """As much of a tokenizer as Megatron asks for."""

    vocab_size = VOCABULARY
    eod = 0
    pad = -1
    unique_identifiers: dict[str, str] = {"class": "none"}  # noqa: RUF012 - Megatron reads a plain attribute


def make_store(folder: Path, tokens: int) -> Path:
    """A store of random documents, made once."""
    if not (folder / MANIFEST).exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        random = np.random.default_rng(0)
        lengths = random.integers(50, 1500, size=tokens // 775)
        with ShardWriter(folder, "train", dtype_for(VOCABULARY)) as shard:
            for part in np.array_split(lengths, max(1, len(lengths) // 10_000)):
                shard.add(random.integers(1, VOCABULARY, size=int(part.sum())), part)
            record = shard.finish()
        assert record is not None
        train = {"documents": record["documents"], "tokens": record["tokens"], "shards": [record]}
        valid = {"documents": 0, "tokens": 0, "shards": []}
        write_json(folder / MANIFEST, {"dtype": "uint16", "splits": {"train": train, "valid": valid}})
    return folder


def _ours(folder: Path, seq_length: int, batch: int) -> Batches:
    samples = Samples(TokenStore.open(folder, "train"), seq_length)
    with Loader(samples, SampleOrder(len(samples), seed=1), batch) as loader:
        while True:
            yield loader.next()


def _megatron(folder: Path, seq_length: int, batch: int, workers: int, cache: Path) -> Batches:
    with warnings.catch_warnings(action="ignore"):  # of the GPU libraries that are not there
        from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
        from megatron.core.datasets.indexed_dataset import IndexedDataset
        from megatron.core.datasets.utils import Split

    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=seq_length,
        blend=([str(folder / "train")], None),
        split="1",
        path_to_cache=str(cache),
        tokenizer=_Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    indexed = IndexedDataset(str(folder / "train"), mmap=True)
    documents = np.arange(len(indexed.document_indices) - 1, dtype=np.int32)
    dataset = GPTDataset(indexed, str(folder / "train"), documents, None, Split.train, config)
    loader = torch.utils.data.DataLoader(
        dataset, batch, num_workers=workers, persistent_workers=workers > 0, drop_last=True
    )
    while True:
        for item in loader:
            yield item["tokens"]


def _rate(batches: Batches, tokens_per_batch: int, tokens: int) -> float:
    """Tokens a second over about `tokens` tokens, the start-up left out."""
    for _ in range(5):
        next(batches)
    count = max(10, tokens // tokens_per_batch)
    started = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count * tokens_per_batch / (time.perf_counter() - started)


def _first(batches: Batches) -> float:
    """Seconds to the first batch."""
    started = time.perf_counter()
    next(batches)
    return time.perf_counter() - started


def run(quick: bool) -> list[dict[str, Any]]:
    """Rows of the table: medians over the repetitions, with the least and the greatest ratio."""
    repetitions = 3 if quick else 7
    folder = make_store(FOLDER / ("quick" if quick else "full"), 5_000_000 if quick else 100_000_000)
    cache = FOLDER / "megatron-indices"
    rows = []
    for seq_length, batch in SHAPES:
        contenders: dict[str, Callable[[], Batches]] = {"ours": partial(_ours, folder, seq_length, batch)}
        for workers in PEER_WORKERS:
            contenders[f"{workers} workers"] = partial(_megatron, folder, seq_length, batch, workers, cache)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        for _ in range(repetitions):
            for name, start in contenders.items():
                with closing(start()) as batches:
                    rates[name].append(_rate(batches, seq_length * batch, 2_000_000 if quick else 10_000_000))
        ours = rates.pop("ours")
        best = max(rates, key=lambda name: statistics.median(rates[name]))
        title = f"loader, sequence {seq_length}, batch {batch}, against GPTDataset + DataLoader ({best})"
        rows.append(_row(title, ours, rates[best], "Mtok/s", scale=1e6, larger_is_better=True))
    firsts: dict[str, list[float]] = {"ours": [], "megatron": []}
    for _ in range(repetitions):
        shutil.rmtree(cache, ignore_errors=True)
        for name, batches in (("ours", _ours(folder, 256, 16)), ("megatron", _megatron(folder, 256, 16, 0, cache))):
            with closing(batches):
                firsts[name].append(_first(batches))
    rows.append(_row("loader, store to first batch", firsts["ours"], firsts["megatron"], "s", 1.0, False))
    return rows


def _row(
    name: str, ours: list[float], peer: list[float], unit: str, scale: float, larger_is_better: bool
) -> dict[str, Any]:
    ratios = sorted(a / b if larger_is_better else b / a for a, b in zip(ours, peer, strict=True))
    ratio = statistics.median(ratios)
    return {
        "name": name,
        "ours": statistics.median(ours) / scale,
        "peer": statistics.median(peer) / scale,
        "unit": unit,
        "ratio": ratio,
        "spread": f"{ratios[0]:.2f}-{ratios[-1]:.2f} (n={len(ratios)})",
        "goal": f">= {GOAL:g}",
        "ok": ratio >= GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller store and fewer repetitions")
    for row in run(parser.parse_args().quick):
        goal = f"goal {row['goal']}: {'met' if row['ok'] else 'MISSED'}"
        numbers = f"{row['ours']:.4g} {row['peer']:.4g} {row['unit']}  {row['ratio']:.2f} [{row['spread']}]"
        print(f"{row['name']:<88} {numbers}  {goal}")


if __name__ == "__main__":
    main()
