"""``forgather checkpoint average``: the mean of several checkpoints' weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from forgather_cli.cli.output import AsJson, console, only_json, print_json
from forgather_cli.errors import CheckpointError, ConfigError
from forgather_cli.run_dir import RunDir

Sources = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE...", help="Checkpoints or model directories; with --last one run.", show_default=False
    ),
]


def average(
    sources: Sources,
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="OUT", help="A directory that does not exist.", show_default=False)
    ],
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="K", min=2, help="The last K checkpoints of a run.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the mean of several checkpoints' weights as a model directory.

    The sum is made in fp32, tensor by tensor; the result has the checkpoints' dtype. OUT has config and tokenizer, and
    [cyan]provenance.json[/] says what it is the mean of.
    """
    from forgather_cli.checkpoint.files import check_absent
    from forgather_cli.checkpoint.sources import check_sources

    with only_json(as_json):
        check_absent(out)
        members = sources if last is None else _last(sources, last)
        check_sources(members)
        from forgather_cli.checkpoint.average import average_models

        average_models(members, out, verified=last is not None)
    if as_json:
        print_json({"path": str(out), "sources": [str(member) for member in members]})
    else:
        typer.echo(f"mean of {', '.join(member.name for member in members)}")
        typer.echo(str(out))


def _last(sources: list[Path], count: int) -> list[Path]:
    """The run's last ``count`` healthy checkpoints, oldest first."""
    if len(sources) != 1:
        raise ConfigError(f"--last: takes the checkpoints of one run, got {len(sources)} sources; name one run")
    run = RunDir(sources[0])
    if not run.checkpoints.is_dir():
        raise CheckpointError(
            f"{run.root}: has no checkpoints; --last takes the directory of a run that has saved some"
        )
    from forgather_cli.checkpoint.average import enough_of, last_checkpoints

    members = last_checkpoints(run, count)
    enough_of(run, members, count, "--last", console(stderr=True).print)
    return members
