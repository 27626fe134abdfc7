"""From a data option to datasets (``load_data``); and its token counts for a plan, without building anything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.config.schema import (
    DataOption,
    HfSettings,
    InstructSettings,
    ModelOption,
    PythonStdlibSettings,
    Seq2SeqSettings,
    SyntheticSettings,
    Target,
    TextSettings,
    TokensSettings,
    Ul2Settings,
)
from forgather_cli.data.cache import Cache, NotCached, Progress, digest
from forgather_cli.data.order import Order
from forgather_cli.data.packing import PackingTable, packed_tables
from forgather_cli.data.splits import DataSplits, custom_data
from forgather_cli.data.text.corpus import Documents, find_corpus
from forgather_cli.data.text.read import damage_of
from forgather_cli.data.text.token_files import open_token_files
from forgather_cli.data.text.tokenize import tokenize_corpus, trained_bpe
from forgather_cli.data.text.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, end_of, load_tokenizer
from forgather_cli.data.tokens import SPLITS, Split, Tokenized
from forgather_cli.errors import DataError

if TYPE_CHECKING:
    from forgather_cli.data.chat.stream import ChatDocuments
    from forgather_cli.data.paired.rows import Shape
    from forgather_cli.data.samples import Batched

Stored = PythonStdlibSettings | TextSettings | HfSettings | TokensSettings | InstructSettings
"""Options whose tokens are in the cache."""
_PREFIX_RULES = 2  # of the tokens before a text: before 0.3 they were written again where the text spells them


def load_data(
    option: DataOption,
    *,
    seed: int,
    progress: Progress | None = None,
    model_path: str | None = None,
    num_sentinels: int = 0,
    model_tokens: int | None = 0,
) -> DataSplits:
    """Datasets and tokenizer of a data option; builds the token cache when it is missing.

    ``seed``: of synthetic data. ``model_path``: the directory of a pretrained model, whose tokenizer is used for custom
    data that name none. ``num_sentinels``: tokens that stand for spans, which an encoder-decoder's data add to the
    tokenizer. ``model_tokens``: as many as the model knows or can learn, None: any number; ``add_tokens=auto`` of chats
    adds no more. ``progress(done, total)`` is called in bytes while a cache is built. Raises DataError for data or a
    tokenizer that cannot be used.
    """
    if isinstance(option, Target):
        return custom_data(option, model_path)
    if isinstance(option, SyntheticSettings):
        return _synthetic(option, seed)
    cache = Cache(option.cache_dir, progress)
    if isinstance(option, Ul2Settings):
        made = _denoised(option, cache, seed, num_sentinels)
    elif isinstance(option, Seq2SeqSettings):
        made = _pairs(option, cache, num_sentinels)
    elif isinstance(option, HfSettings | InstructSettings) and option.streaming:
        made = _stream(option, cache, seed, model_tokens)
    else:
        made = _pack(option, *_tokenized(option, cache, model_tokens), cache, seed)
    return replace(made, files=cache.files)


def check_own_tokenizer(data: DataOption, model: ModelOption) -> None:
    """Raise DataError where ``bytes`` or ``bpe`` would train a pretrained model on other ids than its tokenizer's."""
    if isinstance(model, Target):
        return
    setting, directory, name = model.directory_setting, model.directory, getattr(data, "tokenizer", None)
    if directory is None or name not in ("bytes", "bpe") or getattr(model, "replace_tokenizer", True):
        return
    path = Path(directory).expanduser()
    if not (path / "tokenizer.json").is_file():
        return
    own, of_bytes = FileTokenizer(path), ByteTokenizer()
    if name == "bytes" and own.vocab_size == of_bytes.vocab_size and own.encode("naïve") == of_bytes.encode("naïve"):
        return  # a model that has learned bytes here
    raise DataError(
        f"data.tokenizer: {name} gives other ids than the tokenizer of model.{setting}={directory}, which its weights "
        "know; leave data.tokenizer out, or set model.replace_tokenizer=true too"
    )


