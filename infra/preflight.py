"""Asks the account whether a stack can be deployed into it, before an hour of `pulumi up` finds out.

    python -m infra.preflight us-west-2

Reads only, and needs no login at Pulumi. A table of what passes, what may hold the stack up and what will, with what
mends it. Exit code 0, 1 when anything fails, 2 for a stack or a setting that is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from infra import command, preflight_quotas
from infra.account import clients_of
from infra.preflight_checks import (
    Check,
    Finding,
    Subject,
    amis,
    credentials,
    hub,
    images,
    no_answer,
    offered,
    reservations,
    run_check,
)
from stack_files import TOKEN, read_stack_file

CHECKS: dict[str, Check] = {
    "zones": offered,
    "vCPU quota": preflight_quotas.vcpus,
    "network quota": preflight_quotas.network,
    "storage quota": preflight_quotas.storage,
    "reservation": reservations,
    "AMI": amis,
    "image": images,
    "Hugging Face": hub,
}
"""Those after the credentials, without which AWS answers nothing."""
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red"}


def findings(subject: Subject) -> list[Finding]:
    """What all checks found. Without credentials that is all there is to say, but for what AWS is not asked for."""
    found = run_check("credentials", credentials, subject)
    checks = CHECKS
    if any(each.status == "fail" for each in found):
        checks = {"Hugging Face": hub}
    for name, check in checks.items():
        found += run_check(name, check, subject)
    return found


def findings_table(title: str, found: Sequence[Finding]) -> Table:
    """One row a finding; what mends it below what was found."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("", "check"):
        table.add_column(name, no_wrap=True)
    table.add_column("found")
    for each in found:
        text = Text(each.detail)
        if each.fix:
            text.append(f"\n-> {each.fix}", style="cyan")
        table.add_row(Text(each.status, style=STYLES[each.status]), each.check, text)
    return table


@click.command("preflight", context_settings={"max_content_width": 120})
@click.argument("stack")
def cli(stack: str) -> int:
    """Ask the AWS account whether STACK can be deployed into it."""
    return check_stack(stack, no_answer)


def check_stack(stack: str, unreachable: Callable[[str], str | None]) -> int:
    """Check, print, and say the exit code. Raises `UserError`."""
    file = read_stack_file(stack)
    settings = file.settings()
    subject = Subject(stack, settings, clients_of(settings.region), TOKEN in file.given, unreachable)
    found = findings(subject)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    console.print(findings_table(f"preflight of {stack} in {settings.region}", found))
    counts = {status: sum(each.status == status for each in found) for status in STYLES}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))
    return 1 if counts["fail"] else 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    return command.run(cli, argv)


if __name__ == "__main__":
    sys.exit(main())
