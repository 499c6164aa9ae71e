"""Checkpoints to Hugging Face folders and back: the stage `export`, and `--model.init_from`.

    python -m training export --config runs/tiny/settings.yaml      # -> runs/tiny/export/
    python -m training train --preset tiny --model.init_from runs/tiny/export

The folder holds `model.safetensors` (or shards of at most 5 GB and their index), `config.json` and the tokenizer
of the token store, and loads with `transformers.LlamaForCausalLM.from_pretrained`. Our parameters carry Hugging
Face's names and its layout of the rotary dimensions, so weights are copied as they are, bit for bit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from training import neuron_files
from training.checkpoint import latest, load, read_meta
from training.config import Model, Settings
from training.errors import UserError
from training.model import Llama
from training.progress import Progress

SHARD_SIZE = "5GB"  # of a safetensors file; the default of huggingface_hub
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"

# What of LlamaConfig decides what the weights mean, with its default for a file that does not say. The rest
# (max_position_embeddings, initializer_range) may differ between a model and the weights that it starts from.
_LLAMA_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "vocab_size": 32000,
    "rope_theta": 10_000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}


def export(settings: Settings, output: Path | None, progress: Progress) -> Path:
    """Write the newest whole checkpoint of `settings.run.dir` as a Hugging Face folder and return the folder.

    `output` is RUN.DIR/export by default; an earlier export there is replaced, once the new one is whole. The shape
    is the checkpoint's own. Memory: one shard, 5 GB at most. Raises `UserError` when there is no whole checkpoint,
    no tokenizer, a folder of something else in the way, or no room.
    """
    folder = output or settings.run.dir / "export"
    if folder.exists() and not (folder / CONFIG).exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder}: is not an export, expected a folder to create or an earlier export to replace")
    checkpoint = latest(settings.checkpoint_dir, progress.note, mend=False)
    if checkpoint is None:
        raise UserError(f"{settings.checkpoint_dir}: no whole checkpoint, expected a run to export: run `train` first")
    config = Model.model_validate(read_meta(checkpoint)["model"])
    tokenizer, manifest = settings.data_dir / "tokenizer", settings.data_dir / "manifest.json"
    for needed in (tokenizer / "tokenizer.json", manifest):
        if not needed.exists():
            raise UserError(f"{needed}: no such file, expected the run's token store: run `prepare` first")
    llama = _llama_config(config, _read_json(manifest))
    with _replacing(folder) as temporary:
        shutil.copytree(tokenizer, temporary, dirs_exist_ok=True)
        llama["torch_dtype"] = str(_write_weights(checkpoint, temporary, config, progress)).removeprefix("torch.")
        (temporary / CONFIG).write_text(json.dumps(llama, indent=2) + "\n", encoding="utf-8")
    return folder


def load_pretrained(
    model: Llama, path: Path, config: Model, assign: Callable[[torch.Tensor, torch.Tensor], object] | None = None
) -> None:
    """Fill the parameters of `model` from the Hugging Face folder `path`, in place, converting the dtype.

    `assign(parameter, values)` stores the whole tensor `values` in a parameter that may be a part of it. Raises
    `UserError` naming the first setting that differs between `config` and `path`'s config.json, with both values, or
    the file or tensor that is missing.
    """
    _check_config(path, config)
    wanted = dict(model.named_parameters())  # a tied head comes once, as the embedding
    files = _tensor_files(path)
    if config.tie_word_embeddings:
        files.pop("lm_head.weight", None)
    for name in wanted:
        if name not in files:
            raise UserError(f"{path}: no tensor {name}, expected the weights of a Llama of this shape")
    for name in files:
        if name not in wanted:
            raise UserError(f"{path}: unknown tensor {name}, expected the weights of a Llama without biases")
    with torch.no_grad():
        for name, value in _read_tensors(path, files):
            parameter = wanted[name]
            shape = list(model.parts.full_shape(parameter))
            if list(value.shape) != shape:
                shapes = f"{list(value.shape)}, expected {shape}"
                raise UserError(f"{path / files[name]}: tensor {name} has the shape {shapes}")
            assign(parameter, value.to(parameter.device)) if assign else parameter.copy_(value)


def _write_weights(checkpoint: Path, folder: Path, config: Model, progress: Progress) -> torch.dtype:
    """The model part of the checkpoint as safetensors, shard by shard: no model, no optimizer, no process group.

    Returns the dtype of the weights.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    tensors, read = neuron_files.weights(checkpoint, config) if neuron_files.wrote(checkpoint) else _dcp(checkpoint)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    split = split_torch_state_dict_into_shards(tensors, max_shard_size=SHARD_SIZE)
    for done, (filename, names) in enumerate(split.filename_to_tensors.items(), start=1):
        save_file(read(names), folder / filename, metadata={"format": "pt"})
        progress.update(done, len(split.filename_to_tensors))
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return next(iter(tensors.values())).dtype


