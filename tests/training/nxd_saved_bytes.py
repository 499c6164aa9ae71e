"""What autograd keeps of a decoder layer under NxD, beside what the plan says; run by the interpreter of NXD_PYTHON.

    NXD_CPU_MODE=1 $NXD_PYTHON nxd_saved_bytes.py FOLDER

Two ranks of one tensor-parallel group on CPU cores, in float32. Prints one JSON list: [name, measured, planned] bytes.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from training.backends.base import World
from training.backends.neuron import NeuronBackend
from training.config import Settings, load_settings
from training.footprint import footprint

TOKENS, HEAD_DIM, RANKS = 384, 32, 2
SHAPE = {
    "model.hidden_size": "256",
    "model.intermediate_size": "704",
    "model.num_attention_heads": "8",
    "model.num_key_value_heads": "8",
    "model.vocab_size": "512",
    "model.max_position_embeddings": str(TOKENS),
    "data.tokenizer": "train:512",
    "train.seq_length": str(TOKENS),
    "train.micro_batch_size": "1",
    "train.dtype": "float32",
    "parallel.workers": str(RANKS),
    "parallel.tensor_parallel_size": str(RANKS),
    "run.backend": "neuron",
}
VARIANTS = (("full", "true"), ("selective", "true"), ("selective", "false"))


def settings_of(recompute: str, split: str, layers: int) -> Settings:
    changes = {"train.activation_checkpointing": recompute, "parallel.sequence_parallel": split}
    return load_settings(overrides=SHAPE | changes | {"model.num_hidden_layers": str(layers)})


def saved(settings: Settings, rank: int) -> int:
    """Bytes that a forward pass keeps on this rank, but for parameters and the rotary angles."""
    model = NeuronBackend(settings, World(rank, RANKS, rank, RANKS)).build_model()
    known = {tensor.data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}
    alive = []  # an address that is freed might be given out again

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(tensor)
        if tensor.data_ptr() not in known and tensor.shape != (TOKENS, HEAD_DIM):
            # A slice counts as what it is, and not as what it is a slice of: XLA keeps it alone.
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.logits(torch.zeros(1, TOKENS, dtype=torch.long)).sum()
    return sum(kept.values())


def planned(settings: Settings) -> int:
    found = footprint(settings)
    return found.activations + (found.joined if settings.train.activation_checkpointing != "full" else 0)


def rank_main(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = []
    for recompute, split in VARIANTS:
        two, three = (settings_of(recompute, split, layers) for layers in (2, 3))
        measured = saved(three, rank) - saved(two, rank)  # of one layer
        found.append((f"{recompute}, sequence split: {split}", measured, planned(three) - planned(two)))
    if rank == 0:
        print(json.dumps(found))


if __name__ == "__main__":
    mp.spawn(rank_main, (sys.argv[1],), nprocs=RANKS)
