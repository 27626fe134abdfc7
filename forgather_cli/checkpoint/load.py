"""Reading checkpoints: find the newest or the best good one, verify it, read its tensors, restore components."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from forgather_cli.checkpoint.choice import candidates, choose
from forgather_cli.checkpoint.components import Component, Sharing, rank_file, shared_file
from forgather_cli.checkpoint.files import Range
from forgather_cli.checkpoint.manifest import (
    BestBy,
    DamagedError,
    FileEntry,
    Level,
    Manifest,
    NewerFormatError,
    damaged,
    read_manifest,
)
from forgather_cli.checkpoint.tensors import TensorReader, dtype_of
from forgather_cli.distributed import gather, on_rank_0, rank_in
from forgather_cli.documents.encoding import decode
from forgather_cli.documents.fields import ANYTHING, TEXT, FieldError, check_fields, object_of, optional
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import CheckpointError
from forgather_cli.run_dir import RunDir, step_of
from forgather_cli.shards import Box
from forgather_cli.terminal.bars import Bar

log = logging.getLogger(__name__)
Kind = Literal["model", "optimizer"]
ADAPTER, ADAPTER_PREFIX = "adapter_model", "base_model.model."
"""The stem of the file of an adapter in ``model/``, where checkpoints hold one, and what PEFT puts before its tensors'
names (peft 0.21)."""


class Reader:
    """One checkpoint, open for reading. Opening reads the manifest only, unless it is given.

    Raises CheckpointError: no checkpoint, not one of ours, damaged, of a newer format, or asked for what it lacks.
    """

    def __init__(self, path: Path, manifest: Manifest | None = None) -> None:
        self.path = Path(path)
        self.manifest = manifest or read_manifest(self.path)
        self._tensors: dict[Kind, dict[str, tuple[TensorReader, str]]] = {}
        self._documents: dict[str, dict[str, Any]] = {}
        self._state_tensors: dict[str, TensorReader] = {}

    @property
    def step(self) -> int:
        return self.manifest.step

    def verify(self, level: Level = "full", group: Any = None) -> None:
        """Collective in ``group``, whose ranks share the reading. Raise DamagedError, naming every damaged file, unless
        all files are as they were written.
        """
        problems = find_problems(self.path, self.manifest, level, group)
        if problems:
            raise damaged(self.path, problems)

    # -------------------------------------------------------------------------------------------------------- tensors

    def model_names(self) -> list[str]:
        """Names of the weights, sorted."""
        return sorted(self._files("model"))

    def optimizer_names(self) -> list[str]:
        """Names of the optimizer's tensors, ``<parameter>.<state>``, sorted."""
        return sorted(self._files("optimizer"))

    def shape(self, name: str, kind: Kind = "model") -> tuple[int, ...]:
        """Full shape of a tensor."""
        reader, stored = self._file_of(name, kind)
        return reader.specs[stored].shape

    def dtype(self, name: str, kind: Kind = "model") -> torch.dtype:
        """Of a tensor as it is stored."""
        reader, stored = self._file_of(name, kind)
        return dtype_of(reader.specs[stored])

    def read(self, name: str, kind: Kind = "model", start: int = 0, stop: int | None = None) -> Tensor:
        """Rows [start, stop) of a tensor, in host memory of its own."""
        reader, stored = self._file_of(name, kind)
        return reader.read(stored, start, stop)

    def read_box(self, name: str, kind: Kind, box: Box) -> Tensor:
        """A box of a tensor, in host memory of its own; its rows are read whole."""
        rows = self.read(name, kind, *box.rows)
        part = rows[(slice(None), *box.slices[1:])] if box.sizes else rows
        return part if part.shape == rows.shape else part.clone()

    def _file_of(self, name: str, kind: Kind) -> tuple[TensorReader, str]:
        files = self._files(kind)
        if name not in files:
            raise CheckpointError(f"{self.path}: has no {kind} tensor {name}")
        return files[name]

    def _files(self, kind: Kind) -> dict[str, tuple[TensorReader, str]]:
        """Tensor name -> the file that has it, and its name there."""
        if kind not in self._tensors:
            stems = (f"{kind}/{kind}", f"{kind}/{ADAPTER}")
            names = [name for name in self.manifest.files if name.startswith(stems) and name.endswith(".safetensors")]
            readers = [TensorReader(self.path / name) for name in names]
            self._tensors[kind] = {
                stored.removeprefix(ADAPTER_PREFIX): (reader, stored) for reader in readers for stored in reader.specs
            }
        return self._tensors[kind]

    # ----------------------------------------------------------------------------------------------------- components

    def components(self) -> list[str]:
        """Keys of the components in this checkpoint."""
        return list(self.manifest.components)

    def has(self, component: Component) -> bool:
        """True if ``component`` can be restored; if not, a warning says that it starts fresh.

        Raises CheckpointError where a required one is missing.
        """
        if component.key in self.manifest.components:
            return True
        if component.required:
            raise CheckpointError(f"{self.path}: has no {component.key}, without which a run cannot be resumed")
        log.warning("%s: has no state of %s, which starts fresh", self.path, component.key)
        return False

    def state(self, key: str, rank: int = 0, group: str = "") -> Any:
        """The state of a component: as ``rank`` saved it where ranks differ, that of ``group`` where groups do.

        Raises CheckpointError.
        """
        if key not in self.manifest.components:
            raise CheckpointError(f"{self.path}: has no component {key}; it has {', '.join(self.components())}")
        stem = self._stem(key, rank, group)
        document = self._document(stem)
        if key not in document:
            raise self._damaged(f"{self.path / stem}.json: is damaged: {key} is missing")

        def tensor(name: str) -> Tensor:
            if stem not in self._state_tensors:
                self._state_tensors[stem] = TensorReader(self.path / f"{stem}.safetensors")
            return self._state_tensors[stem].read(name)

        with self.loading(f"{stem}.json", key):
            return decode(document[key], tensor)

    @contextmanager
    def loading(self, file: str, key: str) -> Iterator[None]:
        """Inside, something is made of a component's state in ``file``; what fails raises CheckpointError with both."""
        try:
            yield
        except FieldError as error:
            raise self._damaged(f"{self.path / file}: is damaged: {key}: {error}") from error
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError, ArithmeticError) as error:
            raise CheckpointError(
                f"{self.path / file}: the state of {key} does not fit this run ({type(error).__name__}: {error}); "
                "leave it out of resume_components if it may start fresh"
            ) from error

    def identity(self) -> dict[str, Any]:
        """What the checkpoint was made with: ``config`` and ``data``, each an object or None, and of an adapter
        ``base``, the model that it is for; empty where it does not say. Raises CheckpointError.
        """
        if "identity" not in self.manifest.components:
            return {}
        found: dict[str, Any] = self.state("identity")
        with self.loading(self.file_of("identity"), "identity"):
            check_fields(
                {"base": None, **found}, dict.fromkeys(("config", "data", "base"), optional(object_of(ANYTHING)))
            )
            check_fields({"fingerprint": "", **(found["data"] or {})}, {"fingerprint": optional(TEXT)}, "data")
        return found

    def file_of(self, key: str, rank: int = 0, group: str = "") -> str:
        """The name of the file that has the state of a component."""
        return f"{self._stem(key, rank, group)}.json"

    def _stem(self, key: str, rank: int, group: str) -> str:
        sharing, world_size = self._sharing(key), self.manifest.world_size
        if sharing.is_shared:
            return shared_file()
        if sharing.is_grouped:
            holders = self.manifest.holders.get(key, {})
            if group not in holders:
                raise CheckpointError(f"{self.path}: has {key} of {', '.join(holders)}, {group!r} was asked for")
            return rank_file(holders[group])
        if rank >= world_size:
            raise CheckpointError(f"{self.path}: has {key} of {world_size} ranks only, rank {rank} was asked for")
        return rank_file(rank)

    def fits(self, component: Component, world_size: int) -> bool:
        """True if the state of ``component`` belongs to a rank of a job of ``world_size``: that of all ranks always, a
        rank's own in a job as large as the one that saved it, a group's where a group of that name had one.
        """
        saved = self._sharing(component.key)
        if saved.is_grouped:
            return component.sharing.is_grouped and component.group in self.manifest.holders.get(component.key, {})
        return saved.is_shared or world_size == self.manifest.world_size

    def _sharing(self, key: str) -> Sharing:
        try:
            return Sharing(self.manifest.components[key])
        except ValueError as error:
            raise DamagedError(f"{self.path}: manifest.json is damaged ({key}: {error})") from error

    def _document(self, stem: str) -> dict[str, Any]:
        if stem not in self._documents:
            path = self.path / f"{stem}.json"
            components = read_json_object(path, self._damaged, limit=None).get("components")
            if not isinstance(components, dict):
                raise self._damaged(f"{path}: is damaged: components must be an object, got {components!r:.80}")
            self._documents[stem] = components
        return self._documents[stem]

    def _damaged(self, why: str) -> DamagedError:
        return DamagedError(f"{why}; {instead_of(self.path)}")


