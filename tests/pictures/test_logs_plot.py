"""``forgather logs plot``: what is drawn is what was logged, limits, labels, heatmaps, files and mistakes."""

from __future__ import annotations

import json
import math
import os
import xml.etree.ElementTree as ET
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from logged import make_run, write_records
from program import Process, forgather, refusal, shown

from forgather_cli.pictures import style
from forgather_cli.pictures.curves import Look, draw_curves
from forgather_cli.pictures.heatmap import draw_heatmap
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def logged(root: Path, steps: int = 40, *, start: float = 5.0, **settings: Any) -> RunDir:
    """A run with a training record at each step and an evaluation at each tenth."""
    run, lines = RunDir(make_run(root, [], **settings)), []
    for n in range(1, steps + 1):
        head = {"time": f"2026-01-01T00:{n // 60:02}:{n % 60:02}+00:00", "step": n}
        loss = start / n**0.3
        norms = {"grad_norm": 1 / n, "max_grad_norm": 2 / n}
        speed = {"tok_per_sec": 1e4 + n, "peak_mem_allocated": 2**30 + n * 2**20, "total_tokens": 100 * n}
        lines.append({**head, "loss": loss, **norms, "learning_rate": 1e-3 / n, **speed})
        if n % 10 == 0:
            lines.append({**head, "eval_loss": loss + 0.1, "eval_runtime": 0.5})
    write_records(run.root, lines)
    return run


def records(run: RunDir) -> list[dict[str, Any]]:
    return [json.loads(line) for line in run.metrics.read_text().splitlines()]


def drawn(runs: list[RunDir], **look: Any) -> Figure:
    with style.drawing():
        return draw_curves(runs, Look(**look))


def lines(figure: Figure, label: str) -> list[list[tuple[float, float]]]:
    """The points of all lines of a metric."""
    found = [line for axes in figure.axes for line in axes.get_lines() if line.get_label() == label]
    return [list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True)) for line in found]


def legend(figure: Figure) -> list[str]:
    [made] = figure.legends
    return [made.get_title().get_text(), *(text.get_text() for text in made.get_texts())]


def test_every_record_is_drawn_where_it_was_logged(tmp_path: Path) -> None:
    run = logged(tmp_path / "run")
    figure = drawn([run])
    for metric in ("loss", "eval_loss", "grad_norm", "max_grad_norm", "learning_rate", "tok_per_sec"):
        expected = [(r["step"], r[metric]) for r in records(run) if metric in r]
        assert lines(figure, metric) == [expected], metric
    [memory] = lines(figure, "peak_mem_allocated")
    assert memory[-1] == (40, pytest.approx((2**30 + 40 * 2**20) / 2**30))
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "loss (nats per token)", "gradient norm, thin: the largest of each interval", "learning rate",
        "throughput (tokens per second)", "peak memory (GiB)",
    ]  # fmt: skip
    assert legend(figure)[1:] == ["training", "evaluation"]
    [marks] = [line for line in figure.axes[0].get_lines() if line.get_label() == "eval_loss"]
    assert marks.get_marker() == "o"


def test_other_axes_metrics_and_smoothing(tmp_path: Path) -> None:
    run = logged(tmp_path / "run")
    [tokens] = lines(drawn([run], axis="tokens"), "eval_loss")
    assert [x for x, _ in tokens] == [1000, 2000, 3000, 4000]
    [times] = lines(drawn([run], axis="time"), "loss")
    assert [x for x, _ in times] == list(range(40))
    figure = drawn([run], metrics=("learning_rate", "eval_loss"), smooth=0.9, log_y=True)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["learning_rate", "eval_loss"]
    assert {axes.get_yscale() for axes in figure.axes} == {"log"}
    [smooth] = lines(figure, "learning_rate")
    rates = [1e-3 / n for n in range(1, 41)]
    weights = [0.9 ** (39 - n) for n in range(40)]
    assert smooth[-1][1] == pytest.approx(sum(w * y for w, y in zip(weights, rates, strict=True)) / sum(weights))
    assert smooth[0][1] == pytest.approx(rates[0])


