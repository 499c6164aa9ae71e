"""The stage `report`: what a run did, as one page and one picture.

    write_report(Path("runs/tiny"))  ->  runs/tiny/report.html, runs/tiny/loss.png

Reads `metrics.jsonl`, and `settings.yaml`, `stages.json` and `manifest.json` as far as they are there. The page holds
its pictures and style itself, so it can be mailed, and follows the reader's light or dark setting.
"""

from __future__ import annotations

import base64
import json
import math
import os
import statistics
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from training.config import Model, parse_settings
from training.errors import UserError
from training.metrics import METRICS, Record, matmul_parameters, read_metrics
from training.progress import amount, duration

REPORT, LOSS_PICTURE = "report.html", "loss.png"
TEMPLATES = Path(__file__).parent / "templates"
LAST_STEPS = 20  # the final train loss is their mean: one step's loss is mostly its batch


@dataclass
class Attempt:
    """One start of the trainer and how it ended."""

    start: Record
    end_time: float
    last_step: int
    failure: Record | None = None

    @property
    def seconds(self) -> float:
        """From the start to the last sign of life."""
        return max(0.0, self.end_time - float(self.start.get("time", self.end_time)))


@dataclass
class RunRecord:
    """Everything that a run folder says about its run; parts that are not there are empty."""

    folder: Path
    settings: dict[str, Any] = field(default_factory=dict)
    stages: dict[str, Any] = field(default_factory=dict)
    manifest: dict[str, Any] = field(default_factory=dict)
    records: list[Record] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> RunRecord:
        """Raises `UserError` when no step has been trained yet or a file is not what its name says."""
        run = cls(
            folder,
            _mapping(folder / "settings.yaml"),
            _mapping(folder / "stages.json"),
            _mapping(folder / "manifest.json"),
            read_metrics(folder / METRICS),
        )
        if not run.train:
            raise UserError(f"{folder / METRICS}: no step of training in it, expected a run that `train` has begun")
        return run

    def of(self, kind: str) -> list[Record]:
        """Records of one type, in order."""
        return [record for record in self.records if record["type"] == kind]

    @cached_property
    def train(self) -> list[Record]:
        """One record a step."""
        return self.of("train")

    @cached_property
    def valid(self) -> list[Record]:
        """One record an evaluation."""
        return self.of("valid")

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Each start with what followed it. Steps that a later attempt did again are counted there."""
        attempts: list[Attempt] = []
        for record in self.records:
            if record["type"] == "start":
                attempts.append(Attempt(record, record.get("time", 0.0), record.get("step", 0)))
            elif attempts:
                attempts[-1].end_time = max(attempts[-1].end_time, record.get("time", 0.0))
                attempts[-1].last_step = max(attempts[-1].last_step, record.get("step", 0))
                if record["type"] == "failure":
                    attempts[-1].failure = record
        return attempts

    @property
    def start(self) -> Record:
        """The last attempt's start, which names device, dtype, workers, parameters and peak; {} if unknown."""
        return self.attempts[-1].start if self.attempts else {}

    @property
    def entropy(self) -> float | None:
        """Unigram entropy of the training tokens in nats."""
        value = self.manifest.get("unigram_entropy")
        return float(value) if isinstance(value, (int, float)) else None

    @property
    def train_loss(self) -> float | None:
        """Mean of the last `LAST_STEPS` steps."""
        losses = _finite(self.train[-LAST_STEPS:], "loss")
        return statistics.fmean(losses) if losses else None

    @property
    def valid_loss(self) -> float | None:
        """The last evaluation's."""
        losses = _finite(self.valid, "loss")
        return losses[-1] if losses else None

    def median(self, key: str) -> float | None:
        """Median of a number over the steps: a first step that compiles does not move it."""
        values = _finite(self.train, key)
        return statistics.median(values) if values else None

    @property
    def resumes(self) -> list[float]:
        """Tokens trained on at each start that went on from a checkpoint."""
        tokens = {record.get("step"): record.get("tokens") for record in self.train}
        places = (tokens.get(attempt.start.get("step")) for attempt in self.attempts if attempt.start.get("step"))
        return [float(place) for place in places if place is not None]


def summary(run_dir: Path) -> list[tuple[str, str]]:
    """Name and value of the run's headline numbers, for the terminal's table at the end."""
    return [(name, f"{value} {detail}".strip()) for name, value, detail in headlines(RunRecord.read(run_dir))]


