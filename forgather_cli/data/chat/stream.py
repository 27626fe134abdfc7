"""Conversations of a stream of the ``datasets`` library: ids and targets as those of files, made while it is read."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.chat.conversations import conversation_of, conversations_in
from forgather_cli.data.chat.instruct import (
    RULES,
    Chats,
    Rendered,
    encoded,
    find_tokenizer,
    noted,
    tell_markers,
    unknown_markers,
)
from forgather_cli.data.chat.keys import Keys, check_keys
from forgather_cli.data.text.hf import without_added
from forgather_cli.data.text.read import Damage, Record
from forgather_cli.data.text.token_stream import is_told

_NAME = "the stream (rows from where it was opened)"
_LOOKED_AT = 1000  # rows, for keys that nothing reads
_log = logging.getLogger(__name__)
Ints = NDArray[np.int64]


class ChatDocuments:
    """Rows of a stream as conversations; each is cut or left out by ``too_long`` where it comes."""

    def __init__(self, option: InstructSettings, model_tokens: int | None, features: Any) -> None:
        """``features``: the library's types of the columns. ``model_tokens``: see ``load_data``. Raises DataError."""
        self._given = option, model_tokens, features
        tokenizer, template, added = find_tokenizer(option, model_tokens)
        self.chats = Chats(option, (), (), tokenizer, template, added)
        self._left_out: Counter[str] = Counter()

    @property
    def rules(self) -> list[Any]:
        """What decides, beside rows and tokenizer, which ids and targets are made of them."""
        option, template = self.chats.option, self.chats.template
        keys = [option.messages_key, list(option.mapping.items()), self.chats.ignored, *self.chats.dated.values()]
        rules = RULES if template.takes("user") == (False, True) else RULES - 1
        return [rules, option.train_on, option.too_long, *keys, [template.source, template.special_tokens]]

    def __reduce__(self) -> Any:  # to a data worker: a compiled template cannot travel
        return ChatDocuments, self._given

    def check(self, rows: Iterator[dict[str, Any]]) -> None:
        """Say what there is to say of the first rows' markers. Raises DataError where the rows have keys that carry
        meaning and that nothing reads."""
        chats = self.chats
        keys = Keys(chats.option, chats.template)
        texts = [each.text for each in self._rendered(islice(rows, _LOOKED_AT), keys)]
        check_keys(chats.option, keys.found())
        tell_markers(chats.added, unknown_markers(chats, texts))
        self._left_out.clear()  # they are read again

    def read(self, rows: Iterator[dict[str, Any]]) -> Iterator[Rendered]:
        return self._rendered(rows, Keys(self.chats.option, self.chats.template))

    def _rendered(self, rows: Iterator[dict[str, Any]], keys: Keys) -> Iterator[Rendered]:
        option, _, features = self._given
        use, damage = partial(noted, self.chats, keys), Damage()
        for number, row in enumerate(rows, 1):
            # one by one, since a stream is not read to its end to find all that are bad
            record = Record(number, without_added(row, features), 0)
            yield from conversations_in([record], _NAME, option, use, damage, is_table=False, read=conversation_of)
            if damage.skipped:
                self._note("skipped", f"no conversation, left out ({damage.skipped.pop()})")

    def _note(self, kind: str, what: str) -> None:
        self._left_out[kind] += 1
        if is_told(self._left_out[kind]):
            _log.warning("data=instruct: %d rows of the stream %s", self._left_out[kind], what)

    def size(self, document: Rendered) -> int:
        return len(document.text)

    def encoded(self, documents: Sequence[Rendered]) -> tuple[Ints, Ints, Ints]:
        option = self.chats.option
        kept: list[NDArray[Any]] = []
        targets: list[NDArray[Any]] = []
        for _, (ids, inside) in encoded(documents, self.chats.tokenizer):
            inside[:1] = False  # nothing predicts the first token
            if len(ids) > option.seq_len:
                how = "cut (data.too_long=cut)" if option.too_long == "cut" else "left out (data.too_long=drop)"
                self._note("long", f"longer than data.seq_len={option.seq_len} tokens, {how}")
                if option.too_long == "drop":
                    continue
            ids, inside = ids[: option.seq_len], inside[: option.seq_len]
            if not inside.any():
                self._note("empty", f"without a target in their first {option.seq_len} tokens, left out")
                continue
            kept.append(ids)
            targets.append(inside)
        lengths = np.array(list(map(len, kept)), np.int64)
        empty = np.zeros(0, np.int64)  # of what nothing is left
        return (
            np.concatenate([empty, *kept]).astype(np.int64),
            lengths,
            np.concatenate([empty, *targets]).astype(np.int64),
        )
