"""Short runs with members who lie, by real training: how far they take the model; and with none who does."""

from __future__ import annotations

import pytest
import torch
from diloco_influence import LIES, NEAR, Simulation, World, honest, table

TINY = ("model.num_hidden_layers=1", "model.hidden_size=32", "model.intermediate_size=32",
        "model.num_attention_heads=2", "model.num_key_value_heads=1")  # fmt: skip


@pytest.fixture(scope="module")
def world() -> World:
    torch.set_num_threads(1)
    return World(TINY)


@pytest.mark.parametrize(
    ("mode", "lie", "rounds"),
    [("sync", "batch-nine", 5), ("fragments", "in-turn", 5), ("async", "swings", 5), ("dylu", "nine", 8)],
)
def test_one_of_five_who_lies_costs_little_and_ruins_what_is_not_bounded(
    world: World, mode: str, lie: str, rounds: int
) -> None:
    """With dylu a liar costs more in the first rounds (docs/diloco.md)."""
    truth = Simulation(world, mode, rounds=rounds).run().losses[rounds]
    bounded, free = (
        Simulation(world, mode, lie=lie, liars=1, rounds=rounds, **told).run().losses[rounds]
        for told in ({}, {"max_share": None})
    )
    assert bounded < truth + NEAR
    assert not free < truth + 1


def test_a_lie_that_does_no_damage_where_nothing_is_bounded_is_no_lie(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The campaign's control: else what is borne would be borne without a bound too."""
    monkeypatch.setitem(LIES, "honest", (lambda told: told.honest, {}))
    assert table(world, ["sync"], ["honest", "nine"], ["control"], print) == ["sync, honest, control"]


@pytest.mark.parametrize("mode", ["sync", "fragments", "async"])
def test_nobody_honest_is_rejected_or_loses_weight(world: World, mode: str) -> None:
    assert honest(world, [mode], trials=1, seeds=20, say=print, rounds=3) == []
