"""``forgather diloco``: serve workers over slow links, and look at a server and tell it what to do."""

from __future__ import annotations

import os
import ssl
import sys
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.output import (
    AsJson,
    Col,
    console,
    human,
    human_bytes,
    human_seconds,
    interruptible,
    print_json,
    table_of,
)
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import (
    ConfigDir,
    Words,
    complete_words,
    load,
    load_config_of,
    quoted,
    split_words,
)
from forgather_cli.documents.regular_files import read_json_object, read_text
from forgather_cli.errors import ConfigError, ControlError, SetupError
from forgather_cli.launch.place import joined
from forgather_cli.run_dir import RunDir, is_model_directory, model_in, run_of
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from rich.console import RenderableType

    from forgather_cli.config.load import Loaded
    from forgather_cli.config.schema import DilocoServerSettings
    from forgather_cli.diloco.client import Client

_REDRAW = 1.0  # seconds
_PAUSE = 0.2  # seconds between two looks at whether a command is done

app = typer.Typer(
    cls=Group,
    help="Train on machines that only slow links join: workers train by themselves and now and then average what "
    "they have changed, by a server.",
    no_args_is_help=True,
)


# -------------------------------------------------------------------------------------------------------------- server


@app.command(cls=Command)
def server(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SOURCE] [OVERRIDE]...",
            help="A recipe (its model with fresh weights), a run, a checkpoint, or a model directory; and settings.",
            autocompletion=complete_words,
            show_default=False,
        ),
    ] = None,
    config_dir: ConfigDir = None,
) -> None:
    """Serve the model that workers train together.

    Settings of the server are [cyan]diloco.NAME=VALUE[/] (forgather config explain
    diloco.workers); the others are of the recipe, which the workers train. It needs no GPU, and
    its memory is three times the weights in fp32. Its run has checkpoints like any other, and
    forgather resume RUN goes on with it.
    """
    raise typer.Exit(_serve(partial(_composed, *split_words(words), config_dir)))


def _composed(source: str | None, overrides: list[str], config_dir: Path | None) -> tuple[Loaded, DilocoServerSettings]:
    """The config of SOURCE, and the server's own settings. Raises ConfigError with the mistakes of both."""
    from forgather_cli.checkpoint.choice import choose
    from forgather_cli.config.diloco import load_server_settings, split_server_overrides

    recipes, ours = split_server_overrides(overrides)
    path, start = Path(source or "recipe"), source
    is_directory = source is not None and path.is_dir()
    run = run_of(path) if is_directory else None
    if is_directory and run is None:
        if not is_model_directory(model_in(path)):
            raise SetupError(f"{source}: is no run, no checkpoint and no model directory; give one, or a recipe")
        start = "default"
        recipes = ["model=pretrained", f"model.path={quoted(path)}", f"data.tokenizer={quoted(path)}", *recipes]
    elif run is not None:
        if run.root.resolve() == path.resolve():
            if (chosen := choose(run)) is None:
                raise SetupError(
                    f"{source}: the run has no checkpoint to begin from; give its recipe for fresh weights"
                )
            path = chosen.path
        start = str(run.root)
        recipes = [*recipes, f"resume_from_checkpoint={quoted(path.absolute())}", "resume_components=[model]"]
    problems: list[str] = []
    try:
        loaded = load_config_of(start, recipes, config_dir, trust_config=True)
    except ConfigError as error:
        problems += error.problems
    try:
        settings = load_server_settings(ours)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(problems)
    return loaded, settings


def resume_server(run_dir: Path, overrides: list[str], config_dir: Path | None) -> int:
    """``forgather resume`` of a server's run; returns the exit code."""

    def compose() -> tuple[Loaded, DilocoServerSettings]:
        from forgather_cli.config.diloco import load_server_settings, split_server_overrides
        from forgather_cli.config.load import reload_config

        recipes, ours = split_server_overrides(overrides)
        settings = load_server_settings(ours, RunDir(run_dir).diloco)
        return reload_config(run_dir, recipes, config_dir=config_dir), settings

    return _serve(compose)


def _serve(compose: Callable[[], tuple[Loaded, DilocoServerSettings]]) -> int:
    loaded, settings = compose()
    with doing("importing torch"):
        from forgather_cli.config.diloco import server_settings_text
        from forgather_cli.diloco.serve import work
        from forgather_cli.launch import start

    return start.serve(loaded, partial(work, settings), server_settings_text(settings))


# -------------------------------------------------------------------------------------------------------------- worker


