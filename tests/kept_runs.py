"""Runs below ``outputs`` that ended long ago, and jobs that hold a run's directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from forgather_cli.launch.exit_status import write_exit_record
from forgather_cli.run_dir import RunDir

JOB = """
import sys
from pathlib import Path
from forgather_cli.launch.exit_status import write_exit_record
from forgather_cli.launch.run_lock import RunLock

with RunLock(Path(sys.argv[1])) as held:
    log = held.run.rank_log(0).open("a", buffering=1)
    print("has it", flush=True)
    for line in sys.stdin:
        log.write(line)
    write_exit_record(held.run, "stopped", 0, "told to", 7)
    log.write("the last line\\n")
"""


class Job:
    """A job that holds a run directory, logs what it is told, and ends with its input."""

    def __init__(self, root: Path) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", JOB, str(root)], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, bufsize=1)  # fmt: skip
        assert self.process.stdout.readline() == "has it\n"

    def say(self, line: str) -> None:
        self.process.stdin.write(f"{line}\n")

    def end(self) -> None:
        self.process.communicate()


def make_run(root: Path, changed: float, losses: tuple[float, ...] = (), ended: bool = True) -> Path:
    """A run's files as training leaves them; ``changed``: when, in seconds since the epoch."""
    run = RunDir(root)
    (run.checkpoints / "step-00000010").mkdir(parents=True)
    (run.checkpoints / "step-00000010/weights").write_bytes(bytes(1000))
    run.logs.mkdir()
    run.rank_log(0).write_text("what it has printed\n")
    run.config.write_text("max_steps: 100\n")
    run.lock.write_text("pid 999999999 on nowhere\n")
    if losses:
        lines = [json.dumps({"step": 10 * (n + 1), "eval_loss": loss}) for n, loss in enumerate(losses)]
        run.metrics.write_text("\n".join(lines) + "\n")
    if ended:
        write_exit_record(run, "done", 0, "done")
    for path in root.rglob("*"):
        os.utime(path, (changed, changed))
    return root


def make_outputs() -> Path:
    make_run(Path("outputs/default/old"), 1e9, (3.0, 2.0, 2.5))
    make_run(Path("outputs/default/new"), 1.2e9, ended=False)
    make_run(Path("outputs/between"), 1.1e9, (1.0,))
    return Path("outputs")
