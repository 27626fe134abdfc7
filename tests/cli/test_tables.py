"""No table cuts or breaks a value: at 80 columns sentences fold between words, what is copied stands on a line of its
own, and columns are left out by name; a pipe gets all."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import saving
from logged import make_run
from program import forgather
from terminal import Screen

from forgather_cli.cli import diloco
from forgather_cli.cli.output import console
from forgather_cli.control import registry
from forgather_cli.data.cache import Cache
from forgather_cli.launch.signals import STOP_SIGNALS
from forgather_cli.sweeps import run as sweeps

SWEEP = "outputs/pretrain_on_the_corpus_of_the_department/sweep-0a1b2c3d"
RUNS = [f"{SWEEP}/learning_rate=0.00{n},weight_decay=0.1-{n}e5f6a7b" for n in (1, 2)]
JOBS = [f"job_20261122-15303{n}_node-17.cluster.of.the.department_123{n}" for n in (1, 2)]
JOB = "learning_rate-0.00200001"
SWEEP_AGAIN = "train data=synthetic model=nano max_steps=30 learning_rate=0.001,0.00200001 weight_decay=0.1,0.25 -m"
COMMANDS = {  # and what must stand there whole
    "logs summary outputs": [*RUNS, "12345.6789", "corpora/second.jsonl", "weight_decay"],
    f"checkpoint list {RUNS[0]}": ["12345.6789", "20"],
    f"checkpoint inspect {RUNS[0]}": ["model.layers.10.bias", "optimizer/optimizer.safetensors"],
    "plan data=synthetic model=nano trainer=pipeline n_microbatches=4 --params": [
        "model.layers.1.post_attention_layernorm.weight", "memory of the rank", "embedding, 0",
    ],
    "plan data=synthetic model=tiny --fit --memory 850MiB": ["micro-batch", "gradient_checkpointing=true"],
    "config options trainer": ["Pipeline parallel: every rank holds some of the layers."],
    "config recipes": ["pretrain_1b_accelerate"],
    f"config diff {RUNS[0]} {RUNS[1]}": [*RUNS, "learning_rate", "data.files", "[corpora/second.jsonl]"],
    "control list --all": [*JOBS, *RUNS],
    "runs list outputs": [*RUNS, "3.0000"],
    f"logs slow {RUNS[0]}": ["66.7 %", "eval"],
    "cache list --cache-dir cache": ["files corpora/of/the/department/**/*.jsonl tokenizer bpe of 32,768", "1.23M"],
    "plan data=synthetic model=nano diloco.sync_every=50 +callbacks.diloco.bandwidth=12.5e6 --step-time 0.8": [
        "exchange", "int4", "fragments", "of all",
    ],
    SWEEP_AGAIN: [JOB, "12345.6789"],
}  # fmt: skip
FACTS = ["doctor", "plan data=synthetic model=nano", f"checkpoint inspect {RUNS[0]}", "config explain precision model"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two runs whose names differ at their ends, jobs of theirs that have ended, and a sweep that is done."""
    root = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        patch.setenv("XDG_CONFIG_HOME", str(root / "config"))
        for n, (run, data) in enumerate(zip(RUNS, ("first", "second"), strict=True), start=1):
            make_run(Path(run), [2.0, 12345.6789], learning_rate=n / 1000, weight_decay=n / 10, data__type="text",
                     data__files=[f"corpora/{data}.jsonl"], data__tokenizer=data)  # fmt: skip
            with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
                start = registry.start_of(process.pid)
                process.kill()
            where = str(root / run)
            registry.register(
                registry.Entry(JOBS[n - 1], "127.0.0.1", socket.gethostname(), 1, process.pid, str(start),
                               f"2026-11-22T15:30:3{n}", where, where), "a" * 64)  # fmt: skip
        saving.saved_run(Path(RUNS[0]), 20, metrics={"loss": 12345.6789, "eval_loss": 2.5})
        with open(f"{RUNS[0]}/metrics.jsonl", "a") as file:
            file.write('{"step": 20, "step_seconds": 20.0, "evaluation_seconds": 40.0}\n')
        origin = {"files": "corpora/of/the/department/**/*.jsonl", "tokenizer": "bpe of 32,768"}
        Cache("cache").build_once("tokens", "a", lambda path: {"origin": origin, "train": {"tokens": 1_230_000}})
        yield root


def columns(text: str) -> dict[str, set[str]]:
    """The words of each column of every table in a pipe, by its title."""
    found: dict[str, set[str]] = {}
    for head, body in re.findall(r"(.*\n) ─+ *\n((?: *\S.*\n)*)", text):
        lines = [head, *body.splitlines()]
        used = "".join(
            "x" if any(line[n : n + 1].strip() for line in lines) else " " for n in range(max(map(len, lines)))
        )
        for part in re.finditer("x+( {1,2}x+)*", used):
            title, *values = (line[slice(*part.span())].strip() for line in lines)
            found.setdefault(title, set()).update(*(value.split() for value in [title, *values]))
    return found


