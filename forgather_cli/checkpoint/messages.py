"""What ranks send each other, as bytes: JSON and tensors. Unlike a pickle it runs nothing when it is read.

Values come back as they were: tuples, sets, mappings with any keys, paths, errors of ours, dataclasses that are
``sent``, and what a checkpoint can store.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path, PosixPath
from typing import TYPE_CHECKING, Any, TypeVar

from forgather_cli.errors import ForgatherError

if TYPE_CHECKING:
    from torch import Tensor

_T = TypeVar("_T", bound=type)
_TAG = "@"
_PLAIN = (str, int, float, bool, type(None))
_SENT: dict[str, Any] = {}


def sent(cls: _T) -> _T:
    """Class decorator: ranks may send each other this dataclass."""
    _SENT[cls.__name__] = cls
    return cls


def pack(value: Any) -> Tensor:
    """(N,) uint8. Raises SetupError for a value of a type that cannot be sent."""
    import torch

    from forgather_cli.checkpoint.tensors import raw_bytes

    tensors: dict[str, Tensor] = {}
    document = _document(value, tensors)
    layout = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    head = json.dumps([document, layout]).encode()
    start = torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)
    return torch.cat([start, *map(raw_bytes, tensors.values())])


def unpack(content: Tensor) -> Any:
    """The value that was packed."""
    import torch

    place = 8 + int.from_bytes(content[:8].numpy().tobytes(), "little")
    document, layout = json.loads(content[8:place].numpy().tobytes())
    tensors = {}
    for name, dtype, shape in layout:
        kind = getattr(torch, dtype)
        end = place + torch.Size(shape).numel() * kind.itemsize
        tensors[name] = content[place:end].clone().view(kind).reshape(shape)  # the copy is aligned
        place = end
    return _value(document, tensors.__getitem__)


def _document(value: Any, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [_document(item, tensors) for item in value]
    if kind is dict and all(type(key) is str for key in value) and _TAG not in value:
        return {key: _document(item, tensors) for key, item in value.items()}
    if kind in (tuple, set):
        return {_TAG: kind.__name__, "items": [_document(item, tensors) for item in value]}
    if kind is dict:
        return {_TAG: "dict", "items": [[_document(part, tensors) for part in item] for item in value.items()]}
    if kind is PosixPath:
        return {_TAG: "path", "items": str(value)}
    if isinstance(value, OSError):
        return {_TAG: "os_error", "items": [value.errno, value.strerror, value.filename and str(value.filename)]}
    if isinstance(value, ForgatherError):
        state = _document(vars(value), tensors)
        return {_TAG: "error", "name": kind.__name__, "items": _document(list(value.args), tensors), "state": state}
    if _SENT.get(kind.__name__) is kind:
        items = [_document(getattr(value, each.name), tensors) for each in fields(kind)]
        return {_TAG: "sent", "name": kind.__name__, "items": items}
    from forgather_cli.checkpoint.encoding import Encoded

    key, encoded = f"message {len(tensors)}", Encoded()
    encoded.add(key, value)
    tensors.update(encoded.tensors)
    return {_TAG: "state", "items": encoded.documents[key]}


def _value(document: Any, tensors: Callable[[str], Tensor]) -> Any:
    if type(document) is list:
        return [_value(item, tensors) for item in document]
    if type(document) is not dict:
        return document
    if _TAG not in document:
        return {key: _value(item, tensors) for key, item in document.items()}
    kind, items = document[_TAG], document["items"]
    if kind == "state":
        from forgather_cli.checkpoint.encoding import decode

        return decode(items, tensors)
    items = _value(items, tensors)
    if kind == "error":
        error = _error_class(document["name"])(*items)
        vars(error).update(_value(document["state"], tensors))
        return error
    if kind == "sent":
        cls = _SENT[document["name"]]
        return cls(**{each.name: item for each, item in zip(fields(cls), items, strict=True)})
    makers: dict[str, Callable[[Any], Any]] = {"tuple": tuple, "set": set, "dict": dict, "path": Path}
    return OSError(*items) if kind == "os_error" else makers[kind](items)


def _error_class(name: str) -> type[ForgatherError]:
    """By its name, which is not looked up anywhere else."""
    known = [ForgatherError]
    for each in known:
        known += each.__subclasses__()
    return next(each for each in known if each.__name__ == name)
