"""Tokens to add to a vocabulary: the file that names them, the tokenizer they go into, and its chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.text.tokenizer import Tokenizer, add_to_directory, has_token
from forgather_cli.documents.json_and_yaml import parse_json
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError
from forgather_cli.finalize.options import read_given


@dataclass(frozen=True)
class NewToken:
    """A token as the file names it."""

    text: str
    special: bool
    """Left out where text is decoded without special tokens."""
    line: int
    """Of the file, from 1; in a JSON list the number of the entry."""


# -------------------------------------------------------------------------------------------------------------- file


def read_new_tokens(path: Path) -> list[NewToken]:
    """The tokens of a file: one a line, or a JSON list; an entry may be an object ``{"token": ..., "special": ...}``.

    Tokens are special unless an object says otherwise. Raises DataError with the line.
    """
    text = read_given("--add-tokens", path, "tokens, one a line")
    tokens = [_token(path, place, entry) for place, entry in _entries(path, text)]
    if not tokens:
        raise DataError(f"--add-tokens: {path} names no token; write one a line, or a JSON list")
    seen: dict[str, int] = {}
    for token in tokens:
        if token.text in seen:
            raise DataError(f"--add-tokens: {path}:{token.line}: {token.text!r} is in line {seen[token.text]} already")
        seen[token.text] = token.line
    return tokens


def _entries(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """(line, a string or what JSON holds there); a token like ``[INST]`` does not make its file a JSON list."""
    start = text.lstrip()
    if path.suffix == ".json" or (start.startswith("[") and start[1:].lstrip()[:1] in ('"', "{", "]")):
        try:
            found = parse_json(text)
        except ValueError as error:
            raise DataError(f"--add-tokens: {path}:{getattr(error, 'lineno', 1)}: not JSON ({error})") from error
        if not isinstance(found, list):
            raise DataError(f"--add-tokens: {path}:1: must hold a JSON list of tokens, got {type(found).__name__}")
        yield from enumerate(found, start=1)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if line.startswith("{"):
            try:
                yield number, parse_json(line)
            except ValueError as error:
                raise DataError(
                    f'--add-tokens: {path}:{number}: not a JSON object ({error}); write {{"token": "...", "special": '
                    "true}"
                ) from error
        elif line.strip():
            yield number, line


def _token(path: Path, line: int, entry: Any) -> NewToken:
    where = f"--add-tokens: {path}:{line}"
    special: Any = True
    if isinstance(entry, dict):
        if unknown := sorted(entry.keys() - {"token", "special"}):
            raise DataError(f"{where}: unknown key {unknown[0]!r}; an entry has token and special")
        special = entry.get("special", True)
        entry = entry.get("token")
    if not isinstance(entry, str) or not entry:
        raise DataError(f'{where}: must be a token or {{"token": "...", "special": true}}, got {entry!r}')
    if not isinstance(special, bool):
        raise DataError(f"{where}: special must be true or false, got {special!r}")
    if entry != entry.strip():
        raise DataError(f"{where}: blanks around the token {entry!r}; take them out")
    return NewToken(entry, special, line)


# --------------------------------------------------------------------------------------------------------- tokenizer


def check_new(tokens: Iterable[NewToken], tokenizer: Tokenizer, path: Path) -> None:
    """Raise DataError for a token that the vocabulary has."""
    for token in tokens:
        if has_token(tokenizer, token.text):
            raise DataError(
                f"--add-tokens: {path}:{token.line}: {token.text!r} is a token already "
                f"({tokenizer.encode(token.text)[0]}); take it out"
            )


def add_to_tokenizer(directory: Path, tokens: Sequence[NewToken]) -> dict[str, int]:
    """Add tokens to the ``tokenizer.json`` in ``directory``; their ids follow the vocabulary's."""
    tokenizer = add_to_directory(directory, [(token.text, token.special) for token in tokens])
    return {token.text: tokenizer.token_to_id(token.text) or 0 for token in tokens}


# ------------------------------------------------------------------------------------------------------ chat template


def read_chat_template(path: Path) -> str:
    """The text of a template file that compiles. Raises DataError."""
    text = read_given("--chat-template", path, "a Jinja template")
    if not text.strip():
        raise DataError(f"--chat-template: {path} is empty; write a Jinja template into it, or leave the option out")
    try:
        ChatTemplate(text, {})
    except DataError as error:
        raise DataError(f"--chat-template: {path}: {error}; correct it there, or leave the option out") from error
    return text


def write_chat_template(directory: Path, text: str) -> None:
    """Put a template beside a tokenizer, as its only one. Raises DataError where it refuses a plain conversation."""
    (directory / "chat_template.jinja").write_text(text, encoding="utf-8")
    config = directory / "tokenizer_config.json"
    if config.exists():
        settings = read_json_object(config, DataError)
        if settings.pop("chat_template", None) is not None:
            config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
