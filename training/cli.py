"""The command line. Its options are the settings of `training.config`, generated from there (`training.options`).

Errors that the user can mend are one line each on standard error and exit code 2; a run that failed is exit code 1 and
goes on with the same command; a run that was asked to stop ends with 128 + the signal's number.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import click
from rich.console import Console

from training.config import Settings
from training.errors import RunFailed, UserError
from training.exporter import exporting
from training.launchers import Stopped, launch_train
from training.options import USAGE, StageCommand, Stages
from training.plan_table import PlanCommand
from training.progress import FollowMetrics, Progress, summary_table
from training.rundir import RunDir

Action = Callable[[Settings, RunDir], None]

# Of an OSError: what the user can mend where the message's file is.
_MENDABLE = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.ENAMETOOLONG}


def prepare_stage(settings: Settings, run: RunDir) -> None:
    """Source -> tokens -> store."""
    from training.data.prepare import prepare

    with run.stage("prepare") as done, Progress("prepare", "MB") as progress:
        manifest = prepare(settings, progress)
        train = manifest["splits"]["train"]
        done(f"{train['documents']:,} documents, {train['tokens']:,} tokens for training")


def precompile_stage(settings: Settings, run: RunDir) -> None:
    """Compiled code into the cache."""
    from training.precompile import asks_for_graphs

    with run.stage("precompile") as done, Progress("precompile", "") as progress:
        progress.note("compiling the training and the evaluation step, or finding them compiled")
        if settings.run.launcher == "ray":
            from training.launchers.ray import precompile_on_ray as compile_all
        elif settings.run.launcher == "mpi":
            from training.launchers.mpi import precompile_on_mpi as compile_all
        else:
            from training.precompile import precompile as compile_all
        if asks_for_graphs(settings):
            if settings.run.launcher == "ray":  # what an embedded Ray starts has the environment of now for ever
                from training.launchers.ray import connect

                connect(settings.parallel.workers)
            os.environ["NEURON_EXTRACT_GRAPHS_ONLY"] = "1"
            progress.note(launch_train(settings))
            del os.environ["NEURON_EXTRACT_GRAPHS_ONLY"]
        summary = compile_all(settings)
        progress.note(summary)
        done(summary)


def train_stage(settings: Settings, run: RunDir) -> None:
    """Train, going on from the last checkpoint."""
    from training.checks import check_before_launch

    check_before_launch(settings)
    run.write_settings(settings)
    with (
        run.stage("train") as done,
        exporting(settings) as metrics,
        Progress("train", "steps") as progress,
        FollowMetrics(run.metrics, settings.train.steps, progress, metrics.take),
    ):
        done(launch_train(settings))


def report_stage(settings: Settings, run: RunDir) -> None:
    """Plots and the page, and what to do next."""
    from training.report import summary, write_report

    with run.stage("report") as done, Progress("report", ""):
        page = write_report(run.path)
        done(str(page))
    tensorboard = f"{_bin('tensorboard')} --logdir {shlex.quote(str(run.path / 'tensorboard'))}"
    console = Console(highlight=False, soft_wrap=True)  # commands and paths are there to be copied whole
    console.print(summary_table(summary(run.path)))
    console.print(f"page:        {page}")
    console.print(f"tensorboard: {tensorboard}")


def export_stage(settings: Settings, run: RunDir) -> None:
    """The newest checkpoint as a Hugging Face folder."""
    from training.export import export

    with run.stage("export") as done, Progress("export", "files") as progress:
        folder = export(settings, None, progress)
        done(str(folder))
    Console().print(f"exported to {folder}", highlight=False)


def run_stages(settings: Settings, run: RunDir) -> None:
    """prepare, precompile, train, report."""
    from training.backends import backend_name

    backend_name(settings)  # a device that is not there is an error before hours of preparation, not after
    for stage in (prepare_stage, precompile_stage, train_stage, report_stage):
        stage(settings, run)
    again = [_bin("python"), "-m", "training", "run", "--config", str(run.settings)]
    steps = ["--train.steps", str(2 * settings.train.steps)]
    Console().print(f"train on:    {shlex.join(again + steps)}", highlight=False, soft_wrap=True)


def _bin(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    with contextlib.suppress(ValueError):
        beside = beside.relative_to(Path.cwd())
    return str(beside)


def _writes(action: Action) -> Callable[[Settings], None]:
    """A stage that changes the run: alone, and with settings that the run can go on with."""

    def start(settings: Settings) -> None:
        run = RunDir(settings.run.dir)
        with run.lock():
            if any(settings.checkpoint_dir.glob("step-*")):
                from training.checks import check_run

                check_run(settings)
            else:  # with checkpoints, settings.yaml is what they were made with until `train` goes on from them
                run.write_settings(settings)
            action(settings, run)

    return start


def _reads(action: Action) -> Callable[[Settings], None]:
    """A stage that looks at a run, live or not."""

    def start(settings: Settings) -> None:
        _settings_of(str(settings.run.dir))
        action(settings, RunDir(settings.run.dir))

    return start


def _settings_of(run_dir: str | None) -> Path | None:
    """The settings that a run wrote. Raises `UserError` when the folder is not a run's."""
    if run_dir is None:
        return None
    path = RunDir(Path(run_dir)).settings
    if not path.is_file():
        raise UserError(f"run.dir: {run_dir} has no settings.yaml, expected the folder of a run")
    return path


