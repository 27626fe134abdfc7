"""What a chat template may use: Jinja's immutable sandbox with the names that transformers (5.23) gives templates."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

Span = tuple[int, int]
"""Characters [start, stop) of a text."""


class Turns(Extension):
    """``{% generation %}`` blocks: what stands in them is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.found = False
        self._blocks: list[str] | None = None
        self._spans: list[Span] = []

    @contextmanager
    def noted(self, blocks: list[str]) -> Iterator[list[Span]]:
        """The spans of the blocks rendered inside, by the text in ``blocks``, to which the caller adds as it comes."""
        self._blocks, self._spans = blocks, []
        try:
            yield self._spans
        finally:
            self._blocks = None

    def parse(self, parser: Parser) -> nodes.Node:
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        if self._blocks is not None:
            start = sum(map(len, self._blocks))
            self._spans.append((start, start + len(text)))
        return text


def sandbox(now: datetime) -> jinja2.Environment:
    """``now`` is one moment for all renderings, so that parts of a conversation agree across midnight."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Turns, loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals |= {
        "raise_exception": _raise,
        "strftime_now": lambda style: now.strftime(style),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Jinja's own escapes HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class _Namespace(Namespace):
    """Refuses names with an underscore in front, which lead to the interpreter's insides."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, args = args[0], args[1:]  # as in Jinja, so that namespace(self=...) works
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.TemplateError(f"a namespace holds no attribute with an underscore in front, got {name!r}")


class _Dict:
    """``dict(...)`` without the class behind it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)
