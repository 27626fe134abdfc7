"""Pairs of a chosen and a rejected answer in the layouts that files have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chats import conversation, write_lines

Talk = list[dict[str, str]]


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def pair(number: int) -> tuple[Talk, Talk, Talk]:
    """A prompt, which has an answer in it for two of three, and two answers that begin alike."""
    prompt = conversation(number)[:-1]
    return (
        prompt,
        [said("assistant", f"It is {number}, as asked." + " Well." * (number % 4))],
        [said("assistant", f"It is {number + 1}.")],
    )


def record(number: int) -> dict[str, Any]:
    return dict(zip(("prompt", "chosen", "rejected"), pair(number), strict=True))


def write_pairs(path: Path, count: int, first: int = 0) -> Path:
    return write_lines(path, [record(number) for number in range(first, first + count)])
