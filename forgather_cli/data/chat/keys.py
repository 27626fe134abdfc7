"""Keys of chat records that nothing reads: those that carry meaning, without which training is refused, and the others.

docs/data.md has the rules.
"""

from __future__ import annotations

import logging
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache
from itertools import filterfalse
from typing import Any

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.chat.conversations import ROLES, Conversation
from forgather_cli.data.chat.template import ChatTemplate, Message
from forgather_cli.errors import DataError

# names without case, _ and -: of what a model is to see or to think, and of what is about a record
_CARRY = {
    "audio", "audios", "background", "chainofthought", "context", "contexts", "cot", "document", "documents",
    "evidence", "fact", "facts", "functions", "history", "image", "images", "input", "inputs", "instruction",
    "instructions", "knowledge", "passage", "passages", "persona", "premise", "prompt", "query", "question",
    "rationale", "reasoning", "reasoningcontent", "system", "systemmessage", "systemprompt", "thinking", "thought",
    "thoughts", "tools", "video", "videos",
}  # fmt: skip
_ABOUT = {
    "categories", "category", "dataset", "date", "hash", "id", "idx", "index", "label", "labels", "lang", "language",
    "license", "meta", "metadata", "model", "origin", "rating", "score", "source", "split", "tag", "tags", "task",
    "timestamp", "topic", "topics", "url",
}  # fmt: skip
_OF_TURNS = {"tool_calls", "function_call", "refusal", *ROLES}  # a message's keys that carry meaning; turns of a role
_NAMES = ("role", "name", "type")
_LEAST_WORDS = 4
_LEAST_SHARE = 0.01  # of the rows
_PATH = re.compile(r"(?:~|\.{1,2}|[A-Za-z]:)?[/\\][^\n]*\.\w{1,8}")
_NO_WORD = re.compile(
    r"[\W\d_]*"
    r"|.*(?:://|[/\\]).*|www\..*"  # of an address or a path
    r"|(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?|[ap]\.?m|utc|gmt"  # of a date
    r"|jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|(?:nov|dec)(?:ember)?|\d+(?:st|nd|rd|th)|\d[\d:.-]*[tz][\d:.+z-]*",
    re.IGNORECASE | re.DOTALL,
)
_UNSPACED = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff]")

_log = logging.getLogger(__name__)


class Keys:
    """What is found, over all records, under the keys that nothing reads."""

    def __init__(self, option: InstructSettings, template: ChatTemplate) -> None:
        self._mapping, self._template = option.mapping, template
        named = {"tools"}.union(key for key, name in option.mapping.items() if name == "tools")
        self._not_shown = frozenset() if template.shows_tools else named
        self._num_rows = 0
        self._by_name: Counter[str] = Counter()  # rows
        self._by_text: Counter[str] = Counter()
        self._earlier: Counter[str] = Counter()  # of keys that the template writes in the last turns alone
        self._others: dict[str, None] = {}
        self._mapped: set[str] = set()

    def note(self, *found: tuple[Conversation, str]) -> None:
        """The conversations of a record, each with what it is to the model."""
        self._num_rows += 1
        lost = {name: counts for conversation, _ in found for name, counts in self._lost(conversation)}
        for name, counts in lost.items():
            counts[name] += 1
        record, read = found[0][0].record, found[0][0].read
        if self._mapping:
            self._mapped |= record.keys() & self._mapping.keys()
        if len(read) == len(record) and not self._not_shown:
            return
        seen = [_Seen(conversation, text) for conversation, text in found]
        for key, value in record.items():
            if key in read and key not in self._not_shown:
                continue
            by_name = key in self._mapping or key in read or _says(key)
            if by_name is None and key in self._others:
                continue
            leaves = list(_leaves(value))
            left = [leaf for leaf in leaves if not any(each.has(leaf, by_name=bool(by_name)) for each in seen)]
            if by_name and left:
                self._by_name[key] += 1
            elif by_name is False and any(map(_is_text, left)):
                self._by_text[key] += 1
            elif leaves:
                self._others[key] = None

    def _lost(self, conversation: Conversation) -> Iterator[tuple[str, Counter[str]]]:
        """Keys of messages that the template does not write, and roles, each with where it counts.

        In the place of each text and number stands a number that is nowhere else, since the words may be written
        elsewhere too, and look otherwise in JSON.
        """
        marked, marks, columns = list[Message](conversation.messages), list[str](), conversation.record.values()
        places: dict[tuple[str, int], slice] = {}
        for i, message in enumerate(conversation.messages):
            for key, value in message.items():
                name = message["role"] if key == "content" else key
                is_about = any(self._template.takes(name)) if key == "content" else key in _NAMES or _says(key) is None
                if is_about or (key != "content" and any(value is each for each in columns)):  # a pair's thought
                    continue
                if _says(name) or name in _OF_TURNS or any(map(_is_text, _leaves(value))):
                    first = len(marks)
                    marked[i] = {**marked[i], key: _marked(value, marks)}
                    places[name, i] = slice(first, len(marks))

        def lost(wanted: Iterable[tuple[str, int]], num_messages: int) -> list[tuple[str, int]]:
            text = self._template.render(marked[:num_messages], tools=conversation.tools)
            return [each for each in wanted if any(mark not in text for mark in marks[places[each]])]

        with suppress(DataError):  # the template may ask for certain words
            for name, i in dict(lost(places, len(marked)) if places else ()).items():  # the last turn of each
                counts = self._by_name if _says(name) or name in _OF_TURNS else self._by_text
                with suppress(DataError):  # it may be written where the conversation ends with it
                    if name in self._earlier or not lost([(name, i)], i + 1):
                        counts = self._earlier
                yield name, counts

    def found(self) -> dict[str, Any]:
        """For the cache's meta data: of each key that carries meaning its rows, and the other keys."""
        texts = {key: rows for key, rows in self._by_text.items() if rows >= _LEAST_SHARE * self._num_rows}
        return {
            "rows": self._num_rows,
            "carry": dict(self._by_name) | texts,
            "others": [
                key for key in {**self._others, **self._by_text} if key not in self._by_name and key not in texts
            ],
            "absent": [key for key in self._mapping if key not in self._mapped],
            "earlier": dict(self._earlier),
        }


