"""Deployments of one pod on a core node, with the volume: what stands beside the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workloads.base import Base
from workloads.labels import PART_OF
from workloads.platform import VOLUME_PATH, Platform

DATA_MOUNT = {"name": "data", "mountPath": str(VOLUME_PATH)}


def core_deployment(
    labels: Mapping[str, str],
    platform: Platform,
    base: Base,
    container: Mapping[str, Any],
    volumes: Sequence[Mapping[str, Any]] = (),
) -> Any:
    """Spec of a Deployment, as plain data: one pod with the labels, the container, the volume `data` and `volumes`."""
    return {
        "replicas": 1,
        "selector": {"matchLabels": dict(labels)},
        # A volume of small clusters may be one node's at a time.
        "strategy": {"type": "Recreate"},
        "template": {
            "metadata": {"labels": {**PART_OF, **labels}},
            "spec": {
                "serviceAccountName": base.service_account,
                "nodeSelector": dict(platform.core.node_selector),
                "tolerations": [dict(each) for each in platform.core.tolerations],
                "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [dict(container)],
                "volumes": [{"name": "data", "persistentVolumeClaim": {"claimName": base.claim}}, *map(dict, volumes)],
            },
        },
    }
