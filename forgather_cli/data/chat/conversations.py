"""Chat records of files as conversations: the layouts that people's files have.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}    OpenAI
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}        ShareGPT
    {"prompt": "Hi", "completion": "Hello"}                                           TRL, or lists of messages
    {"instruction": "Greet", "input": "Ann", "history": [["Hi", "Hello"]], "output": "Hello Ann"}   Alpaca
    {"instruction": "Who?", "context": "Ann came.", "response": "Ann"}                              Dolly
    {"text": "All of this is learned."}                                               no conversation

docs/data.md has the table of what is read as what. ``data.mapping`` gives keys of other layouts the names of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.chat.template import as_text
from forgather_cli.data.text.hf import without_added
from forgather_cli.data.text.read import BadRow, Damage, FilePart, Record, sound_rows
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.errors import DataError

_T = TypeVar("_T")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
CALLED = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "model": "assistant", "ai": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""ShareGPT's names of roles."""
_LISTS = ("messages", "conversations")
_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"), ("user", "assistant"),
)  # fmt: skip
_REASONING = ("reasoning_content", "thinking", "reasoning")
READ = frozenset(
    (*_LISTS, *itertools.chain(*_PAIRS), *_REASONING, "system", "tools", "input", "context", "history", "text")
)
"""Keys of records that are read in one layout or another."""
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    """None of a text that stands alone."""
    tools: list[Any] | None
    line: int
    """Or the number of the record, from 1."""
    num_bytes: int
    """Of the source, for progress."""
    record: Row
    """What all of it was read from."""
    read: frozenset[str] | set[str]
    """The keys of ``record`` that it was read from."""
    unlearned: frozenset[int] = frozenset()
    """Numbers of messages that are context alone, whatever ``data.train_on`` says: the prompt of TRL's lists."""
    text: str | None = None
    """Learned whole, in the place of messages."""


def conversations_in(
    records: Iterable[Record | BadRow],
    name: str,
    option: InstructSettings,
    use: Callable[[Any], _T],
    damage: Damage,
    *,
    is_table: bool,
    read: Callable[[Record, InstructSettings, bool], Any],
) -> Iterator[_T]:
    """What ``use`` makes of what is ``read`` of ``records``, in order. ``name`` says in messages where they are from.

    Records that are none, and those at which ``use`` raises DataError, are left out and noted in ``damage``
    (``on_bad_row=skip``), or raise one DataError that names them all. ``is_table``: the rows of a table, whose type
    puts None where a row has nothing.
    """

    def rows(part: FilePart) -> Iterator[_T | BadRow]:
        for record in records:
            if isinstance(record, BadRow):
                yield record
                continue
            try:
                used = use(read(record, option, is_table))
            except DataError as error:
                yield BadRow(record.line, str(error))
            else:
                yield used

    return sound_rows(name, rows, damage, skip_bad=option.on_bad_row == "skip")


Turns = Callable[[Row, InstructSettings, set[str], Row], tuple[list[Any] | str, int]]
"""Of (a record under the names that are read, the option, the record as it was typed): its messages as they lie there,
or a text that stands alone, and how many of them are a prompt that is not learned. Adds to the set of keys, behind the
option, where they were found."""


def conversation_of(
    record: Record, option: InstructSettings, is_table: bool, turns_of: Turns | None = None
) -> Conversation:
    """``turns_of``: None: by the layouts of data=instruct. Raises DataError with what is wrong with the record."""
    row: Row = record.value
    sources: dict[str, list[str]] = {}
    if option.mapping or option.ignore:
        row, sources = _named(row, option)
    read: set[str] = set()
    turns, num_prompt = (turns_of or _turns)(row, option, read, record.value)
    if isinstance(turns, str):
        return Conversation([], None, record.line, record.num_bytes, record.value, _keys(read, sources), text=turns)
    system, first = row.get("system"), turns[0] if turns else None
    begins_with_system = isinstance(first, Mapping) and first.get("role", first.get("from")) == "system"
    if isinstance(system, str) and system and not begins_with_system:
        turns = [{"role": "system", "content": system}, *turns]
        num_prompt += num_prompt > 0
        read.add("system")
    messages = [_message(number, turn, is_table) for number, turn in enumerate(turns, 1)]
    for role in sources and sources.keys() & {"system", "user"} - read:  # texts that go with a list of messages
        below = row[role]
        message = next((each for each in messages if each["role"] == role and isinstance(below, str)), None)
        if message is not None:
            message["content"] = f"{message['content']}\n\n{below}"
            read.add(role)
    tools = row.get("tools")
    if tools is not None:
        tools = _tools(tools, is_table)
        read.add("tools")
    unlearned = frozenset(range(num_prompt))
    return Conversation(messages, tools, record.line, record.num_bytes, record.value, _keys(read, sources), unlearned)


