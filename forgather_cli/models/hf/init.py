"""First values of parameters and buffers, as a model class of transformers draws them, tensor by tensor.

``_init_weights(module)`` of a class writes the tensors of one module, and sometimes those of modules below it (GPT-2's
projections into the residual stream). It is asked for one tensor at a time, on a copy of the model on meta in which
that tensor alone has memory: so values are a function of (seed, name), whatever this process holds of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.errors import ModelError
from forgather_cli.models.init import stable_seed

_Writers = dict[str, list[tuple[Any, nn.Module]]]


class InitialValues:
    """The values of a model's tensors by name. ``twin`` is the model on meta, which is used up."""

    def __init__(self, twin: Any) -> None:
        self._twin = twin
        self._names = {id(t): name for name, t in (*twin.named_parameters(), *twin.named_buffers())}
        self._writers = _writers(twin, self._names)

    @torch.no_grad()
    def of(self, name: str, seed: int) -> Tensor:
        """The full tensor on the CPU, floating ones in fp32. Raises ModelError if the class does not initialise it."""
        path, _, key = name.rpartition(".")
        owner = self._twin.get_submodule(path)
        slots = owner._parameters if key in owner._parameters else owner._buffers
        meta = slots[key]
        dtype = torch.float32 if meta.is_floating_point() else meta.dtype
        value: Tensor = torch.empty(meta.shape, dtype=dtype)
        writers = self._writers.get(self._names[id(meta)], [])  # a tied tensor has several names
        if not writers:
            raise ModelError(
                f"model=transformers: {type(self._twin).__name__} does not say how {name} begins (_init_weights leaves "
                "it out); start from weights, model.path=DIR"
            )
        slots[key] = nn.Parameter(value, requires_grad=False) if isinstance(meta, nn.Parameter) else value
        try:
            with torch.random.fork_rng(devices=[]), torch.device("cpu"):
                torch.manual_seed(stable_seed(seed, name))
                for model, module in writers:
                    model._init_weights(module)
            drawn: Tensor = slots[key].detach()
        finally:
            slots[key] = meta
        return drawn


@torch.no_grad()
def _writers(twin: Any, names: dict[int, str]) -> _Writers:
    """Tensor name -> the calls that write it, in the order in which transformers makes them."""
    found: _Writers = {}
    with torch.device("cpu"):  # where values of buffers are computed; tensors on meta take any
        for model, module in _calls(twin, twin):
            below = [*module.parameters(), *module.buffers()]
            before = [tensor._version for tensor in below]
            model._init_weights(module)
            for tensor, version in zip(below, before, strict=True):
                if tensor._version != version:
                    found.setdefault(names[id(tensor)], []).append((model, module))
    return found


def _calls(module: nn.Module, model: Any) -> Iterator[tuple[Any, nn.Module]]:
    """(model, module) for each ``model._init_weights(module)``: children first, a model inside of another by itself."""
    for child in module.children():
        yield from _calls(child, child if callable(getattr(child, "_init_weights", None)) else model)
    yield model, module
