"""Chat data (``data=instruct``): conversations to tokens in the cache, a mask of the targets, and packed samples.

Beside the tokens of each split lie ``targets`` (uint8 of each token: 1 where the assistant writes it), and for each
conversation where it starts and how many of its tokens come before the first target.
"""

from __future__ import annotations

import contextlib
import filecmp
import itertools
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.cache import Cache, Meta, Meter, Progress, digest
from forgather_cli.data.chat.conversations import READ, Conversation, conversation_of, conversations_in
from forgather_cli.data.chat.keys import Keys, check_keys
from forgather_cli.data.chat.markers import markers_of
from forgather_cli.data.chat.marks import MARKS, unlearned_turns
from forgather_cli.data.chat.template import CHATML, ChatTemplate, Joined
from forgather_cli.data.packing import PackingTable
from forgather_cli.data.text.corpus import content_hash, find_records, with_splits
from forgather_cli.data.text.hf import Rows, content_of_rows, origin_of, rows_of
from forgather_cli.data.text.read import BadRow, Damage, Record, SourceFile, chunks, encodable, kind_of, read_records
from forgather_cli.data.text.tokenizer import (
    END,
    Marked,
    Span,
    Tokenizer,
    around_documents,
    has_token,
    load_tokenizer,
    special_tokens,
    unspelled,
)
from forgather_cli.data.tokens import SPLITS, Split, TargetsWriter, Tokenized, TokenSplit, cached_tokens, dtype_of
from forgather_cli.documents.regular_files import read_text
from forgather_cli.errors import DataError

RULES = 3  # of the files and of the rules that make tokens of a record
_BEFORE = READ - {"context", "history", "text", "tools", "user", "assistant"}
"""Keys that were read before 0.3 as they are now, where each message has a role and a content and no more."""
_SHOWN = 100  # characters
_log = logging.getLogger(__name__)


Source = SourceFile | Rows


@dataclass(frozen=True)
class Chats:
    """What an option names: files or splits of a dataset, tokenizer and template. Text is not read yet."""

    option: InstructSettings
    files: tuple[Source, ...]
    eval_files: tuple[Source, ...]
    tokenizer: Tokenizer
    template: ChatTemplate
    added: tuple[str, ...]
    """Markers of the template that the tokenizer has for it."""

    @cached_property
    def unknown(self) -> list[str]:
        """Markers of the template that are no tokens."""
        return [marker for marker in markers_of(self.template) if not has_token(self.tokenizer, marker)]

    @property
    def ignored(self) -> list[str]:
        """Of ``data.ignore`` the keys that may be read, which alone decide what is made of a record."""
        return sorted((READ | MARKS.keys()).intersection(self.option.ignore))

    @property
    def dated(self) -> dict[str, str]:
        """The day, where the template writes it, for the keys of tokens. Runs of before there was the setting have none
        in theirs: they are known by the zone, since they have the moment at which they began."""
        day = self.option.template_date or f"{self.template.now:%Y-%m-%d}"
        return {"template_date": day} if "strftime_now" in self.template.source and not self.template.now.tzinfo else {}

    def fingerprint(self, cache: Cache) -> str:
        """Of the text that is trained on, and of the markers in it."""
        option, known = self.option, [self.added, self.unknown, self.ignored, self.dated, self.template.source]
        rules: list[Any] = [len(self.files), self.eval_fraction, option.messages_key, option.train_on]
        rules += [option.on_bad_row, list(option.mapping.items())]
        return digest([_content(cache, self), rules, known])

    def texts(self) -> Iterator[str]:
        """What a tokenizer learns from: the text of training between the markers that are its tokens."""
        known = "|".join(re.escape(each) for each in markers_of(self.template) if each not in self.unknown)
        for each in _rendered(self, Keys(self.option, self.template), Damage(), CONVERSATIONS):
            if each.split == "train":
                yield from re.split(known, each.text) if known else [each.text]

    @property
    def all_files(self) -> tuple[Source, ...]:
        return self.files + self.eval_files

    @property
    def eval_fraction(self) -> float:
        return 0.0 if self.eval_files else self.option.eval_fraction


def find_chats(option: InstructSettings, cache: Cache, model_tokens: int | None = 0) -> Chats:
    """``cache``: for what the datasets library makes of local files. ``model_tokens``: see ``load_data``.

    Raises DataError for files, tokenizer or template that cannot be used.
    """

    sources: tuple[tuple[Source, ...], tuple[Source, ...]]
    if option.files:
        sources = find_records(option)
    else:
        rows, held_out = rows_of(option, cache)
        sources = (rows,), () if held_out is None else (held_out,)
    return Chats(option, sources[0], sources[1], *find_tokenizer(option, model_tokens))


