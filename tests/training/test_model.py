"""The model against transformers at the same weights, and against itself computed in other ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from training.config import Model
from training.loss import linear_cross_entropy
from training.model import Llama

# Weights large enough that attention is not uniform: at the usual 0.02 a wrong rope_theta would hardly show.
WEIGHTS = {"initializer_range": 0.15}
SHAPES = {
    "llama2": Model(hidden_size=64, intermediate_size=172, num_hidden_layers=3, vocab_size=500, **WEIGHTS),
    "llama3": Model(
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=3,
        num_key_value_heads=2,
        vocab_size=700,
        rope_theta=5e5,
        **WEIGHTS,
    ),
    "tied": Model(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        vocab_size=300,
        tie_word_embeddings=True,
        **WEIGHTS,
    ),
}


def build(config: Model, **options: object) -> Llama:
    model = Llama(config, **options)  # type: ignore[arg-type]
    model.init_weights(seed=7)
    return model


def tokens(config: Model, batch: int = 2, length: int = 48, seed: int = 0) -> torch.Tensor:
    return torch.randint(config.vocab_size, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_loss_and_gradients_are_those_of_transformers(shape: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = SHAPES[shape]
    ours = build(config, loss_chunk=17)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**config.model_dump(exclude={"init_from"}), attention_bias=False)
    )
    theirs.load_state_dict(ours.state_dict(), strict=not config.tie_word_embeddings)
    x_BS1 = tokens(config)
    inputs_BS, targets_BS = x_BS1[:, :-1], x_BS1[:, 1:]

    logits_BSV = theirs(inputs_BS).logits
    assert (ours.logits(inputs_BS) - logits_BSV).abs().max() < 1e-4

    loss = F.cross_entropy(logits_BSV.flatten(0, 1), targets_BS.flatten())
    our_loss = ours(inputs_BS, targets_BS)
    assert abs(our_loss.item() - loss.item()) < 1e-5

    loss.backward()
    our_loss.backward()
    expected = {name: p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(
            parameter.grad, expected[name], atol=1e-5, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recomputing_activations_changes_no_gradient(recompute: str) -> None:
    config = SHAPES["llama3"]
    x_BS1 = tokens(config)
    gradients = []
    for mode in ("none", recompute):
        model = build(config, activation_checkpointing=mode)
        model(x_BS1[:, :-1], x_BS1[:, 1:]).backward()
        gradients.append([p.grad for p in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again, atol=1e-7, rtol=1e-5)


def test_full_recomputation_keeps_less_for_the_backward_pass() -> None:
    def saved_bytes(mode: str) -> int:
        total = 0

        def count(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        config = SHAPES["llama2"]
        x_BS1 = tokens(config)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            build(config, activation_checkpointing=mode)(x_BS1[:, :-1], x_BS1[:, 1:])
        return total

    assert saved_bytes("full") < 0.5 * saved_bytes("none")


def test_compiled_layers_give_the_same_loss_and_gradients() -> None:
    config = SHAPES["llama3"]
    x_BS1 = tokens(config)
    results = []
    for compiled in (False, True):
        model = build(config)
        if compiled:
            model.compile_layers()
        loss = model(x_BS1[:, :-1], x_BS1[:, 1:])
        loss.backward()
        results.append((loss.detach(), [p.grad for p in model.parameters()]))
    (loss, grads), (compiled_loss, compiled_grads) = results
    torch.testing.assert_close(loss, compiled_loss, atol=1e-5, rtol=1e-5)
    for plain, other in zip(grads, compiled_grads, strict=True):
        torch.testing.assert_close(plain, other, atol=1e-5, rtol=1e-3)


@settings(deadline=None, max_examples=40)
@given(
    rows=st.integers(1, 40),
    chunk=st.integers(1, 50),
    vocab=st.integers(2, 30),
    seed=st.integers(0, 100),
    scale=st.floats(0.1, 30),
)
def test_chunked_loss_is_cross_entropy_for_any_chunk(
    rows: int, chunk: int, vocab: int, seed: int, scale: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    hidden_ND = torch.randn(rows, 8, generator=generator).mul_(scale).requires_grad_()
    head_VD = torch.randn(vocab, 8, generator=generator).requires_grad_()
    targets_N = torch.randint(vocab, (rows,), generator=generator)
    expected = F.cross_entropy(hidden_ND @ head_VD.T, targets_N)
    want = torch.autograd.grad(expected * 3, (hidden_ND, head_VD))
    loss = linear_cross_entropy(hidden_ND, head_VD, targets_N, chunk)
    got = torch.autograd.grad(loss * 3, (hidden_ND, head_VD))
    torch.testing.assert_close(loss, expected, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(
            linear_cross_entropy(hidden_ND, head_VD, targets_N, chunk), expected.detach(), atol=1e-4, rtol=1e-4
        )


def test_evaluation_leaves_masked_targets_out() -> None:
    hidden_ND, head_VD = torch.randn(6, 8), torch.randn(11, 8)
    targets_N = torch.tensor([1, 2, -100, 4, -100, 0])
    with torch.no_grad():
        loss = linear_cross_entropy(hidden_ND, head_VD, targets_N, chunk=4)
        torch.testing.assert_close(loss, F.cross_entropy(hidden_ND @ head_VD.T, targets_N))
        assert linear_cross_entropy(hidden_ND, head_VD, torch.full((6,), -100), chunk=4) == 0


def test_the_logits_never_exist_whole() -> None:
    """No tensor of the forward and backward pass is larger than a chunk's logits or the head."""
    from torch.utils._python_dispatch import TorchDispatchMode

    rows, vocab, chunk = 512, 400, 32
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden_ND, head_VD = torch.randn(rows, 8, requires_grad=True), torch.randn(vocab, 8, requires_grad=True)
    with Watch():
        linear_cross_entropy(hidden_ND, head_VD, torch.randint(vocab, (rows,)), chunk).backward()
    assert largest == chunk * vocab  # one more than needed would be rows * vocab = 16 times that


def test_bfloat16_loss_is_close_to_float32() -> None:
    config = SHAPES["llama3"]
    x_BS1 = tokens(config, batch=4)
    model = build(config)
    exact = model(x_BS1[:, :-1], x_BS1[:, 1:]).item()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(x_BS1[:, :-1], x_BS1[:, 1:])
    rounded.backward()
    assert rounded.dtype == torch.float32
    assert rounded.item() == pytest.approx(exact, rel=1e-2)
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


def test_the_seed_decides_the_weights() -> None:
    config = SHAPES["llama2"]
    one, two, other = build(config), build(config), Llama(config)
    other.init_weights(seed=8)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not torch.equal(one.lm_head.weight, other.lm_head.weight)
