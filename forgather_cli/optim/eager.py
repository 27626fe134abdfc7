"""torch's optimizers without the import of the compiler they guard themselves against.

torch 2.13 lets dynamo trace no optimizer: ``add_param_group`` is disabled for it and ``step`` breaks its graph. Each of
the guards imports ``torch._dynamo`` to say so: 1.0 s of CPU, as much as torch itself, and if nothing is compiled too.
Source: ``_disable_dynamo`` in torch/_compile.py, ``_use_grad_for_differentiable`` in torch/optim/optimizer.py (2.13.0).

A process that has imported dynamo keeps the guards; so does a version of torch that guards itself in another way.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
from torch.optim import Optimizer

_CACHE = "__dynamo_disable"  # what _disable_dynamo made of a function, which it looks for before it imports anything
_GUARD = "_use_grad_for_differentiable.<locals>._use_grad"


def _nothing_to_spare() -> bool:
    return "torch._dynamo" in sys.modules


@contextmanager
def unguarded_construction() -> Iterator[None]:
    """Optimizers that are made inside do not import dynamo."""
    guarded = getattr(Optimizer.add_param_group, "__wrapped__", None)
    if guarded is None or _nothing_to_spare():
        yield
        return
    setattr(guarded, _CACHE, guarded)
    try:
        yield
    finally:
        delattr(guarded, _CACHE)


def unguard_step(optimizer: Optimizer) -> None:
    """Let the optimizer's ``step`` not import dynamo; its hooks and its profiler range stay."""
    guard = getattr(type(optimizer).step, "__wrapped__", None)  # inside torch's profile_hook_step
    code = getattr(guard, "__code__", None)  # a user's step may be wrapped in any callable
    if code is None or code.co_qualname != _GUARD or optimizer.defaults["differentiable"]:
        return
    if not _nothing_to_spare():
        assert guard is not None
        step = Optimizer.profile_hook_step(torch.no_grad()(guard.__wrapped__))
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]
