"""Chat data (``data=instruct``): conversations to tokens in the cache, a mask of the targets, and packed samples.

Beside the tokens of each split lie ``targets`` (uint8 of each token: 1 where the assistant writes it), and for each
conversation where it starts and how many of its tokens come before the first target.
"""

from __future__ import annotations

import contextlib
import filecmp
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.cache import Cache, Meta, Meter, Progress, digest
from forgather_cli.data.chat.conversations import READ, Conversation, read_conversations
from forgather_cli.data.chat.keys import Keys, check_keys
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.data.packing import PackingTable
from forgather_cli.data.text.corpus import content_hash, find_files, with_splits
from forgather_cli.data.text.read import Damage, SourceFile, chunks, encodable, kind_of
from forgather_cli.data.text.tokenizer import (
    END,
    Marked,
    Span,
    Tokenizer,
    around_documents,
    load_tokenizer,
    special_tokens,
)
from forgather_cli.data.tokens import SPLITS, Split, TargetsWriter, Tokenized, TokenSplit, cached_tokens, dtype_of
from forgather_cli.errors import DataError
from forgather_cli.input_files import read_text

_VERSION = 2  # of the files and of the rules that make tokens of a record
_SPECIAL = re.compile(r"<\|[^|<>\s'\"{}]+\|>|<(?:start|end)_of_turn>")  # what templates write that looks like a token
_BEFORE = READ - {"context", "history", "text", "tools", "user", "assistant"}
"""Keys that 0.3.0 has read as they are read now, where each message has a role and a content and no more."""
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

    @property
    def eval_fraction(self) -> float:
        return 0.0 if self.eval_files else self.option.eval_fraction


def find_chats(option: InstructSettings) -> Chats:
    """Raises DataError for files, a tokenizer or a template that cannot be used."""

    def files(setting: str, patterns: list[str]) -> tuple[SourceFile, ...]:
        return tuple(SourceFile(path, kind_of(path)) for path in find_files(setting, patterns))

    train = files("data.files", option.files)
    evaluation = files("data.eval_files", option.eval_files) if option.eval_files else ()
    template = _template(option)
    given = template.source if option.chat_template else None
    tokenizer = load_tokenizer(option.tokenizer, chat_template=given, add_bos=option.add_bos)
    return Chats(option, train, evaluation, tokenizer, template)


def _template(option: InstructSettings) -> ChatTemplate:
    directory = None if option.tokenizer in ("bytes", "bpe") else Path(option.tokenizer).expanduser()
    name = option.chat_template
    try:
        special = special_tokens(directory) if directory else {"bos_token": END, "eos_token": END, "pad_token": END}
        if name == "chatml":
            return ChatTemplate(CHATML, special)
        if name is not None:
            remedy = "give chatml, or a file with a Jinja template"
            source = read_text(Path(name).expanduser(), lambda why: DataError(f"{why}; {remedy}"))
            return ChatTemplate(source, special)
        found = ChatTemplate.of(directory) if directory else None
    except DataError as error:
        raise DataError(f"data.{'tokenizer' if name is None else 'chat_template'}: {error}") from error
    if found is None:
        load_tokenizer(option.tokenizer)  # a directory that holds none has a message of its own
        raise DataError(
            f"data.chat_template: the tokenizer {option.tokenizer!r} has no chat template; set "
            "data.chat_template=chatml, or to a file with a Jinja template"
        )
    return found


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
    is_document: bool = False
    """A text without a template, learned whole, which the tokens around a document go with."""
    as_before: bool = False
    """0.3.0 has made the same text of it, of which chatml marks the same."""
    split: Split = "train"