def find_tokenizer(
    option: InstructSettings, model_tokens: int | None = 0
) -> tuple[Tokenizer, ChatTemplate, tuple[str, ...]]:
    """The tokenizer, the template, and its markers that were added to the tokenizer (``data.add_tokens``).

    Raises DataError.
    """
    template = _template(option)
    template.now = datetime.fromisoformat(option.template_date or f"{template.now:%Y-%m-%d}")

    def load(added: tuple[str, ...]) -> Tokenizer:
        given = template.source if option.chat_template else None
        return load_tokenizer(option.tokenizer, chat_template=given, add_bos=option.add_bos, added=added)

    tokenizer = load(())
    if option.add_tokens is False or (option.add_tokens == "auto" and model_tokens == 0):
        return tokenizer, template, ()
    missing = tuple(marker for marker in markers_of(template) if not has_token(tokenizer, marker))
    has_room = model_tokens is None or tokenizer.vocab_size + len(missing) <= model_tokens
    if not missing or (option.add_tokens == "auto" and not has_room):
        return tokenizer, template, ()
    return load(missing), template, missing


def _template(option: InstructSettings) -> ChatTemplate:
    directory = None if option.tokenizer in ("bytes", "bpe") else Path(option.tokenizer).expanduser()
    name = option.chat_template
    try:
        special = special_tokens(directory) if directory else {"bos_token": END, "eos_token": END, "pad_token": END}
        if name == "chatml":
            return ChatTemplate(CHATML, special, name)
        if name is not None:
            remedy = "give chatml, or a file with a Jinja template"
            source = read_text(Path(name).expanduser(), lambda why: DataError(f"{why}; {remedy}"))
            return ChatTemplate(source, special, name)
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
class Rendered:
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
    is_document: bool = False
    """A text without a template, learned whole, which the tokens around a document go with."""
    rules: int = RULES - 1
    """The first that have made the same of it; of 1, those before 0.3, with chatml."""
    split: Split = "train"


def noted(chats: Chats, keys: Keys, conversation: Conversation) -> Rendered:
    """A record that is one conversation. Raises DataError where it cannot be trained on."""
    made = render(chats, conversation)
    keys.note((conversation, made.text))
    return made


def render(chats: Chats, conversation: Conversation) -> Rendered:
    """Raises DataError for a conversation that cannot be trained on."""
    if conversation.text is not None:
        text = encodable(conversation.text)
        if not text:
            raise DataError("'text' is empty")
        return Rendered(text, text, [(0, len(text))], conversation.num_bytes, conversation.line, is_document=True)
    messages, tools, train_on = conversation.messages, conversation.tools, chats.option.train_on
    unlearned = conversation.unlearned
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on != "all" and unlearned.issuperset(answers):
        raise DataError("no turn of the assistant, so nothing to learn from; set data.train_on=all to train on it")
    unlearned |= unlearned_turns(messages, chats.option.ignore, lambda key: chats.template.reads(key, messages, tools))
    try:
        text, spans = chats.template.render_spans(messages, tools=tools, train_on=train_on, unlearned=unlearned)
    except DataError as error:
        raise DataError(f"{error}; set data.chat_template") from error
    key = json.dumps([messages, tools], sort_keys=True, default=str)
    is_new = '"arguments": ""' in key or '"parameters": ""' in key
    for message in messages:
        (takes_text, takes_parts), content = chats.template.takes(message["role"]), message.get("content")
        is_new |= takes_parts > takes_text or (isinstance(content, Joined) and (takes_parts or not content.parts))
    as_before = conversation.read <= _BEFORE and not unlearned and max(map(len, messages), default=0) == 2
    rules = RULES if is_new else 1 if as_before else RULES - 1
    return Rendered(key, encodable(text), spans, conversation.num_bytes, conversation.line, rules=rules)


class RecordKind(NamedTuple):
    """What records of chats are made to."""

    read: Callable[[Record, InstructSettings, bool], Any]
    """``conversations_in`` calls it."""
    render: Callable[[Chats, Keys, Any], Any]
    """What it has read as text, with what a ``Rendered`` has for files and splits."""
    encode: Callable[[Sequence[Any], Tokenizer], Iterator[tuple[Rendered, Marked]]]
    """The documents of many."""


def _rendered(chats: Chats, keys: Keys, damage: Damage, kind: RecordKind) -> Iterator[Any]:
    """All conversations, each with its split."""

    def read(files: tuple[Source, ...], first: int) -> Iterator[Any]:
        use = partial(kind.render, chats, keys)
        for number, source in enumerate(files, first):
            records: Iterable[Record | BadRow]
            if isinstance(source, SourceFile):
                records, is_table = read_records(source.path, damage), kind_of(source.path) == ".parquet"
            else:  # the library's types have put nulls where a row has nothing, and these are gone
                records, is_table = source.records(), False
            more: dict[str, Any] = {"is_table": is_table, "read": kind.read}
            for each in conversations_in(records, _name(source), chats.option, use, damage, **more):
                each.file = number
                yield each

    held_out = read(chats.eval_files, len(chats.files))
    yield from with_splits(read(chats.files, 0), held_out, chats.eval_fraction)


