"""What is about to be trained, in a few lines for people."""

from __future__ import annotations

import platform
from typing import TYPE_CHECKING, Any

import torch

from forgather_cli.models.pretrained import architecture

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer

_SPLIT_FACTS = ("tokens", "documents", "samples")
# of the data: said in words of their own, or of use to programs only (identity, and Python's version twice)
_SAID = {"type", "tokenizer", "packing", "seq_len", "fingerprint", "content", "python"}


def describe(trainer: Trainer) -> dict[str, Any]:
    """What is about to be trained, flat, ordered and printable."""
    strategy, state = trainer.strategy, trainer.state
    ranks = f" on {trainer.world.size} ranks" if trainer.world.size > 1 else ""
    rows = {
        "model": _model(trainer),
        **_data(trainer.data_description),
        "batch": _batch(trainer),
        "steps": _steps(trainer),
        "resumed": f"from step {state.resumed_step:,}" if state.resumed_step else None,
        "device": f"{_device(strategy.device)}, {trainer.args.precision.type}, trainer {strategy.name}{ranks}",
        "seed": trainer.seed,
        "output_dir": str(trainer.run_dir.root),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }
    return {key: value for key, value in rows.items() if value is not None}


def _model(trainer: Trainer) -> str:
    total, trainable = trainer.num_parameters
    frozen = "" if trainable == total else f", {trainable:,} of them trained"
    return f"{architecture(trainer.model)}, {total:,} parameters{frozen}"


def _data(facts: dict[str, Any]) -> dict[str, Any]:
    """The data's kind and each split in one line; what else a source tells, as it stands."""
    told = {"data": facts.get("type"), "tokenizer": facts.get("tokenizer"), "packing": facts.get("packing")}
    splits = {split: _split(facts, split) for split in ("train", "eval")}
    known = _SAID | {f"{split}_{fact}" for split in splits for fact in _SPLIT_FACTS}
    rest = {key: value for key, value in facts.items() if key not in known}
    kind = ", ".join(f"{value}" if key == "data" else f"{key} {value}" for key, value in told.items() if value)
    return {"data": kind or None, **{f"{name} split": line or None for name, line in splits.items()}, **rest}


def _split(facts: dict[str, Any], split: str) -> str:
    """``11,690,159 tokens in 693 documents, 45,665 sequences of 256``."""
    tokens, documents, samples = (facts.get(f"{split}_{fact}") for fact in _SPLIT_FACTS)
    if not samples:
        return ""
    of_documents = f" in {documents:,} document{'s' if documents > 1 else ''}" if documents else ""
    source = f"{tokens:,} tokens{of_documents}, " if tokens else ""
    of = f" of {facts['seq_len']}" if facts.get("seq_len") else ""
    return f"{source}{samples:,} sequences{of}"


def _batch(trainer: Trainer) -> str:
    """``16 sequences (4,096 tokens) a step, 8 x 2 micro-steps``: the parts where there are several."""
    plan, ranks = trainer.batch_plan, trainer.strategy.data_size
    seq_len = trainer.data_description.get("seq_len")
    tokens = f", {plan.global_batch * seq_len:,} tokens" if seq_len else ""
    micro_steps = f" x {plan.accumulation} micro-steps" if plan.accumulation > 1 else ""
    several = f" x {ranks} ranks" if ranks > 1 else ""
    parts = f" = {plan.micro_batch}{micro_steps}{several}" if micro_steps or several else ""
    return f"{plan.global_batch} sequences{parts}{tokens}"


def _steps(trainer: Trainer) -> str:
    steps, args = trainer.state.max_steps, trainer.args
    number = args.num_train_epochs
    epochs = f"{number:g} epoch{'' if number == 1 else 's'}" if args.max_steps < 0 <= number else ""
    if not steps:
        return f"{epochs}, until the data ends" if epochs else "until the data ends"
    return f"{steps:,} ({epochs})" if epochs else f"{steps:,}"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' if threads > 1 else ''})"
