"""What the Makefile's targets for a running stack do: status, logs, stop, rerun, and the pages.

    python -m workloads.control status --stack dev
    make logs STAGE=train STACK=dev

The namespace comes from the stack's settings (of the selected stack, if none is named), everything else from kubectl.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import click

from training.errors import UserError
from training.messages import expected_one_of
from workloads.kubectl import Kubectl, Object, call, pulumi_json
from workloads.labels import DASHBOARD, DASHBOARD_PORT, STAGE_LABEL, TENSORBOARD, TENSORBOARD_PORT, TOOLBOX
from workloads.settings import STAGES, Workloads
from workloads.states import JobState, Kind, job_state

KINDS: dict[Kind, str] = {"RayJob": "rayjobs.ray.io", "MPIJob": "mpijobs.kubeflow.org"}
URN_TYPES = ("kubernetes:ray.io/v1:RayJob", "kubernetes:kubeflow.org/v2beta1:MPIJob")
LIVE = frozenset({"waiting", "running", "retrying"})
"""States of a stage that something still comes of."""
STOP_TIMEOUT = 20 * 60
"""Seconds for a stage to end: a checkpoint is written, the accelerators are given back."""
POLL = 2.0


PAGES = {
    "dashboard": (DASHBOARD, DASHBOARD_PORT, DASHBOARD_PORT),
    "tensorboard": (TENSORBOARD, TENSORBOARD_PORT, TENSORBOARD_PORT),
    "grafana": ("grafana", 3000, 80),
}
"""By verb: Service, port on this machine, port of the Service."""
MONITORING = "monitoring"
"""The namespace of Grafana, which is the platform's (infra/observability.py)."""


@dataclass(frozen=True)
class Stage:
    """A stage whose job is in the cluster."""

    stage: str
    kind: Kind
    name: str
    status: Object = field(repr=False)

    @property
    def state(self) -> JobState:
        """How it is."""
        return job_state(self.kind, self.status)

    @property
    def submitter(self) -> str:
        """The Kubernetes Job with the stage's output: Ray's submitter or MPI's launcher."""
        return self.name if self.kind == "RayJob" else f"{self.name}-launcher"


def stages(kubectl: Kubectl) -> dict[str, Stage]:
    """The stages in the cluster, by name and in their order; of a stage that is replaced, the newer job."""
    found: dict[str, Stage] = {}
    for kind, plural in KINDS.items():
        for item in kubectl.items(plural, STAGE_LABEL):
            metadata = item["metadata"]
            stage = metadata["labels"][STAGE_LABEL]
            found[stage] = Stage(stage, kind, metadata["name"], item.get("status") or {})
    return {stage: found[stage] for stage in STAGES if stage in found}


def find(kubectl: Kubectl, stage: str | None) -> Stage:
    """The job of a stage, or the one that has not ended. Raises `UserError` where there is none."""
    there = stages(kubectl)
    summary = ", ".join(f"{each.stage} {each.state.state}" for each in there.values()) or "none"
    if stage is not None:
        if stage not in there:
            raise UserError(f"STAGE: {stage} is not in {kubectl.namespace}, expected one of its stages: {summary}")
        return there[stage]
    if not (live := [each for each in there.values() if each.state.state in LIVE]):
        raise UserError(f"STAGE: none runs in {kubectl.namespace}, expected one that does: {summary}")
    return live[-1]


