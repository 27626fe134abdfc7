"""``scripts/options``: what stands in ``conf/`` and in the docs' tables is what the settings' classes say."""

from __future__ import annotations

import runpy
import shutil
from dataclasses import field
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest

from forgather_cli.config.explain import explain, field_comment
from forgather_cli.config.schema import PositiveInt, Settings, only_if, settings

ROOT = Path(__file__).parents[2]
SCRIPT = runpy.run_path(str(ROOT / "scripts/options"))


def test_the_files_are_what_the_script_writes(capsys: pytest.CaptureFixture[str]) -> None:
    assert SCRIPT["main"](ROOT, check=True) == 0, capsys.readouterr().out
    assert not capsys.readouterr().out


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("conf", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    return tmp_path


def test_a_file_that_says_another_thing_is_named_with_the_line_and_written_anew(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = {file: file.read_text() for file in tree.glob("*/**/*.*")}
    for name, old, new in (
        ("conf/loss/auto.yaml", "z_loss: 0.0", "z_loss: 0.1"),
        ("conf/train.yaml", "# peak of the schedule", "# of Muon"),
        ("conf/optimizer/sgd.yaml", "# Stochastic", "# The stochastic"),
        ("conf/callbacks/full.yaml", "# L2 norm of each parameter", "# norms"),
        ("conf/model/160m.yaml", "# blocks", "# layers"),
        ("conf/trainer/ddp.yaml", "  period: 4 ", "  per: 4    "),
        ("docs/precision.md", "| `fp32` | 32-bit", "| `fp32` | 23-bit"),
    ):
        text = (tree / name).read_text()
        (tree / name).write_text(text.replace(old, new))
        assert SCRIPT["main"](tree, check=True) == 1
        line = text[: text.index(old)].count("\n") + 1
        assert f"{tree / name}:{line}: " in capsys.readouterr().out
        assert SCRIPT["main"](tree, check=False) == 0
        assert {file: file.read_text() for file in tree.glob("*/**/*.*")} == texts, name


def test_a_missing_file_is_written_and_one_of_no_class_is_told(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / "conf/precision/fp32.yaml").unlink()
    assert SCRIPT["main"](tree, check=True) == 1
    assert "precision/fp32.yaml:1: " in capsys.readouterr().out
    assert SCRIPT["main"](tree, check=False) == 0
    assert (tree / "conf/precision/fp32.yaml").read_text() == "# 32-bit floats throughout.\ntype: fp32\n"
    (tree / "conf/loss/focal.yaml").write_text("type: focal\n")
    for check in (True, False):
        assert SCRIPT["main"](tree, check=check) == 1
        assert "conf/loss/focal.yaml:1: no settings class of the group loss" in capsys.readouterr().out
    assert (tree / "conf/loss/focal.yaml").read_text() == "type: focal\n"


def test_a_preset_s_values_are_by_hand(tree: Path) -> None:
    preset = tree / "conf/model/nano.yaml"
    preset.write_text(preset.read_text().replace("hidden_size: 64 ", "hidden_size: 96 "))
    (tree / "conf/model/micro.yaml").write_text("# Mine.\ndefaults:\n  - decoder\n  - _self_\n\nhead_dim: 8\n")
    before = preset.read_text()
    assert SCRIPT["main"](tree, check=False) == 0
    assert preset.read_text() == before
    assert "head_dim: 8               # width of one head;" in (tree / "conf/model/micro.yaml").read_text()


@settings
class Part(Settings):
    share: float = 1e-05  # of the whole


@settings
class _Base(Settings):
    type: str = ""
    z_loss: float = 0.0
    of_all: list[str] = field(default_factory=lambda: ["a", "b"])  # names, # signs and so on


@settings
class Focal(_Base):
    """Cross-entropy, with less weight on what is known. It has
    two paragraphs.

    The second, whose words go on so far that the first line of it is longer than a line of the file may be.
    """

    type: Literal["focal"] = "focal"
    focus: Annotated[PositiveInt, only_if("loss.z_loss", 0.0)]
    # the one comment that is
    # so long that it has two lines above its field, and two lines in the file behind the value of the setting as well
    part: Part = field(default_factory=Part)
    filled: str = field(default="bytes", metadata={"file": None})  # type: ignore[assignment]
    name: dict[str, Any] = field(default_factory=dict)  # fmt: skip


FOCAL = """\
# Cross-entropy, with less weight on what is known.
# It has two paragraphs. The second, whose words go on so far that the first line of it is longer than a line of the
# file may be.
type: focal
focus: ???
part:                     # the one comment that is so long that it has two lines above its field, and two lines in the
                          # file behind the value of the setting as well
  share: 1.0e-5           # of the whole
filled: null
name: {}
z_loss: 0.0               # weight of the squared log-partition term
of_all: [a, b]            # names, # signs and so on
"""


def test_an_option_is_written_from_its_class_alone() -> None:
    written = SCRIPT["option_text"](Focal, "loss.", "")
    assert written == FOCAL  # z_loss' comment is that of the group's other options
    assert SCRIPT["option_text"](Focal, "loss.", written) == written


def test_the_order_is_that_of_the_file_where_a_new_field_comes_behind_the_one_before_it() -> None:
    text = SCRIPT["option_text"](Focal, "loss.", "# Old.\nof_all: []\ntype: focal\nfocus: 1\nfilled: 3\ngone: 4\n")
    assert [line.partition(":")[0] for line in text.splitlines() if line[0] not in "# "] == [
        "of_all", "type", "focus", "part", "filled", "name", "z_loss",
    ]  # fmt: skip


@settings
class Untold(_Base):
    type: Literal["untold"] = "untold"


def test_an_option_without_a_sentence_about_it_is_told() -> None:
    with pytest.raises(SystemExit, match=r"Untold: its docstring begins with a sentence"):
        SCRIPT["option_text"](Untold, "loss.", "")


def test_what_a_setting_means_is_said_at_its_field() -> None:
    assert field_comment("part", [Focal]).startswith("the one comment that is so long")
    assert field_comment("of_all", [Focal]) == "names, # signs and so on", "of the class below which it is"
    assert field_comment("filled", [Focal]) == field_comment("type", [Focal]) == ""
    for key, words in {
        "denoisers": "the mean share after the prefix (0.5)",  # two lines in the file
        "resume_components": "a list of model, optimizer",
        "callbacks.profiler.num_steps": "steps to record",
        "callbacks.textgen.generation_config.top_p": "likeliest that sum up",
        "callbacks.weight_norm": "global L2 norm",  # a preset's
        "model.rope_scaling.factor": "rope_type",  # of what it is a part
    }.items():
        assert words in explain(key)[0].comment
