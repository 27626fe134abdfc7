"""Completion of recipes and overrides in the shell."""

from __future__ import annotations

import contextlib

import typer

Candidate = tuple[str, str]
"""What may stand there, and what it is."""


def complete_words(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """What may follow: recipes, settings, options of a group."""
    return _completions(list(ctx.params.get("words") or []), incomplete)


def complete_override(ctx: typer.Context, incomplete: str) -> list[Candidate]:
    """Settings and options of a group, without recipes."""
    found = _completions(list(ctx.params.get("overrides") or []), incomplete)
    return [(text, about) for text, about in found if "=" in incomplete or text.endswith("=")]


def _completions(words: list[str], incomplete: str) -> list[Candidate]:
    with contextlib.suppress(Exception):  # a broken recipe must not print into the user's prompt
        from forgather_cli.config.complete import complete

        words, incomplete, given = _joined(words, incomplete)
        return [(text[given:], about) for text, about in complete(incomplete, words)]
    return []


def _joined(words: list[str], incomplete: str) -> tuple[list[str], str, int]:
    """Undo bash's splitting at ``=`` (COMP_WORDBREAKS): ``["model", "="], "na"`` is ``model=na``.

    Of a word that ends with the ``=`` only the key arrives, so a setting's bare name before nothing is taken for that.
    Returns also how many characters of the joined word the shell has settled and wants left out.
    """
    from forgather_cli.config.complete import complete

    if len(words) >= 2 and words[-1] == "=":
        return words[:-2], f"{words[-2]}={incomplete}", len(words[-2]) + 1
    if not incomplete and words and "=" not in words[-1] and complete(f"{words[-1]}=", words[:-1]):
        return words[:-1], f"{words[-1]}=", len(words[-1]) + 1
    return words, incomplete, 0
