"""The metrics file under kills and resumes, TensorBoard beside it, and MFU's arithmetic."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from training.config import Model
from training.errors import UserError
from training.metrics import (
    MetricsWriter,
    append_record,
    flops_per_token,
    matmul_parameters,
    measured_peak,
    mfu,
    peak_flops,
    read_metrics,
)

SMALL = Model(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=300,
)


@pytest.fixture
def no_tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with torch alone (and faster: tensorboard takes seconds to import)."""
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)


def train(step: int, loss: float = 2.0) -> dict[str, Any]:
    return {"type": "train", "time": 100.0 + step, "step": step, "tokens": step * 10, "loss": loss, "mfu": None}


def test_a_resume_drops_later_steps_and_keeps_the_history(tmp_path: Path, no_tensorboard: None) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.write({"type": "start", "time": 1.0, "step": 0})
    for step in range(1, 6):
        writer.write(train(step))
    writer.write({"type": "valid", "time": 2.0, "step": 4, "loss": 3.0})
    writer.close()
    append_record(tmp_path / "metrics.jsonl", {"type": "failure", "time": 3.0, "rank": 1, "step": 5, "message": "gone"})

    writer = MetricsWriter(tmp_path, 3)
    writer.write({"type": "start", "time": 4.0, "step": 3})
    writer.write(train(4, loss=1.5))
    writer.close()
    seen = [(r["type"], r["step"]) for r in read_metrics(tmp_path / "metrics.jsonl")]
    assert seen == [("start", 0), ("train", 1), ("train", 2), ("train", 3), ("failure", 5), ("start", 3), ("train", 4)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_each_record_is_in_the_file_when_write_returns(tmp_path: Path, no_tensorboard: None) -> None:
    writer = MetricsWriter(tmp_path, 0)
    for step in range(1, 4):
        writer.write(train(step))
        assert read_metrics(writer.path)[-1]["step"] == step
    writer.close()


@given(data=st.data())
def test_a_file_cut_anywhere_is_read_up_to_the_cut(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("cut") / "metrics.jsonl"
    lines = [json.dumps(train(step)).encode() for step in range(5)]
    cut = data.draw(st.integers(0, sum(len(line) + 1 for line in lines)))
    path.write_bytes(b"".join(line + b"\n" for line in lines)[:cut])
    ends = [sum(len(line) + 1 for line in lines[: i + 1]) - 1 for i in range(5)]
    whole = sum(end <= cut for end in ends)
    assert [r["step"] for r in read_metrics(path)] == list(range(whole))
    append_record(path, {"type": "failure", "step": 9})
    assert [r["step"] for r in read_metrics(path)][-1] == 9


def test_a_torn_line_is_healed_by_the_next_writer(tmp_path: Path, no_tensorboard: None) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train(1)) + "\n" + '{"type":"train","st')
    writer = MetricsWriter(tmp_path, 1)
    writer.write(train(2))
    writer.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_a_bad_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train(1)) + "\nhello\n" + json.dumps(train(2)) + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl, line 2: 'hello', expected"):
        read_metrics(path)


def test_no_file_is_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_what_json_cannot_hold_becomes_null(tmp_path: Path, no_tensorboard: None) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.write({**train(1, loss=float("nan")), "grad_norm": float("inf")})
    writer.close()
    text = (tmp_path / "metrics.jsonl").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    assert read_metrics(tmp_path / "metrics.jsonl")[0]["grad_norm"] is None


def test_a_failed_rewrite_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_tensorboard: None
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(train(1)) + "\n" + json.dumps(train(2)) + "\n")
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"metrics\.jsonl: cannot be written \(No space left on device\)"):
        MetricsWriter(tmp_path, 1)
    assert path.read_bytes() == before


def test_a_full_disk_is_one_line() -> None:
    with pytest.raises(UserError, match=r"/dev/full: cannot be written \(No space left"):
        append_record(Path("/dev/full"), train(1))


def test_without_tensorboard_the_file_is_still_written(
    tmp_path: Path, no_tensorboard: None, caplog: pytest.LogCaptureFixture
) -> None:
    writer = MetricsWriter(tmp_path, 0)
    writer.write(train(1))
    writer.close()
    assert "tensorboard is not installed" in caplog.text
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for resume, loss in ((0, 2.0), (2, 1.0)):
        writer = MetricsWriter(tmp_path, resume)
        for step in range(resume + 1, 5):
            writer.write(train(step, loss))
        writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train/loss", "train/tokens"]
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 2.0), (2, 2.0), (3, 1.0), (4, 1.0)]


@pytest.mark.parametrize("tied", [False, True])
def test_flops_are_those_of_the_matrices(tied: bool) -> None:
    """Count the products layer by layer: two FLOPs a weight and token forward, twice that backward."""
    config = SMALL.model_copy(update={"tie_word_embeddings": tied})
    seq, head = 32, 16
    projections = 64 * head * (4 + 2 + 2) + 4 * head * 64
    matrices = 3 * (projections + 3 * 64 * 96) + 300 * 64
    scores = 3 * 2 * (2 * seq * 64)  # q·k and weights·v over seq keys, in each layer
    assert matmul_parameters(config) - matrices == 64 * 7  # the norms, which the formula counts too
    assert flops_per_token(config, seq) == pytest.approx(3 * (2 * matrices + scores), rel=0.01)


def test_mfu_is_a_share_of_the_peak_of_all_workers() -> None:
    """A model that needs half the peak's FLOPs is at 50 %, and workers share the load."""
    need = flops_per_token(SMALL, 32)
    assert mfu(SMALL, 32, tokens_per_second=1000.0, peak=2000 * need) == pytest.approx(0.5)
    assert mfu(SMALL, 32, tokens_per_second=1000.0, peak=2000 * need, workers=4) == pytest.approx(0.125)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA A10", 125e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
    ],
)
def test_known_gpus(device: str, peak: float) -> None:
    found = peak_flops(device)
    assert found is not None
    assert found[0] == peak
    assert f"dense bf16, {peak / 1e12:.0f} TFLOP/s" in found[1]


@pytest.mark.parametrize(
    "device",
    ["NVIDIA GeForce RTX 4090 Laptop GPU", "Tesla T4", "NVIDIA A1000", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", ""],
)
def test_unknown_gpus_have_no_peak(device: str) -> None:
    assert peak_flops(device) is None


def test_the_cpu_peak_is_what_it_multiplies() -> None:
    peak, name = measured_peak(torch.float32, seconds=0.05)
    assert peak > 1e8
    assert name.startswith("measured matmul, float32, ")
    assert name.endswith(" GFLOP/s")
