"""The ledger of a DiLoCo run, ``RUN/rounds.jsonl``: one line for each published round.

A line closes one round and opens the next, so the last complete one is the state. Times are UTC.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from forgather_cli.diloco.samples import Range, as_ranges
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import append, read_bytes
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import shown


@dataclass(frozen=True)
class Submission:
    """What a slot has sent. ``rejected`` says why it does not count; empty where it does."""

    slot: int
    worker: str
    round: int
    """That it has trained from."""
    parts: tuple[str, ...]
    targets: int
    ranges: tuple[Range, ...]
    leaves: bool = False
    """It is the worker's last one."""
    rejected: str = ""
    norms: tuple[float, ...] = ()
    """Of its change, for each fragment that it holds; none where nobody could tell, and in lines of versions before
    0.3."""

    @classmethod
    def from_document(cls, raw: Mapping[str, Any]) -> Submission:
        """Raises KeyError or TypeError for one that is none."""
        known = {key: value for key, value in raw.items() if key != "norm"}  # of all fragments together, before 0.3
        norms = tuple(map(float, raw.get("norms", ())))
        return cls(**{**known, "parts": tuple(raw["parts"]), "norms": norms, "ranges": as_ranges(raw["ranges"])})


@dataclass(frozen=True)
class Closed:
    """How a round ended. ``submissions`` in slot order, each with the weight of its change in the sum."""

    submissions: tuple[tuple[Submission, float], ...]
    fragments: tuple[int, ...] = ()
    """Of the model, those that the outer step changes."""
    missing: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()
    """(worker, reason)."""
    evicted: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    """By their own word, before they had sent."""
    offered: tuple[Submission, ...] = ()
    """Those that were rejected; none in lines of versions before 0.3."""


@dataclass(frozen=True)
class Participant:
    """What a worker is given to train."""

    slot: int
    worker: str
    batch: int
    """Sequences per step."""
    round: int
    """That it trains from: the line's own, in async mode the one that its last submission has made."""
    steps: int
    ranges: tuple[Range, ...]
    """In the order in which it trains on them."""


@dataclass(frozen=True)
class Line:
    """A line of the ledger: round ``round`` is open, ``hash`` names the weights that it starts from."""

    round: int
    hash: str
    parent: str
    """Hash of the round before; of round 0 the SHA-256 of the initial weights."""
    time: str
    closed: Closed | None
    """How round - 1 ended; None in the first line."""
    members: tuple[Participant, ...]
    """By slot."""
    cursor: int
    """The first sample that was never given out."""
    pool: tuple[Range, ...]
    """Samples that were given out and came back."""

    def member(self, name: str) -> Participant | None:
        return next((member for member in self.members if member.worker == name), None)

    def to_json(self) -> str:
        """One line of text, without its end."""
        document = asdict(self)
        if (closed := self.closed) is not None:
            counted = [_document(sent) | {"weight": weight} for sent, weight in closed.submissions]
            document["closed"] |= {"submissions": counted, "offered": [_document(sent) for sent in closed.offered]}
        return json.dumps(document, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Line:
        """Raises ValueError, KeyError or TypeError for a text that is no line."""
        raw = parse_json(text)
        closed = raw["closed"]
        if closed is not None:
            weights = [each.pop("weight") for each in closed["submissions"]]
            sent = [Submission.from_document(each) for each in closed["submissions"]]
            reasons = {worker: why for worker, why in closed["rejected"]}
            offered = [Submission.from_document(each) for each in closed.get("offered", ())]
            lists = {key: tuple(closed.get(key, ())) for key in ("fragments", "missing", "evicted", "left")}
            rejected = tuple(replace(each, rejected=reasons[each.worker]) for each in offered)
            counted = tuple(zip(sent, weights, strict=True))
            closed = Closed(counted, **lists, rejected=tuple(reasons.items()), offered=rejected)
        members = tuple(Participant(**{**each, "ranges": as_ranges(each["ranges"])}) for each in raw["members"])
        return cls(**{**raw, "closed": closed, "members": members, "pool": as_ranges(raw["pool"])})


def _document(sent: Submission) -> dict[str, Any]:
    """As a line has it, which says why those do not count that do not beside."""
    return {key: value for key, value in asdict(sent).items() if key != "rejected"}


def round_hash(parent: str, number: int, closed: Closed | None) -> str:
    """The name of the weights that round ``number`` starts from: SHA-256 over its history."""
    counted = closed.submissions if closed else ()
    submissions = [[sent.slot, sent.round, sent.parts, sent.targets, sent.leaves, weight] for sent, weight in counted]
    return hashlib.sha256(json.dumps([parent, number, submissions], separators=(",", ":")).encode()).hexdigest()


def versions(lines: Sequence[Line], round: int, num_fragments: int) -> list[int]:
    """For each fragment the round whose step has made its weights as of ``round``; 0 for the initial ones."""
    found: dict[int, int] = {}
    for number in range(round, 0, -1):
        closed = lines[number].closed
        assert closed is not None
        for fragment in closed.fragments:
            found.setdefault(fragment, number)
        if len(found) == num_fragments:
            break
    return [found.get(fragment, 0) for fragment in range(num_fragments)]


def read_ledger(path: Path) -> list[Line]:
    """The complete lines of a ledger, none where there is no file. What a crash has left of a last one is cut off.

    Raises SetupError for a file that is no ledger.
    """
    if not path.exists():
        return []
    content = read_bytes(path)
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(path, len(whole))
    lines: list[Line] = []
    for number, text in enumerate(whole.splitlines()):
        try:
            line = Line.from_json(text)
        except (ValueError, KeyError, TypeError) as error:
            raise unusable(path, f"line {number + 1} is no round ({error})") from error
        parent = lines[-1].hash if lines else line.parent
        if (line.round, line.parent, line.hash) != (number, parent, round_hash(parent, number, line.closed)):
            raise unusable(path, f"line {number + 1} does not follow from the one before")
        lines.append(line)
    return lines


def unusable(path: Path, problem: str) -> SetupError:
    """What is wrong with a ledger that cannot be gone on from, and what to do."""
    command = f"forgather diloco server {shlex.quote(shown(path.parent))} output_dir=NEW"
    return SetupError(f"{path}: {problem}; restore it, or begin a new run from the newest checkpoint: {command}")


def drop_lines(path: Path, kept: int, dropped: Path) -> None:
    """Move all but the first lines of a ledger to the end of the file ``dropped``. Raises OSError."""
    lines = path.read_bytes().splitlines(keepends=True)
    with dropped.open("ab") as file:
        file.writelines(lines[kept:])
        file.flush()
        os.fsync(file.fileno())
    os.truncate(path, sum(map(len, lines[:kept])))


def hashes_of(dropped: Path) -> set[str]:
    """The hashes of the rounds that ``drop_lines`` has moved, perhaps not to its end."""
    content = dropped.read_text(encoding="utf-8") if dropped.exists() else ""
    return set(re.findall(r'"hash": ?"([0-9a-f]{64})"', content))


def write_line(path: Path, line: Line) -> None:
    """Append a line and sync it. Raises OSError; then the file is as it was."""
    append(path, line.to_json().encode() + b"\n", durable=True)
