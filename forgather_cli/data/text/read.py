"""What lies in text files: documents and records of txt, md, jsonl, json, csv, tsv (plain or compressed) and parquet.

Files are read as streams, a piece at a time. A long plain file can be read by ranges of bytes, a parquet file by ranges
of row groups, and gives the same documents as when it is read whole.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from forgather_cli.data.text.compressed import CODECS, Opened, opened
from forgather_cli.documents.json_and_yaml import check_text, parse_json
from forgather_cli.documents.regular_files import GIVE_RECORDS, MAX_BYTES, RECORDS, SEPARATORS, not_utf8, open_file
from forgather_cli.errors import DataError

_CHUNK = 1 << 20  # characters that are encoded at once
PIECE = 16 << 20  # bytes; a longer plain text becomes several documents, cut at line borders: memory is bounded
_BOM = b"\xef\xbb\xbf"  # a text may begin with, on a line of its own too
_MARK = b"\xef\xbf\xbd"  # U+FFFD, what an undecodable byte sequence becomes


class Document(NamedTuple):
    name: str
    text: str
    num_bytes: int
    """Bytes of the source that it stands for, for progress."""


def text_remedy(keys: Iterable[str]) -> str:
    """What to do where the key of the text is not among those of a record."""
    chats = {"messages", "conversations", "prompt", "instruction"}.intersection(keys)
    return f"chats ({min(chats)}) are read by data=instruct" if chats else "set data.text_key"


class HasText(Protocol):
    """A document, or what else is encoded by itself."""

    @property
    def text(self) -> str: ...

    @property
    def num_bytes(self) -> int:
        """Bytes of the source that it stands for, for progress."""


_Text = TypeVar("_Text", bound=HasText)
_Row = TypeVar("_Row")


class Record(NamedTuple):
    """A JSON object of a jsonl or json file, or a row of a table."""

    line: int
    """Or the number of the record, from 1."""
    value: dict[str, Any]
    num_bytes: int
    """Bytes of the source that it stands for, for progress."""


@dataclass
class Damage:
    """What was not as it should be and was read all the same: byte sequences that are not UTF-8, which U+FFFD replaces,
    and bad rows that ``data.on_bad_row=skip`` leaves out."""

    replaced: dict[str, int] = field(default_factory=dict)
    """File -> its byte sequences that were replaced."""
    skipped: list[str] = field(default_factory=list)
    """Bad rows that were left out, each with its place and what is wrong with it."""

    def add(self, name: str, count: int) -> None:
        self.replaced[name] = self.replaced.get(name, 0) + count

    def join(self, other: Damage) -> None:
        for name, count in other.replaced.items():
            self.add(name, count)
        self.skipped += other.skipped

    def lines(self) -> dict[str, str]:
        """What there is to say of it, by kind; nothing where all was sound."""
        found: dict[str, str] = {}
        if count := sum(self.replaced.values()):
            where = f"{len(self.replaced)} files replaced by U+FFFD ({next(iter(self.replaced))})"
            found["replaced"] = f"{count} undecodable byte sequences in {where}"
        if self.skipped:
            shown = "; ".join(self.skipped[:3]) + ("; ..." if len(self.skipped) > 3 else "")
            found["skipped"] = f"{len(self.skipped)} bad rows left out (data.on_bad_row=skip): {shown}"
        return found


def damage_of(meta: Mapping[str, Any]) -> dict[str, str]:
    """``Damage.lines`` of a cache whose meta data hold them."""
    return {kind: meta[kind] for kind in ("replaced", "skipped") if meta.get(kind)}


@dataclass(frozen=True)
class SourceFile:
    path: Path
    label: str
    """What identifies it besides its bytes: the path relative to the corpus, or the file type."""


class FilePart(NamedTuple):
    """Some of a file: the bytes [start, stop), or of parquet the row groups; None: to the end."""

    start: int = 0
    stop: int | None = None
    num_bytes: int = 0
    """Of the file, for progress."""


WHOLE = FilePart()


def kind_of(path: Path) -> str:
    """The suffix that says what a file holds: ``.jsonl`` of ``a.jsonl.gz``."""
    return Path(path.stem).suffix.lower() if codec_of(path) else path.suffix.lower()


def codec_of(path: Path) -> str:
    """The suffix that says how a file is compressed: ``.gz`` of ``a.jsonl.gz``, or nothing."""
    suffix = path.suffix.lower()
    return suffix if suffix in CODECS else ""


# ------------------------------------------------------------------------------------------------------------ documents


def read_documents(
    source: SourceFile, text_key: str, damage: Damage, part: FilePart = WHOLE, *, skip_bad: bool = False
) -> Iterator[Document]:
    """The documents of a file, or of a part that ``parts_of`` names, that are not empty. Raises DataError.

    ``skip_bad``: rows without text are left out and noted in ``damage``; otherwise they are one error.
    """
    path, kind = source.path, kind_of(source.path)
    if kind in RECORDS:
        is_table = kind == ".parquet"

        def rows(part: FilePart) -> Iterator[Document | BadRow]:
            for record in _rows(path, part, text_key) if is_table else read_records(path, damage, part):
                if isinstance(record, BadRow):
                    yield record
                    continue
                text = record.value.get(text_key)
                if isinstance(text, str):
                    yield Document(f"{path}:{record.line}", text, record.num_bytes)
                elif is_table and text is not None:
                    what = type(text).__name__
                    raise DataError(f"{path}: column {text_key!r} holds {what}, not text; set data.text_key")
                elif text_key in record.value:
                    yield BadRow(record.line, f"{text_key!r} is {_kind(text)}, not text")
                else:
                    keys = ", ".join(record.value) or "none"
                    yield BadRow(record.line, f"no key {text_key!r} (its keys: {keys}); {text_remedy(record.value)}")

        documents = sound_rows(path, rows, damage, part, skip_bad=skip_bad)
    else:
        documents = _plain(source, damage, part)
    return (document for document in documents if document.text)


def parts_of(path: Path) -> list[FilePart]:
    """A file cut into parts of about 16 MiB where that is possible without reading it, else one part.

    Raises DataError if it cannot be read.
    """
    try:
        size = path.stat().st_size
        # json may be one list, and a row of a csv file goes on in the next line where a quote is open
        if size <= PIECE or codec_of(path) or kind_of(path) in (".json", *SEPARATORS):
            return [FilePart(num_bytes=size)]
        return _row_groups(path, size) if kind_of(path) == ".parquet" else list(_ranges(path, size))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror or error})") from error


def _ranges(path: Path, size: int) -> Iterator[FilePart]:
    """Ranges of a plain file that end with a line; of text, which may have no lines, with a character."""
    longest = None if kind_of(path) in RECORDS else PIECE
    with open_file(path) as handle:
        start = 0
        while start < size:
            handle.seek(start + PIECE)
            rest = 0
            if longest is None:
                while line := handle.readline(PIECE):
                    rest += len(line)
                    if line.endswith(b"\n"):
                        break
            else:
                rest = len(_end_of_line(handle.readline(longest)))
            stop = min(start + PIECE + rest, size)
            yield FilePart(start, stop, stop - start)
            start = stop


def _end_of_line(data: bytes) -> bytes:
    """What was read for the rest of a line, without a character that is cut in the middle."""
    if len(data) < PIECE or data.endswith(b"\n"):
        return data
    for back in (1, 2, 3):
        byte = data[-back]
        if byte >= 0xC0:  # the first of 2, 3 or 4 bytes
            return data[:-back] if back < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4) else data
        if byte < 0x80:
            break
    return data


def _plain(source: SourceFile, damage: Damage, part: FilePart) -> Iterator[Document]:
    with opened(source.path) as file:
        start, rest = part.start, b""
        file.seek(start)
        while data := rest + file.handle.read(PIECE - len(rest)):
            if len(data) == PIECE:
                line = file.handle.readline(PIECE)
                whole = _end_of_line(line)
                data, rest = data + whole, line[len(whole) :]
            else:
                rest = b""
            if problem := not_utf8(data, start):
                raise DataError(f"{source.path}: {problem}, or {GIVE_RECORDS}")
            name = f"{source.label}:{start}" if start else source.label
            yield Document(name, _decode(data, source.path, damage), file.progress())
            start += len(data)
            if part.stop is not None and start >= part.stop:
                return


def _decode(data: bytes, path: Path, damage: Damage) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
        damage.add(str(path), text.count("\ufffd") - data.count(_MARK))
    return text.removeprefix("\ufeff")


# -------------------------------------------------------------------------------------------------------------- records


class BadRow(NamedTuple):
    """A row that cannot be used, and what is wrong with it."""

    line: int
    """Or the number of the row, from 1 in its part."""
    why: str


_MOST_BAD_ROWS = 1000  # that are looked for: with a wrong text_key every row is bad


def sound_rows(
    name: Path | str,
    rows: Callable[[FilePart], Iterator[_Row | BadRow]],
    damage: Damage,
    part: FilePart = WHOLE,
    *,
    skip_bad: bool,
) -> Iterator[_Row]:
    """What ``rows(part)`` yields of a file, or of another source that is read whole. Bad rows are left out and noted in
    ``damage``, or raise one DataError, at the end, that names all of the source's."""
    found: list[BadRow] = []
    before: int | None = None if part.start else 0
    for row in rows(part):
        if not isinstance(row, BadRow):
            yield row
        elif skip_bad:
            before = rows_before(Path(name), part) if before is None else before
            damage.skipped.append(f"{name}:{row.line + before}: {row.why}")
        else:
            found.append(row)
            if len(found) == _MOST_BAD_ROWS:
                break
    if found and part != WHOLE:  # numbers from the beginning of the file, and of all its parts
        found = list(islice((row for row in rows(WHOLE) if isinstance(row, BadRow)), _MOST_BAD_ROWS))
    if found:
        raise _bad_rows(name, found)


