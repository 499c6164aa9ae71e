"""Device memory of one worker on Trainium, from the settings: every term a formula, none measured on a device.

    footprint(settings).total  ->  bytes of one core

The parts are what the Neuron backend holds with NeuronX Distributed (NxD) 0.17. Symbols: D hidden size, F intermediate
size, H query and K key/value heads of E dimensions, V vocabulary, L layers, t tensor-parallel size, d data-parallel
size, N tokens of a micro-batch, S sequence, P parameters of a worker, e bytes of a value of the compute dtype (2 for
bfloat16).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from training.config import Model, Settings
from training.trainium import flash_kernel_takes

FLOAT32 = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes of one worker by what they are for; their sum is the most that a step needs."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    joined: int
    layer: int
    loss: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(astuple(self))


FORMULAS = {
    "weights": "e P, P = matrices / t + norms",
    "gradients": "4 P (e P without train.accumulate_float32)",
    "optimizer": "16 P / d: master weights, two moments, the reduced gradient, in float32",
    "activations": "L N (A + B) / t, A = (16 + 2e) D, B = 4e (D + F) + 4 H; full: A = e D, B = 0",
    "  scores": "B + (4 + e) H S where neither the flash kernel nor recomputation spares them",
    "joined weights": "e L ((H + 2 K) E + 2 F) D / t: q, k, v and gate, up side by side; full: of one layer",
    "a layer at work": "2 N (A + B) / t, (4 + 2e) N D gathered, e P / L of gradients",
    "head and loss": "(8 + e) N V / t: logits, in float32, exponentials; 2e N D gathered",
    "symbols": "e bytes of train.dtype (2 for bfloat16), t and d tensor- and data-parallel size, N tokens of a "
    "micro-batch, S sequence, L layers, D hidden, F intermediate and V vocabulary size, H query and K key/value heads "
    "of E dimensions",
}
"""How each part is reckoned; `footprint` and `layer_bytes` say why."""


def value_bytes(settings: Settings) -> int:
    """e: bytes of a value of the compute dtype on Trainium, where `auto` is bfloat16."""
    return FLOAT32 if settings.train.dtype == "float32" else 2


def parameter_shapes(model: Model, tensor_parallel_size: int = 1) -> Iterator[tuple[int, int, int]]:
    """(count, rows, columns) of the parameters that one worker holds; a norm has one column.

    Column-parallel matrices and the embedding are split by rows, row-parallel ones by columns, norms not at all.
    """
    t, hidden, layers = tensor_parallel_size, model.hidden_size, model.num_hidden_layers
    yield layers, hidden // t, hidden  # q_proj
    yield 2 * layers, model.num_key_value_heads * model.head_dim // t, hidden  # k_proj, v_proj
    yield layers, hidden, hidden // t  # o_proj
    yield 2 * layers, model.intermediate_size // t, hidden  # gate_proj, up_proj
    yield layers, hidden, model.intermediate_size // t  # down_proj
    yield 2 * layers + 1, hidden, 1  # norms
    yield 1 if model.tie_word_embeddings else 2, model.vocab_size // t, hidden  # embedding, head


def parameters(model: Model, tensor_parallel_size: int = 1) -> int:
    """P: parameters that one worker holds."""
    return sum(count * rows * columns for count, rows, columns in parameter_shapes(model, tensor_parallel_size))


def sharded_parameters(model: Model, tensor_parallel_size: int, data_parallel_size: int) -> int:
    """P / d: parameters whose optimizer state one worker holds under ZeRO-1.

    torch_xla's ZeroRedundancyOptimizer, which NxD's builds on, pads the rows of each parameter to a multiple of the
    data-parallel size and gives every worker as many.
    """
    shapes = parameter_shapes(model, tensor_parallel_size)
    return sum(count * math.ceil(rows / data_parallel_size) * columns for count, rows, columns in shapes)


def layer_bytes(settings: Settings, recompute: str) -> tuple[int, int]:
    """(A, B): bytes per token that one decoder layer keeps for its backward pass.

    B is split over the tensor-parallel workers, A only with sequence parallelism: Korthikanti et al. 2022
    (arXiv:2205.05198), equations 2 and 4. Their terms are a GPT's; these are of `training.model`'s layer, without
    dropout and with SwiGLU. `recompute` is `train.activation_checkpointing` as the Neuron backend means it:

    - full: the layer's input, A = eD.
    - selective: all but attention's scores (section 5 there). Per norm its input and the normalized values in float32
      and the result, A = 2 (8 + e) D; rotated q and k, v (k and v repeated for each query head) and attention's
      result, 4eD, and its float32 sums, 4H; gate, up, silu(gate) and their product, 4eF.
    - none: the same with the flash kernel, which keeps no scores; else their softmax in float32 and in the compute
      dtype, (4 + e)HS, on top.
    """
    model, length, value = settings.model, settings.train.seq_length, value_bytes(settings)
    if recompute == "full":
        return value * model.hidden_size, 0
    norms = 2 * (2 * FLOAT32 + value) * model.hidden_size
    rest = 4 * value * (model.hidden_size + model.intermediate_size) + FLOAT32 * model.num_attention_heads
    if recompute == "none" and not flash_kernel_takes(length, model.head_dim):
        rest += (FLOAT32 + value) * model.num_attention_heads * length
    return norms, rest


def optimizer_bytes(settings: Settings) -> tuple[int, int]:
    """Bytes per parameter of the optimizer's state, and over how many workers ZeRO-1 splits it.

    The state are two moments and, with ZeRO-1, a copy of the weights: the float32 master weights, or one in the compute
    dtype. The moments have the dtype of what is stepped.
    """
    if not settings.parallel.zero_1:
        return 2 * value_bytes(settings), 1
    stepped = FLOAT32 if settings.train.master_weights else value_bytes(settings)
    return 3 * stepped, settings.parallel.data_parallel_size


def footprint(settings: Settings) -> Footprint:
    """What one worker needs at most in a training step.

    - weights in the compute dtype; gradients as they are summed over the micro-batches, which ZeRO-1 does not split.
    - optimizer: its state, and under ZeRO-1 the worker's part of the reduced gradient while it steps.
    - activations: what all layers keep (`layer_bytes`).
    - joined: the matrices that share an input are multiplied as one, and the backward pass keeps that copy of them.
    - layer: one layer at work in the backward pass: what it computes again and as much of gradients, under tensor
      parallelism the gathered input and its gradient in float32 and in the compute dtype, the gradients of its weights.
    - loss: logits of a micro-batch in the compute dtype, in float32 and as exponentials (which NxD's parallel
      cross-entropy keeps for the backward pass), the gathered hidden states and their gradient.

    Layer and loss do not meet: their sum is more than any moment needs. What the compiler adds (scratch space, code)
    and the runtime's buffers are not in it.
    """
    model, train, parallel = settings.model, settings.train, settings.parallel
    t, value = parallel.tensor_parallel_size, value_bytes(settings)
    tokens = train.micro_batch_size * train.seq_length
    held = parameters(model, t)
    one_more = model.model_copy(update={"num_hidden_layers": model.num_hidden_layers + 1})
    state, workers = optimizer_bytes(settings)
    reduced = state // 3 if parallel.zero_1 else 0

    def kept(recompute: str) -> int:
        whole, split = layer_bytes(settings, recompute)
        return tokens * (whole // (t if parallel.sequence_parallel else 1) + split // t)

    widths = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim + 2 * model.intermediate_size
    copies = 1 if train.activation_checkpointing == "full" else model.num_hidden_layers
    gathered = tokens * model.hidden_size if t > 1 else 0
    return Footprint(
        weights=value * held,
        gradients=(FLOAT32 if train.accumulate_float32 and parallel.zero_1 else value) * held,
        optimizer=(state + reduced) * sharded_parameters(model, t, workers),
        activations=model.num_hidden_layers * kept(train.activation_checkpointing),
        joined=value * copies * widths // t * model.hidden_size,
        layer=2 * kept("none") + (FLOAT32 + 2 * value) * gathered + value * (parameters(one_more, t) - held),
        loss=(2 * FLOAT32 + value) * tokens * model.vocab_size // t + 2 * value * gathered,
    )


def checkpoint_bytes(settings: Settings) -> int:
    """One checkpoint of all workers: weights in the compute dtype once, and the optimizer's state of every worker."""
    model, t, (state, workers) = settings.model, settings.parallel.tensor_parallel_size, optimizer_bytes(settings)
    return t * (value_bytes(settings) * parameters(model, t) + state * workers * sharded_parameters(model, t, workers))
