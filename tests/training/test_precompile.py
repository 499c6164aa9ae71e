"""What `precompile` compiles is what training asks for; a second time it is found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from makers import SettingsMaker, TokenStoreMaker
from processes import launch, records_of, start

from training.backends import World, make_backend
from training.backends.cpu import CpuBackend
from training.compile_cache import use_cache
from training.config import Settings
from training.errors import UserError
from training.model import Llama
from training.precompile import precompile
from training.trainer import train

needs_compiler = pytest.mark.skipif(
    not make_backend(Settings(), World()).can_compile(), reason="no C++ compiler with Python.h on this machine"
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for the module: compiling takes C++ compilers half a minute."""
    return tmp_path_factory.mktemp("cache")


def compile_all(settings: Settings, tmp_path: Path) -> str:
    """What `precompile` says in a process of its own, where nothing is compiled yet."""
    child = start(_write_summary, settings, tmp_path / "summary")
    child.join(300)
    assert child.exitcode == 0
    return (tmp_path / "summary").read_text()


@needs_compiler
def test_training_finds_everything_compiled(
    tmp_path: Path, small_settings: SettingsMaker, token_store: TokenStoreMaker, cache: Path
) -> None:
    token_store(tmp_path / "data")
    shape = {"train__compile": True, "run__cache_dir": cache, "train__steps": 3}
    alone = small_settings(tmp_path, **shape, run__dir=tmp_path / "alone")
    both = small_settings(tmp_path, **shape, run__dir=tmp_path / "both", parallel__workers=2)
    assert compile_all(alone, tmp_path).startswith("compiled")
    for settings in (alone, both):
        assert compile_all(settings, tmp_path).startswith("found all")
        child = start(launch, settings)
        child.join(300)
        assert child.exitcode == 0
        (counts,) = records_of(settings, "compile")
        assert counts["misses"] == 0
        assert counts["hits"] >= 2  # the layer and the loss

    (manifest,) = cache.glob("*/manifest.json")
    lost = manifest.parent / next(iter(json.loads(manifest.read_text())["files"]))
    lost.unlink()
    assert compile_all(alone, tmp_path).startswith("compiled")


def test_a_run_may_be_forbidden_to_compile(
    tmp_path: Path, small_settings: SettingsMaker, token_store: TokenStoreMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the first step had compiled one graph: nothing is compiled here."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "NEURON_COMPILE_CACHE_URL"):
        monkeypatch.setenv(name, "")  # set by what is tested, and put back
    monkeypatch.setattr(Llama, "compile_layers", lambda self: None)
    monkeypatch.setattr(CpuBackend, "cache_counts", lambda self: {"hits": 2, "misses": 1})
    token_store(tmp_path / "data")
    settings = small_settings(tmp_path, train__compile=True, train__fail_on_compile=True)
    settings.run.dir.mkdir()
    with pytest.raises(UserError, match=r"train.fail_on_compile: 1 graphs were compiled by step 1, expected all"):
        train(settings, World())
    train(small_settings(tmp_path, train__compile=True), World())
    assert records_of(settings, "compile")[-1]["misses"] == 1


def _write_summary(settings: Settings, path: Path) -> None:
    path.write_text(precompile(settings))


def test_the_key_holds_what_compiled_code_depends_on(
    tmp_path: Path, small_settings: SettingsMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.setenv("TRITON_CACHE_DIR", "")

    def folder(**overrides: object) -> Path:
        settings = small_settings(tmp_path, **overrides)
        return use_cache(settings, make_backend(settings, World()).ingredients())

    same = folder()
    for key, value in {
        "model__hidden_size": 64,
        "train__micro_batch_size": 1,
        "train__seq_length": 8,
        "train__dtype": "bfloat16",
        "train__activation_checkpointing": "full",
        "train__loss_chunk": 7,
    }.items():
        assert folder(**{key: value}) != same, key
    for key, value in {"train__learning_rate": 1e-4, "model__num_hidden_layers": 9, "train__steps": 50}.items():
        assert folder(**{key: value}) == same, key
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert folder() != same


def test_without_compilation_it_says_so(tmp_path: Path, small_settings: SettingsMaker) -> None:
    assert precompile(small_settings(tmp_path)) == "nothing to compile: train.compile is false"
