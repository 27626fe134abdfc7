"""How help looks: usage lines as we write them, paragraphs that fill the width, and no Python types."""

from __future__ import annotations

import inspect
from typing import Any

from typer.core import TyperCommand, TyperGroup

from forgather_cli.errors import ConfigError


def _without_types(params: list[Any]) -> list[Any]:
    """Typer 0.29 shows ``<bool>`` behind every flag and ``<list[str]>`` behind arguments that have a metavar."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
        if param.param_type_name == "argument":
            param.display_type_rich = lambda ctx: None
    return params


class Command(TyperCommand):
    """A command whose usage line shows the metavars of its arguments as they stand."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # lines of a paragraph joined: rich markup keeps the line ends of a docstring, wherever the terminal's edge is
        paragraphs = inspect.cleandoc(self.help or "").split("\n\n")
        self.help = "\n\n".join(" ".join(part.split()) for part in paragraphs) or None

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))

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
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(param.metavar) for param in arguments)]


class Group(TyperGroup):
    """A command with subcommands, whose names are shown as the docs spell them and are taken with - and with _."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return super().get_command(ctx, cmd_name) or super().get_command(ctx, cmd_name.replace("-", "_"))

    def get_params(self, ctx: Any) -> list[Any]:
        return _without_types(super().get_params(ctx))
