"""Loaders: order, slices, exact resume, workers, and every kind of dataset."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from program import Process, nobody_runs
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from forgather_cli.config.schema import RunSettings
from forgather_cli.data.loaders.collate import Step, default_collate
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.data.samples import SyntheticDataset
from forgather_cli.errors import DataError
from forgather_cli.trainer.build import _loader_settings


class Numbers(Dataset[Any]):
    """Sample i is the sequence [i, i, i]; knows its epoch."""

    def __init__(self, length: int) -> None:
        self.length, self.epoch = length, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index] * 3, "labels": torch.tensor([index, self.epoch, -100])}


class Count(IterableDataset[Any]):
    """Samples 0, 1, ..., dealt out to workers in turn."""

    def __init__(self, length: int) -> None:
        self.length = length

    def mine(self) -> range:
        info = get_worker_info()
        return range(info.id, self.length, info.num_workers) if info else range(self.length)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(sample, self.mine())


class StatefulCount(Count):
    """Keeps its own position, and counts what it makes."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.position = 0
        self.made = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for i in self.mine()[self.position :]:
            self.position += 1
            self.made += 1
            yield sample(i)
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def sample(i: int) -> dict[str, Any]:
    return {"input_ids": torch.tensor([i, i, i]), "labels": torch.tensor([i, i, i])}


def loader(dataset: Any, global_batch: int = 4, micro_batch: int = 2, **kwargs: Any) -> TrainLoader:
    return TrainLoader(dataset, **{"seed": 1, **kwargs}, global_batch_size=global_batch, micro_batch_size=micro_batch)


def at(state: dict[str, Any], data: TrainLoader) -> TrainLoader:
    """It goes on from a position."""
    data.load_state_dict(state)
    return data


def read(data: TrainLoader) -> tuple[list[list[list[int]]], list[dict[str, Any]]]:
    """What each step holds, and the position behind it."""
    found = [(numbers(step), data.state_dict()) for step in data]
    return [each for each, _ in found], [state for _, state in found]


def numbers(step: Step) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in step.microbatches]


def flat(steps: Any) -> list[int]:
    return [i for step in steps for batch in numbers(step) for i in batch]


def test_steps_hold_microbatches_and_counts() -> None:
    steps = list(loader(Numbers(10), shuffle=False))
    assert [numbers(step) for step in steps] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert [(step.counts.targets, step.counts.samples) for step in steps] == [(4, 4)] * 2
    assert [numbers(step) for step in loader(Numbers(4), 4, 3, shuffle=False)] == [[[0, 1, 2], [3]]]
    kept = loader(Numbers(10), shuffle=False, drop_last=False)
    assert [numbers(step) for step in kept][-1] == [[8, 9]]
    assert (len(kept), len(loader(Numbers(10)))) == (3, 2)


def test_an_epoch_is_a_permutation_and_epochs_differ() -> None:
    data = loader(Numbers(40))
    first, second = flat(data), flat(data)
    assert data.epoch == 2
    assert sorted(first) == sorted(second) == list(range(40))
    assert first != second != list(range(40))
    data.set_epoch(0)
    assert flat(data) == first


