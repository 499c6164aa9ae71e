"""The settings of `training.config` as options of the command line, and the pages of `--help`.

Values stay text here: one schema, training.config, says what is valid and in which words.
"""

from __future__ import annotations

import difflib
import inspect
import itertools
import types
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import click
from pydantic.fields import FieldInfo

from training.config import PRESETS, Settings, load_settings, preset_names, setting_fields
from training.errors import UserError
from training.messages import expected_one_of

USAGE = "[--preset NAME | --config FILE] [--SECTION.KEY VALUE ...]"
ALIASES = {"run.launcher": ["--launcher"], "parallel.workers": ["--workers"]}
_METAVARS = {int: "N", float: "X", bool: "true|false", str: "TEXT", Path: "PATH"}

Given = Mapping[str, tuple[str, ...]]


class Stages(click.Group):
    """The stages, in the order in which a user meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in self.commands:
            raise UserError(f"{args[0]}: unknown stage{expected_one_of(args[0], list(self.commands))}")
        return super().resolve_command(ctx, args)

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, f"STAGE {USAGE}")

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Stages"):
            formatter.write_dl([(name, command.help or "") for name, command in self.commands.items()])
        with formatter.section("Presets"):
            formatter.write_dl([(name, _first_comment(PRESETS / f"{name}.yaml")) for name in preset_names()])


class StageCommand(click.Command):
    """One stage, with every setting as an option.

    Args:
        action: called with the settings.
        file: the file to read settings from when the command line names none.
        shown: sections (or keys, as `run.dir`) that `--help` lists; the others are options all the same.
    """

    def __init__(
        self,
        name: str,
        action: Callable[[Settings], None],
        help: str,
        file: Callable[[str | None], Path | None] = lambda run_dir: None,
        shown: Iterable[str] = (),
    ) -> None:
        presets = ", ".join(preset_names())
        sources = [
            click.Option(["--preset"], multiple=True, metavar="NAME", help=f"named settings: {presets}"),
            click.Option(["--config"], multiple=True, metavar="FILE", help="YAML, such as a run's settings.yaml"),
        ]
        self.options = {
            key: click.Option(
                [f"--{key}", *ALIASES.get(key, []), _variable(key)],
                multiple=True,
                metavar=metavar(field.annotation),
                help=help_of(field),
                hidden=bool(shown) and key not in shown and key.partition(".")[0] not in shown,
            )
            for key, field in setting_fields().items()
        }
        super().__init__(
            name,
            params=[*sources, *self.options.values()],
            help=help,
            callback=self._run,
            context_settings={"allow_extra_args": True},
        )
        self._action, self._file = action, file

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        options = {name for param in self.params for name in param.opts}
        for arg, value in itertools.zip_longest(args, args[1:]):
            name, equals, _ = arg.partition("=")
            if name in options and not equals and (value is None or value.startswith("--")):
                raise UserError(f"{name}: no value, expected one after it")
            if name.startswith("--") and name not in options and name not in ctx.help_option_names:
                near = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
                raise UserError(
                    f"{name}: unknown option, {f'did you mean {near[0]}?' if near else f'expected {USAGE}'}"
                )
        rest = super().parse_args(ctx, args)
        if ctx.args:
            raise UserError(f"{ctx.args[0]}: stands alone, expected {USAGE}")
        return rest

    def _run(self, preset: tuple[str, ...], config: tuple[str, ...], **given: tuple[str, ...]) -> None:
        self._action(load_settings(*self.chosen(preset, config, given)))

    def chosen(
        self, preset: tuple[str, ...], config: tuple[str, ...], given: Given
    ) -> tuple[str | None, Path | None, dict[str, str]]:
        """What `load_settings` takes: the preset, the file, and the settings of the command line."""
        overrides = {key: once(key, given[_variable(key)]) for key in self.options}
        chosen = {key: value for key, value in overrides.items() if value is not None}
        name, path = once("preset", preset), once("config", config)
        file = self._file(chosen.get("run.dir")) if name is path is None else None
        return name, Path(path) if path is not None else file, chosen

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, USAGE)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        write_options(ctx, formatter, "Where settings come from", self.params[:2])
        formatter.write_paragraph()
        formatter.write_text("The options below go before that file, and the file before the defaults shown here.")
        for section, field in Settings.model_fields.items():
            options = [option for key, option in self.options.items() if key.startswith(f"{section}.")]
            purpose = (inspect.getdoc(field.annotation) or "").rstrip(".")
            write_options(ctx, formatter, f"{section} - {purpose[0].lower()}{purpose[1:]}", options)


def write_options(
    ctx: click.Context, formatter: click.HelpFormatter, title: str, options: Iterable[click.Parameter]
) -> None:
    """A section of a `--help` page: those of the options that are not hidden."""
    records = [record for option in options if (record := option.get_help_record(ctx)) is not None]
    if records:
        with formatter.section(title):
            formatter.write_dl(records)


def _variable(key: str) -> str:
    return key.replace(".", "__")


def once(key: str, values: tuple[str, ...]) -> str | None:
    """The one value that an option was given, None for none. Raises `UserError` for several."""
    if len(values) > 1:
        raise UserError(f"--{key}: given {len(values)} times ({', '.join(values)}), expected once")
    return values[0] if values else None


def help_of(field: FieldInfo) -> str:
    """What an option is for, and its default."""
    default = default_text(field)
    return f"{field.description} [default: {default}]" if default else field.description or ""


def default_text(field: FieldInfo) -> str:
    """A default as one would type it; "" for one that is derived, from what the description says, or absent."""
    if field.default is None:
        return ""
    if isinstance(field.default, bool):
        return str(field.default).lower()
    return f"{field.default:g}" if isinstance(field.default, float) else str(field.default)


def metavar(annotation: Any) -> str:
    """What a value looks like, from its type."""
    if get_origin(annotation) is Literal:
        return "|".join(get_args(annotation))
    if get_origin(annotation) in (Union, types.UnionType):
        return "|".join(metavar(part) for part in get_args(annotation) if part is not types.NoneType)
    return _METAVARS[annotation]


def _first_comment(path: Path) -> str:
    """What a preset says of itself in its first line."""
    with path.open(encoding="utf-8") as file:
        return file.readline().lstrip("# ").strip()
