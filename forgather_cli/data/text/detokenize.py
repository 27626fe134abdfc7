"""Text from tokens as they come."""

from __future__ import annotations

from collections.abc import Sequence

from forgather_cli.data.text.tokenizer import Tokenizer

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BEHIND, _WINDOW = 8, 32  # tokens


class Detokenizer:
    """The text that follows ``prompt``, token by token, up to the first of the ``stops`` texts.

    A character of several tokens comes when it is whole. What may be the beginning of a stop text waits until it is
    known. Only the last tokens are decoded each time, so that the cost does not grow with the text; those before give
    the spaces that some tokenizers drop from the first token they decode.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int] = (), stops: Sequence[str] = ()) -> None:
        self._tokenizer, self._stops = tokenizer, [stop for stop in stops if stop]
        self._ids = list(prompt[-_BEHIND:])
        self._known = len(self._decoded())
        """Characters of the decoded window that were there before, or were taken."""
        self._waiting = ""
        self.stopped = False
        """A stop text has come. It and what follows it are left out."""

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)

    def add(self, token: int) -> str:
        """Take a token; returns what is certain now, and nothing more once it has stopped."""
        if self.stopped:
            return ""
        self._ids.append(token)
        text = self._decoded()
        is_whole = not text.endswith(_UNFINISHED)
        upto = len(text) if is_whole else len(text) - 1
        new, self._known = text[self._known : upto], max(self._known, upto)
        if is_whole and len(self._ids) > _WINDOW:
            del self._ids[:-_BEHIND]
            self._known = len(self._decoded())
        text = self._waiting + new
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._waiting = True, ""
            return text[: min(found)]
        # characters at the end with which a stop text begins
        ends = (n for stop in self._stops for n in range(1, min(len(text) + 1, len(stop))) if text.endswith(stop[:n]))
        held = max(ends, default=0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """What is left when no more tokens come: a broken character, or the beginning of a stop text."""
        if self.stopped:
            return ""
        left, self._waiting = self._waiting + self._decoded()[self._known :], ""
        return left
