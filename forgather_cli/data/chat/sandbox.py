"""What a chat template may use: Jinja's immutable sandbox with the names that transformers (5.23) gives templates."""

from __future__ import annotations

import json
import time
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
from jinja2.visitor import NodeTransformer

Span = tuple[int, int]
"""Characters [start, stop) of a text."""


RENDERING_SECONDS = 5.0
"""For one conversation; hundreds of turns take milliseconds."""
_MAX_LENGTH = 10_000_000  # characters or items of what an operator makes


class TooSlow(jinja2.TemplateError):
    """A template that has not come to its end in time."""


class Environment(ImmutableSandboxedEnvironment):
    """Templates that end: loops and macros look at the clock, operators at the size of what they make."""

    intercepted_binops = frozenset(["*", "**", "+"])

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._until = 0.0
        self.globals |= {"_tick": self._tick, "_concat": _concat}

    def begin(self) -> None:
        """A rendering begins."""
        self._until = time.monotonic() + RENDERING_SECONDS

    def _tick(self) -> None:
        if time.monotonic() > self._until:
            raise TooSlow(f"it has not come to its end within {RENDERING_SECONDS:g} s")

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+" and len(left) + len(right) <= _MAX_LENGTH:
            return left + right  # nearly all that templates do: a sixth of the time of a conversation
        if operator == "**":
            too_large = abs(right) > 1000 or abs(left) > 1_000_000
        else:
            lengths = [len(side) for side in (left, right) if isinstance(side, str | list | tuple)]
            numbers = [side for side in (left, right) if isinstance(side, int)]
            factor = max(numbers, default=0) if operator == "*" else 2
            too_large = bool(lengths) and max(lengths) * factor > _MAX_LENGTH
        if too_large:
            raise jinja2.TemplateError(f"what {operator} makes in it is too large")
        return super().call_binop(context, operator, left, right)


class _Guards(NodeTransformer):
    """Puts a look at the clock into each loop and macro, and a function in the place of ``~``."""

    def visit_For(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name("_concat", "load"), node.nodes, [], None, None).set_lineno(node.lineno)


def _concat(*parts: Any) -> str:
    texts = [str(part) for part in parts]
    if sum(map(len, texts)) > _MAX_LENGTH:
        raise jinja2.TemplateError("what ~ makes in it is too large")
    return "".join(texts)


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


def sandbox(now: datetime) -> Environment:
    """``now`` is one moment for all renderings, so that parts of a conversation agree across midnight."""

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def raise_exception(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[Turns, loopcontrols])
    environment.filters["tojson"] = tojson  # Jinja's own escapes HTML characters
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda style: now.strftime(style),
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


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
