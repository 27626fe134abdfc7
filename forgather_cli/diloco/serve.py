"""The process of ``forgather diloco server``: its token, its socket, its model, and what it tells at the start."""

from __future__ import annotations

import asyncio
import ctypes
import json
import logging
import os
import secrets
import shlex
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from forgather_cli.config.schema import Config, DilocoServerSettings
from forgather_cli.diloco.global_model import GlobalModel
from forgather_cli.diloco.server import Server
from forgather_cli.documents.regular_files import read_text, write_whole
from forgather_cli.errors import SetupError
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.run_dir import RunDir, shown
from forgather_cli.terminal.folding import tell

log = logging.getLogger(__name__)

TOKEN_VARIABLE, CONTROL_VARIABLE = "DILOCO_TOKEN", "DILOCO_CONTROL_TOKEN"


def work(settings: DilocoServerSettings, config: Config, run: RunDir, rank: RankContext) -> ExitStatus:
    """Serve the rounds of a run until they are over or something stops them; returns how that ended."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        # freed blocks from 1 MiB on go back to the system at once, else gaps in the heap add up (glibc 2.36, whose own
        # limit grows to 32 MiB)
        libc.mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD
    token, token_file = token_of(run.diloco_token, TOKEN_VARIABLE, settings.token_file)
    control, control_file = token_of(run.diloco_control_token, CONTROL_VARIABLE)
    with listening(settings) as listener:
        model = GlobalModel(config, run, settings)
        server = Server(model, run, settings, rank, token, control)
        rank.stepped(model.saved)  # what could be refused has been: a run that this one overwrites goes
        port = int(listener.getsockname()[1])
        address = {"host": settings.host, "port": port, "tls": settings.tls_certificate is not None}
        write_whole(run.diloco_address, json.dumps({**address, "token_file": str(token_file), "pid": os.getpid()}))
        _tell(settings, run, port, token_file, control_file)
        try:
            return asyncio.run(server.serve(listener))
        finally:
            run.diloco_address.unlink(missing_ok=True)


def token_of(path: Path, variable: str, stated: str | None = None) -> tuple[str, Path]:
    """A token, and the file that has it: the ``stated`` one, else ``path``, made by the first start."""
    if stated is not None:
        path = Path(stated)
        token = read_text(path, lambda why: SetupError(f"diloco.token_file: {why}; give a file with the token")).strip()
    else:
        given = os.environ.get(variable)
        kept = read_text(path).strip() if path.exists() else None
        token = given or (secrets.token_hex(32) if kept is None else kept)
        if token != kept:
            write_whole(path, token + "\n", mode=0o600)
    if len(token) < 16 or not token.isascii() or " " in token:
        remedy = "make one with: openssl rand -hex 32"
        setting = variable if stated is None else "diloco.token_file"
        raise SetupError(f"{setting}: {path} must hold 16 letters or more, got {len(token)}; {remedy}")
    return token, path.absolute()


@contextmanager
def listening(settings: DilocoServerSettings) -> Iterator[socket.socket]:
    """The socket that is listened on. Raises SetupError; for TLS files that cannot be used too."""
    if settings.tls_certificate is not None:
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key)
        except (OSError, ssl.SSLError) as error:
            names = f"{settings.tls_certificate} and {settings.tls_key}"
            remedy = "give PEM files of one pair"
            raise SetupError(f"diloco.tls_certificate: {names} cannot be used ({error}); {remedy}") from error
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    try:
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=1024)
    except OSError as error:
        where, reason = f"{settings.host}:{settings.port}", os.strerror(error.errno) if error.errno else error
        what = f"diloco.port: {where} cannot be listened on ({reason})"
        raise SetupError(f"{what}; choose another one, or 0 for any") from error
    with listener:
        yield listener


def _tell(settings: DilocoServerSettings, run: RunDir, port: int, token_file: Path, control_file: Path) -> None:
    """Print where the server is and what a worker types."""
    host = socket.gethostname() if settings.host in ("0.0.0.0", "::") else settings.host
    scheme = "https://" if settings.tls_certificate else ""
    token = shlex.quote(shown(token_file))
    tell(f"run      {shown(run.root)}")
    tell(f"server   {scheme}{host}:{port}, waits for {settings.workers} workers")
    tell(f"token    {shown(token_file)}")
    tell(f"control  {shown(control_file)}, for forgather diloco save and stop from elsewhere")
    tell(f"worker   DILOCO_TOKEN=$(cat {token}) forgather diloco worker RECIPE --server {scheme}{host}:{port}")
    tell(f"status   forgather diloco status {shlex.quote(shown(run.root))}")
    if settings.insecure and not settings.tls_certificate:
        log.warning("diloco.insecure=true: token and weights travel in the clear; use it in a network that you trust")
