"""Completion of recipes and overrides in the shell."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial

import typer

Candidate = tuple[str, str]
"""What may stand there, and what it is."""


def complete_words(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """What may follow: recipes, settings, options of a group."""
    return _completions(ctx, "words", incomplete)


def complete_override(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """Settings and options of a group, without recipes."""
    return _completions(ctx, "overrides", incomplete)


def _completions(ctx: typer.Context, argument: str, incomplete: str) -> list[Candidate]:
    """What may follow the words that ``argument`` has so far, with what the user's ``--config-dir`` adds."""
    with contextlib.suppress(Exception):  # a broken recipe must not print into the user's prompt
        from forgather_cli.cli.common import is_override
        from forgather_cli.config.complete import complete

        candidates = partial(complete, config_dir=ctx.params.get("config_dir"))
        words, incomplete, given = _joined(list(ctx.params.get(argument) or []), incomplete, candidates)
        found = candidates(incomplete, words)
        if argument == "overrides":
            found = [(text, about) for text, about in found if is_override(text)]
        return [(text[given:], about) for text, about in found]
    return []


def _joined(
    words: list[str], incomplete: str, candidates: Callable[[str, list[str]], list[Candidate]]
) -> tuple[list[str], str, int]:
    """Undo bash's splitting at ``=`` (COMP_WORDBREAKS): ``["model", "="], "na"`` is ``model=na``.

    Of a word that ends with the ``=`` only the key arrives, so a setting's bare name before nothing is taken for that.
    Returns also how many characters of the joined word the shell has settled and wants left out.
    """
    if len(words) >= 2 and words[-1] == "=":
        return words[:-2], f"{words[-2]}={incomplete}", len(words[-2]) + 1
    if not incomplete and words and "=" not in words[-1] and candidates(f"{words[-1]}=", words[:-1]):
        return words[:-1], f"{words[-1]}=", len(words[-1]) + 1
    return words, incomplete, 0
