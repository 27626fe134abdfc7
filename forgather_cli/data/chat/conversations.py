"""Chat records of jsonl, json and parquet files as conversations: the layouts that TRL and axolotl users have.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}       ShareGPT
    {"prompt": "Hi", "completion": "Hello"}                                                         or lists of messages
    {"instruction": "Greet", "input": "Ann", "output": "Hello Ann"}                                 Alpaca

``system`` (text) and ``tools`` (a list) beside them are read too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.text.read import BadRow, Damage, Part, Record, kind_of, read_records, read_rows, sound_rows
from forgather_cli.errors import DataError
from forgather_cli.input_files import parse_json

_T = TypeVar("_T")
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
_CALLED = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bard": "assistant", "bing": "assistant",
    "model": "assistant", "ai": "assistant", "observation": "tool", "function_response": "tool",
}  # fmt: skip
"""ShareGPT's names of roles."""
_LISTS = ("messages", "conversations")
_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("instruction", "output"), ("instruction", "response"),
    ("question", "answer"),
)  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    line: int
    """Or the number of the record, from 1."""
    num_bytes: int
    """Of the source, for progress."""
    unlearned: frozenset[int] = frozenset()
    """Indices of messages that are context alone, whatever ``data.train_on`` says."""


def read_conversations(
    path: Path, option: InstructSettings, use: Callable[[Conversation], _T], damage: Damage
) -> Iterator[_T]:
    """``conversations_in`` a file, plain or compressed. Raises DataError."""
    kind = kind_of(path)
    if kind not in (".jsonl", ".json", ".parquet"):
        raise DataError(f"{path}: not chat data by its name; give jsonl, json or parquet files")
    is_table = kind == ".parquet"
    records = read_rows(path) if is_table else read_records(path, damage)
    return conversations_in(records, str(path), option, use, damage, is_table=is_table)


def conversations_in(
    records: Iterable[Record | BadRow],
    name: str,
    option: InstructSettings,
    use: Callable[[Conversation], _T],
    damage: Damage,
    *,
    is_table: bool,
) -> Iterator[_T]:
    """What ``use`` makes of the conversations in ``records``, in order. ``name`` says in messages where they are from.

    Records that are none, and those at which ``use`` raises DataError, are left out and noted in ``damage``
    (``on_bad_row=skip``), or raise one DataError that names them all. ``is_table``: the rows of a table, whose type
    puts None where a row has nothing.
    """

    def rows(part: Part) -> Iterator[_T | BadRow]:
        for record in records:
            if isinstance(record, BadRow):
                yield record
                continue
            try:
                used = use(_conversation(record, option.messages_key))
            except DataError as error:
                yield BadRow(record.line, str(error))
            else:
                yield used

    return sound_rows(name, rows, damage, skip_bad=option.on_bad_row == "skip")


def _conversation(record: Record, messages_key: str | None) -> Conversation:
    """Raises DataError with what is wrong with the record."""
    turns = _turns(record.value, messages_key)
    system = record.value.get("system")
    first = turns[0]
    begins_with_system = isinstance(first, Mapping) and first.get("role", first.get("from")) == "system"
    if isinstance(system, str) and system and not begins_with_system:
        turns = [{"role": "system", "content": system}, *turns]
    messages = [_message(number, turn) for number, turn in enumerate(turns, 1)]
    return Conversation(messages, _tools(record.value), record.line, record.num_bytes)


def _turns(record: Mapping[str, Any], messages_key: str | None) -> list[Any]:
    for key in (messages_key,) if messages_key else _LISTS:
        if record.get(key) is not None:
            turns = record[key]
            if not isinstance(turns, list) or not turns:
                got = "an empty list" if turns == [] else type(turns).__name__
                raise DataError(f"{key!r} must be a list of messages, got {got}")
            return turns
    for prompt, answer in () if messages_key else _PAIRS:
        if record.get(prompt) is not None and record.get(answer) is not None:
            return _side(record, prompt, "user") + _side(record, answer, "assistant")
    keys = ", ".join(map(str, record)) or "none"
    wanted = repr(messages_key) if messages_key else "messages, conversations, prompt and completion"
    raise DataError(f"no {wanted} (its keys: {keys}); set data.messages_key")


def _side(record: Mapping[str, Any], key: str, role: str) -> list[Any]:
    """One side of a pair as messages. Alpaca's ``input`` stands below its instruction."""
    value = record[key]
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise DataError(f"{key!r} is {type(value).__name__}, not text or a list of messages")
    more = record.get("input") if key == "instruction" else None
    return [{"role": role, "content": f"{value}\n\n{more}" if isinstance(more, str) and more else value}]


def _message(number: int, turn: Any) -> dict[str, Any]:
    """A message with role and content, and without the None that tables put where a record has nothing."""
    what = f"message {number}"
    if not isinstance(turn, Mapping):
        raise DataError(f"{what} is {type(turn).__name__}, not an object with role and content")
    rest = {key: value for key, value in turn.items() if value is not None}
    role = rest.pop("role", None) or rest.pop("from", None)
    content = rest.pop("content", None)
    content = rest.pop("value", None) if content is None else content
    if not isinstance(role, str):
        raise DataError(f"{what} has no role (its keys: {', '.join(map(str, turn))})")
    role = _CALLED.get(role, role)
    if role not in ROLES:
        raise DataError(f"{what} has the unknown role {role!r}; roles are {', '.join(ROLES)}; rename it")
    if isinstance(content, list) and content:  # parts that are all text are one text
        texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
        content = "".join(texts) if len(texts) == len(content) else content
    if content is None and role == "assistant" and rest.get("tool_calls"):
        return {"role": role, **rest}
    if not isinstance(content, str):
        got = "none" if content is None else type(content).__name__
        raise DataError(f"{what} must have text as content, got {got}")
    return {"role": role, "content": content, **rest}


def _tools(record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # parquet files keep them as JSON
        try:
            tools = parse_json(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"'tools' is not JSON ({error})") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"'tools' is {type(tools).__name__}, not a list")
    return tools or None
