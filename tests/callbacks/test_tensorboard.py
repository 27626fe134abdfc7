"""TBLogger: read back with TensorBoard's own reader."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from program import modules_after

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.callbacks.tensorboard import TBLogger, indented
from forgather_cli.config.schema import TensorboardSettings
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir

CONTROL = TrainerControl()
TRAINER = SimpleNamespace(info=lambda: {"model": "decoder", "data": "a|b"})
INFO = {"question": "does *QK-norm* help?", "cluster": {"nodes": 2, "name": "a"}}


def train(path: Path, steps: range, scalars: dict[str, Any] | None = None, rank_zero: bool = True) -> None:
    settings = TensorboardSettings(scalars=scalars or {}, experiment_info=INFO)
    logger = TBLogger(settings, RunDir(path), config_tree={"seed": 42})
    state = TrainerState(resumed_step=steps.start - 1, is_world_process_zero=rank_zero)
    logger.on_train_begin(None, state, CONTROL, trainer=TRAINER)
    for step in steps:
        state.global_step = step
        logs = {"loss": float(step), "tok_per_sec": 5e3, "epoch": 0.5, "note": "text", "step": step, "zero": 0.0}
        logger.on_log(None, state, CONTROL, logs=logs)
    if rank_zero:
        logger.tb_writer.add_text("samples/1", indented("def f():\n    # *x*"), state.global_step)
    logger.on_log(None, state, CONTROL, logs={"eval_loss": 2.0, "eval_perplexity": 7.389})
    logger.on_log(None, state, CONTROL, logs={"train_runtime": 12.5, "train_loss": 1.5})
    logger.on_train_end(None, state, CONTROL)


def read(path: Path) -> Any:
    import tiny  # which imports torch, and this file is imported where nothing may have

    return tiny.tensorboard(path / "tensorboard")


def curve(events: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in events.Scalars(tag)]


def test_scalars_are_merged_over_the_defaults(tmp_path: Path) -> None:
    scalars = {
        "train/epoch": None,
        "speed/ktok": {"source": "tok_per_sec", "transform": "kilo"},
        "train/loss": {"source": "loss", "transform": "negate"},
        "never": {"source": "no_such_metric"},
        "lg": {"source": "loss", "transform": "log10"},
        "gap": {"source": "zero", "transform": "log"},
    }
    train(tmp_path, range(1, 2), scalars)
    events = read(tmp_path)
    assert "train/epoch" not in events.Tags()["scalars"]
    assert "never" not in events.Tags()["scalars"]
    assert curve(events, "speed/ktok") == [(1, 5.0)]
    assert curve(events, "train/loss") == [(1, -1.0)]
    assert curve(events, "lg") == [(1, 0.0)]
    ((_, value),) = curve(events, "gap")  # for which the transform is not defined
    assert value != value


def test_every_number_is_a_curve_and_there_are_texts(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    train(tmp_path, range(1, 4))
    [file] = (tmp_path / "tensorboard").iterdir()
    values = [len(event.summary.value) for event in EventFileLoader(str(file)).Load() if event.step]
    assert values == [4, 4, 4, 1, 2, 1], "an event for each record of curves, and for each text"
    events = read(tmp_path)
    assert set(events.Tags()["scalars"]) == {
        "train/loss", "train/tok_per_sec", "train/epoch", "train/zero", "eval/loss", "eval/perplexity",
    }  # fmt: skip
    assert curve(events, "train/loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert curve(events, "eval/loss") == [(3, 2.0)]
    texts = {tag: events.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"]}
    assert texts == {
        "config/text_summary": "    seed: 42",
        "training info/text_summary": "| | |\n|---|---|\n| model | decoder |\n| data | a\\|b |",
        "samples/1/text_summary": "    def f():\n        # *x*",
        "experiment_info/question/text_summary": "does *QK-norm* help?",
        "experiment_info/cluster/text_summary": "    nodes: 2\n    name: a",
        "results/text_summary": "| | |\n|---|---|\n| train_runtime | 12.5 |\n| train_loss | 1.5 |",
    }


def test_what_was_typed_for_a_run_are_its_hyperparameters(tmp_path: Path) -> None:
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    words = ["learning_rate=0.002", "model=nano", "+callbacks.weight_norm={}", "~callbacks.textgen", "output_dir=x"]
    RunDir(tmp_path).origin.write_text(yaml.safe_dump({"recipe": "default", "overrides": words}))
    train(tmp_path, range(1, 2))
    events = read(tmp_path)
    written = events.summary_metadata
    start = HParamsPluginData.FromString(written["_hparams_/session_start_info"].plugin_data.content)
    chosen = {
        name: value.number_value or value.string_value for name, value in start.session_start_info.hparams.items()
    }
    assert chosen == {"learning_rate": 0.002, "model": "nano", "callbacks.weight_norm": "{}"}
    experiment = HParamsPluginData.FromString(written["_hparams_/experiment"].plugin_data.content).experiment
    assert {info.name.tag for info in experiment.metric_infos} <= set(events.Tags()["scalars"])


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    train(tmp_path, range(1, 3), rank_zero=False)
    assert list(tmp_path.iterdir()) == []


def test_wrong_scalars_are_config_mistakes_all_at_once(tmp_path: Path) -> None:
    scalars = {"a": {"source": "loss", "transform": "cube"}, "b": {"sauce": "loss"}}
    with pytest.raises(ConfigError) as caught:
        TBLogger(TensorboardSettings(scalars=scalars), RunDir(tmp_path))
    text = str(caught.value)
    assert "callbacks.tensorboard.scalars.a.transform: unknown, got 'cube'; use one of exp, log" in text
    assert "callbacks.tensorboard.scalars.b.sauce: unknown" in text
    assert "callbacks.tensorboard.scalars.b.source: must name a metric, got None" in text


def test_tensorboard_is_not_imported_before_the_first_log(tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_tensorboard import *
logger = TBLogger(run=RunDir(Path({str(tmp_path)!r})))
logger.on_train_begin(None, TrainerState(), CONTROL, trainer=TRAINER)
"""
    assert not {"tensorboard", "torch"} & modules_after(code)
    assert list(tmp_path.iterdir()) == []
