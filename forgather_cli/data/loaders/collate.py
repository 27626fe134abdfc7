"""Samples to batches, checks on batches, and which samples of a global batch are a rank's (``Share``)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from forgather_cli.errors import DataError
from forgather_cli.labels import IGNORED, UNITS, bytes_of, label_shift, take_num_tokens

Batch = dict[str, Tensor]
"""``input_ids`` and ``labels`` (B, T) int64, labels aligned with them, -100 = no target, and what else there is."""
CollateFn = Callable[[list[Any]], Any]
Position = dict[str, Any]
"""A position in the data: ``epoch`` and ``sample`` (samples consumed in it by all ranks). Iterable data add ``stream``,
the source's state (None on ranks that rank 0 reads for), and ``shards``, the number of shards where each rank reads its
own. Of samples that are given out in ranges (``callbacks.diloco``) ``ranges`` are those left."""
_MAPPING = (dict, Mapping)  # dict first: isinstance of the abstract class costs a Python call


def start_of(epoch: int) -> Position:
    """The position at the start of an epoch."""
    return {"epoch": epoch, "sample": 0}


class Counts(NamedTuple):
    """What the batches of one optimizer step hold, counted on the CPU."""

    targets: int = 0
    """Counted ones."""
    tokens: int = 0
    """Without padding; of an encoder-decoder those of both sides."""
    square_lengths: int = 0
    """Sum over sequences of queries x keys, for the attention's operations: of one stack the length squared."""
    samples: int = 0
    decoder_tokens: int = 0
    """Of an encoder-decoder."""
    positions: int = 0
    """Tokens and padding, which is computed as they are."""
    decoder_positions: int = 0
    num_bytes: int = 0
    """Of text that the targets stand for; 0 where nobody can tell."""
    units: int = 0
    """What the loss is divided by: the targets, or what batches say (``labels.UNITS``)."""
    by_source: Sequence[int] = ()
    """Tokens of each source of a mixture."""

    @classmethod
    def of(cls, microbatches: list[Batch], token_bytes: Tensor | None = None) -> Counts:
        """Of one rank's share, which is left without ``labels.LENGTHS``. Raises DataError for a batch without usable
        labels. ``token_bytes``: see ``labels.bytes_of``.
        """
        targets = tokens = squares = samples = decoder_tokens = positions = decoder_positions = num_bytes = units = 0
        for batch in microbatches:
            labels = batch.get("labels")
            if labels is None:
                raise DataError(
                    f"a training batch has no 'labels' (its keys: {', '.join(batch)}); add them to the data, or in the "
                    "data_collator"
                )
            if labels.shape != batch.get("input_ids", labels).shape or labels.ndim != 2 or labels.is_floating_point():
                check_labels(batch, "train_dataset")
            # torch: numpy's code is cold here, after a step's kernels, and takes longer, up to 100,000 labels
            wanted = labels[:, label_shift(batch) :]
            counted = int((wanted != IGNORED).sum())
            targets += counted
            units += int(batch[UNITS].sum()) if UNITS in batch else counted
            if token_bytes is not None:
                num_bytes += int(bytes_of(wanted, token_bytes).sum())
            both, decoder = take_num_tokens(batch)
            tokens += int(both)
            decoder_tokens += int(decoder)
            rows, length = batch["input_ids"].shape
            decoded = batch["decoder_input_ids"].shape[1] if "decoder_input_ids" in batch else 0
            # of the encoder, of the decoder, and of the decoder's with the encoder's
            squares += rows * (length * length + decoded * decoded + length * decoded)
            samples += rows
            positions += rows * (length + decoded)
            decoder_positions += rows * decoded
        return cls(targets, tokens, squares, samples, decoder_tokens, positions, decoder_positions, num_bytes, units)


@dataclass(frozen=True)
class Step:
    """This rank's share of one optimizer step."""

    microbatches: list[Batch]
    counts: Counts
    """Of these, or once ranks have agreed on the step of all ranks'."""


def default_collate(samples: list[Any]) -> Batch:
    """Stack a list of dicts key by key. Text and None are left out, ``label`` is renamed to ``labels``, as in
    Hugging Face's ``default_data_collator`` (transformers 5.23). Raises DataError for lengths that differ."""
    first = samples[0]
    if not isinstance(first, _MAPPING):
        raise DataError(
            f"train_dataset: a sample is a {type(first).__name__}, expected a dict with input_ids and labels"
        )
    batch: Batch = {}
    for key, value in first.items():
        if value is not None and not isinstance(value, str):
            name = "labels" if key in ("label", "label_ids") else key
            batch[name] = _stack(key, [sample[key] for sample in samples])
    return batch