def cached_token_counts(option: DataOption, *, model_tokens: int | None = 0) -> dict[str, int | None] | None:
    """Counts for a plan: vocab_size, and tokens and samples of each split (``train_tokens``, ``train_samples``, ...).
    ``model_tokens``: see ``load_data``.

    None if the tokens are not cached: nothing is built, no text read, no torch imported. Samples are None where the
    packing has not been computed. Raises DataError when files do not exist.
    """
    # only the datasets library, or the user's code, knows which data it is
    if isinstance(option, Target | HfSettings | Ul2Settings | Seq2SeqSettings):
        return None
    if isinstance(option, InstructSettings) and not option.files:
        return None
    samples: Mapping[str, int | None]
    if isinstance(option, SyntheticSettings):
        vocab_size = load_tokenizer(option.tokenizer).vocab_size
        samples = counts = {"train": option.num_samples, "eval": option.num_eval_samples}
        tokens = {name: count * option.seq_len for name, count in counts.items()}
    else:
        cache = Cache(option.cache_dir, build=False)
        try:
            data, tokenizer = _tokenized(option, cache, model_tokens)
        except NotCached:
            return None
        vocab_size, tokens = tokenizer.vocab_size, {name: data.meta[name]["tokens"] for name in SPLITS}
        # without tables, samples follow each other; training leaves a last partial one out
        samples = {"train": tokens["train"] // option.seq_len, "eval": -(-tokens["eval"] // option.seq_len)}
        try:
            tables = _tables(option, data, cache)
            samples = {name: len(table) for name, table in tables.items()} or samples
        except NotCached:
            samples = {}
    known: dict[str, int | None] = {"vocab_size": vocab_size}
    for name in SPLITS:
        known |= {f"{name}_tokens": tokens[name], f"{name}_samples": samples.get(name)}
    return known


def _tokenized(option: Stored, cache: Cache, model_tokens: int | None = 0) -> tuple[Tokenized, Tokenizer]:
    """The tokens of an option, from the cache or made now."""
    if isinstance(option, InstructSettings):
        from forgather_cli.data.chat.instruct import find_chats, tokenize_chats

        chats = find_chats(option, cache, model_tokens)
        return tokenize_chats(chats, cache), chats.tokenizer
    if isinstance(option, TokensSettings):
        tokenizer = load_tokenizer(option.tokenizer, add_bos=option.add_bos)
        return open_token_files(option, tokenizer, cache), tokenizer
    corpus: Documents
    if isinstance(option, HfSettings):
        from forgather_cli.data.text.hf import hf_corpus

        corpus = hf_corpus(option, cache)
    else:
        corpus = find_corpus(option)
    if option.tokenizer == "bpe":
        tokenizer = trained_bpe(corpus, option.bpe_vocab_size, cache)
    else:
        tokenizer = load_tokenizer(option.tokenizer, add_bos=option.add_bos)
    return tokenize_corpus(corpus, tokenizer, cache, processes=option.tokenize_processes), tokenizer


def _stream(option: HfSettings | InstructSettings, cache: Cache, seed: int, model_tokens: int | None) -> DataSplits:
    """The splits of a stream, whose documents are tokenized and packed while they are read."""
    from forgather_cli.data.text.hf import open_datasets, origin_of, stream_identity
    from forgather_cli.data.text.token_stream import TextDocuments, TokenStream

    source, held_out = open_datasets(option, cache)
    description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
    parts: list[Any] = [option.seq_len, option.packing, option.isolate_documents, option.shuffle_buffer]
    documents: TextDocuments | ChatDocuments
    if isinstance(option, InstructSettings):
        from forgather_cli.data.chat.stream import ChatDocuments

        documents = ChatDocuments(option, model_tokens, source.features)
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
    train = TokenStream(source, option, tokenizer, documents, seed=seed, is_eval=False)
    if not isinstance(documents, TextDocuments):  # now that the stream knows where the source begins
        documents.check(iter(source))
    evaluation = None
    if held_out is not None:
        evaluation = TokenStream(held_out, option, tokenizer, documents, seed=seed, is_eval=True)
    fingerprint = digest(["stream", stream_identity(option), tokenizer.fingerprint, *parts])
    return DataSplits(train, evaluation, tokenizer, fingerprint, option.seq_len, description | origin_of(option))


def _denoised(option: Ul2Settings, cache: Cache, seed: int, num_sentinels: int) -> DataSplits:
    """The splits of text that is denoised while it is read."""
    from forgather_cli.data.paired.denoise import Denoising, row_lengths
    from forgather_cli.data.paired.rows import Shape
    from forgather_cli.data.paired.sentinels import sentinel, with_sentinels
    from forgather_cli.data.paired.ul2 import CorpusWindows, DenoisedRows, StreamWindows, Windows

    inner, prefixes = option.text(), [each.prefix for each in option.mixture_of()]
    description: dict[str, Any] = {"type": "ul2", "source": option.source, "tokenizer": option.tokenizer}
    windows: dict[str, Windows] = {}
    data: Tokenized | None = None
    if isinstance(inner, HfSettings) and inner.streaming:
        from forgather_cli.data.text.hf import open_datasets, origin_of, stream_identity
        from forgather_cli.data.text.token_stream import TextDocuments, TokenStream

        base = load_tokenizer(option.tokenizer, add_bos=inner.add_bos)
        base.prepare(())
        identity, description = stream_identity(inner), description | origin_of(inner)
        for name, source in zip(SPLITS, open_datasets(inner, cache), strict=True):
            if source is not None:
                stream = TokenStream(source, inner, base, TextDocuments(inner, base), seed=seed, is_eval=name == "eval")
                windows[name] = StreamWindows(stream)
    else:
        data, base = _tokenized(inner, cache)
        identity = data.fingerprint
        for name, split in data.splits().items():
            windows[name] = CorpusWindows(split.tokens, option.max_seq_length, seed=seed, is_eval=name == "eval")
            description |= {f"{name}_{kind}": data.meta[name][kind] for kind in ("tokens", "documents")}
        description |= {**data.meta["origin"], **damage_of(data.meta), "content": data.meta["content"]}
    tokenizer = with_sentinels(base, option.tokenizer, num_sentinels, prefixes, cache)
    denoising = Denoising(
        option,
        prefixes=[tokenizer.encode(prefix) for prefix in prefixes],
        first_sentinel=tokenizer.encode(sentinel(0))[0],
        num_sentinels=num_sentinels,
        end=end_of(tokenizer),
    )
    encoder, decoder = row_lengths(option, num_sentinels)
    shape = Shape(option.packing, encoder, decoder, tokenizer.pad_token_id, has_tasks=True)
    description |= {"packing": option.packing, **_of_rows(shape)}
    description["denoisers"] = ", ".join(f"{each.name} x {each.weight:g}" for each in denoising.denoisers)
    made = {
        name: DenoisedRows(each, denoising, shape, block=option.block_windows, seed=seed, is_eval=name == "eval")
        for name, each in windows.items()
    }
    rules: list[Any] = [option.max_seq_length, option.max_encoder_length, option.max_decoder_length, encoder, decoder]
    rules += [option.packing, option.block_windows, option.shuffle_buffer, denoising.rules]
    fingerprint = digest(["ul2", identity, tokenizer.fingerprint, rules])
    return DataSplits(
        made["train"], made.get("eval"), tokenizer, fingerprint, option.seq_len, description, tokenized=data
    )


def _of_rows(shape: Shape) -> dict[str, Any]:
    """What is worth saying of rows with two sides."""
    if shape.packing == "pad":
        return {"row_tokens": None}
    lengths = {"pack_encoder": shape.encoder, "pack_decoder": shape.decoder}
    return {**lengths, "row_tokens": shape.encoder + shape.decoder}


def _pairs(option: Seq2SeqSettings, cache: Cache, num_sentinels: int) -> DataSplits:
    """The splits of pairs of texts."""
    from forgather_cli.data.paired.rows import Shape
    from forgather_cli.data.paired.sentinels import with_sentinels
    from forgather_cli.data.paired.seq2seq import PairRows, tokenize_pairs

    base = load_tokenizer(option.tokenizer, add_bos=False)
    tokenizer = with_sentinels(base, option.tokenizer, num_sentinels, [], cache)
    data = tokenize_pairs(option, tokenizer, cache)
    encoder, decoder = option.max_encoder_length, option.max_decoder_length
    if option.packing == "best_fit":
        train = data.meta["train"]  # as long on both sides as the pairs fill them
        encoder = option.pack_encoder or encoder
        wanted = -(-encoder * train["targets"] // max(train["tokens"] - train["targets"], 1) // 8) * 8
        decoder = option.pack_decoder or max(decoder, wanted)
    shape = Shape(option.packing, encoder, decoder, tokenizer.pad_token_id)
    made = {name: PairRows(split, option, shape) for name, split in data.splits().items()}
    if not len(made["train"]):
        raise DataError(
            f"data.too_long: drop leaves no pair to train on with max_encoder_length={option.max_encoder_length} and "
            f"max_decoder_length={option.max_decoder_length}; raise them, or set too_long=cut"
        )
    description: dict[str, Any] = {"type": "seq2seq", "tokenizer": option.tokenizer, "packing": option.packing}
    description |= _of_rows(shape)
    for name, rows in made.items():
        counts = data.meta[name]
        description |= {f"{name}_tokens": counts["tokens"], f"{name}_pairs": counts["documents"]}
        description[f"{name}_samples"] = len(rows)
        if rows.num_long:
            description[f"{name}_too_long"] = f"{rows.num_long} ({option.too_long})"
    description |= {**data.meta["origin"], **damage_of(data.meta), "content": data.meta["content"]}
    rules: list[Any] = [option.max_encoder_length, option.max_decoder_length, encoder, decoder]
    rules += [option.packing, option.too_long]
    evaluation = made.get("eval") or None  # one without pairs is none
    fingerprint = digest(["seq2seq", data.fingerprint, rules])
    return DataSplits(made["train"], evaluation, tokenizer, fingerprint, option.seq_len, description, tokenized=data)


def _tables(option: Stored, data: Tokenized, cache: Cache) -> dict[Split, PackingTable]:
    """Which pieces of documents make up each sample, by split; empty where samples are cut regardless of documents."""
    if isinstance(option, InstructSettings):
        return packed_tables(cache, data, option.seq_len, option.packing, too_long=option.too_long)
    return {} if option.packing == "concat" else packed_tables(cache, data, option.seq_len, option.packing)


def _pack(option: Stored, data: Tokenized, tokenizer: Tokenizer, cache: Cache, seed: int) -> DataSplits:
    """The splits of a tokenized corpus, packed into samples. ``seed``: of their order, for what is said of the first.

    Raises DataError where there is none to train on.
    """
    from forgather_cli.data.samples import ConcatDataset, PackedDataset

    isolate, length, pad = option.isolate_documents, option.seq_len, tokenizer.pad_token_id
    if data.train.documents is None and (isolate or option.packing != "concat"):
        setting = "isolate_documents=true" if isolate else f"packing={option.packing}"
        separator = tokenizer.eos_token_id
        end = "" if separator is None else f" (the tokenizer's end token is {separator})"
        raise DataError(
            f"data.{setting}: nothing marks the documents of these token files; set data.document_separator{end}"
        )
    tables = _tables(option, data, cache)
    more: dict[str, Any] = {}
    rules: list[Any] = [data.fingerprint, length, option.packing, isolate]
    if is_chat := isinstance(option, InstructSettings):
        from forgather_cli.data.chat.instruct import describe_chats, nothing_fits, targets_in_words

        if not len(tables["train"]):
            raise nothing_fits(option, data.train, tables["train"])
        rules = [*rules, option.too_long]
        more = {**describe_chats(option, data.meta, tables), "rules": data.meta["rules"]}
        # in rows of one conversation, padded on the right, no token sees another document: masks would only cost time
        isolate = isolate and option.packing != "pad"
    prefix = tokenizer.prefix_tokens if isinstance(option, PythonStdlibSettings | TextSettings | HfSettings) else ()
    if prefix:
        more["rules"] = _PREFIX_RULES
    if (is_chat or prefix) and data.meta["formerly"]:  # the fingerprint of the same samples in runs begun before 0.3
        more["formerly"] = digest([data.meta["formerly"], *rules[1:]])
    made: dict[str, Batched] = {}
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
        [first] = Order(len(made["train"]), seed, 0)[0:1]
        more["first_targets"] = targets_in_words(made["train"][first]["labels"].tolist(), tokenizer)
    meta = data.meta
    description: dict[str, Any] = {"type": option.type, "tokenizer": option.tokenizer, "packing": option.packing}
    for name in SPLITS:
        description[f"{name}_tokens"] = meta[name]["tokens"]
        description[f"{name}_documents"] = meta[name]["documents"]
        description[f"{name}_samples"] = len(made[name]) if name in made else 0
    description |= {**more, **meta["origin"], **damage_of(meta), "content": meta["content"]}
    return DataSplits(made["train"], made.get("eval"), tokenizer, digest(rules), length, description, tokenized=data)


def _synthetic(option: SyntheticSettings, seed: int) -> DataSplits:
    from forgather_cli.data.samples import SyntheticDataset

    tokenizer = load_tokenizer(option.tokenizer, add_bos=option.add_bos)
    splits = [
        SyntheticDataset(
            length,
            option.seq_len,
            tokenizer.vocab_size,
            tokenizer.pad_token_id,
            seed=seed,
            first=first,
            ragged=option.ragged,
            isolate=option.isolate_documents,
        )
        for length, first in ((option.num_samples, 0), (option.num_eval_samples, option.num_samples))
    ]
    rules = [option.num_samples, option.num_eval_samples, option.ragged, option.isolate_documents]
    fingerprint = digest(["synthetic", seed, option.seq_len, tokenizer.vocab_size, rules])
    description: dict[str, Any] = {"type": "synthetic"}
    for name, count in (("train", option.num_samples), ("eval", option.num_eval_samples)):
        description |= {f"{name}_samples": count, f"{name}_tokens": count * option.seq_len}
    evaluation = splits[1] if option.num_eval_samples else None
    return DataSplits(splits[0], evaluation, tokenizer, fingerprint, option.seq_len, description)
