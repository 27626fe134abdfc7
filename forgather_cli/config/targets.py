"""Options and callbacks of the user's: import what ``_target_`` names and bind its arguments before anything starts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from forgather_cli.config.rules import owners
from forgather_cli.config.schema import EVENTS, Config, Target
from forgather_cli.errors import ConfigError
from forgather_cli.targets import argument_problem, import_target


@dataclass(frozen=True)
class _Call:
    """How a kind of target is called: positional arguments first, and keywords it gets where it takes them."""

    positional: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()


_CALLS = {
    "model": _Call(offered=("vocab_size", "seq_len")),
    "data": _Call(),
    "trainer": _Call(("device", "loss", "autocast")),
    "optimizer": _Call(("params",), ("lr", "weight_decay")),
    "lr_scheduler": _Call(("optimizer",)),
    "loss": _Call(offered=("num_items_in_batch",)),
    "callbacks": _Call(),
    "model_splitter": _Call(("model", "stages")),
    "loss.variant": _Call((
        "policy_chosen", "policy_rejected", "reference_chosen", "reference_rejected", "chosen_lengths",
        "rejected_lengths",
    )),
}  # fmt: skip


def target_problems(config: Config) -> list[str]:
    """What is wrong with each ``_target_``: it cannot be imported, or its arguments do not fit its signature.

    Imports the users' modules, and with them what those import.
    """
    found = list(_targets(config))
    # of an object that a script gave there is only the name, in angle brackets
    if objects := [where for where, target, _ in found if target.path.startswith("<")]:
        return [
            f"{', '.join(objects)}: made by a Python script, which a config cannot hold; run the script again, with "
            "trainer.train(resume_from_checkpoint=True) to resume"
        ]
    return [problem for where, target, call in found if (problem := _problem(where, target, call))]


def _targets(config: Config) -> Iterator[tuple[str, Target, _Call]]:
    for where, option in owners("", config):
        path = where.removesuffix(".")
        if isinstance(option, Target) and not path.startswith("trainer."):  # what stands there is called otherwise
            yield path, option, _CALLS[path.partition(".")[0]]
    if isinstance(splitter := getattr(config.trainer, "model_splitter", None), Target):
        yield "model_splitter", splitter, _CALLS["model_splitter"]
    if isinstance(variant := getattr(config.loss, "variant", None), Target):
        yield "loss.variant", variant, _CALLS["loss.variant"]
    groups = {} if isinstance(config.optimizer, Target) else config.optimizer.groups
    for head, each in groups.items():
        if isinstance(each.optimizer, Target):
            yield f"optimizer.groups.{head}.optimizer", each.optimizer, _CALLS["optimizer"]
    for name, target in config.callbacks.custom.items():
        yield f"callbacks.{name}", target, _CALLS["callbacks"]


def _problem(where: str, target: Target, call: _Call) -> str | None:
    """Why it cannot be called: the first argument that does not fit, with the names there are."""
    try:
        factory = import_target(target.path, where)
    except ConfigError as error:
        return str(error)
    methods = (*EVENTS, "state_dict")
    if where.startswith("callbacks.") and isinstance(factory, type) and not any(hasattr(factory, m) for m in methods):
        remedy = "give a class with methods for events: on_step_end, on_log, on_save, ..."
        return f"{where}._target_: is no callback, got {target.path}, which has a method for no event; {remedy}"
    positional = call.positional
    if where == "loss" and not isinstance(factory, type):
        positional = ("logits", "labels")  # a loss function is called as it stands, its arguments bound beforehand
    return argument_problem(where, target.path, factory, target.kwargs, positional, call.offered)
