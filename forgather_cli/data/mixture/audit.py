"""What the loaders of a mixture have handed out, in ``RUN/mixture.jsonl``, and whether it is what was to be read.

Each start and save writes a line, and a rollback before it goes back: step, position, stretches, seed and shuffling
("order"), and by source [its size, how many of its sequences the loaders of all ranks have handed out since the start,
the sum of the hashes of their indices], which does not depend on their order. The indices have come with the rows.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.mixture.stretches import Ints, Mixture, Stretch
from forgather_cli.data.order import mix
from forgather_cli.documents.regular_files import append, read_bytes, write_whole
from forgather_cli.errors import DataError

_TOGETHER = 1 << 16  # positions that are compared at once
Tally = NDArray[np.uint64]
"""(sources, 2): how many samples, and the sum modulo 2^64 of the hashes of their indices in the source."""


def tally(samples: Ints, num_sources: int) -> Tally:
    """Of samples (n, 2): source and index in it."""
    found = np.zeros((num_sources, 2), np.uint64)
    hashes = mix((samples[:, 1] + 1).astype(np.uint64))  # that of 0 is 0
    np.add.at(found, samples[:, 0], np.stack([np.ones_like(hashes), hashes], axis=1))
    return found


def write(line: Mapping[str, Any], path: Path) -> None:
    """Add a line; one of a start cuts those behind its position."""
    with suppress(OSError, LookupError, TypeError, ValueError):  # a save that follows, or the audit, will say so
        if line["starts"] and path.exists():
            known = {text: json.loads(text) for text in read_bytes(path).split(b"\n")[:-1]}
            at, step = line["position"], line["step"]
            # one of this step or before is behind a position that was moved back, and tells of it
            kept = [text for text, of in known.items() if of["step"] <= step or of["position"] <= at]
            write_whole(path, b"".join(text + b"\n" for text in kept))
        append(path, json.dumps(line).encode() + b"\n", durable=True)


def audit(path: Path) -> dict[str, Any]:
    """{lost, repeated, sources: {NAME: {sequences, share}}} from the first line on, without a torn last one.

    Raises DataError.
    """
    try:
        return _compared([json.loads(text) for text in read_bytes(path).split(b"\n")[:-1]])
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); name a run on data=mixture") from error
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise DataError(f"{path}: is damaged ({error}), so what was read is not known") from error


def _compared(lines: list[Any]) -> dict[str, Any]:
    """At each line what was to be handed out, by its stretches, is compared with what was; what has come since the line
    before is lost or repeated. Where a source's number is right and its hash is not, at least one is lost and another
    one repeated.
    """
    sizes = {name: size for line in lines for name, (size, *_) in line["sources"].items()}
    before = handed = missing = nothing = np.zeros((len(sizes), 2), np.uint64)
    settings, at, lost, repeated = None, lines[0]["position"], 0, 0
    for line in lines:
        if settings != (settings := (line["order"], line["stretches"])) or line["position"] < at:
            (seed, shuffle), due, at = line["order"], nothing, lines[0]["position"]
            mixture = Mixture([Stretch.from_state(each) for each in line["stretches"]])
        for begin in range(at, line["position"], _TOGETHER):
            end = min(begin + _TOGETHER, line["position"])
            due = due + tally(mixture.samples(begin, end, sizes, seed, shuffle=shuffle), len(sizes))
        at, before = line["position"], handed if line["starts"] else before
        handed = before + np.array([line["sources"].get(name, (0, 0, 0))[1:] for name in sizes], np.uint64)
        new, missing = (due - handed - missing).view(np.int64), due - handed
        for count, hashes in new.tolist():
            unlike = int(count == 0 and hashes != 0)
            lost, repeated = lost + max(count, 0) + unlike, repeated + max(-count, 0) + unlike
    counts = dict(sorted(zip(sizes, handed[:, 0].tolist(), strict=True)))
    sources = {name: {"sequences": n, "share": n / max(sum(counts.values()), 1)} for name, n in counts.items()}
    return {"lost": lost, "repeated": repeated, "sources": sources}
