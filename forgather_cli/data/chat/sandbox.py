"""What a chat template may use: Jinja's immutable sandbox with the names that transformers (5.23) gives templates."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
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
"""For one conversation, of the processor too; hundreds of turns take milliseconds."""
_MAX_LENGTH = 10_000_000  # characters of a conversation; characters or items of what an operator makes
_GROWING = {"center", "expandtabs", "format", "format_map", "indent", "join", "ljust", "replace", "rjust", "wordwrap",
            "zfill"}  # fmt: skip
"""Filters and methods that may make a large text of a small one."""


@dataclass
class Trace:
    """What a rendering notes of itself. A place is the number of pieces of text that were written before."""

    pieces: list[str] = field(default_factory=list)
    """The text so far, which whoever renders adds to."""
    blocks: list[tuple[int, str]] = field(default_factory=list)
    """Of each generation block the place where it came to its end, and what it made."""
    steps: list[tuple[int, int, int]] = field(default_factory=list)
    """Of each step of a loop that writes where it stands: the loop, the place, the item's id(); and 0 at its end."""


class TooSlow(jinja2.TemplateError):
    """A template that has not come to its end in time."""


class Environment(ImmutableSandboxedEnvironment):
    """Templates that end: loops and macros look at the clock, operators, filters and methods at the size of what they
    make."""

    intercepted_binops = frozenset(["*", "**", "+", "%"])
    concat = staticmethod(lambda pieces: "".join(map(str, within_bound(pieces))))

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._until = self._busy_until = 0.0
        self._trace: Trace | None = None
        self.globals |= {"_tick": self._tick, "_step": self._step, "_end": self._end, "_concat": self.concat}
        del self.globals["lipsum"]  # as many words as a template likes
        self.filters |= {name: _bounded(name, self.filters[name]) for name in _GROWING & self.filters.keys()}

    def begin(self, trace: Trace | None = None) -> None:
        """A rendering begins, which notes in ``trace`` what there is to note."""
        self._until = time.monotonic() + RENDERING_SECONDS
        self._busy_until = time.thread_time() + RENDERING_SECONDS
        self._trace = trace

    def _tick(self) -> None:
        # a process that was stopped, or had no core, has not rendered meanwhile; to ask for that alone takes longer
        if time.monotonic() > self._until and time.thread_time() > self._busy_until:
            raise TooSlow(f"it has not come to its end within {RENDERING_SECONDS:g} s")

    def _step(self, loop: int, item: Any) -> None:
        if time.monotonic() > self._until:  # at each turn of a chat: a call more would be felt
            self._tick()
        if (trace := self._trace) is not None:
            trace.steps.append((loop, len(trace.pieces), id(item)))

    def _end(self, loop: int) -> None:
        if self._trace is not None:
            self._trace.steps.append((loop, len(self._trace.pieces), 0))

    def note_block(self, text: str) -> None:
        """A generation block has made ``text``."""
        if self._trace is not None:
            self._trace.blocks.append((len(self._trace.pieces), text))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Guards().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if type(left) is str and type(right) is str and operator == "+" and len(left) + len(right) <= _MAX_LENGTH:
            return left + right  # nearly all that templates do: a sixth of the time of a conversation
        if operator == "%" and isinstance(left, str):
            _check_growth("%", left, *(right if isinstance(right, tuple) else [right]))
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

    def call(self, context: Any, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(called, "__wrapped__", called)  # Jinja wraps str.format
        text, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(text, str) and name in _GROWING:
            called = _bounded(name, called, text)
        return super().call(context, called, *args, **kwargs)


def _bounded(name: str, make: Callable[..., str], *own: str) -> Callable[..., str]:
    """A filter of Jinja's, or a method of its ``own`` text, that looks at the size of what it will make."""
    at = int(hasattr(make, "jinja_pass_arg"))  # the place of a filter's value

    @functools.wraps(make)
    def bounded(*args: Any, **kwargs: Any) -> str:
        given = [*own, *args[at:], *(kwargs[key] for key in sorted(kwargs, reverse=True))]  # old before new
        if name == "join":
            between = sum(len(str(each)) for each in (own or given[1:]))
            args = (*args[:at], *(within_bound(each, between) for each in args[at : at + 1]), *args[at + 1 :])
        else:
            _check_growth(name if own or name != "format" else "%", str(given[0]), *given[1:])
        return make(*args, **kwargs)

    return bounded


def _check_growth(name: str, text: str, *given: Any) -> None:
    """Raise where a filter or method would make ``_MAX_LENGTH`` characters of a text, or more."""
    values = [one for each in given for one in (each.values() if isinstance(each, Mapping) else [each])]
    texts = [*map(str, within_bound(values))]
    largest = max(map(len, texts), default=0)
    if name == "replace":
        grown = text.count(texts[0]) * largest
    elif name in ("%", "format", "format_map"):
        # a spec, and in it the mark of a width that is given with the values
        spec, mark = (r"%(?:\([^)]*\))?([^A-Za-z%]*)", "*") if name == "%" else (r"\{[^{}]*:([^{}]*\{?)", "{")
        widths = re.findall(r"\d+", " ".join(re.findall(spec, text)).replace(mark, str(_MAX_LENGTH)))
        grown = (text.count("%") + text.count("{")) * max([largest, *map(int, widths)])
    else:
        grown = (len(text) + 1) * max([largest, *(each for each in values if isinstance(each, int))])
    if grown >= _MAX_LENGTH:
        raise jinja2.TemplateError(f"what {name} makes in it is too large")


def within_bound(pieces: Iterable[Any], between: int = 0) -> Iterator[Any]:
    """The pieces of a text, ``between`` characters apart, as long as it is none too large."""
    length = 0
    for piece in pieces:
        length += len(str(piece)) + between
        if length > _MAX_LENGTH:
            raise jinja2.TemplateError(f"it writes more than {_MAX_LENGTH:,} characters")
        yield piece


class _Guards(NodeTransformer):
    """Puts a look at the clock into each loop and macro, notes of their steps at loops that write where they stand, and
    a function in the place of ``~``."""

    def __init__(self) -> None:
        self._num_loops = self._stored = 0

    def visit_For(self, node: nodes.For) -> Any:
        writes_here = not self._stored and isinstance(node.target, nodes.Name)
        self._stored += node.recursive
        self.generic_visit(node)
        self._stored -= node.recursive
        if not writes_here or node.recursive:
            node.body.insert(0, _call("_tick", node))
            return node
        self._num_loops += 1
        loop = nodes.Const(self._num_loops)
        assert isinstance(node.target, nodes.Name)
        node.body.insert(0, _call("_step", node, loop, nodes.Name(node.target.name, "load")))
        return [node, _call("_end", node, loop)]

    def visit_Macro(self, node: Any) -> Any:
        self._visit_stored(node)
        node.body.insert(0, _call("_tick", node))
        return node

    visit_CallBlock = visit_Macro

    def _visit_stored(self, node: Any) -> Any:
        """What is inside is text that is kept, and may be written elsewhere or never."""
        self._stored += 1
        self.generic_visit(node)
        self._stored -= 1
        return node

    visit_AssignBlock = visit_FilterBlock = _visit_stored

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Call(nodes.Name("_concat", "load"), [nodes.List(node.nodes)], [], None, None, lineno=node.lineno)


def _call(name: str, at: nodes.Node, *arguments: nodes.Expr) -> nodes.Node:
    return nodes.ExprStmt(nodes.Call(nodes.Name(name, "load"), list(arguments), [], None, None)).set_lineno(at.lineno)


class Turns(Extension):
    """``{% generation %}`` blocks: what stands in them is the assistant's."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.found = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.found = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Any) -> str:
        text = str(caller())
        assert isinstance(self.environment, Environment)
        self.environment.note_block(text)
        return text


def sandbox(now: Callable[[], datetime]) -> Environment:
    """``now``: one moment for all renderings, so that parts of a conversation agree across midnight."""

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
        "strftime_now": lambda style: now().strftime(style),
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
