"""Every setting of a stack, read once from Pulumi's config and refused before any resource is registered.

    settings = read_stack(pulumi.Config(), pulumi.get_stack())

The platform's are those of `infra.settings` (`platform: aws`) or of a cluster that is there (`platform: existing`), the
workloads' those of `workloads.settings`, the run's those of `training.config`. The rooms do not know one another: what
spans them, nodes above all, is said here. docs/configuration.md is generated from these classes (`make docs`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import pulumi
from pydantic import AfterValidator, Field, model_validator

from infra import checks, run_settings, stack_config, values
from infra.catalog import GROUP_LABEL, NEURON_KEY, cpu_node
from infra.settings import Charts, Section, Settings
from training.config import Settings as TrainingSettings
from training.messages import Mistakes, matching, shown
from training.plan import Place, Plan
from workloads import checks as workload_checks
from workloads import kubeconfig
from workloads.platform import VOLUME_PATH, NodeShape
from workloads.settings import Pod, Resources, Workloads

SECRETS = ("huggingFaceToken", "tensorboardPassword", "dashboardPassword", "redisPassword")
"""Keys whose values are Pulumi secrets, and the only ones: a secret anywhere else would end in plain state."""

FREE_SHARE = 1 / 8
"""The part of a node's CPUs and memory that no pod of ours asks for: the kubelet and the kernel keep some, the agents
of network, storage and devices run on every node, and for EFA the AMI sets huge pages aside. An autoscaler that starts
a node from nothing believes that pods can have all of it, so what a pod may ask for is decided here, with room to
spare: a pod that fits only the believed node would have nodes started for it, one after the other, and run on none."""


class Runs(Section):
    """What stands in a stack on either platform."""

    platform: Literal["aws", "existing"] = Field(
        "aws", description="aws: the stack makes the cluster; existing: one of the kubeconfig, with CPUs"
    )
    workloads: Workloads = Workloads()
    tensorboard_password: values.Token | None = Field(None, description="a Pulumi secret: opens TensorBoard")
    dashboard_password: values.Token | None = Field(
        None, description="a Pulumi secret: Ray's token, which its dashboard asks for [default: one per cluster]"
    )
    redis_password: values.Token | None = Field(
        None, description="a Pulumi secret: the password of the Redis at workloads.redisAddress"
    )

    def secret(self, key: str) -> pulumi.Output[str] | None:
        """The value of the secret `key` (snake_case) as Pulumi keeps it: encrypted in the state, never shown."""
        value = getattr(self, key)
        return None if value is None else pulumi.Output.secret(value.get_secret_value())


class AwsStack(Runs, Settings):
    """A stack that makes its cluster on AWS."""

    def core_shape(self) -> NodeShape:
        """A core node. Heads and preparation need no selector: every other node that pods find has a taint."""
        vcpus, memory_gib = cpu_node(self.core_nodes.instance_type)
        nodes = self.core_nodes.max
        if self.autoscaler == "karpenter":
            nodes += self.core_nodes.cpu_limit // vcpus
        return NodeShape("core", nodes, *usable(vcpus, memory_gib), instance_type=self.core_nodes.instance_type)

    def worker_shape(self) -> NodeShape:
        """A node of the group that trains."""
        group = self.training_group
        return NodeShape(
            group.name,
            group.max,
            *usable(group.type.vcpus, group.type.memory_gib),
            neuron=group.type.devices,
            neuron_cores=group.type.cores,
            efa=group.efa_interfaces,
            node_selector={GROUP_LABEL: group.name},
            # The node's other taint goes away by itself once a volume can be mounted there.
            tolerations=[{"key": NEURON_KEY, "operator": "Exists", "effect": "NoSchedule"}],
            instance_type=group.instance_type,
        )

    def for_stack(self, stack: str) -> AwsStack:
        """The same settings with nothing left empty that another setting answers."""
        derived = self.with_derived()
        assert isinstance(derived, AwsStack)
        has_password = self.tensorboard_password is not None
        workloads = self.workloads.with_derived(stack, derived.training.nodes, has_password)
        return derived.model_copy(update={"workloads": workloads})


class ExistingNodes(Section):
    """The nodes of a cluster that is there."""

    count: Annotated[int, Field(le=1000)] = Field(1, ge=1, description="nodes that can run workers")
    vcpus: Annotated[int, Field(le=1024)] = Field(2, ge=1, description="CPUs of a node that pods may ask for")
    memory_gib: Annotated[int, Field(le=32768)] = Field(4, ge=1, description="memory of a node for pods, GiB")


class Volume(Section):
    """The shared volume on a cluster that is there."""

    host_path: Annotated[str, AfterValidator(matching("/.+", "an absolute path"))] | None = Field(
        None, description="a folder of the node, for a cluster of one; kept when the stack is destroyed"
    )
    storage_class: str | None = Field(None, description="a StorageClass [default: the cluster's default class]")
    size_gib: Annotated[int, Field(le=1_000_000)] = Field(10, ge=1, description="size of the claim, GiB")

    @model_validator(mode="after")
    def _one_of_them(self) -> Volume:
        if self.host_path and self.storage_class:
            raise Mistakes([f"storageClass: {shown(self.storage_class)}, expected none with volume.hostPath"])
        return self


class LoadedImage(Section):
    """The training image on a cluster that is there."""

    prebuilt: values.ByTag = Field(
        description="NAME:TAG of an image that its nodes have or can pull, never latest; or NAME@sha256:..."
    )


class ExistingTraining(Section):
    """What is trained on a cluster that is there, and on how much of it."""

    preset: str = Field("tiny", description="name of a preset in training/presets")
    nodes: Annotated[int, Field(le=1000)] = Field(1, ge=1, description="nodes that train, a pod on each")
    workers_per_node: Annotated[int, Field(le=1024)] = Field(1, ge=1, description="processes of each pod")
    settings: dict[str, dict[str, Any]] = Field(
        {}, description="settings on top of the preset, as in a file for --config: section, key, value"
    )


class ExistingStack(Runs):
    """A stack on a cluster that is there: no resource on AWS, and the CPUs of its nodes in place of accelerators."""

    context: str | None = Field(None, description="context of the kubeconfig [default: the current one]")
    nodes: ExistingNodes = ExistingNodes()
    volume: Volume = Volume()
    image: LoadedImage
    operators: Literal["install", "present"] = Field(
        "install", description="present: KubeRay, Volcano and the MPI operator are in the cluster already"
    )
    charts: Charts = Charts()
    training: ExistingTraining = ExistingTraining()
    hugging_face_token: values.Token | None = Field(
        None, description="a Pulumi secret: reads gated tokenizers and data, such as meta-llama/..."
    )

    @property
    def workers(self) -> int:
        """Processes that train."""
        return self.training.nodes * self.training.workers_per_node

    def training_settings(self) -> TrainingSettings:
        """The settings of the run: preset, changes, the processes of its nodes. Raises `UserError`."""
        return run_settings.run_settings(self.training, self.workers, "cpu")

    def core_shape(self) -> NodeShape:
        """A node: all are alike."""
        return NodeShape("nodes", self.nodes.count, self.nodes.vcpus, self.nodes.memory_gib)

    def worker_shape(self) -> NodeShape:
        """A node, on which a head may be too."""
        return self.core_shape()

    def for_stack(self, stack: str) -> ExistingStack:
        """The same settings with nothing left empty that another setting answers."""
        workloads = self.workloads.with_derived(stack, self.training.nodes, self.tensorboard_password is not None)
        asked = workloads.resources.worker
        half = Pod(cpu=asked.cpu or self.nodes.vcpus / 2, memory_gib=asked.memory_gib or self.nodes.memory_gib / 2)
        resources: Resources = workloads.resources.model_copy(update={"worker": half})
        return self.model_copy(update={"workloads": workloads.model_copy(update={"resources": resources})})


def read_stack(config: pulumi.Config, stack: str) -> AwsStack | ExistingStack:
    """The settings of the stack. Raises `UserError` with one line per mistake; none shows the value of a secret."""
    if config.get("platform") == "existing":
        return stack_config.read_settings(
            config, ExistingStack, SECRETS, checks.stack_name(stack), lambda found: found.for_stack(stack), _on_existing
        )
    return stack_config.read_settings(
        config, AwsStack, SECRETS, checks.stack_name(stack), lambda found: found.for_stack(stack), _on_aws
    )


def usable(vcpus: int, memory_gib: int) -> tuple[int, int]:
    """What pods may ask for of a machine with so much: whole vCPUs and GiB."""
    return max(1, int(vcpus * (1 - FREE_SHARE))), max(1, int(memory_gib * (1 - FREE_SHARE)))


def _on_aws(settings: AwsStack) -> Iterator[str]:
    platform = list(checks.together(settings))
    yield from platform
    if platform:  # what is said below is about a platform that can be
        return
    yield from _workloads(settings)
    yield from _folders(settings)
    yield from _room(settings)
    for key, page in (("tensorboard", settings.workloads.tensorboard), ("dashboard", settings.workloads.dashboard)):
        if page.host and not settings.cluster.load_balancer_controller:
            wanted = "none, or cluster.loadBalancerController: true, which an ingress needs"
            yield f"workloads.{key}.host: {page.host}, expected {wanted}"
        region = (page.certificate_arn or "").split(":")[3:4]
        if region and region != [settings.region]:
            yield f"workloads.{key}.certificateArn: {page.certificate_arn}, expected a certificate in {settings.region}"


def _room(settings: AwsStack) -> Iterator[str]:
    """A run that the cores' memory or the file system has no room for, by `python -m training plan`'s formulas."""
    if not {"precompile", "train"} & {*settings.workloads.stages}:
        return
    group = settings.training_group
    if not group.instance_type.startswith("trn1"):
        wanted = "a group of trn1 or trn1n: the image's SDK does not train on others (workloads.stages without them)"
        yield f"training.group: {group.name}, which is of {group.instance_type}, expected {wanted}"
        return
    plan = Plan(settings.training_settings(), Place(storage_gib=settings.storage.size_gib))
    if plan.memory_problem:
        dials = "parallel.tensor_parallel_size, train.micro_batch_size, train.activation_checkpointing"
        yield f"training.settings: {plan.memory_problem}, by {dials} (python -m training plan)"
    if plan.storage_problem:
        yield f"training.settings.{plan.storage_problem} (storage.sizeGib)"


def _on_existing(settings: ExistingStack) -> Iterator[str]:
    if settings.training.nodes > settings.nodes.count:
        yield f"training.nodes: {settings.training.nodes}, expected at most nodes.count ({settings.nodes.count})"
    else:
        yield from _run(settings)
        yield from _workloads(settings)
    if settings.volume.host_path and settings.nodes.count > 1:
        yield f"volume.hostPath: {settings.volume.host_path}, expected none with more than one node: each has its own"
    for key, page in (("tensorboard", settings.workloads.tensorboard), ("dashboard", settings.workloads.dashboard)):
        if page.host:
            wanted = f"none with platform: existing, where `make {key}` opens it"
            yield f"workloads.{key}.host: {page.host}, expected {wanted}"
    if line := kubeconfig.unreachable(settings.context):
        yield line


def _run(settings: ExistingStack) -> Iterator[str]:
    own = "training.nodes x training.workersPerNode"
    has_token = settings.hugging_face_token is not None
    if found := list(run_settings.mistakes(settings.training, settings.workers, "cpu", own, has_token)):
        yield from found
        return
    if (size := settings.training_settings().parallel.tensor_parallel_size) > 1:
        key = "training.settings.parallel.tensor_parallel_size"
        yield f"{key}: {size}, expected 1 with platform: existing: CPUs do not share layers"
    yield from _folders(settings)


def _workloads(settings: AwsStack | ExistingStack) -> Iterator[str]:
    """The same on both platforms: nodes, and the passwords of what is opened."""
    found = settings.workloads
    shapes = settings.core_shape(), settings.worker_shape()
    for line in workload_checks.mistakes(found, settings.training.nodes, *shapes):
        yield f"workloads.{line}"
    secret = "expected a secret (pulumi config set --secret {})"
    if (found.tensorboard.enabled or found.tensorboard.host) and settings.tensorboard_password is None:
        yield f"tensorboardPassword: missing, {secret.format('tensorboardPassword')}: workloads.tensorboard is enabled"
    if found.tensorboard.host and found.tensorboard.enabled is False:
        yield f"workloads.tensorboard.host: {found.tensorboard.host}, expected none with tensorboard.enabled: false"
    if found.dashboard.host and settings.dashboard_password is None:
        yield f"dashboardPassword: missing, {secret.format('dashboardPassword')}: workloads.dashboard.host is set"
    if settings.redis_password is not None and not found.redis_address:
        yield "redisPassword: given, expected none without workloads.redisAddress"
    if found.tensorboard.host and found.tensorboard.host == found.dashboard.host:
        yield f"workloads.dashboard.host: {found.dashboard.host}, expected another than that of workloads.tensorboard"


def _folders(settings: AwsStack | ExistingStack) -> Iterator[str]:
    """Folders of the run that pods do not have: whatever they write there is gone with them."""
    run = settings.training_settings()
    folders = {
        "run.dir": run.run.dir,
        "run.cache_dir": run.run.cache_dir,
        "data.output": run.data.output,
        "model.init_from": run.model.init_from,
    }
    for key, folder in folders.items():
        if folder is None:
            continue
        place = os.path.normpath(VOLUME_PATH / folder)
        if not place.startswith(f"{VOLUME_PATH}/"):
            wanted = f"a folder within {VOLUME_PATH}, where pods have the volume, or one relative to it"
            yield f"training.settings.{key}: {shown(folder)}, expected {wanted}"
