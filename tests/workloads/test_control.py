"""The Makefile's targets for a running stack, with stand-ins for kubectl and pulumi on PATH that keep a cluster in a
file and write down what they were asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from training.errors import UserError
from workloads import control
from workloads.kubectl import Kubectl
from workloads.labels import STAGE_LABEL

ROOT = Path(__file__).resolve().parents[2]
NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
STAND_IN = """\
#!{python}
import json, os, sys
world = json.load(open({world!r}))
program, arguments = os.path.basename(sys.argv[0]), sys.argv[1:]
with open({calls!r}, "a") as calls:
    calls.write(json.dumps([program, *arguments]) + "\\n")
if program == "pulumi":
    print(json.dumps(world[arguments[1] if arguments[0] == "stack" else "config"]))
elif "get" in arguments:
    kind = arguments[arguments.index("get") + 1]
    if kind not in world:
        sys.exit("error: the server doesn't have a resource type " + json.dumps(kind))
    if isinstance(world[kind], str):
        sys.exit(world[kind])
    items = world[kind]
    if "--selector" in arguments:
        for part in arguments[arguments.index("--selector") + 1].split(","):
            key, _, value = part.partition("=")
            items = [i for i in items if key in i["metadata"]["labels"] and value in ("", i["metadata"]["labels"][key])]
    print(json.dumps({{"items": items}}))
