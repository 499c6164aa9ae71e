"""The stages through the real engine and the real Kubernetes provider, on a real API server with the operators' own
definitions: `platform: existing`, operators present, their part played by operators.py.

What is real: the program, the engine, the provider's wait, the API server's schemas and controllers. What is not:
pods, and whatever the operators do besides a job's status (`make test-cluster` has both).
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import apiserver
import operators
import pytest
import stack
import yaml
from apiserver import ApiServer
from operators import FAILED, LATE, MPI_FAILED, REFUSED, RUNNING, STOPPED, SUCCEEDED, Operators, operating
from schemas import CRD_DIR
from stack import TOKEN, Run, Stack

from workloads.settings import STAGES

ABSENT = None if CRD_DIR.is_dir() else f"no definitions of the operators: {CRD_DIR} not found"
REASON = stack.missing() or apiserver.missing() or ABSENT
pytestmark = [pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(1200)]

NAMESPACE = "llama-trainium"
MOST_SECONDS = 15
"""From the change of a job's status to the end of `pulumi up`."""
PASSWORDS = {
    "tensorboardPassword": "tb_planted_password",
    "dashboardPassword": "ray_planted_password",
    "redisPassword": "redis_planted_password",
}
RATE = {"training": {"preset": "tiny", "workersPerNode": 1, "settings": {"train": {"learning_rate": 0.0005}}}}
TOKENIZER = {"training": {"preset": "tiny", "workersPerNode": 1, "settings": {"data": {"tokenizer": "train:300"}}}}

