"""Documents to token files: pieces encoded by any process, joined in order in files that outlive a killed build."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.text.corpus import Documents, Piece, is_held_out
from forgather_cli.data.text.read import Damage, chunks
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.data.tokens import SPLITS, Split

_CANNOT_COPY = (None, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # None: not on this system
Outputs = Mapping[Split, BinaryIO]
Ints = NDArray[np.int64]


@dataclass
class Encoded:
    """What is known of a piece besides its tokens, which are in the files of its splits."""

    lengths: dict[Split, list[Ints]] = field(default_factory=lambda: {"train": [], "eval": []})
    """Tokens of each document, its end token included."""
    num_chars: int = 0
    damage: Damage = field(default_factory=Damage)
    assumed_later: bool = False
    """Its first document is held out, which is right only if a piece before it has documents: the very first one of a
    corpus always trains."""


@dataclass(frozen=True)
class Encoder:
    """How the documents of a corpus become tokens. Travels to other processes."""

    corpus: Documents
    tokenizer: Tokenizer
    end: int
    """Token that follows each document."""
    dtype: str

    def encode(
        self, piece: Piece, outputs: Outputs, report: Callable[[int], None], *, is_first: bool = False
    ) -> Encoded:
        """Write the tokens of a piece; ``report`` gets the bytes of the source that are done. ``is_first``: no
        document is before."""
        made = Encoded()
        for chunk in chunks(self.corpus.read(piece, made.damage), report):
            arrays = self.tokenizer.encode_arrays([document.text for document in chunk])
            taken: dict[Split, list[NDArray[Any]]] = {"train": [], "eval": []}
            for document, ids in zip(chunk, arrays, strict=True):
                first_here = made.num_chars == 0
                held_out = piece.is_eval or is_held_out(self.corpus, document, is_first=is_first and first_here)
                made.assumed_later |= held_out and first_here and not piece.is_eval and self.corpus.eval_fraction < 1
                made.num_chars += len(document.text)
                taken["eval" if held_out else "train"].append(ids)
            for split in SPLITS:
                made.lengths[split].append(self.write(taken[split], outputs[split]))
        return made

    def write(self, documents: Sequence[NDArray[Any]], output: BinaryIO) -> Ints:
        """Append documents, each with its end token; their lengths."""
        lengths = np.array([len(ids) + 1 for ids in documents], np.int64)
        out = np.empty(int(lengths.sum()), self.dtype)
        start = 0
        for ids in documents:
            out[start : start + len(ids)] = ids
            start += len(ids) + 1
            out[start - 1] = self.end
        output.write(out.data)
        return lengths


@dataclass
class Journal:
    """How far token files have grown. Sizes are of whole pieces: what lies behind them is of one that was not done."""

    plan: str
    """Stands for the pieces and their order."""
    done: int = 0
    """Pieces."""
    last: int = -1
    """Number of the last piece with documents."""
    tokens: dict[Split, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    documents: dict[Split, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    chars: int = 0
    replaced: int = 0
    replaced_in: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def damage(self) -> Damage:
        return Damage(self.replaced, self.replaced_in, self.skipped)

    def add(self, made: Encoded) -> None:
        for split in SPLITS:
            self.tokens[split] += sum(int(each.sum()) for each in made.lengths[split])
            self.documents[split] += sum(map(len, made.lengths[split]))
            if any(map(len, made.lengths[split])):
                self.last = self.done
        self.done += 1
        self.chars += made.num_chars
        self.replaced += made.damage.count
        self.skipped += made.damage.skipped
        self.replaced_in += [name for name in made.damage.files if name not in self.replaced_in[-1:]]


class TokenFiles:
    """The token files of a corpus in a directory while they grow: ``<split>.bin``, ``<split>.lengths`` and a journal.

    What a killed process has left is resumed if it was made by the same plan.
    """

    def __init__(self, directory: Path, plan: str, dtype: str) -> None:
        self._directory, self._itemsize = directory, np.dtype(dtype).itemsize
        self.journal = self._recalled(plan) or Journal(plan)
        for stale in directory.glob("pieces-*"):
            stale.unlink()
        self._lengths: dict[Split, BinaryIO] = {split: self._open(split, ".lengths") for split in SPLITS}
        self.outputs: dict[Split, BinaryIO] = {split: self._open(split, ".bin") for split in SPLITS}

    def _sizes(self, journal: Journal, split: Split) -> dict[str, int]:
        return {".bin": journal.tokens[split] * self._itemsize, ".lengths": journal.documents[split] * 8}

    def _recalled(self, plan: str) -> Journal | None:
        try:
            journal = Journal(**json.loads((self._directory / "journal.json").read_text()))
            whole = all(
                (self._directory / f"{split}{kind}").stat().st_size >= size
                for split in SPLITS
                for kind, size in self._sizes(journal, split).items()
            )
        except (OSError, ValueError, TypeError, KeyError):
            return None
        return journal if whole and journal.plan == plan else None

    def _open(self, split: Split, kind: str) -> BinaryIO:
        path = self._directory / f"{split}{kind}"
        path.touch()
        handle = path.open("r+b")
        handle.truncate(self._sizes(self.journal, split)[kind])
        handle.seek(0, os.SEEK_END)
        return handle

    def append(self, files: Mapping[Split, Path]) -> None:
        """Append tokens that another process has written, and remove its files."""
        for split, path in files.items():
            with path.open("rb") as source:
                _copy(source, self.outputs[split])
            path.unlink()

    def commit(self, made: Encoded) -> None:
        """A piece's tokens are written: from now on they stay, whatever happens to this process or machine."""
        for split in SPLITS:
            for lengths in made.lengths[split]:
                self._lengths[split].write(lengths.data)
        self.journal.add(made)
        for handle in (*self.outputs.values(), *self._lengths.values()):
            handle.flush()
            os.fsync(handle.fileno())
        temporary = self._directory / "journal.json.tmp"
        temporary.write_text(json.dumps(self.journal.__dict__))
        temporary.replace(self._directory / "journal.json")

    def drop_last(self, split: Split) -> None:
        """Take the last document away."""
        lengths = self._lengths[split]
        lengths.flush()
        lengths.seek(-8, os.SEEK_END)
        self.journal.tokens[split] -= int.from_bytes(lengths.read(8), "little")
        self.journal.documents[split] -= 1
        for handle, kind in ((lengths, ".lengths"), (self.outputs[split], ".bin")):
            handle.truncate(self._sizes(self.journal, split)[kind])
            handle.seek(0, os.SEEK_END)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:  # on a full disk each of them raises
            for handle in (*self.outputs.values(), *self._lengths.values()):
                stack.callback(handle.close)

    def finish(self) -> None:
        """Leave the tokens, and where each document starts (``<split>.documents.bin``), alone in the directory."""
        self.close()
        for split in SPLITS:
            lengths = self._directory / f"{split}.lengths"
            end = np.zeros(1, np.int64)
            with lengths.open("rb") as source, (self._directory / f"{split}.documents.bin").open("wb") as target:
                target.write(end.data)
                while data := source.read(8 << 17):
                    offsets = np.cumsum(np.frombuffer(data, np.int64)) + end
                    target.write(offsets.data)
                    end = offsets[-1:]
            lengths.unlink()
        (self._directory / "journal.json").unlink()


def _copy(source: BinaryIO, target: BinaryIO) -> None:
    """Append a file to another: in the kernel where it can, in half the time."""
    target.flush()
    try:
        while os.copy_file_range(source.fileno(), target.fileno(), 1 << 30):
            continue
    except (AttributeError, OSError) as error:
        if getattr(error, "errno", None) not in _CANNOT_COPY:
            raise
        shutil.copyfileobj(source, target, 1 << 20)
    target.seek(0, os.SEEK_END)