# ------------------------------------------------------------------------------------------------------------- tokens


def tokenize_chats(chats: Chats, cache: Cache, kind: RecordKind | None = None) -> Tokenized:
    """The tokens of chat data, from the cache or made now. Raises DataError, with file and line, for bad records, and
    for keys of records that carry meaning and that nothing reads."""
    option, template = chats.option, chats.template
    content = _content(cache, chats)
    old_rules = [len(chats.files), chats.eval_fraction, option.messages_key, option.train_on]
    old_rules += ["skip"] if option.on_bad_row == "skip" else []
    # keys of the records that nothing reads are in the meta data
    rules = [*old_rules, list(option.mapping.items()), chats.ignored, *chats.dated.values()]
    rules += [option.noun] if kind else []
    others = [chats.tokenizer.fingerprint, [template.source, template.special_tokens]]

    before = digest([content, [1, *old_rules], *others])  # the key that versions before 0.3 have given them
    second, key = (digest([content, [number, *rules], *others]) for number in (RULES - 1, RULES))

    def write(temporary: Path) -> Meta:
        made = _write(temporary, chats, cache.progress, kind or CONVERSATIONS)
        same = _says_same(cache, before, temporary) or made["as_before"]
        return made | {"content": content, "formerly": before if same else None}

    directory, meta = cache.build_once("tokens", key, write)
    check_keys(option, meta["keys"])
    made = cached_tokens(directory, meta, has_targets=True)
    return made if meta["rules"] == RULES else replace(made, fingerprint=second)  # a run of before goes on


def _content(cache: Cache, chats: Chats) -> str:
    files = [source for source in chats.all_files if isinstance(source, SourceFile)]
    rows = [source for source in chats.all_files if isinstance(source, Rows)]
    return content_of_rows(cache, rows) if rows else content_hash(cache, files)


def _num_bytes(source: Source) -> int:
    return source.path.stat().st_size if isinstance(source, SourceFile) else source.num_bytes


def _name(source: Source) -> str:
    return str(source.path) if isinstance(source, SourceFile) else source.name


def _says_same(cache: Cache, key: str, made: Path) -> bool:
    """Whether the same tokens and targets were cached under ``key`` before 0.3, which is said where any were."""
    if cache.find("tokens", key) is None:
        return False
    names = [path.name for path in made.iterdir() if not path.name.endswith(".records.bin")]  # none before 0.3
    same = len(filecmp.cmpfiles(cache.root / "tokens" / key, made, names, shallow=False)[0]) == len(names)
    result = "the same as before" if same else "others than before (docs/data.md)"
    _log.warning(
        "data.files: the rules by which chats are read have changed; tokens were made anew, and are %s", result
    )
    return same


def _write(directory: Path, chats: Chats, progress: Progress | None, kind: RecordKind) -> Meta:
    tokenizer, dtype, noun = chats.tokenizer, dtype_of(chats.tokenizer.vocab_size), chats.option.noun
    changed = chats.option.mapping or (_BEFORE | {"tools"}).intersection(chats.option.ignore)
    rules, damage, unknown, keys = 1, Damage(), set(), Keys(chats.option, chats.template)
    meter = Meter(progress, sum(map(_num_bytes, chats.all_files)))
    with contextlib.ExitStack() as files:
        writers = {split: TargetsWriter(directory / split, dtype, files) for split in SPLITS}
        for chunk in chunks(_rendered(chats, keys, damage, kind), meter.add):
            texts = [each.text for each in chunk]
            rules = max(rules, *(each.rules for each in chunk))
            unknown.update(unknown_markers(chats, texts))
            for each, (ids, inside) in kind.encode(chunk, tokenizer):
                writers[each.split].add(ids, inside, (each.file, each.line))
    meter.end()
    if not writers["train"].lengths:
        if writers["eval"].lengths and not chats.eval_files:
            raise DataError(f"data.eval_fraction: {chats.eval_fraction} leaves nothing to train on; lower it")
        names = ", ".join(map(_name, chats.files[:3]))
        if not chats.option.files:
            raise DataError(f"data.train_split: no {noun} in {names}; it is empty")
        raise DataError(f"data.files: no {noun} in {len(chats.files)} files ({names}); they are empty")
    for line in damage.lines().values():
        _log.warning("%s", line)
    return {
        "dtype": dtype,
        **{name: writer.finish() for name, writer in writers.items()},
        "origin": {"files": ", ".join(chats.option.files)} if chats.option.files else origin_of(chats.option),
        **damage.lines(),
        "added": list(chats.added),
        "keys": keys.found(),
        "as_before": rules == 1 and chats.template.source == CHATML and not changed and not chats.added,
        "rules": max(rules, RULES - 1),
        "dated": chats.dated,
        "unknown": sorted(unknown),
    }


