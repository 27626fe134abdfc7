"""Chat data (``data=instruct``): the template of an option, and conversations packed to samples."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from forgather_cli.config.schema import InstructSettings
from forgather_cli.data.cache import Meta, find
from forgather_cli.data.chat.template import CHATML, ChatTemplate, special_tokens
from forgather_cli.data.chat.tokens_of_chats import SPLITS, Chats
from forgather_cli.data.packing import PackingTable, packed_tables, packing_key
from forgather_cli.data.text.corpus import find_files
from forgather_cli.data.text.read import SourceFile, damage_of, kind_of
from forgather_cli.data.text.tokenizer import END, load_tokenizer
from forgather_cli.data.tokens import Tokenized, TokenSplit
from forgather_cli.errors import DataError
from forgather_cli.input_files import read_text

if TYPE_CHECKING:
    from forgather_cli.data.samples import Batched

_log = logging.getLogger(__name__)


def find_chats(option: InstructSettings) -> Chats:
    """Raises DataError for files, a tokenizer or a template that cannot be used."""
    files = _files("data.files", option.files)
    eval_files = _files("data.eval_files", option.eval_files) if option.eval_files else ()
    template = _template(option)
    own = template.source if option.chat_template else None
    return Chats(option, files, eval_files, load_tokenizer(option.tokenizer, chat_template=own), template)


def _files(setting: str, patterns: list[str]) -> tuple[SourceFile, ...]:
    return tuple(SourceFile(path, kind_of(path)) for path in find_files(setting, patterns))


def _template(option: InstructSettings) -> ChatTemplate:
    directory = None if option.tokenizer in ("bytes", "bpe") else Path(option.tokenizer).expanduser()
    name = option.chat_template
    try:
        special = special_tokens(directory) if directory else {"bos_token": END, "eos_token": END, "pad_token": END}
        if name is not None:
            return ChatTemplate(CHATML if name == "chatml" else _read(Path(name).expanduser()), special)
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


def _read(path: Path) -> str:
    return read_text(path, lambda why: DataError(f"{why}; give chatml, or a file with a Jinja template"))


def cached_chats(option: InstructSettings, root: Path) -> tuple[Meta, dict[str, int], int] | None:
    """(meta data, rows of each split, vocabulary size) of chat data in the cache; reads no text and writes nothing.

    None if it is not there.
    """
    chats = find_chats(option)
    key = chats.key(root, read=False)
    meta = find(root, "tokens", key) if key else None
    if key is None or meta is None:
        return None
    tables = find(root, "packings", packing_key(key, option.seq_len, option.packing, option.too_long)) or {}
    return meta, {name: tables[name]["rows"] for name in SPLITS if name in tables}, chats.tokenizer.vocab_size


def pack_chats(chats: Chats, data: Tokenized, root: Path) -> tuple[Batched, Batched | None, dict[str, Any]]:
    """Training and evaluation samples and their description. Raises DataError if no conversation can be trained on."""
    from forgather_cli.data.samples import PackedDataset

    option = chats.option
    tables = packed_tables(root, data, option.seq_len, option.packing, too_long=option.too_long)
    if not len(tables["train"]):
        raise _nothing_fits(option, data.train, tables["train"])
    # of rows with one conversation, padded on the right, no token sees another's: the masks would only cost time
    isolate = option.isolate_documents and option.packing != "pad"
    splits = {"train": data.train} | ({"eval": data.eval} if data.eval and len(tables["eval"]) else {})
    made: dict[str, Batched] = {
        name: PackedDataset(
            split.tokens,
            tables[name],
            option.seq_len,
            chats.tokenizer.pad_token_id,
            isolate=isolate,
            targets=split.targets,
            restart=isolate,
        )
        for name, split in splits.items()
    }
    return made["train"], made.get("eval"), _describe(option, data.meta, tables)


def _nothing_fits(option: InstructSettings, split: TokenSplit, table: PackingTable) -> DataError:
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


def _describe(option: InstructSettings, meta: Meta, tables: dict[str, PackingTable]) -> dict[str, Any]:
    description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
    for name in SPLITS:
        description[f"{name}_tokens"] = meta[name]["tokens"]
        description[f"{name}_documents"] = meta[name]["documents"]
        description[f"{name}_samples"] = len(tables[name]) if name in tables else 0
    tokens, targets = meta["train"]["tokens"], meta["train"]["targets"]
    description["targets"] = f"{targets:,} of {tokens:,} training tokens ({option.train_on})"
    left_out = [_left_out(name, option, meta[name]["documents"], tables[name]) for name in SPLITS if name in tables]
    lost = "; ".join(line for line in left_out if line)
    if lost:
        _log.warning("data.seq_len=%d: %s", option.seq_len, lost)
    return {
        **description,
        **({"left_out": lost} if lost else {}),
        **meta["origin"],
        **damage_of(meta),
        "content": meta["content"],
    }


def _left_out(split: str, option: InstructSettings, documents: int, table: PackingTable) -> str:
    """``3 of 100 train conversations longer, cut``: what of a split is not trained on."""
    counts = table.counts
    done = {
        "cut": "longer, cut (data.too_long=cut)",
        "dropped": "longer, left out (data.too_long=drop)",
        "empty": "without a target in it, left out",
    }
    found = [f"{counts[name]:,} {what}" for name, what in done.items() if counts[name]]
    return f"of {documents:,} {split} conversations {', '.join(found)}" if found else ""
