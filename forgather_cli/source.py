"""A trained model to evaluate or to sample from: a run, a checkpoint, or a Hugging Face directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgather_cli.checkpoint.load import Reader, newest_valid
from forgather_cli.config.decode import load_saved
from forgather_cli.config.schema import Config, PretrainedSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.loader import EvalLoader
from forgather_cli.data.tokenize import Tokenizer, load_tokenizer
from forgather_cli.distributed import World, pick_device
from forgather_cli.errors import DataError, ModelError
from forgather_cli.loss import build_loss
from forgather_cli.models.build import build_model, load_pretrained
from forgather_cli.precision import autocast_for
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.single import SingleDevice
from forgather_cli.trainer.evaluate import Uninterrupted, evaluate, in_rounds
from forgather_cli.trainer.persistence import load_model
from forgather_cli.trainer.setup import named_tensors


@dataclass(frozen=True)
class Source:
    """A model in eval mode on ``device``, and its tokenizer."""

    model: nn.Module
    tokenizer: Tokenizer
    step: int | None
    """Optimizer step of the checkpoint; None for a model directory."""
    device: torch.device


def load_source(source: Path, *, device: str = "auto") -> Source:
    """Load a run's newest valid checkpoint, a checkpoint, or a model directory. Raises SetupError."""
    where = pick_device(device)
    reader = _reader(source)
    directory = source if reader is None else reader.path / "model"
    tokenizer = load_tokenizer(str(directory))
    if (directory / "config.json").is_file():
        option = PretrainedSettings(path=str(directory))
        model = build_model(option, vocab_size=tokenizer.vocab_size, seq_len=1)
        load_pretrained(model, directory)
    else:
        model = _model_of_users(source, reader, tokenizer)
    model.to(where).eval()
    return Source(model, tokenizer, None if reader is None else reader.step, where)


def _reader(source: Path) -> Reader | None:
    """The checkpoint that ``source`` stands for; None if it is a model directory."""
    if (source / "manifest.json").is_file():
        reader = Reader(source)
        reader.verify()
        return reader
    if (source / "config.json").is_file():
        return None
    reader_or_none = newest_valid(RunDir(source))
    if reader_or_none is None:
        raise ModelError(f"{source}: the run has no checkpoint yet; train it with save_strategy=steps or epoch")
    return reader_or_none


def _model_of_users(source: Path, reader: Reader | None, tokenizer: Tokenizer) -> nn.Module:
    """A model that a run's config builds from ``_target_``, with the checkpoint's weights."""
    run = source if reader is None or source != reader.path else source.parent.parent
    if reader is None or not (run / "config.yaml").is_file():
        raise ModelError(f"{source}: has no config.json, and no run's config.yaml says how to build the model")
    config = load_saved(run / "config.yaml")
    seq_len = getattr(config.data, "seq_len", 1024)
    model = build_model(config.model, vocab_size=tokenizer.vocab_size, seq_len=seq_len)
    load_model(reader, named_tensors([model]))
    return model


def evaluate_source(source: Source, config: Config) -> dict[str, float]:
    """Loss and perplexity on the evaluation split that ``config`` describes, every example once.

    Raises DataError if there is no split.
    """
    data = load_data(config.data, seed=max(config.seed, 0))
    if data.tokenizer.vocab_size > _vocabulary(source.model):
        raise DataError(
            f"data.tokenizer: has {data.tokenizer.vocab_size} tokens, the model knows {_vocabulary(source.model)}; "
            "evaluate with the tokenizer the model was trained with"
        )
    if data.eval is None:
        raise DataError(
            "data.eval_fraction: the data has no evaluation split; set data.eval_files or data.eval_fraction"
        )
    strategy = SingleDevice(source.device, build_loss(config.loss), autocast_for(config.precision, source.device))
    strategy.materialize(lambda: source.model, None)
    loader = EvalLoader(
        data.eval,
        batch_size=config.per_device_eval_batch_size,
        max_samples=config.max_eval_samples,
        max_steps=config.max_eval_steps,
        device=source.device,
    )
    rounds = in_rounds(loader, None, Uninterrupted())
    return evaluate(strategy, rounds, World(), prefix="eval", on_batch=lambda: None)


def _vocabulary(model: Any) -> int:
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=1 << 62)
