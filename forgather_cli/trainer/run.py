"""``TrainingRun``, the record that the loop and its helpers work on; and ``describe``, which tells people about it."""

from __future__ import annotations

import platform
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgather_cli.callbacks.base import TrainerControl, TrainerState
from forgather_cli.config.batch import BatchPlan
from forgather_cli.config.schedule import shares
from forgather_cli.config.schema import Config
from forgather_cli.data.loaders.loader import EvalLoader, TrainLoader
from forgather_cli.distributed import World
from forgather_cli.errors import TrainingError
from forgather_cli.models.pretrained import architecture
from forgather_cli.precision.scaling import LossScaler
from forgather_cli.run_dir import RunDir, shown
from forgather_cli.strategies.base import Strategy
from forgather_cli.trainer.arguments import ScriptSettings, TrainingArguments
from forgather_cli.trainer.epochs import Epochs
from forgather_cli.trainer.metrics import TrainMetrics
from forgather_cli.trainer.outer import OuterLoop
from forgather_cli.trainer.step_sync import StepSync, TrainingJob


@dataclass
class TrainingRun:
    """One model in training: settings, parts, and how far it is. The loop makes it; its helpers are given it."""

    config: Config
    script: ScriptSettings
    """A script's TrainingArguments, for the settings that only these have; else the defaults of those."""
    run_dir: RunDir
    config_tree: dict[str, Any]
    """The settings as checkpoints hold them; empty where they are not known."""
    data_description: dict[str, Any]
    data_files: dict[str, str]
    """Hash of each file of the data, by path (``DataSplits.files``)."""
    world: World
    cpu_group: Any
    """Of all ranks, for host tensors and objects; None on one device."""
    strategy: Strategy
    seed: int
    job: TrainingJob
    emit: Callable[..., None]
    """``emit(event, **facts)`` sends an event to the callbacks (``Loop.emit``)."""
    write_model_files: Callable[[Path], None]
    """Writes config and tokenizer, where they are known, into a directory."""
    base: dict[str, str] | None = None
    """Of an adapter: the model that it is for (``path``, ``name``, ``sha256``). Checkpoints hold what is trained alone.
    """
    trained: frozenset[str] = frozenset()
    """Of an adapter: full names of all parameters that the ranks train."""
    scaler: LossScaler | None = None
    """Under fp16: gradients are ``scaler.scale`` times too large."""
    seed_rank: int = 0
    """In the place of the rank in the seeds of dropout: jobs that train together differ in it too."""
    outer: OuterLoop | None = None
    """Averages weights between steps, where something does."""

    # anew for each training
    state: TrainerState = field(init=False)
    control: TrainerControl = field(init=False)
    sync: StepSync = field(init=False)

    # what a training makes, in this order
    batch_plan: BatchPlan = field(init=False)
    train_loader: TrainLoader | None = None
    epochs: Epochs = field(init=False)
    optimizer: Any = None
    lr_scheduler: Any = None
    used_lr: float | None = None
    """Learning rate of the newest update."""
    metrics: TrainMetrics = field(init=False)
    eval_loader: EvalLoader | None = None

    @property
    def is_script(self) -> bool:
        """The settings are a script's TrainingArguments: errors speak of arguments, not of a recipe's keys."""
        return isinstance(self.script, TrainingArguments)

    def is_finished(self) -> bool:
        """Whether training is over: by its number of steps, or since somebody has ended it."""
        control = self.control
        if control.should_training_stop or control.should_abort_without_save or self.sync.signum is not None:
            return True
        return 0 < self.state.max_steps <= self.state.global_step

    @property
    def ranks_differ(self) -> bool:
        """Each rank has weights, gradient norms and moments of its own between averages."""
        return self.outer is not None and self.outer.ranks_differ

    @property
    def weights_are_equal(self) -> bool:
        """All ranks hold weights of one model now, which may be written; else at the next average."""
        return self.outer is None or self.outer.weights_are_equal

    def check_weights_are_equal(self) -> None:
        """Raise TrainingError where they are not: ranks would each write a part of another model."""
        if not self.weights_are_equal:
            raise TrainingError(
                f"each rank has weights of its own at step {self.state.global_step}; save the model when training has "
                "ended, or every post_local_sgd.period steps after post_local_sgd.start_step"
            )

    @property
    def model(self) -> nn.Module:
        """The whole model, or the first part of it that this rank holds."""
        return self.strategy.parts[0]


_SPLIT_FACTS = ("tokens", "documents", "samples")
# facts of the data with a place of their own below, or for programs only (identity, and Python's version twice)
_SHOWN_ELSEWHERE = {
    "type", "tokenizer", "packing", "seq_len", "vocab_size", "row_tokens", "fingerprint", "content", "python",
    "rules", "formerly", "vocabulary", "fingerprints", "order", "reference",
}  # fmt: skip


