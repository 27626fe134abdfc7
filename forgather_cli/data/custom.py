"""Custom data: what the object that ``data._target_`` names returned, as datasets and tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import DataTarget, Target
from forgather_cli.data.cache import digest
from forgather_cli.data.splits import DataSplits
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import DataError
from forgather_cli.targets import import_target


def custom_data(option: Target, model_path: str | None = None) -> DataSplits:
    """Data of the user's: a DataSplits, a mapping with ``train`` and, if any, ``eval``, ``tokenizer`` (a name or an
    object) or ``vocab_size``, and ``seq_len``, a (train, eval) pair, or a training dataset alone. Raises DataError.

    Without ``tokenizer`` and ``vocab_size`` the tokenizer is that of the model's directory, if there is one.
    """
    made = _splits(option, import_target(option.path, "data")(**option.kwargs), model_path)
    if isinstance(option, DataTarget):
        _check_dispatch(option, made)
    return made


def _splits(option: Target, made: Any, model_path: str | None) -> DataSplits:
    if isinstance(made, DataSplits):
        return made
    parts: dict[str, Any] = {"train": made}
    if isinstance(made, Mapping):
        parts = dict(made)
    elif isinstance(made, tuple) and len(made) == 2:
        parts = {"train": made[0], "eval": made[1]}
    if "train" not in parts:
        raise DataError(
            f"data._target_: {option.path} returned a mapping without 'train' (its keys: {', '.join(parts)})"
        )
    tokenizer, vocab_size = parts.get("tokenizer"), parts.get("vocab_size")
    if vocab_size is not None and (not isinstance(vocab_size, int) or vocab_size < 1):
        raise DataError(f"data._target_: 'vocab_size' of {option.path} must be a number above 0, got {vocab_size!r}")
    if tokenizer is None and vocab_size is None and model_path is not None:
        directory = Path(model_path).expanduser()
        tokenizer = str(directory) if (directory / "tokenizer.json").is_file() else None
    fingerprint = digest([option.path, repr(sorted(option.kwargs.items()))])
    return DataSplits(
        parts["train"],
        parts.get("eval"),
        load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer,
        fingerprint,
        _seq_len(parts, option.path),
        {"type": option.path},
        vocab_size,
    )


def _check_dispatch(option: DataTarget, made: DataSplits) -> None:
    """Raise DataError for settings that only data without numbers has, given for data with numbers."""
    from forgather_cli.data.loaders.map_style import is_map_style  # here, since it costs torch

    splits = {"train": made.train, "eval": made.eval}
    streams = {name: data is not None and not is_map_style(data) for name, data in splits.items()}
    follows = option.dispatch_eval_batches is None
    reads = {
        "dispatch_batches": streams["train"] or (follows and streams["eval"]),
        "dispatch_eval_batches": streams["eval"],
    }
    for name, is_read in reads.items():
        if getattr(option, name) is not None and not is_read:
            raise DataError(
                f"data.{name}: nothing reads it, since what {option.path} returned has numbers, by which each rank "
                "reads its own samples; leave it out"
            )


def _seq_len(parts: dict[str, Any], path: str) -> int:
    if "seq_len" in parts:
        return int(parts["seq_len"])
    try:
        return len(parts["train"][0]["input_ids"])
    except (TypeError, KeyError, IndexError, NotImplementedError) as error:
        raise DataError(
            f"data._target_: cannot tell the sequence length of what {path} returned; "
            f"return a mapping with 'train' and 'seq_len'"
        ) from error
