"""Records of pairs as two conversations each: the layouts that people's files have.

    {"prompt": "Hi", "chosen": "Hello", "rejected": "Go away"}                   texts, or lists of messages
    {"chosen": [{"role": "user", ...}, {"role": "assistant", ...}], ...}         the prompt is what both begin with
    {"conversations": [{"from": "human", ...}], "chosen": {"from": "gpt", ...}, ...}                       ShareGPT
    {"instruction": "Greet", "input": "Ann", "chosen": "Hello Ann", ...}         or question, user; system, history
    {"chosen": "Human: Hi\\n\\nAssistant: Hello", ...}                           texts alone go without the template

docs/preferences.md has the table of what is read as what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.chat.conversations import CALLED, Conversation, Row, conversation_of, side_of
from forgather_cli.data.chat.instruct import Chats, RecordKind, Rendered, encoded, render
from forgather_cli.data.chat.keys import Keys
from forgather_cli.data.text.read import Record
from forgather_cli.data.text.tokenizer import Marked, Tokenizer
from forgather_cli.data.tokens import Split
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.errors import DataError

_SIDES = ("chosen", "rejected")
_PROMPTS = ("prompt", "question", "instruction", "user", "messages", "conversations")
_SAME = "'chosen' and 'rejected' are the same, so neither is preferred; a pair has a difference"
Talks = tuple[Conversation, Conversation]


@dataclass
class Pair:
    """A pair as text, with what a ``Rendered`` has."""

    chosen: Rendered
    rejected: Rendered
    file: int = 0
    split: Split = "train"

    def __post_init__(self) -> None:
        """Its place in the file is the chosen side's."""
        self.key, self.text = self.chosen.key + self.rejected.key, self.chosen.text + self.rejected.text
        self.num_bytes, self.rules = self.chosen.num_bytes, max(self.chosen.rules, self.rejected.rules)


def _read(record: Record, option: InstructSettings, is_table: bool) -> Talks:
    chosen, rejected = (conversation_of(record, option, is_table, partial(_turns, number)) for number in (0, 1))
    return chosen, rejected


def _turns(number: int, row: Row, option: InstructSettings, read: set[str], record: Row) -> tuple[list[Any] | str, int]:
    """``Turns`` of one side. Raises DataError for what is no pair."""
    sides = [_chat(row.get(name)) for name in _SIDES]
    for name, side in zip(_SIDES, sides, strict=True):
        if not side:
            raise DataError(f"no {name!r} (its keys: {', '.join(map(str, record)) or 'none'}); set data.mapping")
        if not isinstance(side, str | list):
            raise DataError(f"{name!r} is {type(side).__name__}, not text or a list of messages")
    if type(sides[0]) is not type(sides[1]):
        raise DataError("one of 'chosen' and 'rejected' is text, and the other a list of messages; make both alike")
    if sides[0] == sides[1]:
        raise DataError(_SAME)
    read.update(_SIDES)
    key = next((name for name in _PROMPTS if row.get(name)), "")
    prompt, before = _chat(row.get(key)), list[Any]()
    # whole chats begin with the question; what stands beside them may be the same again
    are_whole = isinstance(sides[0], list) and "assistant" not in (_role(side[0]) for side in sides)
    if isinstance(prompt, list) and (key == "prompt" or not are_whole):
        read.add(key)
        before = prompt
        if all(side[: len(before)] == before for side in sides):
            sides = [side[len(before) :] for side in sides]
    elif prompt and not are_whole:
        read.add(key)
        before = side_of(row, key, "user", read)
    elif isinstance(sides[0], str):
        return str(sides[number]), 0
    if isinstance(sides[0], str):
        return [*before, {"role": "assistant", "content": sides[number]}], len(before)
    is_given = before and all(_role(side[0]) == "assistant" for side in sides if side)
    shared = 0  # with a prompt of their own, answers may begin with the same message
    while not is_given and all(len(side) > shared for side in sides) and sides[0][shared] == sides[1][shared]:
        shared += 1
    for name, side in zip(_SIDES, sides, strict=True):
        if "assistant" not in map(_role, side[shared:]):
            raise DataError(f"{name!r} has no answer of the assistant behind the prompt, which is what both begin with")
    if any(_role(side[shared]) != "assistant" for side in sides):
        raise DataError(
            f"'chosen' and 'rejected' have prompts that differ, in message {len(before) + shared + 1}; give both one"
        )
    if not before and not shared:
        keys = ", ".join(map(str, record))
        raise DataError(
            f"no 'prompt', and 'chosen' and 'rejected' begin with an answer (its keys: {keys}); set data.mapping"
        )
    return [*before, *sides[number]], len(before) + shared


def _chat(value: Any) -> Any:
    """A list of messages for one message by itself, and for JSON text of messages, as csv files have it."""
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, str) and value.lstrip().startswith("["):
        with suppress(ValueError):
            found = parse_json(value)
            if isinstance(found, list) and found and all(map(_role, found)):
                return found
    return value


def _role(turn: Any) -> str | None:
    """By its usual name; None of what is no message."""
    role = (turn.get("role") or turn.get("from")) if isinstance(turn, Mapping) else None
    return "assistant" if role == "function_call" else CALLED.get(str(role), role)


def _render(chats: Chats, keys: Keys, talks: Talks) -> Pair:
    chosen, rejected = sides = [render(chats, talk) for talk in talks]
    if chosen.text == rejected.text:
        raise DataError(_SAME)
    if chosen.is_document and chosen.text[0] != rejected.text[0]:
        raise DataError(
            "'chosen' and 'rejected' are texts that begin differently, and there is no 'prompt'; set data.mapping"
        )
    for name, side in zip(_SIDES, sides, strict=True):
        if not side.spans:
            raise DataError(f"{name!r} has no turn that is to be learned; look at what marks them (docs/data.md)")
    keys.note(*((talk, side.text) for talk, side in zip(talks, sides, strict=True)))
    return Pair(chosen, rejected)


def _encode(pairs: Sequence[Pair], tokenizer: Tokenizer) -> Iterator[tuple[Rendered, Marked]]:
    """The two sides of each, one behind the other. What both begin with is the prompt: where a template writes it in
    two ways, or a token holds its end and an answer's beginning, all from the first difference on is learned."""
    sides = encoded([side for pair in pairs for side in (pair.chosen, pair.rejected)], tokenizer)
    for pair, *both in zip(pairs, sides, sides, strict=False):
        (_, (one, _)), (_, (other, _)) = both
        length = min(len(one), len(other))
        shared = int(np.argmax(np.append(one[:length] != other[:length], True)))
        for side, (ids, inside) in both:
            if side.is_document:
                inside[:shared] = False
            if shared < (first := int(np.argmax(inside))):
                inside[shared:first] = True
            inside &= shared > 0  # else there is no prompt, and the pair is left out
            side.file, side.split = pair.file, pair.split
            yield side, (ids, inside)


PAIRS = RecordKind(_read, _render, _encode)
