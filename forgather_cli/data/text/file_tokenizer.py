"""The tokenizer of a Hugging Face directory, and a byte-level BPE trained into one."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.text.tokenizer import Marked, Span
from forgather_cli.data.text.tokenizer_files import END, special_tokens, write_config, write_template, write_tokenizer
from forgather_cli.errors import DataError
from forgather_cli.input_files import read_bytes

if TYPE_CHECKING:
    import tokenizers

# what a Hugging Face tokenizer directory may hold (transformers 5.23, tokenization_utils_base.py)
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_PIECE = 1_000_000  # characters
_AT_ONCE = 4_000_000  # characters; the library keeps some 100 bytes per token in memory


class FileTokenizer:
    """A directory with ``tokenizer.json``, as Hugging Face writes it. Raises DataError if it cannot be read."""

    def __init__(self, directory: Path, chat_template: str | None = None) -> None:
        import tokenizers

        path = directory / "tokenizer.json"
        if not path.exists():
            raise DataError(
                f"data.tokenizer: no tokenizer.json in {str(directory)!r}; give bytes, bpe or a directory that "
                f"AutoTokenizer.from_pretrained(...).save_pretrained(directory) wrote"
            )
        try:
            content = read_bytes(path)  # first: the library waits at a pipe
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise DataError(f"data.tokenizer: cannot read {path} ({error})") from error
        self._tokenizer.no_truncation()  # a corpus is not cut to the length the file was saved with
        self._tokenizer.no_padding()
        self._directory = directory
        self._chat_template = chat_template
        self.vocab_size = max(self._tokenizer.get_vocab().values()) + 1
        special = special_tokens(directory)
        self.eos_token_id = self._id(special["eos"])
        self.bos_token_id = self._id(special["bos"])
        pad = self._id(special["pad"])
        self.pad_token_id = pad if pad is not None else self.eos_token_id or 0
        parts = [hashlib.sha256(content).hexdigest(), special]
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _id(self, token: str | int | None) -> int | None:
        if isinstance(token, str):
            return self._tokenizer.token_to_id(token)
        return token

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        # "fast" leaves out the offsets (tokenizers 0.20)
        return [each.ids for each in self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Texts above a million characters are encoded in pieces cut at line borders."""
        pieces = [_pieces(text) for text in texts]
        arrays = self._arrays([piece for group in pieces for piece in group])
        return [_join([next(arrays) for _ in group]) for group in pieces]

    def _arrays(self, pieces: Sequence[str]) -> Iterator[NDArray[Any]]:
        start = size = 0
        for stop, piece in enumerate(pieces, 1):
            size += len(piece)
            if size >= _AT_ONCE or stop == len(pieces):
                yield from [np.array(ids, np.uint32) for ids in self.encode_batch(pieces[start:stop])]
                start, size = stop, 0

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [_inside(each, marks) for each, marks in zip(encodings, spans, strict=True)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def bytes_of_tokens(self) -> NDArray[np.int64] | None:
        """Bytes of text that each id stands for, none for special tokens.

        Exact where tokens are strings of bytes (GPT-2's byte-level BPE, as in Llama 3 and Qwen); None for others, whose
        tokens stand for more or less text depending on where they are (SentencePiece, WordPiece).
        """
        from tokenizers import decoders

        if not isinstance(self._tokenizer.decoder, decoders.ByteLevel):
            return None
        counts = np.zeros(self.vocab_size, np.int64)
        for token, number in self._tokenizer.get_vocab().items():
            counts[number] = len(token)  # one character for each byte
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            counts[number] = 0 if added.special else len(added.content.encode())
        return counts

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for name in _FILES:
            source = self._directory / name
            if source.is_file() and source.resolve() != (directory / name).resolve():
                shutil.copyfile(source, directory / name)
        templates = self._directory / "additional_chat_templates"
        if templates.is_dir() and self._directory.resolve() != directory.resolve():
            shutil.copytree(templates, directory / templates.name, dirs_exist_ok=True)
        if not (directory / "tokenizer_config.json").exists():
            names = {"eos_token": self.eos_token_id, "bos_token": self.bos_token_id, "pad_token": self.pad_token_id}
            write_config(directory, {k: self._tokenizer.id_to_token(v) for k, v in names.items() if v is not None})
        write_template(self._chat_template, directory)


def _inside(encoding: tokenizers.Encoding, spans: Sequence[Span]) -> Marked:
    """From the first to the last token that has characters of a span: byte-level tokenizers may take the white space
    out of offsets, so that a token between them has none."""
    offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
    starts, stops = offsets[:, 0], offsets[:, 1]
    inside = np.zeros(len(offsets), np.bool_)
    for start, stop in spans:
        inside[stops.searchsorted(start, "right") : starts.searchsorted(stop, "left")] = True
    return np.array(encoding.ids, np.uint32), inside


def _pieces(text: str) -> list[str]:
    if len(text) <= _PIECE:
        return [text]
    pieces, start = [], 0
    while start < len(text):
        stop = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(text[start:stop])
        start = stop
    return pieces


def _join(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def train_bpe(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
    """Train a byte-level BPE with GPT-2's word splitting and write it as a Hugging Face directory.

    The vocabulary is smaller than ``vocab_size`` where the texts hold too few pairs. Every text can be encoded.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_tokenizer(tokenizer, directory)