NewStack = Callable[..., Stack]
Figure = Callable[[str], None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """An API server on which the operators are, as far as definitions go."""
    with apiserver.serving(tmp_path_factory.mktemp("kubernetes")) as running:
        for file in sorted(CRD_DIR.glob("*.yaml")):
            running.define(yaml.safe_load(file.read_text()))
        yield running


@pytest.fixture
def there(server: ApiServer) -> Iterator[Operators]:
    """The operators' part, for the stack's namespace."""
    with operating(server, NAMESPACE) as playing:
        yield playing


@pytest.fixture
def local(server: ApiServer, new_stack: NewStack) -> Callable[..., Stack]:
    """Makes the stack file `local` a stack of the server: operators present, a folder of the node as its volume."""

    def make(**workloads: Any) -> Stack:
        volume = {"hostPath": "/srv/llama", "sizeGib": 5}
        config = {"operators": "present", "volume": volume}
        made = new_stack("local", packages=(), config=config, env={"KUBECONFIG": str(server.kubeconfig)})
        made.change({"workloads": made.config()["llama-trainium:workloads"] | workloads})
        return made

    return make


@pytest.mark.parametrize("engine", ["ray", "mpi"])
def test_stages_run_one_after_the_other_and_again_where_a_setting_changed(
    engine: str, there: Operators, server: ApiServer, local: Callable[..., Stack], figure: Figure
) -> None:
    made = local(engine=engine)
    up = made.up().ok()
    assert ran(there) == list(STAGES)
    for before, after in zip(there.jobs, there.jobs[1:], strict=False):
        assert before.ended is not None
        assert before.ended < after.appeared, f"{after.stage} was there before {before.stage} had ended"
    assert [job.kind for job in there.jobs] == ["RayJob", *[{"ray": "RayJob", "mpi": "MPIJob"}[engine]] * 2]

    again = made.up("--expect-no-changes").ok()
    assert len(there.jobs) == 3, "a second up makes no job"

    made.change(RATE)
    made.up().ok()
    assert ran(there)[3:] == ["train"], "a learning rate is training's alone"

    made.change(TOKENIZER)
    made.up().ok()
    assert ran(there)[4:] == list(STAGES), "from another tokenizer come other tokens, and all that is made of them"
    assert sorted(on(server)) == sorted(job.name for job in there.jobs[4:]), "the jobs before are gone"

    destroy = made.destroy().ok()
    assert on(server) == []
    figure(f"stages, {engine}: up {up.seconds:.1f} s, second up {again.seconds:.1f} s, destroy {destroy.seconds:.1f} s")


def test_a_stage_that_goes_wrong_ends_the_update_and_the_command_it_names_goes_on(
    there: Operators, server: ApiServer, local: Callable[..., Stack], figure: Figure
) -> None:
    made, waited = local(), []
    there.ends["prepare"] = FAILED
    up = made.up()
    waited.append(ended(up, there, server, "prepare"))
    line = said(up)
    assert line.startswith(
        "stage prepare: failed (AppFailed): Job entrypoint command failed with exit code 3; "
        f"log: kubectl logs -n {NAMESPACE} job/{there.jobs[-1].name}; to run it again: make rerun STAGE=prepare, or "
    )
    assert "  | error: data.source: /data/none, expected a file that exists" in up.output
    assert "Traceback" not in up.output

    count = len(there.jobs)
    same = made.up()
    assert same.code != 0
    assert said(same) == line, "until it is run again, every update says what went wrong"
    assert len(there.jobs) == count

    for end, words in (
        (STOPPED, "stopped: Job was stopped"),
        (REFUSED, "refused (ValidationFailed): The RayJob spec is invalid"),
        (LATE, "failed (PreRunningDeadlineExceeded)"),
    ):
        there.ends["prepare"] = end
        up = rerun(made, up)
        waited.append(ended(up, there, server, "prepare"))
        assert said(up).startswith(f"stage prepare: {words}")

    there.ends = {"prepare": SUCCEEDED, "train": FAILED}
    up = rerun(made, up)
    waited.append(ended(up, there, server, *STAGES))
    assert ran(there)[-3:] == list(STAGES), "the command goes on with what comes after the stage"
    assert said(up).startswith("stage train: failed (AppFailed)")

    there.ends = {}
    count = len(there.jobs)
    make_rerun(made, "train")
    assert ran(there)[count:] == ["train"], "of three stages, the one that is named"
    make_rerun(made, "precompile")
    assert ran(there)[count + 1 :] == ["precompile", "train"], "and what is made of it"
    assert len(on(server)) == 3
    made.destroy().ok()
    figure(f"stages, ray: a bad end is the end of `pulumi up` within {max(waited):.1f} s ({len(waited)} ends)")


def test_an_mpi_job_that_fails_ends_the_update_and_runs_again(
    there: Operators, server: ApiServer, local: Callable[..., Stack], figure: Figure
) -> None:
    made = local(engine="mpi")
    there.ends["precompile"] = MPI_FAILED
    up = made.up()
    waited = ended(up, there, server, "prepare", "precompile")
    assert said(up).startswith(
        "stage precompile: failed (BackoffLimitExceeded): Job has reached the specified backoff limit; "
        f"log: kubectl logs -n {NAMESPACE} job/{there.jobs[-1].name}-launcher; to run it again: "
    )
    there.ends = {}
    rerun(made, up).ok()
    assert ran(there) == ["prepare", "precompile", "precompile", "train"]
    made.destroy().ok()
    figure(f"stages, mpi: a bad end is the end of `pulumi up` within {waited:.1f} s")


def test_training_may_be_left_running(there: Operators, server: ApiServer, local: Callable[..., Stack]) -> None:
    there.ends["train"] = RUNNING
    made = local(train={"wait": "running"})
    made.up().ok()
    made.up("--expect-no-changes").ok()
    assert ran(there) == list(STAGES)
    made.destroy().ok()


def test_secrets_are_in_secrets_only(there: Operators, server: ApiServer, local: Callable[..., Stack]) -> None:
    made = local(toolbox=True, redisAddress="redis.example.com:6379")
    for key, value in PASSWORDS.items():
        made.secret(key, value)
    preview, up = made.preview().ok(), made.up().ok()
    there.ends["train"] = FAILED
    made.change(RATE)
    failed = made.up()
    assert failed.code != 0
    rendered = {path: json.dumps(items) for path, items in server.everything().items()}
    kept = rendered.pop("/api/v1/secrets")
    exported = {"state": made.exported(), "stack file": made.file.read_text()}
    told = {"preview": preview.output, "up": up.output, "failed up": failed.output}
    planted = [TOKEN, *PASSWORDS.values()]
    found = [
        (where, secret)
        for where, text in {**rendered, **exported, **told}.items()
        for secret in [*planted, *[base64.b64encode(each.encode()).decode() for each in planted]]
        if secret in text
    ]
    assert found == []
    # Where they belong the same search finds them; of TensorBoard's password there is only a hash.
    in_secrets = [secret for secret in planted if base64.b64encode(secret.encode()).decode() in kept]
    assert in_secrets == [TOKEN, PASSWORDS["dashboardPassword"], PASSWORDS["redisPassword"]]
    for kind, name in (("pods", "tensorboard"), ("pods", "toolbox"), ("configmaps", "settings-train")):
        assert name in rendered[f"/api/v1/{kind}"]
    made.destroy().ok()


def ran(there: Operators) -> list[str]:
    """The stages of the jobs that appeared, in that order."""
    return [job.stage for job in there.jobs]


def on(server: ApiServer) -> list[str]:
    """Names of the jobs that are on the server, of both kinds."""
    lists = [server.request(path.format(NAMESPACE))["items"] for path in operators.PATHS.values()]
    return sorted(item["metadata"]["name"] for items in lists for item in items)


def ended(up: Run, there: Operators, server: ApiServer, *stages: str) -> float:
    """Seconds from a bad end to the end of `up`, which failed in time and left no job but those of `stages`."""
    assert up.code != 0, up.output
    last = there.jobs[-1]
    assert last.ended is not None
    seconds = up.ended - last.ended
    assert seconds < MOST_SECONDS
    assert sorted(on(server)) == sorted({job.name for job in there.jobs if job.stage in stages})
    return seconds


def said(up: Run) -> str:
    """The line about a stage that went wrong; there is one."""
    lines = {found.strip() for found in re.findall(r"stage \w+: .*", up.output)}
    assert len(lines) == 1, up.output
    return lines.pop()


def rerun(made: Stack, failed: Run) -> Run:
    """The command that the message names, word for word."""
    found = re.search(r"or (pulumi up --replace '[^']+')", failed.output)
    assert found, failed.output
    return made.run(*shlex.split(found[1])[1:], "--yes", "--skip-preview", "--stack", made.name)


def make_rerun(made: Stack, stage: str) -> None:
    """`make rerun STAGE=...` in the project."""
    command = [sys.executable, "-m", "workloads.control", "rerun", "--stage", stage, "--stack", made.name, "--yes"]
    done = subprocess.run(command, cwd=made.project, env=made.env, text=True, capture_output=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