def _bad_rows(name: Path | str, found: list[BadRow]) -> DataError:
    if len(found) == 1:
        number, why = found[0]
        return DataError(f"{name}:{number}: {why}; mend or remove it, or leave it out with data.on_bad_row=skip")
    numbers: dict[str, list[int]] = {}
    for number, why in found:
        numbers.setdefault(why, []).append(number)
    lines = [
        f"\n  {', '.join(map(str, rows[:20]))}{f' and {len(rows) - 20} more' if len(rows) > 20 else ''}: {why}"
        for why, rows in list(numbers.items())[:20]
    ]
    lines += [f"\n  and {len(numbers) - 20} other mistakes"] if len(numbers) > 20 else []
    count = f"at least {len(found)}" if len(found) == _MOST_BAD_ROWS else str(len(found))
    remedy = "mend or remove them, or leave them out with data.on_bad_row=skip"
    return DataError(f"{name}: {count} bad rows; {remedy}. By line or row number:{''.join(lines)}")


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def read_records(path: Path, damage: Damage, part: FilePart = WHOLE) -> Iterator[Record | BadRow]:
    """The records of a file, or of a part of it. Raises DataError for what cannot be read."""
    kind = kind_of(path)
    if kind not in RECORDS:
        raise DataError(f"{path}: holds no records by its name; {GIVE_RECORDS}")
    if kind == ".parquet":
        return _rows(path, part)
    return _cells(path, damage) if kind in SEPARATORS else _objects(path, damage, part)


