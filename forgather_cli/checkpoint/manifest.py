"""manifest.json: what a checkpoint is, and how to tell that it is whole. No torch here."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from forgather_cli.checkpoint.files import Range, hash_range
from forgather_cli.checkpoint.format import FiniteScan
from forgather_cli.documents.fields import (
    ANYTHING,
    COUNT,
    FLAG,
    NUMBER,
    TEXT,
    FieldKind,
    check_fields,
    list_of,
    object_of,
    optional,
    several,
)
from forgather_cli.documents.messages import sent
from forgather_cli.documents.regular_files import file_inside, read_json
from forgather_cli.errors import CheckpointError
from forgather_cli.terminal.bars import Bar

NAME = "manifest.json"
FORMAT = "forgather-checkpoint"
FORMAT_VERSION = 1

Level = Literal["full", "size", "none"]
"""How much is verified: every byte by its hash, sizes only, or nothing."""


class NewerFormatError(CheckpointError):
    """A checkpoint of a Forgather newer than this one: nothing is wrong with it."""


class DamagedError(CheckpointError):
    """A checkpoint that is not as it was written."""


def damaged(path: Path, problems: Iterable[str]) -> DamagedError:
    """The error for the checkpoint at ``path``, naming every damaged file."""
    return DamagedError(f"{path}: is damaged: {'; '.join(problems)}")


@sent
@dataclass(frozen=True)
class FileEntry:
    """Size in bytes and hashed ranges of one file; the ranges are the whole file."""

    size: int
    ranges: tuple[Range, ...]

    def __post_init__(self) -> None:
        """Raise ValueError unless the ranges, ascending, are the whole file."""
        stops = [0, *(stop for _, stop, _ in self.ranges)]
        if [start for start, _, _ in self.ranges] != stops[:-1] or stops[-1] != self.size:
            raise ValueError("hashed ranges are not the whole file")

    def problem(
        self,
        path: Path,
        level: Level,
        on_bytes: Callable[[int], None],
        ranges: Sequence[Range] | None = None,
        unchecked: Iterable[str] | None = None,
    ) -> str | None:
        """What is wrong with the file at ``path``, None if nothing is. Reads the file at level full: all of it, or
        ``ranges``; ``on_bytes``: see ``hash_range``. ``unchecked``: the file holds tensors, of which all but these must
        be finite.
        """
        scan, strange = None, None
        try:
            size = path.stat().st_size
            if size != self.size:
                return f"has {size} bytes instead of {self.size}"
            if level != "full":
                return None
            if unchecked is not None:
                try:
                    scan = FiniteScan(path, unchecked)
                except CheckpointError as error:  # of other content, mostly
                    strange = str(error).removeprefix(f"{path}: ")
            look = [] if scan is None else [scan.look]
            if any(hash_range(path, a, b, on_bytes, *look) != sha256 for a, b, sha256 in ranges or self.ranges):
                return "has other content than was written (SHA-256 differs)"
            if scan is not None and scan.found:
                first, *more = scan.found
                return f"holds values that are not finite, in {first}" + f" and {len(more)} more" * bool(more)
            return strange
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error.strerror})"


@sent
@dataclass(frozen=True)
class BestBy:
    """The metric that tells the best checkpoint."""

    metric: str
    greater_is_better: bool

    def value(self, metrics: dict[str, float]) -> float | None:
        """The metric, with or without Hugging Face's ``eval_`` in front; None if it is missing or not finite."""
        value = metrics.get(self.metric, metrics.get(f"eval_{self.metric}"))
        return value if value is not None and math.isfinite(value) else None

    def cost(self, metrics: dict[str, float]) -> float | None:
        """The value with the sign by which the best one has the least."""
        value = self.value(metrics)
        return -value if value is not None and self.greater_is_better else value


