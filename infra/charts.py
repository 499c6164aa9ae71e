"""Helm releases: one way to install every chart.

`helm.v3.Release` and not `helm.v4.Chart`: Volcano's chart makes its webhook's certificate in a Helm hook, which only a
release runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pulumi
import pulumi_kubernetes as k8s

from infra.versions import Chart

TIMEOUT = 600  # seconds to become ready: images pulled through one NAT gateway, on nodes that have just joined


def release(
    name: str,
    chart: Chart,
    values: Mapping[str, Any],
    namespace: pulumi.Input[str],
    mirror: str | None = None,
    opts: pulumi.ResourceOptions | None = None,
) -> k8s.helm.v3.Release:
    """Install `chart` as the Helm release `chart.name` and wait until its pods are ready.

    `mirror` (https://, http:// on loopback, or oci://) stands in for the chart's own repository. The namespace must
    exist: one that Helm creates is left behind by `pulumi destroy`.
    """
    repository = (mirror or chart.repository).rstrip("/")
    oci = repository.startswith("oci://")
    return k8s.helm.v3.Release(
        name,
        # The name within the cluster is the chart's, not Pulumi's random one: what the chart creates is named after it.
        name=chart.name,
        chart=f"{repository}/{chart.name}" if oci else chart.name,
        repository_opts=None if oci else k8s.helm.v3.RepositoryOptsArgs(repo=repository),
        version=chart.version,
        namespace=namespace,
        values=values,
        # A failed install is removed and a failed upgrade rolled back. Otherwise Helm keeps a release "failed" that was
        # never deployed, and refuses to upgrade it at the next `up`.
        atomic=True,
        cleanup_on_fail=True,
        timeout=TIMEOUT,
        # Definitions in a chart's crds/ folder come with its first install. Helm neither upgrades nor deletes them:
        # an upgrade of KubeRay applies its definitions first (docs/operations.md).
        skip_crds=False,
        # Three revisions are what a rollback needs; each is a Secret with the whole chart.
        max_history=3,
        opts=opts,
    )
