"""The modules whose parameters a rank trains (``Strategy.parts``): their tensors by name, and evaluation mode."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from forgather_cli.errors import ModelError


@contextmanager
def evaluation_mode(parts: list[nn.Module]) -> Iterator[None]:
    """All modules in eval mode inside, each back to what it was after: a part that was frozen by hand stays so."""
    modes = [(module, module.training) for part in parts for module in part.modules()]
    for part in parts:
        part.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def named_tensors(parts: list[nn.Module]) -> dict[str, torch.Tensor]:
    """Every parameter and persistent buffer by its full-model name, merged over ``parts``, tied ones once.

    Names are those of ``state_dict``: wrappers (activation checkpointing) prefix ``named_parameters`` but not these.
    """
    found: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for part in parts:
        for name, tensor in part.state_dict(keep_vars=True).items():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                found[name] = tensor
    return found


def num_elements(parameter: torch.Tensor) -> int:
    """The numbers that a parameter stands for: more than it has elements where these are packed ones."""
    return int(getattr(parameter, "num_packed", parameter.numel()))


def trainable_parameters(parts: list[nn.Module]) -> list[tuple[str, nn.Parameter]]:
    return [(n, t) for n, t in named_tensors(parts).items() if isinstance(t, nn.Parameter) and t.requires_grad]


def train_only(model: nn.Module, patterns: list[str]) -> None:
    """Freeze all parameters but those in whose full names (tied ones have several) a regular expression finds
    something. Raises ModelError for one that finds nothing.
    """
    named = list(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        if not any(re.search(pattern, name) for name, _ in named):
            raise ModelError(
                f"trainable: no parameter of {type(getattr(model, 'theirs', model)).__name__} has a name like "
                f"{pattern!r}; one is {named[0][0]}"
            )
    trained = {id(p) for name, p in named if any(re.search(pattern, name) for pattern in patterns)}
    for _, parameter in named:
        parameter.requires_grad_(id(parameter) in trained)
