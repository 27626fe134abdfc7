"""Data on several real ranks: dispatched by rank 0, sharded, or sliced by number; all of it against one rank's pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from streams import groups, may_have_workers, new_data_ranks, rank_and_size, train_loader
from test_loader import Count, Numbers, StatefulCount, flat, numbers, sample
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from forgather_cli.config.decode import decode, to_tree
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import DataTarget
from forgather_cli.data.build import load_data
from forgather_cli.data.loaders.collate import Step, default_collate
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.errors import DataError, TrainingError
from forgather_cli.trainer.evaluate import in_rounds
from forgather_cli.trainer.step_sync import Sum

pytestmark = pytest.mark.filterwarnings("ignore:.*set_vital")  # deprecated in torch 2.13, called by torchdata 0.11


class Sharded(StatefulCount):
    """Samples of this rank alone, as RANK says: 0, 2, 4, ... on the first of two. Ranks may have ``spare`` more."""

    def __init__(self, length: int, spare: int = 0) -> None:
        self.rank, self.size = rank_and_size()
        super().__init__(length // self.size + spare * self.rank)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for each in super().__iter__():
            yield sample(int(each["input_ids"][0]) * self.size + self.rank)


class WithShards(Count):
    """What the ``datasets`` library has: parts by number."""

    def __init__(self, length: int, num_shards: int = 4, first: int = 0, every: int = 1) -> None:
        super().__init__(length)
        self.num_shards, self.first, self.every = num_shards, first, every

    def shard(self, num_shards: int, index: int) -> WithShards:
        return WithShards(self.length, self.num_shards // num_shards, index, num_shards)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (sample(i) for i in range(self.first, self.length, self.every))


class Noise(IterableDataset[Any]):
    """Other samples in every pass and on every rank."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return map(sample, os.urandom(24))


def breaks(error: Exception, after: int) -> Iterator[dict[str, Any]]:
    yield from map(sample, range(after))
    raise error


def ready(length: int = 20, kind: Any = DataLoader) -> Any:
    return kind(Numbers(length), batch_size=2, collate_fn=default_collate)


SOURCES: dict[str, Callable[[], Any]] = {
    "stateless": lambda: Count(59),
    "stateful": lambda: StatefulCount(59),
    "ready dataloader": lambda: ready(58),
    "stateful dataloader": lambda: ready(58, StatefulDataLoader),
    "generator": lambda: (sample(i) for i in range(59)),
}


def trained(loader: TrainLoader, steps: int = 1000) -> list[tuple[list[list[int]], dict[str, Any]]]:
    """(samples of this rank's micro-batches, position) of each step, with the next one fetched ahead as the Trainer
    does; ends on all ranks when one has no more."""
    group = groups()[1] if dist.is_initialized() else None
    seen: list[tuple[list[list[int]], dict[str, Any]]] = []
    source = iter(loader)

    def fetch() -> tuple[Step | None, dict[str, Any], Sum]:
        step = next(source, None)
        return step, loader.state_dict(), Sum([int(step is not None)], group)

    ahead = fetch()
    while len(seen) < steps:
        step, position, agreement = ahead
        if agreement.read() != [rank_and_size()[1]]:
            break
        seen.append((numbers(step), position))
        ahead = fetch()
    ahead[2].read()
    return seen


def samples(steps: Any) -> list[list[int]]:
    """Of each step, micro-batches joined."""
    return [[i for part in parts for i in part] for parts, _ in steps]


def together(ranks: list[Any]) -> list[list[int]]:
    """Samples of each step over all ranks."""
    assert len({len(steps) for steps in ranks}) == 1, "training ends together"
    return [[i for part in parts for i in part] for parts in zip(*map(samples, ranks), strict=True)]


