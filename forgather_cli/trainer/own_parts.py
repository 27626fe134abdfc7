"""Errors in parts of the user's own, named by a recipe (``_target_``) or handed to a Trainer: which part, and what was
wrong.

All of it is looked at where something has failed: a step that succeeds pays nothing.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from torch import Tensor, nn

from forgather_cli.config.schema import Target
from forgather_cli.errors import DataError, ForgatherError, PartError
from forgather_cli.strategies.base import Batch
from forgather_cli.targets import raised
from forgather_cli.trainer.run import TrainingRun

_CALLERS = {
    "data.": "data", "loss.losses": "loss", "loss.": "model", "models.": "model", "optim.schedules": "lr_scheduler",
    "optim.": "optimizer", "strategies.": "model", "trainer.trainer": "trainer",
}  # fmt: skip
"""The module of ours that was left last on the way to an error -> the part that it calls; the first that matches."""
_IN_SCRIPTS = {"data": "train_dataset", "loss": "loss_fn"}
"""Arguments of a Trainer that are not named as a recipe's settings."""
_NO_SCALAR = "grad can be implicitly created only for scalar outputs"
_NO_GRADIENT = "does not require grad and does not have a grad_fn"


def explain_part(error: Exception, run: TrainingRun, when: str, batches: Sequence[Batch] = ()) -> None:
    """Raise PartError for an error that comes from a part of the user's own; returns for any other. ``batches``: those
    that were being computed."""
    root = _unwrapped(error)
    if isinstance(root, DataError):
        named, _, problem = str(root).partition(": ")
        if not run.is_script and named in ("train_dataset", "eval_dataset") and _own(run, "data"):
            raise _completed(PartError("data", "", problem), run, when) from root
    if isinstance(root, PartError):
        if _own(run, root.part) is None and root.part in ("data", "model"):
            root.part = "model" if root.part == "data" else "data"
        raise _completed(root, run, when) from root.__cause__
    if isinstance(root, ForgatherError):
        if root is not error:
            raise root
        return
    part, problem = _told(root, list(_frames(root)), run, batches)
    if part is not None and _own(run, part) is not None:
        raise _completed(PartError(part, "", problem), run, when) from root


def _completed(error: PartError, run: TrainingRun, when: str) -> PartError:
    """With what only the Trainer knows."""
    is_script = run.is_script
    if not (is_script and error.name):
        error.name = _own(run, error.part) or error.name
    error.part = _IN_SCRIPTS.get(error.part, error.part) if is_script else error.part
    error.when, error.has_trained = error.when or when, run.state.global_step > run.state.resumed_step
    return error


def _unwrapped(error: BaseException) -> BaseException:
    """The error of a stage, without what torch's pipeline schedules put around it (torch 2.13, pipelining/stage.py)."""
    frames = list(_frames(error))
    if frames and ".pipelining." in frames[-1].f_globals.get("__name__", "") and error.__cause__ is not None:
        return _unwrapped(error.__cause__)
    return error


def _frames(error: BaseException) -> Iterator[FrameType]:
    return (frame for frame, _ in traceback.walk_tb(error.__traceback__))


def _told(
    error: BaseException, frames: list[FrameType], run: TrainingRun, batches: Sequence[Batch]
) -> tuple[str | None, str]:
    """(the part, what was wrong)."""
    modules = [frame.f_globals.get("__name__", "") for frame in frames]
    ours = [n for n, module in enumerate(modules) if module.startswith("forgather_cli.")]
    last = modules[ours[-1]].removeprefix("forgather_cli.") if ours else ""
    caller = frames[ours[-1]].f_code.co_qualname if ours else ""
    part = next((part for module, part in _CALLERS.items() if last.startswith(module)), None)
    if caller == "CrossEntropy.total":
        part = "model"  # which it calls itself; the user's losses stand in the same module
    if last.startswith("strategies."):
        minimised = "loss" if _own(run, "loss") is not None else "model"
        if _NO_SCALAR in str(error):
            return minimised, "it returned more than one number; return the mean over the targets"
        if _NO_GRADIENT in str(error):
            what = "a loss" if minimised == "loss" else "logits"
            return (
                minimised,
                f"it returned {what} without a gradient; leave out detach(), item() and no_grad()",
            )
    if caller.startswith("ComputedLoss."):
        return None, ""  # in a compute_loss, whose own traceback it has
    embedding = next((f for f in reversed(frames) if isinstance(f.f_locals.get("self"), nn.Embedding)), None)
    if embedding is not None:
        return _at_embedding(error, embedding.f_locals, run, batches)
    if part == "loss" and ours[-1] == len(frames) - 1:  # at what the loss returned
        return part, f"it returned no tensor of one number ({raised(error)})"
    return part, raised(error)


def _at_embedding(
    error: BaseException, local: dict[str, Any], run: TrainingRun, batches: Sequence[Batch]
) -> tuple[str, str]:
    """Of an error at an embedding: token ids that it has no row for, or what else the model asks it for."""
    rows, given = local["self"].num_embeddings, local.get("input")
    if not isinstance(given, Tensor) or not given.numel():
        return "model", raised(error)
    if not any(_has_row(batch["input_ids"], given) for batch in batches if "input_ids" in batch):  # positions, say
        got = given.dtype if given.is_floating_point() else int(given.min() if given.min() < 0 else given.max())
        return "model", f"{raised(error)}: an embedding of {rows} rows was given {got}"
    if given.is_floating_point():
        return "data", f"token ids are {str(given.dtype).removeprefix('torch.')}; give whole numbers (torch.int64)"
    least, most = int(given.min()), int(given.max())
    if least < 0:
        return "data", f"a token id is {least}; give ids from 0"
    part = "model" if _own(run, "data") is None else "data"
    return part, f"a token id is {most}, and the model's embedding has {rows} rows, from 0; make them fit each other"


def _has_row(ids: Tensor, given: Tensor) -> bool:
    """Whether what an embedding was given begins with a row of token ids (B, T)."""
    return given.dim() == ids.dim() == 2 and given.shape[1] == ids.shape[1] and bool((ids == given[0]).all(1).any())


def _own(run: TrainingRun, part: str) -> str | None:
    """The name of a part that is the user's own: the path of a recipe's ``_target_``, or the class that a script gave;
    None for one of ours."""
    if not run.is_script:
        option = getattr(run.config, part, None)
        return option.path if isinstance(option, Target) else None
    if part == "loss":
        return "the loss"
    several: dict[str, Any] = {
        "model": run.strategy.parts,
        "data": [getattr(run.train_loader, "dataset", None)],
        "optimizer": getattr(run.optimizer, "optimizers", ()),
        "lr_scheduler": getattr(run.lr_scheduler, "schedulers", ()),
    }
    given = type(next(iter(several.get(part, ())), None))
    return None if given is type(None) or given.__module__.startswith("forgather_cli.") else given.__qualname__
