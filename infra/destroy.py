"""`pulumi destroy` for a stack, and what it cannot see: `make destroy STACK=dev`.

    python -m infra.destroy dev             # says what goes and what stays, asks, destroys, lists what is left
    python -m infra.destroy dev --list      # lists what AWS has of the stack, and changes nothing

Pulumi deletes in the order that the program says: jobs, controllers after what they made, nodes, the cluster, the
network. What others made in the network (infra/sweep.py) is taken away between two attempts, and what AWS lets go late
is waited for. At the end everything in AWS that has the stack's tags is listed. Exit code 0, 1 when something is left,
Pulumi's own when it failed, 2 for bad input.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import click

from infra import command
from infra.account import Clients, clients_of
from infra.leftovers import leftovers
from infra.sweep import sweep, volumes_of_claims
from stack_files import StackFile, read_stack_file
from stack_settings import AwsStack
from training.errors import UserError

ATTEMPTS = 5
PAUSE = 60.0
"""Seconds between two attempts: AWS lets go of a load balancer's interfaces within minutes."""
STOPPED = 130


def stays(settings: AwsStack) -> list[str]:
    """What data the stack's destruction takes, and what it leaves."""
    if settings.storage.retain_on_delete:
        data = [
            "stays: the S3 bucket, with all that was exported to it from the file system (storage.retainOnDelete)",
            "goes:  the file system. What it has not exported yet is lost: AgeOfOldestQueuedMessage in CloudWatch is 0",
            "       when all is",
        ]
    else:
        data = [
            "goes:  the S3 bucket with every version of every object, and the file system: tokens, checkpoints, all"
        ]
    return [
        *data,
        "goes:  the images in the registry, the logs, volumes of claims, everything in the cluster",
        "stays: the key of the cluster's secrets, for a week, in which it can be restored",
        f"A stage that runs is ended where it is: make stop STACK={settings.workloads.name} writes a checkpoint first.",
    ]


def pulumi_destroy(stack: str) -> int:
    """Run Pulumi in the foreground; returns its exit code, 130 after Ctrl-C."""
    if not shutil.which("pulumi"):
        raise UserError("pulumi: not found, expected it on PATH")
    try:
        return subprocess.call(["pulumi", "destroy", "--stack", stack, "--yes"])
    except KeyboardInterrupt:
        return STOPPED


def destroy(stack: str, clients: Clients, run: Callable[[], int], pause: Callable[[], None]) -> int:
    """Destroy with `run` until it succeeds and AWS has let go, at most `ATTEMPTS` times; returns the last exit code.

    It is not tried again when nothing was in the way that can go: then the reason is Pulumi's to tell.
    """
    code = run()
    for attempt in range(1, ATTEMPTS + 1):
        if code == STOPPED:
            break
        swept = sweep(clients, stack)
        for what in swept.removed:
            click.echo(f"removed {what}")
        in_the_way = bool(swept.waiting) or (code != 0 and bool(swept.removed))
        if not in_the_way or attempt == ATTEMPTS:
            break
        for what in swept.waiting:
            click.echo(f"AWS still holds {what}")
        pause()
        code = run() if code else 0
    return code


def tell_leftovers(stack: str, clients: Clients, keeps_bucket: bool) -> bool:
    """List what AWS has of the stack; returns whether anything is there that should not be."""
    found = leftovers(clients, stack, keeps_bucket)
    for each in found:
        click.echo(f"{each.state}: {each.arn}{f' ({each.note})' if each.note else ''}")
    left = [each for each in found if each.state == "left"]
    click.echo(f"{len(left)} left behind of {stack}, {len(found) - len(left)} kept or going")
    return bool(left)


@click.command("destroy", context_settings={"max_content_width": 120})
@click.argument("stack")
@click.option("--yes", is_flag=True, help="do not ask")
@click.option("--list", "only_list", is_flag=True, help="list what AWS has of the stack, and end")
def cli(stack: str, yes: bool, only_list: bool) -> int:
    """Destroy STACK, and leave nothing behind."""
    file = read_stack_file(stack)
    if not file.on_aws:
        return _existing(file, yes, only_list)
    settings = file.settings()
    clients = clients_of(settings.region)
    keeps = settings.storage.retain_on_delete
    if only_list:
        return int(tell_leftovers(stack, clients, keeps))
    account = clients("sts").get_caller_identity()["Account"]
    lines = [f"{stack}, in account {account}, {settings.region}:", *stays(settings)]
    volumes = volumes_of_claims(clients, stack)
    lines += [f"goes:  volume {each['VolumeId']}, {each['Size']} GiB, of a claim" for each in volumes]
    _ask(stack, lines, yes)
    code = destroy(stack, clients, lambda: pulumi_destroy(stack), lambda: time.sleep(PAUSE))
    if code == STOPPED:
        return code
    left = tell_leftovers(stack, clients, keeps)
    return code or int(left)


def _existing(file: StackFile, yes: bool, only_list: bool) -> int:
    """A cluster that was there before keeps what the data is in (workloads/base.py)."""
    if only_list:
        raise UserError(f"--list: {file.stack} has platform: existing, expected a stack on AWS")
    stay = "stays: the namespace, the claim with the data (or the folder of volume.hostPath), Volcano's definitions"
    _ask(file.stack, [f"{file.stack}, platform: existing:", stay, "goes:  jobs, operators, pages"], yes)
    return pulumi_destroy(file.stack)


def _ask(stack: str, lines: Sequence[str], yes: bool) -> None:
    """Say what will happen, and go on only when the user types the stack's name. Raises `UserError`."""
    click.echo("\n".join(lines))
    if not yes and (typed := click.prompt(f"Type {stack} to destroy it", default="", show_default=False)) != stack:
        raise UserError(f"answer: {typed or 'nothing'}, expected {stack}: nothing was destroyed")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command.run(cli, argv)


if __name__ == "__main__":
    sys.exit(main())
