"""Stages by a function of the user's, and of transformers' decoders: trained as on one device, under every promise."""

from __future__ import annotations

import functools
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import train
from own_stages import Rounds, Words, split
from parity import LAYOUTS, Result, assert_parity, scratch
from ranks import refusals, run_ranks
from torch import nn

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.config.decode import load_tree
from forgather_cli.config.load import load_config, load_resumed
from forgather_cli.config.schema import LinearCrossEntropySettings, PipelineSettings, Target
from forgather_cli.errors import ConfigError
from forgather_cli.loss.build import build_loss
from forgather_cli.plan.run import make_plan
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import ModelSpec

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports

OWN = ("model._target_=own_stages.Words",)
SPLIT = ("model_splitter._target_=own_stages.split",)
_SHAPE = "hidden_size: 16, intermediate_size: 24, num_hidden_layers: 4, num_attention_heads: 2, num_key_value_heads: 1"


def theirs(model_type: str, more: str = "") -> tuple[str, ...]:
    return "model=transformers", f"model.config={{model_type: {model_type}, {_SHAPE}, {more}}}"


MODELS: dict[str, tuple[str, ...]] = {
    "own": OWN,
    "own, tied": (*OWN, "+model.tied=true", "loss=linear_cross_entropy", "gradient_checkpointing=true"),
    "llama, tied": theirs("llama", "tie_word_embeddings: true, max_position_embeddings: 32"),
    "qwen3": (*theirs("qwen3", "head_dim: 8, tie_word_embeddings: false"), "loss=linear_cross_entropy"),
    "qwen3, tied": (
        *theirs("qwen3", "head_dim: 8, tie_word_embeddings: true"),
        "gradient_checkpointing=true",
        "data.isolate_documents=true",
    ),
}
CASES = [
    ("own", "1F1B 2"), ("own, tied", "ZBVZeroBubble 2"), ("own, tied", "Interleaved1F1B 2x2"),
    ("llama, tied", "1F1B 2"), ("llama, tied", "DualPipeV 2"), ("qwen3", "ZBVZeroBubble 2"),
    ("qwen3, tied", "GPipe 2"), ("qwen3, tied", "1F1B 2x2"),
]  # fmt: skip


@functools.cache
def alone(name: str) -> Result:
    return train(LAYOUTS["single"], MODELS[name], scratch() / f"stages-{name.replace(', ', '-')}", ["save_steps=2"])


def in_stages(name: str, layout: str, path: Path, *settings: str, resume: bool = False) -> Result:
    splits = SPLIT if name.startswith("own") and layout != "single" else ()
    return train(LAYOUTS[layout], MODELS[name], path, [*splits, *settings], resume=resume)


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_losses_norms_and_weights_are_those_of_one_device(name: str, layout: str, tmp_path: Path) -> None:
    """Evaluation, whose batches are of 4 and of 3 rows, and greedy generation with padding too."""
    found = in_stages(name, layout, tmp_path)
    for key, value in alone(name).begin.items():
        assert torch.equal(found.begin[key], value), key
    assert_parity(found, alone(name))


RESUMED = [("own, tied", "1F1B 2"), ("qwen3, tied", "ZBVZeroBubble 2")]


@pytest.mark.parametrize(("name", "layout"), RESUMED)
def test_checkpoints_go_from_one_device_to_stages_and_back(name: str, layout: str, tmp_path: Path) -> None:
    """And under one layout a run goes on bit by bit as if it had not ended."""
    stages = tmp_path / "whole"
    whole = in_stages(name, layout, stages, "save_steps=2", "deterministic=true")

    def go_on(layout: str, source: Path, *settings: str) -> Result:
        path = tmp_path / f"{source.name} to {layout}"
        shutil.copytree(RunDir(source).checkpoint(2), RunDir(path).checkpoint(2))
        return in_stages(name, layout, path, *settings, resume=True)

    for found in (go_on(layout, alone(name).path), go_on("single", stages)):
        assert len(found.losses) == 2
        assert_parity(found, alone(name))
    again = go_on(layout, stages, "deterministic=true")
    assert (again.losses, again.norms) == (whole.losses[2:], whole.norms[2:])
    for key, value in again.tensors().items():
        assert torch.equal(value, whole.tensors()[key]), key


def test_weights_of_a_directory_are_read_stage_by_stage(tmp_path: Path) -> None:
    directory = RunDir(alone("qwen3, tied").path).checkpoint(4) / "model"
    model = ("model=transformers", f"model.path={directory}")
    one, two = (train(LAYOUTS[layout], model, tmp_path / layout) for layout in ("single", "1F1B 2"))
    for key, value in one.begin.items():
        assert torch.equal(two.begin[key], value), key
    assert_parity(two, one)


