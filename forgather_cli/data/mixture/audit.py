"""``RUN/mixture.jsonl``: what loaders have handed out, and whether it is what the arithmetic says. No torch here.

Each start and save writes a line, and a rollback before it goes back: the position, the stretches, and of each source
how many sequences the loaders of all ranks have handed out since the start, with the sum of a hash of their indices,
which does not depend on their order. The numbers come with the rows. A resume cuts the lines behind its position.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from forgather_cli.data.mixture.stretches import Mixture, Stretch
from forgather_cli.data.order import mix
from forgather_cli.documents.fields import ANYTHING, COUNT, FieldKind, check_fields, list_of, object_of
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import append, read_bytes, set_aside, write_whole
from forgather_cli.errors import DataError

Tallies = NDArray[np.uint64]
"""(sources, 2): of samples how many, and the sum modulo 2^64 of the hashes of their indices in the source."""
_AT_ONCE = 1 << 16
_KINDS = {
    **dict.fromkeys(("step", "position", "seed"), COUNT),
    **dict.fromkeys(("starts", "shuffle"), ANYTHING),
    **{"stretches": list_of(object_of(ANYTHING)), "sources": object_of(object_of(ANYTHING))},
}
_HASH = FieldKind(lambda value: type(value) is int and 0 <= value < 1 << 64, "a whole number below 2^64")
_KINDS_OF_SOURCE = {"size": COUNT, "sequences": COUNT, "hash": _HASH}


def tally_of(numbers: ArrayLike, firsts: NDArray[np.int64]) -> Tallies:
    """Of samples by their numbers in sources that stand one behind another, from ``firsts`` on."""
    numbers = np.asarray(numbers, np.int64)
    owners = np.searchsorted(firsts, numbers, side="right") - 1
    found = np.zeros((len(firsts) - 1, 2), np.uint64)
    found[:, 0] = np.bincount(owners, minlength=len(found))
    np.add.at(found[:, 1], owners, mix((numbers - firsts[owners] + 1).astype(np.uint64)))  # the hash of 0 is 0
    return found


def write(line: dict[str, Any], path: Path) -> None:
    with suppress(OSError):  # a save that follows will say so
        if line["starts"] and path.exists():
            kept = []
            try:
                for each in _read(path):  # one of this step or before is behind a position that has been moved back
                    kept += [each] if each["position"] <= line["position"] or each["step"] <= line["step"] else []
            except DataError as error:
                set_aside(path, str(error))
            write_whole(path, "".join(json.dumps(each) + "\n" for each in kept))
        append(path, json.dumps(line).encode() + b"\n", durable=True)


def _read(path: Path) -> list[dict[str, Any]]:
    """Without a torn last line. Raises DataError."""
    lines: list[dict[str, Any]] = []
    try:
        for text in read_bytes(path).split(b"\n")[:-1]:
            line = parse_json(text)
            check_fields(line, _KINDS)
            for source in line["sources"].values():
                check_fields(source, _KINDS_OF_SOURCE)
            list(map(Stretch.from_state, line["stretches"]))
            lines.append(line)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a run on data=mixture") from error
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{path}:{len(lines) + 1}: is damaged ({error}), so what was read is not known") from error
    return lines


def audit(path: Path) -> dict[str, Any]:
    """{lost, repeated, sources: {NAME: {sequences, share}}} from the first line on.

    At each line what was to be handed out, by its stretches, is compared with what was; what has come since the line
    before is lost or repeated. Where a source's number is right and its hash is not, at least one is lost and another
    one repeated. Raises DataError.
    """
    lines = _read(path)
    sizes = {name: of["size"] for line in lines for name, of in line["sources"].items()}
    firsts = np.cumsum([0, *sizes.values()])
    places = dict(zip(sizes, zip(firsts.tolist(), sizes.values(), strict=False), strict=True))
    nothing = tally_of([], firsts)
    before = handed = missing = nothing
    order, lost, repeated = None, 0, 0
    for line in lines:
        if order != (order := (line["stretches"], line["seed"], line["shuffle"])):
            mixture, due, at = Mixture(list(map(Stretch.from_state, line["stretches"]))), nothing, lines[0]["position"]
        begin, end = sorted((at, line["position"]))
        for first in range(begin, end, _AT_ONCE):
            last = min(first + _AT_ONCE, end)
            part = tally_of(mixture.numbers(first, last, places, line["seed"], shuffle=line["shuffle"]), firsts)
            due = due + part if at < last else due - part
        at = line["position"]
        before = handed if line["starts"] else before
        of = {"sequences": 0, "hash": 0}
        counted = [line["sources"].get(name, of) for name in sizes]
        handed = before + np.array([[each["sequences"], each["hash"]] for each in counted], np.uint64)
        new = (due - handed - missing).view(np.int64)
        missing = due - handed
        for count, hashes in new.tolist():
            unlike = int(count == 0 and hashes != 0)
            lost, repeated = lost + max(count, 0) + unlike, repeated + max(-count, 0) + unlike
    counts = dict(zip(sizes, handed[:, 0].tolist(), strict=True))
    total = max(sum(counts.values()), 1)
    shares = {name: {"sequences": count, "share": count / total} for name, count in sorted(counts.items())}
    return {"lost": lost, "repeated": repeated, "sources": shares}
