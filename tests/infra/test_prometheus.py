"""A run in a real Prometheus: its endpoint is scraped, every query of its dashboard and every rule has an answer."""

from __future__ import annotations

import http
import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from promql import filled

from infra.observability import DASHBOARDS, alerts
from training.config import load_settings
from training.exporter import exporting
from workloads.monitoring import pod_monitor

PATIENCE = 60  # seconds for Prometheus to start and to ask a few times


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Server:
    """A Prometheus that scrapes one address, every second."""

    def __init__(self, programs: Path, folder: Path, target: str) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        rules = folder / "rules.yaml"
        rules.write_text(yaml.safe_dump(alerts(1200)))
        (rename,) = pod_monitor()["podMetricsEndpoints"][0]["metricRelabelings"]
        scrape = {
            "job_name": "stages",
            "scrape_interval": "1s",
            "scrape_timeout": "1s",
            "static_configs": [{"targets": [target]}],
            # What prometheus-operator makes of the PodMonitor's.
            "metric_relabel_configs": [
                {
                    "source_labels": rename["sourceLabels"],
                    "regex": rename["regex"],
                    "target_label": rename["targetLabel"],
                    "replacement": rename["replacement"],
                }
            ],
        }
        config = {"global": {"evaluation_interval": "1s"}, "rule_files": [str(rules)], "scrape_configs": [scrape]}
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        self.log = (folder / "log").open("w")
        self.process = subprocess.Popen(
            [
                str(programs / "prometheus"),
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={self.address}",
            ],
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    def ask(self, path: str, **parameters: str) -> Any:
        url = f"http://{self.address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            return json.load(urllib.request.urlopen(url, timeout=10))["data"]
        except urllib.error.HTTPError as error:
            if error.code == http.HTTPStatus.SERVICE_UNAVAILABLE:  # it reads its data, of which there is none yet
                raise
            pytest.fail(f"{parameters}: {error.read().decode()}")

    def query(self, expression: str) -> list[Any]:
        """The instant vector of an expression."""
        found: list[Any] = self.ask("query", query=expression)["result"]
        return found

    def wait_for(self, expression: str) -> None:
        """Until an expression has an answer."""
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            try:
                self.process.wait(0.2)
                pytest.fail(f"prometheus ended: {Path(self.log.name).read_text()}")
            except subprocess.TimeoutExpired:
                pass
            try:
                if self.query(expression):
                    return
            except urllib.error.URLError:
                continue  # it has just begun
        pytest.fail(f"no answer in {PATIENCE} s: {expression}")

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
        self.log.close()


@pytest.fixture(scope="module")
def run(prometheus_programs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A run that has been begun again once, as Prometheus has it."""
    address = f"127.0.0.1:{free_port()}"
    settings = load_settings("tiny", overrides={"run.dir": "runs/shown", "run.metrics_address": address})
    folder = tmp_path_factory.mktemp("server")
    now = time.time()
    start = {"type": "start", "time": now, "step": 0, "workers": 1}
    step = {"type": "train", "time": now, "tokens": 4096, "loss": 6.5, "lr": 1e-3, "grad_norm": 2.0}
    step |= {"tokens_per_second": 2048.0, "step_seconds": 2.0, "mfu": 0.25, "data_wait_seconds": 0.5}
    with exporting(settings) as metrics:
        metrics.take([start, step | {"step": 1}, start | {"time": now + 1, "step": 1}])
        metrics.take([{"type": "valid", "time": now, "step": 1, "loss": 6.25}])
        metrics.take([{"type": "checkpoint", "time": now, "step": 1, "stall_seconds": 0.75}])
        server = Server(prometheus_programs, folder, address)
        try:
            server.wait_for("count_over_time(llama_trainium_step[1m]) >= 3")
            yield server
        finally:
            server.close()


def test_every_query_of_the_runs_dashboard_has_an_answer(run: Server) -> None:
    panels = json.loads((DASHBOARDS / "training.json").read_text())["panels"]
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(expressions) > 15
    for expression in expressions:
        found = run.query(filled(expression))
        assert [each["metric"]["run"] for each in found] == ["shown"], expression
        assert found[0]["value"][1] != "NaN", expression


def test_the_numbers_are_the_runs(run: Server) -> None:
    for name, value in {"loss": "6.5", "validation_loss": "6.25", "mfu_ratio": "0.25", "restarts": "1"}.items():
        (found,) = run.query(f'llama_trainium_{name}{{run="shown"}}')
        assert found["value"][1] == value
    (left,) = run.query("(llama_trainium_target_steps - llama_trainium_step) * llama_trainium_step_seconds")
    assert float(left["value"][1]) == (load_settings("tiny").train.steps - 1) * 2.0


def test_every_other_query_is_one_that_prometheus_can_read(run: Server) -> None:
    for path in DASHBOARDS.glob("*.json"):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel["targets"]:
                run.query(filled(target["expr"]))


def test_the_rules_are_loaded_and_none_fires_for_a_run_that_trains(run: Server) -> None:
    run.wait_for("llama_trainium:fsx_capacity_bytes")
    rules = [rule for group in run.ask("rules")["groups"] for rule in group["rules"]]
    assert len(rules) == 7
    assert {rule["health"] for rule in rules} <= {"ok", "unknown"}
    assert run.query("ALERTS") == []
