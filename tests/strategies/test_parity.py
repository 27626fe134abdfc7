"""One recipe, one result: every strategy against one device, over 20 steps in fp32 without dropout (SPEC 3).

``scripts/test --full`` runs the whole product of the tables below; without it layouts that are alike meet each value
once.
"""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import pytest
from parity import (
    LAYOUTS,
    SCHEDULES,
    Result,
    assert_near,
    assert_parity,
    assert_same_samples,
    assert_update_within,
    corpus,
    go_on,
    scratch,
    train,
)

from forgather_cli.run_dir import RunDir

SEQUENCES = 12
"""Of all ranks' micro-batches together: 1, 2, 3 and 4 ranks and 4 micro-batches of a pipeline divide it."""

ACCUMULATION = (1, 2, 3)
DATA = ("ragged", "packed", "isolated")
EMBEDDINGS = ("untied", "tied")
LOSSES = ("cross_entropy", "linear_cross_entropy")
OPTIMIZERS = {
    # The model's outputs begin at zero, and with them most gradients: AdamW divides each by its size, and with eps=1e-8
    # one device that takes 6 sequences at a time in the place of 36 ends 1e-5 apart from itself (1e-6: 1e-7).
    "adamw": ("optimizer=adamw", "optimizer.eps=1e-6"),
    "sgd": ("optimizer=sgd", "optimizer.momentum=0.9", "learning_rate=0.1"),
    "muon": ("optimizer=muon", "+callbacks.probe.save_at=[10,11]"),
}


class Case(NamedTuple):
    layout: str
    accumulation: int
    data: str
    embeddings: str
    loss: str
    optimizer: str


EVERYTHING = [
    Case(*values)
    for values in itertools.product(LAYOUTS, ACCUMULATION, DATA, EMBEDDINGS, LOSSES, OPTIMIZERS)
    if values[0] not in ("ddp 4", "fsdp2 3", "1F1B 3")  # for changes of the world size only
]


ALIKE = (
    ("single",), ("ddp",), ("fsdp2",), ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"),
    ("ZBVZeroBubble", "DualPipeV"),
)  # fmt: skip
"""Strategies, and schedules that place stages on ranks alike. What a step of each schedule gives, of several batches,
with tied weights and either loss, on four ranks too, ``test_pipeline.py`` compares with the unsplit model."""


def _selected() -> set[Case]:
    """Cases of each layout. The first of those that are alike meets every value of every table in three, and meshes
    meet muon too; the others train 20 steps once.

    They share what one device is to train. The most micro-batches go with muon, of which two steps are compared and
    not twenty.
    """
    found = set()
    for i, (name, layout) in enumerate(LAYOUTS.items()):
        if name in ("GPipe 2x2", "LoopedBFS 2x2", "GPipe 4", "Interleaved1F1B 4"):  # as others of the schedule are
            continue
        last = 1 if layout.ranks > 3 else 2
        for n in range(last + 1):
            if n > 0 and name not in (*(f"{names[0]} 2" for names in ALIKE), "single", "hsdp 2x2", "1F1B 2x2"):
                continue
            data, optimizer = DATA[(n + i) % 3], "muon" if n == last else ("adamw", "sgd")[(n + i % 3) % 2]
            embeddings, loss = EMBEDDINGS[(n + i % 3) % 2], LOSSES[((n + 1) // 2 + i // 3) % 2]
            found.add(Case(name, ACCUMULATION[n], data, embeddings, loss, optimizer))
    return found


SELECTED = _selected()
CASES = [
    pytest.param(case, id=", ".join(map(str, case)), marks=() if case in SELECTED else pytest.mark.full)
    for case in EVERYTHING
]


def data_settings(data: str) -> tuple[str, ...]:
    if data == "ragged":
        return ("data=synthetic", "data.ragged=true", "data.num_samples=300", "data.num_eval_samples=11")
    return (*corpus(), f"data.isolate_documents={str(data == 'isolated').lower()}")


def settings(case: Case) -> tuple[str, ...]:
    return (
        *data_settings(case.data),
        *OPTIMIZERS[case.optimizer],
        "max_grad_norm=0.2",  # below the norms of most steps
        f"model.num_hidden_layers={LAYOUTS[case.layout].layers}",
        f"model.tie_word_embeddings={str(case.embeddings == 'tied').lower()}",
        f"global_batch_size={SEQUENCES * case.accumulation}",
    )


@functools.cache
def reference(given: tuple[str, ...], batch: int) -> Result:
    """One device, the whole batch at once, the plain loss."""
    path = scratch() / f"reference-{reference.cache_info().misses}"
    return train(LAYOUTS["single"], (*given, f"per_device_train_batch_size={batch}"), path)


@pytest.mark.parametrize("case", CASES)
def test_every_strategy_gives_the_result_of_one_device(tmp_path: Path, case: Case) -> None:
    layout = LAYOUTS[case.layout]
    own = [f"per_device_train_batch_size={SEQUENCES // (layout.data_ranks or layout.ranks)}", f"loss={case.loss}"]
    if case.loss == "linear_cross_entropy":
        own.append("chunk_size=20")
    expected = reference(settings(case), SEQUENCES * case.accumulation)
    assert max(expected.norms) > 0.2, "clipping was not active"
    if case.optimizer == "muon":  # each step rounds to bf16, and the differences of many steps add up: from one state
        own.append("+callbacks.probe.stop_after=12")
        found = go_on(layout, (*settings(case), *own), RunDir(expected.path).checkpoint(10), tmp_path)
        assert_same_samples(found, expected, first=11)
        assert_near(found.losses[:1], expected.losses[10:11], "loss")
        assert_near(found.norms[:1], expected.norms[10:11], "gradient norm")
        assert_update_within(0.02, found, expected, step=10)
    else:
        assert_parity(train(layout, (*settings(case), *own), tmp_path), expected)


@pytest.mark.parametrize("names", ALIKE, ids=" ".join)
def test_those_that_are_alike_meet_every_value(names: tuple[str, ...]) -> None:
    own = [case for case in SELECTED if case.layout.split()[0] in names]
    for place, table in enumerate((ACCUMULATION, DATA, EMBEDDINGS, LOSSES, OPTIMIZERS), 1):
        assert {case[place] for case in own} == set(table)


def test_every_schedule_is_selected() -> None:
    named = {name for names in ALIKE for name in names}
    assert set(SCHEDULES) <= named <= {case.layout.split()[0] for case in SELECTED}