def _objects(path: Path, damage: Damage, part: FilePart) -> Iterator[Record | BadRow]:
    """The JSON objects of a jsonl file or of a part of it, or of a json file: a list of them, or one in each line.

    Raises DataError for a list that cannot be read.
    """
    is_list = False
    if kind_of(path) == ".json":  # one list of records, as Alpaca's and ShareGPT's are, or a record a line
        with opened(path) as file:
            first = next((part for part in iter(partial(file.handle.readline, PIECE), b"") if not _is_blank(part)), b"")
        is_list = first.lstrip(_BOM + b" \t").startswith(b"[")
    with opened(path) as file:
        if is_list:
            try:
                # a plain one is as large as it looks
                content = file.handle.read(MAX_BYTES + 1 if codec_of(path) else -1)
                if codec_of(path) and len(content) > MAX_BYTES:
                    raise DataError(f"{path}: a list of more than {MAX_BYTES:,} bytes; decompress it, or write jsonl")
                if problem := not_utf8(content):
                    raise DataError(f"{path}: {problem}")
                values: Iterable[Any] = parse_json(content.decode().lstrip("\ufeff \t\r\n"), any_text=True)
            except ValueError as error:
                raise DataError(f"{path}: not JSON ({error}); mend it") from error
        else:
            values = _lines(path, file, part)
        for number, value in enumerate(values, 1):
            try:
                if is_list:
                    check_text(value)
                elif _is_blank(value):
                    continue
                else:
                    if number == 1 and part.start == 0 and (problem := not_utf8(value)):
                        raise DataError(f"{path}: {problem}")
                    value = parse_json(_decode(value, path, damage))
            except ValueError as error:
                yield BadRow(number, f"not a JSON line ({error})" if not is_list else str(error))
                continue
            if isinstance(value, dict):
                yield Record(number, value, file.progress())
            else:
                yield BadRow(number, f"expected a JSON object, got {_kind(value)}")


