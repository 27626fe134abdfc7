"""A folder's table of refusals: what is given, and what its error must say."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest


def case(kind: Any, told: str, call: Callable[..., object], /, *given: Any, **named: Any) -> Any:
    """``call(*given, **named)`` ends with an error of this kind whose message matches."""
    return pytest.param(kind, told, partial(call, *given, **named), id=told)


def cases(kind: Any, call: Callable[..., object], /, *rows: tuple[Any, ...]) -> list[Any]:
    """Of rows that hold what is given and, last, what is said."""
    return [case(kind, told, call, *given) for *given, told in rows]


def table(*rows: Any, leaves_no: str = "") -> Any:
    """A test of each row, in a directory of its own, in which no file of this pattern is left."""

    @pytest.mark.parametrize(("kind", "told", "call"), rows)
    @pytest.mark.usefixtures("own_directory")
    def test(kind: type[Exception], told: str, call: Callable[[], object]) -> None:
        with pytest.raises(kind, match=told):
            call()
        assert not leaves_no or not list(Path().glob(leaves_no)), "nothing is left behind"

    return test
