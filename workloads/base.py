"""What every stage stands on: namespace, claim, settings, secrets, queue, and who may talk to whom.

base = Base("base", settings, platform, prefix, Secrets(hugging_face_token=...))
base.settings_map("train", {...})      # name of a ConfigMap with these settings
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pulumi
import pulumi_kubernetes as k8s
import yaml

from workloads.labels import PART_OF
from workloads.network_policies import network_policies
from workloads.platform import SETTINGS_PATH, NodeShape, Platform
from workloads.settings import EFA, NEURON, Workloads

SERVICE_ACCOUNT = "workloads"
"""The account of all pods. infra/ gives it the bucket, by this name."""
TOKEN_KEY = "HF_TOKEN"
"""The key in `Base.token_secret`, and the environment variable that Hugging Face's libraries read."""
RAY_TOKEN_KEY = "auth_token"
"""The key that KubeRay wants in `Base.ray_token` (authOptions.secretName)."""
REDIS_KEY = "password"

POD_SECURITY = {
    # No privileged pods, no host namespaces, no hostPath in a pod (one in a PersistentVolume is the administrator's
    # affair). Devices of device plugins, EFA's included, need none of it. `restricted` would refuse the init container
    # that gives a run's folder to its user, which is root with CAP_CHOWN, and sshd's own use of groups.
    "pod-security.kubernetes.io/enforce": "baseline",
    "pod-security.kubernetes.io/enforce-version": "latest",
    "pod-security.kubernetes.io/audit": "restricted",
}

PRIORITY = 1000
"""Above the default, 0: of what waits in the cluster, stages are placed first. They push nothing out."""


@dataclass(frozen=True)
class Secrets:
    """What must not be in plain state; each becomes a Kubernetes Secret where it is given."""

    hugging_face_token: pulumi.Input[str] | None = None
    ray_token: pulumi.Input[str] | None = None
    """What Ray and its dashboard ask for. Without it KubeRay makes a token for each cluster."""
    redis_password: pulumi.Input[str] | None = None


