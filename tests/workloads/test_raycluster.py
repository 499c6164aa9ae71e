"""Clusters of the stages: where their pods go, what they hold, what they may do, and how they end."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kuberay_rules import refused_cluster
from schemas import definitions, mistakes
from stages import CORE, LAPTOP, NAMES, TRN1, platform, some_training, some_workloads, training, workloads

from training.config import Settings as TrainingSettings
from training.rundir import RunDir
from workloads.labels import DASHBOARD_LABEL
from workloads.platform import USER, NodeShape
from workloads.pods import Names
from workloads.raycluster import ray_cluster_spec
from workloads.settings import STAGES, StageName, Workloads

Spec = dict[str, Any]
CRDS = definitions()
CLUSTERS: list[StageName | None] = ["prepare", "precompile", "train", None]


def spec_of(
    stage: StageName | None, workers: NodeShape = TRN1, core: NodeShape = CORE, nodes: int = 2, **given: Any
) -> Spec:
    """The spec of a stage's cluster."""
    return ray_cluster_spec(stage, platform(workers, core), workloads(**given), NAMES, nodes, training())


def head(spec: Spec) -> Spec:
    """Pod template of the head."""
    return spec["headGroupSpec"]["template"]


def workers(spec: Spec) -> Spec:
    """Pod template of the workers."""
    (group,) = spec["workerGroupSpecs"]
    return group["template"]


def templates(spec: Spec) -> list[Spec]:
    """All pod templates."""
    return [head(spec), *(group["template"] for group in spec["workerGroupSpecs"])]


def env(template: Spec) -> dict[str, Any]:
    """Environment of a pod's Ray."""
    return {each["name"]: each.get("value", each.get("valueFrom")) for each in template["spec"]["containers"][0]["env"]}