def open_whole(path: Path, remedy: str | None = None) -> Reader:
    """The checkpoint at ``path``, every byte of it verified.

    Raises CheckpointError; for a damaged one with what to do: the ``remedy``, or which one to use.
    """
    try:
        reader = Reader(path)
        reader.verify()
    except DamagedError as error:
        raise CheckpointError(f"{error}; {remedy or instead_of(path)}") from error
    return reader


def instead_of(path: Path, own: RunDir | None = None) -> str:
    """What to do where the checkpoint at ``path`` cannot be used: the newest other one of its run that is healthy and
    whole, for which this rank reads every byte of it, or that there is none. Where none is at ``path``, those that are
    there, or that the run ``own`` has.
    """
    place = path.absolute()
    if not path.exists() or RunDir(path).checkpoints.is_dir():
        for run in (path, path.parent.parent, path.parent, *([] if own is None else [own.root])):
            if steps := RunDir(run).checkpoint_steps():
                names = [str(RunDir(run).checkpoint(step)) for step in steps]
                return f"{run} has {', '.join(names[-5:])}" + (", and earlier ones" if len(names) > 5 else "")
    if step_of(place) is None or place.parent.name != "checkpoints":
        return "name another checkpoint, RUN/checkpoints/step-..."
    with suppress(CheckpointError):
        own = RunDir(place.parents[1])
        others = [each for each in candidates(own) if each.healthy and each.path.name != place.name]
        if (other := choose(own, Manifest.problems, others)) is not None:
            return f"use {path.parent / other.path.name}, the newest other one that is healthy and whole"
    return "its run has no other checkpoint that is healthy and whole: start afresh"


