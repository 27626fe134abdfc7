"""PeakMemory: a line for every rank at the end, bytes in the log, and snapshots where there is memory to follow."""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import re
from pathlib import Path

import pytest
import tiny
import torch
from ranks import run_ranks

from forgather_cli.callbacks.metrics import peak_memory
from forgather_cli.callbacks.peak_memory import Peak, PeakMemory
from forgather_cli.callbacks.tensorboard import ResumableSummaryWriter
from forgather_cli.errors import CallbackError
from forgather_cli.run_dir import RunDir

SMALL = ("max_steps=2", "logging_steps=1", "eval_strategy=no", "save_strategy=no")


def trained(root: str, *overrides: str) -> tuple[str, list[int]]:
    """(standard output, resident bytes at most so far: before and after) of a run in this process."""
    told = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())  # the kernel's word
    before = int(told.group(1)) * 1024
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        tiny.train(tiny.config(Path(root), *SMALL, *overrides), RunDir(Path(root)))
    return said.getvalue(), [before, peak_memory(torch.device("cpu"))]  # VmHWM is set back at each log


@pytest.mark.parametrize("layout", [("trainer=single",), ("trainer=pipeline", "n_microbatches=2")])
def test_every_rank_has_a_line_and_a_number_in_the_log(layout: tuple[str, ...], tmp_path: Path) -> None:
    words = (*layout, "+callbacks.peak_memory={do_log: true}")
    ranks = run_ranks(2, trained, str(tmp_path), *words) if len(layout) > 1 else [trained(str(tmp_path), *words)]
    lines = re.findall(r"^peak memory of rank (\d+): (.+) resident$", ranks[0][0], re.MULTILINE)
    assert [int(rank) for rank, _ in lines] == list(range(len(ranks)))
    assert not any("peak memory" in said for said, _ in ranks[1:])
    logs = [record for record in tiny.metrics(tmp_path) if "grad_norm" in record]
    assert len(logs) == 2
    for rank, ((_, (before, after)), (_, told)) in enumerate(zip(ranks, lines, strict=True)):
        logged = [record[f"peak_mem_rank_{rank}"] for record in logs]
        # Linux tells a sum that lacks up to some dozens of pages of each processor, so a peak may fall
        peaks = [before, *logged, after]
        assert all(peak <= later + 2**20 for peak, later in itertools.pairwise(peaks))
        number, unit = told.split()
        assert 0.95 * before <= float(number) * {"MiB": 2**20, "GiB": 2**30}[unit] <= 1.05 * after
    assert not any(f"peak_mem_rank_{len(ranks)}" in record for record in logs)


def test_on_the_cpu_there_are_details_and_no_snapshot(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = "{show_details: true, enable_memory_snapshot: true}"
    said, _ = trained(str(tmp_path), "device=cpu", f"+callbacks.peak_memory={settings}")
    assert re.search(r"^peak memory of rank 0 \(cpu of .+\): .+ resident$", said, re.MULTILINE)
    assert not any(key.startswith("peak_mem_rank") for record in tiny.metrics(tmp_path) for key in record)
    assert "peak_memory.enable_memory_snapshot: torch keeps no memory history on cpu" in caplog.text
    assert not list(tmp_path.glob("*.pickle"))


def test_a_run_that_fails_tells_its_peak_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bad = "+callbacks.bad={_target_: users_callbacks.Raises, event: on_step_end, step: 2}"
    with pytest.raises(CallbackError):
        trained(str(tmp_path), "+callbacks.peak_memory={}", bad)
    assert re.search(r"peak memory of rank 0 \(cpu of .+\): .+ resident", caplog.text)


def test_details_have_each_ranks_statistics_of_cuda_as_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a device that tells some: on a CPU there are none."""

    def of(device: torch.device, *, statistics: bool = False) -> Peak:
        return Peak("cuda:0 of here", 1, 1, statistics="|=== PyTorch CUDA memory ===|" if statistics else "")

    monkeypatch.setattr(Peak, "of", of)
    for details in (True, False):
        root = tmp_path / str(details)
        words = (f"+callbacks.peak_memory.show_details={details}", "+callbacks.tensorboard={}")
        tiny.train(tiny.config(root, *SMALL, *words), RunDir(root))
        assert ("PyTorch CUDA memory" in capsys.readouterr().out) == details
        written = b"".join(path.read_bytes() for path in (root / "tensorboard").iterdir())
        assert (b"PyTorch CUDA memory" in written) == details
    writer = ResumableSummaryWriter()
    memory = PeakMemory(show_details=True, summary_writer=writer)
    tiny.script(tmp_path / "shared", max_steps=1, callbacks=[memory]).train()
    writer.close()
    assert b"PyTorch CUDA memory" in next((tmp_path / "shared" / "tensorboard").iterdir()).read_bytes()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_peaks_are_the_allocators_and_a_snapshot_is_left(tmp_path: Path) -> None:
    settings = "{do_log: true, show_details: true, enable_memory_snapshot: true, file_prefix: seen}"
    said, _ = trained(str(tmp_path), "device=cuda", f"+callbacks.peak_memory={settings}")
    assert re.search(r"^peak memory of rank 0 \(cuda:0 .+\): .+ allocated, .+ reserved of .+$", said, re.MULTILINE)
    assert "PyTorch CUDA memory summary" in said
    last = [record for record in tiny.metrics(tmp_path) if "grad_norm" in record][-1]
    assert 0 < last["peak_mem_rank_0"] <= peak_memory(torch.device("cuda", 0))
    assert last["peak_mem_rank_0"] <= last["peak_mem_reserved_rank_0"]
    snapshot = pickle.loads((tmp_path / "seen-rank-0.pickle").read_bytes())
    assert snapshot["device_traces"][0]
