"""Marks of turns that are context alone, as public files spell them: ``"weight": 0`` and the like (docs/data.md)."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from forgather_cli.errors import DataError

MARKS = {
    "weight": True, "train": True, "training": True, "train_on_turn": True, "trainable": True, "loss": True,
    "loss_mask": True, "step_loss_mask": True, "masked": False,
}  # fmt: skip
"""Whether a turn is learned where the mark is true or 1; where it is false or 0 it is the other way round."""
_OF_PARTS = "train_detail"  # axolotl's, of parts of a turn
# no marks, though they may be 0 or 1
_COUNTS = re.compile(r"(?:.*_)?(?:id|idx|index|identifier|turn|number|timestamp|score|rating)")


def unlearned_turns(
    messages: Sequence[Mapping[str, Any]], ignored: Collection[str], reads: Callable[[str], bool]
) -> frozenset[int]:
    """Indices of messages whose mark says that they are not to be learned.

    Raises DataError for a mark with another value than true, false, 1 or 0, and for a key with such a value that is no
    known mark, nor anything that the chat template ``reads``: what it means is not known. Keys in ``ignored`` are as if
    they were not there.
    """
    found: set[int] = set()
    for i, message in enumerate(messages):
        for key, value in message.items():
            if key in ignored:
                continue
            is_switch = isinstance(value, int | float) and value in (0, 1)
            if key in MARKS:
                if not is_switch:
                    raise DataError(f"message {i + 1} has {key!r}: {value!r}; it must be true, false, 1 or 0")
                if bool(value) != MARKS[key]:
                    found.add(i)
            elif key == _OF_PARTS:
                raise DataError(
                    f"message {i + 1} has {key!r}, but a turn is learned whole or not at all; remove it, or "
                    "add it to data.ignore"
                )
            elif is_switch and not (_COUNTS.fullmatch(key) and not isinstance(value, bool)) and not reads(key):
                raise DataError(
                    f"message {i + 1} has {key!r}: {value!r}, which the chat template does not read and which is no "
                    f"mark of turns that are not to be learned ({', '.join(MARKS)}); rename it, or add it "
                    "to data.ignore"
                )
    return frozenset(found)