class Base(pulumi.ComponentResource):
    """All of it but the stages."""

    namespace: pulumi.Output[str]
    claim: pulumi.Output[str]
    service_account: pulumi.Output[str]
    queue: pulumi.Output[str]
    priority_class: pulumi.Output[str]
    token_secret: pulumi.Output[str] | None
    """Name of the Secret with TOKEN_KEY; None where there is no token."""
    ray_token: pulumi.Output[str] | None
    """Name of the Secret with RAY_TOKEN_KEY; None: KubeRay makes one a cluster."""
    redis_password: pulumi.Output[str] | None
    """Name of the Secret with REDIS_KEY."""

    def __init__(
        self,
        name: str,
        settings: Workloads,
        platform: Platform,
        prefix: str,
        secrets: Secrets | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`prefix` is what the names of jobs begin with (`workloads.name`): the queue is called so too."""
        super().__init__("llama-trainium:workloads:Base", name, None, opts)
        secrets = secrets or Secrets()
        self._name = name
        self._child = pulumi.ResourceOptions(parent=self, provider=platform.provider, depends_on=[*platform.after])
        # A claim on a class of volumes is the data: with it the class deletes the volume. So it stays on destroy, and
        # the namespace with it. Elsewhere the volume is the platform's, and stays without its claim.
        dynamic = not (platform.volume.volume_name or platform.volume.host_path)
        self._kept = pulumi.ResourceOptions(retain_on_delete=dynamic)
        made = k8s.core.v1.Namespace(
            f"{name}-namespace",
            metadata=k8s.meta.v1.ObjectMetaArgs(name=settings.namespace, labels={**PART_OF, **POD_SECURITY}),
            opts=pulumi.ResourceOptions.merge(self._child, self._kept),
        )
        self.namespace = made.metadata.name
        self.claim = self._claim(settings, platform)
        self.service_account = k8s.core.v1.ServiceAccount(
            f"{name}-account",
            metadata=self._meta(SERVICE_ACCOUNT),
            # Training code asks nothing of the Kubernetes API. EKS Pod Identity has a token of its own.
            automount_service_account_token=False,
            opts=self._child,
        ).metadata.name
        self.token_secret = self._secret("hugging-face", TOKEN_KEY, secrets.hugging_face_token)
        self.ray_token = self._secret("ray-token", RAY_TOKEN_KEY, secrets.ray_token)
        self.redis_password = self._secret("redis", REDIS_KEY, secrets.redis_password)
        queue = settings.queue.name or prefix
        # Without gangs Volcano has no part in it, and need not be there.
        self.queue = self._queue(settings, platform, queue) if settings.gang else pulumi.Output.from_input(queue)
        self.priority_class = k8s.scheduling.v1.PriorityClass(
            f"{name}-priority",
            metadata=k8s.meta.v1.ObjectMetaArgs(name=f"{prefix}-stages", labels=PART_OF),
            value=PRIORITY,
            preemption_policy="Never",
            description="The stages of a pre-training run",
            opts=self._child,
        ).metadata.name
        for policy, spec in network_policies().items():
            k8s.networking.v1.NetworkPolicy(
                f"{name}-{policy}", metadata=self._meta(policy), spec=spec, opts=self._child
            )
        self.register_outputs({"namespace": self.namespace})

    def settings_map(self, stage: str, values: Mapping[str, Any]) -> pulumi.Output[str]:
        """A ConfigMap with the settings of one stage, for SETTINGS_PATH; its name says what is in it.

        One per stage and not one for all: the name is in the pods, and a setting that a stage does not read must not
        change them. Immutable: a pod that starts again reads what it read before.
        """
        text = yaml.safe_dump(dict(values), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        return k8s.core.v1.ConfigMap(
            f"{self._name}-settings-{stage}",
            metadata=self._meta(f"settings-{stage}-{digest}"),
            immutable=True,
            data={SETTINGS_PATH.name: text},
            opts=self._child,
        ).metadata.name

    def _meta(self, name: pulumi.Input[str]) -> k8s.meta.v1.ObjectMetaArgs:
        return k8s.meta.v1.ObjectMetaArgs(name=name, namespace=self.namespace, labels=PART_OF)

    def _claim(self, settings: Workloads, platform: Platform) -> pulumi.Output[str]:
        """A claim named `data`, on the platform's volume, on a volume of a folder, or on a class of volumes."""
        source = platform.volume
        volume, storage_class = source.volume_name, source.storage_class
        # A volume that has a name is the claim's with all its space, whatever the claim asks for. It asks for what any
        # has: Kubernetes refuses to change the size of a claim that no class provisions, and file systems grow.
        size = "1Gi" if volume or source.host_path else source.capacity
        if not volume and source.host_path:
            storage_class = settings.namespace  # of no class: no other claim takes the volume
            volume = k8s.core.v1.PersistentVolume(
                f"{self._name}-volume",
                metadata=k8s.meta.v1.ObjectMetaArgs(name=f"{settings.namespace}-data", labels=PART_OF),
                spec=k8s.core.v1.PersistentVolumeSpecArgs(
                    capacity={"storage": source.capacity},
                    volume_mode="Filesystem",
                    access_modes=[source.access_mode],
                    persistent_volume_reclaim_policy="Retain",
                    storage_class_name=storage_class,
                    host_path=k8s.core.v1.HostPathVolumeSourceArgs(path=source.host_path, type="DirectoryOrCreate"),
                ),
                opts=self._child,
            ).metadata.name
        claim = k8s.core.v1.PersistentVolumeClaim(
            f"{self._name}-claim",
            metadata=self._meta("data"),
            spec=k8s.core.v1.PersistentVolumeClaimSpecArgs(
                access_modes=[source.access_mode],
                volume_mode="Filesystem",
                storage_class_name=storage_class,
                volume_name=volume,
                resources=k8s.core.v1.VolumeResourceRequirementsArgs(requests={"storage": size}),
            ),
            opts=pulumi.ResourceOptions.merge(self._child, self._kept),
        )
        return claim.metadata.name

    def _secret(self, name: str, key: str, value: pulumi.Input[str] | None) -> pulumi.Output[str] | None:
        if value is None:
            return None
        return k8s.core.v1.Secret(
            f"{self._name}-{name}",
            metadata=self._meta(name),
            string_data={key: pulumi.Output.secret(value)},
            opts=self._child,
        ).metadata.name

    def _queue(self, settings: Workloads, platform: Platform, name: str) -> pulumi.Output[str]:
        queue = k8s.apiextensions.CustomResource(
            f"{self._name}-queue",
            api_version="scheduling.volcano.sh/v1beta1",
            kind="Queue",
            metadata=k8s.meta.v1.ObjectMetaArgs(name=name, labels=PART_OF),
            spec={
                "weight": settings.queue.weight,
                "capability": settings.queue.capability or queue_capability(platform.workers),
                # Another queue's pods never push a running stage out.
                "reclaimable": False,
            },
            opts=self._child,
        )
        # Known in a preview, and yet after the queue: Volcano refuses a job whose queue is not there.
        return pulumi.Output.all(name, queue.urn).apply(lambda found: str(found[0]))


def queue_capability(workers: NodeShape) -> dict[str, str]:
    """The most that the queue may hold: the devices of all nodes that train; {} (no bound) on CPU nodes.

    CPU and memory, where they are not named, have no bound in Volcano, and core nodes have none that is known here.
    """
    return {name: str(count * workers.nodes) for name, count in ((NEURON, workers.neuron), (EFA, workers.efa)) if count}
