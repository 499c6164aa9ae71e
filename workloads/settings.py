"""The settings `llama-trainium:workloads` of a stack: which stages run, by what, how long, and what stands beside them.

What no single one of these can tell (nodes, requests, a queue) is in workloads/checks.py.
docs/configuration.md is generated from these classes (`make docs`).
"""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from training import config
from training.messages import Mistakes, expected_one_of, shown
from workloads import values

StageName = Literal["prepare", "precompile", "train"]
STAGES: tuple[StageName, ...] = ("prepare", "precompile", "train")
"""In the order in which they run."""

NEURON = "aws.amazon.com/neuron"
EFA = "vpc.amazonaws.com/efa"
CAPABILITIES = ("cpu", "memory", NEURON, EFA)
"""Kubernetes' names of what a queue counts."""


class Section(config.Section):
    """A group of settings: camelCase in the stack file, unknown keys are errors, values never change once read."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True)


class StageSettings(Section):
    """A stage and its limits. Seconds count from the moment the job is there, waiting for nodes included."""

    active_deadline_seconds: values.Seconds | None = Field(
        None, description="longest time for the stage [default: none]"
    )
    pre_running_deadline_seconds: values.Seconds = Field(
        3600, description="longest time until it runs: nodes that start, images that are pulled"
    )
    backoff_limit: values.Retries = Field(0, description="how often it is tried again, going on from what is done")

    @model_validator(mode="after")
    def _deadlines(self) -> StageSettings:
        active, waiting = self.active_deadline_seconds, self.pre_running_deadline_seconds
        if active is not None and active < waiting:
            raise Mistakes(
                [
                    f"activeDeadlineSeconds: {active}, expected at least preRunningDeadlineSeconds ({waiting}), "
                    "which it includes"
                ]
            )
        return self


class Prepare(StageSettings):
    """The stage prepare: text becomes tokens, on a core node."""

    active_deadline_seconds: values.Seconds | None = Field(86_400, description="longest time for the stage")


class Precompile(StageSettings):
    """The stage precompile: compiled code into the cache, on all nodes that train."""

    active_deadline_seconds: values.Seconds | None = Field(21_600, description="longest time for the stage")


class Train(StageSettings):
    """The stage train, on all nodes that train."""

    wait: Literal["running", "finished"] = Field(
        "running", description="what `pulumi up` waits for: that training runs, or that it has finished"
    )


class Pod(Section):
    """What a pod asks for."""

    cpu: values.Cpus | None = Field(None, description="CPUs")
    memory_gib: values.Gib | None = Field(None, description="memory, GiB")


class Resources(Section):
    """What pods ask for, where the defaults do not fit: those are for nodes that have little else to do."""

    head: Pod = Field(Pod(), description="Ray's head or MPI's launcher [default: a quarter of a core node]")
    prepare: Pod = Field(Pod(), description="data preparation [default: half of a core node]")
    worker: Pod = Field(Pod(), description="compilation and training [default: a whole node]")


class Queue(Section):
    """The Volcano queue of the stages."""

    name: values.Name | None = Field(None, description="name of the queue [default: workloads.name]")
    weight: int = Field(
        1, ge=1, le=10_000, description="share of the cluster among queues that want more than there is"
    )
    capability: dict[str, values.Quantity] = Field(
        {},
        description="most that the queue's pods may ask for, such as aws.amazon.com/neuron: 32 [default: all nodes]",
    )

    @field_validator("name")
    @classmethod
    def _not_volcanos(cls, value: str | None) -> str | None:
        if value in ("default", "root"):
            raise ValueError("expected another: Volcano has queues of this name itself")
        return value

    @field_validator("capability")
    @classmethod
    def _known(cls, value: dict[str, str]) -> dict[str, str]:
        unknown = [key for key in value if key not in CAPABILITIES]
        Mistakes.raise_any(f"{shown(key)}: unknown resource{expected_one_of(key, CAPABILITIES)}" for key in unknown)
        return value

    @field_validator("capability", mode="before")
    @classmethod
    def _numbers_are_quantities(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {
            key: str(amount) if isinstance(amount, int | float) and not isinstance(amount, bool) else amount
            for key, amount in value.items()
        }


class RayCluster(Section):
    """A RayCluster that stays, scaled by Ray: for interactive work, and with `gang: false` for the stages."""

    enabled: bool = Field(False, description="make it")
    name: values.Name = Field("interactive", description="its name")
    min_nodes: values.Nodes = Field(0, description="fewest accelerator nodes it holds, idle or not")
    max_nodes: values.Nodes = Field(0, description="most accelerator nodes [default: training.nodes]")

    @model_validator(mode="after")
    def _bounds(self) -> RayCluster:
        if self.max_nodes and self.min_nodes > self.max_nodes:
            raise Mistakes([f"minNodes: {self.min_nodes}, expected at most maxNodes ({self.max_nodes})"])
        return self


class Web(Section):
    """A page that people look at."""

    host: values.Host | None = Field(
        None, description="host name of an HTTPS ingress [default: none, by port-forward only]"
    )
    certificate_arn: values.CertificateArn | None = Field(None, description="the certificate of host")

    @model_validator(mode="after")
    def _both_or_none(self) -> Web:
        if self.host and not self.certificate_arn:
            raise Mistakes([f"certificateArn: none, expected that of a certificate for {self.host}"])
        if self.certificate_arn and not self.host:
            raise Mistakes(["host: none, expected a host name for certificateArn"])
        return self


class TensorBoard(Web):
    """TensorBoard on the run's logs, behind the password of `tensorboardPassword`."""

    enabled: bool | None = Field(None, description="run it [default: true with a tensorboardPassword]")


