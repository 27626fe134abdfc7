"""Mutants of a module: each its source text with one small change at one place, so that line numbers stay.

Operators, bounds, signs, statements left out. Not changed are annotations, docstrings, decorators, f-strings, messages
(what is logged or raised) and assertions.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from pathlib import Path

_SWAPS: dict[type[ast.operator] | type[ast.cmpop] | type[ast.boolop], tuple[str, str]] = {
    ast.Add: (r"\+", "-"), ast.Sub: ("-", "+"), ast.Mult: (r"\*", "//"), ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"), ast.Mod: ("%", "*"), ast.LShift: ("<<", ">>"), ast.RShift: (">>", "<<"),
    ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: (r"\bis\b", "is not"), ast.IsNot: (r"\bis\s+not\b", "is"),
    ast.In: (r"\bin\b", "not in"), ast.NotIn: (r"\bnot\s+in\b", "in"),
    ast.And: (r"\band\b", "or"), ast.Or: (r"\bor\b", "and"),
}  # fmt: skip
"""Of an operator: how it is written (a pattern), and what takes its place."""
_LEFT_OUT = (
    ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Raise, ast.Continue, ast.Break, ast.Delete,
)  # fmt: skip
_LOGS = {"log", "_log", "logging", "logger", "warnings"}


@dataclass(frozen=True)
class Mutant:
    """``file``: in the package; ``within``: the function or class, dotted; ``before`` and ``after``: the changed lines;
    ``nth``: of the changes of one text to one other within that function."""

    file: str
    line: int
    within: str
    before: str
    after: str
    nth: int
    source: bytes

    @property
    def key(self) -> str:
        """It stays when other lines of the module are changed."""
        return f"{self.file}:{self.within}:{self.before} -> {self.after}" + (f" ({self.nth + 1})" if self.nth else "")

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.before} -> {self.after}"


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """All, each once."""
    module, seen, nth = ast.parse(source), {source}, dict[str, int]()
    lines = source.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    found = []
    for within, (start, end, text) in _Places(source, starts).of(module, ""):
        changed = source[:start] + text + source[end:]
        if changed in seen:
            continue
        seen.add(changed)
        first = source.count(b"\n", 0, start)
        last = source.count(b"\n", 0, end)
        before, after = (_stripped(text.splitlines()[first : last + 1]) for text in (source, changed))
        mutant = Mutant(file, first + 1, within, before, after, 0, changed)
        found.append(replace(mutant, nth=nth.get(mutant.key, 0)))
        nth[mutant.key] = nth.get(mutant.key, 0) + 1
    return found


def draw(mutants: dict[str, list[Mutant]], seed: int, number: int) -> list[Mutant]:
    """Evenly over modules. Fewer are the first of more, and what else a module has does not change their order."""

    def turn(what: str) -> bytes:
        return hashlib.sha256(f"{seed}:{what}".encode()).digest()

    piles = [sorted(mutants[file], key=lambda each: turn(each.key)) for file in sorted(mutants, key=turn)]
    deepest = max(map(len, piles), default=0)
    turns = (pile[depth] for depth in range(deepest) for pile in piles if depth < len(pile))
    return list(islice(filter(_compiles, turns), number))


def read(package: Path, files: list[str]) -> dict[str, list[Mutant]]:
    return {file: mutants_of(file, (package / file).read_bytes()) for file in files}


def _stripped(lines: list[bytes]) -> str:
    return " ".join(filter(None, (line.decode().strip() for line in lines)))


def _compiles(mutant: Mutant) -> bool:
    try:
        compile(mutant.source, mutant.file, "exec")
    except SyntaxError:
        return False
    return True


class _Places:
    """Where ``source`` can be changed: spans in bytes with what takes their place."""

    def __init__(self, source: bytes, starts: list[int]) -> None:
        self._source, self._starts = source, starts

    def of(self, node: ast.AST, within: str, function: bool = False) -> Iterator[tuple[str, tuple[int, int, bytes]]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            within = f"{within}.{node.name}".lstrip(".")
            function = not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.stmt):
            if _is_message(node) or isinstance(node, ast.Assert | ast.Import | ast.ImportFrom):
                return
            if function and isinstance(node, _LEFT_OUT) and not (isinstance(node, ast.AnnAssign) and not node.value):
                start, end = self._span(node)
                yield within, (start, end, b"pass" + b"\n" * self._source.count(b"\n", start, end))
            if isinstance(node, ast.Raise):
                return
        for change in self._changes(node):
            yield within, change
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                    yield from self.of(child, within, function)

    def _changes(self, node: ast.AST) -> Iterator[tuple[int, int, bytes]]:
        match node:
            case ast.BinOp():
                yield from self._swap(node.op, node.left, node.right)
            case ast.AugAssign():
                yield from self._swap(node.op, node.target, node.value)
            case ast.Compare():
                for op, (one, other) in zip(node.ops, pairwise([node.left, *node.comparators]), strict=True):
                    yield from self._swap(op, one, other)
            case ast.BoolOp():
                for one, other in pairwise(node.values):
                    yield from self._swap(node.op, one, other)
            case ast.UnaryOp(op=ast.Not() | ast.USub() as op):
                start, _ = self._span(node)
                sign = re.compile(rb"not\b\s*" if isinstance(op, ast.Not) else rb"-").match(self._source, start)
                assert sign is not None
                yield start, sign.end(), b""
            case ast.Constant(value=int() as number) if not isinstance(number, bool):
                for changed in (number + 1, number - 1):
                    yield (*self._span(node), b"%d" % changed)
            case ast.Slice(lower=lower, upper=upper):
                for end in (lower, upper):
                    if end is not None and not isinstance(end, ast.Constant | ast.UnaryOp):
                        start, stop = self._span(end)
                        for step in (b" + 1", b" - 1"):
                            yield start, stop, b"(" + self._source[start:stop] + b")" + step

    def _swap(
        self, op: ast.operator | ast.cmpop | ast.boolop, left: ast.AST, right: ast.AST
    ) -> Iterator[tuple[int, int, bytes]]:
        if type(op) in _SWAPS:
            written, other = _SWAPS[type(op)]
            start, end = self._span(left)[1], self._span(right)[0]
            # parentheses, and comments, which may have signs in them
            between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self._source[start:end])
            operator = re.search(written.encode(), between)
            assert operator is not None
            yield start + operator.start(), start + operator.end(), other.encode()

    def _span(self, node: ast.AST) -> tuple[int, int]:
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._starts[node.lineno - 1] + node.col_offset, self._starts[node.end_lineno - 1] + node.end_col_offset


def _is_message(node: ast.stmt) -> bool:
    """Docstrings, and calls that log."""
    if not isinstance(node, ast.Expr):
        return False
    call = node.value
    if isinstance(call, ast.Call):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        return isinstance(owner, ast.Name) and owner.id in _LOGS
    return isinstance(call, ast.Constant)