def why_not_running(pods: Sequence[Object]) -> str:
    """What keeps a stage's pods from running: an image that cannot be pulled, no room on the nodes; "" if nothing."""
    for pod in pods:
        status, name = pod.get("status", {}), pod["metadata"]["name"]
        for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
            waiting = container.get("state", {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
                return f"{name}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for pod in pods:
        for condition in pod.get("status", {}).get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                return f"{pod['metadata']['name']}: {condition.get('message') or condition.get('reason')}"
    return ""


def status_lines(kubectl: Kubectl, now: datetime) -> list[str]:
    """A line for each stage: state, time since its start, and what is to be known about it."""
    rows = [("stage", "state", "time", "")]
    there = stages(kubectl)
    for stage in STAGES:
        if stage not in there:
            rows.append((stage, "-", "-", "no job: not selected, or an earlier stage has not succeeded"))
            continue
        state = there[stage].state
        detail = f"{state.reason}: {state.message}".strip(": ").partition("\n")[0]
        if not state.has_ended:
            detail = why_not_running(kubectl.items("pods", f"{STAGE_LABEL}={stage}")) or detail
        rows.append((stage, state.state, _clock(state.seconds(now)), detail))
    return [f"{stage:<11}{state:<11}{clock:<10}{detail}".rstrip() for stage, state, clock, detail in rows]


def follow_logs(kubectl: Kubectl, stage: Stage) -> int:
    """The stage's output up to now, and on until its end; returns kubectl's exit code."""
    jobs = [job["metadata"]["name"] for job in kubectl.items("jobs.batch")]
    if stage.submitter not in jobs:
        why = why_not_running(kubectl.items("pods", f"{STAGE_LABEL}={stage.stage}"))
        said = f"{stage.state.reason}: {stage.state.message}".strip(": ")
        raise UserError(
            f"STAGE: {stage.stage} has no output yet, it is {stage.state.state}: {why or said}".rstrip(": ")
        )
    return kubectl.call("logs", "--follow", "--tail=-1", f"job/{stage.submitter}")


def ask_to_stop(kubectl: Kubectl, stage: Stage) -> str:
    """Ask the stage to end with a checkpoint, or not to begin; returns what was done. Raises `UserError`.

    Not by deleting the job: it ends as its operator ends it, so that a `pulumi up` that waits for it sees the end.
    """
    state = stage.state
    if state.state not in LIVE:
        raise UserError(f"STAGE: {stage.stage} is {state.state}, expected one that runs")
    if stage.kind == "MPIJob":
        return _stop_mpi(kubectl, stage)
    cluster, job = stage.status.get("rayClusterName"), stage.status.get("jobId")
    heads = kubectl.items("pods", f"ray.io/cluster={cluster},ray.io/node-type=head") if cluster else []
    if state.state == "running" and job and any(_is_ready(head) for head in heads):
        head = next(head["metadata"]["name"] for head in heads if _is_ready(head))
        # Ray sends SIGTERM, on which training writes a checkpoint; then the job is STOPPED, which is never tried again.
        address = f"http://127.0.0.1:{DASHBOARD_PORT}"
        kubectl.do("exec", head, "--", "ray", "job", "stop", "--no-wait", "--address", address, job)
        return "it was asked to write a checkpoint and end"
    # Nothing runs that could be asked. A deadline that has passed ends a RayJob, and is never tried again either.
    kubectl.do("patch", KINDS["RayJob"], stage.name, "--type=merge", "--patch", '{"spec":{"activeDeadlineSeconds":1}}')
    return "it had not begun, and is given up"


def _stop_mpi(kubectl: Kubectl, stage: Stage) -> str:
    if stage.submitter in [job["metadata"]["name"] for job in kubectl.items("jobs.batch")]:
        # The launcher's preStop hook asks for a checkpoint, and holds until it is written.
        kubectl.do("patch", "job", stage.submitter, "--type=merge", "--patch", '{"spec":{"activeDeadlineSeconds":1}}')
        return "it was asked to write a checkpoint and end"
    # An MPIJob's own deadline counts from its launcher's start, and there is none yet.
    kubectl.do(
        "patch", KINDS["MPIJob"], stage.name, "--type=merge", "--patch", '{"spec":{"runPolicy":{"suspend":true}}}'
    )
    return "it had not begun, and is given up"


def wait_for_end(kubectl: Kubectl, stage: Stage, pause: Callable[[], None], deadline: float = STOP_TIMEOUT) -> str:
    """Wait until the stage has ended and its pods are gone; returns how it ended. Raises `UserError` after `deadline`
    seconds. `pause` waits between two looks."""
    until = time.monotonic() + deadline
    while time.monotonic() < until:
        now = stages(kubectl).get(stage.stage)
        if now is None or now.name != stage.name:
            return "its job is gone"
        if now.state.state not in LIVE and not any(
            _holds_devices(pod) for pod in kubectl.items("pods", f"{STAGE_LABEL}={stage.stage}")
        ):
            return f"{now.state.state}; its nodes are free"
        pause()
    raise UserError(f"STAGE: {stage.stage} has not ended after {deadline:.0f} s, expected its end: see make status")


def rerun_urn(state: Any, stage: str) -> str:
    """The URN of a stage's job in `pulumi stack export`. Raises `UserError` where the stack has none."""
    found = {}
    for resource in state.get("deployment", {}).get("resources", []):
        labels = resource.get("inputs", {}).get("metadata", {}).get("labels", {})
        if resource.get("type") in URN_TYPES and not resource.get("delete") and STAGE_LABEL in labels:
            found[labels[STAGE_LABEL]] = str(resource["urn"])
    if stage not in found:
        have = ", ".join(each for each in STAGES if each in found) or "none: `pulumi up` runs them"
        raise UserError(f"STAGE: {stage} is not in the stack, expected one of its stages: {have}")
    return found[stage]


def where(stack: str | None, namespace: str | None, context: str | None) -> Kubectl:
    """The namespace and the context, from the stack's settings where they are not given.

    Not from its outputs: there are none before the first `pulumi up` has ended, and that waits for the stages.
    """
    if namespace is None:
        config = pulumi_json("config", "--json", *_stack(stack))
        values = {key.partition(":")[2]: each.get("objectValue", each.get("value")) for key, each in config.items()}
        namespace = values.get("workloads", {}).get("namespace", Workloads.model_fields["namespace"].default)
        context = context or values.get("context")
    return Kubectl(str(namespace), context)


def _stack(stack: str | None) -> list[str]:
    return ["--stack", stack] if stack else []


def _is_ready(pod: Object) -> bool:
    conditions = pod.get("status", {}).get("conditions", [])
    return any(each["type"] == "Ready" and each["status"] == "True" for each in conditions)


def _holds_devices(pod: Object) -> bool:
    ended = pod.get("status", {}).get("phase") in ("Succeeded", "Failed")
    return bool(pod.get("spec", {}).get("nodeName")) and not ended


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


@click.command(context_settings={"max_content_width": 120})
@click.argument("verb", type=click.Choice(["status", "logs", "stop", "rerun", *PAGES, "toolbox"]))
@click.option("--stage", help="prepare, precompile or train [default: the one that runs]")
@click.option("--stack", help="Pulumi stack [default: the selected one]")
@click.option("--namespace", help="Kubernetes namespace [default: the stack's]")
@click.option("--context", help="context of the kubeconfig [default: the stack's, or the current one]")
@click.option("--yes", is_flag=True, help="rerun without asking")
def cli(verb: str, stage: str | None, stack: str | None, namespace: str | None, context: str | None, yes: bool) -> None:
    """Look at the stages of a stack, stop one, run one again."""
    if stage is not None and stage not in STAGES:
        raise UserError(f"STAGE: {stage}{expected_one_of(stage, STAGES)}")
    if verb == "rerun":
        if stage is None:
            raise UserError(f"STAGE: missing, expected one of {', '.join(STAGES)}: make rerun STAGE=train")
        urn = rerun_urn(pulumi_json("stack", "export", *_stack(stack)), stage)
        command = ["pulumi", "up", *_stack(stack), "--replace", urn, *(["--yes"] if yes else [])]
        raise SystemExit(call(command))
    kubectl = where(stack, namespace, context)
    if verb == "status":
        click.echo("\n".join(status_lines(kubectl, datetime.now(UTC))))
    elif verb == "logs":
        raise SystemExit(follow_logs(kubectl, find(kubectl, stage)))
    elif verb == "stop":
        found = find(kubectl, stage)
        click.echo(f"{found.stage}: {ask_to_stop(kubectl, found)}")
        click.echo(f"{found.stage}: {wait_for_end(kubectl, found, lambda: time.sleep(POLL))}")
        click.echo(f"run it again, from its last checkpoint: make rerun STAGE={found.stage}")
    elif verb == "toolbox":
        raise SystemExit(kubectl.call("exec", "--stdin", "--tty", f"deployment/{TOOLBOX}", "--", "bash"))
    else:
        raise SystemExit(_show(kubectl, verb))


def _show(kubectl: Kubectl, page: str) -> int:
    """Forward a page to this machine until Ctrl-C."""
    service, port, to = PAGES[page]
    click.echo(f"http://127.0.0.1:{port} (Ctrl-C ends it)")
    if page == "dashboard":
        click.echo(f"it asks for Ray's token: {' '.join(kubectl.command(*RAY_TOKEN_COMMAND))}")
    elif page == "grafana":
        kubectl = Kubectl(MONITORING, kubectl.context)
        click.echo("it asks for admin and the password: pulumi stack output grafanaPassword --show-secrets")
    return kubectl.call("port-forward", f"service/{service}", f"{port}:{to}")


RAY_TOKEN_COMMAND = ("exec", f"service/{DASHBOARD}", "--", "printenv", "RAY_AUTH_TOKEN")
"""The token is in the head's environment, whoever made it; `kubectl exec` takes a Service's pod."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        cli.main(argv, prog_name="python -m workloads.control", standalone_mode=False)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
