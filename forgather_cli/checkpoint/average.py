"""The mean of several models' weights, tensor by tensor: memory does not grow with their number.

Averaging the last checkpoints of a run with a high learning rate lowers the loss much as a decay would: Izmailov et al.
2018, arXiv:1803.05407; Sanyal et al. 2023, arXiv:2306.03241.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import forgather_cli
from forgather_cli.checkpoint.files import check_absent, new_directory
from forgather_cli.checkpoint.load import Reader, healthy_ones, open_whole, whole_ones
from forgather_cli.checkpoint.sources import check_sources, is_checkpoint, model_directory
from forgather_cli.checkpoint.tensors import Weights, dtype_of, write_weights
from forgather_cli.documents.regular_files import read_bytes, read_json_object
from forgather_cli.errors import CheckpointError, SetupError
from forgather_cli.run_dir import RunDir, is_adapter_directory, run_of
from forgather_cli.shards import not_finite

log = logging.getLogger(__name__)

Check = Callable[[], None]

PROVENANCE = "provenance.json"
"""The file of an average that says what it is the mean of."""
_BLOCK_NUMBERS = 1 << 22
_NOT_COMPARED = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
_WEIGHTS = (".safetensors", ".safetensors.index.json")
_OF_ONE = (PROVENANCE, "README.md", "finalize_report.json")  # files that say how one model was made


@dataclass(frozen=True)
class Member:
    """One of the models that are averaged."""

    path: Path
    """As it was named."""
    directory: Path
    """Where its model files are."""
    weights: Weights
    reader: Reader | None
    """None for a model directory."""

    def description(self) -> dict[str, Any]:
        """For the provenance."""
        if self.reader is None:
            return {"path": str(self.path.resolve())}
        run, manifest = run_of(self.path), self.reader.manifest
        return {
            "path": str(self.path.resolve()),
            "step": self.reader.step,
            "run": None if run is None else str(run.root),
            "saved": manifest.created,
            "metrics": dict(manifest.metrics),
        }


def average_models(sources: Sequence[Path], out: Path, *, verified: bool = False, check: Check = lambda: None) -> None:
    """Write the mean of checkpoints (or model directories) as the model directory ``out``, which must not exist.

    Sums are made in fp32 (fp64 for fp64), results have the sources' dtype; what is not a floating number is that of the
    last source. Config and tokenizer are the last one's; ``provenance.json`` names all. Every byte of a checkpoint is
    verified first, unless it is ``verified``. ``check()`` is called between blocks of rows. Raises ConfigError for less
    than two sources or one that is named twice, CheckpointError where they differ in tensors, config or tokenizer,
    SetupError where ``out`` exists or cannot be written.
    """
    check_absent(out)
    check_sources(sources)
    members = [_opened(source, verified) for source in sources]
    for other in members[1:]:
        if (problem := next(_differences(members[0], other), None)) is not None:  # their mean would mean nothing
            raise CheckpointError(f"{other.path}: cannot be averaged with {members[0].path}: {problem}")
    mean = _Mean(members, check)
    specs = members[-1].weights.specs()
    with new_directory(out, sum(spec.num_bytes for spec in specs.values())) as directory:
        for path in sorted(members[-1].directory.iterdir()):  # config, tokenizer and what else is not weights
            if path.is_dir():
                shutil.copytree(path, directory / path.name)
            elif not path.name.endswith(_WEIGHTS) and path.name not in _OF_ONE:
                shutil.copyfile(path, directory / path.name)
        write_weights(directory, specs.values(), mean)
        document = {
            "kind": "average",
            "method": "mean in fp32, in the sources' dtype",
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "forgather": forgather_cli.__version__,
            "torch": torch.__version__,
            "sources": [member.description() for member in members],
        }
        (directory / PROVENANCE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def last_checkpoints(run: RunDir, count: int) -> list[Path]:
    """The run's newest ``count`` healthy whole checkpoints, every byte read, oldest first; fewer where it has fewer.

    A damaged one is left out with a warning.
    """
    newest_first = itertools.islice(whole_ones(healthy_ones(run)), count)
    return [reader.path for reader in newest_first][::-1]


def enough_of(run: RunDir, found: list[Path], wanted: int, setting: str, say: Callable[[str], None]) -> None:
    """Say that fewer checkpoints are kept than were asked for. Raises SetupError for fewer than two."""
    if len(found) < 2:
        raise SetupError(
            f"{setting}: {run.root} has {len(found)} healthy checkpoint{'s' * (len(found) != 1)}, an average needs 2 "
            "or more; keep more with save_total_limit"
        )
    if len(found) < wanted:
        say(f"{run.root} keeps {len(found)} healthy checkpoints (save_total_limit), {wanted} were asked for")


def average_run(run: RunDir, count: int, check: Check) -> None:
    """Write the mean of a run's last ``count`` checkpoints beside the last one, unless it is there. Fewer than that, or
    than two, are a warning. ``check()`` is called now and then; raises as it does, and as ``average_models``.
    """
    out = run.average(run.checkpoint_steps()[-1], count)
    if out.is_dir():
        return
    members = last_checkpoints(run, count)
    if len(members) < 2:
        log.warning("average_last: the run has %d whole checkpoint, so there is nothing to average", len(members))
        return
    enough_of(run, members, count, "average_last", lambda text: log.warning("average_last: %s", text))
    average_models(members, out, verified=True, check=check)


def _opened(source: Path, verified: bool) -> Member:
    reader, directory = None, model_directory(source)
    if is_checkpoint(source):
        reader = Reader(source) if verified else open_whole(source, "leave it out, or use --last K RUN for whole ones")
    if is_adapter_directory(directory):
        raise CheckpointError(
            f"{source}: is an adapter, and the mean of products is no product of means; merge each with forgather "
            "finalize --merge, and average what comes out"
        )
    return Member(source, directory, Weights(directory), reader)


# ------------------------------------------------------------------------------------------------------- comparisons


def _differences(first: Member, other: Member) -> Iterator[str]:
    before, now = first.weights.specs(), other.weights.specs()
    for name in sorted(before.keys() - now.keys()):
        yield f"it has no tensor {name}"
    for name in sorted(now.keys() - before.keys()):
        yield f"it has a tensor {name} that the other lacks"
    for name, spec in now.items():
        if spec.shape != before[name].shape:
            yield f"{name} has shape {list(spec.shape)} here, {list(before[name].shape)} there"
        if spec.dtype != before[name].dtype:
            yield f"{name} is {spec.dtype} here, {before[name].dtype} there"
    files = [member.directory / "config.json" for member in (first, other)]
    theirs, ours = (read_json_object(file, CheckpointError) if file.exists() else {} for file in files)
    for key in sorted(theirs.keys() | ours.keys()):
        if key not in _NOT_COMPARED and theirs.get(key) != ours.get(key):
            yield f"config.json has {key}={ours.get(key)!r} here, {theirs.get(key)!r} there"
    files = [member.directory / "tokenizer.json" for member in (first, other)]
    contents = [read_bytes(file) if file.exists() else None for file in files]
    if contents[0] != contents[1]:
        yield "its tokenizer is another one (tokenizer.json differs)"


# ------------------------------------------------------------------------------------------------------------ writing


class _Mean:
    """Means by name, made when they are asked for. Memory: the mean, and two blocks of rows in fp32."""

    def __init__(self, members: Sequence[Member], check: Check) -> None:
        self._members, self._check = members, check

    def __getitem__(self, name: str) -> Tensor:
        spec = self._members[-1].weights.spec(name)
        dtype = dtype_of(spec)
        if not dtype.is_floating_point or not spec.shape:
            return self._rows(name, dtype, 0, 1)
        mean = torch.empty(spec.shape, dtype=dtype)
        step = max(1, _BLOCK_NUMBERS // max(1, spec.num_elements // max(1, spec.num_rows)))
        for start in range(0, spec.num_rows, step):
            stop = min(start + step, spec.num_rows)
            mean[start:stop] = self._rows(name, dtype, start, stop)
        return mean

    def _rows(self, name: str, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        self._check()
        if not dtype.is_floating_point:
            return self._members[-1].weights.read(name)
        wide = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=wide)
        for member in self._members:
            rows = member.weights.read(name, start, stop)
            if member.reader is None and not_finite({name: rows}):  # a checkpoint has been looked through
                raise CheckpointError(f"{member.path}: {name} holds values that are not finite; leave the model out")
            total = total + rows.to(wide)
        return (total / len(self._members)).to(dtype)
