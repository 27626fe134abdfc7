"""Settings that a config leaves open and the machine decides: once, as a run first starts; config.yaml keeps them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import is_dataclass, replace
from functools import reduce
from importlib.util import find_spec
from typing import Any, NamedTuple

from forgather_cli.config.rules import rule_problems
from forgather_cli.config.schema import (
    Config,
    CrossEntropySettings,
    LigerSettings,
    LinearCrossEntropySettings,
    Target,
    typed,
)
from forgather_cli.hardware import chunk_tokens, gpu_of, without_auto


class Decision(NamedTuple):
    path: str
    value: Any
    says: str
    why: str
    """Both for people."""


Rule = Callable[[Config, Any], tuple[Any, str]]
"""(config, the GPU as ``hardware.gpu_of`` has it, None of a CPU) -> the value, and why; without a reason it is
not said. Of a group's option the settings that ``auto`` has too are put in afterwards."""


_COMPILATION = 60.0  # seconds: an estimate too, of a large model with its loss
_SAVED = 0.35  # of the time of a step: an estimate, to be measured
_SPEED = 0.35 * 989e12  # FLOP/s of a step on an H100; a slower GPU would save more


def _torch_compile(config: Config, gpu: Any) -> tuple[bool, str]:
    """On where it is known to save two compilations at least: steps take 6 x parameters x tokens operations."""
    model, length = config.model, getattr(config.data, "seq_len", None)
    if gpu is None and not config.device.startswith("cuda"):
        return False, "not on CUDA"
    if isinstance(config.trainer, Target) or config.trainer.splits_backward:
        return False, "the trainer may not take it"
    size = 0 if isinstance(model, Target) else model.num_parameters(vocab_size=2**15)
    if config.max_steps < 1 or length is None or not size:
        return False, "how many steps there are, or how long one takes, is not known here"
    rows = config.per_device_train_batch_size * (config.gradient_accumulation_steps or 1)
    if config.global_batch_size and config.known_world:
        rows = config.global_batch_size // config.known_world
    saved = _SAVED * config.max_steps * 6 * size * rows * length / _SPEED
    return saved > 2 * _COMPILATION, f"saves about {saved:,.0f} s, and takes up to {_COMPILATION:.0f}"


def _loss(config: Config, gpu: Any) -> tuple[Any, str]:
    """Plain where the model may not let a loss apply its head; else the first that no other setting excludes.

    Compiled with the head it is the fastest on an H100; of the others liger takes 0.5 to 1.2 of the time of chunks, in
    less memory (docs/measured.md, "One GPU").
    """
    plain = CrossEntropySettings()
    if gpu is None and not config.device.startswith("cuda"):
        return plain, ""
    if config.torch_compile:
        return plain, "torch_compile=true fuses it with the head"
    is_plain = not isinstance(config.model, Target) and config.model.head_gives_logits
    if not is_plain or config.adapter.freezes_base:
        return plain, "an adapter, or a class that is not ours, may do more to its logits than its head does"
    has_liger = all(find_spec(package) for package in ("liger_kernel", "triton"))
    for option in (LigerSettings(), LinearCrossEntropySettings())[not has_liger :]:
        if not rule_problems(replace(config, loss=option)):
            return option, "never the logits of all tokens at once"
    return plain, "other settings exclude those that apply the head"


_RULES: dict[str, tuple[str | None, Rule]] = {
    "precision": ("auto", lambda config, gpu: without_auto(config.precision, config.device)),
    "torch_compile": ("auto", _torch_compile),
    "loss": ("auto", _loss),
    "loss.chunk_size": (None, lambda config, gpu: (chunk_tokens(gpu), gpu.name if gpu is not None else "")),
}
"""Setting, a dotted path -> what leaves it open (of a group the option's type), and its rule, which finds those above
it decided."""


def left_open(config: Config) -> bool:
    """Whether the machine has something to decide."""
    return any(_is_open(_value(config, path), word) for path, (word, _) in _RULES.items())


def decided(config: Config, begun: Config | None = None) -> tuple[Config, list[Decision]]:
    """``config`` with nothing left open, and what was decided: as ``begun`` has it, a run's, else by the rules."""
    decisions = []
    for path, (word, rule) in _RULES.items():
        asked = _value(config, path)
        if not _is_open(asked, word):
            continue
        own = {name: value for name, value in vars(asked).items() if name != "type"} if is_dataclass(asked) else {}
        value, why = _value(begun, path), "as the run was begun"
        if value is ... or _is_open(value, word) or not all(hasattr(value, name) for name in own):
            value, why = rule(config, gpu_of(config.device))
        value = replace(value, **own) if own else value
        group, _, name = path.rpartition(".")
        changed = {group: replace(getattr(config, group), **{name: value})} if group else {name: value}
        config = replace(config, **changed)
        before, after = (typed(getattr(each, "type", each)) for each in (asked, value))
        decisions.append(Decision(path, value, f"{path}={before}: {after}", why))
    return config, decisions


def _value(config: Any, path: str) -> Any:
    """``...`` where there is none."""
    return reduce(lambda found, name: getattr(found, name, ...), path.split("."), config)


def _is_open(value: Any, word: str | None) -> bool:
    return bool(getattr(value, "type", value) == word)
