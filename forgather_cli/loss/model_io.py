"""What of a batch a model gets, and what it returns.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from torch import Tensor, nn

from forgather_cli.errors import ModelError
from forgather_cli.labels import LENGTHS, TASKS
from forgather_cli.targets import accepts


def model_kwargs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch goes to the model: everything but the labels and what they belong to."""
    return {key: value for key, value in batch.items() if key not in ("labels", TASKS, LENGTHS)}


def model_logits(model: nn.Module, inputs: dict[str, Tensor], *, last_only: bool = False, cache: Any = None) -> Tensor:
    """Logits (B, T, V), or (B, 1, V) of the last position, of any model: a tensor, a tuple's first, or ``.logits``.

    ``last_only`` and ``cache`` are passed to a model whose forward names them; another one computes everything, and
    leaves the cache empty. In generation a model without ``attention_mask`` sees the padding of shorter prompts. Raises
    ModelError for any other output.
    """
    if not last_only and cache is None:
        return _logits_of(model(**inputs), model)
    logits = _logits_of(model(**inputs_of_generation(model, inputs, last_only=last_only, cache=cache)), model)
    return logits[:, -1:] if last_only else logits


def inputs_of_generation(model: nn.Module, inputs: dict[str, Tensor], **extra: Any) -> dict[str, Any]:
    """``inputs``, and of ``extra`` what the forward of ``model`` names; no ``attention_mask`` where it takes none."""
    names, masks = _forward_of(getattr(model.forward, "__func__", model.forward))
    known = {key: value for key, value in inputs.items() if key != "attention_mask" or masks}
    if any(base.__module__.startswith("transformers.") for base in type(model).__mro__):
        names = names - {"cache"}  # that library's own kind (5.24)
    return known | {key: value for key, value in extra.items() if key in names}


@lru_cache(maxsize=64)
def _forward_of(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of the parameters, and whether it takes an attention_mask. Remembered: generation asks for each token."""
    return frozenset(inspect.signature(function).parameters), accepts(function, "attention_mask")


def _logits_of(output: Any, model: nn.Module) -> Tensor:
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.dim() != 3:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
        raise ModelError(
            f"{type(model).__name__}: forward must return logits (sequences, tokens, vocabulary), a tuple that starts "
            f"with them, or an object with .logits, got {got}"
        )
    return found
