"""How help looks: usage lines as we write them, paragraphs that fill the width, and no Python types.

What typer finds wrong in a command line is told as any other mistake is.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from forgather_cli.errors import ConfigError

_CLICK_EXCEPTION: Any = typer.BadParameter.__mro__[2]
"""click's, or since typer 0.29 typer's own."""


def as_mistake(error: Any) -> ConfigError | None:
    """The mistake in a command line that typer has found; None for any other error."""
    if not isinstance(error, _CLICK_EXCEPTION):
        return None
    context, message = getattr(error, "ctx", None), error.format_message().rstrip(".")
    if context is None or not message:  # the latter: no argument was given, and help is shown
        sys.exit(message or error.exit_code)
    usage = " ".join(context.get_usage().split()).removeprefix("Usage: ")
    usage = f"{usage} ({context.command_path} -h tells more)"
    return ConfigError(f"{message} Write {usage}" if message.endswith("?") else f"{message}; write {usage}")


@contextlib.contextmanager
def _trimmed() -> Iterator[None]:
    """Elsewhere than in a terminal no line of help has blanks behind it."""
    if sys.stdout.isatty():
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()) as page:
        yield
    print("\n".join(line.rstrip() for line in page.getvalue().splitlines()))


def _without_types(params: list[Any]) -> list[Any]:
    """Typer 0.29 shows ``<bool>`` behind every flag and ``<list[str]>`` behind arguments that have a metavar."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
    return params


def _at_home(value: Any, takes_path: bool) -> Any:
    """A path, or each of several, with its ``~`` expanded: a shell leaves that of ``--output=~/FILE`` as it is. Of
    texts, those with a slash where the argument ``takes_path``; ~KEY is an override. Raises ConfigError.
    """
    if isinstance(value, list):
        return [_at_home(each, takes_path) for each in value]
    text = str(value)
    is_path = isinstance(value, Path) or (takes_path and isinstance(value, str) and "/" in text.partition("=")[0])
    if not is_path or not text.startswith("~"):
        return value
    if (found := os.path.expanduser(text)).startswith("~"):
        raise ConfigError(f"{text}: its ~ stands for no home directory; write ./{text} for a file of this name")
    return Path(found) if isinstance(value, Path) else found


class Command(TyperCommand):
    """A command whose usage line shows the metavars of its arguments as they stand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # lines of a paragraph joined: rich markup keeps the line ends of a docstring, wherever the terminal's edge is
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(part.split()) for part in paragraphs) or None

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _trimmed():
            super().format_help(ctx, formatter)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; for a setting given as an option raise ConfigError, which says how settings are written."""
        params = self.get_params(ctx)
        options = {option.replace("-", "_") for param in params for option in (*param.opts, *param.secondary_opts)}
        words = [word.partition("=")[0] for word in args if word.startswith("--")]
        unknown = [word for word in words if word.replace("-", "_") not in options]
        if unknown and any("OVERRIDE" in str(param.metavar) for param in params):
            from forgather_cli.config.paths import settings

            names = {word: word[2:].replace("-", "_") for word in unknown}
            known = {part for setting in settings().values() for part in (setting.path, setting.leaf)}
            if wrong := [f"{word}: settings have no dashes; write {n}=..." for word, n in names.items() if n in known]:
                raise ConfigError(wrong)
        rest = super().parse_args(ctx, args)
        for param in params:
            takes_path = any(word in str(param.metavar) for word in ("RECIPE", "RUN", "SOURCE"))
            if param.name in ctx.params:
                ctx.params[param.name] = _at_home(ctx.params[param.name], takes_path)
        return rest

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(param.metavar) for param in arguments)]


class Group(TyperGroup):
    """A command with subcommands, whose names are shown as the docs spell them and are taken with - and with _."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, cmd_name.replace("-", "_"))

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        with _trimmed():
            super().format_help(ctx, formatter)
