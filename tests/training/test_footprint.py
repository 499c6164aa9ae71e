"""The memory terms against what they claim to be: the real model's tensors, a real optimizer's state, real files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from makers import SettingsMaker
from torch import nn
from torch.nn import functional as F

from training import footprint as fp
from training.checkpoint import Checkpointer, training_state
from training.config import Model, Settings, load_settings, preset_names
from training.model import Layers, Llama

LLAMA2, LLAMA3 = load_settings("llama2-7b").model, load_settings("llama3-8b").model
SMALL = Model(
    hidden_size=64,
    intermediate_size=160,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=256,
    max_position_embeddings=256,
)


def shard(model: Model, t: int) -> Llama:
    """The model as one of `t` tensor-parallel workers has it, without memory."""
    layers = Layers(
        column=lambda inputs, outputs: nn.Linear(inputs, outputs // t, bias=False),
        row=lambda inputs, outputs: nn.Linear(inputs // t, outputs, bias=False),
        embedding=lambda rows, columns: nn.Embedding(rows // t, columns),
    )
    with torch.device("meta"):
        return Llama(model, layers)


@pytest.mark.parametrize("name", preset_names())
def test_parameters_are_the_models(name: str) -> None:
    model = load_settings(name).model
    with torch.device("meta"):
        real = Llama(model)
    count = sum(parameter.numel() for parameter in real.parameters())
    assert fp.parameters(model) == count == model.num_parameters()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("model", "t"), [(LLAMA2, 8), (LLAMA3, 32), (SMALL, 2)])
def test_parameters_of_a_worker_are_those_of_the_model_with_split_layers(model: Model, t: int, tied: bool) -> None:
    model = model.model_copy(update={"tie_word_embeddings": tied})
    assert fp.parameters(model, t) == sum(parameter.numel() for parameter in shard(model, t).parameters())


@pytest.mark.parametrize(("model", "t", "d"), [(SMALL, 1, 1), (SMALL, 2, 3), (SMALL, 4, 48), (SMALL, 1, 100)])
def test_optimizer_term_is_a_real_optimizers_state(model: Model, t: int, d: int) -> None:
    """Each parameter padded to `d` parts of rows, one part of it given to AdamW, as torch_xla's ZeRO-1 does."""
    shards = []
    for parameter in shard(model, t).parameters():
        rows = torch.empty(parameter.shape)
        padded = F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, -len(rows) % d])
        shards.append(nn.Parameter(padded.chunk(d)[0].clone()))
    optimizer = torch.optim.AdamW(shards)
    for part in shards:
        part.grad = torch.zeros_like(part)
    optimizer.step()
    held = [*shards, *(part.grad for part in shards if part.grad is not None)]
    held += [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    assert len(held) == 4 * len(shards)
    measured = sum(tensor.numel() * tensor.element_size() for tensor in held)
    assert measured == 4 * fp.FLOAT32 * fp.sharded_parameters(model, t, d)


def repeated(q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> torch.Tensor:
    """Fused attention on a key/value head for each query head, as the Neuron backend hands them to its kernel."""
    groups = q_BHSE.shape[1] // k_BKSE.shape[1]
    k_BHSE, v_BHSE = (x.repeat_interleave(groups, dim=1) for x in (k_BKSE, v_BKSE))
    return F.scaled_dot_product_attention(q_BHSE, k_BHSE, v_BHSE, is_causal=True)


def with_scores(q_BHSE: torch.Tensor, k_BKSE: torch.Tensor, v_BKSE: torch.Tensor) -> torch.Tensor:
    """Attention that stores its scores: the softmax in float32, its product with v in the compute dtype."""
    groups = q_BHSE.shape[1] // k_BKSE.shape[1]
    k_BHSE, v_BHSE = (x.repeat_interleave(groups, dim=1) for x in (k_BKSE, v_BKSE))
    scores_BHSS = (q_BHSE @ k_BHSE.transpose(-1, -2)).float() * q_BHSE.shape[-1] ** -0.5
    mask_SS = torch.ones(scores_BHSS.shape[-2:], dtype=torch.bool).triu(1)
    return scores_BHSS.masked_fill(mask_SS, -1e9).softmax(-1).to(v_BHSE.dtype) @ v_BHSE


def saved_for_backward(settings: Settings, recompute: str, attention: Callable[..., torch.Tensor]) -> int:
    """Bytes that autograd keeps of one decoder layer of the real model in bfloat16, parameters not counted."""
    tokens, head_dim = settings.train.seq_length, settings.model.head_dim

    def of(depth: int) -> int:
        shape = settings.model.model_copy(update={"num_hidden_layers": depth})
        model = Llama(shape, Layers(attention=attention), recompute).to(torch.bfloat16)
        known = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
        kept: dict[int, int] = {}
        alive = []  # an address that is freed might be given out again

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            alive.append(tensor)
            storage = tensor.untyped_storage()
            table = tensor.shape == (tokens, head_dim)  # rotary angles, of which the graph of all layers has one copy
            if storage.data_ptr() not in known and not table and tensor.dtype != torch.bool:
                kept[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.logits(torch.zeros(1, tokens, dtype=torch.long)).sum()
        return sum(kept.values())

    return of(3) - of(2)


@pytest.mark.parametrize("heads", ["8", "2"])
@pytest.mark.parametrize(
    ("recompute", "attention", "measured_as"),
    [("full", repeated, "full"), ("selective", repeated, "none"), ("none", with_scores, "none")],
)
def test_activations_are_what_autograd_keeps(
    recompute: str, attention: Callable[..., torch.Tensor], measured_as: str, heads: str
) -> None:
    """Within 2 %: not in the formula are a statistic per norm and token.

    What `selective` keeps on Neuron is what a layer with fused attention keeps when nothing is computed again.
    """
    shape = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 8, "max_position_embeddings": 384}
    values = {f"model.{key}": str(value) for key, value in shape.items()}
    values |= {"model.num_key_value_heads": heads, "train.seq_length": "384"}
    settings = load_settings(overrides=values)
    formula = 384 * sum(fp.layer_bytes(settings, recompute))
    assert formula == pytest.approx(saved_for_backward(settings, measured_as, attention), rel=0.02)


def test_the_flash_kernel_spares_the_scores() -> None:
    long = load_settings("llama2-7b")
    short = load_settings("llama2-7b", None, {"train.seq_length": "4000"})
    assert fp.layer_bytes(long, "none") == fp.layer_bytes(long, "selective") == fp.layer_bytes(short, "selective")
    (_, stored), (_, spared) = fp.layer_bytes(short, "none"), fp.layer_bytes(short, "selective")
    assert stored - spared == 6 * 32 * 4000


def at(**changes: object) -> fp.Footprint:
    values = {key.replace("__", "."): str(value) for key, value in changes.items()}
    return fp.footprint(load_settings("llama2-7b", None, {"parallel.workers": "512"} | values))


def test_each_setting_moves_the_terms_that_it_should() -> None:
    """Against the settings of the preset: tensor parallel 8, sequence parallel, ZeRO-1, float32 masters and sums."""
    usual = at()
    assert usual.gradients == 2 * usual.weights
    assert at(train__accumulate_float32=False).gradients == usual.weights
    assert at(train__master_weights=False).optimizer == usual.optimizer / 2
    whole = at(parallel__zero_1=False, train__master_weights=False)
    assert (whole.optimizer, whole.gradients) == (2 * usual.weights, usual.weights)
    assert at(train__micro_batch_size=2).activations == 2 * usual.activations
    unsplit = at(parallel__sequence_parallel=False).activations - usual.activations
    assert unsplit == 32 * 4096 * 20 * 4096 * 7 // 8
    assert at(train__activation_checkpointing="full").activations == 32 * 4096 * 2 * 4096 // 8
    assert at(train__dtype="float32").weights == 2 * usual.weights
    assert usual.joined == 2 * 32 * (3 * 4096 + 2 * 11008) // 8 * 4096
    assert at(train__activation_checkpointing="full").joined == usual.joined // 32


def test_a_checkpoint_of_the_plain_backend_is_near_the_plan(tmp_path: Path, small_settings: SettingsMaker) -> None:
    """It writes float32 weights and two moments, which is the plan's optimizer state; the bfloat16 weights come on top.

    The real files have names and sizes beside the tensors.
    """
    settings = small_settings(tmp_path, model__hidden_size=256, model__intermediate_size=704, train__dtype="bfloat16")
    model = Llama(settings.model)
    model.init_weights(0)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 16, dtype=torch.long), torch.zeros(1, 16, dtype=torch.long)).backward()
    optimizer.step()
    checkpointer = Checkpointer(tmp_path / "checkpoints", 1)
    checkpointer.save(1, training_state(model, optimizer), {})
    checkpointer.close()
    written = sum(path.stat().st_size for path in (tmp_path / "checkpoints").rglob("*.distcp"))
    count = settings.model.num_parameters()
    assert fp.checkpoint_bytes(settings) == 14 * count
    assert 12 * count == pytest.approx(written, rel=0.02)
