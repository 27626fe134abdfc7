"""``forgather eval``: what a trained model makes of an evaluation split, under any strategy.

One call evaluates in one process, or is one rank's part in it.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from forgather_cli.checkpoint.load import Reader
from forgather_cli.checkpoint.manifest import Manifest
from forgather_cli.config.schema import Config, NoAdapter, Target, value_at
from forgather_cli.data.build import load_data
from forgather_cli.data.loaders.data_ranks import DataRanks
from forgather_cli.data.splits import DataSplits
from forgather_cli.distributed import all_sum, cpu_group, gather, on_rank_0, pick_device, world
from forgather_cli.errors import DataError, ModelError
from forgather_cli.hardware import without_auto
from forgather_cli.hub import with_local_model
from forgather_cli.inference.source import Located, is_quantized, load_located, locate
from forgather_cli.loss.base import Loss
from forgather_cli.loss.build import build_loss
from forgather_cli.loss.eval_metrics import EvalMetrics
from forgather_cli.models.build import construct, directory_option, fill, most_tokens
from forgather_cli.models.parts import named_tensors
from forgather_cli.models.pretrained import num_sentinels, read_config
from forgather_cli.precision.dtypes import parameter_dtype
from forgather_cli.run_dir import RunDir, is_adapter_directory
from forgather_cli.strategies.base import Strategy
from forgather_cli.strategies.build import build_strategy
from forgather_cli.terminal.bars import Bar, doing
from forgather_cli.trainer.build import eval_loader, model_spec
from forgather_cli.trainer.checkpoints import load_model
from forgather_cli.trainer.evaluate import Tasks, evaluate, nothing_to_read, token_bytes_of


def evaluate_source(
    source: Path, config: Config, *, own_tokenizer: bool = False, trust_config: bool = False
) -> dict[str, Any]:
    """Collective. Evaluate a run's newest checkpoint, a checkpoint or a model directory on the data of ``config``.

    ``own_tokenizer``: with the model's, whatever the config says. ``trust_config``: build a model that the run's saved
    config names by ``_target_``. Returns what ``evaluate`` measures, and

        eval_accuracy        targets that are the likeliest token / targets; None without a target, like the loss
        eval_bits_per_byte   loss x targets / ln 2 / bytes of text that the targets stand for; special tokens stand for
                             none, though their loss counts. None where the tokenizer cannot tell bytes, or the loss is
                             more than the likelihood (label smoothing, z_loss, a loss of the user's)
        eval_bytes           these bytes
        eval_samples         sequences

    Raises SetupError.
    """
    config, found, group = prepared(source, config, trust_config=trust_config)
    device = pick_device(config.device)
    changes: dict[str, Any] = {}
    if own_tokenizer and not isinstance(config.data, Target):
        changes["tokenizer"] = str(found.directory)
        if config.data.add_tokens:  # it has those that the run added
            changes["add_tokens"] = False
    if getattr(config.data, "add_bos", True) is None:  # of other data than the run's, or of a model directory
        changes["add_bos"] = found.add_bos
    config = replace(config, data=replace(config.data, **changes))
    with doing("reading the data"), Bar("tokenizing", "bytes") as bar:
        progress = bar.update if world().rank == 0 else None
        sentinels = num_sentinels(config.model) or num_sentinels(found.directory)
        described = described_by(found.directory)
        is_directory = (described / "config.json").is_file()
        most = (read_config(described, "model").get("vocab_size") or 0) if is_directory else most_tokens(config)
        data = load_data(
            config.data,
            seed=max(config.seed, 0),
            progress=progress,
            num_sentinels=sentinels,
            model_tokens=most,
        )
    if data.eval is None:
        if config.data.nothing_held_out is None:
            raise DataError("; ".join(nothing_to_read(config.data)))
        raise DataError(
            "data.eval_fraction: the data has no evaluation split; set data.eval_files or data.eval_fraction"
        )
    loss = build_loss(config.loss, device=device)
    if loss.data is not None:
        identity = {} if found.reader is None else found.reader.identity()
        data = replace(data, eval=loss.data(data.eval, config.data, data.fingerprint, identity))
    token_bytes = token_bytes_of(data.tokenizer, loss)
    loss.eval_metrics = seen = EvalMetrics(device, token_bytes, len(getattr(data.eval, "task_names", ())))
    strategy = build_strategy(config, loss=loss)
    with doing("reading the model"):
        materialize(strategy, found, config, data.vocab_size, data.seq_len, group)
    _check_vocabulary(strategy, data, group)
    return {
        "step": None if found.reader is None else found.reader.step,
        "model": str(found.path),
        "trainer": str(value_at(config, "trainer")),
        "ranks": world().size,
        "precision": config.precision.type,
        "data": data.description,
        **_measure(strategy, seen, config, data, group, loss),
    }


def prepared(source: Path, config: Config, *, trust_config: bool) -> tuple[Config, Located, Any]:
    """Collective. ``config`` as an evaluation takes it, what ``source`` stands for, and a CPU group of all ranks."""
    config = with_local_model(config, weights=False)  # those of ``source`` count
    config = replace(config, precision=without_auto(config.precision, config.device)[0])
    config = replace(
        config, adapter=NoAdapter(), trainable=None, gradient_checkpointing=False, torch_compile=False
    )  # one pass is not worth compiling for
    pick_device(config.device)  # before there are groups
    group = cpu_group()
    with doing("reading the checkpoint"):
        return config, _located(source, group, trust_config=trust_config), group


def _located(source: Path, group: Any, *, trust_config: bool) -> Located:
    """Collective. What rank 0 finds: one rank reads every byte."""

    def find() -> tuple[Path, Manifest | None, Path | None]:
        found = locate(source, trust_config=trust_config)
        return found.path, found.reader.manifest if found.reader else None, found.run.root if found.run else None

    where, manifest, root = on_rank_0(find, group)
    reader = Reader(where, manifest) if manifest else None
    return Located(where / "model" if reader else where, reader, RunDir(root) if root else None)


# ------------------------------------------------------------------------------------------------------------ the model


def materialize(
    strategy: Strategy, found: Located, config: Config, vocab_size: int | None, seq_len: int, group: Any
) -> None:
    """Collective. Give the strategy the model: any kind on one device; of several ranks each reads what it holds."""
    device, described = strategy.device, described_by(found.directory)
    is_directory = (described / "config.json").is_file()
    if is_directory and config.trainer.is_one_process:
        dtype = parameter_dtype(config.precision) or torch.float32

        def load() -> nn.Module:
            return load_located(found, device=config.device, dtype=dtype).model

        strategy.materialize(model_spec(load, config, strategy))
        return
    if is_quantized(described):
        raise ModelError(f"{found.path}: is quantized, and runs on one device; set trainer=single")
    if is_directory:
        config = replace(config, model=directory_option(described))
    if described != found.directory:
        from forgather_cli.adapters.directory import read_adapter

        adapter = read_adapter(found.directory)
        if adapter.settings.in_four_bits and not config.trainer.trains_quantized:
            raise ModelError(
                f"{found.path}: was trained beside a base in four bits, and runs under trainer=single and ddp; set one"
            )
        settings = replace(adapter.settings, from_adapter=str(found.directory))
        config = replace(config, adapter=settings, trainable=adapter.trainable)
    init = None if isinstance(config.model, Target) else partial(fill, config, device, seed=0)
    build = partial(construct, config, device, vocab_size=vocab_size, seq_len=seq_len)
    strategy.materialize(model_spec(build, config, strategy, init=init))
    if not is_directory:
        assert found.reader is not None
        load_model(found.reader, named_tensors(strategy.parts), group)


def described_by(directory: Path) -> Path:
    """Where config.json lies: of an adapter with its base."""
    if not is_adapter_directory(directory):
        return directory
    from forgather_cli.adapters.directory import read_adapter

    return read_adapter(directory).base


def _check_vocabulary(strategy: Strategy, data: DataSplits, group: Any) -> None:
    """Collective. Raise DataError for tokens that the model does not know."""
    modules = (module for part in strategy.parts for module in part.modules())
    own = max((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), default=0)
    known = max(gather(own, group))
    if 0 < known < (data.vocab_size or 0):
        raise DataError(
            f"data.tokenizer: has {data.vocab_size} tokens, the model knows {known}; "
            "evaluate with the tokenizer the model was trained with"
        )


# ---------------------------------------------------------------------------------------------------------- the numbers


def _measure(
    strategy: Strategy, seen: EvalMetrics, config: Config, data: DataSplits, group: Any, loss: Loss
) -> dict[str, Any]:
    """Collective. One pass over the split."""
    here = world()
    data_ranks = None if here.size == 1 else DataRanks(cpu_group(), here.rank, strategy.data_rank)
    loader = eval_loader(config, strategy, data.eval, data_ranks)
    total, done = None, itertools.count()
    with contextlib.suppress(TypeError):  # data without a length
        total = len(loader)
    with Bar("evaluating") as bar:

        def on_batch() -> None:
            if here.rank == 0:
                bar.update(next(done), total)

        on_batch()
        names = getattr(data.eval, "task_names", None)
        metrics: dict[str, Any] = evaluate(
            strategy,
            loader,
            config,
            what="the evaluation",
            prefix="eval",
            on_batch=on_batch,
            group=group,
            tasks=Tasks(names, seen) if names else None,
            minimised=loss,
        )
    loader.close()
    correct, num_bytes = all_sum(torch.stack([seen.correct, seen.num_bytes]), here.group).tolist()
    targets = metrics["eval_targets"]
    return {
        **metrics,
        "eval_accuracy": correct / targets if targets else None,
        "eval_bits_per_byte": metrics["eval_loss"] * targets / math.log(2) / num_bytes if num_bytes else None,
        "eval_bytes": num_bytes or None,
        "eval_samples": round(metrics["eval_samples_per_second"] * metrics["eval_runtime"]),
    }
