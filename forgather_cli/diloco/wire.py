"""What server and workers must agree on: names, limits, and what identifies a model.

Every request has ``Authorization: Bearer TOKEN`` and ``Forgather-Wire: 2``. Bodies are JSON, except weights and parts.
Ranges of ``POST /weights/{round}`` are offsets into the published safetensors file, its header included, of which
``GET /weights/{round}/header`` sends the first bytes: 8 with the header's length, then the header.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence

WIRE_VERSION = 2
"""2: in sync mode /next says whether a submission counts."""
VERSION_HEADER = "Forgather-Wire"
GENERATION_HEADER = "Forgather-Generation"
"""Of a PUT: whose part it is."""
MAX_JSON = 1 << 20
"""Bytes of a JSON body."""
MAX_WAIT = 30.0
"""Seconds that ``/next`` waits at most."""
MAX_NUMBER = 1 << 53
"""Of every number in a message: what JSON's readers hold alike (RFC 8259, section 6)."""
MAX_TEXT = 256
"""Characters of every text in a message."""
MAX_BATCH = 1 << 20
"""Sequences of a worker's step."""
MAX_REJECTED = 3
"""Submissions of a worker in a row that are rejected; then the server gives it up, and it ends."""
MAX_MEMBERS = 1024
"""Workers that may have registered."""

# of /next and /heartbeat
OPEN, WAITING, STOPPED, OK = "open", "waiting", "stopped", "ok"
# of /submit
COUNTED, LATE, REJECTED = "counted", "late", "rejected"
PENDING = "pending"
"""It is held until the round closes; then /next says which of the others it is."""
LACKING = "lacking"
"""Some parts are not at the server, which names them: PUT them, and submit again."""
# codes of an error
REFUSED = "refused"
"""Settings, model or data differ: a mistake that no retry mends."""
HELD = "held"
"""Another live process has this worker's id."""
FENCED = "fenced"
"""The server knows this start of the worker no longer, or has gone on without it: register anew."""
EVICTED = "evicted"
"""The server has rejected too many of its submissions: the worker ends."""


class WireError(Exception):
    """A request that is answered with an error: HTTP status, a sentence with its remedy, and a code if it has one."""

    def __init__(self, status: int, message: str, code: str | None = None) -> None:
        self.status, self.message, self.code = status, message, code
        super().__init__(message)


def model_hash(parameters: Iterable[tuple[str, Sequence[int]]]) -> str:
    """SHA-256 in hex of the trainable parameters' full names and full shapes, in any order."""
    listed = sorted([name, list(shape)] for name, shape in parameters)
    return hashlib.sha256(json.dumps(listed, separators=(",", ":")).encode()).hexdigest()
