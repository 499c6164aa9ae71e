"""The numbers of a run: `metrics.jsonl`, TensorBoard, and the arithmetic of MFU.

`metrics.jsonl` is one JSON object a line, `type` being start, train, valid, checkpoint or failure; rank 0 appends to
it and everything that shows a run (the progress bar, the report) reads it. A run that goes on from step k drops what
an earlier attempt wrote beyond k, so that each step is there once, and keeps every start and failure: they are
the history of the attempts.

    writer = MetricsWriter(run_dir, resume_step=20)
    writer.write({"type": "train", "time": time.time(), "step": 21, "loss": 5.1})
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.config import Model
from training.errors import UserError

if TYPE_CHECKING:
    import torch

METRICS = "metrics.jsonl"
HISTORY = ("start", "failure", "note")  # about attempts, not steps: kept when a run goes back to a checkpoint

_LONGEST_LINE = 1 << 16  # bytes; a record is a few hundred

Record = dict[str, Any]

log = logging.getLogger(__name__)


def read_metrics(path: Path) -> list[Record]:
    """The records of a metrics file in order; [] when there is none.

    A last line that is not whole (its writer was killed, or is writing it now) is left out.
    Raises `UserError` when any other line is not a record.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return []
    lines = text.split("\n")
    records = []
    for number, line in enumerate(lines, 1):
        record = parse_record(line)
        if record is not None:
            records.append(record)
        elif line.strip() and any(rest.strip() for rest in lines[number:]):
            raise UserError(f"{path}, line {number}: {line[:60]!r}, expected a JSON object with a `type`")
    return records


def parse_record(line: str) -> Record | None:
    """One line of the file, or None when it is not a whole record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "type" in record else None


def append_record(path: Path, record: Record) -> None:
    """Add one record, such as a failure, from another process than the one that trains.

    A line that a killed writer left torn is cut off first. A living writer is not disturbed: each of its records is
    one append, so it has no torn line to lose and goes on behind this one.
    """
    with _named(path), path.open("a+b") as file:
        size = os.fstat(file.fileno()).st_size
        tail = os.pread(file.fileno(), _LONGEST_LINE, max(0, size - _LONGEST_LINE)) if size else b"\n"
        torn = len(tail) - (tail.rfind(b"\n") + 1)
        if torn:
            file.truncate(size - torn)
        file.write(_line(record))


class MetricsWriter:
    """Appends records to `run_dir/metrics.jsonl` and, if tensorboard is installed, scalars to `run_dir/tensorboard`.

    Each record is in the file when `write` returns (flushed, not fsynced: a power cut may cost some lines, and the
    step they belong to is written again on resuming). Raises `UserError` when the file cannot be written.
    """

    def __init__(self, run_dir: Path, resume_step: int) -> None:
        """`resume_step`: the step that the run goes on from, 0 for a new one. Later steps' records are dropped."""
        self.path = run_dir / METRICS
        run_dir.mkdir(parents=True, exist_ok=True)
        kept = [r for r in read_metrics(self.path) if r["type"] in HISTORY or r.get("step", 0) <= resume_step]
        temporary = self.path.with_name(self.path.name + ".tmp")
        with _named(self.path):
            with temporary.open("wb") as file:
                file.writelines(map(_line, kept))
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
            self._file = self.path.open("ab", buffering=0)
        self._tensorboard = _summary_writer(run_dir / "tensorboard", resume_step)

    def write(self, record: Record) -> None:
        """Append a record; numbers that JSON cannot hold (NaN, infinities) become null."""
        with _named(self.path):
            self._file.write(_line(record))
        if self._tensorboard is None or record["type"] not in ("train", "valid", "checkpoint"):
            return
        for key, value in record.items():
            if key not in ("type", "time", "step") and isinstance(value, (int, float)):
                self._tensorboard.add_scalar(f"{record['type']}/{key}", value, record["step"], record["time"])

    def close(self) -> None:
        """Close both outputs."""
        self._file.close()
        if self._tensorboard is not None:
            self._tensorboard.close()


def _line(record: Record) -> bytes:
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
    return json.dumps(finite, allow_nan=False, separators=(",", ":")).encode() + b"\n"


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Turns an OSError of writing `path` into one line for the user."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror}), expected room to append to") from error


