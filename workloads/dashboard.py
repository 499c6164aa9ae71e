"""Ray's dashboard under one name, whichever cluster runs a stage: `make dashboard`, or HTTPS where a host is set.

Ray asks for its token itself: the one of `dashboardPassword`, or else KubeRay's own, one a cluster.
"""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as k8s

from workloads.base import Base
from workloads.ingress import expose
from workloads.labels import DASHBOARD, DASHBOARD_LABEL, DASHBOARD_PORT, PART_OF
from workloads.platform import Platform
from workloads.settings import Web

HEALTH = "/"
"""The page itself, without what it shows: that needs the token."""


class Dashboard(pulumi.ComponentResource):
    """The Service, and where `web.host` is set, its ingress."""

    def __init__(
        self, name: str, web: Web, platform: Platform, base: Base, opts: pulumi.ResourceOptions | None = None
    ) -> None:
        super().__init__("llama-trainium:workloads:Dashboard", name, None, opts)
        child = pulumi.ResourceOptions(parent=self, provider=platform.provider, depends_on=[*platform.after])
        service = k8s.core.v1.Service(
            f"{name}-service",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name=DASHBOARD,
                namespace=base.namespace,
                labels=PART_OF,
                # It has no pods until a stage runs, for which Pulumi would wait.
                annotations={"pulumi.com/skipAwait": "true"},
            ),
            spec=k8s.core.v1.ServiceSpecArgs(
                selector=DASHBOARD_LABEL,
                ports=[k8s.core.v1.ServicePortArgs(name="http", port=DASHBOARD_PORT, target_port=DASHBOARD_PORT)],
            ),
            opts=child,
        )
        if web.host:
            expose(name, web, base.namespace, service, DASHBOARD_LABEL, HEALTH, child)
        self.register_outputs({})