@app.command(cls=Command)
def worker(
    words: Words = None,
    address: Annotated[
        str, typer.Option("--server", metavar="HOST:PORT", help="Where the server is.", show_default=False)
    ] = "",
    config_dir: ConfigDir = None,
) -> None:
    """Train a recipe together with the server's other workers.

    As [cyan]forgather train[/] with the callback [cyan]diloco[/]: on one device or many, by any
    trainer. The server's token is in DILOCO_TOKEN or in the file
    [cyan]callbacks.diloco.token_file[/].
    """
    from forgather_cli.launch.start import launch
    from forgather_cli.worker import work

    chosen = [f"callbacks.diloco.server_addr={address}"] if address else ["+callbacks.diloco={}"]
    composed = partial(load, [*(words or []), *chosen], config_dir, trust_config=True)
    raise typer.Exit(launch(composed, work, joined(words or [])))


# --------------------------------------------------------------------------------------------------- a server that runs


RunArgument = Annotated[
    Path | None, typer.Argument(metavar="[RUN]", help="The server's run directory.", show_default=False)
]
ServerOption = Annotated[
    str | None,
    typer.Option("--server", metavar="HOST:PORT", help="The server, where its run directory is not at hand.",
                 show_default=False),
]  # fmt: skip
TokenFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="File with the server's token, else DILOCO_TOKEN is read.", show_default=False),
]
ControlTokenFile = Annotated[
    Path | None,
    typer.Option("--control-token-file", metavar="FILE",
                 help="File with the server's control token, else DILOCO_CONTROL_TOKEN is read.", show_default=False),
]  # fmt: skip


def _client(run: Path | None, server: str | None, token_file: Path | None, kind: str = "token") -> Client:
    """To be closed: of the server that was named, with a token of this ``kind``. Raises ConfigError, ControlError."""
    from forgather_cli.diloco.client import Client

    if (run is None) == (server is None):
        raise ConfigError("give the server's run directory, or --server HOST:PORT")
    fail = ConfigError
    variable = f"DILOCO_{kind.replace('-', '_').upper()}"
    token = read_text(token_file, fail).strip() if token_file is not None else os.environ.get(variable, "")
    if server is not None:
        if not token:
            raise ConfigError(f"--server: needs the server's {kind}; set {variable}, or give --{kind}-file FILE")
        return Client(server, token, setting="--server")
    assert run is not None
    place = RunDir(run)
    if not place.diloco.is_file():
        raise ControlError(f"{run}: is no run of a DiLoCo server; give one, or --server HOST:PORT")
    if not place.diloco_address.is_file():
        raise ControlError(f"{run}: its server does not run; forgather resume {run} goes on with it")
    known = read_json_object(place.diloco_address)
    file = Path(known["token_file"]) if kind == "token" else place.diloco_control_token
    token = token or read_text(file, fail).strip()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(known["host"], known["host"])
    address = f"[{host}]:{known['port']}" if ":" in host else f"{host}:{known['port']}"
    tls = None
    if known["tls"]:
        from forgather_cli.config.diloco import load_server_settings

        tls = ssl.create_default_context(cafile=load_server_settings([], place.diloco).tls_certificate)
        tls.check_hostname = False  # our own file says who it is; the name in its certificate may be another one's
    return Client(f"https://{address}" if tls else address, token, setting=str(run), tls=tls)


