"""The stage `precompile`: has everything compiled that training will ask for, before accelerators wait for it.

Compiled code goes to `CACHE_DIR/KEY`, where the key is a digest of all that it depends on (`ingredients`), so on shared
storage one compilation serves every worker, restart and run of the same shape. All layers are alike and are compiled
one by one, so a model of one layer compiles the same code as one of eighty.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch._dynamo.utils import counters

from training.backends import Backend, World, make_backend
from training.config import Settings
from training.rundir import write_atomically


def ingredients(settings: Settings, backend: Backend) -> dict[str, Any]:
    """All that compiled code depends on; plain JSON values."""
    model = settings.model.model_dump(
        mode="json", exclude={"init_from", "num_hidden_layers", "initializer_range", "tie_word_embeddings"}
    )
    train = settings.train.model_dump(
        mode="json", include={"seq_length", "micro_batch_size", "loss_chunk", "activation_checkpointing"}
    )
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    device = {"backend": backend.name, "device": backend.device_name, "dtype": str(backend.dtype)}
    if backend.name == "cpu":  # the number of threads is written into the code
        device["threads"] = str(torch.get_num_threads())
    return {"model": model, "train": train, "device": device, "versions": versions}


def use_cache(settings: Settings, backend: Backend) -> Path:
    """Make torch compile into, and from, the folder of this run's key; returns the folder."""
    text = json.dumps(ingredients(settings, backend), sort_keys=True)
    folder = settings.cache_dir.resolve() / hashlib.sha256(text.encode()).hexdigest()[:16]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    return folder


def cache_counts() -> dict[str, int]:
    """Graphs that this process found in the cache and that it had to compile, so far."""
    found, missed = counters["aot_autograd"], counters["inductor"]
    return {"hits": found["autograd_cache_hit"] + missed["fxgraph_cache_hit"], "misses": missed["fxgraph_cache_miss"]}


def precompile(settings: Settings) -> str:
    """Compile the training and the evaluation step of `settings` on this process's device, unless the cache has them.

    Returns one line that says what was found or done.
    """
    one_layer = settings.model.model_copy(update={"num_hidden_layers": 1, "init_from": None})
    small = settings.model_copy(
        update={"model": one_layer, "parallel": settings.parallel.model_copy(update={"workers": 1})}
    )
    backend = make_backend(small, World(local_size=settings.parallel.workers))  # as many threads as a worker will have
    if not backend.compiles:
        why = "train.compile is false" if settings.train.compile is False else "no C++ compiler with Python.h here"
        return f"nothing to compile: {why}"
    folder = use_cache(settings, backend)
    manifest = folder / "manifest.json"
    if files := _complete(manifest):
        return f"found all {files} files in {folder}"

    started = time.perf_counter()
    model = backend.build_model()
    shape = (settings.train.micro_batch_size, settings.train.seq_length)
    tokens_BS = torch.zeros(shape, dtype=torch.int64, device=backend.device)
    with backend.autocast():
        loss = model(tokens_BS, tokens_BS)
    loss.backward()
    model.eval()
    with torch.no_grad(), backend.autocast():
        model(tokens_BS, tokens_BS)

    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    seconds = round(time.perf_counter() - started, 1)
    record = {"seconds": seconds, "ingredients": ingredients(settings, backend), "files": sizes}
    write_atomically(manifest, json.dumps(record, indent=2) + "\n")
    return f"compiled {len(sizes)} files into {folder}"


def _complete(manifest: Path) -> int:
    """Number of files that the manifest lists, 0 if it is not there or one of them is missing or has another size."""
    if not manifest.exists():
        return 0
    sizes: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    paths = {manifest.parent / name: size for name, size in sizes.items()}
    return len(sizes) if all(path.exists() and path.stat().st_size == size for path, size in paths.items()) else 0
