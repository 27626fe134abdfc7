"""State of components as JSON and named tensors, and back: exact, and without a pickle.

What JSON has stands as it is. Everything else is an object with the one key ``$``: ``{"$": kind, ...}``.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from forgather_cli.checkpoint.tensors import DTYPES, host_copy, raw_bytes
from forgather_cli.errors import CheckpointError, SetupError

TAG = "$"
_MAX_JSON_INT = 2**63
"""Larger ones are stored in hex: other JSON readers round them, and Python limits decimal digits (4300)."""
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_STORABLE = "dict, list, tuple, str, int, float, bool, None, bytes, tensors or numpy arrays"


@dataclass
class Encoded:
    """The JSON documents of some components by key, and the tensors they refer to by name."""

    documents: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def add(self, key: str, state: Any) -> None:
        """Encode ``state`` under ``key``; tensors and arrays are copied to host memory.

        Raises SetupError with the path of a value that cannot be stored.
        """
        try:
            self.documents[key] = _encode(state, f"{key}.state", self.tensors)
        except RecursionError:
            raise SetupError(f"{key}.state: is nested too deeply for a checkpoint, or contains itself") from None


def decode(document: Any, tensors: Callable[[str], Tensor]) -> Any:
    """The state that was encoded as ``document``; ``tensors`` gives a tensor by name. Raises CheckpointError."""
    try:
        return _decode(document, tensors)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"a component's state is damaged ({type(error).__name__}: {error})") from error


# ---------------------------------------------------------------------------------------------------------- encode


def _encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Exact types only: a subclass would come back as its base."""
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) < _MAX_JSON_INT else {TAG: "int", "hex": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {TAG: "float", "value": str(value)}
    if kind is list:
        return [_encode(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]
    if kind is tuple:
        return {TAG: "tuple", "items": [_encode(item, f"{path}[{i}]", tensors) for i, item in enumerate(value)]}
    if kind in _MAPPINGS:
        return _encode_mapping(value, path, tensors)
    return _encode_array(value, path, tensors)


def _encode_mapping(value: dict[Any, Any], path: str, tensors: dict[str, Tensor]) -> Any:
    items = [(key, _encode(item, f"{path}[{key!r}]", tensors)) for key, item in value.items()]
    if type(value) is dict and all(type(key) is str and key != TAG for key, _ in items):
        return dict(items)
    encoded = [[_encode_key(key, path), item] for key, item in items]
    return {TAG: _MAPPINGS[type(value)], "items": encoded}


def _encode_key(key: Any, path: str) -> Any:
    no_tensors: dict[str, Tensor] = {}
    encoded = _encode(key, f"{path} key {key!r}", no_tensors)
    if no_tensors:
        raise SetupError(
            f"{path}: cannot store a key of type {_name(key)} in a checkpoint; use str, int or tuples of them"
        )
    return encoded


def _encode_array(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, bytes) and type(value) is bytes:
        tensors[path] = torch.from_numpy(np.frombuffer(value, np.uint8).copy())
        return {TAG: "bytes", "tensor": path}
    if isinstance(value, np.generic) and value.dtype.kind not in "OV":
        return {TAG: "numpy", "dtype": value.dtype.str, "hex": value.tobytes().hex()}
    if type(value) is np.ndarray and value.dtype.kind not in "OV":
        tensors[path] = torch.from_numpy(np.frombuffer(value.tobytes(), np.uint8).copy())
        return {TAG: "array", "dtype": value.dtype.str, "shape": list(value.shape), "tensor": path}
    if type(value) in (Tensor, torch.nn.Parameter) and value.layout is torch.strided and not value.is_meta:
        return _encode_tensor(value, path, tensors)
    raise SetupError(f"{path}: cannot store a value of type {_name(value)} in a checkpoint; use {_STORABLE}")


def _encode_tensor(value: Tensor, path: str, tensors: dict[str, Tensor]) -> Any:
    """A dtype that safetensors lacks is stored as bytes."""
    if value.is_quantized:
        raise SetupError(f"{path}: cannot store a quantized tensor in a checkpoint; store its int_repr() and scales")
    copy = host_copy(value)
    if copy.dtype in DTYPES:
        tensors[path] = copy
        return {TAG: "tensor", "tensor": path}
    tensors[path] = raw_bytes(copy).clone()
    name = str(value.dtype).removeprefix("torch.")
    return {TAG: "tensor", "tensor": path, "dtype": name, "shape": list(value.shape)}


def _name(value: Any) -> str:
    kind = type(value)
    if kind is np.ndarray or isinstance(value, np.generic):
        return f"numpy {value.dtype} array"
    if isinstance(value, Tensor) and kind is Tensor:
        return f"{value.layout} tensor on {value.device}"
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------------------------------------------------- decode


def _decode(value: Any, tensors: Callable[[str], Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors) for key, item in value.items()}
    return _DECODERS[value[TAG]](value, tensors)


def _mapping(kind: Callable[[Any], Any]) -> Callable[[dict[str, Any], Callable[[str], Tensor]], Any]:
    def decode_mapping(value: dict[str, Any], tensors: Callable[[str], Tensor]) -> Any:
        return kind({_decode(key, tensors): _decode(item, tensors) for key, item in value["items"]})

    return decode_mapping


def _array(value: dict[str, Any], tensors: Callable[[str], Tensor]) -> Any:
    content = tensors(value["tensor"]).numpy().tobytes()
    return np.frombuffer(content, _numpy_dtype(value)).reshape(value["shape"]).copy()


def _numpy_dtype(value: dict[str, Any]) -> np.dtype[Any]:
    dtype = np.dtype(str(value["dtype"]))
    if dtype.kind in "OV":
        raise ValueError(f"numpy dtype {value['dtype']!r}")
    return dtype


def _tensor(value: dict[str, Any], tensors: Callable[[str], Tensor]) -> Tensor:
    tensor = tensors(value["tensor"])
    if "dtype" not in value:
        return tensor
    dtype = getattr(torch, value["dtype"])
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {value['dtype']!r}")
    return tensor.view(dtype).reshape(value["shape"])


_DECODERS: dict[str, Callable[[dict[str, Any], Callable[[str], Tensor]], Any]] = {
    "int": lambda value, _: int(value["hex"], 16),
    "float": lambda value, _: float(value["value"]),
    "tuple": lambda value, tensors: tuple(_decode(item, tensors) for item in value["items"]),
    "bytes": lambda value, tensors: tensors(value["tensor"]).numpy().tobytes(),
    "numpy": lambda value, _: np.frombuffer(bytes.fromhex(value["hex"]), _numpy_dtype(value))[0],
    "array": _array,
    "tensor": _tensor,
    **{name: _mapping(kind) for kind, name in _MAPPINGS.items()},
}
