"""How a command about a stack ends: mistakes of the user and refusals of AWS are one line each."""

from __future__ import annotations

from collections.abc import Sequence

import click
from botocore.exceptions import BotoCoreError, ClientError

from training.errors import UserError


def run(command: click.Command, argv: Sequence[str] | None) -> int:
    """Run a command line; returns the exit code: the command's own, 2 for what the user can mend, 1 for AWS's no."""
    try:
        code = command.main(argv, prog_name=f"python -m infra.{command.name}", standalone_mode=False)
    except UserError as error:
        return _refused(str(error), error.exit_code)
    except click.ClickException as error:
        return _refused(error.format_message(), 2)
    except (BotoCoreError, ClientError) as error:
        return _refused(f"AWS: {error}", 1)
    except (KeyboardInterrupt, click.Abort):
        return 130
    return code if isinstance(code, int) else 0


def _refused(message: str, code: int) -> int:
    click.echo("\n".join(f"error: {line}" for line in message.splitlines()), err=True)
    return code
