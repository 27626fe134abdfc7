"""How help looks: usage lines as we write them, and flags without a type."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


def _quiet_flags(params: list[Any]) -> list[Any]:
    """Typer 0.29 shows ``<bool>`` behind every flag; an empty metavar is shown as nothing."""
    for param in params:
        if getattr(param, "is_flag", False) and param.metavar is None:
            param.metavar = ""
    return params


class Command(TyperCommand):
    """A command whose usage line shows the metavars of its arguments as they stand."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quiet_flags(super().get_params(ctx))

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        return ["[OPTIONS]", *(str(param.metavar) for param in arguments)]


class Group(TyperGroup):
    """A command with subcommands."""

    def get_params(self, ctx: Any) -> list[Any]:
        return _quiet_flags(super().get_params(ctx))
