"""``MixtureSource``: each source read by its own ``DataSource``, all with one tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from forgather_cli.config.schema import Target
from forgather_cli.data.build import source_of
from forgather_cli.data.cache import Cache, NotCached, digest
from forgather_cli.data.mixture.settings import MixtureSettings
from forgather_cli.data.mixture.stretches import Mixture
from forgather_cli.data.splits import DataSource, DataSplits, SourceUse
from forgather_cli.data.text.tokenize import kept_tokenizer, trained_bpe
from forgather_cli.data.text.tokenizer import Tokenizer, load_tokenizer
from forgather_cli.data.tokens import SPLITS
from forgather_cli.errors import DataError

_COUNTS = ("tokens", "documents", "samples")


class MixtureSource(DataSource[MixtureSettings]):
    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.mixture.dataset import JoinedDataset, MixtureDataset, Shares

        option, made = self.option, dict[str, DataSplits]()
        tokenizer, sources = self._sources(cache)
        for name, source in sources.items():
            with _told_of(name, option.sources[name]):
                made[name] = source.load(cache)
                _check_like_others(made[name], tokenizer, option.seq_len)
        shares = Shares.of(option, {name: len(splits.train) for name, splits in made.items()})
        evaluation = {
            name: splits.eval for name, splits in made.items() if splits.eval is not None and len(splits.eval)
        }
        description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer}
        for key in (f"{split}_{count}" for split in SPLITS for count in _COUNTS):
            counts: list[Any] = [splits.description.get(key) for splits in made.values()]
            description |= {key: sum(counts)} if None not in counts else {}
        description |= {"row_tokens": option.row_tokens} if option.has_pairs else {}
        description["train_samples"] = sum(supply.samples for supply in shares.supplies.values())
        prints = description["fingerprints"] = {name: splits.fingerprint for name, splits in made.items()}
        description["order"] = digest([prints, repr(shares.supplies), repr(sorted(shares.weights.items()))])
        return DataSplits(
            MixtureDataset({name: splits.train for name, splits in made.items()}, option.row_tokens, shares),
            JoinedDataset(evaluation, option.row_tokens) if evaluation else None,
            tokenizer,
            digest(["mixture", prints]),
            option.seq_len,
            description,
            sources={name: (option.option(name), splits) for name, splits in made.items()},
        )

    def counts(self) -> dict[str, int | None] | None:
        try:
            _, sources = self._sources(Cache(self.option.cache_dir, build=False))
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
            known[f"train_samples/{name}"] = counts["train_samples"]
            for key, count in counts.items():
                before = 0 if key == "vocab_size" else known.get(key, 0)
                known[key] = None if before is None or count is None else before + count
        return known

    def uses(self, counts: Mapping[str, int | None], steps: int, global_batch: int) -> list[SourceUse]:
        from forgather_cli.data.mixture.dataset import Shares, uses_of

        lengths = {name: length for name in self.option.sources if (length := counts.get(f"train_samples/{name}"))}
        if len(lengths) < len(self.option.sources):
            return []
        mixture = Mixture([Shares.of(self.option, lengths).stretch(0, 0, steps, global_batch)])
        return uses_of(mixture, 0, 0, steps, global_batch, self.option.row_tokens)

    def vocabulary(self) -> tuple[int | None, int]:
        chats = [name for name, source in self.option.sources.items() if source.is_chats]
        if not chats or self.option.tokenizer == "bpe":
            return super().vocabulary()
        return source_of(self.option.option(chats[0]), model_tokens=self.model_tokens).vocabulary()

    def _sources(self, cache: Cache) -> tuple[Tokenizer, dict[str, DataSource[Any]]]:
        """The one tokenizer, and of all sources what reads them, in the order of their names."""
        option = self.option
        options: dict[str, Any] = {name: option.option(name) for name in sorted(option.sources)}
        directory = option.tokenizer
        if directory == "bpe":
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
        chats = [each for each in options.values() if not isinstance(each, Target) and each.is_chats]
        if chats:
            from forgather_cli.data.chat.instruct import find_tokenizer

            tokenizer, _, markers = find_tokenizer(replace(chats[0], tokenizer=directory), self.model_tokens)
            if markers and option.tokenizer == "bpe":  # they are its own, as in a checkpoint, whose a resume takes
                directory = str(kept_tokenizer(tokenizer, cache))
                tokenizer, _, markers = find_tokenizer(replace(chats[0], tokenizer=directory), self.model_tokens)
        else:
            tokenizer, markers = load_tokenizer(directory, add_bos=option.add_bos), ()
        for name, each in options.items():
            options[name] = each if isinstance(each, Target) else replace(each, tokenizer=directory)
        run: dict[str, Any] = {"seed": self.seed, "model_tokens": self.model_tokens, "markers": markers}
        return tokenizer, {name: source_of(each, **run) for name, each in options.items()}


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
