"""The benchmarks run, their rows are well formed, and the table leaves nothing out."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import gpu, run
from training.config import load_settings

FOLDER = Path(run.__file__).parent


def test_every_module_is_in_the_table_and_every_entry_is_a_module() -> None:
    modules = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "run"}
    assert modules == set(run.BENCHMARKS)
    for name in modules:
        assert callable(importlib.import_module(f"benchmarks.{name}").run)


def test_the_gpu_benchmark_compares_on_whatever_device_there_is() -> None:
    small = {
        "model.hidden_size": "64",
        "model.intermediate_size": "128",
        "model.num_hidden_layers": "2",
        "model.num_attention_heads": "2",
        "model.num_key_value_heads": "2",
        "model.vocab_size": "300",
        "train.seq_length": "32",
        "train.micro_batch_size": "2",
        "train.compile": "false",
        "run.backend": "cpu",
    }
    rows = gpu.compare(load_settings("llama-1b", overrides=small), blocks=2, steps=1)
    assert rows[0]["ours"] > 0
    assert rows[0]["ratio"] > 0
    assert "n=2" in rows[0]["spread"]
    assert rows[-1]["name"].startswith("MFU")


def test_without_a_gpu_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (row,) = gpu.run(quick=True)
    assert row["name"].startswith("skipped")
    assert row["ok"] is None


def test_a_missed_goal_and_a_failed_benchmark_are_in_the_page() -> None:
    rows = [
        {
            "name": "a | b",
            "ours": 1.5,
            "peer": 3,
            "unit": "s",
            "ratio": 0.5,
            "spread": "0.4 to 0.6",
            "goal": ">= 1",
            "ok": False,
        },
        {"name": "c", "ours": 2.0, "peer": None, "unit": "s", "ratio": None, "spread": "", "goal": "", "ok": None},
    ]
    failed = [{"name": "startup: failed with exit code 1", "goal": "to run", "ok": False}]
    text = run.page(
        {"loader": {"rows": rows, "measured": "some day"}, "startup": {"rows": failed, "measured": "another day"}}
    )
    assert "| a \\| b | 1.5 s | 3 s | 0.5 | 0.4 to 0.6 | >= 1 | **missed** |" in text
    assert "| c | 2 s |  |  |  |  |  |" in text
    assert "| startup: failed with exit code 1 |  |  |  |  | to run | **missed** |" in text
    assert text.index("some day") < text.index("another day")
    assert text.count("Not measured yet.") == len(run.BENCHMARKS) - 2


def test_the_committed_page_is_rendered_from_the_committed_figures() -> None:
    assert run.RESULTS.read_text(encoding="utf-8") == run.page(json.loads(run.DATA.read_text()))
