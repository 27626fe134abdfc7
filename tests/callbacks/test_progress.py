"""ProgressCallback and InfoCallback: lines in a file, bar and table on a real (pseudo) terminal."""

from __future__ import annotations

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import notebook
import pytest
from terminal import Terminal

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.callbacks.columns import FINAL_METRICS, STEP_COLUMNS, TIMES, Column, fit, format_value, merge, row
from forgather_cli.callbacks.console import printable
from forgather_cli.callbacks.info import InfoCallback
from forgather_cli.callbacks.progress import ProgressCallback
from forgather_cli.config.schema import InfoSettings, ProgressSettings
from forgather_cli.config.schema.callbacks import FORMATS, PROGRESS_COLUMNS, PROGRESS_RESULTS

FINAL = {"train_runtime": 3725.0, "train_loss": 3.43, "total_tokens": 819200, "flops_per_second": 1.234e12}
EVAL = {"eval_loss": 3.2, "eval_perplexity": 24.53, "eval_tokens": 900, "eval_runtime": 0.8, "epoch": 1.0}
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
INFO = {"model": "decoder", "parameters": "3,312,640", "data": "text " * 30, "nothing": None}
TRAINER = SimpleNamespace(info=lambda: INFO)


def fake_run(
    callbacks: list[Any], num_steps: int = 40, rank_zero: bool = True, pause: float = 0.0, **extra: float
) -> None:
    """A log every 10 steps, an evaluation and a checkpoint at the middle. A step takes ``pause`` seconds by the clock
    that callbacks look at, on any machine."""
    clock = 1000.0
    state = TrainerState(max_steps=num_steps, is_world_process_zero=rank_zero)
    kwargs: dict[str, Any] = {"trainer": TRAINER, "model": "Decoder()", "eval_dataloader": range(4)}

    def emit(event: str, **more: Any) -> None:
        for callback in callbacks:
            with mock.patch("time.perf_counter", return_value=clock):
                getattr(callback, event)(None, state, TrainerControl(), **kwargs, **more)

    emit("on_train_begin")
    for step in range(1, num_steps + 1):
        state.global_step, state.epoch = step, 2 * step / num_steps
        clock += pause
        emit("on_step_end")
        if step % 10 == 0:
            speed = {"tok_per_sec": 123456.7, "step_time": 0.0213, "peak_mem_allocated": 1.34e9, "total_tokens": step}
            emit("on_log", logs={"loss": 5 / step, "grad_norm": 1.5, "learning_rate": 1e-3, **speed, **extra})
        if step == num_steps // 2:
            for _ in range(4):
                emit("on_prediction_step")
            emit("on_log", logs=EVAL)
            emit("on_evaluate", metrics=EVAL)
            emit("on_save", checkpoint=Path.cwd() / "outputs/default/2026-11-21_06-55-01/checkpoints/step-00000020")
    emit("on_log", logs=FINAL)
    emit("on_train_end")


def on_terminal(width: int, code: str) -> str:
    path = f"import sys, time; sys.path.insert(0, {str(Path(__file__).parent)!r})"
    terminal = Terminal(code=f"{path}\nfrom test_progress import *\n{code}", width=width)
    assert terminal.finish() == 0, terminal.output
    return terminal.output


