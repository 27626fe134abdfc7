"""Chat data (``data=instruct``): conversations to tokens in the cache, a mask of the targets, and packed samples.

Beside the tokens of each split lie ``targets`` (uint8 of each token: 1 where the assistant writes it), and for each
conversation where it starts and how many of its tokens come before the first target.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.cache import Cache, Meta, Meter, Progress, digest
from forgather_cli.data.chat.conversations import Conversation, read_conversations
from forgather_cli.data.chat.template import CHATML, ChatTemplate
from forgather_cli.data.packing import PackingTable
from forgather_cli.data.text.corpus import content_hash, find_files, with_splits
from forgather_cli.data.text.read import Damage, SourceFile, chunks, encodable, kind_of
from forgather_cli.data.text.tokenizer import END, Span, Tokenizer, load_tokenizer, special_tokens
from forgather_cli.data.tokens import SPLITS, Split, TargetsWriter, Tokenized, TokenSplit, cached_tokens, dtype_of
from forgather_cli.errors import DataError
from forgather_cli.input_files import read_text
from forgather_cli.labels import IGNORED

_VERSION = 1  # of the files and of the rules that make tokens of a record
_SPECIAL = re.compile(r"<\|[^|<>\s'\"{}]+\|>|<(?:start|end)_of_turn>")  # what templates write that looks like a token
_SHOWN = 100  # characters
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
    line: int
    """Of its file."""
    file: int = 0
    """Its number, files of evaluation after those of training."""
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
    spans = spans[-1:] if train_on == "last" else spans
    return _Rendered(key, encodable(text), spans, conversation.num_bytes, conversation.line)


def _rendered(chats: Chats, damage: Damage) -> Iterator[_Rendered]:
    """All conversations, each with its split."""

    def read(files: tuple[SourceFile, ...], first: int) -> Iterator[_Rendered]:
        option, use = chats.option, partial(_render, chats)
        for number, source in enumerate(files, first):
            skip_bad = option.on_bad_row == "skip"
            for each in read_conversations(source.path, option.messages_key, use, damage, skip_bad=skip_bad):
                each.file = number
                yield each

    held_out = read(chats.eval_files, len(chats.files))
    yield from with_splits(read(chats.files, 0), held_out, chats.eval_fraction)


# ------------------------------------------------------------------------------------------------------------- tokens


def tokenize_chats(chats: Chats, cache: Cache) -> Tokenized:
    """The tokens of chat data, from the cache or made now. Raises DataError, with file and line, for bad records."""
    option, template = chats.option, chats.template
    content = content_hash(cache, chats.all_files)
    rules = [_VERSION, len(chats.files), chats.eval_fraction, option.messages_key, option.train_on]
    rules += ["skip"] if option.on_bad_row == "skip" else []
    key = digest([content, rules, chats.tokenizer.fingerprint, [template.source, template.special_tokens]])

    def write(temporary: Path) -> Meta:
        return _write(temporary, chats, cache.progress) | {"content": content}

    return cached_tokens(*cache.build_once("tokens", key, write), has_targets=True)


def _write(directory: Path, chats: Chats, progress: Progress | None) -> Meta:
    tokenizer, dtype = chats.tokenizer, dtype_of(chats.tokenizer.vocab_size)
    marks = set(_SPECIAL.findall(chats.template.source))
    damage, unknown = Damage(), set()
    meter = Meter(progress, sum(source.path.stat().st_size for source in chats.all_files))
    with contextlib.ExitStack() as files:
        writers = {split: TargetsWriter(directory / split, dtype, files) for split in SPLITS}
        for chunk in chunks(_rendered(chats, damage), meter.add):
            texts = [each.text for each in chunk]
            unknown |= {mark for mark in marks if any(mark in text for text in texts)}
            encoded = tokenizer.encode_marked(texts, [each.spans for each in chunk])
            for each, (ids, inside) in zip(chunk, encoded, strict=True):
                writers[each.split].add(ids, inside, (each.file, each.line))
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
        "unknown": sorted(mark for mark in unknown if len(tokenizer.encode(mark)) != 1),
    }


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


def targets_in_words(labels: Sequence[int], tokenizer: Tokenizer) -> str:
    """The text of a sample's targets, shortened, between ``[`` and ``]`` what stands together."""
    found = ""
    for is_target, group in itertools.groupby(labels, lambda label: label != IGNORED):
        if is_target:
            text = " ".join(tokenizer.decode(group).split())
            found += f"{' ' if found else ''}[{text}]"
        if len(found) > _SHOWN:
            return f"{found[:_SHOWN]}..."
    return found


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
    if left_out:
        description["left_out"] = "; ".join(left_out)
        _log.warning("data.seq_len=%d: %s", option.seq_len, description["left_out"])
    return description