def _summary_writer(folder: Path, resume_step: int) -> Any:
    """A TensorBoard writer that hides what an earlier attempt logged beyond `resume_step`; None without tensorboard."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        log.warning("tensorboard is not installed: %s is not written (metrics.jsonl is)", folder)
        return None
    return SummaryWriter(log_dir=str(folder), purge_step=resume_step + 1 if resume_step else None)  # type: ignore[no-untyped-call]


def matmul_parameters(config: Model) -> int:
    """N of `flops_per_token`: all parameters but an untied input embedding, which is looked up, not multiplied.

    A tied embedding counts, once, because it is multiplied as the output head.
    """
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return config.num_parameters() - looked_up


def flops_per_token(config: Model, seq_length: int) -> float:
    """Model FLOPs to train on one token, forward and backward: 6 N + 12 layers x hidden x seq_length.

    From PaLM (Chowdhery et al. 2022, arXiv:2204.02311), appendix B: 12 L H Q T with H Q = hidden_size. As there, the
    attention term is not halved for causality and recomputation does not count. N is `matmul_parameters`.
    """
    attention = 12 * config.num_hidden_layers * config.hidden_size * seq_length
    return 6.0 * matmul_parameters(config) + attention


def mfu(config: Model, seq_length: int, tokens_per_second: float, peak: float, workers: int = 1) -> float:
    """Model FLOPs utilisation, a share of 1: `tokens_per_second` of all workers, `peak` FLOP/s of each."""
    return flops_per_token(config, seq_length) * tokens_per_second / (peak * workers)


# Dense bf16 tensor-core peaks with fp32 accumulation, by the name that CUDA gives the device; the first match counts.
# NVIDIA's data sheets print the double for most, "with sparsity". Sources: data sheets of A100, H100, H200, L4, L40S,
# A10 and A10G (the latter by AWS's G5 page), Ada and Ampere (GA102) architecture white papers for the GeForce cards.
_PEAKS: tuple[tuple[str, str, float], ...] = (
    (r"H200 NVL", "H200 NVL", 836e12),
    (r"H200", "H200", 989e12),
    (r"H100 PCIe", "H100 PCIe", 756e12),
    (r"H100 NVL", "H100 NVL", 835e12),
    (r"H100", "H100 SXM", 989e12),
    (r"A100", "A100", 312e12),
    (r"A10G", "A10G", 70e12),
    (r"A10", "A10", 125e12),
    (r"L40S", "L40S", 362e12),
    (r"L40", "L40", 181e12),
    (r"L4", "L4", 121e12),
    (r"RTX 4090$", "RTX 4090", 165e12),
    (r"RTX 3090$", "RTX 3090", 71e12),
)


def peak_flops(device_name: str) -> tuple[float, str] | None:
    """Dense bf16 peak of one GPU in FLOP/s and what to call it, "H200 dense bf16, 989 TFLOP/s"; None if unknown.

    `device_name` is `torch.cuda.get_device_name()`. A slice of a GPU (MIG) is unknown: its peak is not the card's.
    """
    if "MIG" in device_name:
        return None
    for pattern, name, peak in _PEAKS:
        if re.search(rf"\b{pattern}(?!\w)", device_name):
            return peak, f"{name} dense bf16, {peak / 1e12:.0f} TFLOP/s"
    return None


def measured_peak(dtype: torch.dtype, seconds: float = 0.3) -> tuple[float, str]:
    """The CPU's matrix product rate in FLOP/s, and what to call it, "measured matmul, float32, 110 GFLOP/s".

    A CPU's data sheet does not give a peak that a share of its cores under this library could reach, so the best of
    a few `torch.mm` of square matrices with this process's threads stands in for it. Takes about `seconds`.
    """
    import torch

    best = 0.0
    deadline = time.perf_counter() + seconds
    for size in (256, 512, 1024):
        a_NN, b_NN = torch.randn(size, size).to(dtype), torch.randn(size, size).to(dtype)
        out_NN = torch.mm(a_NN, b_NN)
        for _ in range(10):
            if best and time.perf_counter() + 2 * size**3 / best > deadline:
                break
            started = time.perf_counter()
            torch.mm(a_NN, b_NN, out=out_NN)
            best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best, f"measured matmul, {str(dtype).removeprefix('torch.')}, {best / 1e9:.0f} GFLOP/s"
