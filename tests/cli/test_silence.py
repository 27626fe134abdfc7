"""What commands say when they take long: what they do, in one line on standard error."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import finalized
import pytest
from program import SMALL, Process
from two_ranks import free_port

from forgather_cli.control import registry
from forgather_cli.launch.job import Job
from forgather_cli.launch.layout import Layout
from forgather_cli.launch.place import Place
from forgather_cli.launch.rendezvous import Rendezvous
from forgather_cli.launch.supervise import Supervisor

NEW = [*SMALL, "max_steps=2", "output_dir=new"]
COMMAND = """
import sys, time
from forgather_cli.terminal import bars

class Slow:
    def find_spec(self, name, path=None, target=None):
        until = time.monotonic() + 20
        while name == slow and time.monotonic() < until:
            time.sleep(0.01)

slow, bars.SILENCE = sys.argv.pop(1), 0.05
for name in [name for name in sys.modules if slow and (name + ".").startswith(slow + ".")]:
    del sys.modules[name]
    package, _, module = name.rpartition(".")
    vars(sys.modules[package]).pop(module, None)
sys.meta_path.insert(0, Slow())
from forgather_cli.__main__ import run
run()
"""


def start(*words: str, slow: str = "", **env: str) -> Process:
    """A command that speaks after 0.05 s, and for which the module ``slow`` does not come."""
    return Process(slow, *words, code=COMMAND, env=env)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It holds a run with checkpoints."""
    folder = tmp_path_factory.mktemp("silence")
    finalized.train(folder / "run")
    return folder


CASES = {
    "--help": ("forgather_cli.cli.app", "importing the commands"),
    "config show": ("hydra.core.override_parser.overrides_parser", "composing the config"),
    "plan": ("forgather_cli.data.build", "planning the run"),
    "eval run": ("forgather_cli.inference.evaluation", "importing torch"),
    "generate run --prompt a --json": ("forgather_cli.inference.generation", "importing torch"),
    "finalize run final": ("forgather_cli.finalize.run", "importing torch"),
    "doctor --json": ("forgather_cli.hardware", "importing torch"),
    "checkpoint list run": ("forgather_cli.checkpoint.retention", "reading the run"),
    "checkpoint verify run": ("forgather_cli.checkpoint.retention", "reading the run"),
    "checkpoint average --last 2 run -o mean": ("forgather_cli.checkpoint.average", "importing torch"),
    "checkpoint edit run learning_rate=1": ("forgather_cli.checkpoint.edit", "reading and writing the state"),
    "logs slow run": ("forgather_cli.runs.slow", "reading the run"),
    "logs plot run": ("forgather_cli.pictures.curves", "drawing"),
    f"train {' '.join(NEW)}": ("forgather_cli.callbacks.build", "importing torch"),
    f"train trainer=ddp nproc_per_node=2 {' '.join(NEW)}": (
        "forgather_cli.launch.agent", "importing torch to start the ranks",
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", CASES)
def test_a_slow_import_is_said(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    slow, said = CASES[command]
    with start(*command.split(), slow=slow) as job:
        job.read_until(rf"^{said} \.\.\.$")


DATA = """
import time
from pathlib import Path
from forgather_cli.data.splits import DataSplits

def slow():
    until = time.monotonic() + 20
    while not Path("go").exists() and time.monotonic() < until:
        time.sleep(0.01)
    raise SystemExit(7)
"""


@pytest.mark.parametrize("command", ["train", "eval run --trust-config"])
def test_slow_data_is_said(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    Path("mine.py").write_text(DATA)
    words = NEW if command == "train" else []
    own = [word for word in words if "=synth" not in word and "seq" not in word and "num_" not in word]
    with start(*command.split(), *own, "data._target_=mine.slow") as job:
        job.read_until(r"^reading the data \.\.\.$")
        Path("go").touch()
        job.finish()
        assert job.output.count("reading the data") == 1
    Path("go").unlink()


FIRST = """
import time
from pathlib import Path

from forgather_cli import TrainerCallback

class Slow(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 0:
            until = time.monotonic() + 20
            while not Path("go").exists() and time.monotonic() < until:
                time.sleep(0.01)
"""


def test_the_first_step_says_what_it_waits_for(own_directory: None) -> None:
    Path("first.py").write_text(FIRST)
    with start("train", *NEW, "+callbacks.slow._target_=first.Slow") as job:
        job.read_until(r"training from step 0 .*, reading data for the first step;")
        Path("go").touch()
        assert job.finish() == 0, job.output


def test_a_job_that_does_not_answer_is_waited_for_by_name(tmp_path: Path) -> None:
    me, started = os.getpid(), registry.start_of(os.getpid())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = ("127.0.0.1", socket.gethostname(), silent.getsockname()[1], me, str(started))
        entry = registry.Entry("job_silent", *place, "2026", str(tmp_path), str(tmp_path))
        registry.register(entry, None)
        try:
            for words, said in (("list", "asking the jobs"), ("status", "waiting for an answer of job_silent"),
                                ("save", "waiting for an answer of job_silent")):  # fmt: skip
                job = () if words == "list" else ("job_silent",)
                with start("control", words, *job) as command:
                    command.read_until(rf"^{said} \.\.\.$")
        finally:
            registry.unregister(entry)


def test_a_second_node_says_where_it_waits(own_directory: None) -> None:
    port = free_port()
    endpoint = f"localhost:{port}"
    where = ["trainer=ddp", "nnodes=2", "node_rank=1", "nproc_per_node=1", f"rdzv_endpoint={endpoint}"]
    with start("train", *NEW, *where) as node:
        node.read_until(rf"^waiting for all 2 nodes at {endpoint} \.\.\.$")
    world = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    with start("train", *NEW, "trainer=ddp", "nnodes=2", MASTER_PORT=str(port), **world) as node:
        node.read_until(rf"^rank 1: waiting for rank 0 at {endpoint} \.\.\.$")


def test_a_launcher_names_the_ranks_that_have_not_begun() -> None:
    with Job.create(node=1, nodes=2) as job:
        launcher = Supervisor(Layout(ranks_per_node=3, nodes=2, node=1, endpoint="there:1"), job, None, lambda _: None)
        assert "torch" in launcher._awaited()
        launcher._has_imported = True
        assert "there:1" in launcher._awaited()
        for begun, awaited in ((4, "ranks 3, 5"), (3, "rank 5")):
            job.attempt(0).write_pid(begun)
            assert awaited in launcher._awaited()
        job.attempt(0).write_pid(5)
        assert launcher._absent() == []


def test_a_rank_names_those_that_it_waits_for(tmp_path: Path) -> None:
    first, second, third = (Rendezvous(Place(rank, 3, rank, 3), tmp_path / "store") for rank in range(3))
    awaited = first.meet("building")
    assert "ranks 1, 2" in awaited()
    third.meet("building")
    second.meet("something else")
    assert "rank 1" in awaited()
    second.meet("building")
    assert awaited() == "building"
