"""Main of every rank: read the config, build the parts, ``Trainer.train()``."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from forgather_cli.callbacks.bars import CorpusBar
from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.decode import written_tree
from forgather_cli.config.schema import Config, DecoderSettings, Target
from forgather_cli.data.build import load_data
from forgather_cli.data.splits import DataSplits
from forgather_cli.distributed import pick_device, world
from forgather_cli.models.build import build_model, initialize
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.trainer.trainer import Trainer

log = logging.getLogger(__name__)


def run(
    config: Config,
    run: RunDir,
    *,
    should_stop: Callable[[], int | None] = lambda: None,
    on_stop: Callable[[int], None] = lambda signum: None,
    on_step: Callable[[int], None] = lambda step: None,
    stacks: Callable[[], dict[str, Any]] | None = None,
) -> Trainer:
    """Train as ``config`` says in ``run``; returns the trainer as training left it.

    ``on_step`` is called with the number of each step that is done. ``stacks`` tells where all ranks stand, for those
    who ask the job.
    """
    from forgather_cli.callbacks.build import build_callbacks
    from forgather_cli.trainer.trainer import Trainer

    device = pick_device(config.device)
    tree = written_tree(config, run.newest_config())
    if config.logging_dir is not None:
        run = replace(run, logging_dir=Path(config.logging_dir))
    with contextlib.closing(CorpusBar()) as bar:
        progress = bar if world().rank == 0 else None
        model_path = getattr(config.model, "path", None)
        data = load_data(config.data, seed=max(config.seed, 0), progress=progress, model_path=model_path)
    trainer = Trainer(
        model_init=lambda: construct(config, data, device),
        init_weights=None if isinstance(config.model, Target) else partial(fill, config, device),
        args=replace(config, output_dir=str(run.root)),
        train_dataset=data.train,
        eval_dataset=data.eval,
        processing_class=data.tokenizer,
        callbacks=[_Steps(on_step), *build_callbacks(config.callbacks, run, config_tree=tree, stacks=stacks)],
        should_stop=should_stop,
        on_stop=on_stop,
        config_tree=tree,
        data_description={**data.description, "seq_len": data.seq_len, "fingerprint": data.fingerprint},
    )
    trainer.train()
    return trainer


def construct(config: Config, data: DataSplits, device: torch.device) -> torch.nn.Module:
    """The model without weights, on meta, on the device or on the CPU (``construct_model_on``)."""
    where = {"meta": torch.device("meta"), "device": device, "cpu": torch.device("cpu")}[config.construct_model_on]
    if isinstance(config.model, Target):
        where = torch.device("cpu") if where.type == "meta" else where
    with where:
        return build_model(config.model, vocab_size=data.vocab_size, seq_len=data.seq_len)


def fill(config: Config, device: torch.device, module: torch.nn.Module, seed: int) -> None:
    """Give the parameters their first values: from the pretrained directory, or drawn by (seed, name).

    A model of the user's keeps those of its constructor.
    """
    draws_on_device = config.construct_model_on == "device" and device.type != "cpu"
    draws_on_device = draws_on_device and isinstance(config.model, DecoderSettings)
    if draws_on_device:
        log.info("construct_model_on=device draws other numbers than meta and cpu do")
    initialize(config.model, module, seed, device_generator=draws_on_device)


class _Steps(TrainerCallback):
    """Tells the process around the training how far it is."""

    def __init__(self, tell: Callable[[int], None]) -> None:
        self._tell = tell

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell(state.global_step)
