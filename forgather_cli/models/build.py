"""A model option of the config to a model, and weights from safetensors into it."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from forgather_cli.config.schema import DecoderSettings, ModelOption, PretrainedSettings, Target
from forgather_cli.errors import ModelError
from forgather_cli.models.decoder import Decoder, resolve_decoder
from forgather_cli.models.pretrained import read_settings
from forgather_cli.sharding import held_rows, local
from forgather_cli.targets import import_target

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "by its config.json; mend config.json or save the model again"


def build_model(option: ModelOption, *, vocab_size: int, seq_len: int) -> nn.Module:
    """The whole model on the device that is current (meta too), without loaded weights.

    ``vocab_size`` is the tokenizer's and ``seq_len`` the data's, in tokens; a ``_target_`` gets them if its signature
    names them and its arguments do not. Raises ModelError.
    """
    if isinstance(option, DecoderSettings):
        return Decoder(resolve_decoder(option, vocab_size=vocab_size, seq_len=seq_len))
    if isinstance(option, PretrainedSettings):
        return Decoder(resolve_decoder(read_settings(option.path), vocab_size=vocab_size, seq_len=seq_len))
    return _from_target(option, vocab_size=vocab_size, seq_len=seq_len)


def _from_target(target: Target, **sizes: int) -> nn.Module:
    factory = import_target(target.path, "model")
    wanted = inspect.signature(factory).parameters
    sizes = {key: value for key, value in sizes.items() if key in wanted and key not in target.kwargs}
    model = factory(**sizes, **target.kwargs)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model._target_: {target.path} must return an nn.Module, got {type(model).__name__}")
    return model


@torch.no_grad()
def load_pretrained(module: nn.Module, path: str | Path) -> None:
    """Copy the weights of a Hugging Face directory into a decoder or a part of one, by name, in the module's dtype.

    The directory must hold exactly the tensors of the whole model; one tensor at a time is in memory, of a sharded one
    the rows this rank holds. Raises ModelError with the missing, extra or wrong-shaped tensors.
    """
    directory = Path(path)
    files = _tensor_files(directory)
    settings = read_settings(directory)
    names = _names_in_files(directory, settings, files)
    targets = {n: t for n, t in module.state_dict(keep_vars=True).items() if n in names}
    by_file: dict[Path, list[str]] = {}
    for name in targets:
        by_file.setdefault(files[names[name]], []).append(name)
    for file, wanted in by_file.items():
        with _opened(file) as tensors:
            for name in wanted:
                rows = _shaped(tensors.get_slice(names[name]), name, targets[name], directory)
                local(targets[name]).copy_(rows)


def _names_in_files(directory: Path, settings: DecoderSettings, files: dict[str, Path]) -> dict[str, str]:
    """Parameter name -> the name it has in the files. Raises ModelError for missing and extra tensors."""
    with torch.device("meta"):
        whole = Decoder(settings)
    names = {name: name for name, _ in whole.named_parameters()}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    ignored: set[str] = set()
    if settings.tie_word_embeddings:
        ignored = {head}
        names[embedding] = embedding if embedding in files else head
    missing = sorted(name for name, stored in names.items() if stored not in files)
    # old Llama exports carry the rotary frequencies, which follow from config.json
    extra = sorted(f for f in files if f not in {*names.values(), *ignored} and not f.endswith("rotary_emb.inv_freq"))
    if missing:
        raise ModelError(f"model.path: {directory} lacks {_some(missing)}, {_REMEDY}")
    if extra:
        raise ModelError(f"model.path: {directory} has {_some(extra)} too many, {_REMEDY}")
    return names


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} ({shown}{', ...' if len(names) > 5 else ''})"


def _shaped(stored: Any, name: str, target: Tensor, directory: Path) -> Tensor:
    """The rows of ``stored``, a slice of a file, that ``target`` holds. Raises ModelError for another shape."""
    shape = tuple(stored.get_shape())
    if shape != target.shape:
        raise ModelError(
            f"model.path: {name} in {directory} has shape {shape}, expected {tuple(target.shape)} {_REMEDY}"
        )
    start, stop = held_rows(target)
    rows: Tensor = stored[start:stop]
    return rows


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"model.path: no such directory: {directory}")
    single, index = directory / _WEIGHTS, directory / _INDEX
    if single.is_file():
        with _opened(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    if not index.is_file():
        raise ModelError(
            f"model.path: {directory} has neither {_WEIGHTS} nor {_INDEX}; "
            f"other formats are not read: save the model again with safetensors"
        )
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(f"model.path: cannot read {index}: {type(error).__name__}: {error}") from error
    found: dict[str, Path] = {}
    for shard in sorted(set(weight_map.values())):
        with _opened(directory / shard) as tensors:
            found.update(dict.fromkeys(tensors.keys(), directory / shard))
    return found


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A safetensors file; damage and absence become ModelError."""
    try:
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.path: cannot read {path}: {error}") from error
    with file as tensors:
        yield tensors