def shown_lines(output: str) -> list[str]:
    """Every line as written, without control sequences; a redrawn bar counts each time."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output)
    return [line.rstrip() for line in re.split(r"[\r\n]+", plain) if line.strip()]


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    fake_run([ProgressCallback()])
    lines = capsys.readouterr().out.splitlines()
    assert all(re.match(STAMP, line) for line in lines if line[:1] != " ")
    same = "grad_norm 1.500 lr 1.00e-03 tok/s 123k s/step 0.0213 peak_mem 1.2GiB"
    assert [re.sub(STAMP, "", line) for line in lines] == [
        "training from step 0 of 40, reading data for the first step; each loss is the mean since the line before",
        f"step 10/40 epoch 0.50 loss 0.5000 {same} tokens 10",
        f"step 20/40 epoch 1.00 loss 0.2500 {same} tokens 20",
        "step 20 eval loss 3.2000 perplexity 24.53 took 0.80s",
        "checkpoint saved: outputs/default/2026-11-21_06-55-01/checkpoints/step-00000020",
        f"step 30/40 epoch 1.50 loss 0.1667 {same} tokens 30",
        f"step 40/40 epoch 2.00 loss 0.1250 {same} tokens 40",
        "results",
        "  time             1:02:05",
        "  run's mean loss  3.4300",
        "  tokens           819,200",
        "  compute          1.23 TFLOP/s",
    ]


def test_other_ranks_are_silent(capsys: pytest.CaptureFixture[str]) -> None:
    fake_run([ProgressCallback(), InfoCallback()], rank_zero=False)
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


def test_records_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    callback, state = ProgressCallback(), TrainerState(global_step=7)
    callback.on_log(None, state, TrainerControl(), logs={"test_loss": 2.0, "test_runtime": 1.0})
    metrics = {"test_acc": 0.5, "test_loss": 2.0, "test_runtime": 1.0}
    callback.on_evaluate(None, state, TrainerControl(), metrics=metrics)
    callback.on_log(None, state, TrainerControl(), logs={"weight_norm": 12.3456})
    lines = [re.sub(STAMP, "", line) for line in capsys.readouterr().out.splitlines()]
    assert lines == ["step 7 test loss 2.0000 acc 0.5 took 1.00s", "step 7 weight_norm 12.35"]


def test_output_goes_to_a_stream_or_an_open_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake_run([ProgressCallback(ProgressSettings(output_stream="stderr"))])
    captured = capsys.readouterr()
    assert (captured.out, "step 10/40" in captured.err) == ("", True)
    with (tmp_path / "progress.txt").open("w") as file:
        fake_run([ProgressCallback(output_stream=file)])
    assert "step 10/40" in (tmp_path / "progress.txt").read_text()
    assert capsys.readouterr() == ("", "")


def test_a_bar_is_forced_or_left_out_by_use_tqdm() -> None:
    file = io.StringIO()
    fake_run([ProgressCallback(output_stream=file, use_tqdm=True)])
    assert "\x1b[" in file.getvalue()
    assert not re.search(STAMP, file.getvalue())
    code = "fake_run([ProgressCallback(use_tqdm=False)])"
    assert "step 10/40" in on_terminal(100, code)
    assert "step 10/40" not in on_terminal(100, code.replace("use_tqdm=False", ""))


def test_columns_are_merged_over_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    norm = {"label": "|w|", "fmt": ".2f"}
    columns = {"loss": {"fmt": ".1f", "label": "nats"}, "grad_norm": None, "weight_norm": norm}
    final = {"train_loss": None, "total_tokens": {"suffix": " tok", "label": "seen"}}
    fake_run([ProgressCallback(ProgressSettings(step_columns=columns, final_metrics=final))], weight_norm=12.345)
    out = capsys.readouterr().out
    assert "epoch 0.50 nats 0.5 lr 1.00e-03" in out
    assert out.count("|w| 12.35") == 4 or out.count("|w| 12.34") == 4
    assert re.search(r"results\n  time +1:02:05\n  seen +819,200 tok\n  compute ", out)


def test_what_config_knows_of_the_columns_is_what_there_is() -> None:
    assert (*STEP_COLUMNS,) == PROGRESS_COLUMNS
    assert (*FINAL_METRICS,) == PROGRESS_RESULTS
    assert all(format_value(1.0, fmt) != "1.0" for fmt in FORMATS)


@pytest.mark.parametrize("width", [50, 120])
def test_nothing_wraps_on_a_terminal_and_the_bar_leaves(width: int) -> None:
    run = "fake_run([InfoCallback(), ProgressCallback(ProgressSettings(header_interval=2))], 60, pause=0.02)"
    output = on_terminal(width, f"{run}\nprint('after')")
    saved = "outputs/default/2026-11-21_06-55-01/checkpoints/step-00000020"
    lines = [line for line in shown_lines(output) if line != saved]  # whole, above the terminal's width too
    assert len(lines) < len(shown_lines(output)) or f"checkpoint saved: {saved}" in lines
    assert max(map(len, lines)) <= width
    headers = [line for line in lines if line.split()[:2] == ["step", "epoch"]]
    rows = [line for line in lines if re.match(r" +\d+  +\d\.\d\d  ", line)]
    assert len(headers) == 3
    assert [r.split()[0] for r in rows] == ["10", "20", "30", "40", "50", "60"]
    assert all(len(r) == len(headers[0]) for r in rows)
    assert any(line.startswith("     30    eval    3.2000  perplexity 24.53") for line in lines)
    assert any(re.match(r"  run's mean loss +3\.4300$", line) for line in lines)
    assert ("peak mem" in headers[0]) == (width >= 80)
    bars = [line for line in lines if line.startswith("train ")]
    assert len(bars) < 40  # a redraw per log, evaluation and fifth of a second, not per step
    if width >= 80:
        assert re.search(r"━ \d+/60 loss \d\.\d{4} 123k tok/s 0:00:0\d eta 0:00:0\d$", bars[-1])
        assert any(re.search(r"^eval .*━ [1-4]/4", line) for line in lines)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")
    assert output.rindex("after") > output.rindex("train ")
    assert not shown_lines(output[output.rindex("\x1b[?25h") :])[0].startswith("train")


def test_what_is_printed_above_a_bar_breaks_no_path() -> None:
    path = "outputs/" + "x" * 100
    code = f"""