def caught(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Exception | None:
    """On a rank: what a call raises. A rank that fails would cost the pool its processes."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def dispatched(name: str, kwargs: dict[str, Any], state: dict[str, Any] | None = None, steps: int = 1000) -> Any:
    source = SOURCES[name]()
    loader = train_loader(source, state, global_batch_size=12, **kwargs)
    return trained(loader, steps), getattr(source, "made", 0), loader.epoch


def all_dispatched() -> dict[str, Any]:
    return {name: dispatched(name, {"drop_last": name == "stateless"}) for name in SOURCES}


def test_dispatched_ranks_get_what_one_rank_would() -> None:
    results = run_ranks(2, all_dispatched)
    for name, (alone, made, _) in all_dispatched().items():
        ranks = [result[name] for result in results]
        found = [steps for steps, _, _ in ranks]
        assert together(found) == samples(alone), name
        assert [len(part) for part in found[0][0][0]] == [2] * 3
        assert [count for _, count, _ in ranks] == [made, 0], "only rank 0 reads"
        assert {epoch for _, _, epoch in ranks} == {1}
        for (_, alone_at), *at in zip(alone, *found, strict=True):
            assert at[0][1] == alone_at, "rank 0 has the position"
            assert all(position == {**alone_at, "stream": None} for _, position in at[1:])


@pytest.mark.parametrize("name", ["stateless", "stateful", "stateful dataloader"])
def test_dispatched_goes_on_exactly_on_any_number_of_ranks(name: str) -> None:
    whole, made, _ = dispatched(name, {})
    first = run_ranks(2, dispatched, name, {}, None, 2)[0][0]
    state = first[-1][1]
    assert samples(first) == [step[:6] for step in samples(whole)[:2]]
    for size in (1, 3):
        ranks = run_ranks(size, dispatched, name, {}, state) if size > 1 else [dispatched(name, {}, state)]
        assert together([steps for steps, _, _ in ranks]) == samples(whole)[2:]
        if name == "stateful":
            assert ranks[0][1] < made - 8, "samples before the position are not made again"


def with_workers(kind: type[Count], state: dict[str, Any] | None = None) -> Any:
    may_have_workers()
    return trained(train_loader(kind(40), state, num_workers=2, micro_batch_size=6 // rank_and_size()[1]))


@pytest.mark.parametrize("kind", [Count, StatefulCount])
def test_the_order_of_workers_does_not_depend_on_the_layout(kind: type[Count]) -> None:
    alone = with_workers(kind)
    ranks = run_ranks(2, with_workers, kind)
    assert together(ranks) == samples(alone)
    assert samples(with_workers(kind, ranks[0][2][1])) == samples(alone)[3:]


def same_for_all(layout: tuple[int, ...]) -> Any:
    data_rank = layout[dist.get_rank()]
    return trained(train_loader(Noise(), size=max(layout) + 1, data_rank=data_rank))


@pytest.mark.parametrize("layout", [(0, 0), (0, 0, 1)], ids=["pipeline", "mixed"])
def test_ranks_that_train_the_same_samples_get_the_same_from_random_data(layout: tuple[int, ...]) -> None:
    found = [samples(steps) for steps in run_ranks(len(layout), same_for_all, layout)]
    assert found[0] == found[1]
    assert [len(step) for step in found[0]] == [6 if layout == (0, 0) else 3] * 4
    assert found[0] != found[-1] or layout == (0, 0)


def wide() -> list[list[dict[str, torch.Tensor]]]:
    """Of every dtype there may be, and of several shapes."""
    rows = (
        {**sample(i), "mask": torch.tensor([True, i % 2 == 0, False]), "weight": torch.tensor(float(i)),
         "half": torch.full((2, 2), i + 0.5, dtype=torch.bfloat16)}
        for i in range(8)
    )  # fmt: skip
    return [step.microbatches for step in train_loader(rows, global_batch_size=4)]


def test_tensors_arrive_as_they_are() -> None:
    alone = [batch for batches in wide() for batch in batches]
    ranks = run_ranks(2, wide)
    found = [batch for both in zip(*ranks, strict=True) for batches in both for batch in batches]
    assert len(found) == len(alone) == 4
    for one, other in zip(alone, found, strict=True):
        assert list(one) == list(other)
        assert all(torch.equal(one[key], other[key]) and one[key].dtype == other[key].dtype for key in one)


def left_early() -> Any:
    loader = train_loader(StatefulCount(23))
    first = [numbers(step) for step in islice(iter(loader), 2)]
    loader.set_epoch(4)
    return first, samples(trained(loader)), loader.epoch


def test_a_pass_that_is_left_early_is_begun_anew() -> None:
    ranks = run_ranks(2, left_early)
    assert [first for first, _, _ in ranks] == [[[[0, 1], [2]], [[6, 7], [8]]], [[[3, 4], [5]], [[9, 10], [11]]]]
    assert ranks[0][1][0] + ranks[1][1][0] == list(range(12, 18)), "where it stood"
    assert [epoch for _, _, epoch in ranks] == [5, 5]


def failing() -> list[Any]:
    sampler = DistributedSampler(range(8), rank=dist.get_rank(), num_replicas=2)  # type: ignore[arg-type]
    return [
        caught(trained, train_loader(breaks(ValueError("boom\nat length"), 8))),
        caught(trained, train_loader(breaks(DataError("data.files: gone"), 0))),
        caught(trained, train_loader(Count(5), drop_last=True)),
        caught(trained, train_loader([default_collate([sample(0)]), {"input_ids": ["x"]}])),
        caught(train_loader, DataLoader(Numbers(8), sampler=sampler)),
        samples(trained(train_loader(Count(6)))),
    ]


def test_an_error_of_rank_0_is_raised_on_all() -> None:
    first, second = run_ranks(2, failing)
    assert (type(first[0]), str(first[0])) == (ValueError, "boom\nat length")
    assert type(second[0]) is TrainingError
    assert str(second[0]) == "train_dataset: rank 0, which reads it for all ranks, failed (ValueError: boom); mend it"
    for one, other in zip(first[1:5], second[1:5], strict=True):
        assert type(one) is type(other) is DataError
        assert str(one) == str(other)
    assert "ended before the first step of 6 samples" in str(first[2])
    assert "set dispatch_batches=false, or leave the sampler out" in str(first[4])
    assert [first[5], second[5]] == [[[0, 1, 2]], [[3, 4, 5]]], "the ranks can go on"


def sharded(kind: str, state: Any = None, **kwargs: Any) -> Any:
    """Every rank for itself."""
    may_have_workers()
    rank, size = rank_and_size()
    sampler = DistributedSampler(range(20), num_replicas=size, rank=rank, shuffle=False)  # type: ignore[arg-type]
    datasets: dict[str, Callable[[], Any]] = {
        "by rank": lambda: Sharded(24),
        "uneven": lambda: Sharded(24, spare=5),
        "shards": lambda: WithShards(24),
        "too few shards": lambda: WithShards(24, num_shards=1),
        "all": lambda: StatefulCount(24),
        "sampler": lambda: DataLoader(Numbers(20), batch_size=2, sampler=sampler, collate_fn=default_collate),
    }
    loader = train_loader(datasets[kind](), state, dispatch=False, **kwargs)
    found = trained(loader)
    return found, None if caught(len, loader) else len(loader), loader.state_is_per_rank


def all_sharded() -> dict[str, Any]:
    return {kind: sharded(kind) for kind in ("by rank", "shards", "sampler", "all", "too few shards", "uneven")}


def test_shards_are_read_by_their_ranks_and_end_together() -> None:
    results = run_ranks(2, all_sharded)
    uneven = [result.pop("uneven")[0] for result in results]
    assert list(map(len, uneven)) == [4, 4], "17 samples of rank 1 would make 6 steps"
    for kind in results[0]:
        ranks = [result[kind] for result in results]
        steps = together([found for found, _, _ in ranks])
        assert sorted(i for step in steps for i in step) == list(range(20 if kind == "sampler" else 24)), kind
        odd = {i % 2 for step in samples(ranks[1][0]) for i in step}
        assert odd == ({0, 1} if kind in ("all", "too few shards") else {1}), "a shard of its own, or a part of all"
        lengths = [length for _, length, _ in ranks]
        assert lengths == ([5, 5] if kind == "sampler" else [None, None]), "a rank cannot tell whose length it is"
        assert all(per_rank for _, _, per_rank in ranks)
        assert len({position["sample"] for found, _, _ in ranks for _, position in found[-1:]}) == 1


@pytest.mark.parametrize("workers", [0, 1])
def test_shards_resume_exactly_on_as_many_ranks_and_nowhere_else(workers: int) -> None:
    by_rank = partial(sharded, "by rank", num_workers=workers)
    whole = run_ranks(2, by_rank)
    states = [found[1][1] for found, _, _ in whole]
    assert [state["shards"] for state in states] == [2, 2]
    for (before, _, _), (after, _, _) in zip(whole, run_ranks(2, by_rank, states), strict=True):
        assert after == before[2:]
    with pytest.raises(DataError, match="rank 0 reads for all; resume as it was, or set ignore_data_skip=true"):
        TrainLoader(Count(4), global_batch_size=2, micro_batch_size=2, seed=1).load_state_dict(states[0])
    for error in run_ranks(3, caught, sharded, "by rank", states[0]) if workers == 0 else ():
        assert "of 2 ranks that read a shard each (dispatch_batches=false), now 3 ranks do" in str(error)
        assert "data.dispatch_batches=true" in str(error)


def test_parts_of_one_stream_can_be_changed_to_another_number_of_ranks() -> None:
    alone = [list(range(first, first + 6)) for first in range(0, 24, 6)]
    ranks = [found for found, _, _ in run_ranks(2, sharded, "all")]
    assert [position for _, position in ranks[0]] == [position for _, position in ranks[1]]
    assert together([found for found, _, _ in run_ranks(3, sharded, "all", ranks[1][1][1])]) == alone[2:]
    for error in run_ranks(2, caught, sharded, "by rank", ranks[0][0][1]):
        assert "now each rank reads a shard of its own; set dispatch_batches=true" in str(error)


def bad_shards() -> list[Any]:
    return [
        caught(trained, train_loader(Sharded(4, spare=8), dispatch=False, drop_last=True)),
        caught(trained, train_loader(Sharded(0, spare=8), dispatch=False)),
        caught(trained, train_loader(Noise(), size=1, dispatch=False)),
    ]


def test_shards_that_cannot_be_trained_on_are_told_on_all_ranks() -> None:
    for errors in run_ranks(2, bad_shards):
        assert all(isinstance(error, DataError) for error in errors)
        assert "ended before the first step of 6 samples on ranks [0]; lower" in str(errors[0])
        assert "of 6 samples on ranks [0]" in str(errors[1])
        different = "ranks that train the same samples get different ones from it; set dispatch_batches=true"
        assert different in str(errors[2])


def eval_loader(dataset: Any, **kwargs: Any) -> EvalLoader:
    rank, size = rank_and_size()
    return EvalLoader(dataset, **{"batch_size": 2, "rank": rank, "size": size, "data_ranks": new_data_ranks()} | kwargs)


def evaluated(loader: EvalLoader) -> list[list[int]]:
    """This rank's batches that count, in the rounds of the Trainer."""
    rounds = in_rounds(loader, groups()[1] if dist.is_initialized() else None)
    return [batch["input_ids"][:, 0].tolist() for batch, counted in rounds if counted]


def evaluations(length: int) -> dict[str, list[list[int]]]:
    may_have_workers()
    splits = {
        "map": eval_loader(Numbers(length)), "dispatched": eval_loader(Count(length)),
        "parts": eval_loader(Count(length), dispatch=False), "shards": eval_loader(WithShards(length), dispatch=False),
        "ready": eval_loader(ready(length)), "sampler": eval_loader(ready(length), dispatch=False),
    }  # fmt: skip
    found = {name: evaluated(loader) for name, loader in splits.items()}
    assert found == {name: evaluated(loader) for name, loader in splits.items()}, "a second pass"
    limits = {
        "map limited": eval_loader(Numbers(length), max_samples=length - 2),
        "dispatched limited": eval_loader(Count(length), max_samples=length - 2),
        "parts limited": eval_loader(WithShards(length), dispatch=False, max_samples=length - 2),
        "ready limited": eval_loader(ready(length), max_samples=length - 2),
        "map few": eval_loader(Numbers(length), max_steps=1),
        "dispatched few": eval_loader(Count(length), max_steps=1),
    }
    return found | {name: evaluated(loader) for name, loader in limits.items()}


@pytest.mark.parametrize(("size", "length"), [(2, 7), (3, 16)])
def test_evaluation_counts_every_example_once(size: int, length: int) -> None:
    ranks = run_ranks(size, evaluations, length)
    for name in ranks[0]:
        seen = sorted(i for rank in ranks for batch in rank[name] for i in batch)
        if name.endswith("few"):
            assert [len(rank[name]) for rank in ranks] == [1] * size, "one batch of each rank"
        else:
            assert seen == list(range(length - 2 if "limited" in name else length)), name


def empty_shards() -> list[str]:
    each_its_own = {"dispatch": False}
    cases: list[tuple[Any, dict[str, Any]]] = [
        (Numbers(1), {}), (Numbers(9), {"max_samples": 1}), (Count(1), {}), (Count(1), each_its_own),
        (Sharded(0, spare=5), each_its_own), (ready(2), {}), (Sharded(8), {**each_its_own, "max_samples": 4}),
        (Count(0), {}),
    ]  # fmt: skip
    return [str(caught(lambda: evaluated(eval_loader(dataset, **kwargs)))) for dataset, kwargs in cases]  # noqa: B023


def test_an_empty_shard_is_an_error_on_every_rank() -> None:
    first, second = run_ranks(2, empty_shards)
    assert first == second
    lacks = "eval_dataset: 1 samples for 2 ranks leaves ranks [0] without any (per_device_eval_batch_size=2, "
    give = "give it 2 or more (data.eval_fraction, data.num_eval_samples, data.eval_files), or use fewer ranks"
    assert first[0] == f"{lacks}max_eval_samples=null); {give}"
    assert first[1] == f"{lacks}max_eval_samples=1); raise max_eval_samples to 2 or more, or use fewer ranks"
    assert first[2] == f"{lacks}max_eval_samples=null, dispatch_eval_batches=true); {give}"
    assert first[3] == f"{lacks}max_eval_samples=null, dispatch_eval_batches=false); {give}"
    assert first[4].startswith("eval_dataset: at least 2 samples for 2 ranks leaves ranks [0] without any")
    assert "set dispatch_eval_batches=true, or use fewer ranks" in first[4]
    assert "1 batches for 2 ranks leaves ranks [0] without any" in first[5]
    assert "max_eval_samples: 4 are the first of the whole split, but each rank reads a shard of its own" in first[6]
    assert "eval_dataset: 0 samples for 2 ranks leaves ranks [0, 1] without any" in first[7]
    for dataset in (Numbers(0), iter([])):  # on one rank
        with pytest.raises(DataError, match="eval_dataset: has no samples"):
            evaluated(eval_loader(dataset))


@pytest.mark.parametrize("drop_last", [True, False])
def test_slices_of_any_number_of_ranks_make_up_the_same_steps(drop_last: bool) -> None:
    def loaders(size: int, state: dict[str, Any] | None = None) -> list[TrainLoader]:
        given: dict[str, Any] = {"global_batch_size": 6, "micro_batch_size": 2, "seed": 3, "drop_last": drop_last}
        made = [TrainLoader(Numbers(35), **given, rank=rank, size=size) for rank in range(size)]
        for loader in made:
            loader.load_state_dict(state or {"epoch": 0, "sample": 0})
        return made

    alone = [flat([step]) for step in loaders(1)[0]]
    for size in (2, 3, 4, 5, 6, 8):
        steps = list(zip(*loaders(size), strict=True))
        assert list(map(flat, steps)) == alone
        empty = [step for parts in steps for step in parts if not step.microbatches]
        assert bool(empty) or size < 8
        assert all(step.counts.targets == step.counts.samples == 0 for step in empty)

    seen: list[list[int]] = []
    state: dict[str, Any] | None = None
    for size in (1, 2, 4, 3, 1):
        ranks = loaders(size, state)
        seen.append(flat([next(iter(loader)) for loader in ranks]))
        state, *others = (loader.state_dict() for loader in ranks)
        assert all(position == state for position in others)
    assert seen == alone[:5]


def own(kind: str = "stream", n: int = 8) -> dict[str, Any]:
    """What a user's ``data._target_`` may return."""
    rows = [sample(i) for i in range(n)]
    held_out = iter(rows[:2]) if kind == "streams" else rows[:2]
    return {"train": rows if kind == "numbered" else iter(rows), "eval": held_out, "seq_len": 3}


def test_settings_stand_beside_the_target_and_are_not_passed_to_it() -> None:
    chosen = ["trainer=ddp", "+data._target_=test_dispatch.own", "+data.n=4", "dispatch_batches=false"]
    config = load_config(None, chosen).config
    assert config.data == DataTarget(path="test_dispatch.own", kwargs={"n": 4}, dispatch_batches=False)
    assert (config.dispatch_batches, config.dispatch_eval_batches) == (False, None)
    assert decode(to_tree(config)) == config
    assert load_config(None, chosen[:1]).config.dispatch_batches is None
    assert len(list(load_data(config.data, seed=1).train)) == 4


def test_settings_of_streams_are_read() -> None:
    for kind, settings in (("streams", {"dispatch_eval_batches": True}), ("stream", {})):
        given = DataTarget("test_dispatch.own", {"kind": kind}, dispatch_batches=False, **settings)
        assert load_data(given, seed=1).train
