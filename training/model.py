"""The Llama: embedding, decoder layers (RMSNorm, rotary grouped-query attention, SwiGLU), head. Written to be read.

One forward pass is `Llama(config)(tokens_BS, targets_BS) -> mean cross-entropy in nats`. Parameters carry the
names of Hugging Face's LlamaForCausalLM, so that export and import copy tensors without renaming them.

Shape suffixes: B batch, S sequence, D hidden size, H query heads, K key/value heads, E head dimension,
F intermediate size, V vocabulary, N = B x S tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from training.config import Model
from training.loss import linear_cross_entropy


def _linear(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs, bias=False)


def attention(q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> torch.Tensor:
    """Causal attention, [B, H, S, E]: softmax(q k^T / sqrt(E)) v over the positions up to each query's own.

    Each of the K key/value heads serves H / K query heads that follow one another.
    """
    grouped = k_BKSE.shape[1] != q_BHSE.shape[1]
    return F.scaled_dot_product_attention(q_BHSE, k_BKSE, v_BKSE, is_causal=True, enable_gqa=grouped)


def project(x_BSD: torch.Tensor, columns: Sequence[nn.Module], unit: int = 1) -> list[torch.Tensor]:
    """The outputs of several `column` layers on one input. `unit`: features that a rank must have together."""
    return [column(x_BSD) for column in columns]


# What `selective` keeps: the results that cost most to compute again for the memory they take. Not bmm, whose results
# are attention scores where attention is no operation of its own.
_KEPT: frozenset[object] = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def _keep(kept: frozenset[object], ctx: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute(
    how: str, costly: frozenset[object], layer: Callable[..., torch.Tensor], *args: torch.Tensor
) -> torch.Tensor:
    """`layer(*args)`, with its activations computed again in the backward pass: all, or all that `selective` drops."""
    if how == "full":
        return checkpoint(layer, *args, use_reentrant=False)
    policy = functools.partial(_keep, _KEPT | costly)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(layer, *args, use_reentrant=False, context_fn=contexts)


def _as_it_is(x_BSD: torch.Tensor) -> torch.Tensor:
    return x_BSD


def _own_shape(parameter: torch.Tensor) -> Sequence[int]:
    return parameter.shape


@dataclass(frozen=True)
class Layers:
    """What a backend may split over tensor-parallel ranks or has a faster form of; the defaults are plain torch.

    `column` splits its outputs, `row` its inputs and sums, `embedding` its rows. Between them the sequence may be
    split: `project` takes such an input, and `whole` puts the last layer's output together for the loss. `loss` maps
    (hidden_ND, head_VD, targets_N, chunk, compiled) to the mean cross-entropy. `recompute` is activation checkpointing,
    and `costly` are operations of these layers whose results it is to keep when `selective`. `full_shape` is the shape
    of the whole of a parameter of which a rank holds a part.
    """

    column: Callable[[int, int], nn.Module] = _linear
    row: Callable[[int, int], nn.Module] = _linear
    embedding: Callable[[int, int], nn.Module] = nn.Embedding
    project: Callable[[torch.Tensor, Sequence[nn.Module], int], list[torch.Tensor]] = project
    attention: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = attention
    whole: Callable[[torch.Tensor], torch.Tensor] = _as_it_is
    loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int, bool], torch.Tensor] = linear_cross_entropy
    recompute: Callable[..., torch.Tensor] = recompute
    costly: frozenset[object] = frozenset()
    full_shape: Callable[[torch.Tensor], Sequence[int]] = _own_shape


def rotary_table(head_dim: int, length: int, theta: float, device: torch.device | None = None) -> torch.Tensor:
    """Cosines and sines of the rotary embedding, [2, length, head_dim], float32.

    Angle of position p and pair i is p * theta^(-2i / head_dim) (Su et al. 2021, RoFormer, section 3.4.2). Pair i is
    made of dimensions i and i + head_dim / 2, the layout of Hugging Face's Llama weights.
    """
    inverse = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), inverse)
    angles = torch.cat((angles, angles), dim=-1)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHSE: torch.Tensor, table_2SE: torch.Tensor) -> torch.Tensor:
    """Turn the dimension pairs of `x_BHSE` by the angles of its positions (`rotary_table`)."""
    cos_SE, sin_SE = table_2SE.to(x_BHSE.dtype)
    first, second = x_BHSE.chunk(2, dim=-1)
    return x_BHSE * cos_SE + torch.cat((-second, first), dim=-1) * sin_SE


class Attention(nn.Module):
    """Causal self-attention with rotary positions; K key/value heads serve H query heads."""

    def __init__(self, config: Model, layers: Layers) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attention, self.project = layers.attention, layers.project
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = layers.column(config.hidden_size, heads * self.head_dim)
        self.k_proj = layers.column(config.hidden_size, kv_heads * self.head_dim)
        self.v_proj = layers.column(config.hidden_size, kv_heads * self.head_dim)
        self.o_proj = layers.row(heads * self.head_dim, config.hidden_size)

    def forward(self, x_BSD: torch.Tensor, table_2SE: torch.Tensor) -> torch.Tensor:
        def heads(y: torch.Tensor) -> torch.Tensor:  # the number of heads is this rank's share under tensor parallelism
            return y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        q, k, v = self.project(x_BSD, (self.q_proj, self.k_proj, self.v_proj), self.head_dim)
        y_BHSE = self.attention(rotate(heads(q), table_2SE), rotate(heads(k), table_2SE), heads(v))
        return self.o_proj(y_BHSE.transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, config: Model, layers: Layers) -> None:
        super().__init__()
        self.project = layers.project
        self.gate_proj = layers.column(config.hidden_size, config.intermediate_size)
        self.up_proj = layers.column(config.hidden_size, config.intermediate_size)
        self.down_proj = layers.row(config.intermediate_size, config.hidden_size)

    def forward(self, x_BSD: torch.Tensor) -> torch.Tensor:
        gate, up = self.project(x_BSD, (self.gate_proj, self.up_proj), 1)
        return self.down_proj(F.silu(gate) * up)


class DecoderLayer(nn.Module):
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: Model, layers: Layers, activation_checkpointing: str) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config, layers)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = FeedForward(config, layers)
        self.activation_checkpointing = activation_checkpointing
        self.recompute, self.costly = layers.recompute, layers.costly

    def forward(self, x_BSD: torch.Tensor, table_2SE: torch.Tensor) -> torch.Tensor:
        # The checkpoint is inside forward, so that a compiled layer contains it and the policy sees every operation.
        if self.activation_checkpointing == "none" or not torch.is_grad_enabled():
            return self._forward(x_BSD, table_2SE)
        return self.recompute(self.activation_checkpointing, self.costly, self._forward, x_BSD, table_2SE)

    def _forward(self, x_BSD: torch.Tensor, table_2SE: torch.Tensor) -> torch.Tensor:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), table_2SE)
        return x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))


class Trunk(nn.Module):
    """Embedding, layers and final norm: tokens_BS -> hidden_BSD."""

    rotary: torch.Tensor

    def __init__(self, config: Model, layers: Layers, activation_checkpointing: str) -> None:
        super().__init__()
        self.embed_tokens = layers.embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(config, layers, activation_checkpointing) for _ in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        x_BSD = self.embed_tokens(tokens_BS)
        table_2SE = self.rotary[:, : tokens_BS.shape[1]]
        for layer in self.layers:
            x_BSD = layer(x_BSD, table_2SE)
        return self.norm(x_BSD)


class Llama(nn.Module):
    """A causal language model of the Llama family.

    Args:
        config: the shape.
        layers: the parallel layers of the backend.
        activation_checkpointing: `none`, `selective` or `full` (see `training.config.Train`).
        loss_chunk: tokens whose logits exist at one time.

    The weights are random only after `init_weights`, which also makes the rotary table; this order lets a model be
    built on the meta device, sharded, and then filled.
    """

    def __init__(
        self,
        config: Model,
        layers: Layers | None = None,
        activation_checkpointing: str = "none",
        loss_chunk: int = 1024,
    ) -> None:
        super().__init__()
        self.config = config
        self.parts = layers or Layers()
        self.loss_chunk = loss_chunk
        self.compiled = False
        self.model = Trunk(config, self.parts, activation_checkpointing)
        self.lm_head = self.parts.column(config.hidden_size, config.vocab_size)
        self.tie_weights()
        self.init_rotary()

    def tie_weights(self) -> None:
        """Where the shape ties them, make the head's weight the embedding's: again, after what makes two of one."""
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def init_rotary(self) -> None:
        """(Re)compute the rotary table on the device of the weights."""
        config, device = self.config, self.model.norm.weight.device
        table = rotary_table(config.head_dim, config.max_position_embeddings, config.rope_theta, device)
        self.model.register_buffer("rotary", table, persistent=False)

    @torch.no_grad()
    def init_weights(self, seed: int, assign: Callable[[torch.Tensor, torch.Tensor], object] | None = None) -> None:
        """Fill the weights: normal with `initializer_range`, norms at one.

        `assign(parameter, values)` stores the whole tensor `values`; a backend with parameters in parts gives its own.

        What adds to the residual stream (o_proj, down_proj) is scaled by 1 / sqrt(2 x layers), so that its variance
        does not grow with depth (Radford et al. 2019, GPT-2, section 2.3). The same seed gives the same weights on any
        number of workers.
        """
        generator = torch.Generator(self.model.norm.weight.device).manual_seed(seed)
        std = self.config.initializer_range
        for name, parameter in self.named_parameters():
            residual = name.endswith(("o_proj.weight", "down_proj.weight"))
            scale = (2 * self.config.num_hidden_layers) ** -0.5 if residual else 1.0
            values = torch.ones(self.parts.full_shape(parameter), device=parameter.device)
            if parameter.ndim > 1:
                values.normal_(0.0, std * scale, generator=generator)
            assign(parameter, values) if assign else parameter.copy_(values)
        self.init_rotary()

    def compile_layers(self) -> None:
        """Compile the decoder layers one by one: all are alike, so one compilation serves every depth.

        `forward` is replaced, and not the module, so that parameter names and the hooks of DDP and FSDP stay as they
        are.
        """
        torch._dynamo.config.optimize_ddp = False  # it would split layers that DDP's buckets overlap with as they are
        for layer in self.model.layers:
            layer.forward = torch.compile(layer.forward, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
        self.compiled = True

    def logits(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """Logits of every position, [B, S, V]: for tests and small inputs; training never makes them whole."""
        return self.lm_head(self.parts.whole(self.model(tokens_BS)))

    def forward(self, tokens_BS: torch.Tensor, targets_BS: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy (nats, float32 scalar) of `targets_BS` after `tokens_BS`."""
        hidden_ND = self.parts.whole(self.model(tokens_BS)).flatten(0, 1)
        head_VD = self.lm_head.get_parameter("weight")
        return self.parts.loss(hidden_ND, head_VD, targets_BS.flatten(), self.loss_chunk, self.compiled)
