"""``MixtureSource``: each source read by its own ``DataSource``, all with one tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from forgather_cli.data.build import source_of
from forgather_cli.data.cache import Cache, NotCached, digest
from forgather_cli.data.chat.instruct import Chats, find_chats, find_tokenizer
from forgather_cli.data.mixture.settings import MixtureSettings
from forgather_cli.data.mixture.stretches import Mixture
from forgather_cli.data.splits import DataSource, DataSplits, SourceUse
from forgather_cli.data.text.corpus import Documents
from forgather_cli.data.text.tokenize import trained_bpe
from forgather_cli.data.text.tokenizer import Tokenizer, load_tokenizer
from forgather_cli.data.tokens import SPLITS
from forgather_cli.errors import DataError


class MixtureSource(DataSource[MixtureSettings]):
    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.mixture.dataset import JoinedDataset, MixtureDataset, supplies_of

        option, made = self.option, dict[str, DataSplits]()
        tokenizer, sources = self._sources(cache)
        for name, source in sources.items():
            with _named_in_errors(name, option.sources[name]):
                made[name] = source.load(cache)
                _check_like_others(made[name], tokenizer, option.seq_len)
        supplies = supplies_of(option, {name: len(splits.train) for name, splits in made.items()})
        keys = [f"{split}_{what}" for split in SPLITS for what in ("tokens", "documents", "samples")]
        sums = {key: _sum(splits.description.get(key) for splits in made.values()) for key in keys}
        sums["train_samples"] = sum(supply.samples for supply in supplies.values())
        prints = {name: splits.fingerprint for name, splits in made.items()}
        order = digest([prints, repr(supplies), [option.sources[name].weight for name in made]])
        sums |= {"row_tokens": option.row_tokens} if option.has_pairs else {}
        evaluation = {name: splits.eval for name, splits in made.items() if splits.eval}
        return DataSplits(
            MixtureDataset({name: splits.train for name, splits in made.items()}, option),
            JoinedDataset(evaluation, option.row_tokens) if evaluation else None,
            tokenizer,
            digest(["mixture", prints]),
            option.seq_len,
            {"type": option.type, "tokenizer": option.tokenizer, "fingerprints": prints, "order": order}
            | {key: count for key, count in sums.items() if count is not None},
            sources={name: (sources[name].option, splits) for name, splits in made.items()},
        )

    def counts(self) -> dict[str, int | None] | None:
        try:
            tokenizer, sources = self._sources(Cache(self.option.cache_dir, build=False))
        except NotCached:
            return None
        found = {name: source.counts() or {} for name, source in sources.items()}
        if not all(found.values()):
            return None
        samples = {name: counts["train_samples"] for name, counts in found.items()}
        most = [n and min(n, self.option.sources[name].max_samples or n) for name, n in samples.items()]
        sums = {key: _sum(counts[key] for counts in found.values()) for key in next(iter(found.values()))}
        sums |= {"vocab_size": tokenizer.vocab_size, "train_samples": _sum(most)}
        return sums | {f"train_samples/{name}": n for name, n in samples.items()}

    def uses(self, counts: Mapping[str, int | None], steps: int, global_batch: int) -> list[SourceUse]:
        from forgather_cli.data.mixture.dataset import stretch_of, uses_of

        lengths = {name: length for name in self.option.sources if (length := counts.get(f"train_samples/{name}"))}
        if len(lengths) < len(self.option.sources):
            return []
        mixture = Mixture([stretch_of(self.option, lengths, 0, 0, steps, global_batch)])
        return uses_of(mixture, 0, 0, steps, global_batch, self.option.row_tokens)

    def vocabulary(self) -> tuple[int | None, int]:
        if self.option.tokenizer == "bpe":
            return super().vocabulary()
        tokenizer, _ = self._sources(Cache(self.option.cache_dir, build=False))
        return tokenizer.vocab_size, tokenizer.num_new

    def _sources(self, cache: Cache) -> tuple[Tokenizer, dict[str, DataSource[Any]]]:
        """The one tokenizer, and of all sources what reads them, in the order of their names."""
        option, names, directory = self.option, sorted(self.option.sources), self.option.tokenizer
        corpora, chats = list[Documents](), list[Chats]()
        for name in names if directory == "bpe" else ():
            with _named_in_errors(name, option.sources[name]):
                source = option.option(name, tokenizer="bytes")  # as good as any to find text
                if source.is_chats and not source.has_pairs:
                    chats.append(find_chats(source, cache, self.model_tokens))
                elif (text := source_of(source).text(cache)) is not None:
                    corpora.append(text)
        if corpora or chats:
            directory = str(trained_bpe(*corpora, chats=chats, vocab_size=option.bpe_vocab_size, cache=cache))
        tokenizer, markers = load_tokenizer(directory, add_bos=option.add_bos), tuple[str, ...]()
        if option.has_chats:
            common: Any = replace(option, tokenizer=directory)
            tokenizer, _, markers = find_tokenizer(common, self.model_tokens)
        run: dict[str, Any] = {"seed": self.seed, "model_tokens": self.model_tokens, "markers": markers}
        return tokenizer, {name: source_of(option.option(name, tokenizer=directory), **run) for name in names}


def _sum(counts: Iterable[Any]) -> int | None:
    """None where one is not known."""
    known = list(counts)
    return None if None in known else sum(known)


def _check_like_others(splits: DataSplits, tokenizer: Tokenizer, seq_len: int) -> None:
    """Raise DataError for data of the user's that do not go with those of other sources."""
    from forgather_cli.data.loaders.map_style import is_map_style

    if not is_map_style(splits.train):
        raise DataError("data._target_: sources are read by number; give data with __getitem__ and __len__")
    if not len(splits.train):
        raise DataError("data._target_: it has no samples; give it some, or leave the source out")
    if splits.seq_len != seq_len:
        raise DataError(f"data._target_: its samples have {splits.seq_len} tokens, got data.seq_len={seq_len}; set one")
    if splits.tokenizer is not None and getattr(splits.tokenizer, "fingerprint", None) != tokenizer.fingerprint:
        raise DataError(
            "data._target_: its tokenizer is unlike the other sources'; make it with that of data.tokenizer"
        )


@contextmanager
def _named_in_errors(name: str, source: Any) -> Iterator[None]:
    """What is wrong with a source is said with its name."""
    try:
        yield
    except DataError as error:
        own = "|".join(field.name for field in fields(source) if field.init)
        text = re.sub(rf"\bdata\.({own}|_target_)\b", rf"data.sources.{name}.\1", str(error))
        told = text if text.startswith(f"data.sources.{name}") else f"data.sources.{name}: {text}"
        raise DataError(told) from error
