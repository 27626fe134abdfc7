"""``forgather generate`` line by line: a conversation, on a terminal or with the lines of a pipe as turns, and texts to
continue on a terminal.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

from forgather_cli.cli.output import only_json, print_json, show, tell_of_limit
from forgather_cli.errors import SetupError
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.schema import Sampling
    from forgather_cli.data.chat.template import Message
    from forgather_cli.inference.generation import Generator, Text

_ASK = "> "
_KEYS = "Ctrl-C stops the answer, Ctrl-D or exit ends."


def converse(model: Generator, sampling: Sampling, *, system: str | None, prompt: str | None, as_json: bool) -> None:
    """Answer ``prompt`` alone, or what comes line by line until it ends. Raises SetupError.

    On a terminal Ctrl-C ends an answer, and at the prompt the conversation; Ctrl-D and ``exit`` end it too.
    """
    messages: list[Message] = [] if system is None else [{"role": "system", "content": system}]
    model.render([*messages, {"role": "user", "content": "?"}])  # one that fails does so before the first question
    on_terminal = prompt is None and sys.stdin.isatty() and not as_json
    if on_terminal:
        tell(f"Talk to the model. {_KEYS}", sys.stderr)
    for words in [prompt] if prompt is not None else _lines(on_terminal):
        asked: list[Message] = [*messages, {"role": "user", "content": words.strip()}]
        try:
            asked, ids = _fitting(model, asked, sampling.max_new_tokens, keep=0 if system is None else 1)
        except SetupError as error:
            if not on_terminal:
                raise
            tell(f"error: {error}", sys.stderr)
            continue
        answer = _answer(model, sampling, ids, in_chat=True, streams=not as_json, interrupts=on_terminal)
        messages = [*asked, {"role": "assistant", "content": answer}]
    if as_json:
        print_json({"messages": messages})
    elif on_terminal:
        typer.echo()


def continue_texts(model: Generator, sampling: Sampling) -> None:
    """On a terminal: continue each line that is typed, by itself, until Ctrl-D or ``exit``. Ctrl-C ends a text."""
    tell(f"Type the beginning of a text. {_KEYS}", sys.stderr)
    for words in _lines(on_terminal=True):
        try:
            ids = model.encode(words, "the text")
        except SetupError as error:
            tell(f"error: {error}", sys.stderr)
            continue
        show(words)
        _answer(model, sampling, ids, in_chat=False, streams=True, interrupts=True)
    typer.echo()


def _lines(on_terminal: bool) -> Iterator[str]:
    """What the user says, without line breaks; blank lines are nothing."""
    if on_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - input() then edits lines and keeps a history
    while True:
        try:
            line = input(_ASK) if on_terminal else sys.stdin.readline()
        except EOFError:
            return
        if not (on_terminal or line) or (on_terminal and line.strip() == "exit"):  # "": the end of a pipe
            return
        if line.strip():
            yield line.rstrip("\n")


def _fitting(model: Generator, messages: list[Message], answer: int, *, keep: int) -> tuple[list[Message], list[int]]:
    """(messages, tokens) of a conversation that leaves room for ``answer`` tokens, or a quarter of all the model takes:
    its oldest turns are forgotten, and that is said. The first ``keep`` messages stay. Raises SetupError where the last
    message alone leaves no room at all.
    """
    forgotten = 0
    while True:
        ids = model.tokenizer.encode(model.render(messages))
        turns = [i for i, message in enumerate(messages) if message["role"] == "user"]
        full = model.limit is not None and len(ids) + min(answer, model.limit // 4) > model.limit
        if not full or len(turns) == 1:
            break
        messages = [*messages[:keep], *messages[turns[1] :]]
        forgotten += 1
    if forgotten:
        what = "the oldest turn is" if forgotten == 1 else f"the oldest {forgotten} turns are"
        tell(f"note: the model takes {model.limit} tokens; {what} forgotten", sys.stderr)
    return messages, model.encode(model.render(messages), "the conversation", is_rendered=True)


def _answer(
    model: Generator, sampling: Sampling, ids: list[int], *, in_chat: bool, streams: bool, interrupts: bool
) -> str:
    """What the model says; what it had said by then where Ctrl-C ends it."""
    said: list[str] = []

    def heard(row: int, text: str) -> None:
        said.append(text)
        if streams:
            show(text)

    try:
        with only_json(not streams), contextlib.nullcontext() if streams else doing("writing the answer"):
            texts: list[Text] = model.write([ids], sampling, in_chat=in_chat, show=heard)
    except KeyboardInterrupt:
        if not interrupts:
            raise
        texts = []
    if streams:
        typer.echo()
    tell_of_limit(model, texts)
    return "".join(said).strip()