def named(path: Path, verify: Level = "full", group: Any = None, own: RunDir | None = None) -> Reader:
    """Collective in ``group``. The checkpoint that ``resume_from_checkpoint`` names, verified by all ranks together.
    ``own``: the run that would go on from it.

    Raises CheckpointError on all ranks alike.
    """
    try:
        reader = Reader(path, on_rank_0(lambda: read_manifest(path), group))
        reader.verify(verify, group)
    except NewerFormatError as error:
        raise CheckpointError(f"resume_from_checkpoint: {error}") from error
    except CheckpointError as error:
        raise CheckpointError(
            f"resume_from_checkpoint: {error}; {on_rank_0(lambda: instead_of(path, own), group)}"
        ) from error
    return reader


def newest_valid(run: RunDir, verify: Level = "full", group: Any = None) -> Reader | None:
    """Collective in ``group``. The run's newest whole checkpoint, a healthy one if there is any; None if the run has
    none at all. All ranks verify it together and get the same one. What the run has gone back from does not count.

    Every damaged one on the way is a warning of rank 0 with file and reason. Raises CheckpointError on all ranks, as
    ``choose`` does.
    """
    found = on_rank_0(lambda: candidates(run), group)
    chosen = choose(run, lambda manifest, path: find_problems(path, manifest, verify, group), found)
    for why in chosen.why if chosen is not None and rank_in(group) == 0 else ():
        log.warning("%s", why)
    return None if chosen is None else Reader(chosen.path, chosen.manifest)


def best_valid(run: RunDir, best_by: BestBy | None = None, verify: Level = "full", group: Any = None) -> Reader | None:
    """Collective in ``group``. The run's best checkpoint of those that are healthy and whole, the earliest of equals;
    None if no such one has the metric. ``best_by`` None: as the newest healthy one has it.

    Every damaged one on the way is a warning of rank 0. Raises CheckpointError, as ``healthy_ones`` does.
    """
    healthy = healthy_ones(run, group)
    rule = best_by or next((r.manifest.best_by for r in healthy if r.manifest.best_by is not None), None)
    if rule is None:
        return None
    scored = [(cost, r.step, r) for r in healthy if (cost := rule.cost(r.manifest.metrics)) is not None]
    best_first = [reader for *_, reader in sorted(scored, key=lambda item: item[:2])]
    return next(whole_ones(best_first, verify, group), None)


