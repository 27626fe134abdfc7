"""Marks of turns that are context alone, by their values, and keys that may be marks."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest

from forgather_cli.data.chat.marks import unlearned_turns
from forgather_cli.errors import DataError


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        ({"weight": 0}, "left out"), ({"weight": 0.0}, "left out"), ({"weight": False}, "left out"),
        ({"weight": 1}, "learned"), ({"weight": True}, "learned"), ({"masked": 1}, "left out"),
        ({"masked": 0}, "learned"), ({"loss": 0}, "learned"), ({"weight": 2}, "must be"), ({"weight": -1}, "must be"),
        ({"weight": "0"}, "must be"),
        ({"draft": 1}, "does not read"), ({"draft": False}, "does not read"), ({"draft": 2}, "learned"),
        ({"draft": -1}, "learned"), ({"draft": "no"}, "learned"), ({"read": 1}, "learned"), ({"turn_id": 1}, "learned"),
        ({"turn_id": True}, "does not read"), ({"train_detail": []}, "whole or not at all"),
    ],
)  # fmt: skip
def test_a_mark_says_whether_a_turn_is_learned(more: dict[str, Any], answer: str) -> None:
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", **more}, {"role": "tool"}]
    with nullcontext() if answer in ("learned", "left out") else pytest.raises(DataError, match=answer):
        found = unlearned_turns(talk, {"loss"}, {"role", "content", "read"}.__contains__)
        assert found == (frozenset([1]) if answer == "left out" else frozenset())
