"""The operators that run training jobs: Volcano (gangs), KubeRay (RayJob), MPI operator (MPIJob).

With `operators: present` they are in the cluster already, and this component makes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import pulumi
import pulumi_kubernetes as k8s
import yaml

from infra.charts import release
from infra.mpi_operator import MpiOperator
from infra.settings import Charts
from infra.versions import KUBERAY, VOLCANO

SCHEDULER: dict[str, Any] = {
    # A gang that waits for nodes must look to an autoscaler as all of its pods do: unschedulable, every one. `allocate`
    # alone does not: where some nodes are free, it places the pods that fit, finds the gang incomplete and takes them
    # back, and these pods are then marked `Schedulable`, which autoscalers skip (TaskSchedulingReason in
    # pkg/scheduler/api/job_info.go, 1.15.1). The rest of the gang fits on the nodes that were just given back, so the
    # autoscaler adds none, and the gang waits for ever. `enqueue` with `overcommit` keeps a gang whose resources are
    # not all idle away from `allocate`, and its pods stay `Unschedulable`.
    "actions": "enqueue, allocate, backfill",
    "tiers": [
        {
            "plugins": [
                {"name": "priority"},
                {"name": "gang", "enablePreemptable": False},
                {"name": "conformance"},
            ]
        },
        {
            "plugins": [
                # 1.2 is the default: of six nodes with another's work on one it counts 6.2 as idle, and lets a gang of
                # six pass, which is the case above (tests/engine/test_real_operators.py).
                {"name": "overcommit", "arguments": {"overcommit-factor": 1.0}},
                {"name": "drf", "enablePreemptable": False},
                {"name": "predicates"},
                {"name": "proportion"},
                {"name": "nodeorder"},
                {"name": "binpack"},
            ]
        },
    ],
}
"""The actions and plugins of Volcano's own configuration, with the one argument that an autoscaler needs."""


class OperatorSettings(Protocol):
    """What the operators need of a stack's settings, on either platform."""

    @property
    def operators(self) -> str:
        """install or present."""

    @property
    def charts(self) -> Charts:
        """Where charts come from."""


class Operators(pulumi.ComponentResource):
    """Volcano, and when it is there, the two that tell it of their gangs."""

    installed: list[pulumi.Resource]
    """What a job waits for, and what must outlive it on destroy: the operators remove what they made of it."""

    def __init__(
        self,
        name: str,
        settings: OperatorSettings,
        provider: k8s.Provider,
        ready: Sequence[pulumi.Resource],
        gang: bool,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`ready` is what a chart's pods need: nodes, DNS. `gang`: RayJobs are placed whole, by Volcano."""
        super().__init__("llama-trainium:infra:Operators", name, None, opts)
        self.installed = []
        if settings.operators == "install":
            self._install(name, settings.charts.mirror, provider, ready, gang)
        self.register_outputs({})

    def _install(
        self, name: str, mirror: str | None, provider: k8s.Provider, ready: Sequence[pulumi.Resource], gang: bool
    ) -> None:
        child = pulumi.ResourceOptions(parent=self, provider=provider)
        # With its namespace goes the certificate that Volcano's webhook makes for itself.
        volcano_namespace = _namespace(f"{name}-volcano-system", "volcano-system", child)
        ray_namespace = _namespace(f"{name}-ray-system", "ray-system", child)
        volcano = release(
            f"{name}-volcano",
            VOLCANO,
            {
                "basic": {"image_pull_policy": "IfNotPresent"},
                "custom": {
                    "scheduler_config_override": yaml.safe_dump(SCHEDULER, sort_keys=False),
                    # Two schedulers run for a moment at every upgrade; one of them must wait.
                    "leader_elect_enable": True,
                    "scheduler_resources": _resources("200m", "256Mi", "1Gi"),
                    "controller_resources": _resources("100m", "128Mi", "512Mi"),
                    "admission_resources": _resources("50m", "64Mi", "256Mi"),
                },
            },
            volcano_namespace.metadata.name,
            mirror,
            pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(depends_on=[*ready])),
        )
        # Both operators watch PodGroups from their start: without Volcano's definitions they do not become ready.
        after_volcano = pulumi.ResourceOptions.merge(child, pulumi.ResourceOptions(depends_on=[volcano]))
        ray_resources = _resources("100m", "256Mi", "512Mi")
        ray_resources["limits"]["cpu"] = "1"  # the chart has a limit of its own, a tenth of this
        ray = release(
            f"{name}-kuberay",
            KUBERAY,
            # `name` and not `enabled`: the operator refuses both at once, and the second is on its way out. With one
            # it never starts a RayJob on a cluster that is there, whatever the job says (handleRayJob in
            # controllers/ray/batchscheduler/volcano, 1.7.0): stages that share one do without.
            {"batchScheduler": {"name": "volcano" if gang else ""}, "resources": ray_resources},
            ray_namespace.metadata.name,
            mirror,
            after_volcano,
        )
        mpi = MpiOperator(f"{name}-mpi", mirror, after=[volcano], opts=child)
        self.installed = [volcano, ray, mpi]


def _namespace(name: str, wanted: str, opts: pulumi.ResourceOptions) -> k8s.core.v1.Namespace:
    return k8s.core.v1.Namespace(name, metadata=k8s.meta.v1.ObjectMetaArgs(name=wanted), opts=opts)


def _resources(cpu: str, memory: str, most_memory: str) -> dict[str, dict[str, str]]:
    """No limit of CPU: a controller that is throttled while a gang starts only makes the accelerators wait."""
    return {"requests": {"cpu": cpu, "memory": memory}, "limits": {"memory": most_memory}}
