"""Where text comes from: files, the documents in them, and which of them are held out for evaluation."""

from __future__ import annotations

import glob
import hashlib
import importlib
import json
import os
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from forgather_cli.config.schema import PythonStdlibSettings, TextSettings
from forgather_cli.data.cache import Meta, digest, recall, remember_once
from forgather_cli.errors import DataError

Split = Literal["train", "eval"]
_VERSION = 1  # of the rules below that decide what a document is and where it goes
_NOT_SOURCES = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_PIECE = (
    16 << 20
)  # bytes; a longer plain text becomes several documents, cut at line borders, so that memory is bounded
_MARK = b"\xef\xbf\xbd"  # U+FFFD, what an undecodable byte sequence becomes


class Document(NamedTuple):
    name: str
    text: str
    num_bytes: int
    """Bytes of the source that it stands for, for progress."""


@dataclass
class Damage:
    """Byte sequences that are not UTF-8 and were replaced by U+FFFD."""

    count: int = 0
    files: list[str] = field(default_factory=list)

    def add(self, name: str, count: int) -> None:
        self.count += count
        if not self.files or self.files[-1] != name:
            self.files.append(name)

    def __str__(self) -> str:
        return (
            f"{self.count} undecodable byte sequences in {len(self.files)} files replaced by U+FFFD ({self.files[0]})"
        )


@dataclass(frozen=True)
class SourceFile:
    path: Path
    label: str
    """What identifies it besides its bytes: the path relative to the corpus, or the file type."""


@dataclass(frozen=True)
class Corpus:
    """The files of one data option and how they are split."""

    files: tuple[SourceFile, ...]
    eval_files: tuple[SourceFile, ...] = ()
    eval_fraction: float = 0.0
    by_name: bool = False
    """Split by the hash of a document's name instead of its text."""
    text_key: str = "text"
    origin: dict[str, str] = field(default_factory=dict)

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        return self.files + self.eval_files

    def num_bytes(self) -> int:
        return sum(source.path.stat().st_size for source in self.all_files)

    def fingerprint(self, root: Path, *, read: bool = True) -> str | None:
        """Hash of content and split rules. None if the content is not known yet and ``read`` is false.

        The content is hashed once; afterwards paths, sizes and modification times stand for it.
        """
        content = content_hash(root, self.all_files, read=read)
        rules = [_VERSION, len(self.files), self.eval_fraction, self.by_name, self.text_key]
        return None if content is None else digest([content, rules])


def content_hash(root: Path, files: Sequence[SourceFile], *, read: bool = True) -> str | None:
    """Hash of the bytes and labels of files, in order; see ``Corpus.fingerprint``. Raises DataError."""
    stats = [source.path.stat() for source in files]
    stamp = digest([[str(f.path), f.label, s.st_size, s.st_mtime_ns] for f, s in zip(files, stats, strict=True)])
    note = root / "content" / f"{stamp}.json"

    def read_all() -> Meta:
        return {"content": digest([[source.label, _file_hash(source.path)] for source in files])}

    known = remember_once(root, note, read_all) if read else recall(note)
    return None if known is None else str(known["content"])


def _file_hash(path: Path) -> str:
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, "sha256").hexdigest()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error


# ------------------------------------------------------------------------------------------------------ finding files


def find_corpus(option: PythonStdlibSettings | TextSettings) -> Corpus:
    """The files an option names. Raises DataError when a pattern matches nothing."""
    if isinstance(option, PythonStdlibSettings):
        return _stdlib(option)
    return Corpus(
        files=_typed(find_files("data.files", option.files)),
        eval_files=_typed(find_files("data.eval_files", option.eval_files)) if option.eval_files else (),
        eval_fraction=0.0 if option.eval_files else option.eval_fraction,
        text_key=option.text_key,
        origin={"files": ", ".join(option.files)},
    )


def _stdlib(option: PythonStdlibSettings) -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    found = sorted(path.relative_to(root).as_posix() for path in _python_files(root))
    if not found:
        raise DataError(f"data=python_stdlib: no Python sources in {root}; use data=text data.files=[...]")
    return Corpus(
        files=tuple(SourceFile(root / name, name) for name in found),
        eval_fraction=option.eval_fraction,
        by_name=True,
        origin={"python": platform.python_version()},
    )


def _python_files(root: Path) -> Iterator[Path]:
    for directory, children, names in os.walk(root):
        children[:] = [child for child in children if child not in _NOT_SOURCES]
        yield from (Path(directory, name) for name in names if name.endswith(".py"))


def find_files(setting: str, patterns: Sequence[str]) -> list[Path]:
    """Files that match, patterns in the order given, sorted within each, none twice. Raises DataError."""
    found: dict[Path, None] = {}
    if not patterns:
        raise DataError(f"{setting}: no files given; name files or patterns, as in {setting}=[texts/*.txt]")
    for pattern in patterns:
        matches = sorted(glob.glob(os.path.expanduser(pattern), recursive=True)) or sorted(_literal(pattern))
        files = [Path(match).resolve() for match in matches if os.path.isfile(match)]
        if not files:
            what = (
                f"{pattern!r} is a directory; write {pattern.rstrip('/')}/**/*.txt" if matches else _no_match(pattern)
            )
            raise DataError(f"{setting}: {what}")
        found.update(dict.fromkeys(files))
    return list(found)


