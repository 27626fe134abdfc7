"""``MixtureSource``: each source read by its own ``DataSource``, all with one tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from forgather_cli.config.schema import Target
from forgather_cli.data.build import source_of
from forgather_cli.data.cache import Cache, NotCached, digest
from forgather_cli.data.mixture.settings import MixtureSettings
from forgather_cli.data.mixture.stretches import Supply, exact
from forgather_cli.data.splits import DataSource, DataSplits
from forgather_cli.data.text.tokenize import trained_bpe
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.data.tokens import SPLITS
from forgather_cli.errors import DataError

_COUNTS = ("tokens", "documents", "samples")


class MixtureSource(DataSource[MixtureSettings]):
    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.mixture.dataset import JoinedDataset, MixtureDataset, Shares

        option, made = self.option, dict[str, DataSplits]()
        for name, source in self._sources(cache).items():
            with _told_of(name, option.sources[name]):
                made[name] = source.load(cache)
        chats = [made[name].tokenizer for name in made if option.sources[name].is_chats]
        shipped = [made[name].tokenizer for name in made if not isinstance(option.sources[name], Target)]
        tokenizer = next(iter((*chats, *shipped)), None) or load_tokenizer(option.tokenizer, add_bos=option.add_bos)
        for name, splits in made.items():
            with _told_of(name, option.sources[name]):
                _check_like_others(splits, tokenizer, option.seq_len)
        held = {name: min(len(splits.train), option.sources[name].max_samples or len(splits.train))
                for name, splits in made.items()}  # fmt: skip
        typed = {name: source.weight for name, source in option.sources.items() if source.weight is not None}
        shares = Shares(
            {
                name: Supply(held[name], option.sources[name].max_epochs, option.sources[name].on_exhausted == "stop")
                for name in made
            },
            exact(typed or held),
            [(entry.at, exact(entry.weights)) for entry in option.weight_schedule],
        )
        evaluation = {
            name: splits.eval for name, splits in made.items() if splits.eval is not None and len(splits.eval)
        }
        description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer}
        for key in (f"{split}_{count}" for split in SPLITS for count in _COUNTS):
            counts: list[Any] = [splits.description.get(key) for splits in made.values()]
            description |= {key: sum(counts)} if None not in counts else {}
        description["train_samples"] = sum(held.values())
        description["fingerprints"] = {name: splits.fingerprint for name, splits in made.items()}
        return DataSplits(
            MixtureDataset({name: splits.train for name, splits in made.items()}, option.seq_len, shares),
            JoinedDataset(evaluation, option.seq_len) if evaluation else None,
            tokenizer,
            digest(["mixture", description["fingerprints"]]),
            option.seq_len,
            description,
        )

    def counts(self) -> dict[str, int | None] | None:
        try:
            sources = self._sources(Cache(self.option.cache_dir, build=False))
            found = {name: source.counts() for name, source in sources.items()}
        except NotCached:
            return None
        known: dict[str, int | None] = {}
        for name, counts in found.items():
            if counts is None:
                return None
            most = self.option.sources[name].max_samples
            if most is not None and (samples := counts["train_samples"]) is not None:
                counts["train_samples"] = min(samples, most)
            for key, count in counts.items():
                before = 0 if key == "vocab_size" else known.get(key, 0)
                known[key] = None if before is None or count is None else before + count
        return known

    def vocabulary(self) -> tuple[int | None, int]:
        chats = [name for name, source in self.option.sources.items() if source.is_chats]
        if not chats or self.option.tokenizer == "bpe":
            return super().vocabulary()
        return source_of(self.option.option(chats[0]), model_tokens=self.model_tokens).vocabulary()

    def _sources(self, cache: Cache) -> dict[str, DataSource[Any]]:
        """Of all sources, in the order of their names, that of the settings being nothing to go by."""
        option = self.option
        options = {name: option.option(name) for name in sorted(option.sources)}
        if option.tokenizer == "bpe":
            corpora = []
            for name, each in options.items():
                with _told_of(name, option.sources[name]):
                    corpora += [text for text in [source_of(each).text(cache)] if text is not None]
            if not corpora:
                raise DataError(
                    "data.tokenizer: bpe is trained on text, and no source has any; set data.tokenizer=bytes, or a "
                    "directory"
                )
            directory = str(trained_bpe(*corpora, vocab_size=option.bpe_vocab_size, cache=cache))
            options = {
                name: each if isinstance(each, Target) else replace(each, tokenizer=directory)
                for name, each in options.items()
            }
        markers: tuple[str, ...] = ()
        if chats := [name for name, each in options.items() if option.sources[name].is_chats]:
            from forgather_cli.data.chat.instruct import find_tokenizer

            first: Any = options[chats[0]]
            markers = find_tokenizer(first, self.model_tokens)[2]
        run: dict[str, Any] = {"seed": self.seed, "model_tokens": self.model_tokens, "markers": markers}
        return {name: source_of(each, **run) for name, each in options.items()}


def _check_like_others(splits: DataSplits, tokenizer: Any, seq_len: int) -> None:
    """Raise DataError for data of the user's that do not go with those of other sources."""
    from forgather_cli.data.loaders.map_style import is_map_style

    if not is_map_style(splits.train):
        raise DataError("data._target_: sources are read by number; give data with __getitem__ and __len__")
    if not len(splits.train):
        raise DataError("data._target_: it has no samples; give it some, or leave the source out")
    if splits.seq_len != seq_len:
        raise DataError(f"data._target_: its samples have {splits.seq_len} tokens, got data.seq_len={seq_len}; set one")
    own, common = (getattr(each, "fingerprint", None) for each in (splits.tokenizer, tokenizer))
    if splits.tokenizer is not None and own != common:
        raise DataError(
            "data._target_: its tokenizer is unlike the other sources'; make it with that of data.tokenizer"
        )


@contextmanager
def _told_of(name: str, source: Any) -> Iterator[None]:
    """What is wrong with a source is said with its name."""
    try:
        yield
    except DataError as error:
        own = "|".join(field.name for field in fields(source) if field.init)
        text = re.sub(rf"\bdata\.({own}|_target_)\b", rf"data.sources.{name}.\1", str(error))
        told = text if text.startswith(f"data.sources.{name}") else f"data.sources.{name}: {text}"
        raise DataError(told) from error