@app.command(cls=Command)
def status(
    run: RunArgument = None,
    server: ServerOption = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once, and not until it ends.")] = False,
    token_file: TokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Show a server's round and its workers, anew every second until it ends."""
    with closing(_client(run, server, token_file)) as found:
        with doing("waiting for the server"):
            document = found.call("/status")
        if as_json:
            print_json(document)
        elif once or not sys.stdout.isatty():
            console().print(_shown(document))
        else:
            from rich.live import Live

            shown = _shown(document)
            with suppress(ControlError), interruptible(), Live(shown, console=console(), auto_refresh=False) as live:
                while True:
                    time.sleep(_REDRAW)
                    live.update(_shown(found.call("/status")), refresh=True)
            tell(f"no server answers at {found.address} any more: it has ended")


def _shown(status: dict[str, Any]) -> RenderableType:
    from rich.console import Group as Lines
    from rich.text import Text

    limit = f" of {status['max_rounds']}" if status["max_rounds"] else ""
    number = "-" if status["round"] is None else f"{status['round']}{limit}"
    checkpoint = "none" if status["checkpoint"] is None else f"round {status['checkpoint']}"
    head = (
        f"round {number}, {status['state']} for {human_seconds(status['round_seconds'])}; {human(status['tokens'])} "
        f"targets, checkpoint {checkpoint}; {human_bytes(status['received'])} in, {human_bytes(status['sent'])} out"
    )
    columns = (Col("worker", copied=True), Col("slot", right=True), Col("state"), Col("step", right=True),
               Col("tok/s", right=True), Col("heard", right=True), Col("sent", right=True, droppable=2),
               Col("received", right=True, droppable=3), Col("host", copied=True))  # fmt: skip
    rows = [
        (
            each["worker"],
            "-" if each["slot"] is None else str(each["slot"]),
            each["state"],
            "-" if each["step"] is None else str(each["step"]),
            human(each["tokens_per_second"]),
            f"{human_seconds(each['silent'])} ago",
            human_bytes(each["sent"]),
            human_bytes(each["received"]),
            each["host"],
        )
        for each in status["workers"]
    ]
    styles = [_STYLES.get(each["state"], "") for each in status["workers"]]
    lines: list[RenderableType] = [Text(head)]
    if rows:
        lines.append(table_of(columns, rows, styles))
    lines += [Text(f"{each['worker']}: {each['bounded']}") for each in status["workers"] if each.get("bounded")]
    return Lines(*lines, Text(status["why"]))


_STYLES = {"evicted": "dim", "left": "dim", "rejected": "red", "sent": "green"}


@app.command(cls=Command)
@doing("waiting for the checkpoint of the newest round")
def save(
    run: RunArgument = None,
    server: ServerOption = None,
    control_token_file: ControlTokenFile = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint of the newest round now, and go on."""
    with closing(_client(run, server, control_token_file, "control-token")) as found:
        wanted = found.call("/control", {"command": "save"})["round"]
        if wanted is None:
            raise ControlError("no round is open yet, so there is nothing to save; wait for its workers")
        while (status := found.call("/status"))["checkpoint"] is None or status["checkpoint"] < wanted:
            time.sleep(_PAUSE)
    path = RunDir(Path(status["run"])).checkpoint(status["checkpoint"])
    print_json({"round": status["checkpoint"], "checkpoint": str(path)}) if as_json else tell(str(path))


@app.command(cls=Command)
@doing("waiting for the end of the round")
def stop(
    run: RunArgument = None,
    server: ServerOption = None,
    now: Annotated[bool, typer.Option("--now", help="At once: what workers train now is lost to the model.")] = False,
    control_token_file: ControlTokenFile = None,
    as_json: AsJson = False,
) -> None:
    """End at the end of the round: save, and tell the workers to save and end."""
    with closing(_client(run, server, control_token_file, "control-token")) as found:
        found.call("/control", {"command": "stop_now" if now else "stop"})
        status = found.call("/status")
        with suppress(ControlError):  # it is gone: that is what was asked for
            while True:
                status = found.call("/status")
                time.sleep(_PAUSE)
    place = RunDir(Path(status["run"]))
    steps = place.checkpoint_steps() if place.root.is_dir() else [status["checkpoint"]]  # of another machine
    path = place.checkpoint(steps[-1])
    print_json({"round": steps[-1], "checkpoint": str(path)}) if as_json else tell(str(path))


# -------------------------------------------------------------------------------------------------------------- replay


@app.command(cls=Command)
@doing("computing the rounds again")
def replay(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The server's run directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """Compute a server's weights again from its ledger, and compare with the newest checkpoint.

    Bit for bit, from the first round on. It needs what the workers sent: serve with
    diloco.keep_submissions=true.
    """
    from forgather_cli.config.diloco import load_server_settings

    place = RunDir(run)
    if not place.diloco.is_file():
        raise SetupError(f"{run}: is no run of a DiLoCo server (no {place.diloco.name}); give one")
    settings = load_server_settings([], place.diloco)
    from forgather_cli.diloco import global_model
    from forgather_cli.diloco.ledger import read_ledger

    rounds, differing = global_model.replay(place, settings, read_ledger(place.rounds))
    if as_json:
        print_json({"rounds": rounds, "equal": not differing, "differing": differing})
    elif differing:
        tell(f"{len(differing)} tensors differ after {rounds} rounds: {', '.join(differing[:5])}", sys.stderr)
    else:
        tell(f"equal bit for bit after {rounds} rounds: {place.checkpoint(rounds)}")
    raise typer.Exit(1 if differing else 0)
