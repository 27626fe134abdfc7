"""Micro-batches of a map-style dataset by lists of indices: in this process, or in workers."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from forgather_cli.data.loaders.collate import Batch, CollateFn, as_batch, default_collate


@dataclass(frozen=True)
class Workers:
    """Worker processes that read ahead; 0 reads in this process."""

    num: int = 0
    prefetch_factor: int | None = None
    """Micro-batches (of data without numbers: global batches) that each worker reads ahead; null: 2."""
    persistent: bool = False


def set_epoch(dataset: Any, epoch: int) -> None:
    """Tell a dataset that wants to know which epoch begins."""
    method = getattr(dataset, "set_epoch", None)
    if callable(method):
        method(epoch)


class _Reader:
    """A dataset that answers (epoch, indices) with a batch. The epoch travels with the indices, so that workers that
    outlive an epoch hear of the next one."""

    def __init__(self, dataset: Any, collate_fn: CollateFn | None, *, tell_epoch: bool) -> None:
        self._dataset = dataset
        self._collate = collate_fn or default_collate
        self._many = getattr(dataset, "__getitems__", None)
        self._tell_epoch = tell_epoch
        self._epoch: int | None = None

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitems__(self, request: tuple[int, list[int]]) -> Batch:
        epoch, indices = request
        if epoch != self._epoch:
            self._epoch = epoch
            if self._tell_epoch:
                set_epoch(self._dataset, epoch)
        samples = self._many(indices) if self._many else [self._dataset[index] for index in indices]
        return as_batch(self._collate(samples) if isinstance(samples, list) else samples)


class Fetcher:
    """Reads a map-style dataset. A dataset's ``__getitems__(indices)`` may return a batch, or samples to collate."""

    def __init__(
        self, dataset: Any, collate_fn: CollateFn | None, workers: Workers, seed: int, *, tell_epoch: bool = True
    ) -> None:
        self._reader = _Reader(dataset, collate_fn, tell_epoch=tell_epoch)
        self._workers = workers
        self._seed = seed
        self._plan = _Plan()
        self._loader: Any = None

    def fetch(self, epoch: int, indices: Iterable[list[int]]) -> Iterator[Batch]:
        """One batch for each list, in order."""
        requests = ((epoch, each) for each in indices)
        if self._workers.num == 0:
            return map(self._reader.__getitems__, requests)
        return self._from_workers(requests)

    def _from_workers(self, requests: Iterator[tuple[int, list[int]]]) -> Iterator[Batch]:
        self._plan.requests = requests
        loader = self._loader
        if loader is None:
            options = {"batch_sampler": self._plan, "snapshot_every_n_steps": sys.maxsize}  # the position is ours
            loader = worker_loader(self._reader, self._workers, self._seed, **options)
        if self._workers.persistent:
            self._loader = loader
        yield from start_workers(loader)

    def close(self) -> None:
        """End persistent workers."""
        self._loader = None


class _Plan:
    """The batch sampler of a loader that lives longer than one pass."""

    requests: Iterator[tuple[int, list[int]]] = iter(())

    def __iter__(self) -> Iterator[tuple[int, list[int]]]:
        return self.requests


def worker_loader(dataset: Any, workers: Workers, seed: int, **kwargs: Any) -> Any:
    """torchdata's StatefulDataLoader with a generator of its own, so that it draws nothing from the global one."""
    from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]

    if workers.num:
        kwargs |= {"prefetch_factor": workers.prefetch_factor or 2, "persistent_workers": workers.persistent}
        kwargs["worker_init_fn"] = _outlive_sigterm
    generator = torch.Generator().manual_seed(seed & (1 << 63) - 1)
    kwargs.setdefault("collate_fn", _unchanged)
    with warnings.catch_warnings():
        # torchdata 0.11 calls torch.set_vital, which torch 2.13 deprecates
        warnings.filterwarnings("ignore", ".*set_vital", UserWarning)
        return StatefulDataLoader(dataset, num_workers=workers.num, generator=generator, **kwargs)


def _outlive_sigterm(worker: int) -> None:
    """In a worker: end by a SIGTERM of the parent alone. A scheduler sends one to workers, which training still needs.

    torch's worker loop has set a handler in C that ends them at once (torch 2.13, ``_set_worker_signal_handlers``). A
    handler does not learn who has sent the signal, a thread that waits for it does. Not where there is no sigwaitinfo.
    """
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told_by, args=(os.getppid(),), daemon=True).start()


def _end_when_told_by(parent: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        continue
    os._exit(0)


def start_workers(loader: Any) -> Iterator[Any]:
    """``iter(loader)`` with what starting processes would otherwise print."""
    if "tokenizers" in sys.modules:
        # its thread pool does not survive a fork; unset, it says so in every worker (tokenizers 0.23, parallelism.rs)
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    with warnings.catch_warnings():
        # Python 3.12 warns of fork in a process with threads, which any use of torch makes
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        # more workers than cores: the user asked for it
        warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
        iterator: Iterator[Any] = iter(loader)
    return iterator


def _unchanged(value: Any) -> Any:
    return value