def _cells(path: Path, damage: Damage) -> Iterator[Record | BadRow]:
    """The rows below the header of a csv or tsv file, each with the number of its first line. Cells are texts."""
    csv.field_size_limit(MAX_BYTES)  # of this process; 131,072 characters otherwise
    with opened(path) as file:

        def text(line: bytes) -> str:
            if problem := not_utf8(line):
                raise DataError(f"{path}: {problem}")
            return _decode(line, path, damage)

        reader = csv.reader(map(text, _lines(path, file)), delimiter=SEPARATORS[kind_of(path)], strict=True)
        line = 1
        try:
            names = next(reader, [])
            if len(set(names)) < len(names):
                raise DataError(f"{path}: two columns have one name ({', '.join(names)}); rename one")
            line = reader.line_num + 1
            for cells in reader:
                if len(cells) == len(names):
                    yield Record(line, dict(zip(names, cells, strict=True)), file.progress())
                elif cells:  # no blank line
                    yield BadRow(line, f"has {len(cells)} cells, and the header {len(names)} ({', '.join(names)})")
                line = reader.line_num + 1
        except csv.Error as error:  # where rows end is not known then
            raise DataError(f"{path}:{line}: its quotes are not closed or not doubled ({error}); mend it") from error


def _is_blank(line: bytes) -> bool:
    return not line.removeprefix(_BOM).strip()


def _lines(path: Path, file: Opened, part: FilePart = WHOLE) -> Iterator[bytes]:
    file.seek(part.start)
    position = part.start
    for number, line in enumerate(iter(partial(file.handle.readline, MAX_BYTES + 1), b""), 1):
        if len(line) > MAX_BYTES:  # of a compressed file a few bytes may become any number
            raise DataError(f"{path}:{rows_before(path, part) + number}: has more than {MAX_BYTES:,} bytes; split it")
        yield line
        position += len(line)
        if part.stop is not None and position >= part.stop:
            return


def rows_before(path: Path, part: FilePart) -> int:
    """Lines or rows of a file before a part: counted when a message needs them."""
    if kind_of(path) == ".parquet":
        with _parquet_file(path) as file:
            return sum(file.metadata.row_group(number).num_rows for number in range(part.start))
    count, left = 0, part.start
    with open_file(path) as handle:
        while left and (data := handle.read(min(left, PIECE))):
            count += data.count(b"\n")
            left -= len(data)
    return count


def encodable(text: str) -> str:
    """``text`` as UTF-8 can hold it: JSON can spell half a surrogate pair, which becomes ``?``."""
    return text.encode("utf-8", "replace").decode()


# -------------------------------------------------------------------------------------------------------------- parquet


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise DataError(f"{path}: parquet needs the package pyarrow; pip install 'forgather[parquet]'") from error
    try:
        with parquet.ParquetFile(path) as file:
            yield file
    except (importlib.import_module("pyarrow").ArrowException, OSError) as error:
        first = (str(error).splitlines() or [""])[0]
        raise DataError(f"{path}: cannot be read ({first})") from error


def _row_groups(path: Path, size: int) -> list[FilePart]:
    """Row groups, joined to parts of 16 MiB and more of what they hold."""
    with _parquet_file(path) as file:
        sizes = [file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups)]
    total, parts, start, held = max(sum(sizes), 1), [], 0, 0
    for stop, each in enumerate(sizes, 1):
        held += each
        if held >= PIECE or stop == len(sizes):
            parts.append(FilePart(start, stop, size * held // total))
            start, held = stop, 0
    return parts


def _rows(path: Path, part: FilePart, column: str | None = None) -> Iterator[Record]:
    """The rows of a parquet file or of a part of it as records, their numbers from 1; of one column alone where that is
    named. Raises DataError."""
    with _parquet_file(path) as file:
        names = file.schema_arrow.names
        if column is not None and column not in names:
            raise DataError(f"{path}: no column {column!r} (its columns: {', '.join(names)}); {text_remedy(names)}")
        groups = list(range(part.start, file.num_row_groups if part.stop is None else part.stop))
        rows = sum(file.metadata.row_group(number).num_rows for number in groups)
        share = (part.num_bytes or os.stat(path).st_size) / max(rows, 1)
        row, done = 0, 0
        columns = None if column is None else [column]
        for batch in file.iter_batches(columns=columns, batch_size=256, row_groups=groups):
            for value in batch.to_pylist():
                row += 1
                begin, done = done, int(row * share)
                yield Record(row, value, done - begin)


# --------------------------------------------------------------------------------------------------------------- chunks


def chunks(texts: Iterable[_Text], report: Callable[[int], None]) -> Iterator[list[_Text]]:
    """Texts in lists of about a million characters: enough for the tokenizer's threads, little memory.

    ``report`` gets a list's bytes when the next one is asked for.
    """
    chunk: list[_Text] = []
    size = 0
    for each in texts:
        chunk.append(each)
        size += len(each.text)
        if size >= _CHUNK:
            yield chunk
            report(sum(each.num_bytes for each in chunk))
            chunk, size = [], 0
    if chunk:
        yield chunk
        report(sum(each.num_bytes for each in chunk))