def test_several_runs_are_told_apart_by_the_setting_that_differs(tmp_path: Path) -> None:
    rates = [n / 1000 for n in range(1, 9)]
    runs = [logged(tmp_path / f"{rate}", start=4 + 100 * rate, learning_rate=rate) for rate in rates]
    figure = drawn(runs)
    assert legend(figure) == [
        "8 runs, recipe default", *(f"learning_rate={rate:g}" for rate in rates), "evaluation",
    ]  # fmt: skip
    assert [line[0][1] for line in lines(figure, "loss")] == [4 + 100 * rate for rate in rates]
    colours = [line.get_color() for line in figure.axes[0].get_lines() if line.get_label() == "loss"]
    assert len(set(colours)) == 8
    assert lines(figure, "max_grad_norm") == []  # too many lines for so many runs
    figure.draw_without_rendering()
    [made] = figure.legends
    box, first = made.get_window_extent(), figure.axes[0].get_tightbbox()
    assert box.y0 >= first.y1 - 1  # above all panels, nothing on another
    assert box.x1 <= figure.bbox.x1


def test_curves_that_lie_on_each_other_are_all_seen(tmp_path: Path) -> None:
    runs = [logged(tmp_path / name, trainer__type=name) for name in ("single", "ddp", "fsdp2")]
    other = logged(tmp_path / "other", start=9.0, trainer__type="pipeline")
    found = [line for line in drawn([*runs, other]).axes[0].get_lines() if line.get_label() == "loss"]
    patterns = [line.get_linestyle() for line in found]
    assert patterns == ["-", "--", "--", "-"]
    offsets = [line._dash_pattern[0] for line in found[1:3]]
    assert len(set(offsets)) == 2


def test_rolled_back_records_are_apart_and_a_resume_is_marked(tmp_path: Path) -> None:
    run = logged(tmp_path / "run")
    kept = records(run)
    of_loss = [record for record in kept if 15 < record["step"] <= 20 and "loss" in record]
    at = next(n for n, record in enumerate(kept) if record["step"] == 16)
    abandoned = [{**record, "loss": 50.0, "abandoned": True} for record in of_loss]
    write_records(run.root, [*kept[:at], *abandoned, *kept[at:]])
    later = run.later_config(1)
    later.write_text(run.config.read_text())
    moment = datetime.fromisoformat("2026-01-01T00:00:30.500+00:00").timestamp()
    os.utime(later, (moment, moment))
    figure = drawn([run])
    assert lines(figure, "loss") == [[(r["step"], r["loss"]) for r in kept if "loss" in r]]
    assert lines(figure, "loss, rolled back") == [[(step, 50.0) for step in range(16, 21)]]
    assert lines(figure, "resumed")[0][0][0] == 30
    assert legend(figure)[1:] == ["training", "evaluation", "rolled back", "resumed"]
    assert figure.axes[0].get_ylim()[1] < 10  # what was abandoned stretches no axis


def test_no_single_value_flattens_the_rest() -> None:
    curve = [5 / n**0.3 for n in range(1, 101)]
    bottom, top, cut = style.limits([curve])
    assert (bottom < min(curve), top > 5, cut) == (True, True, None)
    bottom, top, cut = style.limits([[400.0, 90.0, *curve[2:]]])
    assert cut == 400
    assert top < 8
    spike = [*curve]
    spike[60] = 1e6
    assert style.limits([spike])[1] < 8
    assert style.limits([[2.0, 2.0, 2.0]])[2] is None
    assert style.limits([[math.nan], []]) == (0.0, 1.0, None)
    low, high, _ = style.limits([[1e-5, 1e-3]], log=True)
    assert 0 < low < 1e-5 < 1e-3 < high


def test_values_that_are_not_numbers_are_gaps(tmp_path: Path) -> None:
    run = logged(tmp_path / "run", 4)
    write_records(run.root, [{**record, "loss": None} if record["step"] == 2 else record for record in records(run)])
    [loss] = lines(drawn([run]), "loss")
    assert [step for step, _ in loss] == [1, 2, 3, 4]
    assert math.isnan(loss[1][1])


# ----------------------------------------------------------------------------------------------------------- heatmaps


def heatmap(root: Path, layers: int) -> tuple[list[str], Figure]:
    """That of gradient norms of so many layers, and the parameters that it should have."""
    run = logged(root, 4)
    kinds = ["self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj", "input_layernorm"]
    names = [f"model.layers.{n}.{kind}.weight" for n in range(layers) for kind in kinds]
    names = ["model.embed_tokens.weight", *names, "lm_head.weight"]
    with run.gradient_norms.open("w") as file:
        for step in (1, 10, 100):
            norms = {name: 10.0**-n * step for n, name in enumerate(names)}
            file.write(json.dumps({"step": step, "norms": {**norms, names[0]: 0.0}}) + "\n")
        file.write(json.dumps({"step": 50, "norms": {}, "abandoned": True}) + "\n")
    with style.drawing():
        return names, draw_heatmap([run], "grad_norms")