class Dashboard(Web):
    """Ray's dashboard, which asks for `dashboardPassword`."""


class Workloads(Section):
    """What runs on the platform."""

    name: values.JobPrefix | None = Field(None, description="what the names of jobs begin with [default: the stack]")
    namespace: values.Name = Field("llama-trainium", description="Kubernetes namespace, made by the stack")
    engine: Literal["ray", "mpi"] = Field("ray", description="what compiles and trains: RayJobs or MPIJobs")
    gang: bool = Field(
        True,
        description="true: a cluster per stage, all pods placed together or none; false: rayCluster for all (KubeRay "
        "then runs without a batch scheduler, for every job in the cluster)",
    )
    stages: list[StageName] = Field(list(STAGES), description="the stages to run")
    prepare: Prepare = Prepare()
    precompile: Precompile = Precompile()
    train: Train = Train()
    resources: Resources = Resources()
    queue: Queue = Queue()
    ray_cluster: RayCluster = RayCluster()
    redis_address: values.RedisAddress | None = Field(
        None, description="Redis in which Ray's head keeps its state, so that a cluster survives it; see redisPassword"
    )
    tensorboard: TensorBoard = TensorBoard()
    dashboard: Dashboard = Dashboard()
    toolbox: bool = Field(False, description="run a pod with the volume, the image and Neuron's tools")

    def stage(self, name: StageName) -> StageSettings:
        """The settings of a stage."""
        found: StageSettings = getattr(self, name)
        return found

    def with_derived(self, stack: str, nodes: int, has_password: bool) -> Workloads:
        """The same settings with nothing left empty that the rest of the stack answers."""
        name = self.name or stack
        cluster = self.ray_cluster.model_copy(update={"max_nodes": self.ray_cluster.max_nodes or nodes})
        board = self.tensorboard
        shown_by_default = has_password if board.enabled is None else board.enabled
        return self.model_copy(
            update={
                "name": name,
                "queue": self.queue.model_copy(update={"name": self.queue.name or name}),
                "ray_cluster": cluster,
                "tensorboard": board.model_copy(update={"enabled": shown_by_default}),
            }
        )

    @field_validator("stages")
    @classmethod
    def _in_order(cls, value: list[StageName]) -> list[StageName]:
        if value != [stage for stage in STAGES if stage in value]:
            raise ValueError(f"expected some of {', '.join(STAGES)}, each once and in this order")
        return value

    @field_validator("namespace")
    @classmethod
    def _not_the_clusters_own(cls, value: str) -> str:
        others = ("volcano-system", "ray-system", "mpi-operator", "monitoring")
        if value == "default" or value.startswith("kube-") or value in others:
            raise ValueError("expected a namespace of the stack's own: it goes when the stack is destroyed")
        return value

    @model_validator(mode="after")
    def _engine_and_gang(self) -> Workloads:
        Mistakes.raise_any(self._not_together())
        return self

    def _not_together(self) -> list[str]:
        lines = []
        if not self.gang and not self.ray_cluster.enabled:
            lines.append("gang: false, expected rayCluster.enabled: true with it, the cluster that the stages share")
        for stage in STAGES if not self.gang else ():
            if limit := self.stage(stage).backoff_limit:
                # KubeRay would have to make the cluster anew, and this one is not the job's.
                lines.append(f"{stage}.backoffLimit: {limit}, expected 0 with gang: false")
        if self.engine == "mpi":
            lines += [
                f"{key}: {shown(value)}, expected {wanted} with engine: mpi, which has no Ray"
                for key, value, default, wanted in (
                    ("gang", self.gang, True, "true"),
                    ("rayCluster.enabled", self.ray_cluster.enabled, False, "false"),
                    ("redisAddress", self.redis_address, None, "none"),
                    ("dashboard.host", self.dashboard.host, None, "none"),
                )
                if value != default
            ]
            lines += [
                f"{stage}.preRunningDeadlineSeconds: {self.stage(stage).pre_running_deadline_seconds}, "
                "expected none with engine: mpi: an MPIJob has activeDeadlineSeconds only"
                for stage in STAGES[1:]
                if "pre_running_deadline_seconds" in self.stage(stage).model_fields_set
            ]
        return lines