def healthy_ones(run: RunDir, group: Any = None) -> list[Reader]:
    """Collective in ``group``. The run's healthy checkpoints, newest first, not verified; one whose manifest is damaged
    is a warning of rank 0, as is an older one of a newer format. Raises CheckpointError where none is newer than that.
    """
    found = on_rank_0(lambda: candidates(run), group)
    healthy = [Reader(each.path, each.manifest) for each in found if each.healthy]
    for each in found:
        if isinstance(each.error, NewerFormatError) and (not healthy or healthy[0].step < each.step):
            raise each.error
        if each.error is not None:
            _left_out(each.error, group)
    return healthy


def whole_ones(readers: Iterable[Reader], verify: Level = "full", group: Any = None) -> Iterator[Reader]:
    """Collective in ``group``, each step of it. Those that are whole; a damaged one is a warning of rank 0."""
    for reader in readers:
        try:
            reader.verify(verify, group)
        except DamagedError as error:
            _left_out(error, group)
        else:
            yield reader


def _left_out(problem: object, group: Any) -> None:
    if rank_in(group) == 0:
        log.warning("%s; it is left out", problem)


def find_problems(path: Path, manifest: Manifest, level: Level, group: Any = None) -> list[str]:
    """Collective. ``file: what is wrong`` for every damaged file of the checkpoint at ``path``, equal on all ranks."""
    if group is None or level == "none":
        return manifest.problems(path, level)
    import torch.distributed as dist

    mine = share_out(manifest.files, dist.get_world_size(group))[rank_in(group)]
    size, is_first = sum(stop - start for ranges in mine.values() for start, stop, _ in ranges), rank_in(group) == 0
    with Bar(f"verifying {path.name}", "bytes", total=size, shown=is_first) as bar:
        found = {name: manifest.problem(path, name, level, bar.add, part) for name, part in mine.items()}
    told: dict[str, str] = {}
    for rank, problems in enumerate(gather({name: found[name] for name in found if found[name]}, group)):
        for name, problem in problems.items():
            told.setdefault(name, f"{name} {problem} (found by rank {rank})")
    return [told[name] for name in manifest.files if name in told]


def share_out(files: dict[str, FileEntry], num_ranks: int) -> list[dict[str, list[Range]]]:
    """By rank, the ranges of each file that it reads, so that all read about the same number of bytes."""
    shares: list[dict[str, list[Range]]] = [{} for _ in range(num_ranks)]
    load = [0] * num_ranks
    ranges = [(name, r) for name, entry in files.items() for r in entry.ranges]
    for name, (start, stop, sha256) in sorted(ranges, key=lambda item: item[1][0] - item[1][1]):
        rank = load.index(min(load))
        shares[rank].setdefault(name, []).append((start, stop, sha256))
        load[rank] += stop - start
    for name, entry in files.items():
        if not entry.ranges:
            shares[0][name] = []
    return shares


def restore_components(
    reader: Reader,
    components: Iterable[Component],
    *,
    rank: int = 0,
    world_size: int | None = None,
    only: Collection[str] | None = None,
    foreign: int = logging.INFO,
) -> list[str]:
    """Load what the checkpoint has of ``components``; with ``only``, of those with these keys.

    ``world_size``: of this job, None for that of the checkpoint's, 0 if ranks hold other parts of the model. Returns
    the keys that start fresh: because the checkpoint lacks them, each with a warning, or because ranks' or groups' own
    states belong to another layout, which is one line at the level ``foreign``. Raises CheckpointError if a required
    one starts fresh, and names the component whose state does not fit.
    """
    fresh: list[str] = []
    elsewhere: list[str] = []
    saved = reader.manifest.world_size
    size = saved if world_size is None else world_size
    for component in components:
        key = component.key
        if only is not None and key not in only:
            continue
        if not reader.has(component):
            fresh.append(key)
            continue
        if not reader.fits(component, size):
            if component.required:
                raise CheckpointError(
                    f"{reader.path}: {key} was saved by each of {saved} ranks for itself, without which a run of "
                    f"{size} cannot resume it; resume with {saved} ranks"
                )
            elsewhere.append(key)
            continue
        group = component.group if component.sharing.is_grouped else ""
        state = reader.state(key, rank, group)
        with reader.loading(reader.file_of(key, rank, group), key):
            component.object.load_state_dict(state)
    if elsewhere:
        log.log(
            foreign,
            "%s: each rank has its own %s, which starts fresh, since the ranks are others (then %d, now %s)",
            reader.path, " and ".join(elsewhere), saved, size or "with other settings of trainer",
        )  # fmt: skip
    return fresh + elsewhere
