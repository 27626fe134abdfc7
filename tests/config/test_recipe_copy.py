"""``forgather recipe copy``: a shipped recipe as a file of the user's, which trains the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from forgather_cli.cli.app import app
from forgather_cli.config.load import load_config
from forgather_cli.errors import ConfigError

pytestmark = pytest.mark.usefixtures("own_directory")


def copy(*words: str) -> str:
    return CliRunner().invoke(app, ["recipe", "copy", *words], catch_exceptions=False).output


def test_a_copy_says_what_the_recipe_says() -> None:
    assert "forgather train mine" in copy("qat", "recipes/mine.yaml")
    trees = [load_config(name, ["model.path=x"]).tree for name in ("qat", "mine")]
    for tree in trees:
        del tree["recipe"], tree["output_dir"]
    assert trees[0] == trees[1]
    assert "forgather train elsewhere/mine.yaml" in copy("default", "elsewhere/mine.yaml")


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
