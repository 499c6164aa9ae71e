"""What of the Neuron backend needs no NxD: its cache, its compiler's command, its checkpoints' files, its refusals."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from makers import SettingsMaker

from training import neuron_files
from training.backends import neuron
from training.config import Settings
from training.errors import RunFailed, UserError
from training.export import _write_weights
from training.model import Llama
from training.precompile import asks_for_graphs, precompile
from training.progress import Progress

# Stands for the SDK's command: "compiles" what was traced into the cache, but for what FAILS names.
COMPILER = f"""#!{sys.executable}
import os, sys
from pathlib import Path
assert sys.argv[1:3] == ["--command", "compile"], sys.argv
for graph in Path(os.environ["NEURON_COMPILE_CACHE_URL"]).glob("**/*.hlo_module.pb"):
    if graph.parent.name != os.environ.get("FAILS"):
        (graph.parent / "model.neff").write_bytes(b"neff")
print("a line of its log", file=sys.stderr)
sys.exit("FAILS" in os.environ)
"""


@pytest.fixture
def on_neuron(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_settings: SettingsMaker) -> Settings:
    """Settings of a run on a machine that seems to be in the Neuron image."""
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "neuron_parallel_compile"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(neuron, "installed", lambda: True)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NEURON_COMPILE_CACHE_URL"):
        monkeypatch.setenv(name, "")  # set by what is tested, and put back
    return small_settings(tmp_path, run__backend="neuron", train__dtype="bfloat16")


def trace(name: str) -> None:
    """A graph in the cache that is in use, as tracing leaves it."""
    folder = Path(os.environ["NEURON_COMPILE_CACHE_URL"]) / "neuronxcc-2.23" / name
    folder.mkdir(parents=True)
    (folder / "model.hlo_module.pb").write_bytes(b"graph")


def test_traced_graphs_are_compiled_once(on_neuron: Settings) -> None:
    assert asks_for_graphs(on_neuron)
    for name in ("MODULE_1", "MODULE_2"):
        trace(name)
    assert precompile(on_neuron).startswith("compiled 2 graphs into ")
    assert not asks_for_graphs(on_neuron)
    assert precompile(on_neuron).startswith("found all 2 graphs in ")
    cache = Path(os.environ["NEURON_COMPILE_CACHE_URL"])
    assert neuron.compiled_graphs(cache) == {"MODULE_1", "MODULE_2"}
    next(cache.glob("**/model.neff")).unlink()
    assert asks_for_graphs(on_neuron)


def test_a_graph_that_does_not_compile_is_an_error(on_neuron: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    assert asks_for_graphs(on_neuron)
    for name in ("MODULE_1", "MODULE_2"):
        trace(name)
    monkeypatch.setenv("FAILS", "MODULE_2")
    with pytest.raises(RunFailed, match=r"1 of 2 graphs compiled .* with 1: a line of its log\), expected all"):
        precompile(on_neuron)
    assert asks_for_graphs(on_neuron)
    monkeypatch.delenv("FAILS")
    assert precompile(on_neuron).startswith("compiled 2 graphs")


def test_nothing_traced_is_an_error(on_neuron: Settings) -> None:
    with pytest.raises(RunFailed, match="0 of 0 graphs compiled"):
        precompile(on_neuron)


def test_the_cache_is_another_for_another_graph(on_neuron: Settings) -> None:
    def changed(section: str, **values: object) -> dict[str, object]:
        part = getattr(on_neuron, section).model_copy(update=values)
        return neuron.ingredients(on_neuron.model_copy(update={section: part}))

    same = neuron.ingredients(on_neuron)
    for section, key, value in (
        ("train", "learning_rate", 0.1),
        ("train", "steps", 7),
        ("model", "init_from", Path("a")),
    ):
        assert changed(section, **{key: value}) == same, key
    for section, key, value in (
        ("train", "seq_length", 8),
        ("train", "master_weights", False),
        ("train", "weight_decay", 0.9),
        ("model", "num_hidden_layers", 3),
        ("parallel", "workers", 4),
        ("train", "dtype", "float32"),
    ):
        assert changed(section, **{key: value}) != same, key


@pytest.mark.parametrize("tied", [False, True])
def test_parts_are_joined_as_they_were_cut(tmp_path: Path, small_settings: SettingsMaker, tied: bool) -> None:
    config = small_settings(tmp_path, model__tie_word_embeddings=tied).model
    model = Llama(config)
    model.init_weights(3)
    whole = {name: value.bfloat16() for name, value in model.state_dict().items()}
    folder = tmp_path / "step-00000001" / "nxd" / "model"
    folder.mkdir(parents=True)
    for rank in (0, 1):
        parts = {}
        for name, value in whole.items():
            across = name.endswith(("o_proj.weight", "down_proj.weight"))
            parts[name] = value if value.ndim < 2 else value.chunk(2, dim=1 if across else 0)[rank].clone()
        torch.save(parts, folder / f"dp_rank_00_tp_rank_{rank:02d}_pp_rank_00.pt")
    checkpoint = folder.parents[1]
    assert neuron_files.wrote(checkpoint)
    tensors, read = neuron_files.weights(checkpoint, config)
    assert {name: value.shape for name, value in tensors.items()} == {name: v.shape for name, v in whole.items()}
    joined = read(list(tensors))
    assert all(torch.equal(joined[name], value) for name, value in whole.items())
    assert _write_weights(checkpoint, tmp_path, config, Progress("export")) == torch.bfloat16

    (folder / "dp_rank_00_tp_rank_01_pp_rank_00.pt").unlink()
    with pytest.raises(UserError, match=r"1 parts \[256, 32\] of .*, expected a whole \[512, 32\]"):
        neuron_files.weights(checkpoint, config)