def headlines(run: RunRecord) -> list[tuple[str, str, str]]:
    """Name, value and what qualifies it."""
    rows: list[tuple[str, str, str]] = []
    last = run.train[-1]
    if run.valid_loss is not None:
        detail = "nats per token"
        if run.entropy is not None:
            margin = run.entropy - run.valid_loss
            side = "below" if margin >= 0 else "above"
            detail = f"nats, {abs(margin):.2f} {side} the unigram entropy ({run.entropy:.2f})"
        rows.append(("validation loss", f"{run.valid_loss:.3f}", detail))
    if run.train_loss is not None:
        count = min(LAST_STEPS, len(run.train))
        rows.append(("train loss", f"{run.train_loss:.3f}", f"nats, mean of the last {count} steps"))
    tokens = last.get("tokens")
    rows.append(("trained on", amount(tokens) if tokens is not None else "?", f"tokens in {last['step']:,} steps"))
    speed = run.median("tokens_per_second")
    if speed is not None:
        workers = run.start.get("workers", 1)
        by = f"{workers} worker" + ("s" if workers != 1 else "")
        rows.append(("throughput", amount(speed), f"tokens/s, median, {by}"))
    utilisation = run.median("mfu")
    if utilisation is not None:
        rows.append(("MFU", f"{utilisation:.1%}", f"of {run.start.get('peak_name') or 'the peak'}, median"))
    if run.attempts:
        stages = [stage["seconds"] for stage in run.stages.values() if stage.get("seconds") is not None]
        parts = [f"of {duration(sum(stages))} for all stages"] if stages else []
        parts += [f"in {len(run.attempts)} attempts"] if len(run.attempts) > 1 else []
        rows.append(("training time", duration(sum(a.seconds for a in run.attempts)), ", ".join(parts)))
    return rows


def write_report(run_dir: Path) -> Path:
    """Write `loss.png` and `report.html` into the run folder; returns the page's path.

    Raises `UserError` when there is nothing to report yet, or a file of the run is not what its name says.
    """
    from jinja2 import Environment, FileSystemLoader

    from training.plots import loss_figure, throughput_figure

    run = RunRecord.read(run_dir)
    losses = [loss_figure(run.train, run.valid, run.entropy, run.resumes, dark) for dark in (False, True)]
    speeds = [throughput_figure(run.train, run.resumes, dark) for dark in (False, True)]
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(amount=amount, duration=duration, date=_date, plain=_plain_setting)
    page = environment.get_template(f"{REPORT}.j2").render(
        run=run,
        name=run_dir.resolve().name,
        headlines=headlines(run),
        loss_pictures=[_inline(png) for png in losses],
        speed_pictures=[_inline(png) for png in speeds],
        facts=_throughput_facts(run),
        formula=_formula(run),
        defaults=_defaults(run),
        data=_data_rows(run.manifest),
        now=time.time(),
    )
    _write_whole(run_dir / LOSS_PICTURE, losses[0])
    _write_whole(run_dir / REPORT, page.encode())
    return run_dir / REPORT


def _throughput_facts(run: RunRecord) -> list[tuple[str, str]]:
    steps = _finite(run.train, "step_seconds")
    waits = _finite(run.train, "data_wait_seconds")
    stalls = _finite(run.of("checkpoint"), "stall_seconds")
    facts = []
    if steps:
        facts.append(("step", f"{duration(statistics.median(steps))} median, {duration(max(steps))} longest"))
    if steps and waits:
        facts.append(("waiting for data", f"{sum(waits) / max(sum(steps), 1e-9):.2%} of the steps' time"))
    if stalls:
        facts.append(("checkpoints", f"{len(stalls)}, the trainer stood still {duration(sum(stalls))} in all"))
    return facts


def _formula(run: RunRecord) -> str:
    """How MFU was reckoned, with this run's numbers."""
    text = "MFU = (6 N + 12 · layers · hidden · sequence) · tokens/s ÷ (workers · peak), PaLM appendix B"
    if "model" in run.settings:
        n = matmul_parameters(Model.model_validate(run.settings["model"]))
        text += f"; N = {amount(n)}, the parameters that take part in matrix products"
    if run.start.get("peak_name"):
        text += f"; peak: {run.start['peak_name']}"
    return text + "."


def _defaults(run: RunRecord) -> dict[str, dict[str, Any]]:
    """What the settings would be had nothing but the run's folder been given."""
    folder = run.settings.get("run", {}).get("dir", str(run.folder))
    return parse_settings({"run": {"dir": folder}}).resolved()


def _plain_setting(value: object) -> str:
    """As it is written in YAML or on the command line."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _data_rows(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    """The manifest's plain values, and those of each split, in its own order."""
    rows = []
    for key, value in manifest.items():
        if isinstance(value, dict) and key == "splits":
            for split, part in value.items():
                rows += [(f"{split} {name}", _shown(v)) for name, v in part.items() if _plain(v)]
                rows.append((f"{split} shards", _shown(len(part.get("shards", [])))))
        elif _plain(value):
            rows.append((key.replace("_", " "), _shown(value)))
    return rows


def _plain(value: object) -> bool:
    return isinstance(value, (str, int, float))


def _shown(value: object) -> str:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _finite(records: list[Record], key: str) -> list[float]:
    values = (record.get(key) for record in records)
    return [float(value) for value in values if value is not None and math.isfinite(value)]


def _mapping(path: Path) -> dict[str, Any]:
    """A YAML or JSON file of named values; {} when it is not there."""
    try:
        text = path.read_text(encoding="utf-8")
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        return {}
    except (ValueError, yaml.YAMLError, OSError):
        value = None
    if not isinstance(value, dict):
        raise UserError(f"{path}: cannot be read, expected the {path.suffix[1:].upper()} file that a stage writes")
    return value


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _inline(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _write_whole(path: Path, data: bytes) -> None:
    """Write so that `path` is absent, what it was, or whole."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: cannot be written ({error.strerror}), expected room for the report") from error