def _render(chats: Chats, keys: Keys, conversation: Conversation) -> _Rendered:
    """Raises DataError for a conversation that cannot be trained on."""
    if conversation.text is not None:
        text = encodable(conversation.text)
        if not text:
            raise DataError("'text' is empty")
        keys.note(conversation, text)
        return _Rendered(text, text, [(0, len(text))], conversation.num_bytes, is_document=True)
    messages, tools, train_on = conversation.messages, conversation.tools, chats.option.train_on
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on != "all" and conversation.unlearned.issuperset(answers):
        raise DataError("no turn of the assistant, so nothing to learn from; set data.train_on=all to train on it")
    try:
        if train_on == "all":
            text = chats.template.render(messages, tools=tools)
            spans = [(0, len(text))]
        else:
            text, spans = chats.template.render_spans(messages, tools=tools)
            if conversation.unlearned:
                if len(spans) != len(answers):
                    raise DataError("the chat template does not tell which turn of the assistant each block is")
                spans = [
                    span for number, span in zip(answers, spans, strict=True) if number not in conversation.unlearned
                ]
    except DataError as error:
        raise DataError(f"{error}; set data.chat_template") from error
    keys.note(conversation, text)
    key = json.dumps([messages, tools], sort_keys=True, default=str)
    spans = spans[-1:] if train_on == "last" else spans
    as_before = conversation.read <= _BEFORE and not conversation.unlearned and max(map(len, messages), default=0) == 2
    return _Rendered(key, encodable(text), spans, conversation.num_bytes, as_before=as_before)


def _rendered(chats: Chats, keys: Keys, damage: Damage) -> Iterator[_Rendered]:
    """All conversations, each with its split."""

    def read(files: tuple[SourceFile, ...]) -> Iterator[_Rendered]:
        for source in files:
            yield from read_conversations(source.path, chats.option, partial(_render, chats, keys), damage)

    yield from with_splits(read(chats.files), read(chats.eval_files), chats.eval_fraction)


# ------------------------------------------------------------------------------------------------------------- tokens


def tokenize_chats(chats: Chats, cache: Cache) -> Tokenized:
    """The tokens of chat data, from the cache or made now. Raises DataError, with file and line, for bad records, and
    for keys of records that carry meaning and that nothing reads."""
    option, template = chats.option, chats.template
    content = content_hash(cache, chats.all_files)
    old_rules = [len(chats.files), chats.eval_fraction, option.messages_key, option.train_on]
    old_rules += ["skip"] if option.on_bad_row == "skip" else []
    # of those that are ignored only keys that may be read decide what is made; the others are in the meta data
    ignored = sorted(READ.intersection(option.ignore))
    rules = [*old_rules, list(option.mapping.items()), ignored]
    others = [chats.tokenizer.fingerprint, [template.source, template.special_tokens]]

    before = digest([content, [1, *old_rules], *others])  # the key that 0.3.0 has given them

    def write(temporary: Path) -> Meta:
        made = _write(temporary, chats, cache.progress)
        same = _says_same(cache, before, temporary) or made["as_before"]
        return made | {"content": content, "formerly": before if same else None}

    key = digest([content, [_VERSION, *rules], *others])
    directory, meta = cache.build_once("tokens", key, write)
    check_keys(option, meta["keys"])
    return cached_tokens(directory, meta, has_targets=True)


def _says_same(cache: Cache, key: str, made: Path) -> bool:
    """Whether 0.3.0 has cached the same tokens and targets under ``key``, which is said where it has cached any."""
    if cache.find("tokens", key) is None:
        return False
    names = [path.name for path in made.iterdir()]
    same = len(filecmp.cmpfiles(cache.root / "tokens" / key, made, names, shallow=False)[0]) == len(names)
    result = "the same as before" if same else "others than before (docs/data.md)"
    _log.warning(
        "data.files: the rules by which chats are read have changed; tokens were made anew, and are %s", result
    )
    return same


