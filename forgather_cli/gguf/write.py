"""Writing a GGUF file piece by piece: no more of the weights is in memory than a few rows and their quantized copy."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from forgather_cli.checkpoint.format import TensorSpec
from forgather_cli.checkpoint.tensors import Weights
from forgather_cli.errors import ModelError
from forgather_cli.gguf.layout import Architecture, Metadata, TensorEntry, Value
from forgather_cli.gguf.options import GGUF_TYPES, GgufType
from forgather_cli.terminal.bars import Bar

_AT_ONCE = 1 << 22  # numbers; fp32 they are 16 MiB
_BLOCK = 32  # numbers of a row that have a scale of their own in Q8_0
_TAIL = 256  # of a tensor's name, in bytes


def stored_type(spec: TensorSpec, wanted: GgufType) -> GgufType:
    """The type of a tensor in the file: fp32 for what is no matrix, fp16 for rows that blocks do not divide."""
    if len(spec.shape) < 2:
        return "f32"
    return "f16" if wanted == "q8_0" and spec.shape[-1] % _BLOCK else wanted


def quantized(tensor: Tensor, kind: GgufType) -> NDArray[Any]:
    """The numbers of a tensor as they lie in the file. Raises ModelError for numbers that a type cannot hold."""
    import gguf

    values = tensor.float().numpy()
    if kind == "f32":
        return values
    with np.errstate(over="ignore"):
        made: NDArray[Any] = gguf.quants.quantize(values, gguf.GGMLQuantizationType[kind.upper()])
    if kind == "f16" and not np.isfinite(made).all() and np.isfinite(values).all():
        raise ModelError("--gguf f16: the weights hold numbers that fp16 cannot; choose bf16, q8_0 or f32")
    return made


def rounded(tensor: Tensor, kind: GgufType) -> Tensor:
    """A tensor after it has been in the file, in fp32."""
    import gguf

    if kind == "f32":
        return tensor.float()
    rows = tensor.reshape(-1, tensor.shape[-1])
    made = torch.empty(rows.shape)
    step = max(1, _AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        stored = quantized(rows[start : start + step].cpu(), kind)
        back = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind.upper()])
        made[start : start + step] = torch.from_numpy(back)
    return made.reshape(tensor.shape)


@dataclass(frozen=True)
class Contents:
    """All that a file is made of."""

    architecture: Architecture
    weights: Weights
    metadata: Metadata
    """Beside the architecture's: general, tokenizer."""

    def specs(self) -> Iterator[tuple[TensorEntry, TensorSpec]]:
        """The tensors with the shapes they have in the file, in torch's order."""
        for entry in self.architecture.entries(self.weights.names):
            if not entry.sources:
                yield entry, TensorSpec(entry.name, "F32", (len(self.architecture.rope_factors or []),))
                continue
            spec = self.weights.spec(entry.sources[0])
            if entry.change is not None:
                spec = replace(spec, shape=tuple(entry.change(torch.empty(spec.shape, device="meta")).shape))
            if len(entry.sources) > 1:
                spec = replace(spec, shape=(len(entry.sources), *spec.shape))
            yield entry, spec

    def num_bytes(self, wanted: GgufType) -> int:
        """Of the file, nearly: a vocabulary has some 50 bytes a token."""
        each = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "q8_0": 34 / 32}
        tensors = sum(each[stored_type(spec, wanted)] * spec.num_elements + _TAIL for _, spec in self.specs())
        return int(tensors) + 50 * self.architecture.vocab_size

    def pieces(self, entry: TensorEntry, spec: TensorSpec, kind: GgufType) -> Iterator[NDArray[Any]]:
        """A tensor's numbers as they lie in the file, some rows at a time."""
        if not entry.sources:
            yield np.array(self.architecture.rope_factors, np.float32)
        for source in entry.sources:
            stored = self.weights.spec(source)
            rows = max(1, _AT_ONCE * stored.num_rows // max(stored.num_elements, 1))
            if entry.change is not None and len(stored.shape) < 3:
                rows = stored.num_rows
            for start in range(0, stored.num_rows, rows):
                tensor = self.weights.read(source, start, start + rows)
                yield quantized(tensor if entry.change is None else entry.change(tensor).contiguous(), kind)


def write_gguf(path: Path, contents: Contents, wanted: GgufType) -> None:
    """Write the file ``path``, which must not exist."""
    import gguf

    writer = gguf.GGUFWriter(path, contents.architecture.name)
    own = {"general.file_type": int(gguf.LlamaFileType[GGUF_TYPES[wanted]]), "general.quantization_version": 2}
    for key, value in {**own, **contents.architecture.metadata, **contents.metadata}.items():
        _add(writer, key, value)
    tensors = []
    for entry, spec in contents.specs():
        kind = stored_type(spec, wanted)
        shape = spec.shape
        if kind == "q8_0":  # the writer takes that of the bytes
            shape = (*shape[:-1], shape[-1] // _BLOCK * 34)
        size = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}[kind] * int(np.prod(shape))
        raw = gguf.GGMLQuantizationType[kind.upper()]
        as_bytes = np.uint8 if kind == "q8_0" else np.float32
        writer.add_tensor_info(entry.name, shape, np.dtype(as_bytes), size, raw_dtype=raw)
        tensors.append((entry, spec, kind, size))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    # by hand: the writer takes whole tensors
    align = gguf.GGUF_DEFAULT_ALIGNMENT
    with path.open("ab") as file, Bar("writing GGUF", "bytes", total=sum(size for *_, size in tensors)) as bar:
        file.write(bytes(-file.tell() % align))
        for entry, spec, kind, size in tensors:
            for piece in contents.pieces(entry, spec, kind):
                piece.tofile(file)
                bar.add(piece.nbytes)
            file.write(bytes(-size % align))


def _add(writer: Any, key: str, value: Value) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)
