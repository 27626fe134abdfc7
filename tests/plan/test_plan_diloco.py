"""What ``forgather plan`` says of DiLoCo beside what a server and a worker of it have sent to each other."""

from __future__ import annotations

from pathlib import Path

import pytest
from diloco.client import serving
from program import Process, document, until

RECIPE = (
    "model=nano", "model.hidden_size=128", "model.num_hidden_layers=3", "optimizer=adamw", "learning_rate=2e-3",
    "data=synthetic", "data.num_samples=16", "data.num_eval_samples=2", "seq_len=8", "global_batch_size=2",
    "callbacks=minimal", "device=cpu", "eval_strategy=no", "save_steps=100", "max_steps=5",
)  # fmt: skip


def planned(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    return document(capsys, "plan", *RECIPE, *words)["diloco"]


@pytest.mark.parametrize(
    "settings",
    [pytest.param(("diloco.compression=bf16",), marks=pytest.mark.full),
     ("diloco.compression=int4", "diloco.compression_down=int8", "diloco.sync_every=4", "diloco.num_fragments=2")],
    ids=["whole", "fragments"],
)  # fmt: skip
def test_bytes_are_those_of_a_run(
    tmp_path: Path, settings: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ("diloco.sync_every=2", *settings)
    with serving(tmp_path / "server", *RECIPE, *settings, "diloco.workers=1") as server:
        words = ("diloco", "worker", "default", *RECIPE, f"output_dir={tmp_path / 'run'}")
        address = ("--server", f"127.0.0.1:{server.client.port}")
        worker = Process(*words, *address, env={"DILOCO_TOKEN": server.client.token})
        assert worker.finish() == 0, worker.output
        until(lambda: server.client.status()["round"] >= 3)
        status = server.client.status()
    found = planned(capsys, *settings)
    assert found["exchanges"] == 3
    assert found["sent_in_all"] == pytest.approx(status["received"], rel=0.02)
    assert found["received_in_all"] == pytest.approx(status["sent"], rel=0.02)


def test_time_at_a_bandwidth_and_what_other_settings_change(capsys: pytest.CaptureFixture[str]) -> None:
    link = ("callbacks.diloco.bandwidth=1e5", "--step-time", "0.5")
    first, *others = planned(capsys, *link, "diloco.sync_every=20")["traffic"]
    exchange = (first["sent"] + first["received"]) / 1e5
    assert first["seconds"] == pytest.approx(exchange)
    assert first["share"] == pytest.approx(exchange / (20 * 0.5 + exchange))
    fp32, int8 = (next(each for each in others if each["compression"] == wire) for wire in ("fp32", "int8"))
    assert fp32["sent"] == pytest.approx(2 * first["sent"], rel=0.02)
    assert int8["sent"] == pytest.approx(0.53 * first["sent"], rel=0.05)
    beside = planned(capsys, *link, "diloco.sync_every=20", "diloco.overlap=19")["traffic"][0]
    assert beside["share"] == pytest.approx((exchange - 9.5) / (10 + exchange - 9.5)), "beside training"
