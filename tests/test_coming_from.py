"""docs/coming_from.md: our recipes compose and say what theirs say; the names of the table are those of the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from docs_shell import ROOT
from program import write

from forgather_cli.config.batch import batch_plan
from forgather_cli.config.load import Loaded, load_config
from forgather_cli.config.mistakes import ELSEWHERE
from forgather_cli.config.options import GROUPS
from forgather_cli.config.paths import settings

PAGE = (ROOT / "docs/coming_from.md").read_text(encoding="utf-8")
SECTIONS = {text.partition("\n")[0]: text for text in re.split(r"^## ", PAGE, flags=re.M)[1:]}
TRAINERS = [name for name in SECTIONS if name != "Names"]


def both(section: str, tmp_path: Path) -> tuple[dict[str, Any], Loaded]:
    """Their config, and what our recipe for it comes to."""
    theirs, ours = re.findall(r"^```yaml\n(.*?)^```$", SECTIONS[section], flags=re.M | re.S)
    file = re.match(r"# (\S+)", ours)
    assert file is not None
    return yaml.safe_load(theirs), load_config(str(write(tmp_path / file[1], ours)), [], cwd=tmp_path)


def flat(tree: dict[str, Any]) -> dict[str, Any]:
    """By the last part of each name."""
    below = [flat(value) for value in tree.values() if isinstance(value, dict)]
    return {key: value for each in (tree, *below) for key, value in each.items()}


@pytest.mark.parametrize("section", TRAINERS)
def test_ours_says_what_theirs_says(section: str, tmp_path: Path) -> None:
    theirs, loaded = both(section, tmp_path)
    config, said = loaded.config, flat(theirs)
    ours = flat(loaded.tree)
    micro = next(
        said[name] for name in ("per_device_train_batch_size", "micro_batch_size", "batch_size") if name in said
    )
    for ranks in (1, 2):
        assert batch_plan(config, ranks).global_batch == micro * said["gradient_accumulation_steps"] * ranks
    assert batch_plan(config, 1).micro_batch == micro
    compared = {"learning_rate", "num_train_epochs", "seq_len", "warmup_steps", "eval_fraction", "r", "lora_alpha"}
    found = {
        ELSEWHERE.get(name, name).rpartition(".")[2]: value
        for name, value in said.items()
        if ELSEWHERE.get(name, name).rpartition(".")[2] in compared
    }
    assert {name: ours[name] for name in found} == found
    assert {"learning_rate", "num_train_epochs", "seq_len"} <= found.keys()
    schedule = said.get("lr_scheduler_type", said.get("lr_scheduler"))
    assert schedule is None or schedule == config.lr_scheduler.type
    assert getattr(config.lr_scheduler, "min_lr_ratio", None) == 0
    assert ours["betas"] == [0.9, 0.999]
    assert [*ours["data"]["files"], ours["data"].get("dataset")] != [None]


def test_shares_of_the_run_are_those_of_theirs(tmp_path: Path) -> None:
    theirs, loaded = both("Hugging Face's Trainer", tmp_path)
    assert (loaded.config.eval_steps, loaded.config.save_steps) == (theirs["eval_steps"], theirs["save_steps"])
    theirs, loaded = both("axolotl", tmp_path)
    assert loaded.config.eval_steps == 1 / theirs["evals_per_epoch"] / theirs["num_epochs"]


def test_every_name_of_the_table_exists() -> None:
    rows = [line.strip("|").split("|") for line in SECTIONS["Names"].splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    leaves = {setting.leaf for setting in settings().values()}
    for own, *others in rows:
        ours = re.findall(r"`([^`]+)`", own)
        for name in ours:
            setting = name.partition("=")[0]
            assert setting in {*settings(), *leaves, *GROUPS}, name
        for name in re.findall(r"`([^`]+)`", "".join(others)):
            meant = {each.partition("=")[0].rpartition(".")[2] for each in ELSEWHERE[name].split(" or ")}
            assert meant & {each.partition("=")[0].rpartition(".")[2] for each in ours}, (name, ELSEWHERE[name])
