"""The stages in a program: their order, what a change of the stack does to them, and where secrets do not go."""

from __future__ import annotations

import json
from typing import Any

import mock_cloud
import mocks
import pulumi
import pytest
from mocks import Recorded, Registered, run
from schemas import definitions, is_object, mistakes
from stages import CORE, IMAGE, LAPTOP, TRN1, live_platform, workloads

from training.config import load_settings
from workloads.base import Base, Secrets
from workloads.gate import wait_for
from workloads.pipeline import Pipeline
from workloads.platform import NodeShape, on_volume
from workloads.rayjob import job_names
from workloads.settings import STAGES

RAY_JOB, MPI_JOB = "kubernetes:ray.io/v1:RayJob", "kubernetes:kubeflow.org/v2beta1:MPIJob"
CLUSTER, MAP = "kubernetes:ray.io/v1:RayCluster", "kubernetes:core/v1:ConfigMap"
START, END = "2026-11-21T10:00:00Z", "2026-11-21T11:00:00Z"
GOOD = {
    RAY_JOB: {"jobStatus": "SUCCEEDED", "jobDeploymentStatus": "Complete", "startTime": START, "endTime": END},
    MPI_JOB: {
        "startTime": START,
        "completionTime": END,
        "conditions": [{"type": "Succeeded", "status": "True", "reason": "x"}],
    },
}
BAD = {**GOOD[RAY_JOB], "jobStatus": "FAILED", "jobDeploymentStatus": "Failed", "reason": "AppFailed"}
PLANTED = "hf_planted_token"
CRDS = definitions()


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """How stages end that do not end well, by name; the others do."""
    ends: dict[str, Any] = {}

    def outputs_of(kind: str, name: str, *more: Any) -> dict[str, Any]:
        outputs = mock_cloud.outputs_of(kind, name, *more)
        return {**outputs, "status": ends.get(name, GOOD[kind])} if kind in GOOD else outputs

    monkeypatch.setattr(mocks, "outputs_of", outputs_of)
    return ends


def make(
    overrides: dict[str, str] | None = None,
    workers: NodeShape = TRN1,
    core: NodeShape = CORE,
    capacity: str = "1200Gi",
    recorded: Recorded | None = None,
    preview: bool = False,
    **given: Any,
) -> Recorded:
    """What the stages of a stack with these settings register."""

    def program() -> None:
        settings = workloads(**given)
        platform = live_platform(workers, core, capacity)
        training = load_settings("tiny", overrides={"run.dir": "runs/t", **(overrides or {})})
        base = Base("base", settings, platform, settings.name or "", Secrets(hugging_face_token=PLANTED))
        stages = Pipeline("stages", settings, platform, training, 2, base)
        pulumi.export("stages", stages.results)

    return run(program, recorded=recorded, preview=preview)


def jobs(made: Recorded) -> list[Registered]:
    """The jobs of the stages, in the order in which they were made."""
    return [each for each in made if each.type in GOOD]


def names(made: Recorded) -> list[str]:
    """Their names in Kubernetes."""
    return [job.inputs["metadata"]["name"] for job in jobs(made)]


def test_stages_come_one_after_the_other_and_behind_all_they_need(ends: dict[str, Any]) -> None:
    made = make()
    assert [job.name for job in jobs(made)] == [f"stages-{stage}" for stage in STAGES]
    for before, after in zip(jobs(made), jobs(made)[1:], strict=False):
        assert made.waits_for(after, before)
    policy = made.of("kubernetes:networking.k8s.io/v1:NetworkPolicy")[0]
    for job in jobs(made):
        for needed in (made.one("kubernetes:core/v1:PersistentVolumeClaim"), made.of(MAP)[0], policy):
            assert made.waits_for(job, needed)


def test_jobs_are_called_by_what_they_depend_on(ends: dict[str, Any]) -> None:
    training = on_volume(load_settings("tiny", overrides={"run.dir": "runs/t"}))
    assert names(make()) == list(job_names("dev", training, IMAGE).values())


@pytest.mark.parametrize("engine", ["ray", "mpi"])
def test_a_change_of_the_stack_makes_the_jobs_anew_that_it_affects_and_no_other(
    ends: dict[str, Any], engine: str
) -> None:
    before = make(engine=engine)
    for change, kept in (
        ({"capacity": "2400Gi"}, 3),
        ({"core": NodeShape("core", 4, 14, 56)}, 3),
        ({"train": {"wait": "finished"}}, 3),
        ({"queue": {"weight": 5}}, 3),
        ({"overrides": {"train.learning_rate": "0.01"}}, 2),
        ({"overrides": {"train.micro_batch_size": "8"}}, 1),
        ({"overrides": {"data.tokenizer": "train:300"}}, 0),
    ):
        after = make(engine=engine, **change)
        assert [a == b for a, b in zip(names(before), names(after), strict=True)] == [True] * kept + [False] * (
            3 - kept
        )
        if kept < 3:  # nor is anything else of the kept ones changed: KubeRay would not see it
            for old, new in list(zip(jobs(before), jobs(after), strict=True))[:kept]:
                assert old.inputs == new.inputs


