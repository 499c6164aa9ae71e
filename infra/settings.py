"""Every setting of the platform on AWS, refused in preview where it is wrong, before any resource is registered.

`stack_settings` reads them from Pulumi's config, together with those of the workloads. Keys are camelCase in
`Pulumi.<stack>.yaml` under the project's name (`llama-trainium:network`), snake_case here. The training settings
(`llama-trainium:training`) are those of `training.config`, the one schema of both readers.
docs/configuration.md is generated from these classes (`make docs`).
"""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic.alias_generators import to_camel

from infra import checks, run_settings, values
from infra.catalog import INSTANCE_TYPES, InstanceType
from training.config import Settings as TrainingSettings
from training.messages import Mistakes

PROJECT = "llama-trainium"

Endpoint = Literal["ecr", "sts", "ec2", "logs"]
LogType = Literal["api", "audit", "authenticator", "controllerManager", "scheduler"]
Nodes = Annotated[int, Field(le=1000)]  # more is a slip of the keyboard
Gib = Annotated[int, Field(le=16384)]  # the largest gp3 volume that every region has


class Section(BaseModel):
    """A group of settings: camelCase in the stack file, unknown keys are errors, values never change once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, alias_generator=to_camel, populate_by_name=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _meant(cls, value: object, info: ValidationInfo) -> object:
        return values.plain(value, cls.model_fields[info.field_name or ""])


class Network(Section):
    """The VPC."""

    cidr: values.Cidr = Field(IPv4Network("10.40.0.0/20"), description="nodes and load balancers; private, /16 to /22")
    pod_cidr: values.Cidr = Field(
        IPv4Network("100.64.0.0/16"),
        description="pods, /16 to /18: a secondary range of the VPC, never routed outside it",
    )
    zones: Annotated[list[str], values.Distinct] = Field(
        description="ids of two or more zones, such as usw2-az4: the same place in every account"
    )
    nat: Literal["single", "per-zone"] = Field("single", description="NAT gateways: one, or one per zone")
    endpoints: Annotated[list[Endpoint], values.Distinct] = Field(
        ["ecr", "sts", "ec2", "logs"], description="AWS services reached without the NAT gateway; S3 always is"
    )
    flow_logs: bool = Field(False, description="write the VPC's flow logs to CloudWatch")

    @model_validator(mode="after")
    def _ranges(self) -> Network:
        Mistakes.raise_any(checks.network(self))
        return self


class Cluster(Section):
    """The EKS cluster."""

    version: values.KubernetesVersion = Field("1.35", description="Kubernetes version")
    public_access_cidrs: Annotated[list[values.Cidr], values.Distinct] = Field(
        [], description="networks that may reach the API server; none: it is reached from inside the VPC only"
    )
    i_know_the_api_is_open_to_the_world: bool = Field(False, description="consent to 0.0.0.0/0 among publicAccessCidrs")
    admins: Annotated[list[values.Admin], values.Distinct] = Field(
        [], description="ARNs of IAM roles or users that administer the cluster, besides its maker"
    )
    logs: Annotated[list[LogType], values.Distinct] = Field(
        ["api", "audit", "authenticator"], description="control-plane logs sent to CloudWatch"
    )
    log_retention_days: values.LogRetention = Field(30, description="days that CloudWatch keeps logs")
    load_balancer_controller: bool = Field(
        False, description="install the AWS load balancer controller, which an ingress needs"
    )

    @model_validator(mode="after")
    def _access(self) -> Cluster:
        Mistakes.raise_any(checks.public_access(self))
        return self


class CoreNodes(Section):
    """The managed node group for system pods, head nodes and data preparation."""

    instance_type: values.X86Type = Field("m7i.2xlarge", description="x86 instance type")
    min: Nodes = Field(2, ge=1, description="fewest nodes: the autoscaler and DNS run on them too")
    desired: Nodes = Field(2, ge=0, description="nodes at the start; an autoscaler changes it later")
    max: Nodes = Field(4, ge=1, description="most nodes")
    disk_gib: Gib = Field(100, ge=20, description="root volume, GiB")
    cpu_limit: int = Field(
        128, ge=0, description="vCPUs that Karpenter may add beyond this group (autoscaler: karpenter)"
    )

    @model_validator(mode="after")
    def _bounds(self) -> CoreNodes:
        Mistakes.raise_any(checks.bounds(self))
        return self


class AcceleratorGroup(Section):
    """One group of Trainium nodes, all in one zone."""

    name: values.GroupName = Field(description="name of the group, part of its resources' names")
    instance_type: values.AcceleratorType = Field(description=" | ".join(INSTANCE_TYPES))
    zone: str = Field("", description="zone id [default: the first of network.zones]")
    min: Nodes = Field(0, ge=0, description="fewest nodes; 0 lets the group scale to zero")
    desired: Nodes = Field(
        0, ge=0, description="nodes at the start; cluster-autoscaler changes it later, Karpenter adds nodes beside it"
    )
    max: Nodes = Field(ge=1, description="most nodes")
    capacity: Literal["on-demand", "spot", "reservation", "capacity-block"] = Field(
        "on-demand", description="how the nodes are bought"
    )
    reservation_id: values.ReservationId | None = Field(
        None, description="id of the capacity reservation or capacity block, such as cr-0123456789abcdef0"
    )
    efa: bool | None = Field(None, description="attach EFA interfaces [default: true where the type has them]")
    efa_layout: Literal["efa", "efa-only"] = Field(
        "efa", description="interfaces beyond the first: efa (Neuron's layout) or efa-only (uses no address)"
    )
    placement_group: bool = Field(False, description="put the nodes into a cluster placement group")
    disk_gib: Gib = Field(200, ge=50, description="root volume, GiB")
    instance_store: bool = Field(True, description="make the type's NVMe disks one RAID0 for pods and images")

    @property
    def type(self) -> InstanceType:
        """What the instance type has."""
        return INSTANCE_TYPES[self.instance_type]

    @property
    def efa_interfaces(self) -> int:
        """EFA interfaces of one node; 0: it has none, or they are switched off."""
        return 0 if self.efa is False else self.type.efa_interfaces

    @model_validator(mode="after")
    def _fits_the_type(self) -> AcceleratorGroup:
        Mistakes.raise_any([*checks.bounds(self), *checks.accelerators(self)])
        return self


class Storage(Section):
    """FSx for Lustre, and the S3 bucket behind it."""

    size_gib: int = Field(1200, description="1200, 2400, or more in steps of 2400")
    throughput: values.Throughput = Field(125, description="MB/s per TiB: 125 | 250 | 500 | 1000")
    zone: str = Field("", description="zone id [default: that of the group that trains]")
    compression: Literal["LZ4", "NONE"] = Field("LZ4", description="compression of the data on disk")
    retain_on_delete: bool = Field(
        True,
        description="keep the bucket, to which all data is exported, when the stack is destroyed; the file system goes",
    )

    @field_validator("size_gib")
    @classmethod
    def _offered(cls, value: int) -> int:
        if value < 1200 or (value != 1200 and value % 2400):
            raise ValueError("expected 1200, 2400 or a larger multiple of 2400, which FSx offers")
        return value


class Image(Section):
    """The training image."""

    prebuilt: values.ByDigest | None = Field(
        None, description="reference by digest (NAME@sha256:...) of an image to use instead of building one"
    )
    context: str | None = Field(None, description="folder to build from [default: the repository]")
    base: values.ByTag | None = Field(None, description="base image [default: the pinned Neuron image]")

    @model_validator(mode="after")
    def _built_or_not(self) -> Image:
        Mistakes.raise_any(checks.image(self))
        return self


class Charts(Section):
    """Where Helm charts come from."""

    mirror: values.Mirror | None = Field(
        None,
        description="one chart repository (https:// or oci://) to use for all charts; one on https:// also has "
        "mpi-operator-VERSION.yaml, the definition of MPIJob",
    )


class Neuron(Section):
    """Neuron's parts in the cluster beside the device plugin."""

    node_problem_detector: bool = Field(True, description="watch the devices for hardware errors")
    node_recovery: bool = Field(False, description="replace a node whose devices fail (needs nodeProblemDetector)")

    @model_validator(mode="after")
    def _recovery_needs_the_detector(self) -> Neuron:
        if self.node_recovery and not self.node_problem_detector:
            raise Mistakes(["nodeRecovery: true, expected nodeProblemDetector true with it, which it acts on"])
        return self


