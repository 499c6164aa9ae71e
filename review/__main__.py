"""The comment for one stack of a pull request.

    python -m review dev --base main                    # prints it
    python -m review dev --base HEAD^1 --output dev.md  # writes it

Exit code 0: all would go well; 1: the preview fails, or a rule is broken (the comment says which); 2: a mistake in the
command.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
from pulumi import automation

from policy.rules import POLICIES
from review.comment import comment
from review.costs import cost, cost_at
from review.preview import preview
from review.touched import ROOT, stacks_on_aws
from training.errors import UserError
from training.messages import expected_one_of, shown


@click.command("review", context_settings={"max_content_width": 120})
@click.argument("stack")
@click.option("--base", required=True, help="the commit to compare the cost with")
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="file to write [default: print]")
def cli(stack: str, base: str, output: Path | None) -> int:
    """Preview STACK as it is here, and write the comment."""
    if stack not in (known := stacks_on_aws(ROOT)):
        raise UserError(f"STACK: {shown(stack)}{expected_one_of(stack, known)}")
    known_commit = ["git", "rev-parse", "--verify", "--quiet", f"{base}^{{commit}}"]
    if subprocess.run(known_commit, cwd=ROOT, capture_output=True).returncode:
        raise UserError(f"BASE: {shown(base)}, expected a commit")
    try:
        found = preview(stack, ROOT)
    except automation.CommandError as error:
        said = [line for line in str(error).splitlines() if "error:" in line] or [str(error).strip()]
        raise UserError(f"pulumi: {said[-1].partition('error:')[2].strip() or said[-1]}") from None
    text = comment(found, cost_at(base, stack, ROOT), cost(stack, ROOT), len(POLICIES))
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    else:
        click.echo(text, nl=False)
    return int(found.failed)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    try:
        code: int = cli.main(argv, prog_name="python -m review", standalone_mode=False)
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        return error.exit_code
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        return 2
    except (KeyboardInterrupt, click.Abort):
        return 130
    return code


if __name__ == "__main__":
    sys.exit(main())
