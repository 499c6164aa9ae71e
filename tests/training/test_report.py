"""The report of a run: right numbers, nothing from outside, nothing unescaped, whatever files are missing."""

from __future__ import annotations

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from training.config import parse_settings
from training.errors import UserError
from training.plots import loss_figure, smooth
from training.report import RunRecord, summary, write_report


def start(step: int, when: float) -> dict[str, Any]:
    return {
        "type": "start",
        "time": when,
        "step": step,
        "backend": "cpu",
        "device": "AMD <EPYC>",
        "dtype": "float32",
        "workers": 2,
        "parameters": 7_000_000,
        "peak_flops": 1e11,
        "peak_name": "measured matmul, float32, 100 GFLOP/s",
        "versions": {"torch": "2.9.0"},
    }


def train(step: int, when: float, **changes: Any) -> dict[str, Any]:
    record = {"type": "train", "time": when, "step": step, "tokens": step * 1000, "loss": 8 - step / 10, "mfu": 0.4}
    return record | {"tokens_per_second": 900.0 + step, "step_seconds": 1.0, "data_wait_seconds": 0.01} | changes


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run of 30 steps in two attempts, with a failure between them, all its files, and hostile text in each."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    records = [
        start(0, 1000.0),
        *(train(step, 1000.0 + step) for step in range(1, 21)),
        {"type": "checkpoint", "time": 1020.0, "step": 20, "stall_seconds": 0.25},
        {"type": "valid", "time": 1020.0, "step": 20, "tokens": 20_000, "loss": 6.25},
        {"type": "failure", "time": 1027.0, "rank": 1, "step": 25, "message": "<script>alert(1)</script>"},
        start(20, 2000.0),
        *(train(step, 1980.0 + step) for step in range(21, 31)),
        {"type": "valid", "time": 2010.5, "step": 30, "tokens": 30_000, "loss": 5.5},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = parse_settings({"run": {"dir": str(folder)}, "data": {"source": "text:<b>&'\"*.txt"}})
    (folder / "settings.yaml").write_text(yaml.safe_dump(settings.resolved()))
    stages = {
        "prepare": {"status": "done", "started": 1, "seconds": 60.0, "summary": "<i>many</i> documents"},
        "train": {"status": "failed", "started": 2, "seconds": 65.0, "summary": None},
        "report": {"status": "running", "started": 3},
    }
    (folder / "stages.json").write_text(json.dumps(stages))
    manifest = {
        "source": "<u>pydocs</u>",
        "unigram_entropy": 7.0,
        "splits": {"train": {"tokens": 99_999, "shards": [{}, {}]}},
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


class Page(HTMLParser):
    """Tags and addresses of a page, and whether each tag is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "srcset", "href")]
        if tag not in ("meta", "img", "source"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_headline_numbers(run_dir: Path) -> None:
    rows = dict(summary(run_dir))
    assert rows["validation loss"] == "5.500 nats, 1.50 below the unigram entropy (7.00)"
    assert rows["train loss"] == "5.950 nats, mean of the last 20 steps"
    assert rows["trained on"] == "30,000 tokens in 30 steps"
    assert rows["throughput"] == "915.5 tokens/s, median, 2 workers"
    assert rows["MFU"] == "40.0% of measured matmul, float32, 100 GFLOP/s, median"
    assert rows["training time"] == "38 s of 2 min 05 s for all stages, in 2 attempts"


def test_attempts_and_resumes(run_dir: Path) -> None:
    run = RunRecord.read(run_dir)
    first, second = run.attempts
    assert (first.seconds, first.last_step, second.seconds, second.last_step) == (27.0, 25, 10.5, 30)
    assert first.failure is not None
    assert second.failure is None
    assert run.resumes == [20_000.0]


def test_the_page_stands_alone_and_is_escaped(run_dir: Path) -> None:
    assert write_report(run_dir) == run_dir / "report.html"
    text = (run_dir / "report.html").read_text()
    page = Page(text)
    assert page.open == []
    assert len(page.addresses) == 4
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    assert "http" not in text
    assert "url(" not in text
    assert "@import" not in text
    assert not {"script", "i", "u"} & set(page.tags)
    for shown in (
        "&lt;script&gt;alert(1)",
        "&lt;i&gt;many",
        "&lt;u&gt;pydocs",
        "&lt;b&gt;&amp;",
        "AMD &lt;EPYC&gt;",
        "99,999",
    ):
        assert shown in text, shown
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert not list(run_dir.glob("*.tmp"))


def test_settings_that_differ_from_the_default_stand_out(run_dir: Path) -> None:
    text = write_report(run_dir).read_text()
    changed = re.findall(r'<tr class="changed"><th>(\w+)</th>', text)
    assert changed == ["source"]
    assert "<td>none</td>" in text
    assert "<td>true</td>" in text


@pytest.mark.parametrize("missing", ["settings.yaml", "stages.json", "manifest.json", "all"])
def test_any_file_but_the_metrics_may_be_missing(run_dir: Path, missing: str) -> None:
    for name in ("settings.yaml", "stages.json", "manifest.json"):
        if missing in (name, "all"):
            (run_dir / name).unlink()
    assert Page(write_report(run_dir).read_text()).open == []
    assert dict(summary(run_dir))["train loss"].startswith("5.950")


def test_a_bare_metrics_file_is_enough(tmp_path: Path) -> None:
    lines = [
        {"type": "train", "step": 1, "tokens": 10, "loss": 5.0},
        {"type": "train", "step": 2, "tokens": 20, "loss": None},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"type":"tr')
    assert Page(write_report(tmp_path).read_text()).open == []
    assert dict(summary(tmp_path)) == {
        "train loss": "5.000 nats, mean of the last 2 steps",
        "trained on": "20 tokens in 2 steps",
    }


@pytest.mark.parametrize("text", [None, "", json.dumps(start(0, 1.0)) + "\n"])
def test_no_step_yet_is_one_line(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    with pytest.raises(UserError, match=r"^\S+metrics\.jsonl: no step of training in it, expected .*$"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(("name", "text"), [("stages.json", "[1]"), ("manifest.json", "{"), ("settings.yaml", "a: [")])
def test_a_file_that_is_not_what_it_says_is_named(run_dir: Path, name: str, text: str) -> None:
    (run_dir / name).write_text(text)
    with pytest.raises(UserError, match=rf"{name}: cannot be read, expected the (JSON|YAML) file"):
        write_report(run_dir)


def test_a_full_disk_leaves_the_old_report(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (run_dir / "report.html").write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_text() == "old"
    assert not list(run_dir.glob("*.tmp"))


def test_smoothing_follows_a_slope_and_averages_noise() -> None:
    slope = np.linspace(9.0, 4.0, 400)
    assert np.allclose(smooth(slope)[:390], slope[:390])
    noise = np.random.default_rng(0).normal(size=1000)
    assert smooth(noise)[50:].std() < 0.3 * noise.std()
    gap = np.array([1.0, np.nan, 3.0])
    assert np.isnan(smooth(gap)[1])
    assert not np.isnan(smooth(gap)[[0, 2]]).any()
    assert smooth(np.array([5.0])).tolist() == [5.0]


def test_the_picture_shows_the_entropy_line() -> None:
    """Render with and without: the dashed line and its label change pixels at its height alone."""
    from matplotlib import image

    records = [train(step, 0.0) for step in range(1, 21)]
    with_line, without = (image.imread(io.BytesIO(loss_figure(records, [], entropy, []))) for entropy in (7.0, None))
    rows = np.flatnonzero((with_line != without).any(axis=(1, 2)))
    assert 0 < rows.size < 0.1 * with_line.shape[0]


def test_dark_and_light_pictures_differ() -> None:
    records = [train(step, 0.0) for step in range(1, 5)]
    assert loss_figure(records, [], None, [], dark=True) != loss_figure(records, [], None, [], dark=False)
