"""Samples of a split as training reads them, with what people need to read them: pieces, targets and documents.

Legend: T tokens of a sample, padding included.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather_cli.config.schema import Config
from forgather_cli.data.loaders.collate import Batch, Counts, Position
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.data.order import Order
from forgather_cli.data.paired.seq2seq import PairRows
from forgather_cli.data.paired.ul2 import DenoisedRows
from forgather_cli.data.samples import ConcatDataset, PackedDataset
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text.pieces import letters_of, pieces_of, special_ids
from forgather_cli.data.tokens import Split
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.inspection.origins import Origins, Place
from forgather_cli.labels import IGNORED, SOURCES, UNITS
from forgather_cli.launch.layout import batch_and_steps

_BLOCK = 1 << 18  # samples of an order that are looked through at once


@dataclass(frozen=True)
class Excerpt:
    """A document of a sample, or what the sample has of it."""

    start: int
    """Of the sample's tokens."""
    place: Place | None = None
    before: int = 0
    """Tokens of the document before those of the sample."""
    behind: int = 0
    is_cut: bool = False
    """Those behind are in no sample."""

    @property
    def source(self) -> str | None:
        """``FILE:LINE``; None where nobody knows."""
        if self.place is None:
            return None
        file, line = self.place
        return file if line is None else f"{file}:{line}"


@dataclass(frozen=True)
class Side:
    """What an encoder reads, without its padding."""

    ids: list[int]
    pieces: list[str]
    letters: list[str]


@dataclass(frozen=True)
class ShownSample:
    """One sample. Of an encoder-decoder the tokens are those that the decoder is to write: it reads each one later."""

    index: int
    """In the split's global order; of training that of the first epoch, which the seed gives."""
    ids: list[int]
    """(T,)"""
    targets: list[bool]
    """(T,), of each token: the loss counts it as one to be predicted."""
    pieces: list[str]
    """(T,), ``data.text.pieces.pieces_of``."""
    documents: list[int | None]
    """(T,), numbers of the tokens' documents in the sample; None is padding."""
    letters: list[str]
    """(T,), the pieces with no letter divided, ``data.text.pieces.letters_of``."""
    special: list[bool]
    """(T,), of each token: it stands for no text, as begin and end tokens."""
    parts: list[Excerpt]
    """One for each document."""
    encoder: Side | None = None
    mixture_source: str | None = None
    """Of a mixture, the source of its documents."""
    sides: list[str] | None = None
    """Of pairs, what each document is: ``chosen`` or ``rejected``, by turns."""
    differs: list[bool] | None = None
    """Of pairs, (T,), of each token: it is in none of the longest stretches that its side and the other one share."""

    @property
    def source(self) -> str | None:
        """Of its documents, in order, where they are known."""
        return ", ".join(dict.fromkeys(part.source for part in self.parts if part.source)) or None

    @property
    def num_padding(self) -> int:
        return self.documents.count(None)

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        told: dict[str, Any] = {name: getattr(self, name) for name in ("index", "source", "ids", "targets", "pieces")}
        told |= {"mixture_source": self.mixture_source} if self.mixture_source else {}
        told["documents"] = self.documents
        told |= {"sides": self.sides, "differs": self.differs} if self.sides else {}
        if self.encoder is not None:
            told["encoder"] = {"ids": self.encoder.ids, "pieces": self.encoder.pieces}
        return told


