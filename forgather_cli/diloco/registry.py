"""The workers that have registered with a server: what they have said of themselves, and what outlives a restart."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import read_bytes, set_aside

_LOST = ("generation", "why", "heard", "bounded", "step", "tokens_per_second", "sent", "received")
"""Of a worker, what a restart of the server forgets."""
_EPOCH = time.time() - time.monotonic()


def clock() -> float:
    """Seconds since the epoch, on a clock that only goes forward while this process lives."""
    return _EPOCH + time.monotonic()


@dataclass
class Worker:
    """A worker that has registered."""

    name: str
    secret: str
    """SHA-256 of the secret that it made up."""
    batch: int
    """Sequences per step."""
    host: str = ""
    pid: int = 0
    run: str = ""
    generation: int | None = None
    """Of its registration with this start of the server, which asks all anew where they stand; None before it."""
    evicted: bool = False
    why: str = ""
    """What it was evicted for, if not its silence."""
    left: bool = False
    """It has said that nobody need wait for it."""
    last_round: int | None = None
    """After which it takes no part, once it has said so."""
    dylu: bool = False
    """Its steps follow its speed."""
    heard: float = 0.0
    stood: int | None = None
    """The newest round that it was offered."""
    offered: float = -1e9
    """When that was, by ``clock``, or when it came into a run that had begun; else long ago."""
    speed: float | None = None
    """Steps per second of its last round, from the offer to its submission."""
    bounded: str = ""
    """How its influence was last lowered."""
    step: int | None = None
    tokens_per_second: float | None = None
    sent: int = 0
    received: int = 0
    """Bytes, as it says."""

    @property
    def is_gone(self) -> bool:
        """It must register anew to take part."""
        return self.evicted or self.left


@dataclass
class Registry:
    """What outlives a restart of the server besides the ledger (``RUN/workers.json``)."""

    data: str | None = None
    tokenizer: str | None = None
    """Fingerprints that all workers share; those of the first one that stated any."""
    workers: dict[str, Worker] = field(default_factory=dict)

    def to_line(self, *workers: Worker) -> bytes:
        """Of the file that ``read`` reads: what is known of these workers, of all of them where none is named."""
        known = [vars(worker).items() for worker in workers or self.workers.values()]
        listed = [{key: value for key, value in each if key not in _LOST} for each in known]
        return json.dumps({"data": self.data, "tokenizer": self.tokenizer, "workers": listed}).encode() + b"\n"

    @classmethod
    def read(cls, path: Path) -> Registry:
        """Of lines, what comes later counts; a last one that a crash has cut is left out. A file that cannot be read is
        set aside. Raises OSError.
        """
        found, lines = cls(), read_bytes(path).splitlines() if path.exists() else []
        for at, line in enumerate(lines):
            try:
                raw = parse_json(line)
                found.data, found.tokenizer = raw["data"], raw["tokenizer"]
                found.workers |= {each["name"]: Worker(**each) for each in raw["workers"]}
            except (ValueError, KeyError, TypeError) as error:
                if not 0 < at == len(lines) - 1:
                    set_aside(path, f"{path}: cannot be read ({error}); its workers register anew")
                    return cls()
        return found