def _literal(pattern: str) -> list[str]:
    """A file whose name holds pattern characters."""
    path = os.path.expanduser(pattern)
    return [path] if os.path.exists(path) else []


def _no_match(pattern: str) -> str:
    return f"no file matches {pattern!r} (looked in {os.getcwd()})"


def _typed(paths: Sequence[Path]) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(path, path.suffix.lower()) for path in paths)


# -------------------------------------------------------------------------------------------------- reading documents


def split_documents(corpus: Corpus, damage: Damage) -> Iterator[tuple[Split, Document]]:
    """All documents that are not empty, each with its split. Raises DataError for content that cannot be read.

    A document is held out when the hash of its text (or name) falls below ``eval_fraction``, so equal texts stay on
    one side and adding files moves none. The first always trains. Where none is held out (few documents, or one), the
    end of the last is.
    """
    if corpus.eval_files or not corpus.eval_fraction:
        yield from (("train", document) for document in _read(corpus.files, corpus.text_key, damage))
        yield from (("eval", document) for document in _read(corpus.eval_files, corpus.text_key, damage))
        return
    last: Document | None = None
    num_eval = num_chars = 0
    for number, document in enumerate(_read(corpus.files, corpus.text_key, damage)):
        if last is not None:
            yield "train", last
        num_chars += len(document.text)
        key = document.name if corpus.by_name else document.text
        held_out = _share(key) < corpus.eval_fraction and (number > 0 or corpus.eval_fraction == 1)
        last = None if held_out else document
        if held_out:
            num_eval += 1
            yield "eval", document
    if last is not None:
        tail = 0 if num_eval else max(1, round(corpus.eval_fraction * num_chars))
        yield from _cut(last, tail)


def _share(key: str) -> float:
    """A number in [0, 1) that depends on nothing but ``key``."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") / 2**64


def _cut(document: Document, num_chars: int) -> list[tuple[Split, Document]]:
    """A document in two at a line border, the second about ``num_chars`` long, at most half of it; whole for 0."""
    text = document.text
    where = len(text) - min(num_chars, len(text) // 2)
    if where == len(text):
        return [("train", document)]
    border = text.find("\n", where - 1) + 1
    where = border if 0 < border < len(text) else where
    head, tail = text[:where], text[where:]
    return [("train", document._replace(text=head)), ("eval", Document(document.name, tail, 0))]


def _read(files: Sequence[SourceFile], text_key: str, damage: Damage) -> Iterator[Document]:
    for source in files:
        suffix = source.path.suffix.lower()
        try:
            if suffix == ".jsonl":
                documents = _jsonl(source.path, text_key, damage)
            elif suffix == ".parquet":
                documents = _parquet(source.path, text_key)
            else:
                documents = _plain(source, damage)
            yield from (document for document in documents if document.text)
        except OSError as error:
            raise DataError(f"{source.path}: cannot be read ({error.strerror or error})") from error


def _plain(source: SourceFile, damage: Damage) -> Iterator[Document]:
    with source.path.open("rb") as handle:
        start = 0
        while data := handle.read(_PIECE):
            if len(data) == _PIECE:
                data += handle.readline()
            if start == 0 and b"\0" in data[:8192]:
                raise DataError(f"{source.path}: not text; give txt, md, jsonl or parquet files")
            name = f"{source.label}:{start}" if start else source.label
            yield Document(name, _decode(data, source.path, damage), len(data))
            start += len(data)


def _decode(data: bytes, path: Path, damage: Damage) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        damage.add(str(path), text.count("\ufffd") - data.count(_MARK))
    return text.removeprefix("\ufeff")


def _jsonl(path: Path, key: str, damage: Damage) -> Iterator[Document]:
    with path.open("rb") as handle:
        for number, line in enumerate(handle, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(_decode(line, path, damage))
            except ValueError as error:
                raise DataError(f"{path}:{number}: not a JSON line ({error}); mend or remove it") from error
            yield Document(f"{path}:{number}", _text_of(record, key, path, number), len(line))


def _text_of(record: Any, key: str, path: Path, number: int) -> str:
    if not isinstance(record, dict):
        raise DataError(f"{path}:{number}: expected a JSON object, got {type(record).__name__}")
    if key not in record:
        keys = ", ".join(map(str, record)) or "none"
        raise DataError(f"{path}:{number}: no key {key!r} (its keys: {keys}); set data.text_key")
    text = record[key]
    if not isinstance(text, str):
        raise DataError(f"{path}:{number}: {key!r} is {type(text).__name__}, not text; set data.text_key")
    return text.encode("utf-8", "replace").decode()  # JSON can spell half a surrogate pair, UTF-8 cannot


def _parquet(path: Path, key: str) -> Iterator[Document]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: parquet needs the package pyarrow; pip install 'forgather[parquet]'") from error
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        if key not in names:
            raise DataError(f"{path}: no column {key!r} (its columns: {', '.join(names)}); set data.text_key")
        row = 0
        for batch in table.iter_batches(columns=[key], batch_size=1024):
            for text in batch.column(0).to_pylist():
                row += 1
                if text is None:
                    continue
                if not isinstance(text, str):
                    raise DataError(f"{path}: column {key!r} holds {type(text).__name__}, not text; set data.text_key")
                yield Document(f"{path}:{row}", text, len(text))
    except importlib.import_module("pyarrow").ArrowInvalid as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
