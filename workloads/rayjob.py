"""A stage as a RayJob: its name, which says what it depends on, and its spec, as plain data in Kubernetes' words.

    names = job_names("dev", training, image)         # {"prepare": "dev-prepare-1f0c9a3e", ...}
    spec = ray_job_spec("train", platform, settings, used, nodes=16, training=training)

KubeRay never changes a job that it has begun, so a stage is run again under another name, and under the same name it is
the same job. A stage is given no setting that it does not depend on: that its name stays the same is then no promise,
but all it can be.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from training.config import Settings as TrainingSettings
from workloads.gate import Wait
from workloads.labels import PART_OF, STAGE_LABEL
from workloads.platform import SETTINGS_PATH, Platform
from workloads.pods import STOP_SECONDS, Names, Spec
from workloads.raycluster import ray_cluster_spec, submitter_template
from workloads.settings import STAGES, StageName, StageSettings, Workloads
from workloads.values import DIGEST_LENGTH

QUEUE_LABEL = "volcano.sh/queue-name"
PRIORITY_LABEL = "ray.io/priority-class-name"
SUBMITTER_RETRIES = 2
"""How often the log is picked up again, or after the loss of the head the job handed in again, before a job fails."""

MOST_STEPS = 2**31 - 1
"""Stands for the number of steps where a stage must not depend on it."""

LONGEST_WAIT = 365 * 24 * 3600
"""Seconds that Pulumi waits for what has no deadline."""
SLACK = 900
"""Seconds that Pulumi gives an operator beyond a job's own deadline: to notice it, and to have its pods deleted."""

StageValues = dict[str, dict[str, Any]]

# What decides about compiled code, and what a run that has checkpoints holds a stage against before it compiles for an
# hour (training/checks.py). The tokenizer is there for training.config, which holds it against the vocabulary.
_PRECOMPILE: dict[str, tuple[str, ...] | None] = {
    "data": ("tokenizer",),
    "model": None,
    "train": (
        "seq_length",
        "global_batch_size",
        "micro_batch_size",
        "seed",
        "dtype",
        "compile",
        "activation_checkpointing",
        "loss_chunk",
        "master_weights",
        "accumulate_float32",
    ),
    "parallel": None,
    "run": ("dir", "cache_dir", "backend"),
}


def stage_settings(training: TrainingSettings, stage: StageName) -> StageValues:
    """The settings that `stage` depends on, and is given: plain values for its file. The others have their defaults.

    `training` are the settings as pods have them (`on_volume`).
    """
    values = training.resolved()
    if stage == "prepare":
        # The store's record is with the store and not in the run: any number of runs may read it, and a run that has
        # checkpoints would refuse the defaults of settings that are none of this stage's business.
        run = {"dir": str(training.data_dir / "prepare")}
        return {"data": values["data"], "model": {"vocab_size": training.model.vocab_size}, "run": run}
    if stage == "precompile":
        chosen = {section: _chosen(values[section], keys) for section, keys in _PRECOMPILE.items()}
        del chosen["model"]["init_from"]
        chosen["train"]["steps"] = MOST_STEPS
        return chosen
    return values


def _chosen(values: dict[str, Any], keys: tuple[str, ...] | None) -> dict[str, Any]:
    return dict(values) if keys is None else {key: values[key] for key in keys}


def job_names(prefix: str, training: TrainingSettings, image: str) -> dict[StageName, str]:
    """The name of each stage's job: `prefix`, the stage, and a digest of all that decides what comes out of it.

    That is its settings, the image (another code may do another thing; a stage that finds its work done ends at once,
    and training goes on from its last checkpoint), and the stage before it, selected or not: `stages: [train]` on its
    own is the same job as behind the others. How many nodes of which size do it, and its limits, are not: a job that
    has ended is not run again for them.
    """
    names: dict[StageName, str] = {}
    before = ""
    for stage in STAGES:
        depends_on = {"settings": stage_settings(training, stage), "image": image, "before": before}
        text = json.dumps(depends_on, sort_keys=True)
        before = f"{prefix}-{stage}-{hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]}"
        names[stage] = before
    return names


def ray_job_metadata(stage: StageName, name: Any, names: Names) -> Spec:
    """Metadata of a stage's job, of either kind. KubeRay hands the labels on to the cluster and to Volcano."""
    return {
        "name": name,
        "namespace": names.namespace,
        "labels": {**PART_OF, STAGE_LABEL: stage, QUEUE_LABEL: names.queue, PRIORITY_LABEL: names.priority_class},
    }


def ray_job_spec(
    stage: StageName,
    platform: Platform,
    settings: Workloads,
    names: Names,
    nodes: int,
    training: TrainingSettings,
) -> Spec:
    """Spec of a stage's RayJob: with a cluster of its own, or with `gang: false` on the shared one.

    prepare has its own in any case: the shared one would bring up accelerators for it.
    """
    limits = settings.stage(stage)
    shared = not settings.gang and stage != "prepare"
    config = SETTINGS_PATH.name if shared else SETTINGS_PATH
    spec: Spec = {
        "entrypoint": f"python3 -m training {stage} --config {config} --launcher ray",
        # A pod that hands in the job and follows its log, and stays when the cluster goes, with the log.
        "submissionMode": "K8sJobMode",
        "submitterPodTemplate": submitter_template(stage, platform, names, with_settings=shared),
        "submitterConfig": {"backoffLimit": SUBMITTER_RETRIES},
        "backoffLimit": limits.backoff_limit,
        "preRunningDeadlineSeconds": limits.pre_running_deadline_seconds,
    }
    if limits.active_deadline_seconds is not None:
        spec["activeDeadlineSeconds"] = limits.active_deadline_seconds
    if shared:
        spec["clusterSelector"] = {"ray.io/cluster": settings.ray_cluster.name}
        # The cluster is there before the stage's settings are: the submitter brings them along.
        spec["runtimeEnvYAML"] = f"working_dir: {SETTINGS_PATH.parent}\n"
    else:
        # The accelerators are given back at the end, however it ended.
        spec["shutdownAfterJobFinishes"] = True
        spec["ttlSecondsAfterFinished"] = 0
        spec["rayClusterSpec"] = ray_cluster_spec(stage, platform, settings, names, nodes, training)
    return spec


def pulumi_timeout(limits: StageSettings, wait: Wait) -> int:
    """Seconds after which Pulumi gives up waiting for a stage: when by its own deadlines it must have ended.

    KubeRay counts a deadline for each attempt anew.
    """
    attempts = limits.backoff_limit + 1
    if wait == "running":
        return attempts * (limits.pre_running_deadline_seconds + STOP_SECONDS + SLACK)
    if limits.active_deadline_seconds is None:
        return LONGEST_WAIT
    return min(LONGEST_WAIT, attempts * (limits.active_deadline_seconds + STOP_SECONDS + SLACK))
