"""``scripts/gpu_check`` on a machine without a GPU: it says so, and makes the checks that need none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from program import Process

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "gpu_check"
RUN = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"


def gpu_check(*words: str) -> str:
    with Process(str(SCRIPT), *words, code=RUN) as job:
        assert job.finish() == 0, job.output
    return job.output


@pytest.mark.full
def test_without_a_gpu_it_says_so_and_makes_what_checks_it_can(tmp_path: Path) -> None:
    out = str(tmp_path / "found.jsonl")
    said = gpu_check("run", "fsdp2", "plan", "--device", "cpu", "--out", out)
    assert "no GPU" in said.splitlines()[0]
    records = [json.loads(line) for line in Path(out).read_text().splitlines()]
    assert [(r["piece"], r["check"], r["result"]) for r in records] == [
        ("fsdp2", "one rank", "ok"),
        ("plan", "nano", "ok"),
    ]
    assert len(gpu_check("run", "fsdp2", "plan", "--device", "cpu", "--out", out).splitlines()) == 1  # nothing is left
    assert "| fsdp2 | one rank | ok |" in gpu_check("tables", "--out", out)
