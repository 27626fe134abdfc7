"""Tokenizes a corpus into the token cache: per split a token file and a file of document borders. A build that was
killed is resumed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from forgather_cli.data.cache import Cache, Meta, Meter, digest
from forgather_cli.data.text.corpus import CorpusPiece, Documents, available_cores, cut_last, split_documents
from forgather_cli.data.text.encode import DocumentEncoder, EncodedPiece, TokenizerWorkers
from forgather_cli.data.text.read import Damage
from forgather_cli.data.text.tokenizer import FileTokenizer, Tokenizer, add_to_directory, around_documents, train_bpe
from forgather_cli.data.tokens import SPLITS, Split, Tokenized, cached_tokens, dtype_of
from forgather_cli.documents.regular_files import write_whole
from forgather_cli.errors import DataError
from forgather_cli.terminal.bars import Bar

_VERSION = 2  # of the files below
_WORTH_PROCESSES = 64 << 20  # bytes of text; less is done before processes have started
_MOST_PROCESSES = 16  # unless more are asked for: each takes some 300 MB
_CANNOT_COPY = (None, errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # None: not on this system
_log = logging.getLogger(__name__)


def trained_bpe(*corpora: Documents, vocab_size: int, cache: Cache, chats: Sequence[Any] = ()) -> Path:
    """The directory of the BPE tokenizer of corpora, trained on their training documents if it is not in the cache.
    ``chats``: ``Chats`` that are read with them, whose markers become tokens."""

    def write(temporary: Path) -> Meta:
        shown = cache.progress is not None

        def texts() -> Iterator[str]:
            with Bar("tokenizer: reading", "bytes", shown=shown) as bar:
                meter = Meter(bar.update, sum(_num_bytes(corpus.pieces()) for corpus in corpora))
                for corpus in corpora:
                    for split, document in split_documents(corpus, Damage()):
                        if split == "train":
                            yield document.text
                        meter.add(document.num_bytes)
                for each in chats:
                    yield from each.texts()
            merging.update(0, None)

        with Bar(f"tokenizer: finding {vocab_size:,} tokens", None, after=0.0, shown=shown) as merging:
            train_bpe(texts(), vocab_size, temporary)
        if chats:
            add_to_directory(temporary, [(marker, True) for marker in chats[0].added])
        return {"corpus": corpora[0].origin} if corpora else {}

    key = digest([_VERSION, *(each.fingerprint(cache) for each in (*corpora, *chats)), vocab_size])
    return cache.build_once("tokenizers", key, write)[0]


def kept_tokenizer(directory: Path, cache: Cache) -> Path:
    """A copy in the cache of a checkpoint's tokenizer: they go, and later ones take its files. Raises DataError."""
    tokenizer = FileTokenizer(directory)

    def write(temporary: Path) -> Meta:
        tokenizer.save(temporary)
        return {}

    return cache.build_once("tokenizers", digest(["kept", tokenizer.fingerprint]), write)[0]


def tokenize_corpus(
    corpus: Documents, tokenizer: Tokenizer, cache: Cache, *, processes: int | None = None
) -> Tokenized:
    """The tokens of a corpus, from the cache or made now. Raises DataError for a corpus without text.

    A build that was killed is resumed. ``processes`` encode at once; None: as many as there are cores, where
    there is enough to do. Their number changes no byte of the result.
    """

    def write(temporary: Path) -> Meta:
        made = _write(temporary, corpus, tokenizer, cache, processes) | {"content": corpus.content(cache)}
        if tokenizer.prefix_tokens and cache.find("tokens", before):
            same = "are the same as before" if made["formerly"] else "differ: some texts spell it"
            _log.warning(
                "data.tokenizer: a begin token that a text spells stands there once now; tokens were made anew, and %s",
                same,
            )
        return made | {"formerly": before if made["formerly"] else None}

    rules = [_VERSION, corpus.fingerprint(cache), tokenizer.fingerprint]
    before = digest(rules)  # the key that versions before 0.3 have given them
    key = digest([*rules, "a prefix once"]) if tokenizer.prefix_tokens else before
    return cached_tokens(*cache.build_once("tokens", key, write, resumable=True))


