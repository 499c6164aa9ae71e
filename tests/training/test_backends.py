"""FSDP2 as the CUDA backend uses it, over gloo on the CPU: the same weights, losses and steps as one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from makers import SettingsMaker
from processes import FAULTS, start
from torch.distributed.tensor import DTensor

from training.backends import World, make_backend
from training.backends.cuda import assign_sharded, shard
from training.config import Settings
from training.errors import UserError
from training.model import Llama

STEPS = 3


def batches(settings: Settings) -> torch.Tensor:
    shape = (STEPS, 4, settings.train.seq_length + 1)
    return torch.randint(settings.model.vocab_size, shape, generator=torch.Generator().manual_seed(5))


def train_sharded(settings: Settings, rank: int, store: Path) -> None:
    """What the CUDA backend does with several GPUs, on one of two CPU processes."""
    assert FAULTS  # the module that forked this process is the tests' own
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    backend = make_backend(settings, World())
    with torch.device("meta"):
        model = backend.bare_model()
    shard(model, "cpu", 2, torch.float32)
    model.to_empty(device="cpu")
    backend.fill(model, assign_sharded)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    losses = []
    for tokens_BS1 in batches(settings):
        mine = tokens_BS1[2 * rank : 2 * rank + 2]
        loss = model(mine[:, :-1], mine[:, 1:])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert isinstance(norm, DTensor)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss.detach_().div_(2))
        losses.append(loss.item())
    last = {name: p.full_tensor().detach() for name, p in model.named_parameters()}  # type: ignore[attr-defined]
    local = sum(p.to_local().numel() for p in model.parameters())  # type: ignore[attr-defined]
    torch.save((first, losses, last, local), store.with_suffix(f".{rank}"))
    dist.destroy_process_group()


@pytest.mark.parametrize("tied", [False, True])
def test_two_shards_train_as_one_process_does(tmp_path: Path, small_settings: SettingsMaker, tied: bool) -> None:
    settings = small_settings(tmp_path, model__tie_word_embeddings=tied)
    children = [start(train_sharded, settings, rank, tmp_path / "store") for rank in (0, 1)]
    for child in children:
        child.join(300)
        assert child.exitcode == 0

    model = make_backend(settings, World()).build_model()
    assert isinstance(model, Llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    expected = []
    for tokens_BS1 in batches(settings):
        loss = model(tokens_BS1[:, :-1], tokens_BS1[:, 1:])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())

    for rank in (0, 1):
        first, losses, last, local = torch.load(tmp_path / f"store.{rank}")
        assert first.keys() == before.keys()
        assert all(torch.equal(first[name], before[name]) for name in before)
        assert losses == pytest.approx(expected, abs=1e-5)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(last[name], parameter.detach(), atol=1e-4, rtol=1e-3)
        assert local < 0.6 * settings.model.num_parameters()  # each process holds its half and some padding


def test_norms_do_not_decay(tmp_path: Path, small_settings: SettingsMaker) -> None:
    settings = small_settings(tmp_path, train__weight_decay=0.5)
    backend = make_backend(settings, World())
    model = backend.build_model()
    decaying, still = backend.optimizer(model).param_groups
    assert decaying["weight_decay"] == 0.5
    assert still["weight_decay"] == 0.0
    norms = {id(p) for name, p in model.named_parameters() if "norm" in name}
    assert {id(p) for p in still["params"]} == norms
    assert len(decaying["params"]) + len(still["params"]) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["neuron", "cuda"])
def test_a_backend_that_is_not_here_is_refused(
    tmp_path: Path, small_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("training.backends.neuron.installed", lambda: False)
    with pytest.raises(UserError, match=f"run.backend: {name}"):
        make_backend(small_settings(tmp_path, run__backend=name), World())