from forgather_cli.callbacks.base import TrainerCallback
class Prints(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == 15:
            print("WARNING one of {path} is slow", file=sys.stderr)
            print("step 15 of {path}")
fake_run([ProgressCallback(), Prints()], pause=0.02)
"""
    lines = shown_lines(on_terminal(80, code))
    assert f"WARNING one of {path} is slow" in lines
    assert f"step 15 of {path}" in lines


def test_an_exit_that_closes_nothing_gives_the_cursor_back() -> None:
    code = "ProgressCallback().on_train_begin(None, TrainerState(max_steps=9), TrainerControl())"
    output = on_terminal(80, code)
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_an_evaluation_by_itself() -> None:
    code = """
callback, state = ProgressCallback(), TrainerState()
for _ in range(3):
    callback.on_prediction_step(None, state, None, eval_dataloader=iter(()))
    time.sleep(0.21)
callback.on_evaluate(None, state, None, metrics=EVAL)
"""
    output = on_terminal(80, code)
    assert any(line.startswith("      0  eval  loss 3.2000") for line in shown_lines(output))
    assert output.rindex("\x1b[?25h") > output.rindex("\x1b[?25l")


def test_no_result_is_cut_off_in_a_narrow_terminal() -> None:
    code = f"FINAL.update({dict.fromkeys(TIMES, 10.0)}); fake_run([ProgressCallback()])"
    lines = [line for line in shown_lines(on_terminal(60, code)) if not line.startswith(("outputs", "train"))]
    assert max(map(len, lines)) <= 60
    text = " ".join(" ".join(lines).split())
    assert "the time went to " + ", ".join(f"{label} 14%" for label in TIMES.values()) in text


def test_info_is_a_panel_that_folds_and_breaks_no_path() -> None:
    paths = [f"outputs/{letter * length}" for letter, length in (("a", 32), ("b", 62), ("c", 92))]
    code = f"""
for path in {paths}:
    INFO["output_dir"] = path
    InfoCallback().on_train_begin(None, TrainerState(), None, trainer=TRAINER)
"""
    lines = shown_lines(on_terminal(80, code))
    assert lines[0].startswith("╭─ Forgather")
    assert len([line for line in lines if re.match(r"│ model +decoder +│", line)]) == 3
    assert "".join(lines).count("text") == 3 * 30
    assert [sum(path in line for line in lines) for path in paths] == [1, 1, 1]
    assert set(paths) & set(lines) == set(paths[1:])  # alone in a line, where it has no room beside its name
    assert all(len(line) <= 80 for line in lines if line not in paths)


def test_info_is_lines_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    callback = InfoCallback(InfoSettings(verbose=True), config_tree={"model": {"type": "decoder"}})
    callback.on_train_begin(None, TrainerState(), TrainerControl(), trainer=TRAINER, model="Decoder()")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["model       decoder", "parameters  3,312,640"]
    assert lines[-3:] == ["model:", "  type: decoder", "Decoder()"]
    assert not any(line.startswith("nothing") for line in lines)


def test_a_notebook_has_one_output_that_is_updated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kernel = notebook.Kernel(monkeypatch)
    callback = ProgressCallback()
    fake_run([callback], pause=0.01)
    assert capsys.readouterr().out == ""
    assert len(kernel.outputs) == 1
    [texts] = kernel.outputs.values()
    assert any(re.search(r"train █+░+ 30/40 loss 0\.1667 123k tok/s 0:00:0\d eta 0:00:0\d$", text) for text in texts)
    assert any(re.search(r"eval █+░+ [1-3]/4$", text) for text in texts)
    assert not re.search("[█░]", texts[-1])
    rows = [line.split()[0] for line in texts[-1].splitlines() if re.match(r" +\d+  +\d\.\d\d  ", line)]
    assert rows == ["10", "20", "30", "40"]
    assert "run's mean loss" in texts[-1]
    fake_run([callback], num_steps=1000)  # another cell; a long run does not grow
    assert len(kernel.outputs) == 2
    assert len(list(kernel.outputs.values())[1][-1].splitlines()) < 60


@pytest.mark.parametrize(
    ("value", "fmt", "text"),
    [
        (0, "si", "0"), (12.34, "si", "12.3"), (999.4, "si", "999"), (999.6, "si", "1k"), (1234.0, "si", "1.23k"),
        (123456.7, "si", "123k"), (5.4e13, "si", "54T"), (2.5e18, "si", "2.5E"),
        (999, "bytes", "999 B"), (1024, "bytes", "1 KiB"), (5 * 2**20, "bytes", "5 MiB"),
        (1.5 * 2**30, "bytes", "1.5 GiB"),
        (59.9, "duration", "0:00:59"), (100 * 3600, "duration", "100:00:00"),
        (900.0, "flops", "900 FLOP/s"), (9.9e13, "flops", "99 TFLOP/s"),
        (float("nan"), ".4f", "nan"), (float("inf"), "duration", "inf"), (3.0, ",d", "3"), ("text", ".4f", "text"),
    ],
)  # fmt: skip
def test_formats(value: Any, fmt: str, text: str) -> None:
    assert format_value(value, fmt) == text


def test_a_number_too_wide_is_shortened_and_a_column_the_user_names_kept_on_a_narrow_terminal() -> None:
    assert row([Column("loss", "loss", 8, ".4f")], {"loss": 123456.789}) == "1.23e+05"
    columns = merge(STEP_COLUMNS, {"weight_norm": {"width": 12}})
    names = [column.name for column in fit(columns.values(), 40)]
    assert names == ["step", "epoch", "loss", "weight_norm"]


def test_generated_text_cannot_drive_a_terminal() -> None:
    assert printable("a\x1b[2Jb\r\x07\n\tc") == "a\\x1b[2Jb\\r\\x07\n\tc"
