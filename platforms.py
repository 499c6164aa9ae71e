"""The two platforms as bills of materials: a cluster that the stack makes on AWS, and one that is there.

Each ends in a `Platform`, which is all that workloads know of it, and in what the stack tells of it (`exports`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pulumi
import pulumi_aws as aws
import pulumi_kubernetes as k8s

from infra.accelerators import AcceleratorGroup
from infra.addons import AddOns
from infra.autoscaler import Autoscaler
from infra.cluster import Cluster
from infra.devices import DevicePlugins
from infra.image import TrainingImage
from infra.ingress import LoadBalancerController
from infra.network import Network
from infra.nodes import CoreNodes
from infra.observability import NAMESPACE, Observability
from infra.operators import Operators
from infra.storage import SharedStorage
from infra.workload_identity import workload_identity
from stack_settings import AwsStack, ExistingStack
from workloads.base import SERVICE_ACCOUNT
from workloads.platform import Platform, Prometheus, VolumeSource


@dataclass(frozen=True)
class Made:
    """A platform, and what a user wants to know of it."""

    platform: Platform
    exports: Mapping[str, pulumi.Input[str]]


def aws_platform(settings: AwsStack, stack: str) -> Made:
    """From an AWS account to a cluster with Trainium."""
    tags = settings.all_tags(stack)
    provider = aws.Provider("aws", region=settings.region, default_tags=aws.ProviderDefaultTagsArgs(tags=tags))
    in_aws = pulumi.ResourceOptions(providers=[provider])

    # What AWS runs. Each line waits only for what it is handed: image and file system are made beside the cluster.
    image = TrainingImage("training", settings.image, in_aws)
    network = Network("network", settings.network, settings.region, settings.cluster.log_retention_days, in_aws)
    cluster = Cluster("cluster", settings.cluster, network, tags, in_aws)
    storage = SharedStorage("storage", settings.storage, network, cluster, in_aws)
    core = CoreNodes("core", settings.core_nodes, cluster, network, tags, in_aws)
    accelerators = [
        AcceleratorGroup(group.name, group, cluster, network, core.role, tags, settings.autoscaler, in_aws)
        for group in settings.accelerators
    ]

    # What runs in the cluster, on the core nodes.
    addons = AddOns("addons", cluster, core, tags, in_aws)
    pods_run = [core.node_group, addons.dns]
    devices = DevicePlugins("devices", settings, cluster, pods_run, in_aws)
    operators = Operators("operators", settings, cluster.k8s, pods_run, settings.workloads.gang, in_aws)
    autoscaler = Autoscaler("autoscaler", settings, cluster, network, core.role, accelerators, tags, pods_run, in_aws)
    after = [*addons.storage, devices, *operators.installed, *autoscaler.ready]
    after += [resource for group in accelerators for resource in group.ready]
    # EKS hands out an identity to pods that start after it is there.
    after.append(
        workload_identity("workloads", storage, cluster, settings.workloads.namespace, SERVICE_ACCOUNT, in_aws)
    )
    if settings.cluster.load_balancer_controller:
        after.append(LoadBalancerController("ingress", settings, network, cluster, pods_run, in_aws))

    exports: dict[str, pulumi.Input[str]] = {}
    prometheus = None
    if settings.observability != "none":
        pods_and_disks = [*pods_run, *addons.storage]
        observability = Observability("observability", settings, cluster, storage, pods_and_disks, in_aws)
        prometheus = Prometheus(NAMESPACE, observability.ready)
        exports["grafanaPassword"] = observability.password

    volume = VolumeSource(storage.capacity, volume_name=storage.volume_name, storage_class=storage.storage_class)
    platform = Platform(
        cluster.k8s,
        image.ref,
        volume,
        settings.worker_shape(),
        settings.core_shape(),
        after,
        region=settings.region,
        prometheus=prometheus,
    )
    connect = pulumi.Output.format("aws eks update-kubeconfig --region {} --name {}", settings.region, cluster.name)
    exports |= {"cluster": cluster.name, "connect": connect, "image": image.ref}
    return Made(platform, {**exports, "bucket": storage.bucket.bucket, "fileSystem": storage.file_system.id})


def existing_platform(settings: ExistingStack) -> Made:
    """A cluster of the kubeconfig with CPUs: operators, if they are to be installed, and nothing else."""
    provider = k8s.Provider(
        "cluster",
        context=settings.context,
        enable_server_side_apply=True,
        # Claim and namespace of an earlier time are still there where the claim is the data (workloads/base.py).
        upsert_existing_objects=not settings.volume.host_path,
    )
    operators = Operators("operators", settings, provider, [], settings.workloads.gang)
    one_node = settings.nodes.count == 1
    volume = VolumeSource(
        f"{settings.volume.size_gib}Gi",
        storage_class=settings.volume.storage_class,
        host_path=settings.volume.host_path,
        access_mode="ReadWriteOnce" if one_node else "ReadWriteMany",
    )
    image = pulumi.Output.from_input(settings.image.prebuilt)
    platform = Platform(
        provider, image, volume, settings.worker_shape(), settings.core_shape(), operators.installed, backend="cpu"
    )
    return Made(platform, {"image": image, **({"context": settings.context} if settings.context else {})})
