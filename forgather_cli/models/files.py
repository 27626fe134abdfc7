"""The safetensors files of a Hugging Face directory, read tensor by tensor and row by row."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from forgather_cli.documents.regular_files import open_file, read_weight_map
from forgather_cli.errors import ModelError
from forgather_cli.models.resize import NOISE, rows_like
from forgather_cli.shards import box_of, local

_log = logging.getLogger(__name__)

_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
_FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
_BLOCK_ROWS = 4096
_PORTION_BYTES = 1 << 27


def tensor_files(directory: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it. Raises ModelError."""
    if not directory.is_dir():
        raise ModelError(f"model.path: no such directory: {directory}")
    single, index = directory / _WEIGHTS, directory / _INDEX
    if single.exists():
        with opened(single) as tensors:
            return dict.fromkeys(tensors.keys(), single)
    if not index.exists():
        if pickles := [name for name in _PICKLES if (directory / name).is_file()]:
            raise ModelError(
                f"model.path: {directory} has only {pickles[0]}, a pickle, which can run code when it is read; where "
                "you trust it, convert it with transformers: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
            )
        raise ModelError(
            f"model.path: {directory} has neither {_WEIGHTS} nor {_INDEX}; other formats are not read: save the model "
            "again with safetensors"
        )
    found: dict[str, Path] = {}
    for shard in sorted(set(read_weight_map(index, lambda why: ModelError(f"model.path: {why}")).values())):
        with opened(shard) as tensors:
            found.update(dict.fromkeys(tensors.keys(), shard))
    return found


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file; damage and absence become ModelError."""
    try:
        open_file(path).close()  # the library waits at a pipe
        file = safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"model.path: cannot read {path}: {error}") from error
    with file as tensors:
        yield tensors


def whole_tensor(file: Path, name: str) -> Tensor:
    with opened(file) as tensors:
        return tensors.get_tensor(name)  # type: ignore[no-any-return]


@torch.no_grad()
def read_rows(
    targets: Mapping[str, Tensor],
    stored: Mapping[str, str],
    files: Mapping[str, Path],
    *,
    vocab_size: int | None = None,
    known: Mapping[str, int] | None = None,
    noise: float = NOISE,
    seed: int = 0,
    remedy: str,
) -> None:
    """Copy into each target the rows of it that this rank holds, one tensor at a time, in the target's dtype.

    ``stored``: parameter name -> its name in ``files``. A target may have more rows than the ``vocab_size`` that the
    file has of it: they become rows for new tokens, by (seed, name) and with ``noise``; so do those behind the first
    ``known[name]``, whatever the file has there. Raises ModelError for other shapes.
    """
    for file, wanted in _portions(targets, {name: files[stored[name]] for name in targets}):
        with opened(file) as tensors:
            for name in wanted:
                source, target = tensors.get_slice(stored[name]), targets[name]
                shape = tuple(source.get_shape())
                grown = False  # a vocabulary tensor with more rows than its file
                if shape and shape[0] == vocab_size and shape[1:] == target.shape[1:]:
                    old = min(shape[0], (known or {}).get(name, shape[0]))
                    grown = target.shape[0] > old
                if shape != target.shape and not grown:
                    raise ModelError(
                        f"model.path: {name} in {file.parent} has shape {shape}, expected {tuple(target.shape)} "
                        f"{remedy}"
                    )
                if target.is_floating_point() and source.get_dtype() not in _FLOATS:
                    raise ModelError(
                        f"model.path: {name} in {file} holds {source.get_dtype()} where weights are expected; save the "
                        "model again"
                    )
                if grown:
                    _read_grown(target, source, old, name=name, seed=seed, noise=noise)
                else:
                    _copy_box(target, source, file, stored[name])


def _copy_box(target: Tensor, source: Any, file: Path, name: str) -> None:
    """Copy this rank's part of ``source``, the tensor ``name``: of a large one some rows at a time (``_portions``)."""
    held, slices = local(target), box_of(target).slices
    if held.nbytes <= _PORTION_BYTES:
        held.copy_(source[slices])
        return
    rows = max(len(held) * _PORTION_BYTES // held.nbytes, 1)
    for first in range(0, len(held), rows):
        block = held[first : first + rows]
        begin = slices[0].start + first
        with opened(file) as tensors:
            block.copy_(tensors.get_slice(name)[(slice(begin, begin + len(block)), *slices[1:])])


def _portions(targets: Mapping[str, Tensor], files: Mapping[str, Path]) -> Iterator[tuple[Path, list[str]]]:
    """(file, some of its tensors) until all are named.

    A file is opened anew for each portion: it is mapped (safetensors 0.8), and every page that was read counts as this
    process's memory until it is closed, the size of the whole model otherwise.
    """
    by_file: dict[Path, list[str]] = {}
    for name, file in files.items():
        by_file.setdefault(file, []).append(name)
    for file, names in by_file.items():
        portion: list[str] = []
        size = 0
        for name in names:
            portion.append(name)
            size += local(targets[name]).nbytes
            if size > _PORTION_BYTES:
                yield file, portion
                portion, size = [], 0
        if portion:
            yield file, portion


def _read_grown(target: Tensor, source: Any, old: int, *, name: str, seed: int, noise: float) -> None:
    """Fill this rank's rows of a grown tensor: the first ``old`` from the file, then new ones.

    A rank that holds new rows reads through the whole file's tensor, some thousand rows at a time, for their mean.
    """
    held, box = local(target), box_of(target)
    (start, stop), columns = box.rows, box.slices[1:]
    if start < old:
        held[: min(stop, old) - start].copy_(source[(slice(start, min(stop, old)), *columns)])
    if stop > old:
        blocks = (source[first : min(first + _BLOCK_ROWS, old)] for first in range(0, old, _BLOCK_ROWS))
        # all of them, of which this rank takes its own: draws depend on how many there are
        new = rows_like(blocks, target.shape[0] - old, name=name, seed=seed, noise=noise)
        first = max(start, old)
        held[first - start :].copy_(new[(slice(first - old, stop - old), *columns)])
        _log.info("%s has %d new rows after %d", name, len(new), old)
