"""A pod to look around in: the image, with Neuron's tools where it has them, and the volume. `make toolbox`

It runs on a core node: on an accelerator node it would keep a stage off a device, or the node from going away. What
neuron-top and neuron-ls show of devices is shown in a worker: `kubectl exec -it WORKER -- neuron-top`.
"""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as k8s

from workloads.base import Base
from workloads.core_pods import DATA_MOUNT, core_deployment
from workloads.labels import PART_OF, TOOLBOX
from workloads.platform import VOLUME_PATH, Platform
from workloads.pods import LOCKED

SELECTOR = {"app.kubernetes.io/name": TOOLBOX}


class Toolbox(pulumi.ComponentResource):
    """The Deployment."""

    def __init__(self, name: str, platform: Platform, base: Base, opts: pulumi.ResourceOptions | None = None) -> None:
        super().__init__("llama-trainium:workloads:Toolbox", name, None, opts)
        container = {
            "name": TOOLBOX,
            "image": platform.image,
            # A first process ends at SIGTERM only if it says so.
            "command": ["/bin/sh", "-c", "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"],
            "workingDir": str(VOLUME_PATH),
            "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}},
            "securityContext": LOCKED,
            "volumeMounts": [DATA_MOUNT],
        }
        k8s.apps.v1.Deployment(
            f"{name}-deployment",
            metadata=k8s.meta.v1.ObjectMetaArgs(name=TOOLBOX, namespace=base.namespace, labels={**PART_OF, **SELECTOR}),
            spec=core_deployment(SELECTOR, platform, base, container),
            opts=pulumi.ResourceOptions(parent=self, provider=platform.provider, depends_on=[*platform.after]),
        )
        self.register_outputs({})
