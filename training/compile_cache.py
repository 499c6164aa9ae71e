"""Where compiled code is kept: `CACHE_DIR/KEY`, the key a digest of all that the code depends on.

On shared storage one compilation then serves every worker, restart and run of the same shape.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from torch._dynamo.utils import counters

from training.config import Settings


def use_cache(settings: Settings, ingredients: dict[str, Any]) -> Path:
    """Make torch, or Neuron's compiler, compile into and from the folder of these ingredients; returns the folder.

    `ingredients` are plain JSON values (`training.backends.base.Backend.ingredients`).
    """
    text = json.dumps(ingredients, sort_keys=True)
    folder = settings.cache_dir.resolve() / hashlib.sha256(text.encode()).hexdigest()[:16]
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["NEURON_COMPILE_CACHE_URL"] = str(folder / "neuron")
    return folder


def inductor_counts() -> dict[str, int]:
    """Graphs that this process found in the cache of torch.compile and that it had to compile, so far."""
    found, missed = counters["aot_autograd"], counters["inductor"]
    return {"hits": found["autograd_cache_hit"] + missed["fxgraph_cache_hit"], "misses": missed["fxgraph_cache_miss"]}