@pytest.mark.parametrize("stage", ["precompile", "train"])
def test_workers_hold_all_devices_of_nodes_of_their_own(stage: StageName) -> None:
    spec = spec_of(stage, nodes=16)
    (group,) = spec["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (16, 16, 16)
    pod = workers(spec)["spec"]
    resources = pod["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"]["aws.amazon.com/neuron"] == "16"
    assert resources["limits"]["vpc.amazonaws.com/efa"] == "8"
    assert pod["nodeSelector"] == TRN1.node_selector
    assert pod["tolerations"] == TRN1.tolerations
    (apart,) = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    selected = apart["labelSelector"]["matchLabels"]
    assert selected.pop("ray.io/node-type") == "worker"  # KubeRay's own label
    assert selected.items() <= workers(spec)["metadata"]["labels"].items()
    assert env(workers(spec))["FI_PROVIDER"] == "efa"


def test_ray_knows_of_the_neuron_cores_as_kuberay_and_the_shell_read_it() -> None:
    (group,) = spec_of("train")["workerGroupSpecs"]
    text = group["rayStartParams"]["resources"]
    assert json.loads(text.strip("'\"` ")) == {"neuron_cores": 32}  # getResourcesMap of KubeRay's pod.go
    assert [json.loads(word) for word in shlex.split(text)] == [{"neuron_cores": 32}]


@pytest.mark.parametrize("stage", ["precompile", "train", None])
def test_heads_run_no_work_and_hold_no_accelerator(stage: StageName | None) -> None:
    spec = spec_of(stage, rayCluster={"enabled": True})
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    pod = head(spec)["spec"]
    assert pod["nodeSelector"] == CORE.node_selector
    assert pod["tolerations"] == []
    assert set(pod["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}


def test_the_dashboard_is_that_of_the_cluster_that_runs_the_stages() -> None:
    def shown(stage: StageName | None, gang: bool) -> bool:
        labels = head(spec_of(stage, gang=gang, rayCluster={"enabled": True}))["metadata"]["labels"]
        return labels.items() >= DASHBOARD_LABEL.items()

    assert all(shown(stage, gang=True) for stage in STAGES)
    assert not shown(None, gang=True), "people's own cluster, beside those of the stages"
    assert shown(None, gang=False)


def test_preparation_is_one_pod_on_a_core_node() -> None:
    spec = spec_of("prepare", resources={"prepare": {"cpu": 3.5}})
    assert spec["workerGroupSpecs"] == []
    assert spec["headGroupSpec"]["rayStartParams"] == {"num-cpus": "3"}
    assert head(spec)["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "3500m"
    assert "neuron" not in json.dumps(spec)


def test_a_node_has_a_cpu_for_each_process_however_few_its_pod_asks_for() -> None:
    """Ray Train waits for ever for what no node has."""
    small = workloads(resources={"worker": {"cpu": 0.5}})
    spec = ray_cluster_spec("train", platform(LAPTOP, LAPTOP), small, NAMES, 2, training(workers=4))
    (group,) = spec["workerGroupSpecs"]
    assert group["rayStartParams"] == {"num-cpus": "2"}
    assert group["template"]["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "500m"


def test_on_one_node_of_cpus_all_workers_find_room() -> None:
    spread = workers(spec_of("train", LAPTOP, LAPTOP))["spec"]["affinity"]["podAntiAffinity"]
    assert "requiredDuringSchedulingIgnoredDuringExecution" not in spread


@pytest.mark.parametrize("stage", CLUSTERS)
def test_no_autoscaler_takes_a_node_away_below_a_pod(stage: StageName | None) -> None:
    for template in templates(spec_of(stage, rayCluster={"enabled": True})):
        annotations = template["metadata"]["annotations"]
        assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
        assert annotations["karpenter.sh/do-not-disrupt"] == "true"


@pytest.mark.parametrize("stage", CLUSTERS)
def test_only_what_gives_the_volume_away_is_root_and_it_may_do_nothing_else(stage: StageName | None) -> None:
    for template in templates(spec_of(stage, rayCluster={"enabled": True})):
        pod = template["spec"]
        for container in pod["containers"]:
            allowed = container["securityContext"]
            assert (allowed["runAsUser"], allowed["runAsNonRoot"]) == (USER, True)
            assert allowed["capabilities"] == {"drop": ["ALL"]}
            assert not allowed["allowPrivilegeEscalation"]
        for owner in pod.get("initContainers", []):
            assert owner["command"] == ["chown", f"{USER}:{USER}", "/data"]
            assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}
        assert not any(pod.get(key) for key in ("hostNetwork", "hostPID", "hostIPC"))
        assert not any("hostPath" in volume for volume in pod["volumes"])
    pod = head(spec_of(stage, rayCluster={"enabled": True}))["spec"]
    assert pod["initContainers"]
    assert pod["shareProcessNamespace"] is True, "somebody takes leave of the processes of a stopped job"


def test_the_hugging_face_token_is_where_the_hub_is_read_and_only_by_reference() -> None:
    names = Names("llama", "data", "workloads", "dev", "dev-stages", "settings-0", token_secret="hugging-face")
    tokens = {
        stage: [
            env(each).get("HF_TOKEN")
            for each in templates(ray_cluster_spec(stage, platform(), workloads(), names, 2, training()))
        ]
        for stage in CLUSTERS
    }
    assert tokens.pop("prepare") == [{"secretKeyRef": {"name": "hugging-face", "key": "HF_TOKEN"}}]
    assert {token for found in tokens.values() for token in found} == {None}


@pytest.mark.parametrize("stage", CLUSTERS)
def test_ray_asks_for_a_token(stage: StageName | None) -> None:
    assert spec_of(stage, rayCluster={"enabled": True})["authOptions"] == {"mode": "token"}
    names = Names("llama", "data", "workloads", "dev", "dev-stages", ray_token="ray-token")
    named = ray_cluster_spec(stage, platform(), workloads(), names, 2, training())
    assert named["authOptions"] == {"mode": "token", "secretName": "ray-token"}


def test_the_shared_cluster_is_scaled_by_ray() -> None:
    spec = spec_of(None, rayCluster={"enabled": True, "minNodes": 1, "maxNodes": 4})
    (group,) = spec["workerGroupSpecs"]
    assert (group["replicas"], group["minReplicas"], group["maxReplicas"]) == (1, 1, 4)
    assert spec["enableInTreeAutoscaling"] is True
    assert head(spec)["spec"]["automountServiceAccountToken"] is True, "the autoscaler makes pods"
    assert all("automountServiceAccountToken" not in head(spec_of(stage))["spec"] for stage in CLUSTERS if stage)


def test_a_head_is_replaced_when_its_state_is_kept_elsewhere() -> None:
    names = Names("llama", "data", "workloads", "dev", "dev-stages", redis_password="redis")
    settings = workloads(redisAddress="redis.example.com:6379")
    spec = ray_cluster_spec("train", platform(), settings, names, 2, training())
    assert spec["gcsFaultToleranceOptions"] == {
        "redisAddress": "redis.example.com:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}},
    }
    assert "gcsFaultToleranceOptions" not in spec_of("train")


@pytest.mark.skipif(not CRDS, reason="no definitions of KubeRay's resources: CRD_DIR names no folder with them")
@settings(max_examples=15, deadline=None)
@given(
    some_workloads(), some_training(), st.sampled_from(CLUSTERS), st.sampled_from([TRN1, LAPTOP]), st.integers(1, 16)
)
def test_every_cluster_is_one_that_the_api_server_and_kuberay_take(
    given_settings: Workloads, run: TrainingSettings, stage: StageName | None, shape: NodeShape, nodes: int
) -> None:
    core = CORE if shape.neuron else LAPTOP
    spec = ray_cluster_spec(stage, platform(shape, core), given_settings, NAMES, nodes, run)
    cluster = {"apiVersion": "ray.io/v1", "kind": "RayCluster", "metadata": {"name": "some"}, "spec": spec}
    assert mistakes(cluster, CRDS) == []
    assert refused_cluster(cluster) == []
    for template in templates(spec):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template["metadata"], "spec": template["spec"]}
        assert mistakes(pod, CRDS) == []


def stop_script(template: Spec) -> str:
    """What a pod's container does before it is stopped."""
    shell, option, script = template["spec"]["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("/bin/sh", "-c")
    return str(script)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A folder that a shell could misread."""
    folder = tmp_path / "it's a $run; true"
    folder.mkdir()
    return folder


def scripts(folder: Path) -> tuple[str, str]:
    """Head's and worker's."""
    spec = ray_cluster_spec("train", platform(), workloads(), NAMES, 2, training(run__dir=str(folder)))
    return stop_script(head(spec)), stop_script(workers(spec))


TRAINS = """
import sys, time
from pathlib import Path
from training.rundir import RunDir
run = RunDir(Path(sys.argv[1]))
with run.lock():
    print("locked", flush=True)
    while not run.stop_requested():
        time.sleep(0.01)
    (run.path / "checkpoint").touch()
"""


def test_a_head_that_is_deleted_lets_training_write_its_checkpoint(run_folder: Path) -> None:
    """With the lock and the stop request of the training code itself."""
    with subprocess.Popen([sys.executable, "-c", TRAINS, str(run_folder)], stdout=subprocess.PIPE, text=True) as trains:
        assert trains.stdout is not None
        assert trains.stdout.readline() == "locked\n"
        assert subprocess.run(["/bin/sh", "-c", scripts(run_folder)[0]], timeout=60).returncode == 0
        assert (run_folder / "checkpoint").exists()
        assert trains.wait(60) == 0


def test_a_head_whose_run_has_ended_asks_nothing_of_the_next(run_folder: Path) -> None:
    run = RunDir(run_folder)
    with run.lock():
        pass
    assert subprocess.run(["/bin/sh", "-c", scripts(run_folder)[0]], timeout=60).returncode == 0
    assert not run.stop_requested()


def test_a_worker_stays_for_a_checkpoint_that_was_asked_for_and_no_other(run_folder: Path, tmp_path: Path) -> None:
    sleep = tmp_path / "bin" / "sleep"
    sleep.parent.mkdir()
    sleep.write_text("#!/bin/sh\n")
    sleep.chmod(0o755)
    environment = {"PATH": f"{sleep.parent}:{os.environ['PATH']}"}
    run, script = RunDir(run_folder), scripts(run_folder)[1]
    with run.lock():  # alone: it goes at once, and the run goes on
        assert subprocess.run(["/bin/sh", "-c", script], env=environment, timeout=60).returncode == 0
        assert not run.stop_requested()
        run.request_stop()
        waits = subprocess.Popen(["/bin/sh", "-c", script], env=environment)
        with pytest.raises(subprocess.TimeoutExpired):
            waits.wait(0.3)
    assert waits.wait(60) == 0


@pytest.mark.parametrize("stage", ["train", None])
def test_pods_that_train_have_time_to_stop(stage: StageName | None) -> None:
    spec = spec_of(stage, rayCluster={"enabled": True})
    job_stop = int(env(head(spec))["RAY_JOB_STOP_WAIT_TIME_S"])
    for template in templates(spec):
        assert template["spec"]["terminationGracePeriodSeconds"] > job_stop >= 60
        assert f"timeout {job_stop} " in stop_script(template)


@pytest.mark.parametrize("stage", ["prepare", "precompile"])
def test_a_stage_that_does_not_train_goes_at_once(stage: StageName) -> None:
    for template in templates(spec_of(stage)):
        assert "lifecycle" not in template["spec"]["containers"][0]
