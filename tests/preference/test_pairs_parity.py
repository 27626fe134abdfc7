"""The same pairs in other rows, micro-batches and layouts give the same gradients; what is wrong elsewhere does not."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from pairs import SIDE, batch_of, dpo, pairs
from ranks import run_ranks
from test_pairs_loss import plain
from tiny import decoder
from torch import Tensor
from whole_batch import CPU, whole

from forgather_cli.config.schema import FSDP2Settings, PipelineSettings
from forgather_cli.data.loaders.collate import Counts, rank_part
from forgather_cli.distributed import cpu_group, gather
from forgather_cli.labels import IGNORED, UNITS
from forgather_cli.loss.base import NamedSums
from forgather_cli.strategies.base import ModelSpec, Strategy
from forgather_cli.strategies.ddp import DataParallel
from forgather_cli.strategies.fsdp2 import FullyShard
from forgather_cli.strategies.pipeline import Pipeline
from forgather_cli.strategies.single import SingleDevice
from forgather_cli.trainer.evaluate import in_rounds

NUMBER = 12
SETTINGS: list[dict[str, Any]] = [{}, {"variant": "orpo"}, {"variant": "ipo", "sft_weight": 0.3}]


def some() -> tuple[list[Any], Tensor]:
    random = torch.Generator().manual_seed(5)
    return pairs(NUMBER), -torch.rand(NUMBER, 2, dtype=torch.float64, generator=random) * 9


def strategy_of(kind: str, loss: Any, schedule: str = "1F1B") -> Strategy:
    if kind == "ddp":
        return DataParallel(CPU, loss, nullcontext)
    if kind == "fsdp2":
        return FullyShard(FSDP2Settings(), CPU, loss)
    if kind == "pipeline":
        return Pipeline(PipelineSettings(n_microbatches=4, schedule=schedule), CPU, loss)
    return SingleDevice(CPU, loss, nullcontext)


def gradients(
    kind: str, settings: dict[str, Any], per_row: int, accumulation: int, schedule: str = "1F1B"
) -> dict[str, Any]:
    """Of one step: loss, each parameter's gradient, and sums by name, of all ranks together."""
    loss = dpo(**settings)
    loss.sums = NamedSums(loss.names, torch.zeros(2, len(loss.names), dtype=torch.float64))
    strategy = strategy_of(kind, loss, schedule)
    strategy.materialize(ModelSpec(build=lambda: decoder(num_hidden_layers=4)))
    loss.sums.table.zero_()
    batch = batch_of(some()[0], per_row, some()[1])
    mine = rank_part(len(batch["labels"]), strategy.data_rank, strategy.data_size)
    cuts = [rank_part(len(mine), n, accumulation) for n in range(accumulation)]
    parts = [{k: v[mine.start + c.start : mine.start + c.stop] for k, v in batch.items()} for c in cuts if len(c)]
    units = Counts.of(parts).units
    total = sum(dict(gather((strategy.data_rank, units), cpu_group())).values())
    assert total == NUMBER
    share = strategy.forward_backward(parts, torch.tensor(float(total)))
    found = {n: whole(p.grad) for part in strategy.parts for n, p in part.named_parameters()}
    evaluated = [strategy.loss(part) for part, _ in in_rounds(parts, cpu_group())]
    return {
        "loss": float(share), "gradients": found, "sums": loss.sums.table,
        "evaluated": [float(sum(each[0] for each in evaluated)), int(sum(each[1] for each in evaluated))],
        "data_rank": strategy.data_rank,
    }  # fmt: skip


def together(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "loss": sum(each["loss"] for each in ranks),
        "gradients": {n: g for each in ranks for n, g in each["gradients"].items()},
        "sums": sum(each["sums"] for each in ranks),
        "evaluated": [sum(each["evaluated"][n] for each in ranks) for n in range(2)],
    }


