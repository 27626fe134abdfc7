"""The step of a round against its papers' formulas, and which parameters a fragment holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from forgather_cli.config.schema import DilocoServerSettings, OuterSettings
from forgather_cli.diloco.fragments import fragments
from forgather_cli.diloco.ledger import Closed, Submission
from forgather_cli.diloco.outer_step import OuterStep
from forgather_cli.errors import SetupError

SHAPES = {"embed": (6, 4), "layers.0.w": (4, 4), "layers.1.w": (4, 4), "layers.2.w": (4, 4), "head": (6, 4)}


class Sent:
    """A change of each parameter, as ``Submissions`` opens and reads them."""

    def __init__(self, change: dict[str, Tensor]) -> None:
        self.change = change

    def open(self, parts: Any) -> Sent:
        return self

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return self.change[name][start:stop].clone()


def test_delayed_nesterov_updates_its_momentum_every_few_arrivals() -> None:
    """Algorithm 3 of arXiv:2401.09135 with c = 0, written as it stands there."""
    settings = DilocoServerSettings(mode="async", workers=3, outer=OuterSettings(lr=0.5, momentum=0.9, delay=2))
    step, shapes = OuterStep(settings, {"w": (3,)}), {"w": (3,)}
    torch.manual_seed(0)
    changes = [torch.randn(shapes["w"]) for _ in range(5)]
    master, theta = {"w": torch.zeros(3)}, torch.zeros(3, dtype=torch.float64)
    momentum, total = torch.zeros(3, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    for arrival, change in enumerate(changes):
        sent = Submission(0, "a", arrival, ("p",), 1, ())
        norm = step.step(master, Closed(((sent, 1.0),), (0,)), Sent({"w": change}), arrival)
        total += change.double()
        if (arrival + 1) % 2 == 0:
            momentum = 0.9 * momentum + total / 2
            theta = theta - 0.5 * (0.9 * momentum + change.double() / 2)
            total.zero_()
        else:
            theta = theta - 0.5 * change.double() / 2
        assert norm == pytest.approx(float(change.norm()))
        torch.testing.assert_close(master["w"].double(), theta, rtol=1e-6, atol=1e-6)


def test_layers_go_to_fragments_in_turn_and_the_rest_to_the_smallest() -> None:
    found = fragments(SHAPES, 2)
    assert {"layers.0.w", "layers.2.w"} <= found[0]
    assert "layers.1.w" in found[1]
    assert found[0] | found[1] == SHAPES.keys()
    assert not found[0] & found[1]
    assert "embed" in found[1], "which is the smaller one"
    with pytest.raises(SetupError, match="num_fragments"):
        fragments({"layers.0.w": (2, 2)}, 2)
