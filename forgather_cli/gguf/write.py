"""Writing a GGUF file piece by piece: no more of the weights is in memory than a few rows and their quantized copy."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterator
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
from forgather_cli.gguf import ggml
from forgather_cli.gguf.layout import Architecture, Metadata, TensorEntry, Value
from forgather_cli.gguf.mixture import stored_type
from forgather_cli.gguf.options import GGUF_TYPES, GgufType, StoredType
from forgather_cli.terminal.bars import Bar

_AT_ONCE = 1 << 22  # numbers; fp32 they are 16 MiB
_IN_CACHE = 1 << 14  # blocks; fp32 they are 2 MiB
_BLOCK = 32  # numbers of a row that have a scale of their own in Q8_0
_LARGEST_HALF = 65504.0  # in fp16
_TAIL = 256  # of a tensor's name, in bytes
_Piece = Callable[[], NDArray[Any]]


def quantized(tensor: Tensor, kind: StoredType) -> NDArray[Any]:
    """The numbers of a tensor as they lie in the file: those of ``gguf.quants.quantize``, in less time and memory; of
    types that it has not, those of llama.cpp.

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
        case _:
            least, largest = tensor.aminmax()
            if not -_LARGEST_HALF <= least <= largest <= _LARGEST_HALF:  # nor do scales in fp16, then
                raise _cannot_hold(kind)
            rows = tensor.reshape(-1, tensor.shape[-1])
            some = rows.split(max(1, _IN_CACHE * _BLOCK // rows.shape[1]))  # type: ignore[no-untyped-call]
            made_rows = np.concatenate([ggml.quantize(part.float().numpy(), kind) for part in some])
            return made_rows.reshape(*tensor.shape[:-1], -1)
    if not scales.isfinite().all() and tensor.isfinite().all():
        raise _cannot_hold(kind)
    return made.numpy()


def _cannot_hold(kind: StoredType) -> ModelError:
    return ModelError(f"--gguf: the weights hold numbers that {kind} cannot hold; choose bf16 or f32")


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


def rounded(tensor: Tensor, kind: StoredType) -> Tensor:
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

    def stored(self, wanted: GgufType) -> Iterator[tuple[TensorEntry, TensorSpec, StoredType]]:
        """The tensors with the types they have in a file."""
        for entry, spec in self.specs():
            yield entry, spec, stored_type(self.architecture, entry.name, spec.shape, wanted)

    def num_bytes(self, wanted: GgufType) -> int:
        """Of the file, nearly: a vocabulary has some 50 bytes a token."""
        total = 50 * self.architecture.vocab_size
        for _, spec, kind in self.stored(wanted):
            block, size = ggml.block_of(kind)
            total += spec.num_elements // block * size + _TAIL
        return total

    def pieces(self, entry: TensorEntry, spec: TensorSpec, kind: StoredType) -> Iterator[_Piece]:
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
        for entry, spec, kind in contents.stored(wanted):
            (block, size), shape, raw = ggml.block_of(kind), spec.shape, gguf.GGMLQuantizationType[kind.upper()]
            if block > 1:  # the writer takes that of the bytes
                shape = (*shape[:-1], shape[-1] // block * size)
            size *= spec.num_elements // block
            unit = np.dtype("uint8" if block > 1 else "float32")
            writer.add_tensor_info(entry.name, shape, unit, size, raw_dtype=raw)
            tensors.append((entry, spec, kind, size))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
    # by hand: the writer takes whole tensors
    align = gguf.GGUF_DEFAULT_ALIGNMENT

    def pieces() -> Iterator[_Piece]:
        for entry, spec, kind, size in tensors:
            yield from contents.pieces(entry, spec, kind)
            yield partial(np.zeros, -size % align, np.uint8)

    total = sum(size for *_, size in tensors)
    with (
        path.open("ab") as file,
        Bar("writing GGUF", "bytes", total=total) as bar,
        contextlib.closing(made_ahead(pieces())) as made,
    ):
        file.write(bytes(-file.tell() % align))
        for piece in made:
            file.write(piece.data)  # tells why it cannot, as ``tofile`` does not
            bar.add(piece.nbytes)


def made_ahead(pieces: Iterator[_Piece]) -> Generator[NDArray[Any]]:
    """The pieces in their order; as many of those that follow as there are threads are being made meanwhile."""
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(threads) as pool:
        # a piece is one thread's: threads that meet at every operation take ten times as long where others want cores
        torch.set_num_threads(1)
        try:
            made = deque(pool.submit(piece) for piece in itertools.islice(pieces, threads))
            while made:
                next_one = made.popleft()
                made.extend(pool.submit(piece) for piece in itertools.islice(pieces, 1))
                yield next_one.result()
        finally:
            torch.set_num_threads(threads)


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
