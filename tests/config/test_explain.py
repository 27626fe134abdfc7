"""``forgather config explain``: every setting has a comment, a type and a value to begin with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from program import forgather, write
from typer.testing import CliRunner

from forgather_cli.cli.app import app
from forgather_cli.config.explain import explain
from forgather_cli.config.load import load_config
from forgather_cli.config.options import GROUPS
from forgather_cli.config.paths import settings
from forgather_cli.config.schema.base import value_at
from forgather_cli.errors import ConfigError


def test_every_setting_can_be_explained() -> None:
    for path in settings():
        (found,) = explain(path)
        assert found.path == path
        assert found.takes
        leaves = [value for value in found.values.values() if not isinstance(value, dict)]
        assert found.comment or not leaves, f"{path}: what a shipped file sets, it explains"


def test_a_key_as_in_an_override() -> None:
    for key, path, takes in (
        ("packing", "data.packing", "concat, best_fit or pad"),
        ("max_grad_norm", "max_grad_norm", "a number at least 0 or null"),
        ("hidden_size", "model.hidden_size", "a whole number above 0"),
        ("torch_compile", "torch_compile", "true or false or auto"),
        ("callbacks.textgen.prompts", "callbacks.textgen.prompts", "a list, text or null"),
        ("model_splitter", "trainer.model_splitter", "a function or class of yours by _target_ or null"),
    ):
        (found,) = explain(key)
        assert (found.path, found.takes) == (path, takes)


def test_values_are_those_that_a_run_gets() -> None:
    (found,) = explain("hidden_size")
    names = ("decoder", "qwen3_encdec", "nano", "tiny", "60m", "160m", "1b")
    assert found.values.keys() == {f"model={name}" for name in names}
    for option, value in found.values.items():
        data = ["data=ul2"] if option == "model=qwen3_encdec" else []
        assert value_at(load_config(None, [option, *data]).config, "model.hidden_size") == value


def test_a_group_has_options_and_recipes_that_choose_them(tmp_path: Path) -> None:
    write(tmp_path / "precision/mine.yaml", "# As I like it.\ntype: bf16\n")
    (tmp_path / "own.yaml").write_text("defaults:\n  - qat\n  - override precision: mine\n")
    (found,) = explain("precision", tmp_path)
    about = {info.name: info.description for info in found.options}
    assert about["mine"] == "As I like it."
    assert about.keys() >= {"auto", "bf16", "fp32"}
    assert {name: found.recipes[name] for name in ("default", "pretrain_1b_accelerate", "qat", "own")} == {
        "default": "auto", "pretrain_1b_accelerate": "auto", "qat": "qat", "own": "mine",
    }  # fmt: skip
    assert explain("model")[0].recipes["qat"] == "pretrained", "as finetune, from which it starts"
    assert "precision.init_scale" in found.settings
    assert "callbacks.textgen" in explain("callbacks")[0].settings


def test_a_group_has_the_meaning_of_each_setting(capsys: pytest.CaptureFixture[str]) -> None:
    for group in GROUPS:
        (found,) = explain(group)
        above = {path.rpartition(".")[0] for path in found.settings} | {"callbacks.json"}  # those have no meaning
        assert not [path for path, text in found.settings.items() if not text and path not in above]
    (callbacks,), (model,) = explain("callbacks"), explain("model")
    assert (
        model.settings["model.hidden_size"] == explain("model.hidden_size")[0].comment == "width of the residual stream"
    )
    assert "no better" in callbacks.settings["callbacks.early_stopping.patience"], "divergence has a patience too"
    assert "above the threshold" in callbacks.settings["callbacks.divergence.patience"]
    assert forgather("config", "explain", "model") == 0
    assert re.search(r"model.hidden_size +width of the residual stream$", capsys.readouterr().out, flags=re.M)


def test_the_command_prints_it_and_json() -> None:
    text = CliRunner().invoke(app, ["config", "explain", "min_lr_ratio", "seq_len"]).output
    assert "lr_scheduler.min_lr_ratio: final learning rate" in text
    assert "(lr_scheduler=infinite|linear|wsd)" in text
    (found,) = json.loads(CliRunner().invoke(app, ["config", "explain", "packing", "--json"]).output)
    assert found["values"]["data=instruct"] == "best_fit"


def test_an_unknown_key_is_a_config_mistake() -> None:
    with pytest.raises(ConfigError, match="learning_rte: unknown setting; did you mean learning_rate"):
        explain("learning_rte")
    with pytest.raises(ConfigError, match="global_batch_size, per_device_eval_batch_size"):
        explain("batch")  # a word that many have
