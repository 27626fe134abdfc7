"""RUN/rollbacks.jsonl: when a run went back to a checkpoint, and which ones that has left behind. No torch here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from forgather_cli.checkpoint.files import sync_directory
from forgather_cli.documents.fields import COUNT, TEXT, FieldKind, check_fields, list_of, optional
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.messages import sent
from forgather_cli.documents.regular_files import append, read_bytes, set_aside
from forgather_cli.errors import CheckpointError
from forgather_cli.run_dir import RunDir, resume_command


@sent
@dataclass(frozen=True)
class Rollback:
    """One time that a run went back. Its samples were trained on since the checkpoint, and are not seen again."""

    number: int
    """Counts from 1 over the life of the run; a checkpoint knows how many were behind it."""
    time: str
    """UTC, ISO 8601."""
    reason: str
    from_step: int
    to_step: int
    """The checkpoint's step."""
    num_skipped_samples: int
    """Of all ranks; those that an earlier rollback has skipped are not counted again."""
    skipped_sample_ids: list[int] | None
    """Their numbers in the data, in the order in which they were trained on; None for data without numbers."""
    data: list[Any]
    """The data position behind them: one, or that of each rank where ranks have their own."""
    tensors: list[str | None] = field(default_factory=list)
    """Tensors that these positions refer to: safetensors in base64; empty where they have none."""


_KINDS = {
    **dict.fromkeys(("number", "from_step", "to_step", "num_skipped_samples"), COUNT),
    **dict.fromkeys(("time", "reason"), TEXT),
    "skipped_sample_ids": optional(list_of(COUNT)),
    "data": FieldKind(lambda value: isinstance(value, list) and len(value) > 0, "a list of positions"),
    "tensors": list_of(optional(TEXT)),
}


def read_rollbacks(run: RunDir, *, mends: bool = False) -> list[Rollback]:
    """The run's rollbacks in their order. A torn last line is of one that did not happen. Raises CheckpointError.

    ``mends``: at a resume a file with lines that cannot be read is set aside, and the other lines stay.
    """
    try:
        lines = read_bytes(run.rollbacks).split(b"\n")[:-1]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise CheckpointError(f"{run.rollbacks}: cannot be read ({error.strerror})") from error
    found, good, damage = [], [], ""
    for number, line in enumerate(lines, 1):
        try:
            raw: dict[str, Any] = parse_json(line)
            check_fields({"tensors": [], **raw} if isinstance(raw, dict) else raw, _KINDS)
            found.append(Rollback(**{each.name: raw[each.name] for each in fields(Rollback) if each.name in raw}))
            good.append(line + b"\n")
        except (ValueError, TypeError) as error:
            damage = damage or f"{run.rollbacks}:{number}: is damaged ({error}), so samples may be seen again"
    if damage and not mends:
        raise CheckpointError(f"{damage}; {resume_command(run)} sets it aside")
    if damage:
        set_aside(run.rollbacks, damage, b"".join(good))
    return found


def append_rollback(run: RunDir, rollback: Rollback) -> None:
    """Add a rollback and make it durable, whole or not at all. Raises OSError."""
    line = json.dumps(asdict(rollback), allow_nan=False).encode() + b"\n"
    if run.rollbacks.exists():  # perhaps with a torn line of a job that was killed
        os.truncate(run.rollbacks, read_bytes(run.rollbacks).rfind(b"\n") + 1)
    append(run.rollbacks, line, durable=True)
    sync_directory(run.root)


def is_abandoned(step: int, behind: int, rollbacks: Iterable[Rollback]) -> bool:
    """True for a checkpoint of ``step`` that knows ``behind`` rollbacks if a later one went back to before it."""
    return any(rollback.number > behind and step > rollback.to_step for rollback in rollbacks)
