"""The ``forgather`` program: its commands, and the edge where errors become messages and exit codes."""

from __future__ import annotations

import sys
from typing import Annotated, NoReturn

import typer

from forgather_cli import __version__
from forgather_cli.cli import (
    checkpoint,
    config,
    control,
    data,
    diloco,
    evaluate,
    finalize,
    generate,
    logs,
    plan,
    resume,
    train,
)
from forgather_cli.cli.style import Command, Group, as_mistake
from forgather_cli.errors import ForgatherError, too_few_descriptors
from forgather_cli.housekeeping import cache, doctor, runs
from forgather_cli.launch.error_report import report_error

_HELP = """Train language models from composed configs.

[cyan]forgather train[/]                              the default recipe, no download
[cyan]forgather train model=nano max_steps=50[/]      options and settings by name
[cyan]forgather train learning_rate=1e-3,3e-3 -m[/]   a sweep
[cyan]forgather config options[/]                     what there is to choose from"""

app = typer.Typer(
    name="forgather",
    cls=Group,
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


app.command("train", cls=Command)(train.train)
app.command("resume", cls=Command)(resume.resume)
app.add_typer(config.app, name="config")
app.add_typer(config.recipe_app, name="recipe")
app.add_typer(data.app, name="data")
app.command("plan", cls=Command)(plan.plan)
app.command("eval", cls=Command)(evaluate.evaluate)
app.command("generate", cls=Command)(generate.generate)
app.command("finalize", cls=Command)(finalize.finalize)
app.add_typer(control.app, name="control")
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(runs.app, name="runs")
app.add_typer(logs.app, name="logs")
app.add_typer(diloco.app, name="diloco")
app.add_typer(cache.app, name="cache")
app.command("doctor", cls=Command)(doctor.doctor)


def main() -> NoReturn:
    """Run the command line. Errors for users end with their exit code; anything else with a traceback and 1."""
    try:
        code = app(prog_name="forgather", standalone_mode=False)
    except typer.Abort:
        typer.echo("nothing was done", err=True)
        sys.exit(1)
    except Exception as error:  # the edge of the process
        told = too_few_descriptors(error) or as_mistake(error) or error
        if not isinstance(told, ForgatherError):
            raise
        report_error(told)
        sys.exit(told.exit_code)
    sys.exit(code or 0)
