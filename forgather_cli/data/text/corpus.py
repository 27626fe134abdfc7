"""Where text comes from: files, the documents in them, and which of them are held out for evaluation."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from forgather_cli.data.cache import Cache, Meta, digest
from forgather_cli.data.text import read
from forgather_cli.data.text.compressed import check_archives
from forgather_cli.data.text.read import Damage, Document, SourceFile, codec_of, kind_of, parts_of, read_documents
from forgather_cli.data.tokens import Split
from forgather_cli.documents.regular_files import RECORDS, open_file
from forgather_cli.errors import DataError

if TYPE_CHECKING:  # processes that tokenize need this module and no settings, whose import takes as long as theirs
    from forgather_cli.config.schema import InstructSettings, PythonStdlibSettings, Seq2SeqSettings, TextSettings

_VERSION = 2  # of the rules below that decide what a document is and where it goes
_MANY = 20_000  # files; of more no single one is remembered
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


class CorpusPiece(NamedTuple):
    """Documents of a corpus that are read together: consecutive parts of its files, or rows of a table."""

    parts: list[Any]
    is_eval: bool
    """They are held out, since the files are."""
    num_bytes: int
    """Of the source, for progress."""


class Documents(Protocol):
    """What is tokenized: documents in pieces, each of which any process can read alone."""

    @property
    def origin(self) -> dict[str, str]:
        """Where they come from, for logs."""

    @property
    def names(self) -> Sequence[Path | str]:
        """The files that documents are in, by the first number of a piece's parts; or the names of splits, by the first
        number of a document's name, whose second one is its row."""

    @property
    def eval_fraction(self) -> float:
        """Fraction of the documents to hold out; 0 where none is, or whole files are."""

    @property
    def by_name(self) -> bool:
        """Split by the hash of a document's name instead of its text."""

    def content(self, cache: Cache) -> str:
        """Hash of the content; it is read once, and the hash is reused while the source's identity stays the same."""

    def fingerprint(self, cache: Cache) -> str:
        """Hash of content and split rules."""

    def pieces(self) -> list[CorpusPiece]:
        """All documents in order. Equal content is cut in equal pieces."""

    def read(self, piece: CorpusPiece, damage: Damage) -> Iterator[Document]:
        """The documents of a piece that are not empty. Raises DataError for content that cannot be read."""

    def nothing(self) -> DataError:
        """The error of a corpus without a document to train on."""


@dataclass(frozen=True)
class Corpus:
    """The files of one data option and how they are split.

    Without ``eval_files`` a share of the documents is held out, drawn by their text, or by their names (``by_name``).
    ``origin`` is what the cache says it was made of.
    """

    files: tuple[SourceFile, ...]
    eval_files: tuple[SourceFile, ...] = ()
    eval_fraction: float = 0.0
    by_name: bool = False
    text_key: str = "text"
    skip_bad: bool = False
    origin: dict[str, str] = field(default_factory=dict)

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        return self.files + self.eval_files

    @property
    def names(self) -> Sequence[Path | str]:
        return [source.path for source in self.all_files]

    def content(self, cache: Cache) -> str:
        return content_hash(cache, self.all_files)

    def fingerprint(self, cache: Cache) -> str:
        rules = [_VERSION, len(self.files), self.eval_fraction, self.by_name, self.text_key]
        return digest([self.content(cache), [*rules, "skip"] if self.skip_bad else rules])

    def pieces(self) -> list[CorpusPiece]:
        """Small files are joined to 16 MiB, long ones are cut."""
        found: list[CorpusPiece] = []
        for number, source in enumerate(self.all_files):
            is_eval = number >= len(self.files)
            for part in parts_of(source.path):
                if not found or found[-1].is_eval != is_eval or found[-1].num_bytes + part.num_bytes > read.PIECE:
                    found.append(CorpusPiece([], is_eval, 0))
                found[-1].parts.append((number, part))
                found[-1] = found[-1]._replace(num_bytes=found[-1].num_bytes + part.num_bytes)
        return found

    def read(self, piece: CorpusPiece, damage: Damage) -> Iterator[Document]:
        for number, part in piece.parts:
            yield from read_documents(self.all_files[number], self.text_key, damage, part, skip_bad=self.skip_bad)

    def nothing(self) -> DataError:
        names = ", ".join(str(source.path) for source in self.files[:3])
        return DataError(f"data.files: no text in {len(self.files)} files ({names}); they are empty")