def _named(row: Row, option: InstructSettings) -> tuple[Row, dict[str, list[str]]]:
    """A record under the names that ``data.mapping`` gives its keys, without those of ``data.ignore``; and the keys
    that have got each name. Texts of one name are joined, in the mapping's order, by blank lines."""
    named = {key: value for key, value in row.items() if key not in option.mapping and key not in option.ignore}
    sources: dict[str, list[str]] = {}
    name: str
    for key, name in option.mapping.items():
        if row.get(key) is not None:
            sources.setdefault(name, []).append(key)
    for name, keys in sources.items():
        values = [row[key] for key in keys]
        if len(values) > 1 and not all(isinstance(value, str) for value in values):
            raise DataError(f"{' and '.join(map(repr, keys))} are not all text, so they cannot be joined to one {name}")
        named[name] = "\n\n".join(filter(None, values)) if len(values) > 1 else values[0]
    return named, sources


def _keys(read: set[str], sources: Mapping[str, list[str]]) -> set[str]:
    """The keys of a record behind names that were read."""
    return {key for name in read for key in sources.get(name, (name,))} if sources else read


def _turns(row: Row, option: InstructSettings, read: set[str], record: Row) -> tuple[list[Any] | str, int]:
    """``Turns`` of the layouts that the head of this file shows."""
    named = option.mapping.values()
    lists: Iterable[str] = (option.messages_key,) if option.messages_key else _LISTS
    pairs: Iterable[tuple[str, str]] = () if option.messages_key else _PAIRS
    has_user, has_assistant = "user" in named, "assistant" in named
    if pairs and (has_user or has_assistant):  # the other one may be that of any pair
        questions = ["user"] if has_user else [question for question, _ in _PAIRS]
        answers = ["assistant"] if has_assistant else [answer for _, answer in _PAIRS]
        pairs, lists = itertools.product(questions, answers), () if has_user and has_assistant else _LISTS
    for key in lists:
        if row.get(key) is not None:
            turns = _object(row[key], list)  # of a csv file it is text
            if not isinstance(turns, list) or not turns:
                got = "an empty list" if turns == [] else type(turns).__name__
                raise DataError(f"{key!r} must be a list of messages, got {got}")
            read.add(key)
            return turns, 0
    for question, answer in pairs:
        if row.get(question) is not None and row.get(answer) is not None:
            read |= {question, answer}
            before, after = side_of(row, question, "user", read), side_of(row, answer, "assistant", read)
            return before + after, len(before) if isinstance(row[question], list) else 0
    if isinstance(row.get("text"), str) and not (option.messages_key or has_user or has_assistant):
        read.add("text")
        return row["text"], 0
    keys = ", ".join(map(str, record)) or "none"
    wanted = repr(option.messages_key) if option.messages_key else "messages, conversations, prompt and completion"
    raise DataError(f"no {wanted} (its keys: {keys}); set data.messages_key or data.mapping")


