"""The command line. Its options are the settings of `training.config`, generated from there.

Errors that the user can mend are one line each on standard error and exit code 2; a run that failed is exit code 1 and
goes on with the same command; a run that was asked to stop ends with 128 + the signal's number.
"""

from __future__ import annotations

import contextlib
import errno
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from training.checks import check_before_launch
from training.config import Settings, load_settings, preset_names, setting_fields
from training.errors import RunFailed, UserError
from training.launchers import Stopped, launch_train
from training.progress import FollowMetrics, Progress, summary_table
from training.rundir import RunDir

err = Console(stderr=True)


class StageCommand(click.Command):
    """A stage, with every setting as an option; `--help` lists them by section."""

    def __init__(self, name: str, action: Callable[[Settings, RunDir], None], help: str) -> None:
        common: list[click.Parameter] = [
            click.Option(["--preset"], metavar="NAME", help=f"a file of training/presets: {', '.join(preset_names())}"),
            click.Option(["--config"], metavar="FILE", type=click.Path(path_type=Path), help="a YAML file of settings"),
            click.Option(["--launcher"], metavar="NAME", help="same as --run.launcher"),
            click.Option(["--workers"], metavar="N", help="same as --parallel.workers"),
        ]
        # Values stay text here: one schema, training.config, says what is valid and in which words.
        settings = [
            click.Option([f"--{key}", key.replace(".", "__")], metavar="VALUE", help=_help_of(field))
            for key, field in setting_fields().items()
        ]
        super().__init__(name, params=common + list(settings), help=help, callback=self._run)
        self._action = action

    def _run(
        self, preset: str | None, config: Path | None, launcher: str | None, workers: str | None, **given: Any
    ) -> None:
        overrides = {key.replace("__", "."): value for key, value in given.items() if value is not None}
        if launcher is not None:
            overrides["run.launcher"] = launcher
        if workers is not None:
            overrides["parallel.workers"] = workers
        settings = load_settings(preset, config or _settings_of_run(self.name, preset, overrides), overrides)
        self._action(settings, RunDir(settings.run.dir))

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if (record := param.get_help_record(ctx)) is not None:
                section = param.name.partition("__")[0] if "__" in (param.name or "") else "options"  # type: ignore[union-attr]
                groups.setdefault(section, []).append(record)
        for section, records in groups.items():
            with formatter.section(section):
                formatter.write_dl(records)


def _help_of(field: Any) -> str:
    default = "" if field.default is None else f" [default: {field.default}]"
    return f"{field.description}{default}"


def _settings_of_run(stage: str | None, preset: str | None, overrides: dict[str, str]) -> Path | None:
    """`report` and `export` look at a run that exists: its own settings are the ones to read."""
    if stage in ("report", "export") and preset is None and "run.dir" in overrides:
        path = RunDir(Path(overrides["run.dir"])).settings
        if not path.exists():
            raise UserError(f"run.dir: {overrides['run.dir']} has no settings.yaml, expected the folder of a run")
        return path
    return None


def prepare_stage(settings: Settings, run: RunDir) -> None:
    """Source -> tokens -> store."""
    from training.data.prepare import prepare

    with run.stage("prepare") as done, Progress("prepare", "MB") as progress:
        manifest = prepare(settings, progress)
        train = manifest["splits"]["train"]
        done(f"{train['documents']:,} documents, {train['tokens']:,} tokens for training")


def precompile_stage(settings: Settings, run: RunDir) -> None:
    """Compiled code into the cache."""
    with run.stage("precompile") as done, Progress("precompile", "steps") as progress:
        progress.update(0, 1)
        if settings.run.launcher == "ray":
            from training.launchers.ray import precompile_on_ray as compile_all
        else:
            from training.precompile import precompile as compile_all
        summary = compile_all(settings)
        progress.update(1, 1)
        progress.note(summary)
        done(summary)


def train_stage(settings: Settings, run: RunDir) -> None:
    """Train, going on from the last checkpoint."""
    check_before_launch(settings)
    with (
        run.stage("train") as done,
        Progress("train", "steps") as progress,
        FollowMetrics(run.metrics, settings.train.steps, progress),
    ):
        done(launch_train(settings))


def report_stage(settings: Settings, run: RunDir) -> None:
    """Plots and the page, and what to do next."""
    from training.report import summary, write_report

    with run.stage("report") as done, Progress("report", "pages") as progress:
        page = write_report(run.path)
        progress.update(1, 1)
        done(str(page))
    console = Console()
    console.print(summary_table(summary(run.path)))
    console.print(f"page:        {page}", highlight=False)
    console.print(
        f"tensorboard: {_bin('tensorboard')} --logdir {shlex.quote(str(run.path / 'tensorboard'))}", highlight=False
    )


def export_stage(settings: Settings, run: RunDir) -> None:
    """The newest checkpoint as a Hugging Face folder."""
    from training.export import export

    with run.stage("export") as done, Progress("export", "files") as progress:
        folder = export(settings, None, progress)
        done(str(folder))
    Console().print(f"exported to {folder}", highlight=False)


def run_stages(settings: Settings, run: RunDir) -> None:
    """prepare, precompile, train, report."""
    for stage in (prepare_stage, precompile_stage, train_stage, report_stage):
        stage(settings, run)
    again = shlex.join(["python", "-m", "training", *sys.argv[1:]])
    Console().print(f"train on:    {again} --train.steps {2 * settings.train.steps}", highlight=False, soft_wrap=True)


def _bin(name: str) -> str:
    beside = Path(sys.executable).with_name(name)
    with contextlib.suppress(ValueError):
        beside = beside.relative_to(Path.cwd())
    return str(beside)


def _locked(action: Callable[[Settings, RunDir], None]) -> Callable[[Settings, RunDir], None]:
    def hold(settings: Settings, run: RunDir) -> None:
        with run.lock():
            run.write_settings(settings)
            action(settings, run)

    return hold


@click.group(
    help="Pre-train Llama: prepare the data, compile, train, report. `STAGE --help` lists the settings.",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
def cli() -> None:
    pass


for _name, _action, _help in (
    ("prepare", _locked(prepare_stage), "Turn the source's text into a store of tokens."),
    ("precompile", _locked(precompile_stage), "Compile what training will need into the cache."),
    ("train", _locked(train_stage), "Train on the store; goes on from the run's last checkpoint."),
    ("report", report_stage, "Write the loss plot and the page of a run."),
    ("export", export_stage, "Write the last checkpoint as a Hugging Face folder."),
    ("run", _locked(run_stages), "prepare, precompile, train and report, one after the other."),
):
    cli.add_command(StageCommand(_name, _action, _help))


@contextlib.contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn what a user can act on into lines and an exit code."""
    try:
        yield
    except click.ClickException as error:
        _fail(error.format_message(), 2)
    except (UserError, RunFailed) as error:
        _fail(str(error), error.exit_code)
    except Stopped as error:
        _fail(f"{error}; the same command goes on from there", error.exit_code, "stopped")
    except (KeyboardInterrupt, click.Abort):
        _fail("the same command goes on from what is done", 130, "interrupted")
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        _fail(f"{error.filename or 'disk'}: no space left, expected room to write", 2)


def _fail(message: str, code: int, kind: str = "error") -> None:
    for line in message.splitlines():
        err.print(
            f"{kind}: {line}",
            style="red" if kind == "error" else "yellow",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
    sys.exit(code)


def main() -> int:
    """Run the command line; returns the exit code."""
    with _plain_errors():
        cli.main(prog_name="python -m training", standalone_mode=False)
    return 0
