"""The stage `precompile`: has everything compiled that training will ask for, before accelerators wait for it.

torch.compile: all layers are alike and are compiled one by one, so a model of one layer compiles the same code as one
of eighty, on one device.

Neuron: a step is one graph, which names every rank. So all workers of the run trace its graphs (`extract_graphs`, which
takes the place of training in their processes), and then one machine compiles them side by side (`precompile`).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from training.backends import World, backend_name, make_backend, neuron
from training.compile_cache import use_cache
from training.config import Settings
from training.errors import RunFailed
from training.rundir import RunDir, write_atomically
from training.start_checks import check_sum
from training.step import evaluate, train_step

STEPS = 3  # the first step of a process makes optimizer state, the second uses it, the third is like all others
COMPILER = ("neuron_parallel_compile", "--command", "compile", sys.executable, "-c", "")


def precompile(settings: Settings) -> str:
    """Compile the training and the evaluation step of `settings` on this process's device, unless the cache has them.

    Returns one line that says what was found or done. Raises `RunFailed` when Neuron's compiler fails.
    """
    if backend_name(settings) == "neuron":
        return _compile_extracted(settings)
    one_layer = settings.model.model_copy(update={"num_hidden_layers": 1, "init_from": None})
    small = settings.model_copy(
        update={"model": one_layer, "parallel": settings.parallel.model_copy(update={"workers": 1})}
    )
    backend = make_backend(small, World(local_size=settings.parallel.workers))  # as many threads as a worker will have
    if not backend.compiles:
        why = "train.compile is false" if settings.train.compile is False else "no C++ compiler with Python.h here"
        return f"nothing to compile: {why}"
    folder = use_cache(settings, backend.ingredients())
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

    files = _write_manifest(manifest, backend.ingredients(), started)
    return f"compiled {files} files into {folder}"


def asks_for_graphs(settings: Settings) -> bool:
    """Whether the workers must trace the graphs of this run before `precompile` can compile them."""
    if backend_name(settings) != "neuron" or neuron.cpu_mode():
        return False
    return not _complete(use_cache(settings, neuron.ingredients(settings)) / "manifest.json")


def extract_graphs(settings: Settings, world: World) -> None:
    """Trace every graph of the run on this worker of it: what training does, on tokens that are all 0.

    Where NEURON_EXTRACT_GRAPHS_ONLY is set nothing is computed: the graphs go to the compiler's cache.
    """
    backend = make_backend(settings, world)
    model = backend.build_model()
    optimizer = backend.optimizer(model)
    from training.backends.neuron_checkpoint import meet

    check_sum(backend)
    train = settings.train
    rows = settings.accumulation_steps * train.micro_batch_size
    tokens_BS1 = torch.zeros((rows, train.seq_length + 1), dtype=torch.int64)
    batch = tokens_BS1[: train.micro_batch_size], torch.ones(train.micro_batch_size)
    for _ in range(2):  # as from the start, and as from a checkpoint, which is read to the host
        for _ in range(STEPS):
            train_step(backend, settings, model, optimizer, tokens_BS1, train.learning_rate, (False, False))()
        evaluate(backend, model, [batch, batch])
        meet()
        optimizer.load_state_dict(tree_map_only(torch.Tensor, lambda value: value.cpu(), optimizer.state_dict()))
    if world.rank == 0:
        RunDir(settings.run.dir).write_outcome("done", "traced the graphs of a step and of an evaluation")


def _compile_extracted(settings: Settings) -> str:
    if neuron.cpu_mode():
        return "nothing to compile: NXD_CPU_MODE"
    parts = neuron.ingredients(settings)
    folder = use_cache(settings, parts)
    manifest = folder / "manifest.json"
    if _complete(manifest):
        return f"found all {len(neuron.compiled_graphs(folder))} graphs in {folder}"
    started = time.perf_counter()
    done = subprocess.run(COMPILER, capture_output=True, text=True, env=os.environ)
    compiled, extracted = neuron.compiled_graphs(folder), neuron.extracted_graphs(folder)
    if done.returncode or not extracted or extracted - compiled:
        said = (done.stderr or done.stdout).strip().rpartition("\n")[2]
        raise RunFailed(
            f"{folder}: {len(extracted & compiled)} of {len(extracted)} graphs compiled "
            f"({COMPILER[0]} ended with {done.returncode}: {said}), expected all; the same command goes on from there"
        )
    _write_manifest(manifest, parts, started)
    return f"compiled {len(compiled)} graphs into {folder}"


def _write_manifest(manifest: Path, ingredients: dict[str, Any], started: float) -> int:
    folder = manifest.parent
    sizes = {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
    record = {"seconds": round(time.perf_counter() - started, 1), "ingredients": ingredients, "files": sizes}
    write_atomically(manifest, json.dumps(record, indent=2) + "\n")
    return len(sizes)


def _complete(manifest: Path) -> int:
    """Number of files that the manifest lists, 0 if it is not there or one of them is missing or has another size."""
    if not manifest.exists():
        return 0
    sizes: dict[str, int] = json.loads(manifest.read_text(encoding="utf-8"))["files"]
    paths = {manifest.parent / name: size for name, size in sizes.items()}
    return len(sizes) if all(path.exists() and path.stat().st_size == size for path, size in paths.items()) else 0
