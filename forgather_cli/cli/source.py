"""SOURCE of ``eval`` and ``generate``: a run, a checkpoint, or a model directory; and the config that goes with it."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgather_cli.cli.words import load, quoted, split_words
from forgather_cli.config.options import GROUPS
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.run_dir import RunDir, run_of, step_of

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
TrustConfig = Annotated[
    bool,
    typer.Option(
        "--trust-config",
        help="Run what the run's saved config names by [cyan]_target_[/], and let it read your environment.",
    ),
]


def load_run_or_recipe(words: Sequence[str] | None, config_dir: Path | None, *, trust_config: bool) -> Loaded:
    """The config of a recipe, or of a run given by its directory or a ``config.yaml`` of it. Raises ConfigError."""
    recipe, overrides = split_words(words)
    path = Path(recipe)
    run = run_of(path) if path.is_dir() and step_of(path) is None else None
    saved = run.newest_config() if run is not None else path if _SAVED.fullmatch(path.name) else None
    if saved is None:
        return load(words, config_dir)
    from forgather_cli.config.load import load_resumed

    reads = None if trust_config else GROUPS
    return load_resumed(saved, overrides, config_dir=config_dir, reads=reads)


_SAVED = re.compile(r"config(\.\d+)?\.yaml")


def check_source(source: Path) -> None:
    """Raise SetupError unless ``source`` can be a run, a checkpoint or a model directory."""
    if not source.is_dir():
        raise SetupError(f"{source}: no such directory; give a run, a checkpoint or a model directory")
    marks = ("config.yaml", "manifest.json", "config.json")
    if not any((source / mark).exists() for mark in marks):
        raise SetupError(
            RunDir(source).note_set_aside()
            or f"{source}: is no run (config.yaml), no checkpoint (manifest.json) and no model directory (config.json)"
        )


def config_for(source: Path, overrides: list[str], reads: Collection[str] | None) -> Loaded:
    """The run's config with overrides; for a model directory the default recipe with that model and its tokenizer.

    ``reads``: None trusts the run's config; else the groups that the command reads.
    """
    run = run_of(source)
    if run is not None:
        from forgather_cli.config.load import load_resumed

        # without callbacks, which nobody who does not train reads
        return load_resumed(run.newest_config(), overrides, reads=reads, edited={"callbacks": {}})
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
_GROUPS_READ = ("data", "trainer", "loss", "precision")  # the model is that of the checkpoint
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


def config_to_evaluate(source: Path, overrides: list[str], *, trust_config: bool = False) -> tuple[Loaded, bool]:
    """The config of an evaluation, and whether to use the model's own tokenizer in place of the config's.

    In this process unless the overrides say otherwise, however the run was trained. Raises ConfigError.
    """
    neutral = [*_OF_TRAINING, *([] if run_of(source) else ["max_eval_samples=null"])]  # no run: the whole split
    reads = None if trust_config else _GROUPS_READ
    loaded = config_for(source, [*neutral, *overrides], reads)
    base = config_for(source, neutral, reads and ())
    typed = {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides}
    if whole := _whole(loaded, typed):
        overrides = [*whole, *overrides]
        loaded = config_for(source, [*neutral, *overrides], reads)
    given = (loaded.given - base.given) | typed
    unread = [path for path in sorted(given & loaded.given) if path.partition(".")[0] not in _READ]
    if unread:
        raise ConfigError([f"{path}: {_unread(path)}; leave it out" for path in unread])
    is_single = getattr(base.config.trainer, "type", None) == "single"
    if not is_single and not any(path.partition(".")[0] in _RANKS for path in given):
        loaded = config_for(source, [*neutral, *overrides, "trainer=single"], reads)
    # where the text is not the run's, a tokenizer chosen or trained for that would make other tokens of it
    other_text = {path for path in given if path.partition(".")[0] == "data"} - _SAME_TEXT
    names = {getattr(each.config.data, "tokenizer", None) for each in (base, loaded)}
    return loaded, bool(other_text) and "data.tokenizer" not in given and names != {"bytes"}


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


def _unread(path: str) -> str:
    of_model = path.partition(".")[0] == "model"
    return "eval takes the model of SOURCE as it is" if of_model else "nothing reads it in eval, which trains nothing"
