"""Tokenizers: text as its UTF-8 bytes, a Hugging Face directory, or a byte-level BPE trained into one.

``import tokenizers`` happens where it is used: training on bytes with a warm cache never needs it.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.text.library import add_tokens, byte_level, document_of, trained
from forgather_cli.data.text.piecewise import HARD, NotPiecewiseError, PiecewiseEncoder, byte_letters
from forgather_cli.documents.regular_files import read_bytes, read_json_object
from forgather_cli.errors import DataError

if TYPE_CHECKING:
    import tokenizers

Span = tuple[int, int]
"""Characters [start, stop) of a text."""
Marked = tuple[NDArray[Any], NDArray[np.bool_]]
"""Token ids, and of each whether it stands in a span."""
END = "<|endoftext|>"
_NUM_BYTES = 256
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_log = logging.getLogger(__name__)
_PIECE = 1_000_000  # characters
_AT_ONCE = 4_000_000  # characters; the library keeps some 100 bytes per token in memory
# what a Hugging Face tokenizer directory may hold (transformers 5.23, tokenization_utils_base.py)
_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


class Tokenizer(Protocol):
    """What the trainer, generation and finalize need of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""

    @property
    def eos_token_id(self) -> int | None: ...

    @property
    def bos_token_id(self) -> int | None: ...

    @property
    def pad_token_id(self) -> int:
        """The end token where the tokenizer names none: padding never carries a target."""

    @property
    def num_new(self) -> int:
        """Ids at the end that the tokenizer's files do not have: tokens that the data add."""

    @property
    def fingerprint(self) -> str:
        """32 hex digits; equal fingerprints give equal ids for every text."""

    @property
    def prefix_tokens(self) -> tuple[int, ...]:
        """What stands before each text by the tokenizer's rule or ``data.add_bos``: Llama's ``<s>``, or nothing."""

    @property
    def suffix_tokens(self) -> tuple[int, ...]:
        """What the tokenizer writes behind a text, mostly nothing."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text alone. Special tokens spelled out in it become their ids, as in Hugging Face."""

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a text that is to be continued, the prefix before it, once where the text spells it."""

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Ids of texts alone as arrays of unsigned integers: the fast way for a corpus."""

    def prepare(self, texts: Iterable[str]) -> None:
        """Get ``encode_arrays`` ready for a corpus, of which these are some texts, or say why it will be slow."""

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        """Ids of texts, and which of them stand in the spans of characters given for each text, in order.

        A token counts if any of its characters does, as in Hugging Face's ``return_assistant_tokens_mask``.
        """

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Text of ids; ids outside the vocabulary are left out, broken UTF-8 becomes U+FFFD."""

    def bytes_of(self, number: int) -> bytes | None:
        """The bytes that an id stands for; None where its neighbours decide, and outside the vocabulary."""

    def save(self, directory: Path) -> None:
        """Write ``tokenizer.json``, ``tokenizer_config.json`` and what belongs to them, for ``AutoTokenizer``."""


def load_tokenizer(
    name: str, *, chat_template: str | None = None, add_bos: bool | None = None, added: Sequence[str] = ()
) -> Tokenizer:
    """``bytes`` or a directory with ``tokenizer.json``; ``bpe`` is made by ``train_bpe``. Raises DataError.

    ``chat_template``: the source that ``save`` writes in place of the directory's own. ``add_bos``: whether a begin
    token stands before each text; None: a directory's own rule, False: nothing around a text. ``added``: special
    tokens behind those it has.
    """
    if name == "bytes":
        return ByteTokenizer(chat_template, added)
    if name == "bpe":
        raise DataError("data.tokenizer: bpe is trained on text; use it with data=python_stdlib or data=text")
    return FileTokenizer(Path(name).expanduser(), chat_template, add_bos, added)


def has_token(tokenizer: Tokenizer, text: str) -> bool:
    """Whether the text is one token, which stands for it alone."""
    ids = tokenizer.encode(text)
    return len(ids) == 1 and tokenizer.decode(ids).strip() == text


def add_to_directory(directory: Path, tokens: Iterable[tuple[str, bool]]) -> tokenizers.Tokenizer:
    """Put tokens, (text, whether it is special) each, behind those of a directory's files, in this order; returns the
    tokenizer."""
    from tokenizers import Tokenizer

    file, config = str(directory / "tokenizer.json"), directory / "tokenizer_config.json"
    tokenizer: tokenizers.Tokenizer = Tokenizer.from_file(file)
    add_tokens(tokenizer, tokens)
    tokenizer.save(file)
    settings = _read_object(config)
    if "added_tokens_decoder" in settings:  # to some classes of transformers (5.23, Qwen2Tokenizer) it is all there are
        for number, added in tokenizer.get_added_tokens_decoder().items():
            names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
            entry = {name: getattr(added, name) for name in names}
            settings["added_tokens_decoder"].setdefault(str(number), entry)
        config.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return tokenizer


def around_documents(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(tokens before, tokens behind) each document: what the tokenizer writes, and an end token unless it writes that.

    Raises DataError where it names none.
    """
    suffix, end = tokenizer.suffix_tokens, (end_of(tokenizer),)
    return tokenizer.prefix_tokens, suffix if suffix[-1:] == end else suffix + end


