"""llama.cpp's own quantizer: ``ggml_quantize_chunk`` and ``dequantize_row_*`` of the library that xllamacpp brings.

Their arguments: ggml/include/ggml.h and ggml/src/ggml-quants.h of https://github.com/ggml-org/llama.cpp (October 2026).
Other threads run meanwhile.
"""

from __future__ import annotations

import functools
from ctypes import CDLL, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.gguf.options import StoredType


@functools.cache
def _library() -> CDLL:
    """That it loads, ``check_installed`` has seen in a process of its own."""
    import xllamacpp

    library = CDLL(xllamacpp.xllamacpp.__file__)
    library.ggml_quantize_chunk.restype = c_size_t
    library.ggml_quantize_chunk.argtypes = [c_int, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p]
    return library


def block_of(kind: StoredType) -> tuple[int, int]:
    """How many numbers of a row have their scales in common, and in how many bytes they lie."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.upper()]]
    return numbers, size


def quantize(rows: NDArray[np.float32], kind: StoredType) -> NDArray[np.uint8]:
    """Rows (R, numbers) as they lie in a file, (R, bytes)."""
    import gguf

    (block, size), (count, numbers) = block_of(kind), rows.shape
    made = np.empty((count, numbers // block * size), np.uint8)
    raw, source, target = gguf.GGMLQuantizationType[kind.upper()], rows.ctypes.data, made.ctypes.data
    _library().ggml_quantize_chunk(raw, source, target, 0, count, numbers, None)
    return made


def dequantize(stored: NDArray[Any], kind: StoredType, count: int) -> NDArray[np.float32]:
    """The ``count`` numbers of whole blocks."""
    function = _library()[f"dequantize_row_{kind.replace('_k', '_K')}"]
    function.argtypes, function.restype = [c_void_p, c_void_p, c_int64], None
    made = np.empty(count, np.float32)
    function(stored.ctypes.data, made.ctypes.data, count)
    return made
