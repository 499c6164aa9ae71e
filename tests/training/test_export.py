"""Export and import against transformers: the same logits, the same bits, and a clear line for each bad folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import training.export
from training.backends.cuda import assign_sharded
from training.checkpoint import Checkpointer, training_state
from training.config import Data, Model, Run, Settings, Train
from training.errors import UserError
from training.export import INDEX, export, load_pretrained
from training.model import Llama
from training.progress import Progress

LLAMA2 = Model(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
               vocab_size=96, max_position_embeddings=64)  # fmt: skip
LLAMA3 = LLAMA2.model_copy(update={"num_key_value_heads": 2, "rope_theta": 500_000.0})
TIED = LLAMA3.model_copy(update={"tie_word_embeddings": True})
SHAPES = pytest.mark.parametrize("config", [LLAMA2, LLAMA3, TIED], ids=["llama2", "llama3", "tied"])


def a_run(folder: Path, config: Model, steps: int = 2) -> tuple[Settings, Llama]:
    """A run folder with a tiny store and a checkpoint of a model trained for `steps`; and that model."""
    settings = Settings(model=config, run=Run(dir=folder), train=Train(seq_length=8), data=Data(tokenizer="any"))
    tokenizer = settings.data_dir / "tokenizer"
    tokenizer.mkdir(parents=True, exist_ok=True)
    (tokenizer / "tokenizer.json").write_text("{}")
    (settings.data_dir / "manifest.json").write_text(json.dumps({"eod_id": 7}))
    model = Llama(config)
    model.init_weights(seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(steps)
    for _ in range(steps):
        tokens = torch.randint(0, config.vocab_size, (2, 9), generator=generator)
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    checkpointer = Checkpointer(settings.checkpoint_dir, keep=2)
    checkpointer.save(steps, training_state(model, optimizer), {"model": config.model_dump(mode="json")})
    checkpointer.close()
    return settings, model


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    settings, _ = a_run(tmp_path / "run", LLAMA3)
    return export(settings, None, Progress("export"))


@SHAPES
def test_transformers_computes_the_same(config: Model, tmp_path: Path) -> None:
    settings, model = a_run(tmp_path, config)
    folder = export(settings, None, Progress("export"))
    assert folder == tmp_path / "export"
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).eval()
    assert theirs.config.eos_token_id == 7
    assert theirs.dtype == torch.float32
    tokens = torch.randint(0, config.vocab_size, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


@SHAPES
def test_import_gives_back_every_bit(config: Model, tmp_path: Path) -> None:
    settings, model = a_run(tmp_path, config)
    again = Llama(config)
    load_pretrained(again, export(settings, tmp_path / "elsewhere", Progress("export")), config)
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


@SHAPES
def test_imports_what_transformers_writes(config: Model, tmp_path: Path) -> None:
    """The other way round: a folder of `save_pretrained`, sharded, with the config.json of this transformers."""
    fields = config.model_dump(exclude={"init_from", "rope_theta"})
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields, rope_parameters=rope)).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="10KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    model = Llama(config)
    load_pretrained(model, tmp_path, config)
    tokens = torch.arange(40).view(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(tokens), theirs(tokens).logits, atol=1e-4, rtol=0)


def test_a_sharded_model_takes_its_part(exported: Path) -> None:
    """Rank 1 of 2 under FSDP2, over a process group that sends nothing: import must not need one that does."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    try:
        model = Llama(LLAMA3)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        load_pretrained(model, exported, LLAMA3, assign_sharded)
        tensors = load_file(exported / "model.safetensors")
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.to_local(), tensors[name].chunk(2)[1]), name
    finally:
        dist.destroy_process_group()


def test_shards_of_a_large_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, model = a_run(tmp_path, LLAMA2)
    monkeypatch.setattr(training.export, "SHARD_SIZE", "10KB")
    folder = export(settings, None, Progress("export"))
    assert not (folder / "model.safetensors").exists()
    assert all(path.stat().st_size < 16_000 for path in folder.glob("*.safetensors"))
    theirs = transformers.LlamaForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, theirs[name]) for name, value in model.state_dict().items())
    again = Llama(LLAMA2)
    load_pretrained(again, folder, LLAMA2)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_second_export_replaces_the_first(tmp_path: Path) -> None:
    settings, _ = a_run(tmp_path, LLAMA2, steps=1)
    export(settings, None, Progress("export"))
    _, model = a_run(tmp_path, LLAMA2, steps=2)
    folder = export(settings, None, Progress("export"))
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], model.lm_head.weight)
    assert [path.name for path in tmp_path.glob(".tmp*")] == []


