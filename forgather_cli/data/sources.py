"""What the options of one side read: tokens in the cache (text, token files, chats), streams, random tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from forgather_cli.config import schema
from forgather_cli.data.cache import Cache, NotCached, digest
from forgather_cli.data.order import Order
from forgather_cli.data.packing import PackingTable, packed_tables
from forgather_cli.data.splits import DataSource, DataSplits
from forgather_cli.data.text.corpus import Documents, find_corpus, find_records
from forgather_cli.data.text.read import damage_of
from forgather_cli.data.text.token_files import open_token_files
from forgather_cli.data.text.tokenize import tokenize_corpus, trained_bpe
from forgather_cli.data.text.tokenizer import FileTokenizer, Tokenizer, load_tokenizer
from forgather_cli.data.tokens import SPLITS, Split, Tokenized
from forgather_cli.errors import DataError

_PREFIX_RULES = 2  # of the tokens before a text: before 0.3 they were written again where the text spells them
_Sequences = TypeVar("_Sequences", bound=schema.SequenceSettings)
_Corpus = TypeVar("_Corpus", bound=schema.CorpusSettings)


class StoredSource(DataSource[_Sequences]):
    """Tokens in the cache, which samples are cut from."""

    gets_prefix: ClassVar[bool] = False
    """Whether a sample gets the tokens that the tokenizer writes before a text, which the cache does not hold."""

    @abstractmethod
    def tokenized(self, cache: Cache) -> tuple[Tokenized, Tokenizer]:
        """From the cache or made now."""

    def counts(self) -> dict[str, int | None] | None:
        cache = Cache(self.option.cache_dir, build=False)
        try:
            data, tokenizer = self.tokenized(cache)
        except NotCached:
            return None
        length, known = self.option.seq_len, dict[str, int | None](vocab_size=tokenizer.vocab_size)
        tokens = {name: data.meta[name]["tokens"] for name in SPLITS}
        # without tables, samples follow each other; training leaves a last partial one out
        samples: Mapping[str, int | None] = {"train": tokens["train"] // length, "eval": -(-tokens["eval"] // length)}
        try:
            samples = {name: len(table) for name, table in self._tables(data, cache).items()} or samples
        except NotCached:
            samples = {}
        for name in SPLITS:
            known |= {f"{name}_tokens": tokens[name], f"{name}_samples": samples.get(name)}
        return known

    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.samples import ConcatDataset, PackedDataset

        option: Any = self.option
        if option.is_stream:
            return _streamed(self, cache)
        data, tokenizer = self.tokenized(cache)
        isolate, length, pad = option.isolate_documents, option.seq_len, tokenizer.pad_token_id
        if data.train.documents is None and (isolate or option.packing != "concat"):
            setting = "isolate_documents=true" if isolate else f"packing={option.packing}"
            separator = tokenizer.eos_token_id
            end = "" if separator is None else f" (the tokenizer's end token is {separator})"
            raise DataError(
                f"data.{setting}: nothing marks the documents of these token files; set data.document_separator{end}"
            )
        tables = self._tables(data, cache)
        more: dict[str, Any] = {}
        rules: list[Any] = [data.fingerprint, length, option.packing, isolate]
        if is_chat := option.is_chats:
            from forgather_cli.data.chat.instruct import describe_chats, nothing_fits, targets_in_words

            if not len(tables["train"]):
                raise nothing_fits(option, data.train, tables["train"])
            rules = [*rules, option.too_long]
            more = {**describe_chats(option, data.meta, tables), "rules": data.meta["rules"]}
            # in rows of one conversation, padded on the right, no token sees another document: masks only cost time
            isolate = isolate and option.packing != "pad"
        prefix = tokenizer.prefix_tokens if self.gets_prefix else ()
        if prefix:
            more["rules"] = _PREFIX_RULES
        # the fingerprint of the same samples in runs begun before 0.3
        if (is_chat or prefix) and data.meta["formerly"]:
            more["formerly"] = digest([data.meta["formerly"], *rules[1:]])
        made: dict[str, Any] = {}
        both: dict[str, Any] = {"isolate": isolate, "prefix": prefix}
        for name, split in data.splits().items():
            if name == "eval" and len(split.tokens) + len(prefix) < 2:
                continue  # nothing predicts a single token
            if not tables:
                made[name] = ConcatDataset(
                    split.tokens, length, pad, keep_tail=name == "eval", documents=split.documents, **both
                )
            elif len(tables[name]) or not is_chat:
                made[name] = PackedDataset(
                    split.tokens, tables[name], length, pad, targets=split.targets, restart=isolate and is_chat, **both
                )
        if not len(made["train"]):
            tokens = len(data.train.tokens)
            remedy = f"set data.seq_len={tokens} or less" if tokens >= 2 else "give more data"
            raise DataError(f"data.seq_len: {length} is longer than the training split of {tokens} tokens; {remedy}")
        if is_chat:
            [first] = Order(len(made["train"]), self.seed, 0)[0:1]
            more["first_targets"] = targets_in_words(made["train"][first]["labels"].tolist(), tokenizer)
        meta = data.meta
        description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
        for name in SPLITS:
            description[f"{name}_tokens"] = meta[name]["tokens"]
            description[f"{name}_documents"] = meta[name]["documents"]
            description[f"{name}_samples"] = len(made[name]) if name in made else 0
        description |= {**more, **meta["origin"], **damage_of(meta), "content": meta["content"]}
        evaluation = made.get("eval")
        return DataSplits(made["train"], evaluation, tokenizer, digest(rules), length, description, tokenized=data)

    def _tables(self, data: Tokenized, cache: Cache) -> dict[Split, PackingTable]:
        """Which pieces of documents make up each sample, by split; empty where samples are cut regardless of them."""
        option: Any = self.option
        if option.is_chats:
            return packed_tables(cache, data, option.seq_len, option.packing, too_long=option.too_long)
        return {} if option.packing == "concat" else packed_tables(cache, data, option.seq_len, option.packing)


class TextSource(StoredSource[_Corpus]):
    """Documents of text."""

    gets_prefix: ClassVar[bool] = True

    @abstractmethod
    def text(self, cache: Cache) -> Documents: ...

    def tokenized(self, cache: Cache) -> tuple[Tokenized, Tokenizer]:
        option, corpus = self.option, self.text(cache)
        if option.tokenizer == "bpe":
            tokenizer: Tokenizer = FileTokenizer(trained_bpe(corpus, vocab_size=option.bpe_vocab_size, cache=cache))
        else:
            tokenizer = load_tokenizer(option.tokenizer, add_bos=option.add_bos, added=self.markers)
        return tokenize_corpus(corpus, tokenizer, cache, processes=option.tokenize_processes), tokenizer


class FilesSource(TextSource[schema.PythonStdlibSettings | schema.TextSettings]):
    def text(self, cache: Cache) -> Documents:
        return find_corpus(self.option)


class HfSource(TextSource[schema.HfSettings]):
    def text(self, cache: Cache) -> Documents:
        from forgather_cli.data.text.hf import hf_corpus

        return hf_corpus(self.option, cache)

    def counts(self) -> None:
        """Only the library knows which data it is."""


class TokenFilesSource(StoredSource[schema.TokensSettings]):
    def tokenized(self, cache: Cache) -> tuple[Tokenized, Tokenizer]:
        tokenizer = load_tokenizer(self.option.tokenizer, add_bos=self.option.add_bos, added=self.markers)
        return open_token_files(self.option, tokenizer, cache), tokenizer


class ChatSource(StoredSource[schema.InstructSettings]):
    def tokenized(self, cache: Cache) -> tuple[Tokenized, Tokenizer]:
        from forgather_cli.data.chat.instruct import find_chats, tokenize_chats

        chats = find_chats(self.option, cache, self.model_tokens)
        return tokenize_chats(chats, cache), chats.tokenizer

    def counts(self) -> dict[str, int | None] | None:
        return super().counts() if self.option.files else None

    def vocabulary(self) -> tuple[int, int]:
        from forgather_cli.data.chat.instruct import find_tokenizer

        tokenizer = find_tokenizer(self.option, self.model_tokens)[0]
        return tokenizer.vocab_size, tokenizer.num_new

    def origins(self) -> Sequence[Path | str]:
        from forgather_cli.data.text.hf import names_of

        if not self.option.files:
            return names_of(self.option)
        return [source.path for files in find_records(self.option) for source in files]


class SyntheticSource(DataSource[schema.SyntheticSettings]):
    def counts(self) -> dict[str, int | None]:
        known: dict[str, int | None] = {"vocab_size": load_tokenizer(self.option.tokenizer).vocab_size}
        for name, count in (("train", self.option.num_samples), ("eval", self.option.num_eval_samples)):
            known |= {f"{name}_samples": count, f"{name}_tokens": count * self.option.seq_len}
        return known

    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.samples import SyntheticDataset

        option, tokenizer = self.option, load_tokenizer(self.option.tokenizer, add_bos=self.option.add_bos)
        length, vocab_size, pad = option.seq_len, tokenizer.vocab_size, tokenizer.pad_token_id
        num_train, num_eval = option.num_samples, option.num_eval_samples
        both: dict[str, Any] = {"seed": self.seed, "ragged": option.ragged, "isolate": option.isolate_documents}
        train = SyntheticDataset(num_train, length, vocab_size, pad, first=0, **both)
        held_out = SyntheticDataset(num_eval, length, vocab_size, pad, first=num_train, **both) if num_eval else None
        rules = [num_train, num_eval, option.ragged, option.isolate_documents]
        fingerprint = digest(["synthetic", self.seed, length, vocab_size, rules])
        description = {"type": "synthetic", **self.counts()}
        del description["vocab_size"]
        return DataSplits(train, held_out, tokenizer, fingerprint, length, description)


def _streamed(source: DataSource[Any], cache: Cache) -> DataSplits:
    """The splits of a stream of the library, whose documents are tokenized and packed while they are read."""
    from forgather_cli.data.text.hf import open_datasets, origin_of, stream_identity
    from forgather_cli.data.text.token_stream import TextDocuments, TokenStream

    option = source.option
    rows, held_out = open_datasets(option, cache)
    description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
    parts: list[Any] = [option.seq_len, option.packing, option.isolate_documents, option.shuffle_buffer]
    if option.is_chats:
        from forgather_cli.data.chat.stream import ChatDocuments

        documents: Any = ChatDocuments(option, source.model_tokens, rows.features)
        tokenizer = documents.chats.tokenizer
        parts += documents.rules
        description |= documents.chats.dated
    else:
        tokenizer = load_tokenizer(option.tokenizer, add_bos=option.add_bos)
        tokenizer.prepare(())
        documents = TextDocuments(option, tokenizer)
        if tokenizer.prefix_tokens:
            description["rules"] = _PREFIX_RULES
            parts.append(_PREFIX_RULES)
    train = TokenStream(rows, option, tokenizer, documents, seed=source.seed, is_eval=False)
    if option.is_chats:  # now that the stream knows where the source begins
        documents.check(iter(rows))
    both: dict[str, Any] = {"seed": source.seed, "is_eval": True}
    evaluation = None if held_out is None else TokenStream(held_out, option, tokenizer, documents, **both)
    fingerprint = digest(["stream", stream_identity(option), tokenizer.fingerprint, *parts])
    description |= origin_of(option)
    return DataSplits(train, evaluation, tokenizer, fingerprint, option.seq_len, description)
