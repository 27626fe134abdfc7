"""State of components as JSON and named tensors, and back: exact, and without a pickle.

What JSON has stands as it is. Everything else is an object with the one key ``$``: ``{"$": kind, ...}``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from forgather_cli.documents.fields import FieldError
from forgather_cli.errors import SetupError

DTYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int16: "I16", torch.uint16: "U16", torch.float16: "F16",
    torch.bfloat16: "BF16", torch.int32: "I32", torch.uint32: "U32", torch.float32: "F32", torch.int64: "I64",
    torch.uint64: "U64", torch.float64: "F64",
}  # fmt: skip
"""The dtypes of safetensors files, by their names there."""
TAG = "$"
_MAX_JSON_INT = 2**63
"""Larger ones are stored in hex: other JSON readers round them, and Python limits decimal digits (4300)."""
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_KINDS: dict[str, Any] = {name: kind for kind, name in _MAPPINGS.items()}
_STORABLE = "dict, list, tuple, str, int, float, bool, None, bytes, tensors (DTensor.full_tensor()) or numpy arrays"


Others = Callable[[Any], "tuple[str, list[Any]] | None"]
"""What else than a checkpoint's values is encoded: a value's kind and parts; None if it is none of that."""
Makers = Mapping[str, Callable[[list[Any]], Any]]
"""By kind what makes the value of its parts."""


class Stateful(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


@dataclass
class Encoded:
    """The JSON documents of some components by key, and the tensors they refer to by name."""

    documents: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, state: Any) -> None:
        """Encode ``state`` under ``key``; tensors and arrays are copied to host memory.

        Raises SetupError with the path of a value that cannot be stored.
        """
        self.documents[key] = encode(state, f"{key}.state", self.tensors)


def encode(value: Any, path: str, tensors: dict[str, Tensor], others: Others | None = None) -> Any:
    """``value`` as JSON; its tensors and arrays go into ``tensors``, by where they stand below ``path``.

    Raises SetupError with the path of a value that cannot be stored.
    """
    try:
        return _encode(value, path, tensors, others)
    except RecursionError:
        raise SetupError(f"{path}: is nested too deeply for a checkpoint, or contains itself") from None


def decode(document: Any, tensors: Callable[[str], Tensor], makers: Makers | None = None) -> Any:
    """The value that was encoded as ``document``; ``tensors`` gives a tensor by name. Raises FieldError."""
    try:
        return _decode(document, tensors, makers or {})
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
        raise FieldError(f"its encoding holds what none writes ({type(error).__name__}: {error})") from error


def raw_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous host tensor as uint8, flat, shared."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _encode(value: Any, path: str, tensors: dict[str, Tensor], others: Others | None) -> Any:
    """Exact types only: a subclass would come back as its base."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < _MAX_JSON_INT else {TAG: "int", "hex": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    if kind in (list, tuple):
        items = [_encode(item, f"{path}[{i}]", tensors, others) for i, item in enumerate(value)]
        return items if kind is list else {TAG: "tuple", "items": items}
    if kind in _MAPPINGS:
        found = [(key, _encode(item, f"{path}[{key!r}]", tensors, others)) for key, item in value.items()]
        if kind is dict and all(type(key) is str and key != TAG for key in value):
            return dict(found)
        pairs, no_tensors = [], dict[str, Tensor]()
        for key, item in found:
            pairs.append([_encode(key, f"{path} key {key!r}", no_tensors, others), item])
            if no_tensors:
                raise SetupError(
                    f"{path}: cannot store a key of type {_name(key)} in a checkpoint; use str, int or tuples of them"
                )
        return {TAG: _MAPPINGS[kind], "items": pairs}
    if others is not None and (parts := others(value)) is not None:
        return {TAG: parts[0], "items": _encode(parts[1], path, tensors, others)}
    return _encode_array(value, path, tensors)


def _encode_array(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if kind is bytes:
        tensors[path] = torch.from_numpy(np.frombuffer(value, np.uint8).copy())
        return {TAG: "bytes", "tensor": path}
    if isinstance(value, np.generic) and value.dtype.kind not in "OV":
        return {TAG: "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if kind is np.ndarray and value.dtype.kind not in "OV":
        tensors[path] = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return {TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "tensor": path}
    if kind not in (Tensor, torch.nn.Parameter) or value.layout is not torch.strided or value.is_meta:
        raise SetupError(f"{path}: cannot store a value of type {_name(value)} in a checkpoint; use {_STORABLE}")
    if value.is_quantized:
        raise SetupError(f"{path}: cannot store a quantized tensor in a checkpoint; store its int_repr() and scales")
    copy = torch.empty(value.shape, dtype=value.dtype).copy_(value.detach())
    if copy.dtype in DTYPES:
        tensors[path] = copy
        return {TAG: "tensor", "tensor": path}
    tensors[path] = raw_bytes(copy).clone()  # a dtype that safetensors lacks
    name = str(value.dtype).removeprefix("torch.")
    return {TAG: "tensor", "tensor": path, "dtype": name, "shape": list(value.shape)}


def _name(value: Any) -> str:
    kind = type(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return f"numpy {value.dtype} array"
    if isinstance(value, Tensor) and kind is Tensor:
        return f"{value.layout} tensor on {value.device}"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _decode(value: Any, tensors: Callable[[str], Tensor], makers: Makers) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, makers) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors, makers) for key, item in value.items()}
    kind = value[TAG]
    if kind in _KINDS:
        items = [(_decode(key, tensors, makers), _decode(item, tensors, makers)) for key, item in value["items"]]
        return _KINDS[kind](dict(items))
    if kind == "tuple":
        return tuple(_decode(value["items"], tensors, makers))
    if kind in makers:
        return makers[kind](_decode(value["items"], tensors, makers))
    match kind:
        case "int":
            return int(value["hex"], 16)
        case "float":
            return float(value["value"])
        case "numpy":
            return np.frombuffer(bytes.fromhex(value["hex"]), _numpy_dtype(value))[0]
        case "bytes":
            return tensors(value["tensor"]).numpy().tobytes()
        case "array":
            content = tensors(value["tensor"]).numpy().tobytes()
            return np.frombuffer(content, _numpy_dtype(value)).reshape(value["shape"]).copy()
        case "tensor" if "dtype" not in value:
            return tensors(value["tensor"])
        case "tensor":
            if not isinstance(dtype := getattr(torch, value["dtype"]), torch.dtype):
                raise ValueError(f"dtype {value['dtype']!r}")
            return tensors(value["tensor"]).view(dtype).reshape(value["shape"])
    raise ValueError(f"kind {kind!r}")


def _numpy_dtype(value: dict[str, Any]) -> np.dtype[Any]:
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind in "OV":
        raise ValueError(f"numpy dtype {value['dtype']!r}")
    return dtype