def _write(directory: Path, chats: Chats, progress: Progress | None) -> Meta:
    tokenizer, dtype = chats.tokenizer, dtype_of(chats.tokenizer.vocab_size)
    marks = set(_SPECIAL.findall(chats.template.source))
    changed = chats.option.mapping or (_BEFORE | {"tools"}).intersection(chats.option.ignore)
    as_before, damage, unknown, keys = True, Damage(), set(), Keys(chats.option, shows_tools=chats.template.shows_tools)
    meter = Meter(progress, sum(source.path.stat().st_size for source in chats.all_files))
    with contextlib.ExitStack() as files:
        writers = {split: TargetsWriter(directory / split, dtype, files) for split in SPLITS}
        for chunk in chunks(_rendered(chats, keys, damage), meter.add):
            texts = [each.text for each in chunk]
            as_before = as_before and all(each.as_before for each in chunk)
            unknown |= {mark for mark in marks if any(mark in text for text in texts)}
            encoded = tokenizer.encode_marked(texts, [each.spans for each in chunk])
            for each, (ids, inside) in zip(chunk, encoded, strict=True):
                ids, inside = _around(ids, tokenizer) if each.is_document else (ids, inside)
                writers[each.split].add(ids, inside)
    meter.end()
    if not writers["train"].lengths:
        if writers["eval"].lengths and not chats.eval_files:
            raise DataError(f"data.eval_fraction: {chats.eval_fraction} leaves nothing to train on; lower it")
        names = ", ".join(str(source.path) for source in chats.files[:3])
        raise DataError(f"data.files: no conversation in {len(chats.files)} files ({names}); they are empty")
    for line in damage.lines().values():
        _log.warning("%s", line)
    return {
        "dtype": dtype,
        **{name: writer.finish() for name, writer in writers.items()},
        "origin": {"files": ", ".join(chats.option.files)},
        **damage.lines(),
        "keys": keys.found(),
        "as_before": as_before and chats.template.source == CHATML and not changed,
        "rules": _VERSION,
        "unknown": sorted(mark for mark in unknown if len(tokenizer.encode(mark)) != 1),
    }


def _around(ids: NDArray[Any], tokenizer: Tokenizer) -> Marked:
    """A document with the tokens around it, those that it spells itself once, and of each token whether it is a
    target: all but a begin token."""
    before, behind = around_documents(tokenizer)
    before = () if tuple(ids[: len(before)].tolist()) == before else before
    behind = () if tuple(ids[len(ids) - len(behind) :].tolist()) == behind else behind
    whole = np.concatenate([np.array(before, np.uint32), ids, np.array(behind, np.uint32)])
    return whole, np.arange(len(whole)) >= len(before)


# ------------------------------------------------------------------------------------------------------------- samples


def nothing_fits(option: InstructSettings, split: TokenSplit, table: PackingTable) -> DataError:
    """The error of conversations none of which can be trained on."""
    assert split.documents is not None
    assert split.first_targets is not None
    if table.counts["dropped"] == split.first_targets.length:
        shortest = int(np.diff(split.documents.array).min())
        return DataError(
            f"data.seq_len: every conversation is longer than {option.seq_len} tokens, the shortest has {shortest}; "
            "raise data.seq_len, or set data.too_long=cut"
        )
    return DataError(
        f"data.seq_len: no conversation has a target within its first {option.seq_len} tokens, the earliest comes "
        f"after {int(split.first_targets.array.min())}; raise data.seq_len"
    )


def describe_chats(option: InstructSettings, meta: Meta, tables: dict[Split, PackingTable]) -> dict[str, str]:
    """What there is to say of the targets and of what was left out, which is warned of too."""
    if meta["unknown"]:
        _log.warning(
            "data.tokenizer: %s of the chat template %s; encoded as text. Add them with forgather finalize MODEL DEST "
            "--add-tokens FILE, or choose a template whose tokens it has",
            ", ".join(meta["unknown"]),
            "is no token of the tokenizer" if len(meta["unknown"]) == 1 else "are no tokens of the tokenizer",
        )
    left_out: list[str] = []  # as "of 100 train conversations 3 longer, cut (data.too_long=cut)"
    what = {
        "cut": "longer, cut (data.too_long=cut)",
        "dropped": "longer, left out (data.too_long=drop)",
        "empty": "without a target in it, left out",
    }
    for name, table in tables.items():
        found = [f"{table.counts[each]:,} {how}" for each, how in what.items() if table.counts.get(each)]
        if found:
            left_out.append(f"of {meta[name]['documents']:,} {name} conversations {', '.join(found)}")
    tokens, targets = meta["train"]["tokens"], meta["train"]["targets"]
    description = {"targets": f"{targets:,} of {tokens:,} training tokens ({option.train_on})"}
    if unread := [*meta["keys"]["others"], *meta["keys"]["carry"]]:
        description["not_read"] = ", ".join(unread)
    if left_out:
        description["left_out"] = "; ".join(left_out)
        _log.warning("data.seq_len=%d: %s", option.seq_len, description["left_out"])
    return description
