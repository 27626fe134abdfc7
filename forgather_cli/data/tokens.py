"""Token sequences on disk: memory maps of one or several files, and their document borders."""

from __future__ import annotations

import bisect
import contextlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray


class ArrayFile:
    """``length`` numbers that start ``offset`` bytes into a file. Travels to other processes as a path."""

    def __init__(self, path: Path, dtype: str, length: int, offset: int = 0) -> None:
        self.path, self.dtype, self.length, self.offset = path, dtype, length, offset

    @classmethod
    def of(cls, array: NDArray[Any]) -> ArrayFile:
        """Numbers that are in memory already."""
        made = cls(Path(), array.dtype.str, len(array))
        made.__dict__["array"] = array
        return made

    def __reduce__(self) -> Any:
        return ArrayFile, (self.path, self.dtype, self.length, self.offset)

    @cached_property
    def array(self) -> NDArray[Any]:
        """The memory map as a plain array: slicing ``np.memmap`` itself costs ten times as much."""
        if self.length == 0:
            return np.empty(0, self.dtype)
        return np.asarray(np.memmap(self.path, self.dtype, "r", self.offset, (self.length,)))


class Tokens:
    """The tokens [start, stop) of files read as one sequence."""

    def __init__(self, files: Sequence[ArrayFile], start: int = 0, stop: int | None = None) -> None:
        self.files = list(files)
        self._firsts = [0]
        for file in self.files:
            self._firsts.append(self._firsts[-1] + file.length)
        self._start = start
        self._stop = self._firsts[-1] if stop is None else stop

    def __len__(self) -> int:
        return self._stop - self._start

    def read(self, start: int, out: NDArray[np.int64]) -> None:
        """Copy the ``len(out)`` tokens from ``start`` on into ``out``.

        A copy per row beats one fancy-indexed gather of the batch, which would first build an index for every token.
        """
        start += self._start
        if len(self.files) == 1:
            out[:] = self.files[0].array[start : start + len(out)]
            return
        number, done = bisect.bisect_right(self._firsts, start) - 1, 0
        while done < len(out):
            at = start + done - self._firsts[number]
            piece = self.files[number].array[at : at + len(out) - done]
            out[done : done + len(piece)] = piece
            done += len(piece)
            number += 1


Split = Literal["train", "eval"]
SPLITS: tuple[Split, Split] = ("train", "eval")


@dataclass(frozen=True)
class TokenSplit:
    """One split of a tokenized corpus."""

    tokens: Tokens
    documents: ArrayFile | None
    """int64: where each document starts, and where the last ends; None where nothing marks documents."""
    targets: Tokens | None = None
    """uint8, of each token: 1 = a target, 0 = context. None: every token is a target."""
    first_targets: ArrayFile | None = None
    """int64, of each document: its tokens before the first target that one of them predicts, all if there is none."""
    records: ArrayFile | None = None
    """int64, of each document two: the number of its file, and of its record there, from 1. None where nobody noted it,
    and of text, of which ``Tokenized.meta`` says how many documents each piece has."""


@dataclass(frozen=True)
class Tokenized:
    """A corpus as token ids. ``meta`` holds ``{split: {tokens, documents}}`` and what is known of the origin."""

    train: TokenSplit
    eval: TokenSplit | None
    fingerprint: str
    meta: dict[str, Any]

    def splits(self) -> dict[Split, TokenSplit]:
        return {"train": self.train} if self.eval is None else {"train": self.train, "eval": self.eval}


def dtype_of(vocab_size: int) -> str:
    """The smallest type that holds the ids of a vocabulary."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def cached_tokens(directory: Path, meta: dict[str, Any], *, has_targets: bool = False) -> Tokenized:
    """A corpus in the cache; ``has_targets`` for conversations, which are trained on in part."""

    def opened(split: Split) -> TokenSplit:
        counts = meta[split]
        tokens = Tokens([ArrayFile(directory / f"{split}.bin", meta["dtype"], counts["tokens"])])
        documents = ArrayFile(directory / f"{split}.documents.bin", "int64", counts["documents"] + 1)
        if not has_targets:
            return TokenSplit(tokens, documents)
        targets = Tokens([ArrayFile(directory / f"{split}.targets.bin", "uint8", counts["tokens"])])
        first_targets = ArrayFile(directory / f"{split}.first_targets.bin", "int64", counts["documents"])
        records = ArrayFile(directory / f"{split}.records.bin", "int64", 2 * counts["documents"])
        is_noted = records.path.name in meta["files"]  # 0.3 has noted none
        return TokenSplit(tokens, documents, targets, first_targets, records if is_noted else None)

    return Tokenized(opened("train"), opened("eval") if meta["eval"]["tokens"] else None, directory.name, meta)


class TargetsWriter:
    """Appends documents to the token and target files of one split, which ``cached_tokens`` opens."""

    def __init__(self, stem: Path, dtype: str, files: contextlib.ExitStack) -> None:
        self._stem, self._dtype = stem, dtype
        self._tokens: BinaryIO = files.enter_context(stem.with_suffix(".bin").open("wb"))
        self._targets: BinaryIO = files.enter_context(stem.with_suffix(".targets.bin").open("wb"))
        self.lengths: list[int] = []  # tokens of each conversation
        self._firsts: list[int] = []
        self._records = array("q")
        self._num_targets = 0

    def add(self, ids: NDArray[Any], inside: NDArray[np.bool_], record: tuple[int, int]) -> None:
        """``record``: the numbers of its file and of its record there."""
        inside[:1] = False  # nothing predicts the first token
        self._tokens.write(ids.astype(self._dtype).data)
        self._targets.write(inside.astype(np.uint8).data)
        num_targets = int(inside.sum())
        self.lengths.append(len(ids))
        self._firsts.append(int(inside.argmax()) if num_targets else len(ids))
        self._records.extend(record)
        self._num_targets += num_targets

    def finish(self) -> dict[str, Any]:
        borders = np.cumsum(np.array([0, *self.lengths], np.int64))
        borders.tofile(self._stem.with_suffix(".documents.bin"))
        np.array(self._firsts, np.int64).tofile(self._stem.with_suffix(".first_targets.bin"))
        np.array(self._records, np.int64).tofile(self._stem.with_suffix(".records.bin"))
        return {"tokens": int(borders[-1]), "documents": len(self.lengths), "targets": self._num_targets}
