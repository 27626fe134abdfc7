"""What ranks send each other, as bytes: JSON and tensors. Unlike a pickle it runs nothing when it is read.

Values come back as they were: what a checkpoint can store, sets, paths, errors of ours, and dataclasses that are
``sent``.
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
_SENT: dict[str, Any] = {}


def sent(cls: _T) -> _T:
    """Class decorator: ranks may send each other this dataclass."""
    _SENT[cls.__name__] = cls
    return cls


def pack(value: Any) -> Tensor:
    """(N,) uint8. Raises SetupError for a value of a type that cannot be sent."""
    import torch

    from forgather_cli.documents.encoding import encode, raw_bytes

    tensors: dict[str, Tensor] = {}
    document = encode(value, "message", tensors, _parts)
    layout = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()]
    head = json.dumps([document, layout]).encode()
    start = torch.frombuffer(bytearray(len(head).to_bytes(8, "little") + head), dtype=torch.uint8)
    return torch.cat([start, *map(raw_bytes, tensors.values())])


def unpack(content: Tensor) -> Any:
    """The value that was packed."""
    import torch

    from forgather_cli.documents.encoding import decode

    place = 8 + int.from_bytes(content[:8].numpy().tobytes(), "little")
    document, layout = json.loads(content[8:place].numpy().tobytes())
    tensors = {}
    for name, dtype, shape in layout:
        kind = getattr(torch, dtype)
        end = place + torch.Size(shape).numel() * kind.itemsize
        tensors[name] = content[place:end].clone().view(kind).reshape(shape)  # the copy is aligned
        place = end
    return decode(document, tensors.__getitem__, _MAKERS)


def _parts(value: Any) -> tuple[str, list[Any]] | None:
    kind = type(value)
    if kind is set:
        return "set", list(value)
    if kind is PosixPath:
        return "path", [str(value)]
    if isinstance(value, OSError):
        return "os_error", [value.errno, value.strerror, value.filename and str(value.filename)]
    if isinstance(value, ForgatherError):
        return "error", [kind.__name__, list(value.args), vars(value)]
    if _SENT.get(kind.__name__) is kind:
        return "sent", [kind.__name__, *(getattr(value, each.name) for each in fields(kind))]
    return None


def _error(parts: list[Any]) -> ForgatherError:
    """Its class is looked for by name among our errors, and nowhere else."""
    name, args, state = parts
    known = [ForgatherError]
    for each in known:
        known += each.__subclasses__()
    error = next(each for each in known if each.__name__ == name)(*args)
    vars(error).update(state)
    return error


_MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "set": set,
    "path": lambda parts: Path(*parts),
    "os_error": lambda parts: OSError(*parts),
    "error": _error,
    "sent": lambda parts: _SENT[parts[0]](*parts[1:]),
}
