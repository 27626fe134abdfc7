"""A trained model to evaluate or to sample from: a run, a checkpoint, or a Hugging Face directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from forgather_cli.checkpoint.load import Reader, newest_valid, open_whole
from forgather_cli.checkpoint.tensors import Weights
from forgather_cli.config.decode import load_saved, load_tree
from forgather_cli.data.text.tokenizer import Tokenizer, load_tokenizer
from forgather_cli.distributed import pick_device
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ModelError
from forgather_cli.models.build import build_model, directory_option, initialize
from forgather_cli.models.init import allocate
from forgather_cli.models.parts import named_tensors
from forgather_cli.models.transform import cast_parameters
from forgather_cli.run_dir import RunDir, is_adapter_directory, is_checkpoint, is_model_directory, run_of
from forgather_cli.trainer.checkpoints import load_model

if TYPE_CHECKING:
    from forgather_cli.adapters.directory import AdapterDirectory

_SLACK = 1_000_000  # numbers; tied weights and rows for new tokens are not stored


@dataclass(frozen=True)
class Located:
    """The model that a path stands for, found and verified, not loaded."""

    directory: Path
    """Its files: a checkpoint's ``model/``, or a Hugging Face directory."""
    reader: Reader | None
    """The checkpoint, every byte of which has been read; None for a model directory."""
    run: RunDir | None
    """The run it comes from, where that is known by its config."""

    @property
    def path(self) -> Path:
        """The checkpoint, or the model directory."""
        return self.directory if self.reader is None else self.reader.path

    @property
    def add_bos(self) -> bool | None:
        """``data.add_bos`` as the run was trained; of a model directory null, the tokenizer's own rule. Reads the disk.

        Raises ConfigError for a saved config that cannot be read.
        """
        data = None if self.run is None else load_tree(self.run.newest_config()).get("data")
        value = data.get("add_bos") if isinstance(data, dict) else None
        return value if isinstance(value, bool) else None


@dataclass(frozen=True)
class Source:
    """A model in eval mode on ``device``, and its tokenizer."""

    model: nn.Module
    tokenizer: Tokenizer
    step: int | None
    """Optimizer step of the checkpoint; None for a model directory."""
    device: torch.device


def load_source(source: Path, *, device: str = "auto", trust_config: bool = False) -> Source:
    """Load a run's newest valid checkpoint, a checkpoint, or a model directory, in the dtype of its files.

    Raises SetupError.
    """
    return load_located(locate(source, trust_config=trust_config), device=device)


def locate(source: Path, *, trust_config: bool = False) -> Located:
    """What ``source`` stands for: a run's newest healthy valid checkpoint, a checkpoint, or a model directory.

    Reads every byte of a checkpoint. Raises SetupError; also, without ``trust_config``, for a model that only code
    which the run's config names can build.
    """
    reader = _reader(source)
    found = Located(source if reader is None else reader.path / "model", reader, run_of(source))
    if not (trust_config or is_model_directory(found.directory) or is_adapter_directory(found.directory)):
        raise ModelError(
            f"{found.path}: has no config.json, and is built by code that its run's config names (model._target_); add "
            "--trust-config if you trust who wrote it"
        )
    return found


def load_located(
    found: Located, *, device: str = "auto", dtype: torch.dtype | None = None, as_stored: bool = False
) -> Source:
    """Load a model with its tokenizer; floating weights in ``dtype``, None: in that of most of them in the files. The
    base of an adapter that was trained beside four bits has them again; with ``as_stored`` what its files have.

    Raises SetupError.
    """
    where, directory = pick_device(device), found.directory
    if is_adapter_directory(directory):
        from forgather_cli.adapters.directory import read_adapter
        from forgather_cli.adapters.load import check_base, directory_of_tokenizer, with_adapter

        adapter = read_adapter(directory)
        check_base(adapter, found.reader)
        directory = directory_of_tokenizer(adapter)
    tokenizer = load_tokenizer(str(directory), add_bos=found.add_bos)
    if is_adapter_directory(found.directory):
        model = with_adapter(_from_directory(adapter.base, tokenizer, dtype, None if as_stored else adapter), adapter)
    elif is_model_directory(found.directory):
        model = _from_directory(found.directory, tokenizer, dtype)
    elif found.reader is None or found.run is None:
        raise ModelError(f"{found.path}: has no config.json, and no run's config.yaml says how to build the model")
    else:  # a model of the user's, which the run's config builds from _target_
        config = load_saved(found.run.newest_config())
        seq_len = getattr(config.data, "seq_len", 1024)
        model = build_model(config.model, vocab_size=tokenizer.vocab_size, seq_len=seq_len)
        load_model(found.reader, named_tensors([model]))
    model.to(where).eval()
    return Source(model, tokenizer, None if found.reader is None else found.reader.step, where)


def is_quantized(directory: Path) -> bool:
    """Whether a model directory holds quantized weights."""
    config = directory / "config.json"
    return config.exists() and read_json_object(config, ModelError).get("quantization_config") is not None


def _from_directory(
    directory: Path, tokenizer: Tokenizer, dtype: torch.dtype | None, adapter: AdapterDirectory | None = None
) -> nn.Module:
    """A Hugging Face directory, whoever wrote it; a quantized one as it is. As a base it is as ``adapter`` wants it."""
    if is_quantized(directory):
        from forgather_cli.finalize.quantize import load_quantized

        return load_quantized(directory, torch.device("cpu"))
    option = directory_option(directory)
    with torch.device("meta"):
        model = build_model(option, vocab_size=tokenizer.vocab_size, seq_len=1)
    weights = Weights(directory)
    stored = sum(spec.num_elements for spec in weights.specs().values())
    if sum(p.numel() for p in model.parameters()) > 2 * stored + _SLACK:  # before memory is taken for it
        raise ModelError(
            f"{directory / 'config.json'}: describes a larger model than its files hold ({stored:,} numbers)"
        )
    cast_parameters(model, dtype or weights.dtype)
    fill: Callable[[nn.Module], None] = partial(initialize, option, seed=0)
    if adapter is not None:
        from forgather_cli.adapters.load import as_base

        fill = as_base(model, adapter, option, fill)
    allocate(model, "cpu")
    fill(model)
    return model


def _reader(source: Path) -> Reader | None:
    """The checkpoint that ``source`` stands for; None if it is a model directory."""
    if is_checkpoint(source):
        return open_whole(source)
    if is_model_directory(source) or is_adapter_directory(source):
        return None
    run = RunDir(source)
    reader = newest_valid(run)
    if reader is None:
        none = f"{source}: the run has no checkpoint yet; train it with save_strategy=steps or epoch"
        raise ModelError(run.note_set_aside() or none)
    return reader