class Samples:
    """The samples of one split, by their numbers in its global order: that in which a run reads them, whatever its
    ranks and batches. Training's is that of the first epoch. Raises DataError without such a split."""

    def __init__(self, config: Config, data: DataSplits, split: Split) -> None:
        dataset = data.train if split == "train" else data.eval
        if dataset is None:
            raise DataError(
                "--split eval: the data has no evaluation split; set data.eval_files or data.eval_fraction, or leave "
                "--split out"
            )
        self._dataset, self._split, self._tokenizer = dataset, split, data.tokenizer
        self._origins = Origins(config.data, data.tokenized)
        tokens = None if data.tokenized is None else data.tokenized.splits()[split]
        self._borders = None if tokens is None or tokens.documents is None else tokens.documents.array
        self._special = special_ids(data.tokenizer)
        self._seed = max(config.seed, 0)
        self.length = len(dataset) if is_map_style(dataset) else None
        """None of what can only be read in order."""
        self._order = Order(self.length or 0, self._seed, 0, shuffle=split == "train")
        self._config, self._train_samples = config, data.description.get("train_samples")
        self.sources = {
            name: Samples(replace(config, data=option), each, split)
            for name, (option, each) in data.sources.items()
            if getattr(each, split)
        }
        """Of a mixture, by name."""

    def read(self, first: int = 0) -> Iterator[ShownSample]:
        """Samples from a number on, through the loader of training. Raises DataError where there is none of it."""
        is_train = self._split == "train"
        loader = TrainLoader(
            self._dataset,
            global_batch_size=1,
            micro_batch_size=1,
            seed=self._seed,
            drop_last=False,
            shuffle=is_train,
            set_dataset_epoch=is_train,
        )
        loader.data.keeps_sources = True
        number = 0
        if self.length is not None and first < self.length:
            number = first
            position: Position = {"epoch": 0, "sample": first}
            if getattr(self._config.data, "weight_schedule", None):  # what stands where depends on steps
                plan, steps = batch_and_steps(self._config, self._train_samples)
                run = TrainLoader(self._dataset, global_batch_size=plan.global_batch, micro_batch_size=1, seed=0)
                position = {**run.data.settled(run.state_dict(), 0, steps or 0), "sample": first, "position": first}
            loader.load_state_dict(position)
        for step in loader if self.length is None or first < self.length else ():
            for batch in step.microbatches:
                rows = len(next(iter(batch.values())))  # more than one in ready batches of a user's
                for row in range(rows):
                    if number >= first:
                        [own] = self._order[number : number + 1] or [-1]
                        yield self._sample(number, batch, row, step.counts if rows == 1 else None, own)
                    number += 1
        if number <= first:
            count = self.length or number
            raise DataError(
                f"--sample: the {self._split} split has {count:,} samples, numbered from 0, got {first}; name one of "
                "them"
            )

    def holding(self, path: Path, line: int | None) -> list[int]:
        """Numbers of the samples that hold a record of a file, or any of it, in order. Raises ConfigError where there
        is none."""
        what = str(path) if line is None else f"{path}:{line}"
        found = self._origins.documents(path, line)
        if not found:
            raise ConfigError(
                f"--from: of these data nobody has noted which file each document comes from, got {what}; name samples "
                "by --sample"
            )
        if not found[self._split]:
            others = [split for split, documents in found.items() if documents]
            remedy = f"it is in the other one, add --split {others[0]}" if others else "name a record that is in it"
            raise ConfigError(f"--from: no document of the {self._split} split comes from {what}; {remedy}")
        numbers = sorted({number for document in found[self._split] for number in self._rows_with(document)})
        if not numbers:
            raise ConfigError(f"--from: no sample holds {what}: it is too long, or has no target in its first tokens")
        if self._split == "eval":
            return numbers
        assert self.length is not None
        places: list[int] = []
        for start in range(0, self.length, _BLOCK):
            block = np.array(self._order[start : start + _BLOCK])
            places += (np.flatnonzero(np.isin(block, numbers)) + start).tolist()
        return places

    # ------------------------------------------------------------------------------------------------------ one sample

    def _sample(self, index: int, batch: Batch, row: int, counts: Counts | None, number: int) -> ShownSample:
        """``counts``: of the row alone, where they are known. ``number``: the dataset's own; -1 of data without."""
        if self.sources:
            source, number = batch[SOURCES][row].tolist()
            name, inner = list(self.sources.items())[int(source)]
            return replace(inner._sample(index, batch, row, counts, number), mixture_source=name)
        labels = batch["labels"][row]
        is_target = labels != IGNORED
        mask = batch.get("attention_mask")
        encoder: Side | None = None
        if "decoder_input_ids" in batch:
            read = batch["decoder_input_ids"][row]
            ids = torch.where(is_target, labels, read.roll(-1))  # what the decoder is to write
            mask, documents = batch.get("decoder_attention_mask"), batch.get("decoder_document_ids")
            num_tokens = len(ids) if counts is None else counts.decoder_tokens
            length = None if counts is None else counts.tokens - counts.decoder_tokens
            source = batch["input_ids"][row][:length].tolist()
            encoder = Side(source, pieces_of(self._tokenizer, source), letters_of(self._tokenizer, source))
        else:
            ids, documents = batch["input_ids"][row], batch.get("document_ids")
            is_target[:1] = False  # nothing predicts the first token
            num_tokens = len(ids) if counts is None else counts.tokens
        is_token = torch.arange(len(ids)) < num_tokens if mask is None else mask[row] > 0
        parts = self._parts(number, num_tokens)
        if parts is None:
            parts = [Excerpt(start) for start in self._starts(ids, None if documents is None else documents[row])]
        starts = np.array([part.start for part in parts])
        owners = (starts.searchsorted(np.arange(len(ids)), "right") - 1).tolist()
        owners = [max(owner, 0) if is_in else None for owner, is_in in zip(owners, is_token.tolist(), strict=True)]
        pairs = {} if UNITS not in batch else _told_apart(ids.tolist(), owners, int(batch[UNITS][row]))
        return ShownSample(
            index,
            ids.tolist(),
            is_target.tolist(),
            pieces_of(self._tokenizer, ids.tolist()),
            owners,
            letters_of(self._tokenizer, ids.tolist()),
            [number in self._special for number in ids.tolist()],
            [part for part in parts if part.start < num_tokens or mask is not None],
            encoder,
            **pairs,
        )

    def _starts(self, ids: Tensor, documents: Tensor | None) -> list[int]:
        """Where documents begin, of which the cache says nothing: by their ids, or behind each end token."""
        if documents is not None:
            return [0, *((documents[1:] != documents[:-1]).nonzero().flatten() + 1).tolist()]
        end = getattr(self._tokenizer, "eos_token_id", None)
        if end is None or isinstance(self._dataset, PairRows | DenoisedRows):
            return [0]
        return [0, *((ids[:-1] == end).nonzero().flatten() + 1).tolist()]

    def _parts(self, number: int, num_tokens: int) -> list[Excerpt] | None:
        """The documents of a sample by the cache; None where it does not say."""
        dataset = self._dataset
        if isinstance(dataset, PairRows):
            start, found = 0, []
            for pair, length, cut in dataset.pairs(number):
                found.append(Excerpt(start, self._origins.place(self._split, pair), behind=cut, is_cut=cut > 0))
                start += length
            return found
        if self._borders is None or not isinstance(dataset, PackedDataset | ConcatDataset):
            return None
        borders, spans = self._borders, [(number * dataset.seq_len, num_tokens)]
        if isinstance(dataset, PackedDataset):
            spans = dataset.table.pieces(number)
        found, at = [], 0
        for start, length in spans:
            stop = start + length
            first, last = int(borders.searchsorted(start, "right")) - 1, int(borders.searchsorted(stop)) - 1
            for document in range(first, last + 1):
                begin, end = int(borders[document]), int(borders[document + 1])
                place = self._origins.place(self._split, document)
                behind = max(end - stop, 0)
                is_cut = behind > 0 and not self._rows_of(stop, stop + 1)
                found.append(Excerpt(at + max(begin - start, 0), place, max(start - begin, 0), behind, is_cut))
            at += length
        return found

    def _rows_with(self, document: int) -> list[int]:
        """The dataset's own numbers of the samples that hold a document of the cache."""
        if isinstance(self._dataset, PairRows):
            return [number for number, row in enumerate(self._dataset.rows) if document in row]
        assert self._borders is not None
        start, stop = self._borders[document : document + 2].tolist()
        return self._rows_of(start, stop)

    def _rows_of(self, start: int, stop: int) -> list[int]:
        """Those that hold any of the tokens [start, stop) of the split."""
        dataset = self._dataset
        if isinstance(dataset, PackedDataset):
            return dataset.table.rows_with(start, stop)
        return [n for n in range(start // dataset.seq_len, -(-stop // dataset.seq_len)) if n < len(dataset)]


def _told_apart(ids: list[int], owners: list[int | None], num_pairs: int) -> dict[str, Any]:
    """``sides`` and ``differs`` of a sample; ``owners``: the document of each token."""
    differs = [False] * len(ids)
    for first in range(0, 2 * num_pairs, 2):
        begins = [owners.index(first), owners.index(first + 1)]
        one, other = (ids[begin : begin + owners.count(first + n)] for n, begin in enumerate(begins))
        for kind, *spans in SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
            for begin, (start, stop) in zip(begins, (spans[:2], spans[2:]), strict=True):
                differs[begin + start : begin + stop] = [kind != "equal"] * (stop - start)
    return {"sides": ["chosen", "rejected"] * num_pairs, "differs": differs}
