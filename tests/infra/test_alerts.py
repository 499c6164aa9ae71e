"""The alerts: they ask for what is emitted, and Prometheus itself says when they fire and when not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from promql import mistakes, question

from infra.observability import alerts

CASES = Path(__file__).with_name("alert_cases.yaml")


def rules(size_gib: int = 1200) -> list[Mapping[str, Any]]:
    return [rule for group in alerts(size_gib)["groups"] for rule in group["rules"]]


def test_every_alert_asks_for_what_is_emitted() -> None:
    expressions = [rule["expr"] for rule in rules()]
    assert len(expressions) == 7
    assert {each: found for each in expressions if (found := mistakes(each))} == {}


def test_what_the_issue_asks_to_be_told_of_is_told() -> None:
    told = {rule["alert"]: question(rule["expr"]).names for rule in rules() if "alert" in rule}
    assert "kube_node_status_condition" in told["NodeLost"]
    assert "execution_errors_total" in told["NeuronErrors"]
    assert "hardware_ecc_events_total" in told["NeuronMemoryErrors"]
    assert "llama_trainium_last_progress_timestamp_seconds" in told["TrainingStalled"]
    assert "aws_fsx_free_data_storage_capacity_sum" in told["FileSystemAlmostFull"]
    (full,) = (rule["expr"] for rule in rules() if rule.get("alert") == "FileSystemAlmostFull")
    assert full.endswith("> 0.85")


def test_every_alert_says_what_it_is_and_what_to_do() -> None:
    for rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert set(rule["annotations"]) == {"summary", "description"}


def test_the_size_is_that_of_the_stack() -> None:
    (size,) = (rule for rule in rules(2400) if "record" in rule)
    assert size == {"record": "llama_trainium:fsx_capacity_bytes", "expr": f"vector({2400 * 2**30})"}


def test_they_fire_when_they_should_and_only_then(prometheus_programs: Path, tmp_path: Path) -> None:
    promtool = str(prometheus_programs / "promtool")
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(alerts(1200)))
    shutil.copy(CASES, tmp_path)
    checked = subprocess.run([promtool, "check", "rules", "rules.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    done = subprocess.run([promtool, "test", "rules", CASES.name], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_not() -> None:
    seen: dict[str, set[bool]] = {}
    for test in yaml.safe_load(CASES.read_text())["tests"]:
        for case in test["alert_rule_test"]:
            seen.setdefault(case["alertname"], set()).add(bool(case["exp_alerts"]))
    assert seen == {rule["alert"]: {True, False} for rule in rules() if "alert" in rule}
