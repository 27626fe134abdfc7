"""llama.cpp in a process of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.launch.processes import temporary_folder

INSTALL = "pip install 'forgather[gguf]'"


def check_installed(what: str) -> None:
    """Raise ConfigError where the packages that write and read GGUF are not there, or llama.cpp does not load."""
    missing = [name for name in ("gguf", "xllamacpp") if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{what}: needs {' and '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed; {INSTALL} "
            "(xllamacpp is llama.cpp, of which there may be no build for this platform: without it nothing is proved)"
        )
    command = [sys.executable, "-P", "-c", "import xllamacpp"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise ConfigError(
            f"{what}: xllamacpp, which is llama.cpp, cannot be loaded here ({why(done)}), and without it nothing is "
            "proved; install a build for this platform, or leave GGUF out"
        )


def why(failed: subprocess.CompletedProcess[str]) -> str:
    """Why it has failed, by what it said: llama.cpp's own reason, before xllamacpp's."""
    if own := re.search(r"(?:error loading model: |gguf_init_from_reader: |(?=GGML_ASSERT))(.+)", failed.stderr):
        return own[1]
    said = [line for line in failed.stderr.strip().splitlines() if line.strip()]
    return said[-1] if said and failed.returncode > 0 else f"exit code {failed.returncode}"


def version() -> str:
    return f"llama.cpp by xllamacpp {importlib.metadata.version('xllamacpp')}"


def llama_cpp(do: str, **request: Any) -> dict[str, Any]:
    """The answer of a function of ``plain_llama_cpp``. Raises ModelError where llama.cpp gives up."""
    with temporary_folder("gguf") as folder:
        asked, answer = folder / "asked.json", folder / "answer.json"
        asked.write_text(json.dumps({"do": do, **request}), encoding="utf-8")
        # -P: the folder of the script, which has modules of ours, is not searched
        script = Path(__file__).with_name("plain_llama_cpp.py")  # its imports are not ours
        command = [sys.executable, "-P", str(script), str(asked), str(answer)]
        # waiting threads do not spin: where others want the cores too, it takes a hundred times as long;
        # and no debugger looks at a failed assertion, which takes seconds
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "GGML_NO_BACKTRACE": "1"}
        read, write = os.pipe()  # it ends when this pipe does, that is with this process, whatever ends that
        with os.fdopen(read), os.fdopen(write, "w"):
            done = subprocess.run(
                command, stdin=read, capture_output=True, text=True, errors="replace", check=False, env=environment
            )
        if done.returncode:
            what = Path(request.get("model", "the vocabulary")).name
            raise ModelError(f"llama.cpp cannot load and run {what} ({why(done)})")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found
