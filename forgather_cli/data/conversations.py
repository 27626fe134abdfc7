"""Chat records of jsonl, json and parquet files as conversations: the layouts that TRL and axolotl users have.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}       ShareGPT
    {"prompt": "Hi", "completion": "Hello"}                                                         or lists of messages
    {"instruction": "Greet", "input": "Ann", "output": "Hello Ann"}                                 Alpaca

``system`` (text) and ``tools`` (a list) beside them are read too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather_cli.data.compressed import opened
from forgather_cli.data.reading import Damage, Record, kind_of, read_records, read_rows
from forgather_cli.errors import DataError

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
    where: str
    """``file:line``, for messages."""
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    num_bytes: int
    """Of the source, for progress."""

    def key(self) -> str:
        """What decides its split: equal conversations have equal keys."""
        return json.dumps([self.messages, self.tools], sort_keys=True)


def read_conversations(path: Path, messages_key: str | None, damage: Damage) -> Iterator[Conversation]:
    """The conversations of a file, plain or compressed, in order. Raises DataError, with file and line, for what is
    none."""
    return (_conversation(where, record, messages_key, size) for where, record, size in _records(path, damage))


def _conversation(where: str, record: Any, messages_key: str | None, num_bytes: int) -> Conversation:
    if not isinstance(record, Mapping):
        raise DataError(f"{where}: expected a JSON object, got {type(record).__name__}; mend or remove it")
    turns = _turns(where, record, messages_key)
    system = record.get("system")
    if isinstance(system, str) and system and not _is_system(turns[0]):
        turns = [{"role": "system", "content": system}, *turns]
    messages = [_message(where, number, turn) for number, turn in enumerate(turns, 1)]
    return Conversation(where, messages, _tools(where, record), num_bytes)


def _turns(where: str, record: Mapping[str, Any], messages_key: str | None) -> list[Any]:
    for key in (messages_key,) if messages_key else _LISTS:
        if record.get(key) is not None:
            turns = record[key]
            if not isinstance(turns, list) or not turns:
                got = "an empty list" if turns == [] else type(turns).__name__
                raise DataError(f"{where}: {key!r} must be a list of messages, got {got}; mend or remove the record")
            return turns
    for prompt, answer in () if messages_key else _PAIRS:
        if record.get(prompt) is not None and record.get(answer) is not None:
            return _side(where, record, prompt, "user") + _side(where, record, answer, "assistant")
    keys = ", ".join(map(str, record)) or "none"
    wanted = repr(messages_key) if messages_key else "messages, conversations, prompt and completion"
    raise DataError(f"{where}: no {wanted} (its keys: {keys}); set data.messages_key")


def _side(where: str, record: Mapping[str, Any], key: str, role: str) -> list[Any]:
    """One side of a pair as messages. Alpaca's ``input`` stands below its instruction."""
    value = record[key]
    if isinstance(value, list):
        return value
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {type(value).__name__}, not text or a list of messages; mend the record")
    more = record.get("input") if key == "instruction" else None
    return [{"role": role, "content": f"{value}\n\n{more}" if isinstance(more, str) and more else value}]


def _is_system(turn: Any) -> bool:
    return isinstance(turn, Mapping) and turn.get("role", turn.get("from")) == "system"


def _message(where: str, number: int, turn: Any) -> dict[str, Any]:
    """A message with role and content, and without the None that tables put where a record has nothing."""
    what = f"{where}: message {number}"
    if not isinstance(turn, Mapping):
        raise DataError(f"{what} is {type(turn).__name__}, not an object with role and content; mend or remove it")
    rest = {key: value for key, value in turn.items() if value is not None}
    role = rest.pop("role", None) or rest.pop("from", None)
    content = rest.pop("content", None)
    content = rest.pop("value", None) if content is None else content
    if not isinstance(role, str):
        raise DataError(f"{what} has no role (its keys: {', '.join(map(str, turn))}); mend or remove it")
    role = _CALLED.get(role, role)
    if role not in ROLES:
        raise DataError(f"{what} has the unknown role {role!r}; roles are {', '.join(ROLES)}; rename it")
    content = _joined(content)
    if content is None and role == "assistant" and rest.get("tool_calls"):
        return {"role": role, **rest}
    if not isinstance(content, str):
        got = "none" if content is None else type(content).__name__
        raise DataError(f"{what} must have text as content, got {got}; mend or remove it")
    return {"role": role, "content": content, **rest}


def _joined(content: Any) -> Any:
    """A list of parts that are all text as one text; anything else as it is."""
    if not isinstance(content, list) or not content:
        return content
    texts = [part["text"] for part in content if isinstance(part, Mapping) and isinstance(part.get("text"), str)]
    return "".join(texts) if len(texts) == len(content) else content


def _tools(where: str, record: Mapping[str, Any]) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str):  # parquet files keep them as JSON
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise DataError(f"{where}: 'tools' is not JSON ({error}); mend or remove it") from error
    if tools is not None and not isinstance(tools, list):
        raise DataError(f"{where}: 'tools' is {type(tools).__name__}, not a list; mend or remove it")
    return tools or None


# ------------------------------------------------------------------------------------------------------------ records


def _records(path: Path, damage: Damage) -> Iterator[tuple[str, Any, int]]:
    """(where it stands, record, bytes that it takes) of a file."""
    kind = kind_of(path)
    if kind == ".parquet":
        return _numbered(path, read_rows(path))
    if kind not in (".jsonl", ".json"):
        raise DataError(f"{path}: not chat data by its name; give jsonl, json or parquet files")
    return _list(path) if kind == ".json" and _is_list(path) else _numbered(path, read_records(path, damage))


def _numbered(path: Path, records: Iterator[Record]) -> Iterator[tuple[str, Any, int]]:
    return ((f"{path}:{record.line}", record.value, record.num_bytes) for record in records)


def _is_list(path: Path) -> bool:
    """Whether a JSON file is one list of records, as Alpaca's and ShareGPT's are, and not a record a line."""
    with opened(path) as file:
        first = next((line for line in file.handle if line.strip()), b"")
    return first.lstrip(b"\xef\xbb\xbf \t").startswith(b"[")


def _list(path: Path) -> Iterator[tuple[str, Any, int]]:
    with opened(path) as file:
        try:
            records = json.loads(file.handle.read().decode("utf-8-sig"))
        except ValueError as error:
            raise DataError(f"{path}: not JSON ({error}); mend it") from error
        for number, record in enumerate(records, 1):
            yield f"{path}, record {number}", record, file.progress()
