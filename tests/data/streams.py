"""What tests of several kinds of data share: files that ``datasets`` reads, samples as lists, and steps of a loader."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.util import register_after_fork
from pathlib import Path
from typing import Any

import torch.distributed as dist
from chats import write_lines, write_table

from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.splits import DataSplits


def write_dataset(folder: Path, rows: list[dict[str, Any]], first: int) -> None:
    """``a.jsonl`` with the ``first`` rows and ``b.jsonl`` with the others, ``all.jsonl`` and ``all.parquet``, and
    ``saved``, whose splits are ``a`` and ``b``, by save_to_disk."""
    import datasets

    for name, part in (("a", rows[:first]), ("b", rows[first:]), ("all", rows)):
        write_lines(folder / f"{name}.jsonl", part)
    write_table(folder / "all.parquet", rows)
    datasets.disable_progress_bars()
    splits = {"train": rows[:first], "validation": rows[first:]}
    made = {name: datasets.Dataset.from_list(part) for name, part in splits.items()}
    datasets.DatasetDict(made).save_to_disk(folder / "saved")


def rows_of(samples: Any) -> list[list[Any]]:
    """Every tensor of every sample, as lists."""
    return [[sample[key].tolist() for key in sorted(sample)] for sample in samples]


def all_rows(dataset: Any) -> list[list[Any]]:
    return rows_of(dataset[i] for i in range(len(dataset)))


def shown(data: DataSplits, marks: str = "[]") -> list[str]:
    """The text of each sample, with what is learned in brackets."""
    found = []
    for index in range(len(data.train)):
        ids, labels = (data.train[index][name].tolist() for name in ("input_ids", "labels"))
        text, inside = "", False
        for start, (token, label) in enumerate(zip(ids, labels, strict=True)):
            if token == data.tokenizer.pad_token_id and label < 0:
                break
            if (label >= 0) != inside:
                text, inside = text + marks[inside], not inside
            text += data.tokenizer.decode([token])
            last = start
        found.append(text + marks[1] * inside)
        assert set(labels[last + 1 :]) <= {-100}
    return found


def all_ids(dataset: Any) -> list[int]:
    return [token for row in dataset for token in row["input_ids"].tolist()]


def assert_goes_on_from_anywhere(opened: Callable[[], Any]) -> None:
    """``opened`` gives the same stream anew each time, of more than 20 samples."""
    dataset = opened()
    dataset.set_epoch(3)
    expected, states = [], [dataset.state_dict()]
    for sample in dataset:
        expected += rows_of([sample])
        states.append(dataset.state_dict())
    assert len(expected) > 20
    for done in (0, 1, 6, 17, len(expected) - 1, len(expected)):
        again = opened() if done == 6 else dataset
        again.set_epoch(3)
        again.load_state_dict(states[done])
        assert rows_of(again) == expected[done:]
    assert rows_of(dataset) == expected, "a pass after one that was gone on with begins at the beginning"


def rank_and_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


_made: dict[Any, list[Any]] = {}


def groups() -> list[Any]:
    """Two groups of all ranks, one for data and one to agree by: made once for a task of the pool, since that costs."""
    world = dist.group.WORLD
    if world not in _made:
        _made.clear()
        _made[world] = [dist.new_group(backend="gloo") for _ in range(2)]
    return _made[world]


def new_data_ranks(data_rank: int | None = None) -> DataRanks | None:
    rank, size = rank_and_size()
    return None if size == 1 else DataRanks(groups()[0], rank, rank if data_rank is None else data_rank)


class _Popen(Popen):
    """A fork that is made again where it hangs in the interpreter. Before Python 3.11.10 a lock of its own that another
    thread holds then, as one of gloo's does that begins to need Python, stays locked in the child (gh-112275).
    """

    def _launch(self, process: Any) -> None:
        came, comes = multiprocessing.Pipe(duplex=False)
        register_after_fork(comes, lambda it: it.send_bytes(b"up"))  # the first thing that the child does
        super()._launch(process)
        while not wait([came], 10.0):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            super()._launch(process)
        came.close()
        comes.close()


def may_have_workers() -> None:
    """The pool's processes are daemons, which ``multiprocessing`` allows no children, and would spawn them."""
    if dist.is_initialized():
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        multiprocessing.set_start_method("fork", force=True)
        ForkProcess._Popen = staticmethod(_Popen)  # type: ignore[method-assign]


def train_loader(
    dataset: Any, state: Any = None, size: int | None = None, data_rank: int | None = None, **kwargs: Any
) -> TrainLoader:
    """Of a rank, at a position or one by rank; ``size`` 1: all ranks read the same."""
    rank, world = rank_and_size()
    size = world if size is None else size
    data_rank = rank % size if data_rank is None else data_rank
    options = {"global_batch_size": 6, "micro_batch_size": 2, "seed": 1, "drop_last": False} | kwargs
    loader = TrainLoader(dataset, rank=data_rank, size=size, data_ranks=new_data_ranks(data_rank), **options)
    if state is not None:
        loader.load_state_dict(state[rank] if isinstance(state, list) else state)
    return loader


def steps_of(data: DataSplits, state: Any = None, **options: Any) -> list[tuple[Any, Any]]:
    """(micro-batches as lists, position) of each of this rank's steps."""
    may_have_workers()
    loader = train_loader(data.train, state, **{"global_batch_size": 4, "drop_last": True, **options})
    found = []
    for step in islice(loader, 99):
        batches = [{name: value.tolist() for name, value in batch.items()} for batch in step.microbatches]
        found.append((batches, loader.state_dict()))
    loader.close()
    return found


def in_order(ranks: list[list[tuple[Any, Any]]]) -> list[list[int]]:
    """Input ids of each sample of all ranks, step by step."""
    return [
        row for steps in zip(*ranks, strict=True) for step in steps for batch in step[0] for row in batch["input_ids"]
    ]