def _dcp(checkpoint: Path) -> neuron_files.Weights:
    tensors: dict[str, torch.Tensor] = {}
    for key, entry in FileSystemReader(checkpoint).read_metadata().state_dict_metadata.items():
        section, _, name = key.partition(".")
        if section == "model" and isinstance(entry, TensorStorageMetadata):
            tensors[name] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def read(names: list[str]) -> dict[str, torch.Tensor]:
        shard = {name: torch.empty_like(tensors[name], device="cpu") for name in names}
        load(checkpoint, {"model": shard})
        return shard

    return tensors, read


def _llama_config(config: Model, manifest: dict[str, Any]) -> dict[str, Any]:
    """config.json, by the names of transformers' LlamaConfig (those of 4.x, which 5.x reads too)."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **config.model_dump(mode="json", exclude={"init_from"}),
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "torch_dtype": "float32",
        "bos_token_id": None,  # the store puts nothing before a document
        "eos_token_id": manifest["eod_id"],
    }


def _check_config(path: Path, config: Model) -> None:
    values = _read_json(path / CONFIG)
    if values.get("model_type") != "llama":
        raise UserError(f"{path / CONFIG}: model_type {values.get('model_type')!r}, expected 'llama'")
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}  # transformers 5.x, 4.x
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise UserError(
            f"{path / CONFIG}: rotary scaling {kind!r}, expected none: this model has plain rotary embeddings"
        )
    theirs = {**_LLAMA_DEFAULTS, **rope, **values}
    theirs["num_key_value_heads"] = theirs["num_key_value_heads"] or theirs["num_attention_heads"]
    for key in _LLAMA_DEFAULTS:
        if theirs[key] != getattr(config, key):
            raise UserError(f"model.{key}: {getattr(config, key)}, expected {theirs[key]} as in {path / CONFIG}")
    if values.get("head_dim") not in (None, config.head_dim):
        raise UserError(f"{path / CONFIG}: head_dim {values['head_dim']}, expected {config.head_dim}")


def _tensor_files(path: Path) -> dict[str, str]:
    """Tensor name -> file of `path` that holds it."""
    from safetensors import SafetensorError, safe_open

    if (path / INDEX).exists():
        files: dict[str, str] = _read_json(path / INDEX)["weight_map"]
        for file in sorted(set(files.values())):
            if not (path / file).exists():
                raise UserError(f"{path / file}: no such file, expected the shard that {INDEX} lists")
        return files
    single = path / "model.safetensors"
    if not single.exists():
        raise UserError(f"{path}: no model.safetensors and no {INDEX}, expected a Hugging Face folder with safetensors")
    try:
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{single}: cannot be read ({error}), expected safetensors") from None


def _read_tensors(path: Path, files: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor, file by file, one in memory at a time."""
    from safetensors import SafetensorError, safe_open

    for filename in sorted(set(files.values())):
        try:
            with safe_open(path / filename, framework="pt") as file:
                for name in (name for name, holder in files.items() if holder == filename):
                    yield name, file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path / filename}: cannot be read ({error}), expected safetensors") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values: Any = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}), expected a JSON file") from None
    except ValueError as error:
        raise UserError(f"{path}: is not JSON ({error})") from None
    if not isinstance(values, dict):
        raise UserError(f"{path}: is a {type(values).__name__}, expected a JSON object")
    return values


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder`, which takes its place at the end; removed when the body fails."""
    from safetensors import SafetensorError

    temporary, old = (folder.with_name(f".tmp-{kind}-{folder.name}") for kind in ("new", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for path in (*temporary.iterdir(), temporary):
            _sync(path)
        if folder.exists():
            folder.rename(old)
        temporary.rename(folder)
        _sync(folder.parent)
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"{folder}: cannot be written ({error}), expected a folder with room for the weights"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
