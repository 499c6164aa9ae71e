"""What is known of Trn1 before a node is paid for: its size, its peak, and what AWS published to run on it.

`training.plan` reckons with these, and the Neuron backend takes its peak from here.
"""

from __future__ import annotations

from dataclasses import dataclass

CORES_PER_NODE = 32
"""NeuronCore-v2 of a trn1.32xlarge or trn1n.32xlarge, one worker each: 16 devices of 2."""

CORE_BYTES = 16 * 2**30
"""Device memory of one core: half of a device's 32 GiB (Neuron documentation, Trainium architecture)."""

CORE_PEAK_FLOPS = 95e12
"""Dense bf16 FLOP/s of one core: half of a device's 190 TFLOP/s (the same page); 3,040 TFLOP/s a node."""


def flash_kernel_takes(seq_length: int, head_dim: int) -> bool:
    """Whether the SDK's flash attention kernel can be used, which keeps no scores: blocks of 2048, heads up to 128."""
    return seq_length % 2048 == 0 and head_dim <= 128


@dataclass(frozen=True)
class PublishedRun:
    """A pre-training run on Trn1 with the shape of one of our presets, whose throughput AWS published."""

    preset: str
    nodes: int
    tensor_parallel_size: int
    seq_length: int
    sequences_per_second: float
    """Of all nodes together."""


# Llama-2-7B and Llama-3.1-8B (the shape of Llama-3-8B), both with global batch 1024, micro-batch 1, ZeRO-1, bf16 and a
# float32 optimizer: "Trn1/Trn1n Training Performance" in the Neuron documentation.
PUBLISHED_RUNS = (
    PublishedRun("llama2-7b", nodes=16, tensor_parallel_size=8, seq_length=4096, sequences_per_second=101.3),
    PublishedRun("llama3-8b", nodes=32, tensor_parallel_size=32, seq_length=8192, sequences_per_second=41.99),
)