def describe(run: TrainingRun, num_parameters: tuple[int, int]) -> dict[str, Any]:
    """What is about to be trained, flat, ordered and printable. ``num_parameters``: all, and those that are trained."""
    strategy, state, config, plan = run.strategy, run.state, run.config, run.batch_plan
    ranks = f" on {run.world.size} ranks" if run.world.size > 1 else ""
    total, trainable = num_parameters
    frozen = "" if trainable == total else f", {trainable:,} of them trained"

    name = shlex.quote(shown(run.run_dir.root))
    row = _row_tokens(run.data_description)
    tokens = f", {plan.global_batch * row:,} tokens" if row else ""
    # ``16 sequences = 8 x 2 micro-steps, 4,096 tokens``: the parts where there are several
    micro_steps = f" x {plan.accumulation} micro-steps" if plan.accumulation > 1 else ""
    several = f" x {strategy.data_size} ranks" if strategy.data_size > 1 else ""
    parts = f" = {plan.micro_batch}{micro_steps}{several}" if micro_steps or several else ""

    number = config.num_train_epochs
    epochs = f"{number:g} epoch{'' if number == 1 else 's'}" if config.max_steps < 0 <= number else ""
    steps = f"{state.max_steps:,}" if state.max_steps else "until the data ends"
    if epochs:
        steps = f"{steps} ({epochs})" if state.max_steps else f"{epochs}, {steps}"

    own_split = any(getattr(config.data, name, None) for name in ("eval_files", "eval_split"))
    rows = {
        "model": f"{architecture(run.model)}, {total:,} parameters{frozen}",
        **_data(run.data_description, None if own_split else getattr(config.data, "eval_fraction", None)),
        # of conversations, whose masks are where training goes wrong in silence
        "see more": f"forgather data show {name}" if "first_targets" in run.data_description else None,
        "batch": f"{plan.global_batch} sequences{parts}{tokens}",
        "steps": steps,
        **({} if run.train_loader is None else run.train_loader.data.facts),
        **shares(config, state.max_steps),
        "resumed": f"from step {state.resumed_step:,}" if state.resumed_step else None,
        "device": f"{_device(strategy.device)}, {config.precision.type}, trainer {strategy.name}{ranks}",
        "seed": run.seed,
        "output_dir": shown(run.run_dir.root),
        "versions": f"torch {torch.__version__}, Python {platform.python_version()}",
    }
    return {key: value for key, value in rows.items() if value is not None}


def _data(facts: dict[str, Any], fraction: float | None) -> dict[str, Any]:
    """The data's kind and each split in one line, then the source's other facts unchanged."""
    told = {"data": facts.get("type"), "tokenizer": facts.get("tokenizer"), "packing": facts.get("packing")}
    splits = {split: _split(facts, split, fraction) for split in ("train", "eval")}
    known = _SHOWN_ELSEWHERE | {f"{split}_{fact}" for split in splits for fact in _SPLIT_FACTS}
    rest = {key: value for key, value in facts.items() if key not in known}
    kind = ", ".join(f"{value}" if key == "data" else f"{key} {value}" for key, value in told.items() if value)
    return {"data": kind or None, **{f"{name} split": line or None for name, line in splits.items()}, **rest}


def _row_tokens(facts: dict[str, Any]) -> int | None:
    """Tokens of a sequence; of a row with two sides those of both, None where rows are as long as what they hold."""
    found: int | None = facts.get("row_tokens", facts.get("seq_len"))
    return found


def _split(facts: dict[str, Any], split: str, fraction: float | None) -> str:
    """``11,690,159 tokens in 693 documents, 45,665 sequences of 256``; of evaluation with its share, and why that is
    not the ``fraction`` that was to be held out."""
    tokens, documents, samples = (facts.get(f"{split}_{fact}") for fact in _SPLIT_FACTS)
    if not samples:
        return ""
    of_documents = f" in {documents:,} document{'s' if documents > 1 else ''}" if documents else ""
    train = facts.get("train_tokens") if split == "eval" else None
    part = tokens / (train + tokens) if train and tokens else 0.0
    why = f": eval_fraction={fraction:g} draws whole documents" if fraction and not 0.8 < part / fraction < 1.25 else ""
    share = f" ({part:.2%} of all{why})" if part else ""
    source = f"{tokens:,} tokens{share}{of_documents}, " if tokens else ""
    of = f" of {row}" if (row := _row_tokens(facts)) else ""
    return f"{source}{samples:,} sequences{of}"


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    threads = torch.get_num_threads()
    return f"{device} ({threads} thread{'s' if threads > 1 else ''})"
