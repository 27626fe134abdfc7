"""What a loader of random mixtures hands out: every ledger within one of its quotas, each sample once in a pass, the
same from any position on any ranks. The expectation is of the settings and the definitions alone."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from by_definition import Case, exactly, quotas_of
from mixing import at, loader, settle

from forgather_cli.config.load import load_config
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.worker import read_data

WIDTH, STEPS = 8, 40
ROWS = """
def rows(source, count):
    return [{"input_ids": [source, number] * 4, "labels": [0] * 8} for number in range(count)]
"""


@pytest.fixture(autouse=True)
def _rows(own_directory: None, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("rows_of_numbers.py").write_text(ROWS)
    monkeypatch.syspath_prepend(str(Path.cwd()))


@dataclass
class Settings:
    sources: list[dict[str, Any]]
    schedule: list[tuple[int, list[str]]]
    """(step, weights as typed)."""

    @property
    def weights(self) -> list[str]:
        return [source["weight"] for source in self.sources]

    def dataset(self) -> Any:
        named = {f"s{number:02}": source for number, source in enumerate(self.sources)}
        body = ", ".join(
            f"{name}: {{{', '.join(f'{key}: {value}' for key, value in source.items())}}}"
            for name, source in named.items()
        )
        entries = ", ".join(
            f"{{at: {step}, weights: {{{', '.join(map('{}: {}'.format, named, weights))}}}}}"
            for step, weights in self.schedule
        )
        words = [f"+data.sources={{{body}}}", f"data.weight_schedule=[{entries}]", f"data.seq_len={WIDTH}"]
        return read_data(load_config(None, ["model=nano", "data=mixture", *words, f"max_steps={STEPS}"]).config).train


def weight(rng: random.Random) -> str:
    return rng.choice(["0.6", "0.3", "1", "2.25", "1e-6", "0.07", str(rng.randint(1, 999) / 100)])


def drawn(rng: random.Random, before: Settings | None = None) -> Settings:
    """Settings, or ``before`` with other weights, another schedule and other ends."""
    if before is None:
        sources = [
            {"_target_": "rows_of_numbers.rows", "source": number, "count": rng.randint(1, 40)}
            for number in range(rng.randint(2, 20))
        ]
        for source in sources:
            if rng.random() < 0.3:
                source["max_samples"] = rng.randint(1, source["count"])
    else:
        sources = [dict(source) for source in before.sources]
    for source in sources:
        source["weight"] = weight(rng)
        source.pop("max_epochs", None)
        source.pop("on_exhausted", None)
        if rng.random() < 0.4:
            source |= {"max_epochs": rng.randint(2, 4)}
            source |= {"on_exhausted": "stop"} if rng.random() < 0.1 else {}
    steps = sorted(rng.choice([0, 5, 17, 18, 30]) for _ in range(rng.randint(0, 4)))  # two may be equal, a jump
    schedule = []
    for step in steps:
        weights = ["0" if rng.random() < 0.2 else weight(rng) for _ in sources]
        schedule.append((step, weights if any(float(each) for each in weights) else ["1"] * len(sources)))
    return Settings(sources, schedule)


def steps_of(made: TrainLoader, last: int | None = None) -> Iterator[tuple[list[tuple[int, int]], Any]]:
    """(source, row) of each sequence of each step, and the position behind it, to the end of the data."""
    while made.data.steps_left(made.state_dict()) != 0:
        for step in made:
            ids = [batch["input_ids"] for batch in step.microbatches]
            yield [(int(row[0]), int(row[1])) for part in ids for row in part], made.state_dict()


def quotas_in(settings: Settings, step: int, batch: int, had: list[int], length: int) -> list[list[Fraction]]:
    """Of a ledger that opens at ``step``, when ``had`` sequences of each source have been read."""
    entries = [(0, settings.weights), *settings.schedule]
    holds: list[int | None] = []
    for source, count in zip(settings.sources, had, strict=True):
        samples = source.get("max_samples", source["count"])
        holds.append(max(source["max_epochs"] * samples - count, 0) if "max_epochs" in source else None)
    stops = [source.get("on_exhausted") == "stop" for source in settings.sources]
    case = Case([((at - step) * batch, exactly(*weights)) for at, weights in entries], holds, stops)
    return quotas_of(case, length)


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(5, 40))])
def test_what_is_handed_out(seed: int) -> None:
    rng = random.Random(seed)
    handed: list[tuple[int, int]] = []
    behind: list[tuple[int, Any]] = []
    settings, state, step = None, None, 0
    for until in (rng.randint(3, 15), rng.randint(16, 30), STEPS):
        settings, batch = drawn(rng, settings), rng.choice([4, 7])
        dataset, begin = settings.dataset(), len(handed)
        made = loader(dataset, batch, 3, drop_last=False)
        state = json.loads(json.dumps(state or made.state_dict()))
        made.load_state_dict(state)
        settle(made, state, step, STEPS)
        had = [sum(source == number for source, _ in handed) for number in range(len(settings.sources))]
        quotas = quotas_in(settings, step, batch, had, (until - step) * batch)
        for rows, state in steps_of(made):
            handed += rows
            behind.append((len(handed), json.loads(json.dumps(state))))
            step += 1
            if step == until:
                break
        counts = [0] * len(had)
        assert len(handed) - begin == len(quotas) - 1  # up to the end, where there is one
        for position, (source, _) in enumerate(handed[begin:], 1):
            counts[source] += 1
            assert all(abs(count - quota) < 1 for count, quota in zip(counts, quotas[position], strict=True)), position
        if step < until:
            break
    for number, source in enumerate(settings.sources):  # each sample once in a pass, in another order in the next
        samples = source.get("max_samples", source["count"])
        read = [row for owner, row in handed if owner == number]
        passes = [read[first : first + samples] for first in range(0, len(read), samples)]
        assert all(len(set(each)) == len(each) for each in passes)
        assert all(set(each) <= set(passes[0]) for each in passes[1:] if len(passes[0]) == samples)
        assert samples < 10 or len(passes) < 3 or passes[0] != passes[1]
    for position, state in rng.sample(behind, min(4, len(behind))):  # a seek equals the walk, on any ranks
        batch, ranks = rng.choice([5, 8]), rng.choice([1, 2, 3])
        share = {"size": ranks, "drop_last": False}
        others = [steps_of(at(state, loader(dataset, batch, 2, rank=rank, **share))) for rank in range(ranks)]
        there: list[tuple[int, int]] = []
        for shares in zip(*others, strict=False):
            there += [row for rows, _ in shares for row in rows]
            if len(there) >= 40:
                break
        ends = max(place for place, other in behind if other["stretches"] == state["stretches"])
        both = min(ends - position, len(there))
        assert there[:both] == handed[position : position + both]
