"""llama.cpp's server in a process of its own, for as long as this one lives."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from forgather_cli.errors import ForgatherError, ModelError, SetupError
from forgather_cli.gguf.reader import why
from forgather_cli.serve import plain_server
from forgather_cli.terminal.folding import tell


def run_server(
    file: Path, host: str, port: int, key: str | None, name: str, parallel: int, context: int | None, told: str
) -> NoReturn:
    """Serve ``file`` until a signal ends this process; prints the address and ``told`` once it answers.

    Raises SetupError where llama.cpp does not load the file, and ForgatherError where it ends later.
    """
    asked = {
        "model": str(file.absolute()),
        "host": host,
        "port": port,
        "key": key,
        "name": name,
        "parallel": parallel,
        "context": context,
    }
    # threads that wait do not spin, and no debugger looks at a failed assertion: as in gguf/reader.py
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "GGML_NO_BACKTRACE": "1"}
    command = [sys.executable, "-P", plain_server.__file__]
    answers, said = False, ""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        env=environment,
    ) as child:  # fmt: skip
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                child.stdin.write(json.dumps(asked) + "\n")
                child.stdin.flush()
            for line in child.stdout:
                if answers:
                    print(line, end="", file=sys.stderr, flush=True)
                elif line.startswith(plain_server.READY):
                    answers = True
                    if line.split()[1:] != ["chat"]:
                        tell("note: the model has no chat template; chat/completions uses ChatML's", sys.stderr)
                    at = socket.gethostname() if host in ("0.0.0.0", "::") else f"[{host}]" if ":" in host else host
                    print(f"http://{at}:{port}/v1\n{told}", flush=True)
                else:
                    said += line
            ended = subprocess.CompletedProcess([], child.wait(), stderr=said)
        finally:
            child.kill()
    if answers:
        raise ForgatherError(f"llama.cpp has ended (exit code {ended.returncode}); start it again")
    if plain_server.TAKEN in said:
        raise SetupError(f"--port: {host}:{port} was taken meanwhile; choose another one, or 0 for any")
    raise ModelError(f"llama.cpp cannot load and run {file.name} ({why(ended)})")