class Ragged(Numbers):
    """Sample i is a sequence of i, 1 to 200 tokens long."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.lengths = torch.randint(1, 201, (length,), generator=torch.Generator().manual_seed(3)).tolist()

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": [index] * self.lengths[index], "labels": [index] * self.lengths[index]}


def padded(samples: list[Any]) -> dict[str, torch.Tensor]:
    rows = [each["labels"] for each in samples]
    longest = max(map(len, rows))
    ids = torch.tensor([row + row[:1] * (longest - len(row)) for row in rows])
    return {"input_ids": ids, "labels": ids}


def by_length(dataset: Any, *batch: int, **kwargs: Any) -> TrainLoader:
    return loader(dataset, *batch, collate_fn=padded, group_by_length="length", **kwargs)


def test_samples_of_like_length_need_little_padding() -> None:
    data = Ragged(4000)

    def tokens(samples: list[int]) -> int:
        return sum(8 * max(data.lengths[i] for i in samples[at : at + 8]) for at in range(0, len(samples), 8))

    grouped, used = flat(by_length(data, 32, 8)), sum(data.lengths)
    assert sorted(grouped) == list(range(4000))
    random = flat(loader(data, 32, 8, collate_fn=padded))
    assert tokens(grouped) < 1.05 * used < 1.7 * used < tokens(random)


def test_grouped_by_length_the_position_holds_for_other_ranks_and_batches() -> None:
    data = Ragged(500)
    whole = [flat(each) for each in (by_length(data, 10, 5), by_length(data, 20, 2))]
    assert whole[0] == whole[1]
    first = by_length(data, 10, 5)
    steps = iter(first)
    read = flat([next(steps) for _ in range(7)])
    state = json.loads(json.dumps(first.state_dict()))
    for size, batch in ((1, 10), (3, 10), (2, 6)):
        given = {"size": size, "drop_last": False}
        ranks = [at(state, by_length(data, batch, 5, rank=rank, **given)) for rank in range(size)]
        assert ranks[0].samples_between(state, {"epoch": 0, "sample": 90}) == whole[0][70:90]
        assert read + [i for together in zip(*ranks, strict=True) for i in flat(together)] == whole[0]


def test_lengths_are_those_of_the_column_where_there_is_one() -> None:
    import datasets

    rows = Ragged(60)
    columns = {name: [rows[i][name] for i in range(60)] for name in ("input_ids", "labels")}
    table = datasets.Dataset.from_dict({**columns, "length": rows.lengths, "short": [-each for each in rows.lengths]})
    assert flat(by_length(table)) == flat(by_length(table.remove_columns("length"))) == flat(by_length(rows))
    short = flat(loader(table, collate_fn=padded, group_by_length="short"))
    assert rows.lengths[short[0]] == min(rows.lengths)
    with pytest.raises(DataError, match="length_column_name"):
        by_length(datasets.Dataset.from_dict({**columns, "length": ["x"] * 60}))
    with pytest.raises(DataError, match=r"train_sampling_strategy.*length_column_name"):
        by_length([{"labels": [1]}] * 8)


def test_exact_resume_at_every_step_and_across_epochs() -> None:
    def run(data: TrainLoader, steps: int) -> list[Any]:
        seen: list[Any] = []
        while len(seen) < steps:
            for step in data:
                seen.append((data.state_dict(), numbers(step)))
                if len(seen) == steps:
                    break
        return seen

    whole = run(loader(Numbers(22)), 15)
    assert [state for state, _ in whole[4:6]] == [{"epoch": 0, "sample": 20}, {"epoch": 1, "sample": 4}]
    for done in range(1, 15):
        assert run(at(whole[done - 1][0], loader(Numbers(22))), 15 - done) == whole[done:]
    # workers give the same, and what they read ahead does not count
    assert run(loader(Numbers(22), num_workers=2), 10) == whole[:10]
    assert run(at(whole[2][0], loader(Numbers(22), num_workers=2)), 4) == whole[3:7]


def test_samples_given_out_in_ranges_are_those_of_the_endless_epochs_and_resume_exactly() -> None:
    epochs: list[int] = []  # what a run alone reads, epoch after epoch
    for epoch in range(3):
        data = loader(Numbers(10), 5)
        data.set_epoch(epoch)
        epochs += flat(data)
    ranges = [[1, 4], [8, 23], [29, 30]]  # across the end of two epochs
    begin = {"epoch": 0, "sample": 1, "ranges": ranges}
    wanted = [sample for start, stop in ranges for sample in epochs[start:stop]]
    for workers in (0, 2):
        found, positions = read(at(begin, loader(Numbers(10), num_workers=workers)))
        steps = [[i for part in step for i in part] for step in found]
        assert [i for step in steps for i in step] == wanted
        assert [len(step) for step in steps] == [4, 4, 4, 4, 3], "the last step is what is left"
        assert positions[-1]["ranges"] == []
    for number, position in enumerate(positions):
        assert read(at(position, loader(Numbers(10))))[0] == found[number + 1 :]
    halves = [at(begin, loader(Numbers(10), 4, 1, rank=rank, size=2)) for rank in range(2)]
    assert [flat(both) for both in zip(*halves, strict=True)] == steps


def test_workers_hear_of_the_epoch_and_survive_a_break_and_a_dataset_hears_of_it_where_asked() -> None:
    data = loader(Numbers(16), num_workers=2, persistent_workers=True)
    assert next(iter(data)).microbatches[0]["labels"][0, 1] == 0
    data.set_epoch(3)
    expected = loader(untold := Numbers(16), set_dataset_epoch=False)
    expected.set_epoch(3)
    got = list(data)
    assert flat(got) == flat(expected)
    assert {int(batch["labels"][0, 1]) for step in got for batch in step.microbatches} == {3}
    assert untold.epoch == 0
    data.close()


def test_whole_batch_datasets_and_workers() -> None:
    data = SyntheticDataset(64, 8, 100, 0, seed=3, ragged=True, isolate=True)
    for step, again in zip(loader(data, 16, 4), loader(data, 16, 4, num_workers=2), strict=True):
        for batch, same in zip(step.microbatches, again.microbatches, strict=True):
            assert set(batch) == {"input_ids", "labels", "document_ids"}
            assert all(torch.equal(batch[key], same[key]) for key in batch)
        assert step.counts.targets == sum(int((b["labels"][:, 1:] != -100).sum()) for b in step.microbatches)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Count, StatefulCount])
def test_streams_resume_exactly(kind: type[Count], workers: int) -> None:
    steps, states = read(loader(kind(23), 4, 3, num_workers=workers))
    assert [len(part) for part in steps[0]] == [3, 1]
    assert json.loads(json.dumps(states)) == states, "a checkpoint can hold it"
    assert len({i for step in steps for part in step for i in part}) == 20
    for done in (1, 3, 5):
        resumed = at(states[done - 1], loader(kind(23), 4, 3, num_workers=workers))
        assert read(resumed)[0] == steps[done:]
        assert resumed.epoch == 1


def test_any_iterable_of_samples_or_batches_and_the_names_of_columns() -> None:
    samples = loader((sample(i) for i in range(9)), 4, 2, drop_last=False)
    assert read(samples)[0] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8]]]
    batches = [default_collate([sample(i), sample(i + 1)]) for i in range(0, 8, 2)]
    for data in (loader(batches), loader(iter(batches))):
        assert read(data)[0] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    named = [{"input_ids": [1, 2], "label": [1, 2], "text": "left out", "none": None} for _ in range(4)]
    assert set(next(iter(loader(named))).microbatches[0]) == {"input_ids", "labels"}


@pytest.mark.filterwarnings("ignore:.*set_vital")  # deprecated in torch 2.13, called by torchdata 0.11
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_ready_dataloader(kind: Any) -> None:
    def ready() -> TrainLoader:
        return loader(kind([sample(i) for i in range(10)], batch_size=2), drop_last=False)

    data = ready()
    assert len(data) == 3
    steps, states = read(data)
    assert steps == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9]]]
    assert states[1]["sample"] == 8
    assert read(at(states[0], ready()))[0] == steps[1:]
    assert read(data)[0] == steps, "the next epoch"


def test_global_random_numbers_are_left_alone() -> None:
    before = torch.get_rng_state()
    list(loader(Numbers(8), num_workers=1))
    assert torch.equal(torch.get_rng_state(), before)


def eval_numbers(data: EvalLoader) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in data]


def test_evaluation_limits() -> None:
    assert eval_numbers(EvalLoader(Numbers(23), batch_size=4, max_samples=6, num_workers=1)) == [[0, 1, 2, 3], [4, 5]]
    assert eval_numbers(EvalLoader(Count(23), batch_size=4, max_samples=6)) == [[0, 1, 2, 3], [4, 5]]
    ready = DataLoader(Numbers(23), batch_size=4, collate_fn=default_collate)
    assert eval_numbers(EvalLoader(ready, batch_size=9, max_samples=6)) == [[0, 1, 2, 3], [4, 5]]
    limited = EvalLoader(Numbers(23), batch_size=4, max_steps=2)
    assert eval_numbers(limited) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert (len(limited), len(EvalLoader(Numbers(23), batch_size=4)), len(EvalLoader(ready, batch_size=9))) == (2, 6, 6)


KILLED = """
import os, signal, time
from pathlib import Path
from torch.utils.data import IterableDataset
from forgather_cli.data.loaders.workers import Workers, start_workers, worker_loader

