"""A run's numbers for Prometheus: what they are read from, through resumes, at an endpoint and among Ray's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from makers import SettingsMaker, TokenStoreMaker
from prometheus_client.parser import text_string_to_metric_families

from training import exporter
from training.config import Run, load_settings
from training.errors import UserError
from training.exporter import MEASURES, PREFIX, RunMetrics, exporting

START = {"type": "start", "time": 100.0, "step": 0, "workers": 2}
TRAIN = {
    **{"type": "train", "time": 110.0, "step": 1, "tokens": 4096, "loss": 6.5, "lr": 1e-3, "grad_norm": 2.0},
    **{"tokens_per_second": 2048.0, "step_seconds": 2.0, "mfu": 0.25, "data_wait_seconds": 0.5},
}
SAVED = {"type": "checkpoint", "time": 120.0, "step": 1, "stall_seconds": 0.75}
VALID = {"type": "valid", "time": 115.0, "step": 1, "tokens": 4096, "loss": 6.25}
FAILED = {"type": "failure", "time": 130.0, "rank": 1, "step": 1, "message": "killed"}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def scraped(port: int) -> dict[str, float]:
    """What an endpoint says, by name without the prefix; every sample has the run's name."""
    text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    families = list(text_string_to_metric_families(text))
    samples = [sample for family in families for sample in family.samples]
    assert {family.type for family in families} == {"gauge"}
    assert all(set(sample.labels) == {"run"} and sample.name.startswith(PREFIX) for sample in samples)
    return {sample.name.removeprefix(PREFIX): sample.value for sample in samples}


def test_the_newest_value_of_each_measure_is_shown(small_settings: SettingsMaker, tmp_path: Path) -> None:
    shown: list[dict[str, float]] = []
    metrics = RunMetrics(small_settings(tmp_path), [lambda values: shown.append(dict(values))], clock=lambda: 90.0)
    metrics.take([START, TRAIN])
    metrics.take([VALID, SAVED, FAILED])
    assert shown[0]["last_progress_timestamp_seconds"] == 110.0
    assert shown[1] == {
        "training": 1,
        "target_steps": small_settings(tmp_path).train.steps,
        "last_progress_timestamp_seconds": 120.0,  # a failure is no progress
        "restarts": 0,
        "workers": 2,
        "step": 1,
        "tokens": 4096,
        "loss": 6.5,
        "learning_rate": 1e-3,
        "grad_norm": 2.0,
        "tokens_per_second": 2048.0,
        "step_seconds": 2.0,
        "mfu_ratio": 0.25,
        "data_wait_seconds": 0.5,
        "validation_loss": 6.25,
        "checkpoint_step": 1,
        "checkpoint_stall_seconds": 0.75,
    }
    assert shown[1].keys() == {measure.name for measure in MEASURES}
    metrics.end()
    assert shown[2] == shown[1] | {"training": 0}


def test_a_resume_counts_once_though_the_file_is_written_anew(small_settings: SettingsMaker, tmp_path: Path) -> None:
    metrics = RunMetrics(small_settings(tmp_path), [], clock=lambda: 90.0)
    metrics.take([START, TRAIN, TRAIN | {"time": 111.0, "step": 2}, FAILED])
    again = START | {"time": 140.0, "step": 1}
    metrics.take([START, TRAIN, FAILED, again])  # from the beginning, as MetricsWriter leaves it
    assert metrics.values["restarts"] == 1
    assert metrics.values["step"] == 1
    assert metrics.values["last_progress_timestamp_seconds"] == 140.0


def test_what_is_not_known_is_left_as_it_was(small_settings: SettingsMaker, tmp_path: Path) -> None:
    metrics = RunMetrics(small_settings(tmp_path), [], clock=lambda: 1000.0)
    metrics.take([START, TRAIN | {"mfu": None}])
    assert "mfu_ratio" not in metrics.values
    # A launcher that has just begun has made progress, whatever an earlier one left in the file.
    assert metrics.values["last_progress_timestamp_seconds"] == 1000.0


def test_every_measure_is_a_key_of_records_that_a_run_writes(
    small_settings: SettingsMaker, token_store: TokenStoreMaker, tmp_path: Path
) -> None:
    from training.launchers import launch_train
    from training.metrics import read_metrics
    from training.rundir import RunDir

    settings = small_settings(tmp_path, train__steps=2, train__warmup_steps=0, train__eval_every=1)
    token_store(settings.data_dir)
    launch_train(settings)
    metrics = RunMetrics(settings, [])
    metrics.take(read_metrics(RunDir(settings.run.dir).metrics))
    assert metrics.values.keys() == {measure.name for measure in MEASURES}


