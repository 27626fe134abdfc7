"""Conversations to the token cache: tokens, and a mask of those that the assistant writes.

Beside the tokens of each split lie ``targets`` (uint8 of each token), and for each conversation where it starts and how
many of its tokens come before the first target.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.cache import Meta, build_once, digest
from forgather_cli.data.chat.conversations import Conversation, read_conversations
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.data.text.corpus import Split, content_hash, held_out_share
from forgather_cli.data.text.read import Damage, SourceFile, chunks, encodable
from forgather_cli.data.text.tokenize import Progress
from forgather_cli.data.text.tokenizer import Span, Tokenizer
from forgather_cli.data.tokens import ArrayFile, Tokenized, Tokens, TokenSplit
from forgather_cli.errors import DataError

SPLITS: tuple[Split, ...] = ("train", "eval")
_VERSION = 1  # of the files and of the rules that make tokens of a record
_SPECIAL = re.compile(r"<\|[^|<>\s'\"{}]+\|>|<(?:start|end)_of_turn>")  # what templates write that looks like a token
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chats:
    """What an option names: files, tokenizer and template. Text is not read yet."""

    option: InstructSettings
    files: tuple[SourceFile, ...]
    eval_files: tuple[SourceFile, ...]
    tokenizer: Tokenizer
    template: ChatTemplate

    @property
    def all_files(self) -> tuple[SourceFile, ...]:
        return self.files + self.eval_files

    def key(self, root: Path, *, read: bool = True) -> str | None:
        """Name of the cache directory; None if the content is not known yet and ``read`` is false."""
        content = content_hash(root, self.all_files, read=read)
        option, template = self.option, self.template
        rules = [_VERSION, len(self.files), self.eval_fraction, option.messages_key, option.train_on]
        rules += ["skip"] if option.on_bad_row == "skip" else []
        text = [template.source, template.special_tokens]
        return None if content is None else digest([content, rules, self.tokenizer.fingerprint, text])

    @property
    def eval_fraction(self) -> float:
        return 0.0 if self.eval_files else self.option.eval_fraction

    def special_marks(self) -> set[str]:
        """What the template spells out that looks like a special token."""
        return set(_SPECIAL.findall(self.template.source))


def tokenize_chats(chats: Chats, root: Path, progress: Progress | None) -> Tokenized:
    """The tokens of chat data, from the cache or made now. Raises DataError, with file and line, for bad records."""
    key = chats.key(root)
    assert key is not None

    def write(temporary: Path) -> Meta:
        return _write(temporary, chats, progress) | {"content": content_hash(root, chats.all_files)}

    directory, meta = build_once(root, "tokens", key, write)
    if meta["unknown"]:
        _log.warning(
            "data.tokenizer: %s of the chat template %s; encoded as text. Add them with forgather finalize MODEL DEST "
            "--add-tokens FILE, or choose a template whose tokens it has",
            ", ".join(meta["unknown"]),
            "is no token of the tokenizer" if len(meta["unknown"]) == 1 else "are no tokens of the tokenizer",
        )
    evaluation = _open(directory, "eval", meta) if meta["eval"]["tokens"] else None
    return Tokenized(_open(directory, "train", meta), evaluation, key, meta)


def _open(directory: Path, split: Split, meta: Meta) -> TokenSplit:
    counts = meta[split]
    return TokenSplit(
        Tokens([ArrayFile(directory / f"{split}.bin", meta["dtype"], counts["tokens"])]),
        ArrayFile(directory / f"{split}.documents.bin", "int64", counts["documents"] + 1),
        Tokens([ArrayFile(directory / f"{split}.targets.bin", "uint8", counts["tokens"])]),
        ArrayFile(directory / f"{split}.first_targets.bin", "int64", counts["documents"]),
    )


def _write(directory: Path, chats: Chats, progress: Progress | None) -> Meta:
    dtype = "uint16" if chats.tokenizer.vocab_size <= 1 << 16 else "uint32"
    damage, unknown = Damage(), set()
    with contextlib.ExitStack() as files:
        writers = {split: _Writer(directory / split, dtype, files) for split in SPLITS}
        for chunk in chunks(_rendered(chats, damage), _reports(chats, progress)):
            texts = [each.text for each in chunk]
            unknown |= {mark for mark in chats.special_marks() if any(mark in text for text in texts)}
            encoded = chats.tokenizer.encode_marked(texts, [each.spans for each in chunk])
            for each, (ids, inside) in zip(chunk, encoded, strict=True):
                writers[each.split].add(ids, inside)
    if not writers["train"].num_conversations:
        raise _nothing_to_train(chats, has_eval=bool(writers["eval"].num_conversations))
    for line in damage.lines().values():
        _log.warning("%s", line)
    return {
        "dtype": dtype,
        **{name: writer.finish() for name, writer in writers.items()},
        "origin": {"files": ", ".join(chats.option.files)},
        **damage.lines(),
        "unknown": sorted(mark for mark in unknown if len(chats.tokenizer.encode(mark)) != 1),
    }


def _nothing_to_train(chats: Chats, *, has_eval: bool) -> DataError:
    if has_eval and not chats.eval_files:
        return DataError(f"data.eval_fraction: {chats.eval_fraction} leaves nothing to train on; lower it")
    names = ", ".join(str(source.path) for source in chats.files[:3])
    return DataError(f"data.files: no conversation in {len(chats.files)} files ({names}); they are empty")


class _Writer:
    """Appends conversations to the token and target files of one split."""

    def __init__(self, stem: Path, dtype: str, files: contextlib.ExitStack) -> None:
        self._stem, self._dtype = stem, dtype
        self._tokens: BinaryIO = files.enter_context(stem.with_suffix(".bin").open("wb"))
        self._targets: BinaryIO = files.enter_context(stem.with_suffix(".targets.bin").open("wb"))
        self._lengths: list[int] = []
        self._firsts: list[int] = []
        self._num_targets = 0

    @property
    def num_conversations(self) -> int:
        return len(self._lengths)

    def add(self, ids: NDArray[Any], inside: NDArray[np.bool_]) -> None:
        inside[:1] = False  # nothing predicts the first token
        self._tokens.write(ids.astype(self._dtype).data)
        self._targets.write(inside.astype(np.uint8).data)
        num_targets = int(inside.sum())
        self._lengths.append(len(ids))
        self._firsts.append(int(inside.argmax()) if num_targets else len(ids))
        self._num_targets += num_targets

    def finish(self) -> Meta:
        borders = np.cumsum(np.array([0, *self._lengths], np.int64))
        borders.tofile(self._stem.with_suffix(".documents.bin"))
        np.array(self._firsts, np.int64).tofile(self._stem.with_suffix(".first_targets.bin"))
        return {"tokens": int(borders[-1]), "documents": len(self._lengths), "targets": self._num_targets}


# ---------------------------------------------------------------------------------------------------------- rendering


@dataclass
class _Rendered:
    """A conversation as text."""

    key: str
    """What decides its split: equal conversations have equal keys."""
    text: str
    spans: list[Span]
    """Characters that are trained on."""
    num_bytes: int
    """Of the source, for progress."""
    split: Split = "train"


def _render(chats: Chats, conversation: Conversation) -> _Rendered:
    """Raises DataError for a conversation that cannot be trained on."""
    messages, tools, train_on = conversation.messages, conversation.tools, chats.option.train_on
    if train_on != "all" and not any(message["role"] == "assistant" for message in messages):
        raise DataError("no turn of the assistant, so nothing to learn from; set data.train_on=all to train on it")
    try:
        if train_on == "all":
            text = chats.template.render(messages, tools=tools)
            spans = [(0, len(text))]
        else:
            text, spans = chats.template.render_spans(messages, tools=tools)
    except DataError as error:
        raise DataError(f"{error}; set data.chat_template") from error
    key = json.dumps([messages, tools], sort_keys=True)
    return _Rendered(key, encodable(text), spans[-1:] if train_on == "last" else spans, conversation.num_bytes)


def _rendered(chats: Chats, damage: Damage) -> Iterator[_Rendered]:
    """All conversations, each with its split: held out when the hash of its messages falls below ``eval_fraction``, so
    equal ones stay on one side and adding files moves none. The first always trains, and those that equal it. Where
    none is held out, the last is, if there are two."""
    last: _Rendered | None = None
    first = None if chats.eval_fraction < 1 else ""
    any_trained = any_held_out = False
    for each in _read_all(chats, chats.files, damage):
        if last is not None:
            any_trained = True
            yield last
        first = each.key if first is None else first
        held_out = held_out_share(each.key) < chats.eval_fraction and each.key != first
        last = None if held_out else each
        if held_out:
            any_held_out = True
            each.split = "eval"
            yield each
    if last is not None:
        last.split = "eval" if chats.eval_fraction and any_trained and not any_held_out else "train"
        yield last
    for each in _read_all(chats, chats.eval_files, damage):
        each.split = "eval"
        yield each


def _read_all(chats: Chats, files: Iterable[SourceFile], damage: Damage) -> Iterator[_Rendered]:
    skip_bad = chats.option.on_bad_row == "skip"
    for source in files:
        yield from read_conversations(
            source.path, chats.option.messages_key, partial(_render, chats), damage, skip_bad=skip_bad
        )


def _reports(chats: Chats, progress: Progress | None) -> Callable[[int], None]:
    """Adds up the bytes that it is told of for ``progress``."""
    total, done = sum(source.path.stat().st_size for source in chats.all_files), 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(min(done, total), total)

    return report