def unspelled(prefix: tuple[int, ...], ids: Sequence[int] | NDArray[Any]) -> tuple[int, ...]:
    """What of the tokens before a text is not written in it already: a text may begin with a ``<s>`` of its own."""
    written = (n for n in range(len(prefix), 0, -1) if tuple(ids[:n]) == prefix[-n:])
    return prefix[: len(prefix) - next(written, 0)]


def end_of(tokenizer: Tokenizer) -> int:
    """The token that follows each document. Raises DataError where a tokenizer names none."""
    if tokenizer.eos_token_id is None:
        raise DataError("data.tokenizer: names no end token; add eos_token to its tokenizer_config.json")
    return tokenizer.eos_token_id


class ByteTokenizer:
    """Ids 0-255 are UTF-8 bytes, 256 is ``<|endoftext|>``, which is also the begin and pad token; ``added`` follow."""

    eos_token_id = bos_token_id = pad_token_id = _NUM_BYTES
    prefix_tokens = suffix_tokens = ()

    def __init__(self, chat_template: str | None = None, added: Sequence[str] = ()) -> None:
        self._chat_template = chat_template
        self._added, self.num_new = tuple(added), len(added)
        self._special = [token.encode() for token in (END, *added)]
        self._ids = {token: id_ for id_, token in enumerate(self._special, _NUM_BYTES)}
        longest_first = sorted(self._special, key=len, reverse=True)  # as the library finds them
        self._split = re.compile(b"(" + b"|".join(map(re.escape, longest_first)) + b")").split
        self.vocab_size = _NUM_BYTES + len(self._special)
        rules = b"forgather bytes 1" + (json.dumps(self._added).encode() if added else b"")
        self.fingerprint = hashlib.sha256(rules).hexdigest()[:32]

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encode(text, ())[0].tolist()
        return ids

    encode_prompt = encode

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        return [self._encode(text, ())[0] for text in texts]

    def prepare(self, texts: Iterable[str]) -> None:
        pass

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        return [self._encode(text, marks) for text, marks in zip(texts, spans, strict=True)]

    def _encode(self, text: str, spans: Sequence[Span]) -> Marked:
        data = text.encode("utf-8", "replace")
        borders = [border for span in spans for border in span]
        if len(data) != len(text):  # characters to bytes
            pieces = (text[start:stop] for start, stop in itertools.pairwise([0, *borders]))
            borders = list(itertools.accumulate(len(piece.encode("utf-8", "replace")) for piece in pieces))
        parts = self._split(data)  # text and special tokens by turns
        specials, stops = parts[1::2], list(itertools.accumulate(map(len, parts)))
        ids: NDArray[Any] = np.frombuffer(b"\0".join(parts[::2]), np.uint8)
        # where special tokens begin in the text, and their places among the ids
        begins, places = stops[:-1:2], [n + stop for n, stop in enumerate(itertools.accumulate(map(len, parts[:-1:2])))]
        if specials:
            ids = ids.astype(np.uint16)
            ids[places] = [self._ids[token] for token in specials]

        def place(byte: int) -> int:
            """Of the token that a byte of the text is in."""
            last = bisect.bisect_right(begins, byte) - 1
            return byte if last < 0 else places[last] + max(0, byte - stops[2 * last + 1] + 1)

        inside = np.zeros(len(ids), np.bool_)
        for start, stop in zip(borders[::2], borders[1::2], strict=True):
            if start < stop:
                inside[place(start) : place(stop - 1) + 1] = True
        return ids, inside

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        special = [b""] * len(self._special) if skip_special_tokens else self._special
        known = (int(i) for i in ids if 0 <= i < self.vocab_size)
        parts = (bytes((i,)) if i < _NUM_BYTES else special[i - _NUM_BYTES] for i in known)
        return b"".join(parts).decode("utf-8", "replace")

    def bytes_of(self, number: int) -> bytes | None:
        if not 0 <= number < self.vocab_size:
            return None
        return bytes((number,)) if number < _NUM_BYTES else self._special[number - _NUM_BYTES]

    @property
    def all_special_ids(self) -> list[int]:
        """Of the tokens that are not text, by the name that transformers has for them."""
        return list(range(_NUM_BYTES, self.vocab_size))

    def bytes_of_tokens(self) -> NDArray[np.int64]:
        """Bytes of text that each id stands for; none for special tokens."""
        return np.array([1] * _NUM_BYTES + [0] * len(self._special), np.int64)

    def save(self, directory: Path) -> None:
        tokenizer = byte_level(byte_letters(), use_regex=False)
        add_tokens(tokenizer, [(token, True) for token in (END, *self._added)])
        _write(tokenizer, directory)
        _write_chat_template(self._chat_template, directory)


