"""What a model writes, on a terminal or in a pipe."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from forgather_cli.generation import Generator, Text


def on_screen(text: str) -> str:
    """``text`` as it may go to standard output: no bytes of a model's drive a terminal."""
    from forgather_cli.callbacks.console import printable

    if sys.stdout.isatty():
        return printable(text, "stdout")
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, errors="replace").decode(encoding)


def show(text: str) -> None:
    """Write a piece of a text now."""
    typer.echo(on_screen(text), nl=False)
    sys.stdout.flush()


def tell_of_limit(model: Generator, texts: Iterable[Text]) -> None:
    """Say where a text ended since the model knows no more positions, and not since it was done."""
    cut = sum(text.finish_reason == "limit" for text in texts)
    if cut:
        what = "the text ends" if cut == 1 else f"{cut} texts end"
        typer.echo(f"note: {what} at token {model.limit} (prompt and text), where the model's positions end", err=True)