def content_hash(cache: Cache, files: Sequence[SourceFile]) -> str:
    """Hash of the bytes and labels of files, in order. Raises DataError.

    The files are read once; the hash is reused while paths, inodes, sizes and times stay the same. ``cache.files`` gets
    those of each.
    """

    def file_hash(source: SourceFile) -> str:
        try:
            with open_file(source.path) as handle:
                return hashlib.file_digest(handle, "sha256").hexdigest()
        except OSError as error:
            raise DataError(f"{source.path}: cannot be read ({error.strerror})") from error

    def read_all() -> Meta:
        with ThreadPoolExecutor(min(available_cores(), 8)) as threads:  # hashing runs without the interpreter's lock
            hashes = list(threads.map(file_hash, files))
        content = digest([[source.label, each] for source, each in zip(files, hashes, strict=True)])
        return {"content": content, "files": [each[:16] for each in hashes] if len(files) <= _MANY else []}

    stamp = digest([[source.label, *stamp_of(source.path)] for source in files])
    found = cache.remember_once("content", stamp, read_all)
    hashes = found.get("files") or [""] * len(files)  # before 0.3 the hash of all of them was kept alone
    cache.files |= {str(source.path): str(each) for source, each in zip(files, hashes, strict=False)}
    return str(found["content"])


def stamp_of(path: Path) -> list[Any]:
    """Values that change whenever a file's content does.

    Size and modification time do not: ``cp -p``, ``rsync -t`` and ``tar`` keep them, but none keeps inode and ctime.
    """
    stat = path.stat()
    return [str(path), stat.st_size, stat.st_mtime_ns, stat.st_ino, stat.st_ctime_ns]


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ------------------------------------------------------------------------------------------------------ finding files


def find_corpus(option: PythonStdlibSettings | TextSettings) -> Corpus:
    """The files an option names. Raises DataError when a pattern matches nothing."""
    if option.type == "python_stdlib":
        return _stdlib(option)
    return Corpus(
        files=_typed(find_files("data.files", option.files)),
        eval_files=_typed(find_files("data.eval_files", option.eval_files)) if option.eval_files else (),
        eval_fraction=0.0 if option.eval_files else option.eval_fraction,
        text_key=option.text_key,
        skip_bad=option.on_bad_row == "skip",
        origin={"files": ", ".join(option.files)},
    )