def side_of(row: Row, key: str, role: str, read: set[str]) -> list[Any]:
    """One side of a pair as messages. Below an instruction stand Alpaca's ``input`` and Dolly's ``context``; before a
    question stands Alpaca's ``history``; an answer has its reasoning."""
    value = row[key]
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise DataError(f"{key!r} is {type(value).__name__}, not text or a list of messages")
    if role == "assistant":
        # not read: only a template that writes it reads it
        thought = next((row[name] for name in _REASONING if isinstance(row.get(name), str) and row[name]), None)
        return [{"role": role, "content": value, "reasoning_content": thought}]
    for more in ("input", "context") if key == "instruction" else ():
        if isinstance(below := row.get(more), str):
            value = f"{value}\n\n{below}" if below else value
            read.add(more)
    turns: list[Any] = []
    if isinstance(history := _object(row.get("history"), list), list):
        read.add("history")
        for pair in history:
            if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
                raise DataError(
                    f"'history' must be a list of [instruction, output] pairs, each two texts, got {pair!r:.80}"
                )
            turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    return [*turns, {"role": role, "content": value}]


def _message(number: int, turn: Any, is_table: bool) -> dict[str, Any]:
    """A message with role and content, without the None that tables put where a record has nothing, and with objects
    where tool calls have them as JSON text."""
    what = f"message {number}"
    if not isinstance(turn, Mapping):
        raise DataError(f"{what} is {type(turn).__name__}, not an object with role and content")
    rest = without_added(turn) if is_table else {key: value for key, value in turn.items() if value is not None}
    role = rest.pop("role", None) or rest.pop("from", None)
    content = rest.pop("content", None)
    content = rest.pop("value", None) if content is None else content
    if not isinstance(role, str):
        raise DataError(f"{what} has no role (its keys: {', '.join(map(str, turn))})")
    role = CALLED.get(role, role)
    if role == "function_call" and isinstance(content, str):  # ShareGPT's turn that is a call, or a list of them
        called = _opened_all(content if content.lstrip().startswith("[") else f"[{content}]", f"the call in {what}")
        calls = [{"type": "function", "function": call} for call in called]
        return {"role": "assistant", "content": "", "tool_calls": calls, **rest}
    if role not in ROLES:
        raise DataError(f"{what} has the unknown role {role!r}; roles are {', '.join(ROLES)}; rename it")
    if "tool_calls" in rest:
        rest["tool_calls"] = _opened_all(rest["tool_calls"], f"'tool_calls' of {what}")
    content = as_text(content)
    if content is None and role == "assistant" and rest.get("tool_calls"):
        return {"role": role, **rest}
    if not isinstance(content, str):
        got = "none" if content is None else type(content).__name__
        raise DataError(f"{what} must have text as content, got {got}")
    return {"role": role, "content": content, **rest}


def _tools(tools: Any, is_table: bool) -> list[Any] | None:
    return _opened_all(without_added(tools) if is_table else tools, "'tools'") or None


def _opened_all(entries: Any, what: str) -> list[Any]:
    """Tools, or calls of them, with objects where they or their parts are JSON text."""
    if isinstance(entries, str):  # parquet files keep lists as JSON
        try:
            entries = parse_json(entries) if entries.strip() else []
        except ValueError as error:
            raise DataError(f"{what} is not JSON ({error})") from error
    if not isinstance(entries, list):
        raise DataError(f"{what} is {type(entries).__name__}, not a list")
    opened = [_opened(entry) for entry in entries]
    if wrong := [entry for entry in opened if isinstance(entry, str)]:
        raise DataError(f"{what} must be objects, got {wrong[0]!r:.80}")
    return opened


def _opened(entry: Any) -> Any:
    entry = _object(entry)
    if not isinstance(entry, Mapping):
        return entry
    opened = dict(entry)
    for key in opened.keys() & {"arguments", "parameters"}:
        opened[key] = _object(opened[key])
    if "function" in opened:
        opened["function"] = _opened(opened["function"])
    return opened


def _object(value: Any, kind: type = dict) -> Any:
    """The object, or the list, that a JSON text spells, as OpenAI's arguments do; what is no such text as it is."""
    if isinstance(value, str):
        with suppress(ValueError):
            found = parse_json(value)
            return found if isinstance(found, kind) else value
    return value
