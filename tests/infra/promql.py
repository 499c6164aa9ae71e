"""What a PromQL expression asks for, and what there is: the exporters of exporters.yaml and a run's own measures."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import promql_parser
import yaml

from training.exporter import MEASURES, PREFIX

EXPORTERS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("exporters.yaml").read_text(encoding="utf-8"))
TARGET_LABELS = {
    *("job", "instance", "namespace", "pod", "container", "endpoint", "service"),
    "node",  # by the relabelings of our monitors
    *("llama_trainium_stage", "ray_io_cluster", "ray_io_node_type"),  # podTargetLabels of workloads/monitoring.py
}
"""What Prometheus puts on every series of a target."""


@dataclass(frozen=True)
class Question:
    """What an expression asks for."""

    names: frozenset[str]
    labels: frozenset[str]
    """Those that it selects, groups and matches by."""


def emitted() -> dict[str, set[str]]:
    """Every metric that can be there, with its labels."""
    found = {PREFIX + measure.name: {"run"} for measure in MEASURES}
    for exporter in EXPORTERS.values():
        found |= {name: {*exporter["labels"], *labels} for name, labels in exporter["metrics"].items()}
    return found


def filled(expression: str) -> str:
    """The expression with Grafana's variables filled in: five minutes, and all there is."""
    return re.sub(r"\$\{?\w+\}?", ".*", expression.replace("$__rate_interval", "5m"))


def question(expression: str) -> Question:
    """Raises ValueError for what is no PromQL. Grafana's variables are filled in."""
    names: set[str] = set()
    labels: set[str] = set()

    def look(node: Any) -> bool:
        if isinstance(node, promql_parser.MatrixSelector):
            node = node.vector_selector
        if isinstance(node, promql_parser.VectorSelector):
            names.add(node.name)
            labels.update(matcher.name for matcher in node.matchers.matchers)
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
            labels.update(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier is not None:
            matching = node.modifier.matching
            labels.update(matching.labels if matching is not None else ())
        return True

    promql_parser.walk(promql_parser.parse(filled(expression)), look)
    return Question(frozenset(names), frozenset(labels))


def mistakes(expression: str) -> list[str]:
    """What an expression asks for that nothing emits: names, and labels that none of its metrics has."""
    asked, there = question(expression), emitted()
    unknown = sorted(asked.names - there.keys())
    if unknown:
        return [f"{name}: no exporter has it" for name in unknown]
    known = TARGET_LABELS.union(*(there[name] for name in asked.names))
    return [f"{label}: none of {', '.join(sorted(asked.names))} has it" for label in sorted(asked.labels - known)]
