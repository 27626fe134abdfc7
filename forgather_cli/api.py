"""For scripts and notebooks: a recipe as a Trainer, and what a run has left as Python objects.

What needs torch is imported where it is used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.checkpoint.retention import CheckpointInfo, list_checkpoints
from forgather_cli.errors import ConfigError, PartError, SetupError
from forgather_cli.launch.exit_status import ExitRecord, read_exit_record
from forgather_cli.run_dir import RunDir, name_file
from forgather_cli.runs.find import find_runs, settings_of
from forgather_cli.runs.records import Record, check_logged, metric_names, records_of

if TYPE_CHECKING:
    from torch import nn

    from forgather_cli.inference.generation import Generator
    from forgather_cli.trainer.script import Trainer


def compose(*words: str, config_dir: Path | str | None = None, **settings: Any) -> Trainer:
    """The Trainer that ``forgather train`` with these words would run, on one device: its data are loaded and its model
    is made. ``train()`` trains in the run directory, ``evaluate()`` evaluates.

    ``words`` are a recipe or a run to train again (none: as ``forgather train``) and overrides: ``compose("default",
    "max_steps=100", "model=nano")``. ``config_dir``: a folder with groups and recipes of yours. Relative paths are
    those of the working directory at this call. Raises ConfigError with every mistake, and SetupError.
    """
    if settings:
        typed = ", ".join(f'"{name}={value}"' for name, value in settings.items())
        raise ConfigError(f"{next(iter(settings))}: settings are words; write compose({typed})")
    for word in words:
        if isinstance(word, str):
            continue
        got = "None" if word is None else f"a {type(word).__name__}"
        remedy = 'write each setting as a word: compose("default", "model=nano")'
        if isinstance(word, Mapping):
            typed = ", ".join(f'"{name}={value}"' for name, value in word.items())
            remedy = f'write compose("default", {typed})'
        elif isinstance(word, Sequence):
            remedy = "write compose(*words) for a list of words"
        raise ConfigError(f"compose: takes texts, a recipe and key=value, got {got}; {remedy}")
    if not isinstance(config_dir, str | os.PathLike | None):
        raise ConfigError(f"config_dir: got a {type(config_dir).__name__}; give one folder")
    from forgather_cli.cli.words import load
    from forgather_cli.launch.layout import plan_layout
    from forgather_cli.launch.memory import check_memory
    from forgather_cli.launch.place import joined
    from forgather_cli.launch.start import as_begun, check_surroundings, origin_of, output_dir
    from forgather_cli.worker import build

    loaded = load(words, None if config_dir is None else Path(config_dir), trust_config=True)
    config = loaded.config
    check_surroundings(config)
    if config.trainer.is_one_process is False:
        kind = loaded.tree["trainer"]["type"]
        raise ConfigError(
            f"trainer: compose trains in this process on one device, got {kind}; leave it out, or run forgather train "
            f"trainer={kind}"
        )
    layout = plan_layout(config, loaded.given, joined())
    if layout.world > 1:
        raise ConfigError("trainer: compose trains in this process alone; run forgather train for several ranks")
    if config.auto_find_batch_size:
        raise ConfigError("auto_find_batch_size: each attempt is a process; leave it out, or run forgather train")
    check_memory(config, layout)
    for note in loaded.notes:
        print(note, flush=True)
    loaded = as_begun(loaded, RunDir(output_dir(loaded)))
    config = loaded.config
    # data and model are read here; these are read by train(), after which a script may have changed the directory
    later = {"output_dir": output_dir(loaded), "logging_dir": config.logging_dir}
    if isinstance(config.resume_from_checkpoint, str):
        later["resume_from_checkpoint"] = config.resume_from_checkpoint
    paths: dict[str, Any] = {name: None if path is None else str(Path(path).absolute()) for name, path in later.items()}
    run, tree = RunDir(Path(paths["output_dir"])), {**loaded.tree, **paths}
    try:
        return build(replace(config, **paths), run, tree, origin=origin_of(loaded))
    except PartError as error:
        name_file(error, loaded.option_files)
        raise


class Run:
    """A run directory, read anew at each use: the run may still train. Raises SetupError for what is none.

    ``trust_config``: import what the run's saved config names by ``_target_``, where the model is a class of yours.
    """

    def __init__(self, path: Path | str, *, trust_config: bool = False) -> None:
        found = find_runs([Path(path)])
        if len(found) > 1:
            raise SetupError(f"{path}: holds {len(found)} runs; give one of them, such as {found[-1].root}")
        self._run, self._trust = found[0], trust_config
        self._generator: Generator | None = None
        self._loaded: tuple[Path, list[int]] | None = None
        """Where the generator comes from, and the newest step at that time."""

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    @property
    def path(self) -> Path:
        return self._run.root

    @property
    def config(self) -> dict[str, Any]:
        """The settings of the newest start, as ``config.yaml`` has them."""
        return settings_of(self._run)

    @property
    def exit(self) -> ExitRecord | None:
        """How the last job ended (``state``, ``code``, ``reason``, ``step``); None if it still runs, or was killed."""
        return read_exit_record(self._run)

    @property
    def metrics(self) -> list[Record]:
        """Every log, evaluation and final result, by step; without what a rollback took back. Raises SetupError if
        there is none.
        """
        return records_of(self._run)

    def table(self, *names: str) -> list[Record]:
        """A row for each step at which one of the metrics was logged: ``step`` and the metrics, None where one was not.

        Without ``names`` all metrics. What a job tells at its end, totals of the whole run, is in ``metrics`` alone.
        Raises ConfigError for names that were never logged at a step.
        """
        all_records = self.metrics
        records = [record for record in all_records if "train_runtime" not in record]
        known, totals = metric_names(records), metric_names(all_records)
        if problems := [name for name in names if name in totals and name not in known]:
            raise ConfigError([f"table: {each} is a total of the whole run; run.metrics has it" for each in problems])
        check_logged(names, known, "table")
        wanted, rows = names or tuple(known), dict[int, Record]()
        for record in records:
            if logged := {name: record[name] for name in wanted if name in record}:
                step = int(record["step"])
                rows.setdefault(step, {"step": step, **dict.fromkeys(wanted)}).update(logged)
        return list(rows.values())

    @property
    def checkpoints(self) -> Sequence[CheckpointInfo]:
        """The published checkpoints, oldest first, with ``step``, ``path``, ``metrics``, ``best`` and so on."""
        return list_checkpoints(self._run)

    def model(self, checkpoint: int | Path | str | None = None, *, device: str = "auto") -> nn.Module:
        """The model with its weights, in eval mode. ``checkpoint``: a step, or a path; None: the newest valid one.

        Reads and verifies every byte of the checkpoint. Raises SetupError.
        """
        from forgather_cli.inference.source import load_source

        return load_source(self._source(checkpoint), device=device, trust_config=self._trust).model

    def generate(
        self,
        prompt: str,
        checkpoint: int | Path | str | None = None,
        **settings: Any,
    ) -> str:
        """The prompt and what the model writes to it; the same arguments give the same text.

        ``settings`` are those of ``config.schema.Sampling``: max_new_tokens, temperature (0 is greedy), top_k, top_p,
        num_beams, seed and so on. Raises ConfigError, SetupError.
        """
        from forgather_cli.config.decode import decode_sampling
        from forgather_cli.inference.generation import load_generator

        sampling = decode_sampling(settings)

        source = self._source(checkpoint)
        loaded = source, self._run.checkpoint_steps()[-1:]
        if self._loaded != loaded:
            self._generator = load_generator(source, device="auto", trust_config=self._trust)
            self._loaded = loaded
        assert self._generator is not None
        generator = replace(self._generator)  # which has drawn nothing yet
        [written] = generator.write([generator.encode(prompt, "prompt")], sampling)
        return prompt + written.text

    def _source(self, checkpoint: int | Path | str | None) -> Path:
        if not isinstance(checkpoint, int):
            return self.path if checkpoint is None else Path(checkpoint)
        steps = self._run.checkpoint_steps()
        if checkpoint not in steps:
            raise SetupError(f"checkpoint: {self.path} has none of step {checkpoint}; it has {steps}")
        return self._run.checkpoint(checkpoint)
