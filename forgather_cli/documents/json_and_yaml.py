"""JSON and YAML that anybody may have written, parsed to plain values. No torch here.

A document may be nested deeper than a parser's stack, which ends the process, or expand to more than memory holds.
Each is an error that says so.
"""

from __future__ import annotations

import json
import re
from typing import Any

MAX_DEPTH = 200
"""Of lists and mappings in each other. Python's own limit leaves too little stack to those who walk through them."""
MAX_NODES = 1_000_000
"""Of a YAML document, aliases counted as often as they are used."""


def parse_json(text: str | bytes, *, any_text: bool = False) -> Any:
    """Raises ValueError, also for what is nested too deeply, and unless ``any_text`` for half of a surrogate pair."""
    text = text if isinstance(text, str) else text.decode()
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH or ("\\u" in text and not any_text):
        _check(value, any_text)
    return value


def check_text(value: Any) -> None:
    """Raise ValueError for half of a surrogate pair in a parsed document."""
    _check(value, any_text=False)


def _check(value: Any, any_text: bool) -> None:
    todo = [(value, 0)]
    while todo:
        item, depth = todo.pop()
        if depth > MAX_DEPTH:
            raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        if isinstance(item, dict):
            todo += ((part, depth + 1) for pair in item.items() for part in pair)
        elif isinstance(item, list):
            todo += ((part, depth + 1) for part in item)
        elif isinstance(item, str) and not any_text and has_half(item):
            raise ValueError("a text in it holds half of a surrogate pair, which is no character")


def has_half(text: str) -> bool:
    """True for half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()  # fifty times as fast as a look at each letter
    except UnicodeEncodeError:
        return True
    return False


def parse_yaml(text: str) -> Any:
    """Plain values. Raises ValueError, also for what is nested too deeply and for aliases that expand without end."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast, where PyYAML was built with libyaml
    if re.search(r"\\u[dD][89a-fA-F]", text):  # bytes of a file's name that are no UTF-8, which libyaml refuses
        loader = yaml.SafeLoader
    try:
        depth = 0
        for event in yaml.parse(text, loader):  # first, since building a tree of it may end the process (libyaml 0.2.5)
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
        made = loader(text)
        try:
            node = made.get_single_node()
            if node is None:
                return None
            if _expanded(node, {})[0] > MAX_NODES:
                raise ValueError(f"its aliases expand to more than {MAX_NODES:,} values")
            return made.construct_document(node)
        finally:
            made.dispose()
    except (yaml.YAMLError, RecursionError) as error:
        said = " ".join(str(error).split())
        # The libyaml of PyYAML 6.0.4 has a bound of its own, and its scanner is ahead of the events counted above.
        raise ValueError(f"it is nested too deeply: {said}" if "nesting depth" in said else said) from error


def _expanded(node: Any, known: dict[int, tuple[int, int]], depth: int = 0) -> tuple[int, int]:
    """(values, depth) of a YAML node with its aliases expanded. Raises ValueError for one that is part of itself."""
    if id(node) in known:
        return known[id(node)]
    if depth > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep, or is part of itself")
    parts = node.value if isinstance(node.value, list) else []
    inside = [part for item in parts for part in (item if isinstance(item, tuple) else (item,))]
    sizes = [_expanded(part, known, depth + 1) for part in inside]
    size, height = 1 + sum(size for size, _ in sizes), 1 + max((height for _, height in sizes), default=0)
    if height > MAX_DEPTH:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep")
    known[id(node)] = size, height
    return size, height
