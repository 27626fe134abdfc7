"""Data of two sides, for encoder-decoders: denoised text and pairs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import HfSettings, Seq2SeqSettings, Ul2Settings
from forgather_cli.data.cache import Cache, digest
from forgather_cli.data.paired.sentinels import sentinel, with_sentinels
from forgather_cli.data.splits import DataSource, DataSplits
from forgather_cli.data.text.corpus import find_records
from forgather_cli.data.text.read import damage_of
from forgather_cli.data.text.tokenizer import end_of, load_tokenizer
from forgather_cli.data.tokens import SPLITS, Tokenized
from forgather_cli.errors import DataError


class Ul2Source(DataSource[Ul2Settings]):
    """Text that is denoised while it is read."""

    def added(self) -> set[str]:
        return {*map(sentinel, range(self.num_sentinels)), *(each.prefix for each in self.option.mixture_of())}

    def sides(self) -> tuple[int, int]:
        from forgather_cli.data.paired.denoise import row_lengths

        return row_lengths(self.option, self.num_sentinels)

    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.paired.denoise import Denoising, row_lengths
        from forgather_cli.data.paired.rows import Shape
        from forgather_cli.data.paired.ul2 import CorpusWindows, DenoisedRows, StreamWindows, Windows

        option, seed, length = self.option, self.seed, self.option.max_seq_length
        inner, prefixes = option.text(), [each.prefix for each in option.mixture_of()]
        description: dict[str, Any] = {"type": "ul2", "source": option.source, "tokenizer": option.tokenizer}
        windows: dict[str, Windows] = {}
        data: Tokenized | None = None
        if isinstance(inner, HfSettings) and inner.streaming:
            from forgather_cli.data.text.hf import open_datasets, origin_of, stream_identity
            from forgather_cli.data.text.token_stream import TextDocuments, TokenStream

            base = load_tokenizer(option.tokenizer, add_bos=inner.add_bos)
            base.prepare(())
            documents = TextDocuments(inner, base)
            identity, description = stream_identity(inner), description | origin_of(inner)
            for name, source in zip(SPLITS, open_datasets(inner, cache), strict=True):
                if source is not None:
                    stream = TokenStream(source, inner, base, documents, seed=seed, is_eval=name == "eval")
                    windows[name] = StreamWindows(stream)
        else:
            data, base = inner.load_maker()(inner).tokenized(cache)
            identity = data.fingerprint
            for name, split in data.splits().items():
                windows[name] = CorpusWindows(split.tokens, length, seed=seed, is_eval=name == "eval")
                description |= {f"{name}_{kind}": data.meta[name][kind] for kind in ("tokens", "documents")}
            description |= {**data.meta["origin"], **damage_of(data.meta), "content": data.meta["content"]}
        tokenizer = with_sentinels(base, option.tokenizer, self.num_sentinels, prefixes, cache)
        denoising = Denoising(
            option,
            prefixes=[tokenizer.encode(prefix) for prefix in prefixes],
            first_sentinel=tokenizer.encode(sentinel(0))[0],
            num_sentinels=self.num_sentinels,
            end=end_of(tokenizer),
        )
        encoder, decoder = row_lengths(option, self.num_sentinels)
        shape = Shape(option.packing, encoder, decoder, tokenizer.pad_token_id, has_tasks=True)
        description |= {"packing": option.packing, **shape.described()}
        description["denoisers"] = ", ".join(f"{each.name} x {each.weight:g}" for each in denoising.denoisers)
        made = {
            name: DenoisedRows(each, denoising, shape, block=option.block_windows, seed=seed, is_eval=name == "eval")
            for name, each in windows.items()
        }
        rules: list[Any] = [length, option.max_encoder_length, option.max_decoder_length]
        rules += [encoder, decoder, option.packing, option.block_windows, option.shuffle_buffer, denoising.rules]
        fingerprint = digest(["ul2", identity, tokenizer.fingerprint, rules])
        train, evaluation = made["train"], made.get("eval")
        return DataSplits(train, evaluation, tokenizer, fingerprint, option.seq_len, description, tokenized=data)


class PairSource(DataSource[Seq2SeqSettings]):
    """Pairs of texts."""

    def sides(self) -> tuple[int, int]:
        """Of packed ones as long as the encoder's, since nobody has read them yet."""
        encoder = self.option.pack_encoder or self.option.max_encoder_length
        return encoder, self.option.pack_decoder or max(self.option.max_decoder_length, encoder)

    def added(self) -> set[str]:
        return set(map(sentinel, range(self.num_sentinels)))

    def origins(self) -> Sequence[Path]:
        return [source.path for files in find_records(self.option) for source in files]

    def load(self, cache: Cache) -> DataSplits:
        from forgather_cli.data.paired.rows import Shape
        from forgather_cli.data.paired.seq2seq import PairRows, tokenize_pairs

        option = self.option
        base = load_tokenizer(option.tokenizer, add_bos=False)
        tokenizer = with_sentinels(base, option.tokenizer, self.num_sentinels, [], cache)
        data = tokenize_pairs(option, tokenizer, cache)
        encoder, decoder = option.max_encoder_length, option.max_decoder_length
        if option.packing == "best_fit":
            meta = data.meta["train"]  # as long on both sides as the pairs fill them
            encoder = option.pack_encoder or encoder
            wanted = -(-encoder * meta["targets"] // max(meta["tokens"] - meta["targets"], 1) // 8) * 8
            decoder = option.pack_decoder or max(decoder, wanted)
        shape = Shape(option.packing, encoder, decoder, tokenizer.pad_token_id)
        made = {name: PairRows(split, option, shape) for name, split in data.splits().items()}
        if not len(made["train"]):
            raise DataError(
                f"data.too_long: drop leaves no pair to train on with max_encoder_length={option.max_encoder_length} "
                f"and max_decoder_length={option.max_decoder_length}; raise them, or set too_long=cut"
            )
        description: dict[str, Any] = {"type": "seq2seq", "tokenizer": option.tokenizer, "packing": option.packing}
        description |= shape.described()
        for name, rows in made.items():
            counts = data.meta[name]
            description |= {f"{name}_tokens": counts["tokens"], f"{name}_pairs": counts["documents"]}
            description[f"{name}_samples"] = len(rows)
            if rows.num_long:
                description[f"{name}_too_long"] = f"{rows.num_long} ({option.too_long})"
        description |= {**data.meta["origin"], **damage_of(data.meta), "content": data.meta["content"]}
        rules: list[Any] = [option.max_encoder_length, option.max_decoder_length, encoder, decoder]
        rules += [option.packing, option.too_long]
        train, evaluation = made["train"], made.get("eval") or None  # one without pairs is none
        fingerprint = digest(["seq2seq", data.fingerprint, rules])
        return DataSplits(train, evaluation, tokenizer, fingerprint, option.seq_len, description, tokenized=data)
