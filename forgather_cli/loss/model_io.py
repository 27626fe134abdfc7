"""What of a batch a model gets, and what it returns.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.errors import PartError
from forgather_cli.labels import FOR_LOSS, IGNORED, LENGTHS, SOURCES, TASKS, UNITS
from forgather_cli.targets import accepts

MISFITS = (IndexError, RuntimeError, ValueError)
"""What torch raises where logits and labels do not fit each other."""


def model_kwargs(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """What of a batch goes to the model: everything but the labels and what they belong to."""
    inputs = dict(batch)
    for key in batch:
        if key in ("labels", TASKS, LENGTHS, SOURCES, UNITS) or key.startswith(FOR_LOSS):
            del inputs[key]
    return inputs


def model_logits(model: nn.Module, inputs: dict[str, Tensor], *, last_only: bool = False, cache: Any = None) -> Tensor:
    """Logits (B, T, V), or (B, 1, V) of the last position, of any model: a tensor, a tuple's first, or ``.logits``.

    ``last_only`` and ``cache`` are passed to a model whose forward names them; another one computes everything, and
    leaves the cache empty. In generation a model without ``attention_mask`` sees the padding of shorter prompts. Raises
    PartError for any other output.
    """
    if not last_only and cache is None:
        return logits_of(model(**inputs), model)
    logits = logits_of(model(**inputs_of_generation(model, inputs, last_only=last_only, cache=cache)), model)
    return logits[:, -1:] if last_only else logits


def inputs_of_generation(model: nn.Module, inputs: dict[str, Tensor], **extra: Any) -> dict[str, Any]:
    """``inputs``, and of ``extra`` what the forward of ``model`` names; no ``attention_mask`` where it takes none."""
    names, masks = _forward_of(getattr(model.forward, "__func__", model.forward))
    known = {key: value for key, value in inputs.items() if key != "attention_mask" or masks}
    if _is_of_transformers(model):
        names = names - {"cache"}  # that library's own kind (5.24)
    return known | {key: value for key, value in extra.items() if key in names}


def ignores_documents(model: nn.Module) -> bool:
    """Whether the class, of transformers, takes ``document_ids`` as one of any further names, and drops it."""
    return _is_of_transformers(model) and "document_ids" not in inspect.signature(model.forward).parameters


def _is_of_transformers(model: nn.Module) -> bool:
    return any(base.__module__.startswith("transformers.") for base in type(model).__mro__)


@lru_cache(maxsize=64)
def _forward_of(function: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of the parameters, and whether it takes an attention_mask. Remembered: generation asks for each token."""
    return frozenset(inspect.signature(function).parameters), accepts(function, "attention_mask")


def logits_of(output: Any, model: nn.Module) -> Tensor:
    """The logits (B, T, V) in what a model returned. Raises PartError."""
    found = output if isinstance(output, Tensor) else getattr(output, "logits", None)
    if found is None and isinstance(output, dict):
        found = output.get("logits")
    if found is None and isinstance(output, tuple) and output:
        found = output[0]
    if not isinstance(found, Tensor) or found.dim() != 3:
        got = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
        raise PartError(
            "model",
            type(model).__name__,
            "forward must return logits (sequences, tokens, vocabulary), a tuple that starts with them, or an object "
            f"with .logits, got {got}",
        )
    return found


def explain_misfit(
    error: Exception, model: nn.Module, output: Tensor, inputs: dict[str, Tensor], labels: Tensor, vocab: int = 0
) -> None:
    """Raise PartError for an error of a loss, if what a model returned, logits (B, T, V) or hidden states of a model
    of ``vocab`` tokens, does not fit its labels (B, T)."""
    if torch.cuda.is_available() and output.is_cuda and isinstance(error, torch.AcceleratorError):
        return  # it answers no more
    name, vocab, part = type(model).__name__, vocab or output.shape[-1], "data"
    counted = labels[labels != IGNORED]
    least, most = (int(counted.min()), int(counted.max())) if counted.numel() else (0, 0)
    if output.shape[:2] != labels.shape:
        part = "model"
        problem = (
            f"it returned {_rows(output)} where the labels have {_rows(labels)}; return a row for each token of "
            "input_ids"
        )
    elif least < 0:
        problem = f"a label is {least}; give the ids of tokens, and {IGNORED} where there is no target"
    elif most >= vocab and int(inputs["input_ids"].max()) >= vocab:  # its embedding knows more than its head
        part, problem = "model", f"it returned logits of {vocab} tokens, and the data have token {most}; return more"
    elif most >= vocab:
        problem = f"a label is {most}, and the model has {vocab} tokens, from 0; give ids of its vocabulary"
    else:
        return
    raise PartError(part, name if part == "model" else "", problem) from error


def _rows(tensor: Tensor) -> str:
    return f"{tensor.shape[0]} x {tensor.shape[1]} tokens"