def _stack(key: str, values: list[Any]) -> Tensor:
    try:
        are_tensors = {Tensor}.issuperset(map(type, values))
        tensors = values if are_tensors else [torch.as_tensor(value) for value in values]
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f"train_dataset: cannot make a tensor of {key!r} ({error}); remove it or give a data_collator"
        ) from error
    try:
        return torch.stack(tensors)
    except RuntimeError as error:
        lengths = sorted({len(tensor) if tensor.ndim else 1 for tensor in tensors})
        if len({tensor.shape for tensor in tensors}) == 1:
            raise
        raise DataError(
            f"train_dataset: {key!r} has different lengths in one batch ({', '.join(map(str, lengths))}); "
            f"give a data_collator that pads, or use data.packing"
        ) from error


def as_batch(value: Any) -> Batch:
    """A batch from what a collate function or dataloader returned. Raises DataError for anything but named tensors."""
    if not isinstance(value, _MAPPING):
        raise DataError(f"batches must be dicts with input_ids and labels, got a {type(value).__name__}")
    for key, tensor in value.items():
        if not isinstance(tensor, Tensor):
            raise DataError(
                f"batch key {key!r} is a {type(tensor).__name__}, not a tensor; drop it in the data_collator"
            )
    return dict(value)


def is_batch(item: Any) -> bool:
    """True for a batch, False for one sample: a batch's tensors have two dimensions and more."""
    if not isinstance(item, Mapping):
        return False
    value = item.get("input_ids", item.get("labels"))
    return isinstance(value, Tensor) and value.ndim > 1


def num_samples(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def check_labels(batch: Batch, name: str) -> None:
    """Raise DataError for labels of the data ``name`` that are not a whole number for each token."""
    labels = batch["labels"]
    tokens = batch.get("decoder_input_ids", batch.get("input_ids", labels))
    if labels.ndim != 2 or labels.shape != tokens.shape or labels.is_floating_point():
        raise DataError(
            f"{name}: labels have shape {tuple(labels.shape)} and dtype {str(labels.dtype).removeprefix('torch.')}, "
            f"expected a whole number for each token, here {tuple(tokens.shape)} int64 with -100 where there is no "
            "target; a model that says one thing of a whole sequence is not trained here"
        )


def rank_part(length: int, rank: int, size: int) -> range:
    """Which of ``length`` samples are a rank's; it may have none."""
    return range(rank * length // size, (rank + 1) * length // size)


def microbatches(items: list[Any], size: int) -> list[list[Any]]:
    """Lists of at most ``size`` items."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@dataclass(frozen=True)
class Share:
    """How the samples of a ``global_batch`` are divided among ``size`` data ranks."""

    global_batch: int
    micro_batch: int
    rank: int
    size: int
    drop_last: bool

    def of(self, length: int) -> range:
        """Which of ``length`` samples are this rank's."""
        return rank_part(length, self.rank, self.size)

    def num_steps(self, length: int, per_step: int) -> int:
        """Steps that ``length`` samples or batches make."""
        return length // per_step if self.drop_last else -(-length // per_step)

    def batches_per_step(self) -> int:
        """Batches of a ready dataloader in a step, over all ranks: one for each micro-step."""
        return max(1, self.global_batch // (self.micro_batch * self.size)) * self.size


class TrainingSteps:
    """What a ``TrainLoader`` reads, a global batch for each step of a training. As it stands here: data that are no
    mixture, whose order does not depend on the steps of the run, and which never end for good.
    """

    names: Sequence[str] = ()
    """Of the sources of a mixture."""
    facts: Mapping[str, str] = {}
    """What a run reads of each source, for people; known once it is settled."""
    tokens: Sequence[int] = ()
    """Of each source, in the step that was read last."""
    keeps_sources = False
    """Batches say of which source their rows are (``labels.SOURCES``)."""

    def start_of(self, epoch: int, behind: Position) -> Position:
        """The position at the start of an epoch, ``behind`` what was read before."""
        return start_of(epoch)

    def settled(self, position: Position, step: int, total: int) -> Position:
        """A position, at which the run is at ``step`` of ``total``, with what its order depends on from there."""
        return position

    def steps_left(self, position: Position) -> int:
        """Steps from a position to where the data end for good; a number beyond all where they never do."""
        return sys.maxsize

    def passes(self, position: Position) -> dict[str, float]:
        """How often each source has been read before a position; nothing of a share of a pool."""
        return {}

    def note(self, position: Position, step: int, path: Path | None, group: Any, *, starts: bool) -> None:
        """Collective, once before the first step and then with each save: write to ``path``, on the one rank that has
        one, what was handed out up to a position; nothing here."""