"""


# As `pulumi config --json` says it.
CONFIG = {
    "llama-trainium:context": {"value": "kind", "secret": False},
    "llama-trainium:workloads": {"value": "{}", "objectValue": {"namespace": "llama"}, "secret": False},
    "llama-trainium:huggingFaceToken": {"secret": True},
}


class Cluster:
    """What the stand-ins answer, and what they were asked."""

    def __init__(self, folder: Path) -> None:
        self.world, self.calls = folder / "world.json", folder / "calls"
        self.calls.touch()
        text = STAND_IN.format(python=sys.executable, world=str(self.world), calls=str(self.calls))
        for program in ("kubectl", "pulumi"):
            (folder / program).write_text(text)
            (folder / program).chmod(0o755)
        self.set()

    def set(self, **kinds: Any) -> None:
        world = {
            "pods": [],
            "jobs.batch": [],
            "rayjobs.ray.io": [],
            "config": CONFIG,
        }
        names = {"rayjobs": "rayjobs.ray.io", "mpijobs": "mpijobs.kubeflow.org", "jobs": "jobs.batch"}
        self.world.write_text(json.dumps(world | {names.get(kind, kind): found for kind, found in kinds.items()}))

    def asked(self, *words: str) -> list[list[str]]:
        """The calls with all of these words, without what all calls of kubectl have."""
        every = [json.loads(line) for line in self.calls.read_text().splitlines()]
        common = ["kubectl", "--context", "kind", "--namespace", "llama"]
        assert all(each[:5] == common for each in every if each[0] == "kubectl")
        return [each[5:] if each[0] == "kubectl" else each for each in every if set(words) <= set(each)]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return Cluster(tmp_path)


kubectl = Kubectl("llama", "kind")


def job(stage: str, created: str = "2026-11-21T10:00:00Z", **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": f"dev-{stage}-abc", "labels": {STAGE_LABEL: stage}, "creationTimestamp": created},
        "status": {"startTime": "2026-11-21T10:00:00Z", **status},
    }


def ray(stage: str, deployment: str, status: str = "", **more: Any) -> dict[str, Any]:
    return job(stage, jobDeploymentStatus=deployment, jobStatus=status, **more)


def mpi(stage: str, *true: str, **more: Any) -> dict[str, Any]:
    return job(stage, conditions=[{"type": each, "status": "True"} for each in true], **more)


def pod(name: str, stage: str = "train", node: str = "", phase: str = "Pending", **more: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {STAGE_LABEL: stage} | more.pop("labels", {})},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, **more},
    }


RUNNING = {"rayClusterName": "dev-train-abc-xyz", "jobId": "dev-train-abc-123"}
HEAD = pod(
    "dev-train-head",
    node="core-1",
    phase="Running",
    labels={"ray.io/cluster": "dev-train-abc-xyz", "ray.io/node-type": "head"},
    conditions=[{"type": "Ready", "status": "True"}],
)
DONE = {"endTime": "2026-11-21T11:01:05Z"}


def test_status_says_of_each_stage_how_it_is(cluster: Cluster) -> None:
    cluster.set(rayjobs=[ray("prepare", "Complete", "SUCCEEDED", **DONE), ray("precompile", "Running", "RUNNING")])
    assert control.status_lines(kubectl, NOW) == [
        "stage      state      time",
        "prepare    succeeded  1:01:05",
        "precompile running    2:00:00",
        "train      -          -         no job: not selected, or an earlier stage has not succeeded",
    ]


def test_status_says_why_a_stage_failed(cluster: Cluster) -> None:
    failed = ray("train", "Failed", "FAILED", reason="AppFailed", message="exit code 3\nlog line", **DONE)
    cluster.set(rayjobs=[failed])
    assert control.status_lines(kubectl, NOW)[3].endswith("1:01:05   AppFailed: exit code 3")


@pytest.mark.parametrize(
    ("pods", "why"),
    [
        (
            [pod("w", conditions=[{"type": "PodScheduled", "status": "False", "message": "3/3 tasks unschedulable"}])],
            "w: 3/3 tasks unschedulable",
        ),
        (
            [
                pod("a", conditions=[{"type": "PodScheduled", "status": "False", "message": "no room"}]),
                pod("b", containerStatuses=[{"state": {"waiting": {"reason": "ErrImagePull", "message": "no such"}}}]),
            ],
            "b: ErrImagePull: no such",
        ),
        (
            [pod("i", initContainerStatuses=[{"state": {"waiting": {"reason": "CreateContainerConfigError"}}}])],
            "i: CreateContainerConfigError",
        ),
        ([pod("c", containerStatuses=[{"state": {"waiting": {"reason": "ContainerCreating"}}}])], ""),
        ([pod("r", conditions=[{"type": "PodScheduled", "status": "True"}], containerStatuses=[{"state": {}}])], ""),
        ([], ""),
    ],
)
def test_what_keeps_a_stage_waiting(cluster: Cluster, pods: list[Any], why: str) -> None:
    assert control.why_not_running(pods) == why
    cluster.set(rayjobs=[ray("train", "Initializing")], pods=pods)
    assert control.status_lines(kubectl, NOW)[3] == f"train      waiting    2:00:00   {why}".rstrip()


def test_a_cluster_without_the_mpi_operator_is_no_error(cluster: Cluster) -> None:
    assert control.stages(kubectl) == {}
    cluster.set(mpijobs=[mpi("train", "Created", "Running")])
    assert control.stages(kubectl)["train"].state.state == "running"


def test_of_a_stage_that_is_replaced_the_newer_job_counts(cluster: Cluster) -> None:
    old, new = job("train", "2026-11-21T10:00:00Z"), job("train", "2026-11-21T11:00:00Z")
    new["metadata"]["name"] = "dev-train-new"
    cluster.set(rayjobs=[new, old])
    assert control.stages(kubectl)["train"].name == "dev-train-new"


def test_what_kubectl_refuses_is_one_line(cluster: Cluster) -> None:
    cluster.set(rayjobs="E1121 memcache.go:265] noise\nThe connection to the server was refused")
    with pytest.raises(UserError, match="^kubectl: The connection to the server was refused$"):
        control.stages(kubectl)


def test_without_kubectl(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="^kubectl: not found, expected it on PATH$"):
        control.stages(kubectl)


def test_a_running_ray_job_is_asked_to_end(cluster: Cluster) -> None:
    """Which writes a checkpoint. A deadline or a suspension would kill it."""
    cluster.set(rayjobs=[ray("train", "Running", "RUNNING", **RUNNING)], pods=[HEAD])
    said = control.ask_to_stop(kubectl, control.find(kubectl, None))
    assert "checkpoint" in said
    (call,) = cluster.asked("exec")
    assert call[:6] == ["exec", "dev-train-head", "--", "ray", "job", "stop"]
    assert call[-1] == "dev-train-abc-123"
    assert cluster.asked("patch") == cluster.asked("delete") == []


@pytest.mark.parametrize(
    ("status", "pods"),
    [
        (ray("train", "Initializing"), []),
        (ray("train", "Retrying", **RUNNING), [HEAD]),
        (ray("train", "Running", "RUNNING", **RUNNING), []),  # the head is lost
        (ray("train", "Running", "RUNNING", **RUNNING), [pod("h", labels=HEAD["metadata"]["labels"])]),
    ],
)
def test_a_ray_job_that_cannot_be_asked_is_ended_by_its_deadline(cluster: Cluster, status: Any, pods: Any) -> None:
    """KubeRay tries no job again whose deadline has passed, and says that it has ended."""
    cluster.set(rayjobs=[status], pods=pods)
    control.ask_to_stop(kubectl, control.find(kubectl, "train"))
    (call,) = cluster.asked("patch")
    assert call[:3] == ["patch", "rayjobs.ray.io", "dev-train-abc"]
    assert json.loads(call[-1]) == {"spec": {"activeDeadlineSeconds": 1}}
    assert cluster.asked("exec") == cluster.asked("delete") == []


def test_a_running_mpijob_ends_by_its_launchers_deadline(cluster: Cluster) -> None:
    launcher = {"metadata": {"name": "dev-train-abc-launcher", "labels": {}}}
    cluster.set(mpijobs=[mpi("train", "Created", "Running")], jobs=[launcher])
    control.ask_to_stop(kubectl, control.find(kubectl, "train"))
    (call,) = cluster.asked("patch")
    assert call[:3] == ["patch", "job", "dev-train-abc-launcher"]
    assert json.loads(call[-1]) == {"spec": {"activeDeadlineSeconds": 1}}


def test_an_mpijob_without_a_launcher_is_suspended(cluster: Cluster) -> None:
    cluster.set(mpijobs=[mpi("train", "Created")])
    control.ask_to_stop(kubectl, control.find(kubectl, "train"))
    (call,) = cluster.asked("patch")
    assert call[:3] == ["patch", "mpijobs.kubeflow.org", "dev-train-abc"]
    assert json.loads(call[-1]) == {"spec": {"runPolicy": {"suspend": True}}}


@pytest.mark.parametrize(
    ("status", "word"),
    [
        (ray("train", "Complete", "SUCCEEDED"), "succeeded"),
        (ray("train", "Failed"), "failed"),
        (ray("train", "ValidationFailed"), "refused"),
    ],
)
def test_what_does_not_run_is_not_stopped(cluster: Cluster, status: Any, word: str) -> None:
    cluster.set(rayjobs=[status])
    with pytest.raises(UserError, match=f"^STAGE: train is {word}, expected one that runs$"):
        control.ask_to_stop(kubectl, control.find(kubectl, "train"))
    with pytest.raises(UserError, match=f"^STAGE: none runs in llama, expected one that does: train {word}$"):
        control.find(kubectl, None)
    with pytest.raises(UserError, match=f"^STAGE: prepare is not in llama, .*: train {word}$"):
        control.find(kubectl, "prepare")


def test_a_stage_has_ended_when_its_nodes_are_free(cluster: Cluster) -> None:
    """KubeRay says STOPPED before the pods are gone."""
    stopped = ray("train", "Complete", "STOPPED")
    submitter = pod("submitter", node="core-1", phase="Succeeded")
    steps = [
        {"rayjobs": [ray("train", "Running", "RUNNING")], "pods": [HEAD]},
        {"rayjobs": [stopped], "pods": [HEAD, submitter]},
        {"rayjobs": [stopped], "pods": [submitter]},
    ]
    cluster.set(**steps.pop(0))
    found = control.find(kubectl, "train")
    assert control.wait_for_end(kubectl, found, lambda: cluster.set(**steps.pop(0))) == "stopped; its nodes are free"
    assert steps == []


def test_a_stage_that_does_not_end(cluster: Cluster) -> None:
    cluster.set(rayjobs=[ray("train", "Running", "RUNNING")], pods=[HEAD])
    with pytest.raises(UserError, match="^STAGE: train has not ended after 0 s, expected its end: see make status$"):
        control.wait_for_end(kubectl, control.find(kubectl, "train"), lambda: None, deadline=0)


def test_logs_are_those_of_the_submitter_or_the_launcher(cluster: Cluster) -> None:
    for kind, name in (("rayjobs", "dev-train-abc"), ("mpijobs", "dev-train-abc-launcher")):
        status = ray("train", "Running") if kind == "rayjobs" else mpi("train", "Running")
        cluster.set(**{kind: [status]}, jobs=[{"metadata": {"name": name, "labels": {}}}])
        assert control.follow_logs(kubectl, control.find(kubectl, "train")) == 0
        assert cluster.asked("logs")[-1] == ["logs", "--follow", "--tail=-1", f"job/{name}"]


def test_a_stage_without_logs_says_why(cluster: Cluster) -> None:
    waits = [pod("w", conditions=[{"type": "PodScheduled", "status": "False", "message": "no nodes"}])]
    cluster.set(rayjobs=[ray("train", "Initializing")], pods=waits)
    with pytest.raises(UserError, match="^STAGE: train has no output yet, it is waiting: w: no nodes$"):
        control.follow_logs(kubectl, control.find(kubectl, "train"))


def resource(stage: str, kind: str = "ray.io/v1:RayJob", **more: Any) -> dict[str, Any]:
    labels = {STAGE_LABEL: stage}
    return {
        "type": f"kubernetes:{kind}",
        "urn": f"urn:pulumi:dev::p::kubernetes:{kind}::{stage}",
        "inputs": {"metadata": {"labels": labels}},
        **more,
    }


STATE = {
    "deployment": {
        "resources": [
            {"type": "pulumi:pulumi:Stack", "urn": "urn:stack"},
            resource("prepare"),
            resource("train", "kubeflow.org/v2beta1:MPIJob"),
            resource("train", delete=True, urn="urn:an-old-one"),
            resource("train", "core/v1:ConfigMap", urn="urn:its-settings"),
        ]
    }
}


def test_a_stage_is_run_again_by_replacing_its_job(cluster: Cluster) -> None:
    assert control.rerun_urn(STATE, "train") == "urn:pulumi:dev::p::kubernetes:kubeflow.org/v2beta1:MPIJob::train"
    with pytest.raises(UserError, match="^STAGE: precompile is not in the stack, .*: prepare, train$"):
        control.rerun_urn(STATE, "precompile")
    with pytest.raises(UserError, match="none: `pulumi up` runs them$"):
        control.rerun_urn({"deployment": {}}, "train")
    cluster.set(export=STATE)
    with pytest.raises(SystemExit) as ended:
        control.main(["rerun", "--stage", "prepare", "--stack", "dev", "--yes"])
    assert ended.value.code == 0
    urn = "urn:pulumi:dev::p::kubernetes:ray.io/v1:RayJob::prepare"
    assert cluster.asked("up") == [["pulumi", "up", "--stack", "dev", "--replace", urn, "--yes"]]


def test_stop_says_what_comes_next(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    cluster.set(rayjobs=[ray("train", "Initializing")])

    def ends() -> None:
        cluster.set(rayjobs=[ray("train", "Failed", reason="DeadlineExceeded")])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(control.time, "sleep", lambda seconds: ends())
        assert control.main(["stop"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "train: it had not begun, and is given up",
        "train: failed; its nodes are free",
        "run it again, from its last checkpoint: make rerun STAGE=train",
    ]


@pytest.mark.parametrize(("page", "port"), [("dashboard", 8265), ("tensorboard", 6006)])
def test_pages_are_forwarded(cluster: Cluster, capsys: pytest.CaptureFixture[str], page: str, port: int) -> None:
    with pytest.raises(SystemExit):
        control.main([page])
    assert cluster.asked("port-forward") == [["port-forward", f"service/{page}", f"{port}:{port}"]]
    assert f"http://127.0.0.1:{port}" in capsys.readouterr().out


def test_grafana_is_the_platforms_and_says_where_its_password_is(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        control.main(["grafana", "--stack", "dev"])
    (call,) = [json.loads(line) for line in cluster.calls.read_text().splitlines() if "port-forward" in line]
    assert call[3:] == ["--namespace", "monitoring", "port-forward", "service/grafana", "3000:80"]
    said = capsys.readouterr().out
    assert "http://127.0.0.1:3000" in said
    assert "pulumi stack output grafanaPassword --show-secrets" in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["logs", "--stage", "trian"], "STAGE: trian, did you mean train?"),
        (["rerun"], "STAGE: missing, expected one of prepare, precompile, train: make rerun STAGE=train"),
        (["stop", "--stage", "train"], "STAGE: train is not in llama, expected one of its stages: none"),
        (["sotp"], "Invalid value for '{status|logs|stop|rerun|dashboard|tensorboard|grafana|toolbox}'"),
    ],
)
def test_mistakes_are_one_line(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], arguments: list[str], line: str
) -> None:
    assert control.main(arguments) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"error: {line}")
    assert (said.err.count("\n"), said.out) == (1, "")


def test_a_stack_that_names_no_namespace_has_the_usual_one(cluster: Cluster) -> None:
    cluster.set(config={"llama-trainium:workloads": {"value": "{}", "objectValue": {"toolbox": True}}})
    assert control.where(None, None, None) == Kubectl("llama-trainium")
    cluster.set(config={})
    assert control.where(None, None, None) == Kubectl("llama-trainium")


def test_the_namespace_and_the_context_can_be_named(cluster: Cluster) -> None:
    assert control.where(None, "other", None) == Kubectl("other")
    assert control.where("dev", None, None) == Kubectl("llama", "kind")
    assert control.where("dev", None, "mine") == Kubectl("llama", "mine")
    assert cluster.asked("config")[0] == ["pulumi", "config", "--json", "--stack", "dev"]


@pytest.mark.parametrize("verb", ["status", "logs", "stop", "rerun", "dashboard", "tensorboard", "grafana", "toolbox"])
def test_make_has_a_target_for_each(verb: str) -> None:
    said = subprocess.run(
        ["make", "--dry-run", "--old-file=setup", verb, "STAGE=train", "STACK=dev"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert f"-m workloads.control {verb} --stage train --stack dev" in said