def test_selected_stages_are_the_same_jobs_as_among_all(ends: dict[str, Any]) -> None:
    every = names(make())
    assert names(make(stages=["train"])) == every[2:]
    assert names(make(stages=["prepare", "train"])) == [every[0], every[2]]


@pytest.mark.parametrize("failed", range(3))
def test_nothing_comes_after_a_stage_that_failed(ends: dict[str, Any], failed: int) -> None:
    made = Recorded()
    ends[f"stages-{STAGES[failed]}"] = BAD
    with pytest.raises(pulumi.RunError, match=rf"^stage {STAGES[failed]}: failed \(AppFailed\)"):
        make(recorded=made)
    assert [job.name for job in jobs(made)] == [f"stages-{stage}" for stage in STAGES[: failed + 1]]


def test_what_became_of_the_stages_is_exported(ends: dict[str, Any]) -> None:
    made = make(train={"wait": "finished"})
    assert made.exports["stages"]["train"] == {"job": names(made)[2], "state": "succeeded", "seconds": 3600}
    assert set(made.exports["stages"]) == set(STAGES)


@pytest.mark.parametrize("wait", ["running", "finished"])
def test_only_training_may_be_left_running(ends: dict[str, Any], wait: Any) -> None:
    ends["stages-train"] = {"jobStatus": "RUNNING", "jobDeploymentStatus": "Running", "startTime": START}
    if wait == "finished":
        ends.clear()
    made = make(train={"wait": wait})
    said = [job.inputs["metadata"]["annotations"]["pulumi.com/waitFor"] for job in jobs(made)]
    assert said == [wait_for("RayJob", "finished")] * 2 + [wait_for("RayJob", wait)]


def test_mpi_compiles_and_trains_and_ray_prepares(ends: dict[str, Any]) -> None:
    made = make(engine="mpi")
    assert [job.type for job in jobs(made)] == [RAY_JOB, MPI_JOB, MPI_JOB]
    ends["stages-precompile"] = {
        **GOOD[MPI_JOB],
        "conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}],
    }
    with pytest.raises(pulumi.RunError, match="^stage precompile: failed"):
        make(engine="mpi")


def test_stages_that_share_a_cluster_come_after_it(ends: dict[str, Any]) -> None:
    made = make(gang=False, rayCluster={"enabled": True})
    cluster = made.one(CLUSTER)
    prepare, *others = jobs(made)
    assert all(made.waits_for(job, cluster) for job in others)
    assert all(job.inputs["spec"]["clusterSelector"]["ray.io/cluster"] == "interactive" for job in others)
    assert "rayClusterSpec" in prepare.inputs["spec"]
    assert not make().of(CLUSTER)


def test_each_stage_reads_the_settings_that_it_depends_on(ends: dict[str, Any]) -> None:
    made = make()
    maps = {each.inputs["metadata"]["name"]: each.inputs for each in made.of(MAP)}
    for stage, job in zip(STAGES, jobs(made), strict=True):
        head = job.inputs["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
        (volume,) = [each for each in head["volumes"] if each["name"] == "settings"]
        text = maps[volume["configMap"]["name"]]["data"]["settings.yaml"]
        assert ("learning_rate" in text) == (stage == "train")
        assert maps[volume["configMap"]["name"]]["immutable"] is True


def test_no_secret_is_in_a_job_or_a_file_of_settings(ends: dict[str, Any]) -> None:
    made = make()
    holders = [each for each in made if PLANTED in json.dumps(each.inputs)]
    assert [each.type for each in holders] == ["kubernetes:core/v1:Secret"]
    assert all("stringData" in each.secrets for each in holders)


def test_a_preview_of_new_stages_shows_them_all(ends: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has a status then, and what was not looked at is no failure."""
    monkeypatch.setattr(mocks, "outputs_of", mock_cloud.outputs_of)
    assert [job.name for job in jobs(make(preview=True))] == [f"stages-{stage}" for stage in STAGES]


@pytest.mark.skipif(not CRDS, reason="no definitions of the operators' resources: CRD_DIR names no folder with them")
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"engine": "mpi"},
        {"gang": False, "rayCluster": {"enabled": True, "minNodes": 1}},
        {"redisAddress": "redis.example.com:6379", "rayCluster": {"enabled": True}},
        {"workers": LAPTOP, "core": LAPTOP},
    ],
)
def test_every_object_is_one_that_the_api_server_takes(ends: dict[str, Any], given: dict[str, Any]) -> None:
    made = make(**given)
    objects = [each for each in made if is_object(each.type)]
    assert len(objects) > 8
    for each in objects:
        manifest = {key: value for key, value in each.inputs.items() if key != "status"}
        assert mistakes(manifest, CRDS) == [], each