@click.group(
    cls=Stages,
    help="Pre-train Llama. To begin: python -m training run --preset tiny",
    epilog="A stage that was stopped or killed goes on with the same command. Settings: STAGE --help.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
def cli() -> None:
    pass


_LOOK = ("run.dir", "data.output")
for _command in (
    StageCommand("run", _writes(run_stages), "prepare, precompile, train and report, one after the other"),
    PlanCommand(),
    StageCommand("prepare", _writes(prepare_stage), "turn the source's text into a store of tokens"),
    StageCommand("precompile", _writes(precompile_stage), "compile what training will need into the cache"),
    StageCommand("train", _writes(train_stage), "train on the store; goes on from the run's last checkpoint"),
    StageCommand("report", _reads(report_stage), "write the loss plot and the page of a run", _settings_of, _LOOK),
    StageCommand(
        "export", _reads(export_stage), "write the last checkpoint as a Hugging Face folder", _settings_of, _LOOK
    ),
):
    cli.add_command(_command)


class _Terminated(BaseException):
    """SIGTERM, outside of training, which has its own way to end."""


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Let SIGTERM end the process as an exception does: files closed, locks released, the stage recorded."""

    def handle(number: int, frame: object) -> None:
        raise _Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _say(message: str, kind: str, style: str) -> None:
    console = Console(stderr=True, style=style)
    for line in message.splitlines():
        console.print(f"{kind}: {line}", highlight=False, markup=False, soft_wrap=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (that of the process by default); returns the exit code."""
    goes_on = "the same command goes on"
    try:
        with _sigterm_unwinds():
            cli.main(argv, prog_name="python -m training", standalone_mode=False)
        return 0
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return 2
    except click.ClickException as error:
        _say(f"{error.format_message().rstrip('.')}, expected STAGE {USAGE}", "error", "red")
        return 2
    except (UserError, RunFailed) as error:
        _say(str(error), "error", "red")
        return error.exit_code
    except Stopped as error:
        _say(f"{error}; {goes_on} from there", "stopped", "yellow")
        return error.exit_code
    except (KeyboardInterrupt, click.Abort, _Terminated) as error:
        number = signal.SIGTERM if isinstance(error, _Terminated) else signal.SIGINT
        _say(f"{goes_on} from what is done", "stopped", "yellow")
        return 128 + number
    except OSError as error:
        if error.errno not in _MENDABLE:
            raise
        _say(f"{error.filename or 'disk'}: {error.strerror}, expected room and leave to write", "error", "red")
        return 2