def test_a_heatmap_has_a_row_for_each_parameter_and_a_column_for_each_step(tmp_path: Path) -> None:
    names, figure = heatmap(tmp_path / "run", 2)
    [mesh] = figure.axes[0].collections
    values = mesh.get_array()
    assert values.shape == (len(names), 3)
    assert bool(values.mask[0].all())  # a norm of 0 has no place on a logarithmic scale
    assert values[3, 2] == pytest.approx(1e-3 * 100)
    labels = [tick.get_text() for tick in figure.axes[0].get_yticklabels()]
    assert labels[:2] == ["embed_tokens", "layers.0.self_attn.q_proj"]
    assert list(mesh.get_coordinates()[0, :, 0]) == [-3.5, 5.5, 55.0, 145.0]  # columns as wide as their steps


@pytest.mark.parametrize("layers", [10, 41])
def test_labels_of_many_parameters_do_not_overlap(tmp_path: Path, layers: int) -> None:
    _, figure = heatmap(tmp_path / "run", layers)
    figure.draw_without_rendering()
    boxes = sorted((each.get_window_extent() for each in figure.axes[0].get_yticklabels()), key=lambda box: box.y0)
    assert len(boxes) == (4 * layers + 2 if layers == 10 else layers + 2)
    assert all(lower.y1 <= upper.y0 + 1 for lower, upper in pairwise(boxes))


# -------------------------------------------------------------------------------------------------- files and mistakes


def test_the_command_writes_png_and_svg_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, _ = (logged(tmp_path / name, learning_rate=rate).root for name, rate in (("run", 0.001), ("other", 0.01)))
    make_run(tmp_path / "refused", [], learning_rate=1.0)
    assert shown(capsys, "logs", "plot", str(run)) == f"{run}/plots/metrics.png\n"
    assert (run / "plots/metrics.png").read_bytes().startswith(b"\x89PNG")
    out = tmp_path / "pictures/both.svg"
    assert forgather("logs", "plot", str(tmp_path), "-o", str(out)) == 0
    assert f"{tmp_path}/refused" in capsys.readouterr().err  # which has logged nothing
    texts = {"".join(each.itertext()).strip() for each in ET.parse(out).iter("{http://www.w3.org/2000/svg}text")}
    assert {"learning_rate=0.001", "learning_rate=0.01", "loss (nats per token)"} <= texts
    first = out.read_bytes()
    assert forgather("logs", "plot", str(tmp_path), "-o", str(out)) == 0
    assert out.read_bytes() == first


def test_mistakes_are_told_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(logged(tmp_path / "run", 4).root)
    empty = str(make_run(tmp_path / "empty", []))
    for words, said in (
        ((run, "--metric", "los"), "--metric: nothing was logged as 'los'; did you mean loss? Logged: loss, grad_norm"),
        ((run, "-o", "picture.jpeg"), "-o: the picture's name must end in .png or .svg, got 'picture.jpeg'"),
        ((run, "--x", "steps"), "--x: must be step, tokens or time, got 'steps'"),
        ((run, "--smooth", "1"), "--smooth: is the weight of what came before, from 0 to below 1, got 1"),
        ((run, "--heatmap", "norms"), "--heatmap: must be one of grad_norms, parameter_norms, spectral, got 'norms'; "),
        ((run, "--heatmap", "spectral"), "has no parameter_norms.jsonl; train with callbacks=full, or '+callbacks."),
        ((run, "--heatmap", "spectral", "--log-y"), "--log-y: says nothing to --heatmap; leave one of them out"),
        ((empty,), "has no metrics.jsonl; nothing was logged there"),
        ((str(tmp_path / "none"),), "no such directory; give a run's directory"),
    ):
        assert said in refusal(capsys, "logs", "plot", *words)
    assert not list(tmp_path.rglob("*.png"))


def test_without_matplotlib_the_message_says_what_to_install(tmp_path: Path) -> None:
    run = logged(tmp_path / "run", 4)
    code = "import sys; sys.modules['matplotlib'] = None; from forgather_cli.cli.app import main; main()"
    with Process("logs", "plot", str(run.root), code=code, cold=True) as job:
        assert job.finish() == 2
    assert job.output == "error: logs plot: needs matplotlib; pip install 'forgather[plot]'"
