"""The workers that have registered with a server: what they have said of themselves, and what outlives a restart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


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
    """Its submissions are rejected, for which it was evicted."""
    left: bool = False
    """It has said that nobody need wait for it."""
    last_round: int | None = None
    """After which it takes no part, once it has said so."""
    dylu: bool = False
    """Its steps follow its speed."""
    heard: float = 0.0
    speed: float | None = None
    """Steps per second of its last round."""
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

    def to_document(self) -> dict[str, Any]:
        kept = ("name", "secret", "batch", "host", "pid", "run", "evicted", "left", "last_round", "dylu")
        listed = [{key: getattr(worker, key) for key in kept} for worker in self.workers.values()]
        return {"data": self.data, "tokenizer": self.tokenizer, "workers": listed}

    @classmethod
    def from_document(cls, raw: Mapping[str, Any]) -> Registry:
        workers = {each["name"]: Worker(**each) for each in raw["workers"]}
        return cls(raw["data"], raw["tokenizer"], workers)
