"""EFA's counters as node-exporter hands them on: what infra/efa_counters.sh makes of /sys."""

from __future__ import annotations

import subprocess
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from promql import EXPORTERS

from infra.observability import EFA_COUNTERS, node_exporter_values


def interface(sys: Path, name: str, **counters: int) -> None:
    """An interface with its counters, as the driver shows it."""
    folder = sys / "class" / "infiniband" / name / "ports" / "1" / "hw_counters"
    folder.mkdir(parents=True)
    for counter, value in {**counters, "lifespan": 12}.items():
        (folder / counter).write_text(f"{value}\n")


def look(tmp_path: Path) -> str:
    """What one look leaves."""
    out = tmp_path / "efa.prom"
    environment = {"PATH": "/usr/bin:/bin", "SYS": str(tmp_path / "sys"), "OUT": str(out)}
    done = subprocess.run(["sh", str(EFA_COUNTERS)], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""
    assert [path.name for path in tmp_path.glob("efa*")] == ["efa.prom"]
    return out.read_text()


def test_every_counter_of_every_interface_is_there(tmp_path: Path) -> None:
    names = [name.removeprefix("efa_").removesuffix("_total") for name in EXPORTERS["efa-counters"]["metrics"]]
    for index, device in enumerate(("rdmap16s27", "rdmap32s27")):
        interface(tmp_path / "sys", device, **{name: 100 * index + number for number, name in enumerate(names)})
    families = {family.name: family for family in text_string_to_metric_families(look(tmp_path))}
    assert {f"{name}_total" for name in families} == set(EXPORTERS["efa-counters"]["metrics"])
    assert {family.type for family in families.values()} == {"counter"}
    samples = families["efa_rx_bytes"].samples
    number = names.index("rx_bytes")
    assert {(s.labels["device"], s.labels["port"]): s.value for s in samples} == {
        ("rdmap16s27", "1"): number,
        ("rdmap32s27", "1"): 100 + number,
    }
    assert set(samples[0].labels) == set(EXPORTERS["efa-counters"]["labels"])


def test_one_interface_is_enough(tmp_path: Path) -> None:
    interface(tmp_path / "sys", "rdmap0s6", tx_bytes=7)
    assert look(tmp_path) == '# TYPE efa_tx_bytes_total counter\nefa_tx_bytes_total{device="rdmap0s6",port="1"} 7\n'


def test_a_node_without_efa_has_none(tmp_path: Path) -> None:
    assert look(tmp_path) == ""


def test_node_exporter_reads_the_file_that_the_container_beside_it_writes() -> None:
    values = node_exporter_values()
    (container,) = values["sidecars"]
    (shared,) = values["sidecarVolumeMount"]
    assert EFA_COUNTERS.read_text() in container["command"][-1]
    out = next(each["value"] for each in container["env"] if each["name"] == "OUT")
    assert f"--collector.textfile.directory={Path(out).parent}" in values["extraArgs"]
    assert (shared["mountPath"], out.endswith(".prom")) == (str(Path(out).parent), True)
    assert {"requests", "limits"} <= set(container["resources"])
