"""What every option of a group does alike, whatever it computes. The group's table of tests has a row for each."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest
from parity import BASE, LAYOUTS, go_on, train
from program import SMALL, document

from forgather_cli.config.schema import Option
from forgather_cli.run_dir import RunDir

_Row = TypeVar("_Row")
WITHOUT_MODEL = tuple(each for each in BASE if not each.startswith("model"))
_SHORT = (
    "data=synthetic", "data.num_samples=64", "data.num_eval_samples=4", "data.tokenizer=bytes", "global_batch_size=4",
    "per_device_train_batch_size=2", "max_steps=3", "warmup_steps=1", "deterministic=true",
    "+callbacks.probe.save_at=[1]", "device=cpu",
)  # fmt: skip


def of_options(base: type[Option], *, without: tuple[str, ...] = ()) -> Any:
    """``option``: each of the group's, with its defaults."""
    options = [each() for each in base.members if each.type not in without]
    return pytest.mark.parametrize("option", options, ids=lambda option: option.type)


def row(table: Mapping[str, _Row], option: Option) -> _Row:
    """The option's row in its group's table of tests."""
    assert option.type in table, f"{type(option).__name__}: the table of this test lacks {option.type}; add its row"
    return table[option.type]


def assert_trained_on_ranks_and_resumed(
    root: Path, *words: str, near: float = 1e-5, norms: float = 1e-4, base: tuple[str, ...] = BASE
) -> None:
    """Two ranks agree with one device within ``near`` (losses) and ``norms``, and are resumed bit by bit."""
    alone = train(LAYOUTS["single"], (*_SHORT, *words), root / "alone", base=base)
    ranks = train(LAYOUTS["ddp 2"], (*_SHORT, *words), root / "ranks", base=base)
    assert ranks.losses == pytest.approx(alone.losses, rel=near)
    assert ranks.norms == pytest.approx(alone.norms, rel=norms)
    again = go_on(LAYOUTS["ddp 2"], (*_SHORT, *words), RunDir(ranks.path).checkpoint(1), root / "again", base=base)
    assert (again.losses, again.norms) == (ranks.losses[1:], ranks.norms[1:])


def assert_planned_and_explained(capsys: pytest.CaptureFixture[str], group: str, option: Option, *words: str) -> None:
    """``plan`` counts memory with it, ``config explain`` has what it is, and what each of its settings means."""
    plan = document(capsys, "plan", *SMALL, f"{group}={option.type}", *words)
    assert plan["memory_bytes"] > 0
    (explained,) = document(capsys, "config", "explain", group)
    assert next(each["description"] for each in explained["options"] if each["name"] == option.type)
    for name in option.arguments():
        (setting,) = document(capsys, "config", "explain", f"{group}.{name}")
        assert setting["comment"]
        assert f"{group}={option.type}" in setting["values"]