@pytest.fixture
def output(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """Prints what a function prints, or a command, to a terminal of 80 columns or a pipe."""
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place / "config"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "home"))  # others build and kill in the session's meanwhile
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    handlers = {signum: signal.getsignal(signum) for signum in STOP_SIGNALS}

    def output(stream: io.StringIO, *words: str, of: Callable[[], object] | None = None) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", stream)
            assert forgather(*words) == 0 if of is None else of() is None
        return stream.getvalue()

    yield output
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def check(piped: str, narrow: str) -> None:
    """At 80 columns each word of each column stands whole in one line, or the column is said to be left out; only what
    stands alone is wider.
    """
    assert "not shown" not in piped
    assert "…" not in piped + narrow
    told = re.findall(r"not shown at 80 columns: ([^;]*);", " ".join(narrow.split()))
    left_out = [title for each in told for title in each.split(", ")]
    whole = columns(piped)
    assert whole.keys() > set(left_out)
    lines = [line.rstrip() for line in narrow.splitlines()]
    for title in whole.keys() - set(left_out):
        for word in whole[title]:
            assert any(word in line for line in lines), (title, word)
    alone = re.compile(r" *(\S+( \S+)? {3,})?\S+( \S+)*")  # or behind a label
    assert [line for line in lines if len(line) > 80 and not alone.fullmatch(line)] == []


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: "-".join(command.split()[:2]))
def test_no_value_is_cut(command: str, output: Callable[..., str]) -> None:
    if command == SWEEP_AGAIN:
        for job in json.loads(output(io.StringIO(), *command.split(), "--dry-run", "--json")):
            run = make_run(Path(job["dir"]), [2.0, 12345.6789])
            (run / "exit.json").write_text(json.dumps(
                {"state": "done", "code": 0, "reason": "", "step": 20, "time": "2026-11-22T15:30:05+00:00"}
            ))  # fmt: skip
    piped, narrow = output(io.StringIO(), *command.split()), output(Screen(), *command.split())
    assert [value for value in COMMANDS[command] if not any(value in line for line in piped.splitlines())] == []
    check(piped, narrow)
    assert {*JOBS, *RUNS} & {*COMMANDS[command]} <= {*narrow.split()}, "which job and run it is, is never left out"


def test_tables_that_are_redrawn_cut_no_value(output: Callable[..., str]) -> None:
    """Of a DiLoCo server's workers, and of a sweep while it trains."""
    worker = {"worker": "alone-1", "slot": 12, "state": "rejected", "step": 123456, "tokens_per_second": 12345.6,
              "silent": 4000.0, "sent": 2**40, "received": 2**40, "host": "node-17.cluster.of.us"}  # fmt: skip
    status = {"round": 7, "max_rounds": 1000, "state": "open", "round_seconds": 61.0, "tokens": 10**9, "checkpoint": 6,
              "received": 2**40, "sent": 2**40, "why": "waits for two", "workers": [worker, worker]}  # fmt: skip
    sweep = sweeps._Sweep(sweeps.plan_jobs("default", SWEEP_AGAIN.split()[1:-1], None), [], 2, [])
    for table in (partial(diloco._shown, status), sweep._table):
        drawn = (output(stream, of=lambda t=table: console().print(t())) for stream in (io.StringIO(), Screen()))
        check(*drawn)


@pytest.mark.parametrize("command", FACTS, ids=lambda command: "-".join(command.split()[:2]))
def test_facts_fold(command: str, output: Callable[..., str]) -> None:
    """Numbers, such as bytes that are free, may be others the second time, and a terminal has colours."""
    piped, narrow = (re.sub(r"\x1b\[\d+m|[\d\s]", "", output(s, *command.split())) for s in (io.StringIO(), Screen()))
    assert narrow == piped


LONG = f"{RUNS[0]}/or/another/that/lies/below"


def test_no_error_breaks_a_path_or_a_command(
    place: Path, output: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(Path(SWEEP, "run"), [2.0])
    known = ["precision=fp32", "loss=cross_entropy"]  # nothing that the run's config would be read for
    again = ["train", "model=nano", "data=synthetic", *known, f"output_dir={place}/{SWEEP}/run"]
    for words, whole in (
        (["resume", LONG], f"{LONG}:"),
        (again, f"forgather resume {SWEEP}/run"),
        (["train", "modle=nano", "+trainre=ddp", f"data.flies=[{SWEEP}]"], "did you mean"),
        (["control", "save", RUNS[0]], f"forgather resume {RUNS[0]}"),
        (["checkpoint", "list", "one", LONG], LONG),
        (["checkpont"], "Did you mean"),
    ):
        said = []
        for stream in (io.StringIO(), Screen()):
            monkeypatch.setattr(sys, "stderr", stream)
            assert forgather(*words) > 0
            said.append(re.sub(r"\x1b\[[\d;]+m", "", stream.getvalue()))
        assert "".join(said[0].split()).replace("-", "•") == "".join(said[1].split()).replace("-", "•")
        for text in said:
            lines = text.splitlines()
            assert any(whole in line for line in lines), text
            assert [line for line in lines if line != line.rstrip()] == []
        wide = [line for line in lines if len(line) > 80]
        assert [line for line in wide if len(line.split()) > 1 and not line.startswith("forgather ")] == []


def test_the_config_is_yaml_in_a_narrow_terminal_too(output: Callable[..., str]) -> None:
    files = f"data.files=[{LONG.replace('=', '-').replace(',', '-')}]"
    words = ["config", "show", "output_dir=run", "data=text", files]
    piped, narrow = (re.sub(r"\x1b\[[\d;]+m", "", output(s, *words)) for s in (io.StringIO(), Screen()))
    assert narrow == piped
