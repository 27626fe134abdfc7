"""The plain write: weights tensor by tensor in another dtype and with more rows, tokenizer, config.json."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.checkpoint.format import TensorSpec
from forgather_cli.checkpoint.tensors import Weights, dtype_of, main_dtype
from forgather_cli.data.chat.ends import as_eos, write_generation_config
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.documents.encoding import DTYPES
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ModelError
from forgather_cli.finalize.options import DtypeName
from forgather_cli.models.pretrained import size_problems
from forgather_cli.models.resize import new_rows

TORCH_DTYPES: dict[DtypeName, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_EMBEDDING = re.compile(r"(^|[._])(embed_tokens|embed_in|wte|word_embeddings|tok_embeddings|embeddings)\.weight$")
_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)\.(weight|bias)$")
_LEFT_OUT = re.compile(r"rotary_emb\.inv_freq$")  # of old exports; it follows from config.json


@dataclass(frozen=True)
class Vocabulary:
    """How many tokens a model knows before and after."""

    before: int
    """Largest id of the tokenizer + 1."""
    after: int

    @property
    def added(self) -> int:
        return self.after - self.before

    def rows(self, rows: int) -> int:
        """Of an embedding that had ``rows``: some models have more than tokens."""
        return max(rows, self.after) if self.added else rows


class ConvertedWeights:
    """The tensors of a model directory as they will be written: by name, made when they are asked for.

    Raises ModelError where tokens are added and no tensor is an embedding of the vocabulary.
    """

    def __init__(self, weights: Weights, config: dict[str, Any], dtype: torch.dtype | None, vocab: Vocabulary) -> None:
        self._weights = weights
        self._dtype = dtype
        self._vocab = vocab
        names = [name for name in weights.names if not _LEFT_OUT.search(name)]
        if config.get("tie_word_embeddings") and any(_EMBEDDING.search(name) for name in names):
            names = [name for name in names if name != "lm_head.weight"]
        self._resized: set[str] = set()  # embedding and head: those of their names that have a row for each token
        if vocab.added:
            rows = config.get("vocab_size")
            of_tokens = [name for name in names if weights.spec(name).num_rows == rows]
            if not any(_EMBEDDING.search(name) for name in of_tokens):
                raise ModelError(
                    f"--add-tokens: no tensor of {weights.directory} is known as an embedding of {rows} tokens"
                )
            self._resized = {name for name in of_tokens if _EMBEDDING.search(name) or _HEAD.search(name)}
        self.specs: dict[str, TensorSpec] = {}
        for name in names:
            spec = weights.spec(name)
            if dtype is not None and dtype_of(spec).is_floating_point:
                spec = replace(spec, dtype=DTYPES[dtype])
            if name in self._resized:
                spec = replace(spec, shape=(vocab.rows(spec.num_rows), *spec.shape[1:]))
            self.specs[name] = spec

    @property
    def num_bytes(self) -> int:
        return sum(spec.num_bytes for spec in self.specs.values())

    @property
    def num_parameters(self) -> int:
        return sum(spec.num_elements for spec in self.specs.values())

    @property
    def dtype(self) -> torch.dtype:
        """That of most of the weights."""
        return main_dtype(self.specs.values())

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._weights.read(name)
        if name in self._resized:
            old, spare = tensor[: self._vocab.before], tensor[self._vocab.after :]
            tensor = torch.cat([old, new_rows(old, self._vocab.added, name=name), spare])
        converted = tensor.to(dtype_of(self.specs[name]))
        if converted.dtype != tensor.dtype and not converted.isfinite().all() and tensor.isfinite().all():
            raise ModelError(
                f"--dtype: {name} holds numbers that {short_name(converted.dtype)} cannot; choose bf16 or fp32"
            )
        return converted


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a model directory. Raises ModelError where it is missing, damaged, or of a quantized model."""
    path = directory / "config.json"
    if not path.exists():
        raise ModelError(
            f"{directory}: has no config.json, since the model is a class of your own, which no other tool can build; "
            "its weights and tokenizer lie there ready for use"
        )
    config = read_json_object(path, ModelError)
    for problem in size_problems(config):
        raise ModelError(f"{path}: {problem}")
    if config.get("quantization_config") is not None:
        raise ModelError(f"{directory}: is quantized already; finalize the checkpoint or model that it was made from")
    return config


def num_positions(config: dict[str, Any]) -> int | None:
    """The longest sequence that a model takes, by the names that config.json has for it; None where it tells none."""
    found = (config.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))
    return next((value for value in found if isinstance(value, int)), None)


def write_configs(
    directory: Path,
    config: dict[str, Any],
    *,
    dtype: torch.dtype,
    vocab: Vocabulary,
    tokenizer: Tokenizer,
    stop: list[int],
) -> None:
    """Write config.json with what has changed, and generation_config.json with the tokens that end a text."""
    config = {**config, "dtype": _name(dtype), "torch_dtype": _name(dtype)}
    if vocab.added:
        config["vocab_size"] = vocab.rows(int(config["vocab_size"]))
    pad = config.get("pad_token_id")
    ids = {
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": as_eos(stop),
        "pad_token_id": tokenizer.pad_token_id if pad is None else pad,
    }
    known = {key: value for key, value in ids.items() if value is not None}
    write_json(directory / "config.json", {**config, **known})
    write_generation_config(directory, known)


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def short_name(dtype: torch.dtype) -> str:
    """The name of a dtype as it is typed."""
    return next((name for name, known in TORCH_DTYPES.items() if known == dtype), _name(dtype))