@sent
@dataclass(frozen=True)
class Manifest:
    """Everything in manifest.json. Paths are relative to the checkpoint, with ``/``."""

    step: int
    strategy: str
    world_size: int
    created: str
    """UTC, ISO 8601."""
    config_fingerprint: str | None = None
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    healthy: bool = True
    final: bool = False
    """Training ended with this one."""
    rollbacks: int = 0
    """How many times the run had gone back before (``checkpoint.rollbacks``)."""
    best_by: BestBy | None = None
    info: dict[str, Any] = field(default_factory=dict)
    components: dict[str, str] = field(default_factory=dict)
    """Component key -> how it is shared among ranks."""
    holders: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Component key -> group or node -> the rank whose file has its state, of components that groups share."""
    buffers: list[str] | None = None
    """The model's tensors that are no parameters and may hold infinities, masks say; None: nobody knows them."""
    files: dict[str, FileEntry] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        document = asdict(self)
        # JSON has no nan and inf
        document["metrics"] = {k: value if math.isfinite(value) else str(value) for k, value in self.metrics.items()}
        document = {"format": FORMAT, "format_version": FORMAT_VERSION, **document}
        return json.dumps({**document, "checksum": _checksum(document)}, indent=1).encode()

    def problems(self, directory: Path, level: Level = "full") -> list[str]:
        """``file: what is wrong`` for every damaged file of the checkpoint in ``directory``."""
        if level == "none":
            return []
        total = sum(entry.size for entry in self.files.values())
        with Bar(f"verifying {directory.name}", "bytes", total=total) as bar:
            found = {name: self.problem(directory, name, level, bar.add) for name in self.files}
        return [f"{name} {problem}" for name, problem in found.items() if problem]

    def problem(
        self,
        directory: Path,
        name: str,
        level: Level,
        on_bytes: Callable[[int], None],
        ranges: Sequence[Range] | None = None,
    ) -> str | None:
        """``FileEntry.problem`` of one file; weights and moments must be finite, as they are when they are saved."""
        has_rows = name.startswith(("model/", "optimizer/")) and name.endswith(".safetensors")
        return self.files[name].problem(directory / name, level, on_bytes, ranges, self.buffers if has_rows else None)


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in ``directory``.

    Raises CheckpointError: no checkpoint there, not one of ours, damaged, or of a newer format.
    """
    path = directory / NAME
    if not path.exists():
        raise CheckpointError(_nothing_here(directory))
    return _decode(path, read_json(path, DamagedError, limit=None))


def _nothing_here(directory: Path) -> str:
    if not directory.is_dir():
        return f"{directory}: no such checkpoint directory"
    hint = ""
    if (directory / "checkpoints").is_dir():
        hint = "; it is a run directory, its checkpoints are in checkpoints/"
    elif directory.name == "model" and (directory.parent / NAME).exists():
        hint = f"; it is the model of one, use {directory.parent}"
    elif (directory / "config.json").exists():
        hint = "; to start from a model directory use model=pretrained model.path=DIR"
    return f"{directory}: not a Forgather checkpoint (no {NAME}){hint}"


def _decode(path: Path, document: Any) -> Manifest:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CheckpointError(f"{path.parent}: not a Forgather checkpoint ({NAME} is of another program)")
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise CheckpointError(
            f"{path}: names format_version {version!r}, which none writes; this Forgather reads {FORMAT_VERSION}"
        )
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{path.parent}: has checkpoint format {version}, this Forgather reads up to {FORMAT_VERSION}; "
            "upgrade forgather to use it"
        )
    if document.pop("checksum", None) != _checksum(document):
        raise DamagedError(f"{path}: is damaged (its content does not match its checksum)")
    try:
        return _build(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedError(f"{path}: is damaged ({type(error).__name__}: {error})") from error


def _build(document: dict[str, Any]) -> Manifest:
    check_fields(document, {name: kind for name, kind in _KINDS.items() if name in document})
    if (best_by := document.get("best_by")) is not None:
        check_fields(best_by, {"metric": TEXT, "greater_is_better": FLAG}, "best_by")
    if not document["files"]:
        raise ValueError("it names no files")
    for name in document["files"]:
        file_inside(Path(), name)  # a stranger's manifest may not name files outside the checkpoint
    known = {key: document[key] for key in (f.name for f in fields(Manifest)) if key in document}
    if "model/config.json" in document["files"]:  # of Forgather 0.2, too: no kind of model with one has such buffers
        known.setdefault("buffers", [])
    return Manifest(
        **{
            **known,
            "metrics": {key: float(value) for key, value in document["metrics"].items()},
            "best_by": BestBy(**best_by) if best_by else None,
            "files": {name: _entry(entry) for name, entry in document["files"].items()},
        }
    )


_NOT_FINITE = ("nan", "inf", "-inf")  # as texts, since JSON has none
_KINDS = {
    "step": COUNT,
    "world_size": FieldKind(lambda value: COUNT.holds(value) and value > 0, "a number of ranks"),
    "strategy": TEXT,
    "created": TEXT,
    "config_fingerprint": optional(TEXT),
    "versions": object_of(TEXT),
    "metrics": object_of(FieldKind(lambda value: NUMBER.holds(value) or value in _NOT_FINITE, "a number")),
    "healthy": FLAG,
    "final": FLAG,
    "rollbacks": COUNT,
    "best_by": optional(FieldKind(lambda value: isinstance(value, dict), "an object")),
    "info": object_of(ANYTHING),
    "components": object_of(TEXT),
    "holders": object_of(object_of(COUNT)),
    "buffers": optional(list_of(TEXT)),
    "files": object_of(object_of(ANYTHING)),
}


def _entry(entry: dict[str, Any]) -> FileEntry:
    check_fields(entry, {"size": COUNT, "ranges": list_of(several(COUNT, COUNT, TEXT))}, "files")
    return FileEntry(entry["size"], tuple((start, stop, sha256) for start, stop, sha256 in entry["ranges"]))


def _checksum(document: dict[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def merge_entries(reports: list[dict[str, list[Range]]]) -> dict[str, FileEntry]:
    """The files of a checkpoint from what each rank wrote of them, by name."""
    ranges: dict[str, list[Range]] = {}
    for report in reports:
        for name, written in report.items():
            ranges.setdefault(name, []).extend(written)
    return {
        name: FileEntry(max((stop for _, stop, _ in written), default=0), tuple(sorted(written)))
        for name, written in sorted(ranges.items())
    }