def _stdlib(option: PythonStdlibSettings) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    found: list[str] = []
    for directory, children, names in os.walk(root):
        children[:] = [child for child in children if child not in _NOT_SOURCES]
        found += [Path(directory, name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    if not found:
        raise DataError(f"data=python_stdlib: no Python sources in {root}; use data=text data.files=[...]")
    return Corpus(
        files=tuple(SourceFile(root / name, name) for name in sorted(found)),
        eval_fraction=option.eval_fraction,
        by_name=True,
        origin={"python": platform.python_version()},
    )


def find_files(setting: str, patterns: Sequence[str]) -> list[Path]:
    """Files that match, patterns in the order given, sorted within each, none twice. Raises DataError."""
    found: dict[Path, None] = {}
    if not patterns:
        raise DataError(f"{setting}: no files given; name files or patterns, as in {setting}=[texts/*.txt]")
    for pattern in patterns:
        path = os.path.expanduser(pattern)
        # a file's own name may hold pattern characters
        matches = sorted(glob.glob(path, recursive=True)) or ([path] if os.path.exists(path) else [])
        files = [Path(match).resolve() for match in matches if os.path.isfile(match)]
        if not files and any(map(os.path.isdir, matches)):
            raise DataError(f"{setting}: {pattern!r} is a directory; write {pattern.rstrip('/')}/**/*.txt")
        if not files and matches and not os.path.exists(matches[0]):
            raise DataError(f"{setting}: {matches[0]!r} links to {os.readlink(matches[0])!r}, which is gone; mend it")
        if not files and matches:
            raise DataError(
                f"{setting}: {pattern!r} is a pipe or a device, which can be read only once, and data is read to be "
                "hashed and again to be tokenized; write it to a file and name that"
            )
        if not files:
            raise DataError(
                f"{setting}: no file matches {pattern!r} (looked in {os.getcwd()}); give files that are there, or "
                "their full paths"
            )
        found.update(dict.fromkeys(files))
    check_archives(found)
    return list(found)


def find_records(option: InstructSettings | Seq2SeqSettings) -> tuple[tuple[SourceFile, ...], tuple[SourceFile, ...]]:
    """The files of an option, and those of evaluation. Raises DataError when a pattern matches nothing."""
    train = tuple(SourceFile(path, kind_of(path)) for path in find_files("data.files", option.files))
    evaluation = find_files("data.eval_files", option.eval_files) if option.eval_files else ()
    return train, tuple(SourceFile(path, kind_of(path)) for path in evaluation)


def _typed(paths: Sequence[Path]) -> tuple[SourceFile, ...]:
    # " records": plain text for 0.1.0 (json) and until 0.3 (csv), and what was cached of them is not what they mean
    once_text = set(RECORDS) - {".jsonl", ".parquet"}
    return tuple(
        SourceFile(path, kind_of(path) + codec_of(path) + " records" * (kind_of(path) in once_text)) for path in paths
    )


# -------------------------------------------------------------------------------------------------- reading documents


def split_documents(corpus: Documents, damage: Damage) -> Iterator[tuple[Split, Document]]:
    """All documents that are not empty, each with its split. Raises DataError for content that cannot be read.

    A document is held out when the hash of its text (or name) falls below ``eval_fraction``, so equal texts stay on
    one side and adding files moves none. The first always trains. Where none is held out (few documents, or one), the
    end of the last is.
    """
    last: Document | None = None
    num_eval = num_chars = number = 0
    for piece in corpus.pieces():
        for document in corpus.read(piece, damage):
            if last is not None:
                yield "train", last
            num_chars += len(document.text)
            held_out = piece.is_eval or is_held_out(corpus, document, is_first=number == 0)
            number += 1
            last = None if held_out else document
            if held_out:
                num_eval += 1
                yield "eval", document
    if last is not None:
        yield from cut_last(corpus, last, num_chars, any_held_out=num_eval > 0)


def is_held_out(corpus: Documents, document: Document, *, is_first: bool) -> bool:
    """``is_first``: it is the first document of all."""
    if is_first and corpus.eval_fraction < 1:
        return False
    return held_out_share(document.name if corpus.by_name else document.text) < corpus.eval_fraction


def cut_last(corpus: Documents, last: Document, num_chars: int, *, any_held_out: bool) -> list[tuple[Split, Document]]:
    """The last document of a corpus of ``num_chars`` characters, with its split, if it is not held out.

    Where no other document is held out, its end is: about ``eval_fraction`` of all characters and at most half of the
    document, cut at a line border.
    """
    if not corpus.eval_fraction or any_held_out:
        return [("train", last)]
    text = last.text
    where = len(text) - min(max(1, round(corpus.eval_fraction * num_chars)), len(text) // 2)
    if where == len(text):
        return [("train", last)]
    border = text.find("\n", where - 1) + 1
    where = border if 0 < border < len(text) else where
    return [("train", last._replace(text=text[:where])), ("eval", Document(last.name, text[where:], 0))]


def held_out_share(key: str) -> float:
    """A number in [0, 1) that depends on nothing but ``key``; a document is held out below ``eval_fraction``."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64


class Splittable(Protocol):
    """A record of a file."""

    key: str
    """What decides its split: equal records have equal keys."""
    split: Split


_Record = TypeVar("_Record", bound=Splittable)


def with_splits(records: Iterable[_Record], held_out: Iterable[_Record], eval_fraction: float) -> Iterator[_Record]:
    """All records, each with its split: held out when the hash of its key falls below ``eval_fraction``, so equal ones
    stay on one side and adding files moves none. The first always trains, and those that equal it. Where none is held
    out, the last is, if there are two. ``held_out``: those of files of their own."""
    last: _Record | None = None
    first = None if eval_fraction < 1 else ""
    any_trained = any_held_out = False
    for each in records:
        if last is not None:
            any_trained = True
            yield last
        first = each.key if first is None else first
        is_out = held_out_share(each.key) < eval_fraction and each.key != first
        last = None if is_out else each
        if is_out:
            any_held_out = True
            each.split = "eval"
            yield each
    if last is not None:
        last.split = "eval" if eval_fraction and any_trained and not any_held_out else "train"
        yield last
    for each in held_out:
        each.split = "eval"
        yield each
