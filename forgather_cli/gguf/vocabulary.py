"""A tokenizer as a GGUF file has it: tokens with their types, merges or scores, special ids, rules, chat template.

What cannot be told from the files is tried: llama.cpp encodes a text made for it by each candidate, and the first that
gives the tokenizer's ids is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgather_cli.data.text.library import from_document
from forgather_cli.data.text.piecewise import byte_letters
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError
from forgather_cli.gguf.layout import Metadata

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_END_KEYS = ("eos", "eot", "eom")  # all the ends that a file has keys for
_BY_TEXT = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "<|end_of_text|>",
)  # fmt: skip
"""Tokens at which llama.cpp stops whatever the file says."""

PRE_TOKENIZERS = (
    "gpt-2", "llama-bpe", "qwen2", "smaug-bpe", "smollm", "tekken", "gpt-4o", "deepseek-llm", "deepseek-coder",
    "deepseek-v3", "falcon", "bloom", "viking", "chameleon", "superbpe", "bailingmoe", "seed-coder", "kimi-k2",
    "exaone-moe", "qwen35", "afmoe", "tiny_aya", "youtu", "jais-2", "default",
)  # fmt: skip
"""llama.cpp's names of pre-tokenizers that split in different ways; where it has several for one, the oldest."""

UNMERGED = "jkv"
"""A word of a made-up vocabulary that no merges make: only who ignores merges comes to it."""
PHRASES = (
    "It's here,", "they're", "THERE'S I'D", "we'll, I've", "Hello World", "x=12345+6", "789.0 22nd", "4444 55555",
    "a1b22c333", "f(x):\n    re", "x**2  # ok\n", "\n\n\tif  not", "  two  spa", "es   three", "\t\tand\n\n\n",
    "s \n \n end", "sna_case", "camelCase", "HTTPServer", "http://a.b/c", "?d=e&f#g", "(foo)[bar]", "{baz}<qux>",
    "...!!!???", "---/// ***", "naïve", "café Ü", "Ünïcö", "ÅNGSTRÖM", "Привет", "мир Ми", "中文字符", "日本 語",
    "テキ", "한국 어", "👍🏽 🎉", "🎉🎉", "❤ ½ ²", "№ ™", "ไทย", "हिन्दी", "العربي", "$100,000.50", "€5 £7",
    "'quoted' \"", "\"double\" `b`", "a\r\nb\r\n\r\nc", "\n", "\n\n", " \n", "end. ", "A/B /c\n/d",
    "e\u00a0f\u3000g", "don't DON'T", "Don'T x'y", "z'S 's", "foo/bar", "!\n\n?", "a  b", "\n x",
)  # fmt: skip
"""Texts that pre-tokenizers split in different ways."""


@dataclass(frozen=True)
class GgufVocabulary:
    """What a file says of a tokenizer, but for what is to be tried."""

    model: str
    """gguf's name of the kind: gpt2, llama, t5."""
    metadata: Metadata
    candidates: tuple[Metadata, ...]
    """What is to be tried, the likeliest first; none: the splitting of a byte-level BPE, which is tried apart."""


def read_vocabulary(directory: Path, tokenizer: Tokenizer, rows: int, stop: list[int]) -> GgufVocabulary:
    """The tokenizer of a model directory. Raises DataError for one that has no counterpart.

    ``tokenizer``: the same, with the run's rule for what stands before a text. ``rows``: of the embedding.
    ``stop``: the tokens that end a text.
    """
    document = read_json_object(directory / "tokenizer.json", DataError, None)
    model = document["model"]
    added = {entry["id"]: entry for entry in document.get("added_tokens") or []}
    kind, scores = _kind(document), {}
    if kind == "t5":
        known = {number: token for number, (token, _) in enumerate(model["vocab"])}
        scores = {number: float(score) for number, (_, score) in enumerate(model["vocab"])}
        unknown = model.get("unk_id")
    else:
        known = {number: token for token, number in model["vocab"].items()}
        unknown = model["vocab"].get(model.get("unk_token"))
    last = max([*known, *added])
    if last >= rows:
        raise DataError(f"--gguf: the tokenizer has the id {last}, and the model {rows} rows; give one that fits")
    tokens, types = [], []
    for number in range(rows):
        text = known.get(number)
        if number in added:
            text = added[number]["content"]
            kind_of = _CONTROL if added[number]["special"] else _USER_DEFINED
        elif text is None:
            text, kind_of = f"[PAD{number}]", _UNUSED
        else:
            kind_of = _BYTE if kind != "gpt2" and _BYTE_TOKEN.fullmatch(text) else _NORMAL
        tokens.append(text)
        types.append(_UNKNOWN if number == unknown and kind != "gpt2" else kind_of)
    if twice := len(tokens) - len(set(tokens)):
        raise DataError(f"--gguf: {twice} tokens of the vocabulary have the text of another, which gguf does not allow")
    metadata: Metadata = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **_rules(tokenizer, stop, tokens),
    }
    if unknown is not None:
        metadata["tokenizer.ggml.unknown_token_id"] = unknown
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
    if kind == "gpt2":
        # llama.cpp wants one: this one no text has
        metadata["tokenizer.ggml.merges"] = merges or ["\ufdd0 \ufdd1"]
        return GgufVocabulary(kind, metadata, () if merges else ({"tokenizer.ggml.pre": "gpt-2"},))
    if kind == "llama":  # the earlier a merge, the better what it makes
        for rank, merge in enumerate(merges, 1):
            left, right = merge.split(" ")
            scores.setdefault(model["vocab"][left + right], -float(rank))
    metadata["tokenizer.ggml.pre"] = "default"
    metadata["tokenizer.ggml.scores"] = [scores.get(number, 0.0) for number in range(rows)]
    if charsmap := _charsmap(document.get("normalizer")):
        metadata["tokenizer.ggml.precompiled_charsmap"] = charsmap
    return GgufVocabulary(kind, metadata, tuple(_whitespace(kind)))


