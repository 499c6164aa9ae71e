"""What the tests of `training/` share: a token store without text, and settings of a model that trains in milliseconds.

Both are fixtures that give a function, so that a test makes as many as it needs, where and as it wants them.
"""

from __future__ import annotations

import os

# The models here are too small to share: a second thread costs more than it brings, on a machine that has other tests
# to run. Before torch is imported, and handed on to the processes that tests start.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hashlib
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from makers import SettingsMaker, TokenStoreMaker, TrainingCommand

from training.config import Settings, load_settings
from training.data.store import MANIFEST, ShardWriter, dtype_for, write_json

# A shell starts what it runs in the background with SIGINT ignored, which every child inherits: the tests of Ctrl-C
# would wait for ever there.
signal.signal(signal.SIGINT, signal.default_int_handler)

DOCUMENT = 250  # tokens
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def token_store() -> TokenStoreMaker:
    """`token_store(settings.data_dir)` writes a store as `prepare` does, and returns its folder.

    `tokens` are for training and a tenth of them for validation, Zipf-distributed ids below `vocab_size` in documents
    of 250 tokens. `tokenizer` is what the manifest says it was made with [default: train:VOCAB_SIZE].
    """
    return _token_store


@pytest.fixture(scope="session")
def small_settings() -> SettingsMaker:
    """`small_settings(tmp_path, train__steps=3)`: settings of the run `tmp_path/run` on the store `tmp_path/data`.

    `train.steps` is written `train__steps` or given as `**{"train.steps": 3}`. The store is made by `token_store`.
    Two layers, hidden size 32, vocabulary 512, sequence 16, batch 4, 6 steps, float32, not compiled, on the CPU.
    """
    return _small_settings


def _token_store(
    path: Path, vocab_size: int = 512, tokens: int = 20_000, tokenizer: str | None = None, seed: int = 0
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(seed)
    tokenizer = tokenizer or f"train:{vocab_size}"
    dtype = dtype_for(vocab_size)
    splits: dict[str, Any] = {}
    entropy = 0.0
    for split, count in (("train", tokens), ("valid", tokens // 10)):
        ids = (random.zipf(1.3, count) % vocab_size).astype(dtype)
        lengths = np.diff(np.append(np.arange(0, count, DOCUMENT), count))
        with ShardWriter(path, split, dtype) as shard:
            shard.add(ids, lengths)
            record = shard.finish()
        splits[split] = {"documents": len(lengths), "tokens": count, "shards": [record] if record else []}
        if split == "train":
            share = np.unique(ids, return_counts=True)[1] / count
            entropy = float(-(share * np.log(share)).sum())
    manifest = {
        "tokenizer": tokenizer,
        "tokenizer_sha256": hashlib.sha256(tokenizer.encode()).hexdigest(),
        "vocab_size": vocab_size,
        "eod_id": 0,
        "dtype": dtype.name,
        "unigram_entropy": entropy,
        "splits": splits,
    }
    write_json(path / MANIFEST, manifest)
    return path


def _small_settings(tmp_path: Path, **overrides: object) -> Settings:
    values: dict[str, object] = {
        "data.output": tmp_path / "data",
        "data.tokenizer": "train:512",
        "model.hidden_size": 32,
        "model.intermediate_size": 48,
        "model.num_hidden_layers": 2,
        "model.num_attention_heads": 4,
        "model.num_key_value_heads": 2,
        "model.vocab_size": 512,
        "model.max_position_embeddings": 64,
        "train.seq_length": 16,
        "train.global_batch_size": 4,
        "train.micro_batch_size": 2,
        "train.steps": 6,
        "train.warmup_steps": 2,
        "train.eval_every": 3,
        "train.eval_samples": 8,
        "train.loss_chunk": 64,
        "train.dtype": "float32",
        "train.compile": False,
        "checkpoint.every": 3,
        "run.dir": tmp_path / "run",
        "run.backend": "cpu",
        "run.max_failures": 0,
    }
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return load_settings(overrides={key: str(value) for key, value in values.items()})


@pytest.fixture(scope="session")
def mpirun() -> str:
    """The path of mpirun. Where there is none, root on Debian or Ubuntu has openmpi-bin installed, and others skip."""
    if shutil.which("mpirun") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "check": False}
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update"], env=environment, **quiet)  # type: ignore[call-overload]
        install = ["apt-get", "install", "-y", "--no-install-recommends", "openmpi-bin"]
        subprocess.run(install, env=environment, **quiet)  # type: ignore[call-overload]
    path = shutil.which("mpirun")
    if path is None:
        pytest.skip("there is no mpirun, and only root on Debian or Ubuntu can have it installed: openmpi-bin")
    return path


@pytest.fixture
def mpi_command(tmp_path: Path, mpirun: str) -> Iterator[TrainingCommand]:
    """Starts `python -m training STAGE --launcher mpi` in a process group of its own, as a terminal does."""
    started: list[subprocess.Popen[str]] = []

    def run(settings: Settings, stage: str = "train") -> subprocess.Popen[str]:
        file = tmp_path / f"{settings.run.dir.name}.yaml"
        file.write_text(yaml.safe_dump(settings.resolved()))
        line = [sys.executable, "-m", "training", stage, "--config", str(file), "--launcher", "mpi"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(subprocess.Popen(line, cwd=ROOT, text=True, start_new_session=True, **pipes))  # type: ignore[call-overload]
        return started[-1]

    yield run
    for process in started:
        for below in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            below.kill()
        process.kill()
        process.communicate()