def encoded(chunk: Sequence[Rendered], tokenizer: Tokenizer) -> Iterator[tuple[Rendered, Marked]]:
    """Each conversation, its tokens, and which of them are targets."""
    found = tokenizer.encode_marked([each.text for each in chunk], [each.spans for each in chunk])
    for each, (ids, inside) in zip(chunk, found, strict=True):
        yield each, _around(ids, tokenizer) if each.is_document else (ids, inside)


def _around(ids: NDArray[Any], tokenizer: Tokenizer) -> Marked:
    """A document with the tokens around it, those that it spells itself once, and of each token whether it is a
    target: all but a begin token."""
    prefix, behind = around_documents(tokenizer)
    behind = () if tuple(ids[len(ids) - len(behind) :].tolist()) == behind else behind
    whole = np.concatenate([np.array(unspelled(prefix, ids), np.uint32), ids, np.array(behind, np.uint32)])
    return whole, np.arange(len(whole)) >= len(prefix)


CONVERSATIONS = RecordKind(conversation_of, noted, encoded)


# ------------------------------------------------------------------------------------------------------------- samples


def nothing_fits(option: InstructSettings, split: TokenSplit, table: PackingTable) -> DataError:
    """The error of conversations none of which can be trained on."""
    assert split.documents is not None
    assert split.first_targets is not None
    if (split.first_targets.array >= np.diff(split.documents.array)).all():
        return DataError(
            "data.files: no conversation has a turn that is to be learned; look at what marks them (weight and the "
            "like, docs/data.md)"
        )
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
    from forgather_cli.labels import IGNORED  # here, since it costs torch, which a plan does without

    found = ""
    for is_target, group in itertools.groupby(labels, lambda label: label != IGNORED):
        if is_target:
            text = " ".join(tokenizer.decode(group).split())
            found += f"{' ' if found else ''}[{text}]"
        if len(found) > _SHOWN:
            return f"{found[:_SHOWN]}..."
    return found


def unknown_markers(chats: Chats, texts: Iterable[str]) -> list[str]:
    """Markers of the template that stand in texts and are no tokens."""
    return sorted({marker for text in texts for marker in chats.unknown if marker in text})


def tell_markers(added: Sequence[str], unknown: Sequence[str]) -> None:
    """Say which markers of the template became tokens, and which are none."""
    if added:
        _log.info("data.add_tokens: the model learns %s of the chat template as new tokens", ", ".join(added))
    if unknown:
        _log.warning(
            "data.tokenizer: %s of the chat template %s; encoded as text. Add them with data.add_tokens=true, or with "
            "forgather finalize MODEL DEST --add-tokens FILE, or choose a template whose tokens it has",
            ", ".join(unknown),
            "is no token of the tokenizer" if len(unknown) == 1 else "are no tokens of the tokenizer",
        )


def describe_chats(option: InstructSettings, meta: Meta, tables: dict[Split, PackingTable]) -> dict[str, str]:
    """What there is to say of the targets and of what was left out, which is warned of too."""
    tell_markers(meta.get("added", []), meta["unknown"])  # caches of before the setting have none added
    left_out: list[str] = []  # as "of 100 train conversations 3 longer, cut (data.too_long=cut)"
    what = {
        "cut": "longer, cut (data.too_long=cut)",
        "dropped": "longer, left out (data.too_long=drop)",
        "empty": f"without a target in it{' or without a prompt' if option.has_pairs else ''}, left out",
    }
    each_has = 2 if option.has_pairs else 1  # documents
    for name, table in tables.items():
        found = [f"{table.counts[each] // each_has:,} {how}" for each, how in what.items() if table.counts.get(each)]
        if found:
            left_out.append(f"of {meta[name]['documents'] // each_has:,} {name} {option.noun}s {', '.join(found)}")
    tokens, targets = meta["train"]["tokens"], meta["train"]["targets"]
    said = {"targets": f"{targets:,} of {tokens:,} training tokens ({option.train_on})"}
    description: dict[str, str] = said | meta.get("dated", {})
    if unread := [*meta["keys"]["others"], *meta["keys"]["carry"]]:
        description["not_read"] = ", ".join(unread)
    if left_out:
        description["left_out"] = "; ".join(left_out)
        _log.warning("data.seq_len=%d: %s", option.seq_len, description["left_out"])
    return description
