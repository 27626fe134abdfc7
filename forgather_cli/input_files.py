"""Opening and parsing files that anybody may have written, and writing some for others to read. No torch here.

A file may be a pipe, at which a reader waits for ever; a document may be nested deeper than a parser's stack, which
ends the process, or expand to more than memory holds. Each is an error that says so.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from forgather_cli.errors import ForgatherError, SetupError

MAX_BYTES = 100_000_000
"""Of a document that is read whole; the limit of safetensors' own reader for its header."""
MAX_DEPTH = 200
"""Of lists and mappings in each other. Python's own limit leaves too little stack to those who walk through them."""
MAX_NODES = 1_000_000
"""Of a YAML document, aliases counted as often as they are used."""

_KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}

Failure = Callable[[str], ForgatherError]


class FieldError(ValueError):
    """A field of a document is missing, or holds what it cannot hold."""


@dataclass(frozen=True)
class FieldKind:
    """What a field may hold; ``name`` says it."""

    holds: Callable[[Any], bool]
    name: str


_LARGEST = sys.float_info.max
COUNT = FieldKind(lambda value: type(value) is int and 0 <= value < 1 << 63, "a whole number from 0 on")
NUMBER = FieldKind(lambda value: type(value) in (int, float) and -_LARGEST <= value <= _LARGEST, "a finite number")
AMOUNT = FieldKind(lambda value: NUMBER.holds(value) and value >= 0, "a finite number from 0 on")
TEXT = FieldKind(lambda value: isinstance(value, str), "a text")
FLAG = FieldKind(lambda value: isinstance(value, bool), "true or false")


def optional(kind: FieldKind) -> FieldKind:
    return FieldKind(lambda value: value is None or kind.holds(value), f"{kind.name}, or null")


def several(*kinds: FieldKind) -> FieldKind:
    """A list of one value of each kind."""
    return FieldKind(
        lambda value: (
            isinstance(value, list | tuple)
            and len(value) == len(kinds)
            and all(kind.holds(item) for kind, item in zip(kinds, value, strict=True))
        ),
        f"a list of {len(kinds)} values ({', '.join(dict.fromkeys(kind.name for kind in kinds))})",
    )


def list_of(kind: FieldKind) -> FieldKind:
    return FieldKind(lambda value: isinstance(value, list) and all(map(kind.holds, value)), f"a list, each {kind.name}")


def object_of(kind: FieldKind) -> FieldKind:
    return FieldKind(
        lambda value: isinstance(value, dict) and all(map(kind.holds, value.values())), f"an object, each {kind.name}"
    )


ANYTHING = FieldKind(lambda value: True, "anything")


def check_fields(found: Any, kinds: Mapping[str, FieldKind], place: str = "it") -> None:
    """Raise FieldError, naming ``place`` and the field, unless ``found`` is an object with a value of each kind."""
    if not isinstance(found, Mapping):
        raise FieldError(f"{place} must be an object, got {found!r:.80}")
    inside = "" if place == "it" else f"{place}."
    for name, kind in kinds.items():
        if name not in found:
            raise FieldError(f"{inside}{name} is missing")
        if not kind.holds(found[name]):
            raise FieldError(f"{inside}{name} must be {kind.name}, got {found[name]!r:.80}")


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


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file that is whole as soon as it is there. Raises OSError; what was at ``path`` is there still then."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=mode)) as file:
            # the name of a file may hold bytes that are no UTF-8: JSON and YAML have such escapes
            file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def parse_json(text: str | bytes, *, any_text: bool = False) -> Any:
    """Raises ValueError, also for what is nested too deeply, and unless ``any_text`` for half of a surrogate pair."""
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH or ("\\u" in text and not any_text):
        _check(value, any_text)
    return value


def check_text(value: Any) -> None:
    """Raise ValueError for half of a surrogate pair in a parsed document."""
    _check(value, any_text=False)


def _check(value: Any, any_text: bool) -> None:
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(item, dict):
            todo += ((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list):
            todo += ((part, depth + 1) for part in item)
        elif isinstance(item, str) and not any_text and has_half(item):
            raise ValueError("a text in it holds half of a surrogate pair, which is no character")


def has_half(text: str) -> bool:
    """True for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    return not text.isascii() and any("\ud800" <= letter <= "\udfff" for letter in text)


def parse_yaml(text: str) -> Any:
    """Plain values. Raises ValueError, also for what is nested too deeply and for aliases that expand without end."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
    if re.search(r"\\u[dD][89a-fA-F]", text):  # bytes of a file's name that are no UTF-8, which libyaml refuses
        loader = yaml.SafeLoader
    try:
        depth = 0
        for event in yaml.parse(text, loader):  # first, since building a tree of it may end the process (libyaml 0.2.5)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        made = loader(text)
        try:
            node = made.get_single_node()
            if node is None:
                return None
            if _expanded(node, {})[0] > MAX_NODES:
                raise ValueError(f"its aliases expand to more than {MAX_NODES:,} values")
            return made.construct_document(node)
        finally:
            made.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split())
        # The libyaml of PyYAML 6.0.4 has a bound of its own, and its scanner is ahead of the events counted above.
        raise ValueError(f"it is nested too deeply: {said}" if "nesting depth" in said else said) from error


def _expanded(node: Any, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """(values, depth) of a YAML node with its aliases expanded. Raises ValueError for one that is part of itself."""
    if id(node) in known:
        return known[id(node)]
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep, or is part of itself")
    parts = node.value if isinstance(node.value, list) else []
    inside = [part for item in parts for part in (item if isinstance(item, tuple) else (item,))]
    sizes = [_expanded(part, known, depth + 1) for part in inside]
    size, height = 1 + sum(size for size, _ in sizes), 1 + max((height for _, height in sizes), default=0)
    if height > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    known[id(node)] = size, height
    return size, height


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