def assert_close(found: dict[str, Any], wanted: dict[str, Any], tolerance: float) -> None:
    assert found["loss"] == pytest.approx(wanted["loss"], rel=tolerance)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        furthest = (found["gradients"][name] - gradient).norm() / gradient.norm()
        assert furthest < tolerance, f"{name}: {furthest}"
    torch.testing.assert_close(found["sums"], wanted["sums"], rtol=1e-5, atol=1e-5)
    assert found["evaluated"] == pytest.approx(wanted["evaluated"], rel=1e-5)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_rows_micro_batches_and_accumulation_change_no_gradient(settings: dict[str, Any]) -> None:
    wanted = gradients("single", settings, 1, 1)
    for per_row, accumulation in ((1, 3), (1, 12), (3, 1), (5, 2), (12, 1)):
        assert_close(gradients("single", settings, per_row, accumulation), wanted, 1e-6)


LAYOUTS = [
    ("ddp", 2, 1, 1, "1F1B"), ("ddp", 2, 5, 2, "1F1B"), ("fsdp2", 2, 1, 2, "1F1B"), ("fsdp2", 2, 5, 2, "1F1B"),
    ("pipeline", 2, 1, 1, "1F1B"), ("pipeline", 2, 5, 1, "1F1B"), ("pipeline", 2, 1, 2, "ZBVZeroBubble"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "ranks", "per_row", "accumulation", "schedule"), LAYOUTS)
def test_strategies_have_the_gradients_of_one_device(
    kind: str, ranks: int, per_row: int, accumulation: int, schedule: str
) -> None:
    """Slices and micro-batches that do not divide evenly among them, rows that a pipeline pads."""
    found = together(run_ranks(ranks, gradients, kind, {}, per_row, accumulation, schedule))
    assert_close(found, gradients("single", {}, 1, 1), 1e-5)
    assert found["evaluated"][1] == NUMBER


def of_batch(batch: dict[str, Tensor], whole_step: int) -> dict[str, Any]:
    strategy = strategy_of("single", dpo())
    strategy.materialize(ModelSpec(build=decoder))
    loss = strategy.forward_backward([batch], torch.tensor(float(whole_step)))
    return {"loss": float(loss), "gradients": {n: p.grad for n, p in strategy.parts[0].named_parameters()}}


def unlike(one: dict[str, Any], other: dict[str, Any]) -> float:
    return max(
        float((other["gradients"][name] - gradient).norm() / gradient.norm())
        for name, gradient in one["gradients"].items()
    )


def test_a_pair_whose_sides_are_in_two_micro_batches_would_have_another_gradient() -> None:
    each, reference = pairs(1), torch.zeros(1, 2, dtype=torch.float64)
    right, halves = of_batch(batch_of(each, 1, reference), 1), []
    for side in range(2):
        batch = batch_of(each, 1, reference)
        away = batch["document_ids"] != side
        batch["labels"][away] = IGNORED
        halves.append(of_batch(batch, 1))
    both = {"gradients": {n: sum(half["gradients"][n] for half in halves) for n in right["gradients"]}}
    assert unlike(right, both) > 0.01


def test_padding_that_is_not_masked_would_have_another_gradient_and_another_first_loss() -> None:
    model, each = decoder(), pairs(4)
    with torch.no_grad():
        reference = torch.stack([plain(model, one, torch.zeros(2))[1] for one in each]).double()
    batch = batch_of(each, 1, reference)
    right = of_batch(batch, 4)
    assert right["loss"] == pytest.approx(0.6931472, abs=1e-6)
    padded = {key: value.clone() for key, value in batch.items()}
    is_padding = padded["document_ids"] > 1
    padded["labels"] = torch.where(is_padding, padded["input_ids"], padded["labels"])
    assert of_batch(padded, 4)["loss"] == right["loss"]  # it is of no side
    padded["document_ids"][is_padding] = 1
    wrong = of_batch(padded, 4)
    assert abs(wrong["loss"] - right["loss"]) > 0.1
    assert unlike(right, wrong) > 0.01
    assert batch[UNITS].tolist() == [1] * 4
    assert batch["labels"].shape[1] == 2 * SIDE
