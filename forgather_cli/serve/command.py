"""``forgather serve``: what is typed, and the port."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import secrets
import socket
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from forgather_cli.checkpoint.files import unwinding
from forgather_cli.cli.output import console, interruptible
from forgather_cli.cli.words import SourcePath
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.gguf.options import GGUF_TYPES
from forgather_cli.gguf.reader import check_installed
from forgather_cli.serve.file import choose_file, name_of
from forgather_cli.serve.process import run_server
from forgather_cli.terminal.folding import tell

VARIABLE = "FORGATHER_API_KEY"


def serve(
    source: SourcePath,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any that is free.")] = 8080,
    api_key: Annotated[
        str | None,
        typer.Option(metavar="KEY", help=f"The key of clients; else that in {VARIABLE}, else one is made up."),
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Answer whoever reaches the port.")] = False,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's name for clients; else SOURCE's.")
    ] = None,
    gguf: Annotated[
        str | None, typer.Option(metavar="TYPE", help=f"{', '.join(GGUF_TYPES)}; q8_0 unless SOURCE has a file.")
    ] = None,
    parallel: Annotated[int, typer.Option(metavar="N", min=1, max=256, help="Requests answered at once.")] = 4,
    context: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", min=1, help="Of a request with its answer; else what the model takes."),
    ] = None,
) -> None:
    """Serve a run, a checkpoint, a model directory or a GGUF file by the OpenAI API, with llama.cpp.

    The GGUF file is made and proved once, as [cyan]forgather finalize --gguf[/] does it, and kept in the cache (of an
    adapter: merged with its base). Standard output has two lines once it answers: the address and the key.
    """
    key = None if no_key else api_key if api_key is not None else os.environ.get(VARIABLE)
    given = "--api-key" if api_key is not None else VARIABLE
    problems = []
    if no_key and api_key is not None:
        problems.append("--no-key: excludes --api-key; leave one out")
    elif no_key and not _is_loopback(host):
        problems.append(f"--no-key: on {host} the model would be anybody's who reaches it; leave --no-key out")
    if key is not None and not (key.isascii() and key.isprintable() and key.split() == [key]):
        problems.append(f"{given}: must be letters of ASCII without blanks between them; give another key")
    if gguf is not None and gguf not in GGUF_TYPES:
        problems.append(f"--gguf: must be one of {', '.join(GGUF_TYPES)}, got {gguf!r}")
    if name is not None and not name.strip():
        problems.append("--name: is empty; give a name, or leave it out")
    if problems:
        raise ConfigError(problems)
    check_installed("serve")
    with interruptible(), unwinding():
        with _bound(host, port) as port:  # before anything is loaded or made
            file = choose_file(source, gguf, console(stderr=True).print)
        if no_key:
            tell("warning: --no-key: any program of this machine may use the model", sys.stderr)
        elif not _is_loopback(host):
            tell(f"warning: --host {host}: keys and texts travel in the clear; trust this network", sys.stderr)
        shown = "none" if no_key else f"that of {given}" if key is not None else (key := secrets.token_hex(32))
        run_server(file, host, port, key, name or name_of(source), parallel, context, f"key: {shown}")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@contextlib.contextmanager
def _bound(host: str, port: int) -> Iterator[int]:
    """Keep the port from others; its number. Raises SetupError."""
    with contextlib.ExitStack() as held:
        try:
            [(family, kind, *_, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            bound = held.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of one that has ended may linger
            bound.bind(address)
        except (OSError, UnicodeError) as error:
            raise SetupError(
                f"--port: {host}:{port} cannot be listened on ({getattr(error, 'strerror', None) or error}); choose "
                "another one, or 0 for any"
            ) from error
        yield bound.getsockname()[1]
