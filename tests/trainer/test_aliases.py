"""Further names of ``TrainingArguments``: each is what it stands for, and excludes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from program import forgather

from forgather_cli import BF16TrueSettings, FP8Settings, Trainer, TrainingArguments
from forgather_cli.errors import ConfigError
from forgather_cli.trainer.aliases import ALIASES
from forgather_cli.trainer.arguments import HFSettings


@pytest.mark.parametrize(
    ("alias", "original"),
    [
        ({"mixed_precision": "no"}, {"precision": "fp32"}),
        ({"mixed_precision": "bf16"}, {"bf16": True}),
        ({"default_dtype": torch.bfloat16}, {"precision": "bf16_true"}),
        ({"default_dtype": "bfloat16", "mixed_precision": "no"}, {"precision": BF16TrueSettings()}),
        ({"default_dtype": torch.float32, "bf16": True}, {"bf16": True}),
        ({"torch_compile": True, "torch_compile_full_graph": True},
         {"torch_compile": True, "torch_compile_fullgraph": True}),
        ({"fp8_recipe": "rowwise"}, {"precision": FP8Settings(fp8_recipe="rowwise")}),
        ({"qat_recipe": "int8-weight-only"}, {"precision": {"type": "qat", "qat_recipe": "int8-weight-only"}}),
        ({"preserve_best_model": True}, {"preserve_n_best": 1}),
        ({"best_model_metric": "error", "greater_is_better": False},
         {"metric_for_best_model": "error", "greater_is_better": False}),
    ],
)  # fmt: skip
def test_an_alias_is_what_it_stands_for(alias: dict[str, Any], original: dict[str, Any]) -> None:
    first, second = TrainingArguments("out", **alias), TrainingArguments("out", **original)
    settings = vars(HFSettings()).keys() - {"bf16", "fp16"}
    assert {name: getattr(first, name) for name in settings} == {name: getattr(second, name) for name in settings}
    assert first.precision == second.precision
    for name in ALIASES.keys() & alias.keys():
        assert getattr(first, name) == alias[name], "scripts read it back"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"mixed_precision": "bf16", "bf16": True}, ("mixed_precision", "bf16")),
        ({"mixed_precision": "no", "precision": "fp32"}, ("mixed_precision", "precision")),
        ({"mixed_precision": "int8"}, ("mixed_precision", "no, bf16 or fp16", "'int8'")),
        ({"default_dtype": "bfloat16", "precision": "bf16_true"}, ("default_dtype", "precision")),
        ({"default_dtype": "bfloat16", "mixed_precision": "fp16"}, ("default_dtype", "mixed_precision")),
        ({"default_dtype": torch.float16}, ("default_dtype", "float16", "mixed_precision")),
        ({"float32_matmul_precision": "high", "tf32": True}, ("float32_matmul_precision", "tf32")),
        ({"torch_compile_full_graph": True, "torch_compile_fullgraph": True}, ("torch_compile_full_graph",)),
        ({"fp8_recipe": "rowwise", "qat_recipe": "int8-weight-only"}, ("fp8_recipe", "qat_recipe")),
        ({"fp8_recipe": "columnwise"}, ("fp8_recipe", "tensorwise, rowwise or rowwise_with_gw_hp")),
        ({"preserve_best_model": True, "preserve_n_best": 1}, ("preserve_best_model", "preserve_n_best")),
        ({"best_model_metric": "eval_loss", "metric_for_best_model": "eval_loss"}, ("metric_for_best_model",)),
    ],
)
def test_an_alias_excludes_what_it_stands_for(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainingArguments("out", **given)
    assert all(word in refused.value.problems[0] for word in words), refused.value.problems


def test_rules_name_the_alias_that_was_given() -> None:
    args = TrainingArguments("out", torch_compile_full_graph=True, use_cpu=True)
    with pytest.raises(ConfigError, match=r"^torch_compile_full_graph: nothing reads it with torch_compile=False"):
        Trainer(tiny.decoder(), args, None, tiny.RandomTokens())


@pytest.mark.parametrize("words", [["--mixed_precision", "bf16", "--bf16", "False"], ["--bf16"], []])
def test_the_librarys_parser_gives_all_names_and_only_those_typed_count(words: list[str]) -> None:
    parser = transformers.HfArgumentParser(TrainingArguments)
    [args] = parser.parse_args_into_dataclasses(["--output_dir", "out", *words])
    assert args.precision.type == ("bf16" if words else "fp32")
    assert args.preserve_n_best == 1


def test_groups_of_the_optimizer_are_printed_as_plan_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = [f"{name}={value}" for name, value in tiny.SHAPE.items()]
    words = ["model=decoder", "data.seq_len=16", "data=synthetic", *shape, "optimizer=muon", "--params"]
    assert forgather("plan", *words) == 0
    planned = capsys.readouterr().out
    settings = {"max_steps": 1, "optimizer": "muon", "weight_decay": 0.1}
    tiny.script(tmp_path, debug_optimizer_groups=True, **settings).train()
    printed = capsys.readouterr().out

    def table(text: str) -> list[tuple[str, ...]]:
        """Name, kind, group, optimizer and decay of each parameter."""
        rows = [line.split() for line in text.splitlines() if line.strip().startswith(("model.", "lm_head."))]
        return [(row[0], *row[-4:]) for row in rows]

    assert len(table(printed)) > 10
    assert table(printed) == table(planned)
