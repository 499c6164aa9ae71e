"""RayJobs: names that say what a stage depends on, settings that are no more than that, and what KubeRay takes."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kuberay_rules import refused_job
from mocks import ROOT
from schemas import definitions, mistakes
from stages import (
    CORE,
    IMAGE,
    LAPTOP,
    NAMES,
    TRN1,
    platform,
    some_training,
    some_workloads,
    training,
    workloads,
    write_settings,
)

from training.backends import World, make_backend, neuron
from training.checks import checkpoint_meta
from training.cli import cli
from training.config import Settings as TrainingSettings
from training.config import load_settings, setting_fields
from training.data.prepare import prepare
from workloads.platform import SETTINGS_PATH, NodeShape
from workloads.rayjob import job_names, pulumi_timeout, ray_job_metadata, ray_job_spec, stage_settings
from workloads.settings import STAGES, StageName, Workloads
from workloads.versions import RAY

CRDS = definitions()
OTHER_IMAGE = IMAGE.replace("a" * 64, "b" * 64)


def changed(before: TrainingSettings, after: TrainingSettings, image: str = IMAGE) -> list[StageName]:
    """The stages that run again."""
    old, new = job_names("dev", before, IMAGE), job_names("dev", after, image)
    return [stage for stage in STAGES if old[stage] != new[stage]]


RUNS_AGAIN = [
    ({"train__learning_rate": "0.5"}, ["train"]),
    ({"train__steps": "777"}, ["train"]),
    ({"checkpoint__every": "7"}, ["train"]),
    ({"run__max_failures": "9"}, ["train"]),
    ({"model__init_from": "models/start"}, ["train"]),
    ({"train__seq_length": "128"}, ["precompile", "train"]),
    ({"model__num_hidden_layers": "3"}, ["precompile", "train"]),
    ({"train__activation_checkpointing": "full"}, ["precompile", "train"]),
    ({"run__dir": "runs/other", "data__output": "runs/t/data"}, ["precompile", "train"]),
    ({"data__tokenizer": "train:300"}, ["prepare", "precompile", "train"]),
    ({"data__source": "jsonl:corpus/*.jsonl"}, ["prepare", "precompile", "train"]),
    ({"model__vocab_size": "9000"}, ["prepare", "precompile", "train"]),
]


@pytest.mark.parametrize(("change", "again"), RUNS_AGAIN, ids=[" ".join(change) for change, _ in RUNS_AGAIN])
def test_a_changed_setting_runs_the_stages_again_that_it_affects(change: dict[str, str], again: list[str]) -> None:
    assert changed(training(), training(**change)) == again


def test_another_image_runs_everything_again() -> None:
    assert changed(training(), training(), OTHER_IMAGE) == list(STAGES)


# Another value, valid beside the others of the tiny preset, for what cannot just be doubled.
OTHER_VALUES = {
    "run.metrics_address": "127.0.0.1:9400",
    "data.source": "text:*.txt",
    "data.tokenizer": "train:300",
    "data.output": "other/store",
    "data.validation_fraction": "0.25",
    "data.append_eod": "false",
    "data.skip_bad": "true",
    "model.hidden_size": "512",
    "model.num_attention_heads": "8",
    "model.num_key_value_heads": "1",
    "model.vocab_size": "20000",
    "model.init_from": "models/start",
    "model.tie_word_embeddings": "true",
    "train.seq_length": "128",
    "train.micro_batch_size": "8",
    "train.dtype": "float32",
    "train.compile": "false",
    "train.beta1": "0.8",
    "train.beta2": "0.8",
    "train.weight_decay": "0.3",
    "train.activation_checkpointing": "full",
    "train.min_learning_rate": "1e-9",
    "train.master_weights": "false",
    "train.accumulate_float32": "false",
    "train.fail_on_compile": "true",
    "parallel.workers": "32",
    "parallel.tensor_parallel_size": "2",
    "parallel.sequence_parallel": "false",
    "parallel.zero_1": "false",
    "run.dir": "runs/other",
    "run.backend": "cpu",
    "run.launcher": "ray",
    "run.cache_dir": "cache",
}


@pytest.mark.parametrize("key", sorted(setting_fields()))
def test_a_stage_runs_again_when_a_setting_that_it_is_given_changes_or_the_stage_before_it(key: str) -> None:
    """For every setting there is, whatever is added to them later: none is forgotten."""
    before = training()
    section, _, name = key.partition(".")
    old = getattr(getattr(before, section), name)
    after = training(**{f"{section}__{name}": OTHER_VALUES.get(key) or str(old * 2)})
    given_to = [stage for stage in STAGES if stage_settings(before, stage) != stage_settings(after, stage)]
    assert given_to, f"{key} is given to no stage"
    assert changed(before, after) == list(STAGES[STAGES.index(given_to[0]) :])


def test_a_name_is_the_stage_and_what_it_depends_on() -> None:
    names = job_names("us-west-2", training(), IMAGE)
    for stage, name in names.items():
        assert re.fullmatch(rf"us-west-2-{stage}-[0-9a-f]{{8}}", name)
    assert names == job_names("us-west-2", training(), IMAGE)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_training())
def test_what_a_stage_is_given_is_settings_that_training_takes(tmp_path: Path, run: TrainingSettings) -> None:
    """Left out are only such as training has a fitting default for."""
    for stage in STAGES:
        given_to_it = stage_settings(run, stage)
        read = load_settings(config=write_settings(tmp_path, given_to_it)).resolved()
        assert {
            section: {key: read[section][key] for key in keys} for section, keys in given_to_it.items()
        } == given_to_it


def test_prepare_makes_the_same_store_from_what_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for n in range(20):
        (tmp_path / "texts" / f"{n}.txt").write_text(f"the quick brown fox {n} " * 50)
    stores = []
    for name in ("whole", "given"):
        run = load_settings(
            "tiny",
            overrides={
                "data.source": f"text:{tmp_path}/texts/*.txt",
                "data.tokenizer": "train:300",
                "data.validation_fraction": "0.3",
                "data.output": str(tmp_path / name),
                "run.dir": str(tmp_path / "run"),
                "train.seed": "99",
            },
        )
        if name == "given":
            run = load_settings(config=write_settings(tmp_path, stage_settings(run, "prepare")))
            assert run.run.dir.is_relative_to(tmp_path / name), "its record is with the store"
        manifest = prepare(run, Quiet())
        assert manifest["tokens"]
        stores.append({path.name: path.read_bytes() for path in (tmp_path / name).glob("*.bin")})
    assert stores[0] == stores[1]
    assert len(stores[0]) == 2


class Quiet:
    """A report that no one reads."""

    def update(self, done: float, total: float | None = None, **fields: Any) -> None:
        pass

    def note(self, text: str) -> None:
        pass


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(some_training())
def test_precompile_compiles_the_same_code_and_is_held_to_the_same_run(tmp_path: Path, run: TrainingSettings) -> None:
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"tensor_parallel_size": 1})})
    its_own = load_settings(config=write_settings(tmp_path, stage_settings(run, "precompile")))
    assert its_own.cache_dir == run.cache_dir
    assert its_own.run.dir == run.run.dir
    for ingredients in (neuron.ingredients, lambda settings: make_backend(settings, World()).ingredients()):
        assert ingredients(its_own) == ingredients(run)
    assert checkpoint_meta(its_own, 1, "t") == checkpoint_meta(run, 1, "t"), "what a run with checkpoints refuses"
    assert its_own.train.steps >= run.train.steps, "nor is it refused for steps that are done"


@pytest.mark.parametrize("stage", STAGES)
def test_the_command_is_one_that_the_image_has(stage: StageName) -> None:
    spec = ray_job_spec(stage, platform(), workloads(), NAMES, 2, training())
    python, flag, module, command, *options = shlex.split(spec["entrypoint"])
    assert (python, flag, module, command) == ("python3", "-m", "training", stage)
    found = cli.commands[command].make_context(command, list(options)).params
    assert found["config"] == (str(SETTINGS_PATH),)
    assert found["run__launcher"] == ("ray",)
    container = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    (mounted,) = [each for each in container["volumeMounts"] if each["name"] == "settings"]
    assert mounted["mountPath"] == str(SETTINGS_PATH)


def test_the_image_has_the_ray_that_kuberay_is_told_of_and_takes_jobs() -> None:
    """Without the extra `default` a head has no dashboard, and no job ever reaches it."""
    (ray,) = re.findall(r"^ray\[(.*)\]==(.*)$", (ROOT / "requirements-training.txt").read_text(), re.MULTILINE)
    assert "default" in ray[0].split(",")
    assert ray[1] == RAY


@pytest.mark.parametrize("stage", STAGES)
def test_accelerators_are_given_back_at_the_end_and_the_log_stays(stage: StageName) -> None:
    spec = ray_job_spec(stage, platform(), workloads(), NAMES, 2, training())
    assert spec["shutdownAfterJobFinishes"] is True
    assert spec["ttlSecondsAfterFinished"] == 0
    assert spec["submissionMode"] == "K8sJobMode", "the submitter's pod has the log and outlives the cluster"


def test_limits_are_those_of_the_stage_and_training_has_none() -> None:
    given_settings = workloads(
        precompile={"activeDeadlineSeconds": 500, "preRunningDeadlineSeconds": 50, "backoffLimit": 2}
    )
    spec = ray_job_spec("precompile", platform(), given_settings, NAMES, 2, training())
    found = spec["activeDeadlineSeconds"], spec["preRunningDeadlineSeconds"], spec["backoffLimit"]
    assert found == (500, 50, 2)
    assert "activeDeadlineSeconds" not in ray_job_spec("train", platform(), workloads(), NAMES, 2, training())


def test_without_a_gang_stages_share_a_cluster_and_prepare_brings_up_no_accelerator_for_itself() -> None:
    shared = workloads(gang=False, rayCluster={"enabled": True, "name": "ours"})
    for stage in STAGES:
        spec = ray_job_spec(stage, platform(), shared, NAMES, 2, training())
        if stage == "prepare":
            assert spec["rayClusterSpec"]["workerGroupSpecs"] == []
            continue
        assert spec["clusterSelector"] == {"ray.io/cluster": "ours"}
        assert "rayClusterSpec" not in spec
        # `ray job submit` sends the working folder, and runs the command there.
        folder = spec["runtimeEnvYAML"].strip().removeprefix("working_dir: ")
        submitter = spec["submitterPodTemplate"]["spec"]["containers"][0]
        (mounted,) = submitter["volumeMounts"]
        assert mounted["mountPath"] == f"{folder}/settings.yaml"
        assert mounted["subPath"] == "settings.yaml", "a link would not be sent"
        assert "--config settings.yaml" in spec["entrypoint"]


def test_the_queue_and_the_priority_reach_volcano() -> None:
    labels = ray_job_metadata("train", "dev-train-0", NAMES)["labels"]
    assert labels["volcano.sh/queue-name"] == "dev"
    assert labels["ray.io/priority-class-name"] == "dev-stages"


@pytest.mark.skipif(not CRDS, reason="no definitions of KubeRay's resources: CRD_DIR names no folder with them")
@settings(max_examples=15, deadline=None)
@given(some_workloads(), some_training(), st.sampled_from([TRN1, LAPTOP]), st.integers(1, 16))
def test_every_job_is_one_that_the_api_server_and_kuberay_take(
    given_settings: Workloads, run: TrainingSettings, shape: NodeShape, nodes: int
) -> None:
    core = CORE if shape.neuron else LAPTOP
    assert given_settings.name is not None
    names = job_names(given_settings.name, run, IMAGE)
    for stage in given_settings.stages:
        job = {
            "apiVersion": "ray.io/v1",
            "kind": "RayJob",
            "metadata": ray_job_metadata(stage, names[stage], NAMES),
            "spec": ray_job_spec(stage, platform(shape, core), given_settings, NAMES, nodes, run),
        }
        assert mistakes(job, CRDS) == []
        assert refused_job(job) == []
        submitter = job["spec"]["submitterPodTemplate"]
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": submitter["metadata"], "spec": submitter["spec"]}
        assert mistakes(pod, CRDS) == []


@settings(max_examples=50, deadline=None)
@given(some_workloads(), st.sampled_from(STAGES), st.sampled_from(["running", "finished"]))
def test_pulumi_waits_longer_than_a_job_can_take(given_settings: Workloads, stage: StageName, wait: Any) -> None:
    limits = given_settings.stage(stage)
    longest = limits.pre_running_deadline_seconds if wait == "running" else limits.active_deadline_seconds
    if longest is None:
        longest = 300 * 24 * 3600
    assert pulumi_timeout(limits, wait) > min(longest * (limits.backoff_limit + 1), 300 * 24 * 3600)
