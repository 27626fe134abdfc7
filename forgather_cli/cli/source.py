"""SOURCE of ``eval`` and ``generate``: a run, a checkpoint, or a model directory; and the config that goes with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgather_cli.cli.common import quoted
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.run_dir import RunDir, run_of

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded

SourcePath = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A run (its newest checkpoint), a checkpoint, or a model directory.",
        show_default=False,
    ),
]


def check_source(source: Path) -> None:
    """Raise SetupError unless ``source`` can be a run, a checkpoint or a model directory."""
    if not source.is_dir():
        raise SetupError(f"{source}: no such directory; give a run, a checkpoint or a model directory")
    marks = ("config.yaml", "manifest.json", "config.json")
    if not any((source / mark).is_file() for mark in marks):
        raise SetupError(
            RunDir(source).note_set_aside()
            or f"{source}: is no run (config.yaml), no checkpoint (manifest.json) and no model directory (config.json)"
        )


def config_for(source: Path, overrides: list[str]) -> Loaded:
    """The run's config with overrides; for a model directory the default recipe with that model and its tokenizer."""
    run = run_of(source)
    if run is not None:
        from forgather_cli.config.resume import recompose

        return recompose(run, overrides)
    from forgather_cli.config.load import load_config

    where = quoted(source.resolve())
    model = ["model=pretrained", f"model.path={where}", f"data.tokenizer={where}"]
    return load_config("default", [*model, *overrides])


# ------------------------------------------------------------------------------------------------------------ for eval

_READ = {
    "per_device_eval_batch_size", "max_eval_samples", "max_eval_steps", "dataloader_num_workers",
    "dataloader_prefetch_factor", "dataloader_pin_memory", "dataloader_persistent_workers", "seed", "device",
    "nproc_per_node", "nnodes", "rdzv_endpoint", "hang_timeout", "data", "trainer", "loss", "precision",
}  # fmt: skip
"""Settings and groups that an evaluation reads."""
_RANKS = {"trainer", "nproc_per_node", "nnodes", "rdzv_endpoint"}
_SAME_TEXT = {"data.seq_len", "data.packing", "data.isolate_documents", "data.cache_dir", "data.tokenize_processes"}
"""Settings of data that leave the corpus as it was, and with it a tokenizer that was trained on it."""
_OF_TRAINING = (
    "global_batch_size=null",
    "gradient_accumulation_steps=null",
    "per_device_train_batch_size=720720",  # divisible by any n_microbatches up to 16
    "fuse_optim_with_backward=false",
    "gradient_checkpointing=false",
    "auto_find_batch_size=false",
    "eval_strategy=steps",
    "load_best_model_at_end=false",
)
"""What a run was trained with must not keep its model from being evaluated in another layout."""


def config_to_evaluate(source: Path, overrides: list[str]) -> tuple[Loaded, bool]:
    """The config of an evaluation, and whether to use the model's own tokenizer in place of the config's.

    In this process unless the overrides say otherwise, however the run was trained. Raises ConfigError.
    """
    neutral = [*_OF_TRAINING, *([] if run_of(source) else ["max_eval_samples=null"])]  # no run: the whole split
    base = config_for(source, neutral)
    loaded = config_for(source, [*neutral, *overrides])
    typed = {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides}
    if whole := _whole(loaded, typed):
        overrides = [*whole, *overrides]
        loaded = config_for(source, [*neutral, *overrides])
    given = (loaded.given - base.given) | typed
    unread = [path for path in sorted(given & loaded.given) if path.partition(".")[0] not in _READ]
    if unread:
        raise ConfigError([f"{path}: {_unread(path)}; leave it out" for path in unread])
    if not any(path.partition(".")[0] in _RANKS for path in given) and not _is_single(base):
        loaded = config_for(source, [*neutral, *overrides, "trainer=single"])
    return loaded, _needs_own_tokenizer(base, loaded, given)


def _whole(loaded: Loaded, typed: set[str]) -> list[str]:
    """What makes an evaluation on files of the user's take all of them, unless the words say what is to be held out.

    Of data to train on a share is held out, and only that would be evaluated on.
    """
    names = {name.removeprefix("data.") for name in typed}
    if names & {"eval_files", "eval_split", "eval_fraction"}:
        return []
    given = next((name for name in ("files", "data_files") if name in names), None)
    patterns = getattr(loaded.config.data, given or "", [])
    if not patterns:
        return []
    return [f"data.eval_files=[{','.join(map(quoted, patterns))}]", "max_eval_samples=null", "max_eval_steps=-1"]


def _is_single(loaded: Loaded) -> bool:
    return getattr(loaded.config.trainer, "type", None) == "single"


def _unread(path: str) -> str:
    of_model = path.partition(".")[0] == "model"
    return "eval takes the model of SOURCE as it is" if of_model else "nothing reads it in eval, which trains nothing"


def _needs_own_tokenizer(base: Loaded, loaded: Loaded, given: frozenset[str]) -> bool:
    """True where the text is not the run's: a tokenizer chosen or trained for that would make other tokens of it."""
    of_data = {path for path in given if path.partition(".")[0] == "data"}
    if "data.tokenizer" in given or not of_data - _SAME_TEXT:
        return False
    names = {getattr(each.config.data, "tokenizer", None) for each in (base, loaded)}
    return names != {"bytes"}
