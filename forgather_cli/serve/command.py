"""``forgather serve``: a GGUF file, given or made once, and llama.cpp's server for as long as the command lives.

<cache_dir>/gguf/<key>/model.gguf      the key is of the source's files, the type, and the versions of what makes it
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from forgather_cli import __version__
from forgather_cli.checkpoint.choice import choose
from forgather_cli.checkpoint.files import remove, unwinding
from forgather_cli.cli.output import console, interruptible
from forgather_cli.cli.words import SourcePath, local_source
from forgather_cli.data.cache import Cache, Meta, digest
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError, ForgatherError, ModelError, SetupError
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.gguf.options import GGUF_TYPES
from forgather_cli.gguf.reader import check_installed, version, why
from forgather_cli.run_dir import RunDir, is_adapter_directory, is_model_directory, model_in, run_of, shown
from forgather_cli.serve import plain_server
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell

_TYPES = ", ".join(GGUF_TYPES)


def serve(
    source: SourcePath,
    host: Annotated[str, typer.Option(metavar="HOST", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="0: any that is free.")] = 8080,
    api_key: Annotated[str | None, typer.Option(envvar="FORGATHER_API_KEY", help="Else one is made up.")] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Answer whatever program of this machine asks.")] = False,
    name: Annotated[str, typer.Option(metavar="NAME", help="The model's name for clients; else SOURCE's.")] = "",
    gguf: Annotated[str | None, typer.Option(metavar="TYPE", help=f"{_TYPES}; else SOURCE's file, or q8_0.")] = None,
    context: Annotated[int, typer.Option(metavar="N", min=0, help="Tokens kept of all requests; 0: by the model.")] = 0,
) -> None:
    """Serve a run, a checkpoint, a model directory or a GGUF file by OpenAI's API, with llama.cpp.

    The GGUF file is made and proved once, as [cyan]forgather finalize --gguf[/] does it, and kept in the cache (of an
    adapter: merged with its base). Standard output has two lines once it answers: the address and the key.
    """
    if no_key and api_key is not None:
        raise ConfigError("--no-key: excludes --api-key and FORGATHER_API_KEY; leave one out")
    if gguf is not None and gguf not in GGUF_TYPES:
        raise ConfigError(f"--gguf: must be one of {_TYPES}, got {gguf!r}")
    check_installed("serve")
    name = name or source.resolve().name.removesuffix(".gguf")
    with interruptible(), unwinding():
        try:  # before anything is made or loaded
            bound = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except (OSError, UnicodeError) as error:
            raise SetupError(f"--port: {getattr(error, 'strerror', error)}; choose another, or 0 for any") from error
        with bound:
            address, *_ = bound.getsockname()
            is_near = address == "::1" or address.startswith("127.")
            if no_key and not is_near:
                raise ConfigError(f"--no-key: whoever reaches {host} would be answered; leave --no-key out")
            file = _file(source, gguf)
        if no_key or not is_near:
            tell(f"warning: {'any program here is answered' if no_key else 'keys travel in the clear'}", sys.stderr)
        key = None if no_key else api_key or secrets.token_hex(32)
        place = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
        told = f"http://{place}:PORT/v1\nkey: {'the one given' if api_key else key or 'none'}"
        _run([str(file), host, port, key, name, context], told)


def _file(source: Path, kind: str | None) -> Path:
    """The file to serve. Raises SetupError."""
    if source.suffix == ".gguf" and source.is_file():
        if kind is not None:
            raise ConfigError(f"--gguf: {source} is a GGUF file already; leave --gguf out")
        return source.absolute()
    directory, say = local_source(source), console(stderr=True).print
    report = directory / "finalize_report.json"
    given = report.exists() and not is_adapter_directory(directory)
    for proof in read_json_object(report).get("gguf", []) if given else []:
        if kind in (None, proof["type"]) and (directory / proof["file"]).is_file():
            return directory.absolute() / str(proof["file"])
    kind = kind or "q8_0"
    chosen = None if is_model_directory(directory) else choose(RunDir(directory))
    parts = [model_in(directory if chosen is None else chosen.path)]
    with doing("hashing the model"):
        if is_adapter_directory(parts[0]):
            from forgather_cli.adapters.directory import read_adapter

            parts.append(read_adapter(parts[0]).base)
        from forgather_cli.data.text import corpus, read

        files = [file for part in parts for file in sorted(part.glob("*.[jst]*"))]  # json, jinja, safetensors, txt
        files += [run.newest_config()] if (run := run_of(parts[0])) else []  # which says what stands before a text
        content = corpus.content_hash(cache := Cache(None), [read.SourceFile(each, each.name) for each in files])
    key = digest([1, content, kind, __version__, version()])

    def make(folder: Path) -> Meta:
        with doing("importing torch"):
            from forgather_cli.finalize.run import finalize
        report = finalize(directory, folder / "model", FinalizeOptions(gguf=kind, merge=len(parts) > 1), say)
        (folder / "model" / report["gguf"][0]["file"]).rename(folder / "model.gguf")
        remove(folder / "model")
        return {"origin": {"model": report["source"]["path"], "type": kind}}

    at, meta = cache.build_once("gguf", key, make)
    say(f"serving {kind} of {shown(meta['origin']['model'])} from the cache")
    return at / "model.gguf"


def _run(asked: list[Any], told: str) -> NoReturn:
    """Have llama.cpp serve until a signal ends this process; ``told`` is printed once it answers, with its PORT.

    Raises ModelError where it does not load the file, and ForgatherError where it ends later.
    """
    # a key is nobody's to see on a command line; threads that wait do not spin, as in gguf/reader.py
    more = {plain_server.ASKED: json.dumps(asked), "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0"}
    answers, said = False, ""
    with subprocess.Popen(
        [sys.executable, "-P", plain_server.__file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace", env={**os.environ, **more, "GGML_NO_BACKTRACE": "1"},
    ) as child:  # fmt: skip
        try:
            for line in child.stdout or ():
                if answers:
                    print(line, end="", file=sys.stderr, flush=True)
                elif answers := line.startswith(plain_server.READY):
                    _, taken, template = line.strip().split(" ", 2)
                    tell(f"chats go by {template}", sys.stderr)
                    print(told.replace(":PORT", f":{taken}"), flush=True)
                said += "" if answers else line
            ended = subprocess.CompletedProcess([], child.wait(), stderr=said)
        finally:
            child.kill()
    what = "has ended" if answers else f"cannot load and run {Path(asked[0]).name}"
    raise (ForgatherError if answers else ModelError)(f"llama.cpp {what} ({why(ended)})")
