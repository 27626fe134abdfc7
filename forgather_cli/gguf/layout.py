"""A model as llama.cpp knows it: its metadata, and what each tensor of a file is made of.

Names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, by gguf's own table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from forgather_cli.errors import ModelError

Value = bool | int | float | str | bytes | list[int] | list[float] | list[str]
Metadata = dict[str, Value]

Change = Callable[[Tensor], Tensor]
"""What is made of a source's tensor before it is stored; of one of three dimensions, experts, one by one."""
_NOT_STORED = re.compile(r"\.(attn|attention)\.(masked_)?bias$|rotary_emb\.inv_freq$")  # of old exports
_KINDS = (".weight", ".bias")
_OF_AN_EXPERT = re.compile(r"(?<=\.experts\.)\d+\.")


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file."""

    name: str
    sources: tuple[str, ...]
    """Its names in the model's files; several: one upon another; none: it is ``rope_factors``."""
    change: Change | None = None


@dataclass(frozen=True)
class Architecture:
    """A model as llama.cpp knows it."""

    name: str
    metadata: Metadata
    """Sizes and rotary settings."""
    is_tied: bool
    changes: Mapping[str, Change]
    """By a tensor's name in the file without block and kind."""
    rope_factors: list[float] | None = None
    """By how much each rotary frequency is divided (Llama 3)."""
    period: int = 2
    """After how many layers their kinds come again, at least two."""

    @property
    def vocab_size(self) -> int:
        return cast("int", self.metadata[f"{self.name}.vocab_size"])

    @property
    def context_length(self) -> int | None:
        return cast("int", self.metadata[f"{self.name}.context_length"]) or None

    def entries(self, names: Iterable[str]) -> Iterator[TensorEntry]:
        """The file's tensors. Raises ModelError for a name that has no counterpart."""
        import gguf

        arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == self.name)
        table = gguf.get_tensor_name_map(arch, cast("int", self.metadata[f"{self.name}.block_count"]))
        found: dict[str, list[str]] = {}
        for source in sorted(names, key=_in_order):
            if _NOT_STORED.search(source):
                continue
            name = _OF_AN_EXPERT.sub("", source)
            for part in ("gate_proj", "up_proj") if name.endswith("experts.gate_up_proj") else ("gate_up_proj",):
                part = name.replace("gate_up_proj", part)
                known = table.get_name(part, _KINDS) or table.get_name(f"transformer.{part}", _KINDS)  # GPT-2's
                if known is None:
                    raise ModelError(
                        f"--gguf: the tensor {source} has no counterpart in gguf's {self.name}; leave --gguf out"
                    )
                known += "" if known.endswith(_KINDS) else ".weight"
                if not (known == "output.weight" and self.is_tied):
                    found.setdefault(known, []).append(source)
        if self.rope_factors is not None:
            yield TensorEntry("rope_freqs.weight", ())
        for name, sources in found.items():
            change = self.changes.get(name.removesuffix(".weight").removesuffix(".bias").split(".")[-1])
            if sources[0].endswith("experts.gate_up_proj"):
                change = first_half if "gate" in name else second_half
            yield TensorEntry(name, tuple(sources), change)


def _in_order(name: str) -> list[int | str]:
    return [(int(part) if part.isdigit() else part) for part in re.split(r"(\d+)", name)]


def paired(heads: int) -> Change:
    """Rows (H D, ...) with those that are rotated together, (i, i + D / 2) of each head, side by side."""

    def change(tensor: Tensor) -> Tensor:
        halves = tensor.reshape(heads, 2, len(tensor) // heads // 2, *tensor.shape[1:])
        return halves.transpose(1, 2).reshape(tensor.shape)

    return change


def by_kind(heads: int) -> Change:
    """Rows (H 3 D, ...), of each head queries, keys and values, as (3 H D, ...)."""

    def change(tensor: Tensor) -> Tensor:
        return tensor.reshape(heads, 3, -1, *tensor.shape[1:]).transpose(0, 1).reshape(tensor.shape)

    return change


def first_half(tensor: Tensor) -> Tensor:
    return tensor.chunk(2, -2)[0]


def second_half(tensor: Tensor) -> Tensor:
    return tensor.chunk(2, -2)[1]


def named(name: str, values: Metadata) -> Metadata:
    return {f"{name}.{key}": value for key, value in values.items()}


def no_counterpart(what: str, name: str, instead: str) -> ModelError:
    return ModelError(f"--gguf: {what} has no counterpart in gguf's {name}; leave --gguf out, or train with {instead}")
