"""A repository of stub charts, one ConfigMap each, that stands in for the operators' own through charts.mirror."""

from __future__ import annotations

import functools
import http.server
import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from loopback import Quiet, served
from schemas import CRD_DIR

from infra import versions

# The custom resources that the program itself makes, by the chart that brings their definitions: group, kind, plural.
DEFINITIONS = {
    "karpenter-crd": [
        ("karpenter.sh", "NodePool", "nodepools"),
        ("karpenter.k8s.aws", "EC2NodeClass", "ec2nodeclasses"),
    ],
    "kuberay-operator": [("ray.io", "RayJob", "rayjobs"), ("ray.io", "RayCluster", "rayclusters")],
    "kube-prometheus-stack": [
        ("monitoring.coreos.com", kind, f"{kind.lower()}s")
        for kind in ("PodMonitor", "PrometheusRule", "ServiceMonitor")
    ],
    "volcano": [("scheduling.volcano.sh", "Queue", "queues")],
}
MPI_JOB = ("kubeflow.org", "MPIJob", "mpijobs")
# The version of each that the program asks for, and whether its objects are in a namespace.
VERSIONS = {"scheduling.volcano.sh": "v1beta1", "kubeflow.org": "v2beta1"}
NAMESPACED = ("ray.io", "kubeflow.org", "monitoring.coreos.com")


def chart_archive(chart: versions.Chart, definitions: Sequence[tuple[str, str, str]]) -> bytes:
    """A chart of that name and version with one ConfigMap, and the definitions of these: group, kind, plural."""
    about = {"apiVersion": "v2", "name": chart.name, "version": chart.version}
    marker = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{chart.name}-stub"}}
    files = {"Chart.yaml": about, "templates/stub.yaml": marker}
    # Templates, as in Karpenter's own chart of definitions: Helm never removes what comes in a folder crds/.
    files |= {f"templates/{names[2]}.yaml": definition(*names) for names in definitions}
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path, content in files.items():
            data = json.dumps(content).encode()
            entry = tarfile.TarInfo(f"{chart.name}/{path}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()


def definition(group: str, kind: str, plural: str) -> dict[str, Any]:
    """The definition of a custom resource: the operators' own where CRD_DIR has it, or one that takes any fields."""
    own = CRD_DIR / f"{group}_{plural}.yaml"
    if own.exists():
        found: dict[str, Any] = yaml.safe_load(own.read_text())
        return found
    return any_fields(group, VERSIONS.get(group, "v1"), kind, plural, namespaced=group in NAMESPACED)


def any_fields(group: str, version: str, kind: str, plural: str, namespaced: bool) -> dict[str, Any]:
    """A definition of a custom resource that takes any fields."""
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    served = {
        "name": version,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced" if namespaced else "Cluster",
            "names": {"kind": kind, "plural": plural, "singular": kind.lower()},
            "versions": [served],
        },
    }


@contextmanager
def charts(folder: Path, definitions: bool = True) -> Iterator[str]:
    """The address of a mirror that has a stub of every chart in infra/versions.py; `definitions`: with the kinds that
    the program makes."""
    folder.mkdir(parents=True)
    found = [value for value in vars(versions).values() if isinstance(value, versions.Chart)]
    entries: dict[str, Any] = {}
    for chart in found:
        archive = folder / f"{chart.name}-{chart.version}.tgz"
        archive.write_bytes(chart_archive(chart, DEFINITIONS.get(chart.name, []) if definitions else []))
        entries[chart.name] = [
            {"apiVersion": "v2", "name": chart.name, "version": chart.version, "urls": [archive.name]}
        ]
    (folder / "index.yaml").write_text(yaml.safe_dump({"apiVersion": "v1", "entries": entries}))
    # The MPI operator has no chart: its definition lies beside them (infra/mpi_operator.py).
    (folder / f"mpi-operator-{versions.MPI_OPERATOR}.yaml").write_text(yaml.safe_dump(definition(*MPI_JOB)))

    class Files(Quiet, http.server.SimpleHTTPRequestHandler):
        pass

    with served(functools.partial(Files, directory=str(folder))) as address:
        yield address