def test_the_endpoint_lives_as_long_as_the_run(small_settings: SettingsMaker, tmp_path: Path) -> None:
    port = free_port()
    settings = small_settings(tmp_path, run__metrics_address=f"127.0.0.1:{port}")
    with exporting(settings) as metrics:
        metrics.take([START, TRAIN])
        assert scraped(port)["loss"] == 6.5
        metrics.take([TRAIN | {"loss": 6.0}])
        assert scraped(port)["loss"] == 6.0
    with pytest.raises(urllib.error.URLError):
        scraped(port)


def test_without_an_address_there_is_none(small_settings: SettingsMaker, tmp_path: Path) -> None:
    with exporting(small_settings(tmp_path)) as metrics:
        assert metrics._sinks == []


def test_an_address_that_is_taken_is_one_line(small_settings: SettingsMaker, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"^run\.metrics_address: {address}, expected an address that is free"):
            with exporting(small_settings(tmp_path, run__metrics_address=address)):
                pass


def test_without_the_package_it_is_one_line(
    small_settings: SettingsMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(UserError, match=r"^run\.metrics_address: 127\.0\.0\.1:1, expected none without the package"):
        with exporting(small_settings(tmp_path, run__metrics_address="127.0.0.1:1")):
            pass


@pytest.mark.parametrize("value", ["9400", "host", "host:", ":9400", "host:123456", "a b:1"])
def test_what_is_no_address_is_refused(value: str) -> None:
    with pytest.raises(UserError, match=r"^run\.metrics_address: .*expected HOST:PORT, such as 127\.0\.0\.1:9400"):
        load_settings(overrides={"run.metrics_address": value})


@pytest.mark.parametrize("value", ["127.0.0.1:9400", "0.0.0.0:9400", "[::1]:9400", "localhost:80"])
def test_addresses_are_taken(value: str) -> None:
    assert Run(metrics_address=value).metrics_address == value


def test_under_ray_they_are_rays_gauges_once_ray_is_there(
    small_settings: SettingsMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.util.metrics import Gauge

    there = False
    kept: dict[str, float] = {}
    made: list[str] = []

    def make(self: Any, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
        assert description
        assert tag_keys == ("run",)
        made.append(name)
        self.name = name

    def keep(self: Any, value: float, tags: dict[str, str]) -> None:
        assert tags == {"run": "run"}
        kept[self.name.removeprefix(PREFIX)] = value

    monkeypatch.setattr(ray, "is_initialized", lambda: there)
    monkeypatch.setattr(Gauge, "__init__", make)
    monkeypatch.setattr(Gauge, "set", keep)
    with exporting(small_settings(tmp_path, run__launcher="ray")) as metrics:
        metrics.take([START, TRAIN])
        assert not made  # Ray drops a gauge for good that is made before it is there
        there = True
        metrics.take([VALID])
        assert kept == metrics.values
        assert kept["loss"] == 6.5
    assert kept["training"] == 0
    assert made == [PREFIX + measure.name for measure in MEASURES]


def test_a_run_of_the_command_line_is_seen_from_outside(
    small_settings: SettingsMaker, token_store: TokenStoreMaker, tmp_path: Path
) -> None:
    settings = small_settings(tmp_path, train__steps=100_000, train__warmup_steps=0)
    token_store(settings.data_dir)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(settings.resolved()))
    port = free_port()
    command = [sys.executable, "-m", "training", "train", "--config", str(file)]
    command += ["--run.metrics_address", f"127.0.0.1:{port}"]
    run = subprocess.Popen(command, cwd=Path(exporter.__file__).parents[1], stdout=subprocess.PIPE, text=True)
    try:
        found: dict[str, float] = {}
        while found.get("step", 0) < 3:
            with contextlib.suppress(subprocess.TimeoutExpired):
                pytest.fail(f"ended with {run.wait(0.1)}")
            with contextlib.suppress(urllib.error.URLError):  # it has just begun
                found = scraped(port)
        assert found["training"] == 1
        assert found["restarts"] == 0
        assert found["loss"] > 0
        assert found["target_steps"] == 100_000
        os.kill(run.pid, signal.SIGTERM)
        assert run.wait(60) == 128 + signal.SIGTERM
    finally:
        run.kill()
        run.communicate()