trainer = os.getpid()

class Kills(IterableDataset):
    def __iter__(self):  # before torch's watchdog, which is content with the parent that it finds
        Path(f"pid-{os.getpid()}").touch()
        while len(list(Path().glob("pid-*"))) < 2:
            time.sleep(0.01)
        os.kill(trainer, signal.SIGKILL)
        time.sleep(1)
        return iter(())

start_workers(worker_loader(Kills(), Workers(2), 0))
"""


def test_workers_of_a_trainer_that_is_killed_as_they_start_end(tmp_path: Path) -> None:
    with Process(code=KILLED, cwd=tmp_path) as trainer:
        assert trainer.process.wait(timeout=300) == -signal.SIGKILL
        left = [int(file.name.removeprefix("pid-")) for file in tmp_path.glob("pid-*")]
        assert len(left) == 2
        assert nobody_runs(left, 120)
        trainer.finish()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("pin", [True, False])
def test_batches_arrive_on_the_device_unchanged(pin: bool) -> None:
    data = SyntheticDataset(512, 64, 1000, 0, seed=3)
    pairs = zip(loader(data, 16, 4), loader(data, 16, 4, device="cuda", pin_memory=pin), strict=True)
    for step, moved in pairs:
        assert step.counts == moved.counts
        for batch, copy in zip(step.microbatches, moved.microbatches, strict=True):
            assert copy["input_ids"].is_cuda
            assert torch.equal(batch["input_ids"], copy["input_ids"].cpu())


def test_batches_are_pinned_on_cuda_unless_dataloader_pin_memory_says_otherwise() -> None:
    cases = [(None, "cuda", True), (None, "cpu", False), (False, "cuda", False), (True, "cuda", True)]
    for setting, kind, pinned in cases:
        options, model = RunSettings(dataloader_pin_memory=setting), torch.nn.Linear(1, 1)
        settings = _loader_settings(options, torch.device(kind), model)
        assert settings["pin_memory"] is pinned