class Training(Section):
    """What is trained: a preset of training/presets, changes to it, and the nodes it runs on."""

    preset: str = Field("llama2-7b", description="name of a preset in training/presets")
    group: str = Field("", description="accelerator group that trains [default: the first]")
    nodes: int = Field(0, ge=0, description="nodes that train [default: the group's max]")
    settings: dict[str, dict[str, Any]] = Field(
        {}, description="settings on top of the preset, as in a file for --config: section, key, value"
    )


class Settings(Section):
    """All settings of a stack."""

    region: values.Region = Field(description="AWS region")
    cost_centre: values.TagValue = Field(description="who pays: the tag cost-centre of every resource")
    # AWS lets a resource have 50 tags: EKS, Karpenter and the CSI drivers add their own.
    tags: dict[str, values.TagValue] = Field({}, max_length=40, description="more tags of every resource, at most 40")
    network: Network
    cluster: Cluster = Cluster()
    core_nodes: CoreNodes = CoreNodes()
    autoscaler: Literal["karpenter", "cluster-autoscaler", "none"] = Field(
        "cluster-autoscaler", description="what adds and removes nodes"
    )
    accelerators: list[AcceleratorGroup] = Field(
        min_length=1, description="the Trainium groups, the one that trains first"
    )
    storage: Storage = Storage()
    image: Image = Image()
    operators: Literal["install", "present"] = Field(
        "install", description="present: KubeRay, Volcano and the MPI operator are in the cluster already"
    )
    charts: Charts = Charts()
    neuron: Neuron = Neuron()
    observability: Literal["none", "basic", "full"] = Field(
        "basic",
        description="basic: Prometheus, Grafana, dashboards, alerts; full: also a disk for Prometheus, and the pods' "
        "logs in CloudWatch",
    )
    training: Training = Training()
    hugging_face_token: values.Token | None = Field(
        None, description="a Pulumi secret: reads gated tokenizers and data, such as meta-llama/..."
    )

    @field_validator("tags")
    @classmethod
    def _tags_that_aws_takes(cls, value: dict[str, str]) -> dict[str, str]:
        Mistakes.raise_any(checks.tags(value))
        return value

    @property
    def training_group(self) -> AcceleratorGroup:
        """The group that trains."""
        return next((group for group in self.accelerators if group.name == self.training.group), self.accelerators[0])

    def all_tags(self, stack: str) -> dict[str, str]:
        """The tags of every AWS resource."""
        return {"project": PROJECT, "stack": stack, "cost-centre": self.cost_centre, **self.tags}

    def training_settings(self) -> TrainingSettings:
        """The settings of the run: preset, changes, one worker per core of its nodes. Raises `UserError`."""
        workers = self.training.nodes * self.training_group.type.cores
        return run_settings.run_settings(self.training, workers, "neuron")

    def with_derived(self) -> Settings:
        """The same settings with nothing left empty that another setting answers: zones, EFA, who trains."""
        groups = [
            group.model_copy(update={"zone": group.zone or self.network.zones[0], "efa": group.efa_interfaces > 0})
            for group in self.accelerators
        ]
        trains = next((group for group in groups if group.name == self.training_group.name), groups[0])
        training = self.training.model_copy(
            update={"group": self.training.group or trains.name, "nodes": self.training.nodes or trains.max}
        )
        storage = self.storage.model_copy(update={"zone": self.storage.zone or trains.zone})
        return self.model_copy(update={"accelerators": groups, "training": training, "storage": storage})