def check_keys(option: InstructSettings, found: Mapping[str, Any]) -> None:
    """Raise DataError, which names them all, for keys that carry meaning and are not in ``data.ignore``, or for those
    of ``data.mapping`` that no record has. ``found``: by ``Keys``."""
    if absent := found["absent"]:
        raise DataError(f"data.mapping: no record has {', '.join(map(repr, absent))}; mend the name, or leave it out")
    carry = {key: rows for key, rows in found["carry"].items() if key not in option.ignore}
    earlier, told = (
        ", ".join(f"{key!r} (in {rows:,} of {found['rows']:,} rows)" for key, rows in keys.items())
        for keys in (found["earlier"], carry)
    )
    if earlier:
        _log.warning("data.chat_template: it writes %s of the last turns alone; others are learned without", earlier)
    if carry:
        ignore = shlex.quote(f"data.ignore=[{','.join(map(_typed, [*option.ignore, *carry]))}]")
        setting = "files" if option.files else "dataset"
        raise DataError(
            f"data.{setting}: records or their messages have keys or roles that say something and that nothing reads: "
            f"{told}; say what they are with data.mapping (docs/data.md), set a data.chat_template that writes them or "
            f"train without them: {ignore}"
        )


@cache
def _says(key: str) -> bool | None:
    """Whether a name says that what it holds carries meaning; None if it says that it does not."""
    name = re.sub("[_-]", "", key.lower())
    if name in _ABOUT or key.lower().endswith(("_id", "-id")) or key.endswith(("Id", "ID")):
        return None
    return name in _CARRY


def _marked(value: Any, marks: list[str]) -> Any:
    """A value with a number of its own in the place of each text and number, but for ids, types and the like."""
    if isinstance(value, Mapping):
        return {k: v if k == "type" or _says(str(k)) is None else _marked(v, marks) for k, v in value.items()}
    if isinstance(value, list):
        return [_marked(part, marks) for part in value]
    if isinstance(value, bool) or not [*_leaves(value)]:
        return value
    marks.append(str(971306428000000 + len(marks)))
    return marks[-1] if isinstance(value, str) else int(marks[-1])


def _leaves(value: Any) -> Iterator[Any]:
    """The texts, numbers and the like of a value at any depth; not what is empty."""
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from _leaves(part)
    elif isinstance(value, str):
        if value := value.strip():
            yield value
    elif value is not None and value is not False and value == value:  # NaN is what a table of floats lacks
        yield value


def _is_text(value: Any) -> bool:
    """Whether it has at least four words that are not of an address, a path or a date. Of scripts without spaces two
    letters are one."""
    if not isinstance(value, str) or _PATH.fullmatch(value):
        return False
    if not value.isascii() and len(_UNSPACED.findall(value)) >= 2 * _LEAST_WORDS:
        return True
    words = (found[0].strip(".,;:!?()[]{}\"'") for found in re.finditer(r"\S+", value))
    return any(number == _LEAST_WORDS for number, _ in enumerate(filterfalse(_NO_WORD.fullmatch, words), 1))


class _Seen:
    """What the model sees of a conversation whose rendering is ``text``."""

    def __init__(self, conversation: Conversation, text: str) -> None:
        self._messages, self._text = conversation.messages, text
        said = {message["role"]: message.get("content") or "" for message in conversation.messages}
        self._question, self._answer = said.get("user", "").strip(), said.get("assistant", "").strip()

    def has(self, leaf: Any, *, by_name: bool = False) -> bool:
        """Whether a text is in it, or it is the conversation in another form, as Alpaca's own ``text``.

        That a text holds the answer says little of a passage, from which the answer is taken, or of a short answer:
        there it must hold the question too.
        """
        if not isinstance(leaf, str):
            return False
        if self._messages and self._answer in leaf:
            parts = self._question.split("\n\n")  # an instruction and its input may stand apart
            if (self._question or self._answer) and all(part in leaf for part in parts):
                return True
            if not by_name and _is_text(self._answer):
                return True
        if leaf not in self._text:
            return False
        values = (value for message in self._messages for value in message.values() if isinstance(value, str))
        return _is_text(leaf) or any(leaf == value.strip() for value in values)


def _typed(key: str) -> str:
    """A key as it is typed in a list of settings."""
    if re.fullmatch(r"[A-Za-z_]\w*", key, re.ASCII) and key.lower() not in ("null", "true", "false", "inf", "nan"):
        return key
    # in quotes a backslash stands for itself, but for one before a quote
    return '"' + re.sub(r'(\\*)("|$)', lambda found: found[1] * 2 + found[2].replace('"', '\\"'), key) + '"'
