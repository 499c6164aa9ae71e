"""The dashboards: every query asks for what is emitted, and every panel can be drawn."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from promql import EXPORTERS, emitted, mistakes, question

from infra import observability, versions
from infra.file_system_metrics import jobs
from training.exporter import MEASURES, PREFIX

FILES = sorted(observability.DASHBOARDS.glob("*.json"))
SHOWN = {"training": PREFIX, "neuron": "neuron", "efa": "efa_", "fsx": "aws_fsx_", "ray": "ray_"}
"""What each dashboard is about: how the names of its metrics begin."""
PANELS = {"timeseries", "stat", "gauge"}
UNITS = {"none", "short", "sci", "percent", "percentunit", "s", "bytes", "Bps", "pps", "ops"}


def load(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def queries(dashboard: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(panel, expression), and (variable, expression) of what fills a variable."""
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            values = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
            assert values, variable
            yield variable["name"], f"sum by ({values[2]}) ({values[1]})"


def test_there_is_one_for_each_thing_to_look_at() -> None:
    assert {path.stem for path in FILES} == SHOWN.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_query_asks_for_what_is_emitted(path: Path) -> None:
    asked = list(queries(load(path)))
    assert len(asked) >= 8
    assert {where: found for where, expression in asked if (found := mistakes(expression))} == {}
    names = {name for _, expression in asked for name in question(expression).names}
    assert any(name.startswith(SHOWN[path.stem]) for name in names)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_legend_names_labels_that_are_there(path: Path) -> None:
    for panel in load(path)["panels"]:
        for target in panel["targets"]:
            legend = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            expression = target["expr"]
            grouped = re.match(r"\s*(?:sum|max|min|avg|count)\s*(?:by \(([\w, ]+)\)\s*)?\(", expression)
            if grouped and grouped[1] is None:
                assert not legend, (panel["title"], "an aggregate over everything has no labels")
            elif grouped:
                assert legend <= {label.strip() for label in grouped[1].split(",")}, panel["title"]
            else:
                assert not mistakes(f"sum by ({', '.join(legend) or 'job'}) ({expression})"), panel["title"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_panel_can_be_drawn(path: Path) -> None:
    dashboard = load(path)
    panels = dashboard["panels"]
    assert dashboard["uid"] == f"llama-trainium-{path.stem}"
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in PANELS
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        assert [target["refId"] for target in panel["targets"]] == list("ABCDEFGH"[: len(panel["targets"])])
        for where in (panel, *panel["targets"]):
            assert where["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, f"{panel['title']} lies on another panel"
        taken |= cells
    for where, expression in queries(dashboard):
        asked = set(re.findall(r"\$\{?([a-z]\w*)", expression))
        assert asked <= variables, (where, asked - variables)


def test_a_query_for_what_nobody_says_is_found() -> None:
    assert mistakes("rate(ray_node_cpu_utilisation[5m])") == ["ray_node_cpu_utilisation: no exporter has it"]
    assert mistakes('llama_trainium_loss{model="x"}') == ["model: none of llama_trainium_loss has it"]
    assert mistakes("sum by (error) (increase(execution_errors_total[5m]))") == [
        "error: none of execution_errors_total has it"
    ]
    assert mistakes("up + on (zone) llama_trainium_loss") == ["up: no exporter has it"]
    assert mistakes('sum by (run) (rate(llama_trainium_step{run=~"$run"}[$__rate_interval]))') == []
    with pytest.raises(ValueError, match="unclosed"):
        mistakes("sum(rate(")


def test_the_exporters_are_the_pinned_ones() -> None:
    """A raised pin is a list to look at again."""
    assert EXPORTERS["ray"]["version"] == version("ray")
    assert versions.NEURON_MONITOR.endswith(f":{EXPORTERS['neuron-monitor']['version']}")
    # The versions that the charts bring, by their Chart.yaml.
    assert (versions.PROMETHEUS.version, versions.CLOUDWATCH_EXPORTER.version) == ("88.5.3", "0.47.0")
    assert EXPORTERS["node-exporter"]["version"] == "1.12.1"
    assert EXPORTERS["kube-state-metrics"]["version"] == "2.20.0"
    assert EXPORTERS["cloudwatch-exporter"]["version"] == "0.67.0"


def test_the_file_systems_metrics_are_those_that_the_exporter_is_told_to_ask_for() -> None:
    def snake(name: str) -> str:
        return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()

    (static,) = jobs("us-west-2", "fs-1")["static"]
    prefix = snake(static["namespace"].replace("/", "_").replace("AWS", "aws").replace("FSx", "fsx"))
    names = {
        f"{prefix}_{snake(metric['name'])}_{snake(statistic)}"
        for metric in static["metrics"]
        for statistic in metric["statistics"]
    }
    assert names == set(EXPORTERS["cloudwatch-exporter"]["metrics"])
    assert {f"dimension_{each['name']}" for each in static["dimensions"]} <= set(
        EXPORTERS["cloudwatch-exporter"]["labels"]
    )


def test_all_of_a_run_is_shown_somewhere() -> None:
    shown = {name for path in FILES for _, expression in queries(load(path)) for name in question(expression).names}
    hidden = {PREFIX + measure.name for measure in MEASURES} - shown
    assert hidden <= {f"{PREFIX}tokens", f"{PREFIX}workers"}
    assert emitted().keys() >= shown
