"""Regular files that anybody may have written, read whole, and files that are whole as soon as they are there.

A file may be a pipe, at which a reader waits for ever, or no text. Each is an error that says so. No torch here.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
import threading
from collections.abc import Callable
from functools import partial
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from forgather_cli.documents.json_and_yaml import has_half, parse_json, parse_yaml
from forgather_cli.errors import ForgatherError, SetupError

log = logging.getLogger(__name__)

MAX_BYTES = 100_000_000
"""Of a document that is read whole, or a line of one; the limit of safetensors' own reader for its header."""
SEPARATORS = {".csv": ",", ".tsv": "\t"}
FORMATS = {
    ".jsonl": "json", ".ndjson": "json", ".json": "json", ".parquet": "parquet", ".arrow": "arrow", ".csv": "csv",
    ".tsv": "csv", ".txt": "text", ".md": "text",
}  # fmt: skip
"""What data files hold, in the ``datasets`` library's words, by the suffix that one of compression may follow."""
RECORDS = tuple(suffix for suffix, kind in FORMATS.items() if kind in ("json", "parquet", "csv"))
"""How files of records are called that are read without the library; all others hold text."""
GIVE_RECORDS = "give jsonl, json, parquet, csv or tsv files"
_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}
Failure = Callable[[str], ForgatherError]


def open_file(path: Path) -> BufferedReader:
    """A regular file, open for reading bytes. Raises OSError, whose ``strerror`` says what else is there.

    Nothing but a regular file can be read twice, has a size, and cannot keep its reader waiting.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "no file can have this name", str(path)) from error
    if kind := _KINDS.get(stat.S_IFMT(os.fstat(descriptor).st_mode)):
        os.close(descriptor)
        raise OSError(errno.EINVAL, f"is {kind}, give a regular file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """The content of a regular file. Raises OSError, also for one of more than ``limit`` bytes."""
    with open_file(path) as file:
        content = file.read(-1 if limit is None else limit + 1)
    if limit is not None and len(content) > limit:
        raise OSError(errno.EFBIG, f"has more than {limit:,} bytes", str(path))
    return content


def set_aside(path: Path, problem: str, kept: bytes | None = None) -> None:
    """Move a file that cannot be read out of the way, and warn of it by ``problem``, which begins with the path.

    ``kept``: what can be read of it, which takes its place. Raises OSError.
    """
    aside, n = path.with_name(f"{path.name}.bak"), 2
    while aside.exists():
        aside, n = path.with_name(f"{path.name}.bak.{n}"), n + 1
    if kept is None:
        path.rename(aside)
    else:  # a kill in between leaves it where it is
        write_whole(aside, read_bytes(path))
        write_whole(path, kept)
    log.warning("%s; it is set aside as %s", problem, aside.name)


def read_text(path: Path, fail: Failure = SetupError, limit: int | None = MAX_BYTES) -> str:
    """A text of at most ``limit`` bytes in UTF-8. Raises what ``fail`` makes of a message that begins with the path."""
    try:
        content = read_bytes(path, limit)
        if problem := not_utf8(content):
            raise fail(f"{path}: {problem}")
        return content.decode("utf-8-sig")  # Windows writes a mark first
    except OSError as error:
        raise fail(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise fail(f"{path}: cannot be read (not UTF-8 text: {error})") from error


def not_utf8(content: bytes, start: int = 0) -> str | None:
    """What bytes are that cannot be a text in UTF-8, by the mark they begin with and their NULs, and what to do; else
    None. ``start``: their place in the file.
    """
    wide = start == 0 and content.startswith((b"\xff\xfe\0\0", b"\0\0\xfe\xff"))
    first = content.find(b"\0")
    if wide or (start == 0 and content.startswith((b"\xff\xfe", b"\xfe\xff"))):
        name = "UTF-32" if wide else "UTF-16"
    elif first < 0:
        return None
    elif first < 2 and content[first : first + 16 : 2].count(0) >= min(8, len(content) // 2):  # every other byte
        name = "UTF-16LE" if (start + first) % 2 else "UTF-16BE"
    else:
        return f"is not text (byte {start + first} is NUL); give a text in UTF-8"
    return f"is text in {name}, which is not read; convert it: iconv -f {name} -t UTF-8 FILE"


def read_json(path: Path, fail: Failure = SetupError, limit: int | None = MAX_BYTES) -> Any:
    """A JSON document of at most ``limit`` bytes. Raises what ``fail`` makes of a message that begins with the path."""
    text = read_text(path, fail, limit)
    try:
        return parse_json(text)
    except ValueError as error:
        raise fail(f"{path}: cannot be read (not JSON: {error})") from error


def read_json_object(path: Path, fail: Failure = SetupError, limit: int | None = MAX_BYTES) -> dict[str, Any]:
    """``read_json`` of a document that must be an object."""
    found = read_json(path, fail, limit)
    if not isinstance(found, dict):
        raise fail(f"{path}: must hold a JSON object, got {type(found).__name__}")
    return found


def read_state(path: Path, then: str) -> dict[str, Any] | None:
    """A JSON object; None where there is no file, or where it cannot be read: then it is set aside, and a warning says
    so, and what comes ``then``. Raises OSError.
    """
    try:
        return read_json_object(path, limit=None) if path.exists() else None
    except SetupError as error:
        set_aside(path, f"{error}; {then}")
        return None


def read_yaml(path: Path, fail: Failure = SetupError) -> Any:
    """A YAML document of plain values. Raises what ``fail`` makes of a message that begins with the path."""
    text = read_text(path, fail)
    try:
        return parse_yaml(text)
    except ValueError as error:
        raise fail(f"{path}: cannot be read (not valid YAML: {error})") from error


def read_weight_map(path: Path, fail: Failure) -> dict[str, Path]:
    """Tensor name -> its file, of a Hugging Face index. Raises what ``fail`` makes of a message."""
    found = read_json_object(path, fail).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise fail(f"{path}: has no weight_map, an object of tensor names and files")
    try:
        return {name: file_inside(path.parent, file) for name, file in found.items()}
    except ValueError as error:
        raise fail(f"{path}: {error}") from error


def file_inside(directory: Path, name: object) -> Path:
    """The file of that name, which a document of ``directory`` gives, in it or below.

    Raises ValueError for a name that leads out of it, and for one that no file has.
    """
    if not isinstance(name, str) or not name or "\0" in name or has_half(name):
        raise ValueError(f"{name!r} is no name of a file")
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"the file name {name!r} leads out of {directory}")
    return directory / name


def write_whole(path: Path, content: str | bytes, mode: int = 0o666, *, durable: bool = False) -> None:
    """Write a file that is whole as soon as it is there. Raises OSError; what was at ``path`` is there still then.

    ``durable``: it is on the disk before it takes the other's place.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            # the name of a file may hold bytes that are no UTF-8: JSON and YAML have such escapes
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def append(path: Path, content: bytes, *, durable: bool = False) -> None:
    """Add to the end of a file, whole or not at all, and opened anew: nothing is left open, however the run ends.

    ``durable``: it is on the disk then. Raises OSError.
    """
    with path.open("ab", buffering=0) as file:
        end = file.tell()
        try:
            if file.write(content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            if durable:
                os.fsync(file.fileno())
        except OSError:
            file.truncate(end)
            raise
