"""``forgather recipe copy``: a shipped recipe as a file of the user's, which trains the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from forgather_cli.cli.app import app
from forgather_cli.config.load import load_config
from forgather_cli.config.options import recipes
from forgather_cli.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_directory")


def copy(*words: str) -> str:
    return CliRunner().invoke(app, ["recipe", "copy", *words], catch_exceptions=False).output


def test_a_copy_says_what_the_recipe_says() -> None:
    assert "forgather train mine" in copy("qat", "recipes/mine.yaml")
    assert "forgather train elsewhere/mine.yaml" in copy("default", "elsewhere/mine.yaml")


@pytest.mark.parametrize("name", [info.name for info in recipes()])
def test_a_copy_trains_the_same_and_has_what_one_edits_with_comments(name: str) -> None:
    copy(name, "mine.yaml")
    lines = Path("mine.yaml").read_text().splitlines()
    own = [line for line in lines if re.match(r"(  - override (model|data)|\w+): *[^ #]", line)]
    says = {line.strip("- ").partition(":")[0]: line.partition("# ")[2] for line in own}
    edited = {
        "override model", "override data", "global_batch_size", "per_device_train_batch_size", "learning_rate",
        "save_steps", "save_total_limit",
    }  # fmt: skip
    assert says.keys() >= edited
    assert len({"max_steps", "num_train_epochs"} & says.keys()) == 1, "the other counts nothing, and is refused"
    for choice, key in {
        "model: pretrained": "path",
        "data: instruct": "files",
        "data: python_stdlib": "seq_len",
    }.items():
        assert key in says or f"override {choice}" not in "\n".join(lines)
    assert all(text or key.startswith("override") for key, text in says.items())
    words = ["model.path=x"] if "path" in says else []
    words += ["data.files=[x.jsonl]"] if "files" in says else []
    words += ["accelerate_config=a.yaml"] if "accelerate_config" in says else []
    Path("a.yaml").write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    trees = [load_config(each, words).tree for each in (name, "mine.yaml")]
    for tree in trees:
        del tree["recipe"], tree["output_dir"]
    assert trees[0] == trees[1]


def test_what_a_recipe_of_ones_own_starts_from_is_copied_whole() -> None:
    files = [f"corpus/part-{n:03}#.txt" for n in range(30)]
    Path("recipes").mkdir()
    Path("recipes/base.yaml").write_text(f"defaults: [train, override data: text, _self_]\nfiles: {files}\n")
    Path("recipes/own.yaml").write_text("# Mine.\ndefaults:\n  - base\n  - _self_\n\nsave_steps: 7\n")
    copy("own", "mine.yaml")
    trees = [load_config(each, []).tree for each in ("own", "mine.yaml")]
    assert trees[0]["data"] == trees[1]["data"]
    assert (trees[1]["data"]["files"], trees[1]["save_steps"]) == (files, 7)


def test_mistakes() -> None:
    Path("there.yaml").write_text("max_steps: 1\n")
    for words, said in (
        ("defualt a.yaml", "recipe defualt: no such recipe; did you mean default"),
        ("default there.yaml", "there.yaml exists already; give another name"),
        ("default recipes/default.yaml", "there is a recipe default already"),
        ("default mine.txt", "a recipe is a .yaml file"),
    ):
        with pytest.raises(ConfigError, match=said):
            copy(*words.split())
    assert Path("there.yaml").read_text() == "max_steps: 1\n"
