"""Rooms: parts that come out of the tree, each with its tests and YAML. The rest imports none of them at module level,
trains without them, and says in one line what is not there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from forks import Plain, fork
from selection import some
from test_layers import MODULES, ours

from forgather_cli.cli.app import COMMANDS

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Room:
    paths: tuple[str, ...]
    """Its files and folders, of the package and of ``conf``."""
    tests: tuple[str, ...]
    asks: dict[str, str]
    """Commands that need it, with what the line begins with that each then prints; "": that its folder is missing."""

    @property
    def modules(self) -> tuple[str, ...]:
        """What the names of its modules begin with."""
        return tuple(path.removesuffix(".py").replace("/", ".") + "." for path in self.paths)


OPTION = "type: transformers\nconfig: {model_type: gpt2}\n"
"""Of a user, for model=theirs."""
ROOMS = {
    **{
        name: Room((f"forgather_cli/{name}",), (f"tests/{name}",), dict.fromkeys(commands, ""))
        for name, commands in {
            "plan": ["plan model=nano", "train model=nano --dry-run"],
            "pictures": ["logs plot run", "data stats data=synthetic --plot lengths.png"],
            "sweeps": ["train learning_rate=1e-3,3e-3 -m"],
            "housekeeping": ["doctor", "runs list", "cache list"],
        }.items()
    },
    "finalize": Room(
        ("forgather_cli/finalize", "forgather_cli/gguf", "forgather_cli/serve"),
        ("tests/finalize", "tests/gguf", "tests/serve"),
        {"finalize run final": "", "serve run": "forgather_cli/serve: is not part"},
    ),
    "transformers": Room(
        ("forgather_cli/models/hf", "conf/model/transformers.yaml"),
        ("tests/models/hf",),
        {"train model=transformers": "model=transformers", "train model=theirs data=synthetic precision=fp32": ""},
    ),
    "adapters": Room(
        ("forgather_cli/adapters", "conf/adapter/lora.yaml", "conf/adapter/dora.yaml", "conf/adapter/qlora.yaml"),
        ("tests/adapters",),
        {"train adapter=lora": "adapter=lora"},
    ),
    "quantized": Room(
        ("forgather_cli/quantized", "conf/precision/fp8.yaml", "conf/precision/qat.yaml"),
        ("tests/quantized",),
        {"train precision=fp8": "precision=fp8", "finalize run final --quantize int8-weight-only": ""},
    ),
    "preference": Room(
        ("forgather_cli/preference", "conf/data/preference.yaml", "conf/loss/dpo.yaml"),
        ("tests/preference",),
        {"train data=preference": "data=preference", "train loss=dpo": "loss=dpo"},
    ),
    "tasks": Room(
        ("forgather_cli/tasks",),
        ("tests/tasks",),
        {"eval run --tasks mine": "", "train +callbacks.tasks={tasks:[mine]}": "callbacks.tasks"},
    ),
    "mixture": Room(
        ("forgather_cli/data/mixture", "conf/data/mixture.yaml"),
        ("tests/data/mixture",),
        {"train data=mixture": "data=mixture", "data audit run": ""},
    ),
}
ALL = Room(tuple(path for room in ROOMS.values() for path in room.paths), (), {})
TRAIN = "train model=nano data=synthetic seq_len=16 num_samples=64 global_batch_size=4 max_steps=2 output_dir=run"


@pytest.mark.parametrize("room", ROOMS.values(), ids=ROOMS)
def test_nothing_else_imports_it_at_module_level(room: Room) -> None:
    for name, tree in MODULES.items():
        # a module of another room may: it is not imported either where nothing asks for both
        if not any(f"forgather_cli.{name}.".startswith(each.modules) for each in ROOMS.values()):
            wrong = {found for found in ours(tree, lazy=False) if f"forgather_cli.{found}.".startswith(room.modules)}
            assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


@pytest.mark.parametrize("name", some([*ROOMS, "all"], "finalize", "adapters", "all"))
def test_the_rest_works_without_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = ROOMS.get(name, ALL)
    for part in ("forgather_cli", "conf", "recipes"):
        # with compiled modules, which stay valid, but not one that another process writes just now
        shutil.copytree(ROOT / part, tmp_path / part, ignore=shutil.ignore_patterns("*.pyc.*"))
    for path in room.paths:
        assert (tmp_path / path).exists(), path
        shutil.rmtree(tmp_path / path) if (tmp_path / path).is_dir() else (tmp_path / path).unlink()
    assert all((ROOT / path).exists() for path in room.tests)
    monkeypatch.chdir(tmp_path)
    Path("conf/model/theirs.yaml").write_text(OPTION)
    words = [TRAIN] if room in (ALL, ROOMS["adapters"], ROOMS["quantized"]) else []  # the others' commands need no run
    (help_code, help_page), *answers = run_here("--help", *words, *room.asks)
    assert help_code == 0
    listed = re.findall(r"^│ ([a-z]+)  ", help_page, re.MULTILINE)
    assert listed == [name for name, where in COMMANDS.items() if not where.replace(":", ".").startswith(room.modules)]
    for _ in words:
        code, output = answers.pop(0)
        assert code == 0, output
        assert Path("run/checkpoints/step-00000002").is_dir()
    for (code, output), (command, said) in zip(answers, room.asks.items(), strict=True):
        assert code == 2, (command, output)
        [line] = output.splitlines()
        assert line.startswith(f"error: {said or f'{room.paths[0]}: is not part'}"), (command, line)


SCRIPT = """
import json, os, sys
sys.path.insert(0, os.getcwd())
os.dup2(1, 2)
sys.stdout = sys.stderr = open(1, "w", buffering=1, closefd=False)
from forgather_cli.cli import app
from forgather_cli.terminal import bars
assert app.__file__.startswith(os.getcwd())
bars.SILENCE = 3600.0
for command in json.loads(sys.argv[1]):
    sys.argv = ["forgather", *command.split()]
    try:
        app.main()
    except SystemExit as end:
        print(f"\\0{end.code or 0}\\0", end="", flush=True)
"""


def run_here(*commands: str) -> list[tuple[int, str]]:
    """The exit code and the output of each, all of them in one process that imports what lies in this directory."""
    fork(os.getpid).join()  # before it the server of such processes does not listen
    Path("commands.py").write_text(SCRIPT)
    with Path("errors").open("w") as errors:
        words = ["-P", "commands.py", json.dumps(commands)]
        with Plain(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ)
        ) as process:
            parts = process.stdout.read().split("\0")
    assert len(parts) == 2 * len(commands) + 1, parts
    return [(int(code), output) for output, code in zip(parts[::2], parts[1::2], strict=False)]
