"""The override grammar and bare keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from program import write

from forgather_cli.config.complete import complete
from forgather_cli.config.load import load_config


@pytest.fixture
def tree(tmp_path: Path) -> Any:
    def load(*overrides: str, recipe: str | None = None) -> dict[str, Any]:
        return load_config(recipe, overrides, cwd=tmp_path).tree

    return load


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("max_steps=7", "max_steps", 7),
        ("rope_scaling.rope_type=linear", "model.rope_scaling.rope_type", "linear"),
        ("rope_type=dynamic", "model.rope_scaling.rope_type", "dynamic"),
        ("warmup_steps=0.1", "lr_scheduler.warmup_steps", 0.1),
        ("betas=[0.5,0.6]", "optimizer.betas", [0.5, 0.6]),
        ("groups.no_decay.settings.weight_decay=0.3", "optimizer.groups.no_decay.settings.weight_decay", 0.3),
        ("tokenizer='a b, c'", "data.tokenizer", "a b, c"),
        ("logging_dir='x=1,2'", "logging_dir", "x=1,2"),
        ("logging_dir=a/learning_rate=0.01-e3/x", "logging_dir", "a/learning_rate=0.01-e3/x"),
        ("logging_dir=~/a=b", "logging_dir", str(Path.home() / "a=b")),
        ("+callbacks.early_stopping.metric=a=b", "callbacks.early_stopping.metric", "a=b"),
        ("callbacks.textgen.prompts=[a=b,c,d=e]", "callbacks.textgen.prompts", ["a=b", "c", "d=e"]),
        ('metric_for_best_model="it\'s"', "metric_for_best_model", "it's"),
        ("++save_steps=3", "save_steps", 3),
        ("++callbacks.textgen.top_k=3", "callbacks.textgen.top_k", 3),
        ("callbacks.textgen.prompts=['a,b','c d']", "callbacks.textgen.prompts", ["a,b", "c d"]),
        ("+callbacks.early_stopping.patience=5", "callbacks.early_stopping.patience", 5),
        ("logging_steps=${save_steps}", "logging_steps", 100),
        ("max_grad_norm=null", "max_grad_norm", None),
    ],
)
def test_values_reach_their_path(tree: Any, override: str, path: str, value: object) -> None:
    found = tree(override)
    for part in path.split("."):
        found = found[part]
    assert found == value


def test_several_options_of_a_group_are_merged(tree: Any, tmp_path: Path) -> None:
    write(tmp_path / "conf/callbacks/stop.yaml", "early_stopping: {patience: 9}\n")
    found = tree("callbacks=[minimal,stop]")["callbacks"]
    assert set(found) == {"metrics", "progress", "json", "early_stopping"}


def test_removal(tree: Any) -> None:
    assert "tensorboard" not in tree("~callbacks.tensorboard")["callbacks"]
    assert tree("~callbacks")["callbacks"] == {}
    assert tree("~eval_steps")["eval_steps"] == 100
    assert tree("~warmup_steps")["lr_scheduler"]["warmup_steps"] == 0
    assert tree("~save_steps=100")["save_steps"] == 500
    assert tree("callbacks.textgen=null")["callbacks"].get("textgen") is None


def test_precedence_is_later_words_command_line_recipe_option_file(tree: Any, tmp_path: Path) -> None:
    write(
        tmp_path / "r.yaml",
        "defaults: [train, {override trainer: pipeline}, _self_]\nn_microbatches: 8\nmin_lr_ratio: ${max_grad_norm}\n"
        "optimizer.betas: [0.1, 0.2]\nmax_grad_norm: 0.5\nrope_scaling: {rope_type: linear, factor: 2}\n",
    )
    found = tree(recipe="r.yaml")
    assert found["trainer"]["n_microbatches"] == 8
    assert found["lr_scheduler"]["min_lr_ratio"] == 0.5
    assert found["optimizer"]["betas"] == [0.1, 0.2]
    assert found["model"]["rope_scaling"]["rope_type"] == "linear"
    for typed in ("n_microbatches=4", "trainer.n_microbatches=4"):
        assert tree(typed, recipe="r.yaml")["trainer"]["n_microbatches"] == 4
    assert tree("trainer=single", "~n_microbatches", recipe="r.yaml")["trainer"] == {"type": "single"}
    for later in (["seq_len=64", "data.seq_len=128"], ["data.seq_len=64", "seq_len=128"]):
        assert tree(*later)["data"]["seq_len"] == 128


def test_a_bare_key_prefers_the_selected_options(tree: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_loss_k1.py").write_text("def loss(logits, labels, clipping_threshold=0.0): ...\n")
    write(tmp_path / "conf/loss/own.yaml", "_target_: own_loss_k1.loss\nclipping_threshold: 0.1\n")
    monkeypatch.chdir(tmp_path)
    found = tree("loss=own", "clipping_threshold=0.5")
    assert found["loss"]["clipping_threshold"] == 0.5
    assert "clipping_threshold" not in found["optimizer"]


@pytest.mark.parametrize(
    ("incomplete", "words", "offered"),
    [
        ("traine", [], ["trainer="]),
        ("n_micro", [], ["n_microbatches="]),
        ("n_micro", ["trainer=ddp"], []),
        ("hidden_", ["model=160m"], ["hidden_size="]),
        ("model.hidden", [], ["model.hidden_size="]),
        ("trainer=pi", [], ["trainer=pipeline"]),
        ("eval_strategy=", [], ["eval_strategy=no", "eval_strategy=steps", "eval_strategy=epoch"]),
        ("torch_compile=t", [], ["torch_compile=true"]),
        ("schedule=G", [], ["schedule=GPipe"]),
        ("pretrain_1", [], ["pretrain_160m", *(f"pretrain_1b_{n}" for n in ("accelerate", "nodes", "pipeline"))]),
        ("pretrain_", ["default"], []),  # a recipe is named already
    ],
)
def test_completion(incomplete: str, words: list[str], offered: list[str]) -> None:
    assert [text for text, _ in complete(incomplete, words)] == offered


def test_completions_have_the_descriptions_of_the_shipped_files() -> None:
    assert "garbage collector" in dict(complete("gc_st", []))["gc_steps="]
    assert "Data parallel" in dict(complete("trainer=", []))["trainer=ddp"]
    assert complete("~callbacks.tens", [])[0][0] == "~callbacks.tensorboard"