def _kind(document: dict[str, Any]) -> str:
    model = document["model"]
    pre, decoder = (json.dumps(document.get(key)) for key in ("pre_tokenizer", "decoder"))
    if model["type"] == "Unigram":
        return "t5"
    if model["type"] == "BPE" and '"ByteLevel"' in pre + decoder:
        return "gpt2"
    if model["type"] == "BPE" and model.get("byte_fallback"):
        return "llama"
    kind = model["type"] + (" without bytes" if model["type"] == "BPE" else "")
    raise DataError(
        f"--gguf: a tokenizer of the kind {kind} is not written; train with a byte-level BPE (tokenizer=bpe), or leave "
        "--gguf out"
    )


def _rules(tokenizer: Tokenizer, stop: list[int], tokens: list[str]) -> Metadata:
    """Special ids, and what is put around a text."""
    prefix, suffix = tokenizer.prefix_tokens, tokenizer.suffix_tokens
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    if (prefix and prefix != (begin,)) or (suffix and suffix != (end,)):
        raise DataError(
            f"--gguf: the tokenizer puts the tokens {[*prefix, *suffix]} around a text, and a file can put the begin "
            "and the end token alone; change the post_processor of its tokenizer.json"
        )
    if end is None and not stop:  # llama.cpp would take an ordinary token: 11, or 2
        raise DataError("--gguf: no token ends a text; add eos_token to tokenizer_config.json")
    # those that llama.cpp knows by their text need no key
    ends = ([] if end is None else [end]) + sorted(
        (number for number in stop if number != end), key=lambda number: tokens[number] in _BY_TEXT
    )
    unknown = [number for number in ends[len(_END_KEYS) :] if tokens[number] not in _BY_TEXT]
    if unknown:
        raise DataError(
            f"--gguf: a text may end at {len(ends)} tokens, and a file has keys for {len(_END_KEYS)}; take "
            f"{tokens[unknown[0]]} ({unknown[0]}) out of eos_token_id in generation_config.json"
        )
    ids = dict(zip(_END_KEYS, ends, strict=False)) | {"padding": tokenizer.pad_token_id}
    if begin is not None:
        ids["bos"] = begin
    return {
        **{f"tokenizer.ggml.{key}_token_id": number for key, number in ids.items()},
        "tokenizer.ggml.add_bos_token": bool(prefix),
        "tokenizer.ggml.add_eos_token": bool(suffix),
    }


def _whitespace(kind: str) -> Iterator[Metadata]:
    for prefix in (True, False):
        for remove in (False, True) if kind == "t5" else (False,):
            yield {
                "tokenizer.ggml.add_space_prefix": prefix,
                "tokenizer.ggml.remove_extra_whitespaces": remove,
            }


def _charsmap(normalizer: Any) -> bytes | None:
    """SentencePiece's table of characters, which a normalizer may have."""
    if not isinstance(normalizer, dict):
        return None
    if normalizer.get("type") == "Precompiled":
        import base64

        return base64.b64decode(normalizer["precompiled_charsmap"])
    return next(filter(None, map(_charsmap, normalizer.get("normalizers") or [])), None)


def telling_document(own: dict[str, Any]) -> dict[str, Any]:
    """A byte-level BPE with the splitting of ``own``, both as tokenizer.json has them. Its tokens are the pieces that
    ``PHRASES`` are split into: every part of a phrase is one token, and any two parts in turn are merged."""
    letter_of = list(byte_letters())
    parts: dict[str, None] = dict.fromkeys(sorted(letter_of))
    merges: dict[tuple[str, str], None] = {}
    for phrase in PHRASES:
        letters = "".join(letter_of[byte] for byte in phrase.encode())
        for length in range(2, len(letters) + 1):
            for start in range(len(letters) - length + 1):
                part = letters[start : start + length]
                parts[part] = None
                merges |= dict.fromkeys((part[:n], part[n:]) for n in range(1, length))
    parts[UNMERGED] = None
    vocab = {part: number for number, part in enumerate(parts)}
    ignores = bool(own["model"].get("ignore_merges"))
    model = {"type": "BPE", "vocab": vocab, "merges": list(merges), "ignore_merges": ignores}
    return {"pre_tokenizer": own.get("pre_tokenizer"), "model": model}


def unmerged_token(own: dict[str, Any]) -> str | None:
    """The first token of a byte-level BPE, as tokenizer.json has it, that its merges do not make; without one it is all
    the same whether it ignores them."""
    words = from_document({"model": own["model"] | {"ignore_merges": False}})
    vocab = own["model"]["vocab"]
    added = {entry["content"] for entry in own.get("added_tokens") or []}
    tokens = (token for token in sorted(vocab, key=vocab.__getitem__) if token not in added)
    return next((token for token in tokens if len(words.encode(token).ids) > 1), None)


def added_tokens(directory: Path) -> list[str]:
    """Of tokenizer.json, those first that take the blanks beside them or are words of their own alone."""
    path = directory / "tokenizer.json"
    found = read_json_object(path, DataError, None).get("added_tokens") or [] if path.is_file() else []
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    return [entry["content"] for entry in sorted(found, key=lambda entry: -sum(bool(entry.get(key)) for key in flags))]
