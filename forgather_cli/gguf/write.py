"""Writing a GGUF file piece by piece: no more of the weights is in memory than a few rows and their quantized copy."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
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
_IN_CACHE = 1 << 14  # blocks; fp32 they are 2 MiB
_BLOCK = 32  # numbers of a row that have a scale of their own in Q8_0
_TAIL = 256  # of a tensor's name, in bytes
_Piece = Callable[[], NDArray[Any]]


def stored_type(spec: TensorSpec, wanted: GgufType) -> GgufType:
    """The type of a tensor in the file: fp32 for what is no matrix, fp16 for rows that blocks do not divide."""
    if len(spec.shape) < 2:
        return "f32"
    return "f16" if wanted == "q8_0" and spec.shape[-1] % _BLOCK else wanted


def quantized(tensor: Tensor, kind: GgufType) -> NDArray[Any]:
    """The numbers of a tensor as they lie in the file: those of ``gguf.quants.quantize``, in less time and memory.

    Raises ModelError for numbers that a type cannot hold.
    """
    match kind:
        case "f32":
            return tensor.float().numpy()
        case "bf16":
            return tensor.bfloat16().view(torch.uint8).numpy()
        case "f16":
            made = tensor.half()
            scales = made
        case "q8_0":
            made, scales = _blocks(tensor)
    if not scales.isfinite().all() and tensor.isfinite().all():
        raise ModelError(f"--gguf {kind}: the weights hold numbers that it cannot hold; choose bf16 or f32")
    return made.numpy()


def _blocks(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of Q8_0 (..., bytes): of each block its scale in fp16 and its numbers in int8. The scales again."""
    blocks = tensor.reshape(-1, _BLOCK)
    made = torch.empty(len(blocks), _BLOCK + 2, dtype=torch.uint8)
    scales = torch.empty(len(blocks), 1, dtype=torch.half)
    for start in range(0, len(blocks), _IN_CACHE):
        some = slice(start, start + _IN_CACHE)
        values = blocks[some].float()
        scale = values.abs().amax(1, keepdim=True) / 127
        values = values * torch.where(scale == 0, 0, 1 / scale)
        whole = values.to(torch.int8)  # towards zero, as ``trunc`` does in twenty times its time (torch 2.13)
        whole += values.sub_(whole).mul_(2).to(torch.int8)  # halves away from it
        scales[some] = scale
        made[some, 2:] = whole.view(torch.uint8)
    made[:, :2] = scales.view(torch.uint8)
    return made.reshape(*tensor.shape[:-1], -1), scales


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

    def pieces(self, entry: TensorEntry, spec: TensorSpec, kind: GgufType) -> Iterator[_Piece]:
        """A tensor's numbers as they lie in the file, some rows at a time, each made when it is called."""

        def piece(source: str, start: int, stop: int) -> NDArray[Any]:
            tensor = self.weights.read(source, start, stop)
            return quantized(tensor if entry.change is None else entry.change(tensor).contiguous(), kind)

        if not entry.sources:
            yield partial(np.array, self.architecture.rope_factors, np.float32)
        for source in entry.sources:
            stored = self.weights.spec(source)
            rows = max(1, _AT_ONCE * stored.num_rows // max(stored.num_elements, 1))
            if entry.change is not None and len(stored.shape) < 3:
                rows = stored.num_rows
            for start in range(0, stored.num_rows, rows):
                yield partial(piece, source, start, start + rows)


def write_gguf(path: Path, contents: Contents, wanted: GgufType) -> None:
    """Write the file ``path``, which must not exist."""
    import gguf

    with contextlib.closing(gguf.GGUFWriter(path, contents.architecture.name)) as writer:
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
    # by hand: the writer takes whole tensors
    align, threads = gguf.GGUF_DEFAULT_ALIGNMENT, torch.get_num_threads()

    def pieces() -> Iterator[_Piece]:
        for entry, spec, kind, size in tensors:
            yield from contents.pieces(entry, spec, kind)
            yield partial(np.zeros, -size % align, np.uint8)

    total = sum(size for *_, size in tensors)
    with path.open("ab") as file, Bar("writing GGUF", "bytes", total=total) as bar, ThreadPoolExecutor(threads) as pool:
        file.write(bytes(-file.tell() % align))
        # a piece is one thread's: threads that meet at every operation take ten times as long where others want cores
        torch.set_num_threads(1)
        try:
            for piece in _ahead(pool, pieces(), threads):
                file.write(piece.data)  # tells why it cannot, as ``tofile`` does not
                bar.add(piece.nbytes)
        finally:
            torch.set_num_threads(threads)


def _ahead(pool: ThreadPoolExecutor, pieces: Iterator[_Piece], count: int) -> Iterator[NDArray[Any]]:
    """The pieces in their order; ``count`` of those that follow are being made meanwhile."""
    made = deque(pool.submit(piece) for piece in itertools.islice(pieces, count))
    while made:
        next_one = made.popleft()
        made.extend(pool.submit(piece) for piece in itertools.islice(pieces, 1))
        yield next_one.result()


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
