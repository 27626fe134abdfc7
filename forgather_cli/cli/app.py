"""The ``forgather`` program: its commands, and the edge where errors become messages and exit codes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Annotated, Any, NoReturn

import typer

from forgather_cli import __version__
from forgather_cli.cli.style import Command, Group, as_mistake
from forgather_cli.errors import ForgatherError, not_installed, too_few_descriptors
from forgather_cli.launch.error_report import report_error
from forgather_cli.terminal.bars import doing

COMMANDS = {
    "train": "forgather_cli.cli.train:train",
    "resume": "forgather_cli.cli.resume:resume",
    "plan": "forgather_cli.plan.command:plan",
    "eval": "forgather_cli.cli.evaluate:evaluate",
    "generate": "forgather_cli.cli.generate:generate",
    "finalize": "forgather_cli.finalize.command:finalize",
    "serve": "forgather_cli.serve.command:serve",
    "doctor": "forgather_cli.housekeeping.doctor:doctor",
    "config": "forgather_cli.cli.config:app",
    "recipe": "forgather_cli.cli.config:recipe_app",
    "data": "forgather_cli.cli.data:app",
    "control": "forgather_cli.cli.control:app",
    "checkpoint": "forgather_cli.cli.checkpoint:app",
    "runs": "forgather_cli.housekeeping.runs:app",
    "logs": "forgather_cli.cli.logs:app",
    "diloco": "forgather_cli.cli.diloco:app",
    "cache": "forgather_cli.housekeeping.cache:app",
}
"""The commands, as help lists them: the function of each, or the app of its subcommands."""

_HELP = """Train language models from composed configs.

[cyan]forgather train[/]                              the default recipe, no download
[cyan]forgather train model=nano max_steps=50[/]      options and settings by name
[cyan]forgather train learning_rate=1e-3,3e-3 -m[/]   a sweep
[cyan]forgather config options[/]                     what there is to choose from"""


class Commands(Group):
    """Those of the table. Each is imported when it is asked for, and help leaves out those that are not there."""

    def __init__(self, **attributes: Any) -> None:
        # with the names, which a mistyped one is compared with
        super().__init__(**{**attributes, "commands": dict.fromkeys(COMMANDS)})

    def list_commands(self, ctx: Any) -> list[str]:
        folders = {name: find_spec(where.rpartition(".")[0]) for name, where in COMMANDS.items()}
        return [name for name, folder in folders.items() if folder and folder.origin]  # None: compiled modules are left

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        with doing("importing the commands"):
            found = resolve_name(COMMANDS[cmd_name])
        parent = typer.Typer(rich_markup_mode=self.rich_markup_mode)  # typer 0.20's own is a placeholder
        if isinstance(found, typer.Typer):
            parent.add_typer(found, name=cmd_name)
        else:
            parent.command(cmd_name, cls=Command)(found)
        return typer.main.get_group(parent).commands[cmd_name]


app = typer.Typer(
    name="forgather",
    cls=Commands,
    help=_HELP,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda name: name.replace("_", "-"),
    },
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forgather {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None: ...


def main() -> NoReturn:
    """Run the command line. Errors for users end with their exit code; anything else with a traceback and 1."""
    try:
        code = app(prog_name="forgather", standalone_mode=False)
    except typer.Abort:
        typer.echo("nothing was done", err=True)
        sys.exit(1)
    except Exception as error:  # the edge of the process
        told = too_few_descriptors(error) or not_installed(error) or as_mistake(error) or error
        if not isinstance(told, ForgatherError):
            raise
        report_error(told)
        sys.exit(told.exit_code)
    sys.exit(code or 0)
