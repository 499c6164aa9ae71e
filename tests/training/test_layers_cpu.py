"""The CPU's own layers give what torch's give: losses and gradients, eager and compiled, in both dtypes."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from training.backends.layers_cpu import ProductLinear, block_attention, cpu_layers, product
from training.config import Model
from training.model import Layers, Llama, attention

CONFIG = Model(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_key_value_heads=2,
    vocab_size=300,
    initializer_range=0.15,
)


def loss_and_gradients(layers: Layers, recompute: str, compiled: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    model = Llama(CONFIG, layers, recompute, loss_chunk=100)
    model.init_weights(seed=3)
    if compiled:
        model.compile_layers()
    tokens_BS1 = torch.randint(300, (2, 201), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        loss = model(tokens_BS1[:, :-1], tokens_BS1[:, 1:])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_losses_and_gradients(recompute: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.backends.layers_cpu.onednn_is_faster", lambda: True)
    exact = loss_and_gradients(Layers(), "none", False, torch.float32)
    ours = loss_and_gradients(cpu_layers(compiled=True), recompute, False, dtype)
    plain = loss_and_gradients(Layers(), recompute, False, dtype)
    for expected, got, rounded in zip(exact, ours, plain, strict=True):
        # no further from the exact result than torch's own layers in this dtype, up to twice and float32's rounding
        error, allowed = (got - expected).norm(), (rounded - expected).norm()
        assert error <= 2 * allowed + 1e-5 * expected.norm() + 1e-7


def test_compiled_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.backends.layers_cpu.onednn_is_faster", lambda: True)
    expected = loss_and_gradients(Layers(), "none", False, torch.float32)
    got = loss_and_gradients(cpu_layers(compiled=True), "selective", True, torch.float32)
    for one, other in zip(expected, got, strict=True):
        assert (one - other).norm() <= 1e-4 * one.norm() + 1e-6


@pytest.mark.parametrize("length", [1, 127, 128, 129, 300])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_block_attention_is_attention(length: int, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(length)
    shapes = [(2, heads, length, 16) for heads in (4, kv_heads, kv_heads)]
    inputs = [torch.randn(shape, generator=generator).mul_(2).requires_grad_() for shape in shapes]
    grad = torch.randn(shapes[0], generator=generator)
    results = []
    for function in (attention, block_attention):
        out = function(*inputs)
        results.append([out.detach(), *torch.autograd.grad(out, inputs, grad)])
    for expected, got in zip(*results, strict=True):
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_product_takes_transposed_views() -> None:
    a_MK, b_NK = torch.randn(33, 20, requires_grad=True), torch.randn(50, 20, requires_grad=True)
    torch.testing.assert_close(product(a_MK, b_NK), a_MK @ b_NK.T, atol=1e-5, rtol=1e-5)
    c_KM, d_KN = torch.randn(20, 33), torch.randn(20, 50)
    torch.testing.assert_close(product(c_KM.T, d_KN.T), c_KM.T @ d_KN, atol=1e-5, rtol=1e-5)
    grad = torch.randn(33, 50)
    want = torch.autograd.grad(a_MK @ b_NK.T, (a_MK, b_NK), grad)
    got = torch.autograd.grad(product(a_MK, b_NK), (a_MK, b_NK), grad)
    for one, other in zip(want, got, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


def test_the_linear_layer_is_torchs() -> None:
    layer = ProductLinear(20, 30)
    x_BSD = torch.randn(2, 5, 20)
    torch.testing.assert_close(layer(x_BSD), F.linear(x_BSD, layer.weight), atol=1e-5, rtol=1e-5)
