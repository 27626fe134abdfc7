"""Many prompts: read from a file, written to in batches, and told line by line."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import typer

from forgather_cli.cli.output import json_text, on_screen, only_json, tell_of_limit
from forgather_cli.documents.json_and_yaml import parse_json, parse_yaml
from forgather_cli.documents.regular_files import read_text
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.schema import Sampling
    from forgather_cli.inference.generation import Generator, Text

_KINDS = ".txt, .jsonl, .yaml or .yml"


@dataclass(frozen=True)
class Prompt:
    """A text to continue, or a conversation to answer."""

    where: str
    """As a message names it: an option, or FILE:LINE."""
    text: str = ""
    messages: Sequence[Mapping[str, Any]] | None = None

    def as_turn(self) -> Prompt:
        """What the user says, to a model that answers."""
        return replace(self, messages=self.messages or [{"role": "user", "content": self.text.strip()}])

    def tokens(self, model: Generator) -> list[int]:
        """Raises SetupError, with its place in the file, for a prompt that the model cannot continue."""
        if self.messages is None:
            return model.encode(self.text, self.where)
        try:
            rendered = model.render(self.messages)
        except SetupError as error:
            raise SetupError(f"{self.where}: {error}") from error
        return model.encode(rendered, self.where, is_rendered=True)

    @property
    def told(self) -> dict[str, Any]:
        return {"prompt": self.text} if self.text or self.messages is None else {"messages": list(self.messages)}


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a file, in the format of its ending. Raises ConfigError with every line that is no prompt."""
    kind = path.suffix.lower()
    if kind not in (".txt", ".jsonl", ".yaml", ".yml"):
        raise ConfigError(f"--prompts: must be a {_KINDS} file, got {path}")
    content = read_text(path, lambda why: ConfigError(f"--prompts: {why}; give a {_KINDS} file in UTF-8"))
    problems: list[str] = []
    if kind == ".txt":
        lines = [(number, line) for number, line in enumerate(content.split("\n"), 1) if line.strip()]
        found = [Prompt(f"{path}:{number}", line.removesuffix("\r")) for number, line in lines]
    else:
        found = list((_of_json_lines if kind == ".jsonl" else _of_yaml)(path, content, problems))
    if problems:
        raise ConfigError(problems[:5] + ([f"--prompts: {path}: and {len(problems) - 5} more"] * (len(problems) > 5)))
    if not found:
        raise ConfigError(f"--prompts: {path} has no prompts; write one on each line")
    return found


def _of_json_lines(path: Path, content: str, problems: list[str]) -> Iterator[Prompt]:
    for number, line in enumerate(content.split("\n"), 1):
        where = f"{path}:{number}"
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except ValueError as error:
            problems.append(f"--prompts: {where}: is not JSON ({error})")
            continue
        text, messages = (value.get("prompt"), value.get("messages")) if isinstance(value, dict) else (None, None)
        is_list = isinstance(messages, list) and messages and all(isinstance(each, dict) for each in messages)
        if isinstance(text, str) and messages is None:
            yield Prompt(where, text)
        elif is_list and text is None:
            yield Prompt(where, messages=messages)
        else:
            problems.append(f'--prompts: {where}: needs a text as "prompt" or a list as "messages", got {line:.60}')


def _of_yaml(path: Path, content: str, problems: list[str]) -> Iterator[Prompt]:
    try:
        values = parse_yaml(content)
    except ValueError as error:
        problems.append(f"--prompts: {path} is not YAML: {error}")
        return
    if values is not None and not isinstance(values, list):
        got = "a mapping" if isinstance(values, dict) else type(values).__name__
        problems.append(f"--prompts: {path} must hold a list of texts, got {got}; begin each text with '- '")
        return
    for number, value in enumerate(values or [], 1):
        if isinstance(value, str):
            yield Prompt(f"{path}, prompt {number}", value)
        else:
            problems.append(f"--prompts: {path}, prompt {number}: must be a text, got {value!r:.60}; quote it")


def write_all(
    model: Generator,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    batch_size: int,
    num_samples: int,
    output: Path | None,
    as_json: bool,
) -> None:
    """``num_samples`` texts to each prompt, in batches; a JSON line each to ``output``, and to standard output for
    ``as_json``, else the texts. What is done is written at once."""
    with only_json(as_json):
        work = [(number, prompt, prompt.tokens(model)) for number, prompt in enumerate(prompts)]
    work = [each for each in work for _ in range(num_samples)]
    with ExitStack() as stack:
        file = None if output is None else stack.enter_context(_opened(output))
        for start in range(0, len(work), batch_size):
            batch = work[start : start + batch_size]
            texts: dict[int, Text] = {}  # by row
            with only_json(as_json), doing("writing the texts"):
                for in_chat in (False, True):  # both may stand in one file, but end differently
                    rows = [row for row, (_, prompt, _) in enumerate(batch) if (prompt.messages is not None) == in_chat]
                    made = model.write([batch[row][2] for row in rows], sampling, in_chat=in_chat) if rows else []
                    texts |= zip(rows, made, strict=True)
            for row, (number, prompt, _) in enumerate(batch):
                _tell(number, prompt, texts[row], file, as_json)
            tell_of_limit(model, texts.values())
    if output is not None:
        tell(f"{len(work)} texts in {output}", sys.stderr)


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise SetupError(f"--output: {path} cannot be written: {error.strerror}; name another file") from error


def _tell(number: int, prompt: Prompt, text: Text, file: TextIO | None, as_json: bool) -> None:
    record = {
        "index": number,
        **prompt.told,
        "text": text.text,
        "num_tokens": text.num_tokens,
        "finish_reason": text.finish_reason,
    }
    line = json_text(record, indent=None)
    if file is not None:
        file.write(line + "\n")
        file.flush()
    if as_json:
        print(line, flush=True)
    elif file is None:
        between = "\n" if prompt.text and prompt.messages is not None else ""
        typer.echo(f"--- {number + 1} ---\n{on_screen(prompt.text + between + text.text)}")
        sys.stdout.flush()
