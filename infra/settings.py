"""Every setting of a stack, read once from Pulumi's config and refused before any resource is registered.

    settings = read_settings(pulumi.Config(), pulumi.get_stack())

Keys are camelCase in `Pulumi.<stack>.yaml` under the project's name (`llama-trainium:network`), snake_case here. The
training settings (`llama-trainium:training`) are those of `training.config`, the one schema of both readers.
docs/configuration.md is generated from these classes (`make docs`).
"""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

PROJECT = "llama-trainium"

Endpoint = Literal["ecr", "sts", "ec2", "logs"]
LogType = Literal["api", "audit", "authenticator", "controllerManager", "scheduler"]


class Section(BaseModel):
    """A group of settings: camelCase in the stack file, unknown keys are errors, values never change once read."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, alias_generator=to_camel, populate_by_name=True
    )


class Network(Section):
    """The VPC."""

    cidr: IPv4Network = Field(IPv4Network("10.40.0.0/20"), description="nodes and load balancers; private, /16 to /22")
    pod_cidr: IPv4Network = Field(
        IPv4Network("100.64.0.0/16"), description="pods: a secondary range of the VPC, never routed outside it"
    )
    zones: list[str] = Field(description="ids of two or more zones, such as usw2-az4: the same place in every account")
    nat: Literal["single", "per-zone"] = Field("single", description="NAT gateways: one, or one per zone")
    endpoints: list[Endpoint] = Field(
        ["ecr", "sts", "ec2", "logs"], description="AWS services reached without the NAT gateway; S3 always is"
    )
    flow_logs: bool = Field(False, description="write the VPC's flow logs to CloudWatch")


class Cluster(Section):
    """The EKS cluster."""

    version: str = Field("1.35", description="Kubernetes version")
    public_access_cidrs: list[IPv4Network] = Field(
        [], description="networks that may reach the API server; none: it is reached from inside the VPC only"
    )
    i_know_the_api_is_open_to_the_world: bool = Field(
        False, description="consent to 0.0.0.0/0 among publicAccessCidrs"
    )
    admins: list[str] = Field([], description="ARNs of IAM roles or users that administer the cluster, besides its maker")
    logs: list[LogType] = Field(["api", "audit", "authenticator"], description="control-plane logs sent to CloudWatch")
    log_retention_days: int = Field(30, description="days that CloudWatch keeps logs")
    load_balancer_controller: bool = Field(
        False, description="install the AWS load balancer controller, which an ingress needs"
    )


class CoreNodes(Section):
    """The managed node group for system pods, head nodes and data preparation."""

    instance_type: str = Field("m7i.2xlarge", description="x86 instance type")
    min: int = Field(2, ge=0, description="fewest nodes")
    desired: int = Field(2, ge=0, description="nodes at the start; an autoscaler changes it later")
    max: int = Field(4, ge=1, description="most nodes")
    disk_gib: int = Field(100, ge=20, description="root volume, GiB")
    cpu_limit: int = Field(
        128, ge=0, description="vCPUs that Karpenter may add beyond this group (autoscaler: karpenter)"
    )


class AcceleratorGroup(Section):
    """One group of Trainium nodes, all in one zone."""

    name: str = Field(description="name of the group, part of its resources' names")
    instance_type: str = Field(description="trn1.2xlarge | trn1.32xlarge | trn1n.32xlarge | trn2.48xlarge")
    zone: str | None = Field(None, description="zone id [default: the first of network.zones]")
    min: int = Field(0, ge=0, description="fewest nodes; 0 lets the group scale to zero")
    desired: int = Field(0, ge=0, description="nodes at the start; an autoscaler changes it later")
    max: int = Field(ge=1, description="most nodes")
    capacity: Literal["on-demand", "spot", "reservation", "capacity-block"] = Field(
        "on-demand", description="how the nodes are bought"
    )
    reservation_id: str | None = Field(
        None, description="id of the capacity reservation or capacity block, such as cr-0123456789abcdef0"
    )
    efa: bool | None = Field(None, description="attach EFA interfaces [default: true where the type has them]")
    efa_layout: Literal["efa", "efa-only"] = Field(
        "efa", description="interfaces beyond the first: efa (Neuron's layout) or efa-only (uses no address)"
    )
    placement_group: bool = Field(False, description="put the nodes into a cluster placement group")
    disk_gib: int = Field(200, ge=50, description="root volume, GiB")
    instance_store: bool = Field(True, description="make the type's NVMe disks one RAID0 for pods and images")


class Storage(Section):
    """FSx for Lustre, and the S3 bucket behind it."""

    size_gib: int = Field(1200, description="1200, 2400, or more in steps of 2400")
    throughput: Literal[125, 250, 500, 1000] = Field(125, description="MB/s per TiB")
    zone: str | None = Field(None, description="zone id [default: the accelerators' zone]")
    compression: Literal["LZ4", "NONE"] = Field("LZ4", description="compression of the data on disk")
    retain_on_delete: bool = Field(
        True, description="keep the file system and the bucket with their data when the stack is destroyed"
    )


class Image(Section):
    """The training image."""

    prebuilt: str | None = Field(
        None, description="reference by digest (NAME@sha256:...) of an image to use instead of building one"
    )
    context: str | None = Field(None, description="folder to build from [default: the repository]")
    base: str | None = Field(None, description="base image [default: the pinned Neuron image]")


class Charts(Section):
    """Where Helm charts come from."""

    mirror: str | None = Field(None, description="one chart repository (https:// or oci://) to use for all charts")


class Neuron(Section):
    """Neuron's parts in the cluster beside the device plugin."""

    node_problem_detector: bool = Field(True, description="watch the devices for hardware errors")
    node_recovery: bool = Field(False, description="replace a node whose devices fail (needs nodeProblemDetector)")


class Training(Section):
    """What is trained: a preset of training/presets, changes to it, and the nodes it runs on."""

    preset: str = Field("llama2-7b", description="name of a preset in training/presets")
    group: str | None = Field(None, description="accelerator group that trains [default: the first]")
    nodes: int | None = Field(None, ge=1, description="nodes that train [default: the group's max]")
    settings: dict[str, dict[str, Any]] = Field(
        {}, description="settings on top of the preset, as in a file for --config: section, key, value"
    )


class Settings(Section):
    """All settings of a stack."""

    region: str = Field(description="AWS region")
    cost_centre: str = Field(description="who pays: the tag cost-centre of every resource")
    tags: dict[str, str] = Field({}, description="more tags of every resource")
    network: Network
    cluster: Cluster = Cluster()
    core_nodes: CoreNodes = CoreNodes()
    autoscaler: Literal["karpenter", "cluster-autoscaler", "none"] = Field(
        "cluster-autoscaler", description="what adds and removes nodes"
    )
    accelerators: list[AcceleratorGroup] = Field(description="the Trainium groups, the one that trains first")
    storage: Storage = Storage()
    image: Image = Image()
    operators: Literal["install", "present"] = Field(
        "install", description="present: KubeRay, Volcano and the MPI operator are in the cluster already"
    )
    charts: Charts = Charts()
    neuron: Neuron = Neuron()
    training: Training = Training()
