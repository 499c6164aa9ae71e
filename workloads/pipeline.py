"""The stages, one behind the other: a job is made when the one before it has gone well, from its checked name.

stages = Pipeline("stages", settings, platform, training, nodes=16, base=base)
pulumi.export("stages", stages.results)
"""

from __future__ import annotations

import pulumi
import pulumi_kubernetes as k8s

from training.config import Settings as TrainingSettings
from workloads.base import Base
from workloads.gate import Stage, Wait
from workloads.labels import PART_OF
from workloads.mpijob import mpi_job_spec
from workloads.platform import Platform, on_volume
from workloads.pods import Names
from workloads.raycluster import ray_cluster_spec
from workloads.rayjob import job_names, pulumi_timeout, ray_job_metadata, ray_job_spec, stage_settings
from workloads.settings import StageName, Workloads
from workloads.sizes import gang_sizes, in_words
from workloads.states import Kind


class Pipeline(pulumi.ComponentResource):
    """The stages that are selected, and the RayCluster that stays, if it is asked for."""

    stages: dict[StageName, Stage]
    cluster: k8s.apiextensions.CustomResource | None
    """The interactive RayCluster."""
    results: dict[str, pulumi.Output[dict[str, object]]]
    """By stage: job, state, seconds. None of them is known before the stage has gone well."""

    def __init__(
        self,
        name: str,
        settings: Workloads,
        platform: Platform,
        training: TrainingSettings,
        nodes: int,
        base: Base,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`settings` have their derived values; `training` has folders relative to the volume; `nodes` train."""
        super().__init__("llama-trainium:workloads:Pipeline", name, None, opts)
        self._name, self._settings, self._platform, self._nodes, self._base = name, settings, platform, nodes, base
        self._training = on_volume(training)
        # On destroy the jobs go first: their operators clean up after them, and pods hold the volume.
        after: list[pulumi.Resource] = [base, *platform.after]
        self._child = pulumi.ResourceOptions(parent=self, provider=platform.provider, depends_on=after)
        self.cluster = self._make_cluster() if settings.ray_cluster.enabled else None
        self.stages = {}
        for stage in settings.stages:
            self.stages[stage] = self._make_stage(stage)
        self.results = {stage: made.result for stage, made in self.stages.items()}
        self.register_outputs({"stages": self.results})

    def _make_stage(self, stage: StageName) -> Stage:
        settings, training, platform = self._settings, self._training, self._platform
        names = self._names(self._base.settings_map(stage, stage_settings(training, stage)))
        prefix = settings.name
        assert prefix is not None
        # The name waits for the stages before, and with it the job: one that failed leaves it unknown.
        before = [made.checked for made in self.stages.values()]
        name = pulumi.Output.all(platform.image, *before).apply(
            lambda known: job_names(prefix, training, known[0])[stage]
        )
        wait: Wait = settings.train.wait if stage == "train" else "finished"
        opts = self._child
        if not settings.gang and self.cluster is not None:
            opts = pulumi.ResourceOptions.merge(opts, pulumi.ResourceOptions(depends_on=[self.cluster]))
        # Preparation is one pod, which needs no MPI.
        kind: Kind = "MPIJob" if settings.engine == "mpi" and stage != "prepare" else "RayJob"
        spec_of = mpi_job_spec if kind == "MPIJob" else ray_job_spec
        return Stage(
            f"{self._name}-{stage}",
            stage,
            kind,
            ray_job_metadata(stage, name, names),
            spec_of(stage, platform, settings, names, self._nodes, training),
            wait,
            pulumi_timeout(settings.stage(stage), wait),
            in_words(gang_sizes(settings, stage, self._nodes, platform.core, platform.workers)),
            opts,
        )

    def _make_cluster(self) -> k8s.apiextensions.CustomResource:
        """The RayCluster for people, and with `gang: false` for the stages."""
        settings, names = self._settings, self._names(None)
        return k8s.apiextensions.CustomResource(
            f"{self._name}-cluster",
            api_version="ray.io/v1",
            kind="RayCluster",
            metadata=k8s.meta.v1.ObjectMetaArgs(
                name=settings.ray_cluster.name, namespace=self._base.namespace, labels=PART_OF
            ),
            spec=ray_cluster_spec(None, self._platform, settings, names, self._nodes, self._training),
            opts=self._child,
        )

    def _names(self, settings_map: pulumi.Input[str] | None) -> Names:
        base = self._base
        return Names(
            namespace=base.namespace,
            claim=base.claim,
            service_account=base.service_account,
            queue=base.queue,
            priority_class=base.priority_class,
            settings=settings_map,
            token_secret=base.token_secret,
            ray_token=base.ray_token,
            redis_password=base.redis_password,
        )