class FileTokenizer:
    """A directory with ``tokenizer.json``, as Hugging Face writes it. Raises DataError if it cannot be read."""

    def __init__(
        self,
        directory: Path,
        chat_template: str | None = None,
        add_bos: bool | None = None,
        added: Sequence[str] = (),
    ) -> None:
        import tokenizers

        self._file = path = directory / "tokenizer.json"
        if not path.exists():
            raise DataError(
                f"data.tokenizer: no tokenizer.json in {str(directory)!r}; give bytes, bpe or a directory that "
                f"AutoTokenizer.from_pretrained(...).save_pretrained(directory) wrote"
            )
        with _panics_told(path):
            try:
                content = read_bytes(path)  # first: the library waits at a pipe
                self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            except Exception as error:  # the library raises plain Exception
                raise DataError(f"data.tokenizer: cannot read {path} ({error})") from error
        self._tokenizer.no_truncation()  # a corpus is not cut to the length the file was saved with
        self._tokenizer.no_padding()
        self._piecewise: PiecewiseEncoder | None = None
        self._directory = directory
        self._chat_template = chat_template
        vocab = self._tokenizer.get_vocab()
        self.vocab_size = max(vocab.values()) + 1
        self._added = tuple(added)
        new = [token for token in added if token not in vocab]  # others become special, and keep their ids
        self.num_new = len(new)
        add_tokens(self._tokenizer, [(token, True) for token in added])
        for token in new:
            if self._tokenizer.token_to_id(token) != self.vocab_size:
                raise DataError(
                    f"data.add_tokens: {token} cannot be put behind the {self.vocab_size} tokens of data.tokenizer="
                    f"{directory}, whose ids have gaps; set add_tokens=false, or give another tokenizer"
                )
            self.vocab_size += 1
        special = _special_tokens(directory)
        self.eos_token_id, self.bos_token_id, pad = (
            self._tokenizer.token_to_id(token) if isinstance(token, str) else token for token in special.values()
        )
        self.pad_token_id = pad if pad is not None else self.eos_token_id or 0
        self.prefix_tokens, self.suffix_tokens = self._around(add_bos, vocab)
        parts: list[Any] = [hashlib.sha256(content).hexdigest(), special]
        if self.prefix_tokens or self.suffix_tokens:
            parts.append([self.prefix_tokens, self.suffix_tokens])
        if added:
            parts.append({"added": self._added})
        self.fingerprint = hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    def _around(self, add_bos: bool | None, vocab: Iterable[str]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Tokens before and behind a text. They are what the file's post-processor writes: beside a tokenizer.json
        transformers 5 does not read add_bos_token and add_eos_token (``tokenization_utils_base.py``)."""
        if add_bos is False:
            return (), ()
        # around a text that is not empty: a vocabulary of few words may not have an "a"
        some = map(self._tokenizer.encode, ("a", *vocab))
        with _panics_told(self._file):
            ids, is_added = next((each.ids, each.special_tokens_mask) for each in some if 0 in each.special_tokens_mask)
        prefix, begin = tuple(ids[: is_added.index(0)]), self.bos_token_id
        if add_bos and begin is None:
            raise DataError(
                f"data.add_bos: the tokenizer {str(self._directory)!r} names no bos_token; add it to its "
                "tokenizer_config.json, or leave add_bos out"
            )
        if add_bos and begin is not None and begin not in prefix:
            prefix = (begin, *prefix)
        return prefix, tuple(ids[len(ids) - is_added[::-1].index(0) :])

    def encode(self, text: str) -> list[int]:
        with _panics_told(self._file):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.encode(text)
        return [*unspelled(self.prefix_tokens, ids), *ids]

    def encode_arrays(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Texts above a million characters are encoded in pieces cut at line borders."""
        pieces = [_pieces(text) for text in texts]
        flat = [piece for group in pieces for piece in group]
        arrays: list[NDArray[Any] | None] = [None] * len(flat)
        if self._piecewise is not None:
            arrays = self._piecewise.encode(flat)
        left = [number for number, ids in enumerate(arrays) if ids is None]
        start = size = 0
        for stop, number in enumerate(left, 1):
            size += len(flat[number])
            if size >= _AT_ONCE or stop == len(left):
                # "fast" leaves out the offsets (tokenizers 0.20)
                batch = [flat[each] for each in left[start:stop]]
                with _panics_told(self._file):
                    encodings = self._tokenizer.encode_batch_fast(batch, add_special_tokens=False)
                for each, encoding in zip(left[start:stop], encodings, strict=True):
                    arrays[each] = np.array(encoding.ids, np.uint32)
                start, size = stop, 0
        in_turn = (ids for ids in arrays if ids is not None)
        return [np.concatenate([next(in_turn) for _ in group]) for group in pieces]

    def prepare(self, texts: Iterable[str]) -> None:
        try:
            encoder = PiecewiseEncoder(self._tokenizer)
            for text in (*HARD, *texts):  # for what its rules do not know of
                (ids,) = encoder.encode([text])
                if ids is not None and ids.tolist() != self.encode(text):
                    raise NotPiecewiseError("it gives a text other ids than its rules say")
            self._piecewise = encoder
        except NotPiecewiseError as why:
            _log.warning("data.tokenizer: encoded by the tokenizers library alone, up to seven times slower: %s", why)

    def encode_marked(self, texts: Sequence[str], spans: Sequence[Sequence[Span]]) -> list[Marked]:
        marked: list[Marked] = []
        with _panics_told(self._file):
            encodings = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        for encoding, marks in zip(encodings, spans, strict=True):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            starts, stops = offsets[:, 0], offsets[:, 1]
            inside = np.zeros(len(offsets), np.bool_)
            for start, stop in marks:
                # from the first to the last token with characters of the span: byte-level tokenizers may take the
                # white space out of offsets, so that a token between them has none
                inside[stops.searchsorted(start, "right") : starts.searchsorted(stop, "left")] = True
            marked.append((np.array(encoding.ids, np.uint32), inside))
        return marked

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        with _panics_told(self._file):
            return self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)

    def bytes_of(self, number: int) -> bytes | None:
        token = self._tokenizer.id_to_token(number) if number >= 0 else None
        if token is None:
            return None
        if number in self.added_ids:
            return token.encode()
        if self._byte_letters is not None:
            return bytes(self._byte_letters[letter] for letter in token)
        byte = _BYTE.fullmatch(token)  # SentencePiece's way of writing what its vocabulary lacks
        return bytes((int(byte[1], 16),)) if byte else None

    @property
    def unk_token_id(self) -> int | None:
        """What stands for text that the vocabulary lacks; None where it lacks none."""
        token = read_json_object(self._file, DataError, None)["model"].get("unk_token")
        return None if token is None else self._tokenizer.token_to_id(token)

    @cached_property
    def all_special_ids(self) -> list[int]:
        """Of the tokens that are not text, by the name that transformers has for them."""
        return [number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special]

    @cached_property
    def added_ids(self) -> set[int]:
        """Of the tokens that are found as they stand, special or not."""
        return set(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _byte_letters(self) -> dict[str, int] | None:
        """None where tokens are no strings of bytes."""
        return byte_letters() if document_of(self._tokenizer.decoder).get("type") == "ByteLevel" else None

    def bytes_of_tokens(self) -> NDArray[np.int64] | None:
        """Bytes of text that each id stands for, none for special tokens.

        Exact where tokens are strings of bytes (GPT-2's byte-level BPE, as in Llama 3 and Qwen); None for others, whose
        tokens stand for more or less text depending on where they are (SentencePiece, WordPiece).
        """
        if self._byte_letters is None:
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
        if self._added:
            add_to_directory(directory, [(token, True) for token in self._added])
        templates = self._directory / "additional_chat_templates"
        if templates.is_dir() and self._directory.resolve() != directory.resolve():
            shutil.copytree(templates, directory / templates.name, dirs_exist_ok=True)
        settings = _read_object(directory / "tokenizer_config.json")
        names = {"eos_token": self.eos_token_id, "bos_token": self.bos_token_id}
        names |= {} if settings else {"pad_token": self.pad_token_id}
        if str(settings.get("tokenizer_class")).startswith(("Llama", "CodeLlama", "Gemma", "Cohere")):  # as they do
            settings.setdefault("padding_side", "left")
        named = {k: self._tokenizer.id_to_token(v) for k, v in names.items() if v is not None and not settings.get(k)}
        _write_config(settings | named, directory)
        _write_chat_template(self._chat_template, directory)


@contextmanager
def _panics_told(path: Path) -> Iterator[None]:
    """Around what the library does with a file: a panic of its Rust is no Exception, and of no class to import."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # pyo3's
            raise
        raise DataError(f"data.tokenizer: the tokenizers library cannot use {path} ({error}); give another") from error


def special_tokens(directory: Path) -> dict[str, str]:
    """Special tokens as ``eos_token`` and the like, of the files of a tokenizer directory. Raises DataError."""
    found: dict[str, str] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in _read_object(directory / name).items():
            token = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(token, str):
                found[key] = token
    return found


def _special_tokens(directory: Path) -> dict[str, str | int | None]:
    """Tokens (text or id) for eos, bos and pad, in this order, from the tokenizer's files, else the model's."""
    try:
        named = special_tokens(directory)
        by_id = [_read_object(directory / name) for name in ("config.json", "generation_config.json")]
    except DataError as error:
        raise DataError(f"data.tokenizer: {error}") from error
    found: dict[str, str | int | None] = {}
    for kind in ("eos", "bos", "pad"):
        values = [settings.get(f"{kind}_token_id") for settings in by_id]
        ids = [value[0] if isinstance(value, list) and value else value for value in values]
        found[kind] = named.get(f"{kind}_token", next((id_ for id_ in ids if isinstance(id_, int)), None))
    return found


def _read_object(path: Path) -> dict[str, Any]:
    return read_json_object(path, DataError) if path.exists() else {}


def _pieces(text: str) -> list[str]:
    """A text cut at line borders into pieces of a million characters and some."""
    if len(text) <= _PIECE:
        return [text]
    pieces, start = [], 0
    while start < len(text):
        stop = text.find("\n", start + _PIECE) + 1 or len(text)
        pieces.append(text[start:stop])
        start = stop
    return pieces


def train_bpe(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
    """Train a byte-level BPE with GPT-2's word splitting and write it as a Hugging Face directory.

    The vocabulary is smaller than ``vocab_size`` where the texts hold too few pairs. Every text can be encoded.
    """
    _write(trained(texts, vocab_size, END), directory)


def _write(tokenizer: tokenizers.Tokenizer, directory: Path) -> None:
    """``tokenizer.json`` and ``tokenizer_config.json`` of a tokenizer whose only special token is the end."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_config({"eos_token": END, "bos_token": END, "pad_token": END}, directory)


def _write_config(settings: dict[str, Any], directory: Path) -> None:
    """``tokenizer_config.json`` with the class that keeps ``tokenizer.json``: see ``auto_tokenizer.py``."""
    config = {**settings, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _write_chat_template(source: str | None, directory: Path) -> None:
    if source is not None:
        (directory / "chat_template.jinja").write_text(source, encoding="utf-8")