def _write(directory: Path, corpus: Documents, tokenizer: Tokenizer, cache: Cache, processes: int | None) -> Meta:
    """Tokenize a corpus into ``directory``, which may hold the files of a killed build to resume."""
    dtype = dtype_of(tokenizer.vocab_size)
    pieces = corpus.pieces()
    some = (islice(corpus.read(piece, Damage()), 4) for piece in pieces[:: 1 + len(pieces) // 8])
    tokenizer.prepare(document.text[:10_000] for documents in some for document in documents)
    encoder = DocumentEncoder(corpus, tokenizer, around_documents(tokenizer), dtype)
    files = TokenFiles(directory, digest([_VERSION, "documents of pieces", pieces]), dtype)
    journal = files.journal
    try:
        meter = Meter(cache.progress, _num_bytes(pieces), _num_bytes(pieces[: journal.done]))
        _encode(encoder, pieces, files, directory, meter, processes)
        meter.end()
        if corpus.eval_fraction and not journal.documents["eval"] and journal.last >= 0:
            # a fraction is asked for and no document was held out: hold out the end of the last
            *_, last = corpus.read(pieces[journal.last], Damage())
            files.drop_last("train")
            made = EncodedPiece()
            for split, document in cut_last(corpus, last, journal.chars, any_held_out=False):
                encoder.write(tokenizer.encode_arrays([document.text]), split, files.outputs[split], made)
            files.commit(made)
    finally:
        files.close()
    if not journal.tokens["train"]:
        if journal.tokens["eval"] and corpus.eval_fraction:
            raise DataError(f"data.eval_fraction: {corpus.eval_fraction} leaves nothing to train on; lower it")
        raise corpus.nothing()
    files.finish()
    damage = journal.damage.lines()
    for line in damage.values():
        _log.warning("%s", line)
    counts: Meta = {name: {"tokens": journal.tokens[name], "documents": journal.documents[name]} for name in SPLITS}
    more: Meta = {"pieces": journal.of_pieces, "origin": corpus.origin, "formerly": not journal.num_spelled}
    return {"dtype": dtype, **counts, **more, **damage}


def _encode(
    encoder: DocumentEncoder,
    pieces: Sequence[CorpusPiece],
    files: TokenFiles,
    directory: Path,
    meter: Meter,
    processes: int | None,
) -> None:
    """Encode the pieces that are not done, here or in processes."""

    def encode_here(piece: CorpusPiece) -> None:
        files.commit(encoder.encode(piece, files.outputs, meter.add, is_first=files.journal.last < 0))

    first = files.journal.done
    if processes is None:
        enough = _num_bytes(pieces[first:]) >= _WORTH_PROCESSES
        processes = min(available_cores(), _MOST_PROCESSES) if enough else 1
    processes = min(processes, len(pieces) - first)
    if processes <= 1:
        for piece in pieces[first:]:
            encode_here(piece)
        return
    with TokenizerWorkers(processes, encoder, pieces, directory) as workers:
        for made, paths in workers.encode(first, meter.add):
            if made.assumed_later and files.journal.last < 0:  # no piece before had a document: encode it as the first
                for path in paths.values():
                    path.unlink()
                encode_here(pieces[files.journal.done])
            else:
                files.append(paths)
                files.commit(made)


def _num_bytes(pieces: Sequence[CorpusPiece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


# ---------------------------------------------------------------------------------------------------------- token files


@dataclass
class Journal:
    """How far token files have grown, in whole pieces: bytes after these sizes are of a piece that was not finished."""

    plan: str
    """Stands for the pieces and their order."""
    done: int = 0
    """Pieces."""
    last: int = -1
    """Number of the last piece with documents."""
    tokens: dict[Split, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    documents: dict[Split, int] = field(default_factory=lambda: {"train": 0, "eval": 0})
    of_pieces: dict[Split, list[int]] = field(default_factory=lambda: {"train": [], "eval": []})
    """The documents of each piece. An end of the last document that is held out counts as a piece of its own."""
    chars: int = 0
    num_spelled: int = 0
    damage: Damage = field(default_factory=Damage)

    def add(self, made: EncodedPiece) -> None:
        for split in SPLITS:
            self.tokens[split] += sum(int(each.sum()) for each in made.lengths[split])
            self.documents[split] += (found := sum(map(len, made.lengths[split])))
            self.of_pieces[split].append(found)
            if any(map(len, made.lengths[split])):
                self.last = self.done
        self.done += 1
        self.chars += made.num_chars
        self.num_spelled += made.num_spelled
        self.damage.join(made.damage)


class TokenFiles:
    """The token files of a corpus in a directory while they grow: ``<split>.bin``, ``<split>.lengths`` and a journal.

    Files that a killed process has left are continued if they were made by the same plan.
    """

    def __init__(self, directory: Path, plan: str, dtype: str) -> None:
        self._directory, self._itemsize = directory, np.dtype(dtype).itemsize
        self.journal = self._recalled(plan) or Journal(plan)
        for stale in (*directory.glob("pieces-*"), *directory.glob(".journal*")):
            stale.unlink()
        self._lengths: dict[Split, BinaryIO] = {split: self._open(split, ".lengths") for split in SPLITS}
        self.outputs: dict[Split, BinaryIO] = {split: self._open(split, ".bin") for split in SPLITS}

    def _sizes(self, journal: Journal, split: Split) -> dict[str, int]:
        return {".bin": journal.tokens[split] * self._itemsize, ".lengths": journal.documents[split] * 8}

    def _recalled(self, plan: str) -> Journal | None:
        try:
            found = json.loads((self._directory / "journal.json").read_text())
            journal = Journal(**{**found, "damage": Damage(**found["damage"])})
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

    def commit(self, made: EncodedPiece) -> None:
        """Make a piece's tokens, which are written, durable: from now on they survive a crash of process or machine."""
        for split in SPLITS:
            for lengths in made.lengths[split]:
                self._lengths[split].write(lengths.data)
        self.journal.add(made)
        for handle in (*self.outputs.values(), *self._lengths.values()):
            handle.flush()
            os.fsync(handle.fileno())
        write_whole(self._directory / "journal.json", json.dumps(asdict(self.journal)))

    def drop_last(self, split: Split) -> None:
        """Take the last document away."""
        lengths = self._lengths[split]
        lengths.flush()
        lengths.seek(-8, os.SEEK_END)
        self.journal.tokens[split] -= int.from_bytes(lengths.read(8), "little")
        self.journal.documents[split] -= 1
        self.journal.of_pieces[split][self.journal.last] -= 1
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