def test_a_failed_export_leaves_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = a_run(tmp_path, LLAMA2)
    folder = export(settings, None, Progress("export"))
    before = (folder / "model.safetensors").read_bytes()

    def no_room(path: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(training.export, "_sync", no_room)
    with pytest.raises(UserError, match=r"export: cannot be written .*No space left on device"):
        export(settings, None, Progress("export"))
    assert (folder / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.glob(".tmp*")] == []


def test_export_falls_back_to_a_whole_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, model = a_run(tmp_path, LLAMA2, steps=1)
    a_run(tmp_path, LLAMA2, steps=2)
    with (settings.checkpoint_dir / "step-00000002" / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)
    folder = export(settings, None, Progress("export"))
    assert torch.equal(load_file(folder / "model.safetensors")["lm_head.weight"], model.lm_head.weight)
    assert "__0_0.distcp is truncated" in capsys.readouterr().out
    assert (settings.checkpoint_dir / "step-00000002").exists(), "a reader must not touch the run's checkpoints"


def test_export_says_what_is_missing(tmp_path: Path) -> None:
    settings, _ = a_run(tmp_path, LLAMA2)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="is not an export"):
        export(settings, tmp_path, Progress("export"))
    (settings.data_dir / "tokenizer" / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json: no such file.*run `prepare` first"):
        export(settings, None, Progress("export"))
    shutil.rmtree(settings.checkpoint_dir)
    with pytest.raises(UserError, match=r"no whole checkpoint.*run `train` first"):
        export(settings, None, Progress("export"))
    assert not (tmp_path / "export").exists()


def edit_config(**values: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **values}))

    return edit


def edit_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors")

    return edit


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (edit_config(hidden_size=64), r"^model\.hidden_size: 32, expected 64 as in .*config\.json$"),
        (edit_config(num_key_value_heads=4), r"^model\.num_key_value_heads: 2, expected 4 as in"),
        (edit_config(rope_theta=10_000.0), r"^model\.rope_theta: 500000\.0, expected 10000\.0 as in"),
        (edit_config(tie_word_embeddings=True), r"^model\.tie_word_embeddings: False, expected True"),
        (edit_config(head_dim=16), r"config\.json: head_dim 16, expected 8"),
        (edit_config(model_type="gpt2"), r"config\.json: model_type 'gpt2', expected 'llama'"),
        (edit_config(rope_scaling={"rope_type": "llama3"}), r"config\.json: rotary scaling 'llama3', expected none"),
        (lambda folder: (folder / "config.json").unlink(), r"config\.json: cannot be read \(No such file"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: is not JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), r"config\.json: is a list, expected"),
        (lambda folder: (folder / "model.safetensors").unlink(), r"no model\.safetensors and no model\."),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"12"), r"model\.safetensors: cannot be read"),
        (
            lambda folder: (folder / INDEX).write_text('{"weight_map": {"a": "b.safetensors"}}'),
            r"b\.safetensors: no such file, expected the shard",
        ),
        (edit_tensors(lambda t: t.pop("model.norm.weight")), r"no tensor model\.norm\.weight, expected"),
        (edit_tensors(lambda t: t.update(b=torch.ones(1))), r"unknown tensor b, expected"),
        (
            edit_tensors(lambda t: t.update({"model.norm.weight": torch.ones(31)})),
            r"tensor model\.norm\.weight has the shape \[31\], expected \[32\]",
        ),
    ],
)  # fmt: skip
def test_a_bad_folder_is_one_clear_line(damage: Callable[[Path], Any], message: str, exported: Path) -> None:
    damage(exported)
    with pytest.raises(UserError, match=message) as error:
        load_pretrained(Llama(LLAMA3), exported, LLAMA3)
    assert "\n" not in str(error.value)