def materialized(splitter: str | None, loss: Any = None, **settings: Any) -> None:
    from forgather_cli.strategies.pipeline import Pipeline

    made = PipelineSettings(model_splitter=None if splitter is None else Target(f"own_stages.{splitter}"), **settings)
    strategy = Pipeline(made, torch.device("cpu"), build_loss(loss), None)
    strategy.materialize(ModelSpec(lambda: Words(9)))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "nothing that makes stages": (lambda: materialized(None), r"Words cannot be cut .* no cut .*model_splitter"),
    "too few modules": (lambda: materialized("too_few"), r"model_splitter: too_few returned 1 modules? for 2 stages"),
    "no list": (lambda: materialized("no_list"), r"model_splitter: no_list must return a list .*, got Part"),
    "a lost parameter": (lambda: materialized("forgets_the_embedding"),
        r"model_splitter: forgets_the_embedding .* no stage of 2 holds embed\.weight"),
    "a renamed parameter": (lambda: materialized("renames"),
        r"model_splitter: renames gave stage 0 of 2 a parameter 0\.\S+, which Words does not have"),
    "a function that raises": (lambda: materialized("raises"), "model_splitter: raises failed .*KeyError: 'blocks.9'"),
    "no hidden states for a fused loss": (lambda: materialized("without_hidden_states", LinearCrossEntropySettings()),
        r"loss.*: ModuleDict has no hidden_states"),
    "another number of layers": (lambda: materialized("split", split=[1, 2]), r"no stage of 2 holds blocks\.3\."),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_stages_is_said_on_every_rank(name: str) -> None:
    for rank in refusals(2, __name__):
        assert re.search(REFUSED[name][1], str(rank[name]))


@pytest.mark.parametrize("name", ["own, tied", "qwen3"])
def test_the_plan_has_the_stages(name: str) -> None:
    splits = SPLIT if name.startswith("own") else ()
    words = ["data=synthetic", "trainer=pipeline", "schedule=ZBVZeroBubble", "nproc_per_node=2", *splits]
    made = make_plan(load_config(None, [*MODELS[name], *words]).config)
    assert [(stage.rank, stage.first_layer) for stage in made.stages] == [(0, 0), (1, 1), (1, 2), (0, 3)]
    tied = sum(row.numel for row in made.parameters if row.name == "embed.weight")
    assert sum(stage.parameters for stage in made.stages) == made.num_parameters + tied
    assert sum(rank.weights for rank in made.ranks) == 4 * made.num_parameters


def scripted(root: str, kind: str, trainer: str) -> dict[str, Any]:
    """Of this rank: a script's training, with a schedule and a splitter that no file could name."""

    class Local(Rounds):
        pass

    def made() -> nn.Module:
        torch.manual_seed(3)
        return Words(50, tied=True) if kind == "own" else qwen3()

    option: Any = trainer
    if trainer == "pipeline" and kind == "own":
        option = PipelineSettings(schedule=Local, model_splitter=lambda model, stages: split(model, stages))  # type: ignore[arg-type]
    elif trainer == "pipeline":
        option = {"type": "pipeline", "schedule": Local}
    args = TrainingArguments(
        root, trainer=option, max_steps=3, per_device_train_batch_size=4, learning_rate=0.05, optim="sgd", use_cpu=True,
        logging_steps=1, save_strategy="no", eval_strategy="steps", eval_steps=3, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = torch.arange(12 * 8).reshape(12, 8) * 7 % 50
    data = [{"input_ids": row, "labels": row} for row in rows]
    if kind == "qwen3":  # padding on either side
        real = torch.ones(12, 8, dtype=torch.bool)
        real[::2, :2], real[1::2, 6:] = False, False
        data = [
            {"input_ids": r, "attention_mask": m.long(), "labels": r.where(m, -100)}
            for r, m in zip(rows, real, strict=True)
        ]
    script = Trainer(model_init=made, args=args, train_dataset=data, eval_dataset=data[:3])
    script.train()
    logs = script.state.log_history
    return {
        "numbers": [each[key] for key in ("loss", "grad_norm", "eval_loss") for each in logs if key in each],
        "text": script.generate([[1, 2, 3]], max_new_tokens=4, temperature=0),
        "weights": {n: p.detach().clone() for part in script.strategy.parts for n, p in part.named_parameters()},
    }


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3Config(vocab_size=50, num_hidden_layers=4, head_dim=8, tie_word_embeddings=True, **shape)
    return Qwen3ForCausalLM(config)


@pytest.mark.parametrize("kind", ["own", "qwen3"])
def test_a_script_gives_a_function_and_a_class(kind: str, tmp_path: Path) -> None:
    one = scripted(str(tmp_path / "one"), kind, "single")
    assert len(one["numbers"]) >= 7
    for rank in run_ranks(2, scripted, str(tmp_path / "two"), kind, "pipeline"):
        assert rank["numbers"] == pytest.approx(one["numbers"], rel=1e-5)
        assert rank["text"] == one["text"]
        assert 0 < len(rank["weights"]) < len(one["weights"])
        for name, tensor in rank["weights"].items():
            torch.testing.assert_close(tensor, one["weights"][name], rtol=1e-5, atol=1e-5)
    saved = load_tree(RunDir(tmp_path / "two").config)["trainer"]
    assert saved["schedule"]["_target_"].startswith("<test_own_stages.scripted.")
    with pytest.raises(ConfigError, match=r"schedule.* made by a Python script"):
        load_resumed(RunDir(tmp_path / "two").config, ["model=tiny", "data=synthetic"])
