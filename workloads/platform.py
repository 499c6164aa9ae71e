"""What workloads are handed: a cluster, its nodes, an image, a volume. Who made them (infra/, a laptop) fills it in.

Platform(provider, image=..., volume=VolumeSource(host_path="/srv/llama"), workers=NodeShape(...), core=NodeShape(...))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pulumi
import pulumi_kubernetes as k8s

from training.config import Settings as TrainingSettings

VOLUME_PATH = Path("/data")
"""Where every pod has the shared volume: runs are below it, and relative paths of settings are meant from it."""

SETTINGS_PATH = Path("/etc/llama-trainium/settings.yaml")
"""Where the pods of a stage have its settings, from a ConfigMap."""

USER = 10001
"""User and group of the image's processes (training/Dockerfile)."""


@dataclass(frozen=True)
class NodeShape:
    """One node of a group, as far as pods can use it."""

    name: str
    nodes: int
    """Nodes that there can be at most."""
    vcpus: int
    """What one pod may ask for where it has the node to itself: less than the machine has, by what the kubelet keeps
    and the pods that run on every node take."""
    memory_gib: int
    """As `vcpus`."""
    neuron: int = 0
    """Devices (`aws.amazon.com/neuron`); 0: a CPU node."""
    neuron_cores: int = 0
    """NeuronCores: workers of one node."""
    efa: int = 0
    """EFA interfaces (`vpc.amazonaws.com/efa`)."""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: Sequence[Mapping[str, str]] = ()
    """Kubernetes' own form: {"key": ..., "operator": "Exists", "effect": ...}."""
    instance_type: str = ""
    """EC2's; empty where there is none."""


@dataclass(frozen=True)
class VolumeSource:
    """Where the shared volume is, in one of three ways; the first that is given counts.

    volume_name: a PersistentVolume that exists, with the storage class and the capacity that it says.
    host_path: a folder of the nodes, which workloads make a PersistentVolume of: for clusters of one node.
    Neither: a claim of `capacity` on the class `storage_class`; None is the cluster's default class.
    """

    capacity: str
    volume_name: pulumi.Output[str] | None = None
    storage_class: str | None = None
    host_path: str | None = None
    access_mode: Literal["ReadWriteMany", "ReadWriteOnce"] = "ReadWriteMany"
    """ReadWriteOnce is for one node: the classes of small clusters offer nothing else."""


@dataclass(frozen=True)
class Prometheus:
    """A Prometheus, with its operator, that scrapes the pods of every namespace which a PodMonitor names."""

    namespace: str
    """Where its pods are: network policies let them in."""
    after: Sequence[pulumi.Resource] = ()
    """What brings the kind PodMonitor."""


@dataclass(frozen=True)
class Platform:
    """A cluster that can run the stages."""

    provider: k8s.Provider
    image: pulumi.Output[str]
    """By digest on AWS; a local cluster may have one that is loaded by name."""
    volume: VolumeSource
    workers: NodeShape
    """The group that compiles and trains."""
    core: NodeShape
    """Nodes of heads, launchers and data preparation."""
    after: Sequence[pulumi.Resource] = ()
    """What a pod needs, and what must outlive it: operators, storage drivers, autoscaler, nodes."""
    backend: Literal["neuron", "cpu"] = "neuron"
    region: str | None = None
    """AWS region; None where there is none."""
    prometheus: Prometheus | None = None
    """Who asks the stages how they are; None: nobody."""


def on_volume(settings: TrainingSettings) -> TrainingSettings:
    """The settings as pods have them: folders are on the volume. An absolute one stays what it is."""
    run = settings.run.model_copy(
        update={"dir": VOLUME_PATH / settings.run.dir, "cache_dir": VOLUME_PATH / settings.cache_dir}
    )
    data = settings.data.model_copy(update={"output": VOLUME_PATH / settings.data_dir})
    init_from = settings.model.init_from and VOLUME_PATH / settings.model.init_from
    model = settings.model.model_copy(update={"init_from": init_from})
    return settings.model_copy(update={"run": run, "data": data, "model": model})
