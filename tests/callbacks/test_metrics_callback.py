"""DefaultMetrics: utilization from interval and peak, and peak memory."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.callbacks.metrics import DefaultMetrics, _matmul_kind, peak_flops
from forgather_cli.config.schema import BF16Settings, FSDP2Settings, MetricsSettings, RunSettings

CPU = torch.device("cpu")
INTERVAL = SimpleNamespace(flops=6e12, active_seconds=2.0)


def logged(settings: MetricsSettings, interval: Any) -> dict[str, Any]:
    callback, state, control = DefaultMetrics(settings), TrainerState(), TrainerControl()
    run = SimpleNamespace(strategy=SimpleNamespace(device=CPU), cpu_group=None, world=SimpleNamespace(rank=0, size=1))
    callback.on_train_begin(RunSettings(), state, control, trainer=SimpleNamespace(run=run))
    logs = {"loss": 1.0}
    callback.on_log_step(RunSettings(), state, control, logs=logs, interval=interval)
    return logs


def test_mfu_is_flops_per_active_second_over_the_peak_where_all_of_them_are_known() -> None:
    assert logged(MetricsSettings(peak_hardware_flops=12e12), INTERVAL)["mfu"] == pytest.approx(0.25)
    assert "mfu" not in logged(MetricsSettings(), INTERVAL)
    idle = SimpleNamespace(flops=0.0, active_seconds=2.0)
    assert "mfu" not in logged(MetricsSettings(peak_hardware_flops=1e12), idle)
    assert logged(MetricsSettings(peak_hardware_flops=1e12), None) == {"loss": 1.0}, "a record that is not of training"


def peaks(root: str) -> list[dict[str, Any]]:
    """Rank 1 holds 64 MiB more between the first log and the second."""

    def hold(state: Any, *_: Any, **given: Any) -> None:
        if dist.get_rank() == 1 and state.global_step == 2:
            torch.ones(256 * 2**20, dtype=torch.uint8)

    callbacks = [tiny.acts(on_step_end=hold), DefaultMetrics()]
    trainer = tiny.script(root, max_steps=3, logging_steps=1, callbacks=callbacks)
    trainer.train()
    return [record for record in trainer.state.log_history if "grad_norm" in record]


def test_the_peak_is_the_largest_of_all_ranks_in_the_interval(tmp_path: Path) -> None:
    first, second = run_ranks(2, peaks, str(tmp_path))
    for records in (first, second):
        for record in records:
            assert record["peak_mem_allocated"] == max(record["peak_mem_by_rank"])
        _, before, after = ([*r["peak_mem_by_rank"], 0][1] for r in records)
        held = max(before, after)  # on_step_end comes before the step's own log
        assert held == max(r["peak_mem_allocated"] for r in records)
        assert min(before, after) <= held - 200 * 2**20
        assert held < 2**40, "bytes"
    assert [r["peak_mem_allocated"] for r in first] == [r["peak_mem_allocated"] for r in second]
    assert [r.get("cpu_wait") for r in first] == [r.get("cpu_wait") for r in second]


def test_peaks_by_device_name() -> None:
    peaks = {
        "NVIDIA A100-SXM4-80GB": 312e12, "NVIDIA H100 80GB HBM3": 989.5e12, "NVIDIA H100 PCIe": 756e12,
        "NVIDIA L40S": 362.1e12, "NVIDIA L4": 121e12, "NVIDIA B200": 2250e12, "NVIDIA GB200": 2500e12,
        "NVIDIA GeForce RTX 4090": 165.2e12, "NVIDIA GeForce RTX 4090 Laptop GPU": None,
        "Some Future Accelerator": None,
    }  # fmt: skip
    assert {name: peak_flops(name, "bf16") for name in peaks} == peaks
    assert [peak_flops("NVIDIA A100-SXM4-80GB", kind) for kind in ("fp32", "tf32")] == [19.5e12, 156e12]


def test_what_matrices_are_multiplied_in() -> None:
    assert _matmul_kind(SimpleNamespace(precision=BF16Settings())) == "bf16"
    assert _matmul_kind(SimpleNamespace(bf16=True)) == "bf16"
    assert _matmul_kind(RunSettings()) == "fp32"
    assert _matmul_kind(SimpleNamespace(trainer=FSDP2Settings(param_dtype="bf16"))) == "bf16"
    assert _matmul_kind(SimpleNamespace(trainer=FSDP2Settings(param_dtype="fp32"), precision=BF16Settings())) == "fp32"
    try:
        torch.set_float32_matmul_precision("high")
        assert _matmul_kind(RunSettings()) == "tf32"
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert _matmul_kind(RunSettings()) == "fp32"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_records_have_the_rate_of_their_newest_step_and_speeds_from_speed_metrics_start_step_on(
    tmp_path: Path,
) -> None:
    used: list[float] = []
    watch = tiny.acts(on_pre_optimizer_step=lambda *_, **given: used.append(given["optimizer"].param_groups[0]["lr"]))
    trainer = tiny.script(
        tmp_path, max_steps=6, logging_steps=2, logging_first_step=False, warmup_steps=2, global_batch_size=8,
        speed_metrics_start_step=3, callbacks=[watch],
    )  # fmt: skip
    trainer.train()
    first, second, third = records = [record for record in trainer.state.log_history if "grad_norm" in record]
    assert [record["learning_rate"] for record in records] == [used[record["step"] - 1] for record in records]
    assert len(set(used)) > 3
    assert [record["tokens"] for record in records] == [256] * 3
    assert first.keys() & {"tok_per_sec", "step_time", "data_time"} == set()
    assert second["tok_per_sec"] * second["step_time"] == pytest.approx(128)  # of step 4 alone
    assert third["tok_per_sec"] * third["step_time"] == pytest.approx(128)
