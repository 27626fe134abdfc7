"""Initial parameters as a function of (seed, name), and memory for models built on meta.

Each parameter has a generator of its own, so its values depend neither on the order of construction nor on which other
parameters this process holds.
"""

from __future__ import annotations

import hashlib
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Generator, Tensor, nn

from forgather_cli.errors import ModelError
from forgather_cli.shards import fill_local, is_sharded


@runtime_checkable
class Fills(Protocol):
    """A module that says how each parameter of its own (not of its children) starts."""

    def fill(self, name: str, tensor: Tensor, generator: Generator | None = None) -> None:
        """Write the initial value of the parameter ``name`` into ``tensor``."""


def stable_seed(seed: int, name: str) -> int:
    """A 63-bit seed from (seed, name), the same in every process and version."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def init_parameters(module: nn.Module, seed: int, *, device_generator: bool = False, prefix: str = "") -> None:
    """Fill every parameter of ``module``, which must have memory, from (seed, prefix + name).

    Values are drawn on the CPU in fp32 and copied, of a sharded parameter this rank's rows: in full, one at a time, so
    that they are those of one device. With ``device_generator`` they are drawn where the parameter lives: other
    numbers. Modules with ``fill`` are asked per parameter; others with ``reset_parameters`` draw all
    their parameters in one go, seeded by the module's name. Raises ModelError naming a module that has neither.
    """
    done: set[int] = set()
    for path, child in module.named_modules():
        own = {name: p for name, p in child.named_parameters(recurse=False) if id(p) not in done}
        if not own:
            continue
        done.update(map(id, own.values()))
        name = prefix + path
        if isinstance(child, Fills):
            for key, parameter in own.items():
                device = parameter.device if device_generator else torch.device("cpu")
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device=device)
                own_seed = stable_seed(seed, f"{name}.{key}".lstrip("."))
                child.fill(key, drawn, torch.Generator(device).manual_seed(own_seed))
                fill_local(parameter, drawn)
        elif callable(getattr(child, "reset_parameters", None)):
            _reset(child, stable_seed(seed, name), device_generator)
        else:
            raise ModelError(
                f"model: cannot initialise {name or type(module).__name__}.{next(iter(own))}: {type(child).__name__} "
                f"has no reset_parameters(), which would say how; add it"
            )


def _reset(module: nn.Module, seed: int, on_device: bool) -> None:
    """Let ``reset_parameters`` draw, into full fp32 copies on the CPU or the device, with torch's own generators."""
    real: dict[str, Any] = dict(module._parameters)
    used = {p.device for p in real.values() if p is not None and p.is_cuda} if on_device else set()
    # what is sharded or rounded is drawn whole in fp32, so that all layouts get the same numbers
    drawn_whole = [p for p in real.values() if p is not None and (is_sharded(p) or p.dtype != torch.float32)]
    in_place = on_device and not drawn_whole
    try:
        if not in_place:
            for key, p in real.items():
                if p is not None:
                    device = p.device if on_device else torch.device("cpu")
                    module._parameters[key] = nn.Parameter(torch.empty(p.shape, dtype=torch.float32, device=device))
        with torch.random.fork_rng(devices=[d.index for d in used]):
            torch.manual_seed(seed)
            module.reset_parameters()  # type: ignore[operator]
        drawn: dict[str, Any] = dict(module._parameters)
    finally:
        module._parameters.update(real)
    if not in_place:
        for key, p in real.items():
            if p is not None:
                fill_local(p, drawn[key])


def allocate(module: nn.Module, device: torch.device | str) -> bool:
    """Give a module built on meta memory on ``device``; False, and nothing done, if no parameter is on meta.

    Ties survive, buffers that are on meta too are computed anew by ``reset_buffers()`` of the module that has them;
    ModelError names one that lacks it. Parameters are left uninitialised.
    """
    if not any(p.is_meta for p in module.parameters()):
        return False
    has_buffers_on_meta = any(b.is_meta for b in module.buffers())
    names_of: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), []).append(name)

    def empty(tensor: Tensor) -> Tensor:
        # empty_like of a tensor on meta imports sympy, half a second (torch 2.13, _refs)
        if type(tensor) in (Tensor, nn.Parameter) and tensor.is_contiguous():
            return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        return torch.empty_like(tensor, device=device)

    module._apply(lambda tensor: empty(tensor) if tensor.is_meta else tensor)  # type: ignore[no-untyped-call]
    for first, *others in names_of.values():
        for other in others:
            path, _, key = other.rpartition(".")
            setattr(module.get_submodule(path), key, module.get_parameter(first))
    if has_buffers_on_meta:
        reset_buffers(module)
    return True


def reset_buffers(module: nn.Module) -> None:
    """Compute buffers anew after they got fresh memory.

    A model's ``reset_all_buffers()`` does it for all its modules, else each module's ``reset_buffers()`` where it
    exists; persistent buffers are else left to ``reset_parameters``. Raises ModelError naming a buffer that nobody
    fills.
    """
    if callable(everything := getattr(module, "reset_all_buffers", None)):
        everything()
        return
    for path, child in module.named_modules():
        buffers = [name for name, b in child._buffers.items() if b is not None]
        if callable(getattr(child, "reset_buffers", None)):
            child.reset_buffers()
            continue
        resets = callable(getattr(child, "reset_parameters", None))
        orphans = [name for name in buffers if not resets or name in child._non_persistent_buffers_set]
        if orphans:
            raise ModelError(
                f"model: {type(child).__name__} has no reset_buffers() that computes {path or 'its'}.{orphans[0]} "
                f"after construction on meta; add it, or set construct_model_on=cpu (in a script default)"
            )
