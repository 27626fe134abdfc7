"""A new user's shell, for the blocks of README and docs: a directory that looks like a fresh clone, and its commands.

Bash runs the blocks as they stand. ``forgather``, ``python`` and ``torchrun`` on its PATH ask this process to fork
one that has imported torch (``forks.py``). What a command leaves unsaid is small: the default recipe takes a second.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from forks import Program
from two_ranks import free_port

from forgather_cli.run_dir import RunDir

ROOT = Path(__file__).parents[1]

SMALL = {
    "model": "nano", "seq_len": "32", "global_batch_size": "8", "max_steps": "4", "warmup_steps": "1",
    "logging_steps": "2", "eval_steps": "4", "save_steps": "2", "max_eval_samples": "8",
    "callbacks.textgen.max_new_tokens": "8",
}  # fmt: skip
"""Settings that ``forgather train`` gets where a page does not give them."""

PORT = free_port()
"""Of a DiLoCo server, in the place of 8512."""
SERVE_PORT = free_port()
"""Of ``forgather serve``, in the place of 8080."""

_COMMAND = """#!{python} -IS
import json, os, socket, sys
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
server.sendall(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode() + b"\\n")
said = server.makefile("rb")
while (line := said.readline()) and not line.startswith(b"\\0"):
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()
sys.exit(int(line[1:] or b"1"))
"""


class Shell:
    """A directory for the blocks of one page, which run one after another; ``start`` is copied into it."""

    def __init__(self, directory: Path, start: Path | None = None) -> None:
        self.directory = directory
        if start is not None:
            shutil.copytree(start / "outputs", directory / "outputs")
        for name in ("docs", "scripts", "pyproject.toml", "CONTRIBUTING.md", "CHANGELOG.md"):
            (directory / name).symlink_to(ROOT / name)
        for folder, ending in (("notes", "md"), ("corpus", "txt")):  # the texts that pages speak of
            (directory / folder).mkdir(parents=True)
            for page in ROOT.glob("docs/[a-f]*.md"):
                shutil.copy(page, directory / folder / f"{page.stem}.{ending}")
        commands = directory / ".venv" / "bin"
        commands.mkdir(parents=True)
        # scripts/environment finds what it would install, and installs nothing
        versions = (ROOT / "scripts" / "constraints.txt").read_text().splitlines()
        torch = next(line for line in versions if line.startswith("torch=="))
        others = [line for line in versions if not line.startswith(("torch==", "#"))]
        wanted = [torch, *others, (ROOT / "pyproject.toml").read_text().rstrip("\n")]
        (directory / ".venv" / "installed").write_text("\n".join(wanted))
        self._programs: list[Program] = []
        self._trainings: list[Program] = []
        self._forking = threading.Lock()
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(directory / ".socket"))
        self._server.listen()
        for name in ("forgather", "python", "torchrun"):
            text = _COMMAND.format(python=sys.executable, address=str(directory / ".socket"))
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        self._environment = {
            **os.environ, "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(directory / ".config"), "COLUMNS": "160",
        }  # fmt: skip
        self._serving = threading.Thread(target=self._serve, daemon=True)
        self._serving.start()

    def run(self, script: str) -> tuple[int, str]:
        """Exit code and output of some lines of bash, the first of which that fails ends it."""
        self._expected = len(self._trainings) + len(re.findall(r" &$", script, flags=re.M))
        with tempfile.TemporaryFile("w+", encoding="utf-8") as output:  # no pipe: what runs in the background holds it
            done = subprocess.run(
                ["bash", "-e", "-o", "pipefail", "-c", script], cwd=self.directory, env=self._environment,
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, timeout=900, check=False,
            )  # fmt: skip
            output.seek(0)
            return done.returncode, output.read()

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)  # to close it does not wake the thread that waits there
        self._serving.join()
        self._server.close()
        for program in self._programs:
            program.kill()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self._answer, args=(self._server.accept()[0],), daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        """Run one command: its output, and after a NUL its exit code."""
        with client, contextlib.suppress(BrokenPipeError):
            words, directory, environment = json.loads(client.makefile().readline())
            command = _command(Path(words[0]).name, words[1:], directory)
            if "control" in command:
                self._wait_for_jobs()
            with self._forking:
                program = Program(command, directory, environment)
                self._programs.append(program)
                if {"train", "resume"} & {*command}:
                    self._trainings.append(program)
            with program.stdout:
                for line in program.stdout:
                    with contextlib.suppress(BrokenPipeError):  # nobody reads it any more
                        client.sendall(line.encode())
            client.sendall(b"\0%d" % program.wait(300))

    def _wait_for_jobs(self) -> None:
        """Until each job in the background takes commands: a user would type more slowly."""
        jobs = self.directory / ".config" / "forgather" / "jobs"
        deadline = time.monotonic() + 600
        while len(self._trainings) < self._expected or (
            sum(each.poll() is None for each in self._trainings) > len([*jobs.glob("*/endpoint.json")])
        ):
            assert time.monotonic() < deadline, "a job in the background takes no commands"
            time.sleep(0.05)


def _command(name: str, words: list[str], directory: str) -> tuple[str, ...]:
    """What ``Program`` runs for a command of a page."""
    if name == "forgather":
        return ("-m", "forgather_cli", *_small(words, directory))
    if name == "torchrun":
        here = words.index("forgather_cli") + 1
        return ("-m", "torch.distributed.run", *words[:here], *_small(words[here:], directory))
    if words[0].endswith(".py"):
        return ("-c", f"import runpy; runpy.run_path({words[0]!r}, run_name='__main__')", *words[1:])
    return tuple(words)


def _small(words: list[str], directory: str) -> list[str]:
    """A command line with what makes its training small; of what it says itself only ``max_steps`` is changed: at most
    30, and 4 more than a run that is resumed has done."""
    if words[0] == "serve":
        return [*words, "--port", str(SERVE_PORT)]
    verb = words[:2] if words[:1] == ["diloco"] else words[:1]
    if verb not in (["train"], ["resume"], ["diloco", "server"], ["diloco", "worker"]) or "--print-sbatch" in words:
        return words
    words = [word.replace(":8512", f":{PORT}") for word in words]
    steps = re.compile(r"max_steps=(\d{1,5})$")  # a job of a hundred thousand is one that the page itself stops
    most = 30 if words[0] != "resume" else max(RunDir(Path(directory) / words[1]).checkpoint_steps(), default=0) + 4
    words = [f"max_steps={min(int(found[1]), most)}" if (found := steps.match(word)) else word for word in words]
    words += [f"diloco.port={PORT}"] if "server" in verb else []
    words += ["+callbacks.slow._target_=stalls.Slow"] if "max_steps=100000" in words else []
    recipe = next((word for word in words[len(verb) :] if "=" not in word and word[0] not in "~-"), "default")
    if words[0] == "resume" or (Path(directory) / recipe).is_dir():  # a run that is small already
        return words
    given = {word.partition("=")[0].lstrip("~") for word in words}
    if not (ROOT / "recipes" / f"{recipe}.yaml").exists():  # the page's own
        given |= {"model", "seq_len"}
    if recipe in ("finetune", "chat_finetune", "lora_finetune", "qat", "finetune_mix", "dpo"):
        given.add("model")
    if recipe.startswith("qwen3_encdec"):
        given |= {"model", "seq_len"}
        words += ["model.hidden_size=48", "model.num_hidden_layers=1"]
    if "eval_strategy=no" in words:
        given |= {"eval_steps", "max_eval_samples"}
    if given & {"callbacks", "callbacks.textgen", "eval_strategy"}:
        given.add("callbacks.textgen.max_new_tokens")
    if "data=mine" in words:
        given.add("seq_len")
    if "lr_scheduler=mine" in words:
        given.add("warmup_steps")
    return [*words, *(f"{key}={value}" for key, value in SMALL.items() if key not in given)]
