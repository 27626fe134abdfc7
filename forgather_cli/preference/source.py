"""What ``data=preference`` reads."""

from __future__ import annotations

from typing import Any

import numpy as np

from forgather_cli.data.cache import Cache, digest
from forgather_cli.data.order import Order
from forgather_cli.data.packing import PackingTable, packed_tables
from forgather_cli.data.sources import ChatSource
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text.read import damage_of
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.data.tokens import Split, Tokenized
from forgather_cli.errors import DataError


class PreferenceSource(ChatSource):
    """Pairs of a chosen and a rejected answer."""

    def tokenized(self, cache: Cache) -> tuple[Tokenized, Tokenizer]:
        from forgather_cli.data.chat.instruct import find_chats, tokenize_chats
        from forgather_cli.preference.records import PAIRS

        chats = find_chats(self.option, cache, self.model_tokens)
        return tokenize_chats(chats, cache, PAIRS), chats.tokenizer

    def _tables(self, data: Tokenized, cache: Cache) -> dict[Split, PackingTable]:
        from forgather_cli.preference.rows import whole_pairs

        option, whole = self.option, (whole_pairs, 2)
        return packed_tables(cache, data, option.seq_len, option.packing, too_long=option.too_long, whole=whole)

    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.chat.instruct import describe_chats, targets_in_words
        from forgather_cli.preference.rows import PreferenceRows

        option = self.option
        data, tokenizer = self.tokenized(cache)
        tables, meta = self._tables(data, cache), data.meta
        made = {
            name: PreferenceRows(split, tables[name], option.seq_len, tokenizer.pad_token_id)
            for name, split in data.splits().items()
            if len(tables[name])
        }
        if "train" not in made:
            assert data.train.documents is not None
            longest = np.diff(data.train.documents.array).reshape(-1, 2).max(1)
            raise DataError(
                f"data.seq_len: no pair fits with {option.seq_len} tokens to a side and data.too_long="
                f"{option.too_long}, the shortest has {longest.min()}; raise data.seq_len"
            )
        description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
        for name in ("train", "eval"):
            description |= {f"{name}_{count}": meta[name][count] for count in ("tokens", "documents")}
            description[f"{name}_samples"] = len(made[name]) if name in made else 0
            description[f"{name}_pairs"] = made[name].num_pairs if name in made else 0
        description |= {"row_tokens": option.row_tokens, **describe_chats(option, meta, tables)}
        [first] = Order(len(made["train"]), self.seed, 0)[0:1]
        description["first_targets"] = targets_in_words(made["train"][first]["labels"].tolist(), tokenizer)
        description |= {"rules": meta["rules"], **meta["origin"], **damage_of(meta), "content": meta["content"]}
        fingerprint = digest([data.fingerprint, option.seq_len, option.packing, option.too_long])
        return DataSplits(
            made["train"], made.get("eval"), tokenizer, fingerprint, option.seq_len, description, tokenized=data
        )
