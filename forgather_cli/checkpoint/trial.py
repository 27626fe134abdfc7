"""What a save needs, tried before the first step: states that can be stored, a directory to write to, and room."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from forgather_cli.checkpoint.components import Component, LocalShard, encode_components, total_bytes
from forgather_cli.checkpoint.files import remove, sibling, write_file
from forgather_cli.checkpoint.format import Piece, plan
from forgather_cli.distributed import gather, on_rank_0
from forgather_cli.errors import SetupError
from forgather_cli.run_dir import RunDir

log = logging.getLogger(__name__)
T = TypeVar("T")


def try_save(
    run: RunDir,
    components: Iterable[Component],
    rows: Mapping[str, LocalShard],
    num_bytes: int,
    *,
    group: Any,
    rank: int,
    planned: bool = True,
    spare: int = 0,
) -> None:
    """Collective. Encode every state, see that the ranks' rows make whole tensors, write to the directory, look for
    room: for the full tensors of ``rows``, and for ``num_bytes`` more beside each rank's.

    ``spare``, on rank 0: bytes that a save may free by deleting what retention does not keep.
    ``planned`` False: a signal or a command alone will save, so what is wrong with the directory is a warning. It costs
    no more than the copies of the components' states and one file of a few bytes. Raises SetupError on all ranks alike.
    """

    def share() -> tuple[list[Piece], float]:
        """What this rank holds, and how many times as much it will be."""
        encode_components(components, rank)
        now = total_bytes(rows)
        return [row.piece(name) for name, row in rows.items()], 1 + num_bytes / now if now else 1.0

    shares = _on_all(share, group)
    files = plan([pieces for pieces, _ in shares], "trial").files
    growth = max(growth for _, growth in shares)
    need = int(growth * sum(spec.num_bytes for file in files for spec in file.specs)) - spare
    if planned:
        _try_directory(run, need, group=group, rank=rank)
        return
    try:
        with contextlib.nullcontext() if rank != 0 else _no_new_directories(run.checkpoints):
            _try_directory(run, need, group=group, rank=rank)
    except SetupError as error:
        log.warning("%s; with save_strategy=no training starts, but a signal would end it without a checkpoint", error)


def _try_directory(run: RunDir, need: int, *, group: Any, rank: int) -> None:
    """Collective. See that all ranks write to one directory, and that it has room for ``need`` bytes."""
    probe = run.checkpoints / on_rank_0(lambda: _make_probe(run, need), group)
    try:
        _on_all(lambda: _write(probe, rank), group)
    finally:
        if rank == 0:
            remove(probe)


@contextlib.contextmanager
def _no_new_directories(path: Path) -> Iterator[None]:
    """Take away what becomes of ``path`` and its parents inside and stays empty: a run that may never save has none."""
    path = path.absolute()
    new = [directory for directory in (path, *path.parents) if not directory.exists()]  # nearest first
    try:
        yield
    finally:
        for directory in new:
            with contextlib.suppress(OSError):
                directory.rmdir()


def _on_all(action: Callable[[], T], group: Any) -> list[T]:
    """Collective. What ``action`` returns on each rank, by rank. Where it raises SetupError, all ranks do."""
    answer, failure = None, None
    try:
        answer = action()
    except SetupError as error:
        failure = str(error)
    answers = gather((answer, failure), group)
    for _, failure in answers:
        if failure is not None:
            raise SetupError(failure)
    results: Any = [answer for answer, _ in answers]
    return list(results)


def _make_probe(run: RunDir, need: int) -> str:
    """The name of a new directory where checkpoints will be, if there is room for one."""
    probe = sibling(run.checkpoints / "trial", "tmp")
    try:
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        probe.mkdir()
        disk = os.statvfs(probe)
    except OSError as error:
        raise SetupError(_cannot_write(run.checkpoints, error)) from error
    have = disk.f_bavail * disk.f_frsize
    if have < need:
        remove(probe)
        raise SetupError(
            f"output_dir: one checkpoint needs {_gb(need)}, {run.checkpoints} has {_gb(have)} free; free some space, "
            "or set output_dir to another disk"
        )
    return probe.name


def _write(probe: Path, rank: int) -> None:
    """Every rank writes into the directory that rank 0 has made."""
    try:
        write_file(probe / str(rank), b"trial")
    except FileNotFoundError as error:
        raise SetupError(
            f"output_dir: {socket.gethostname()} does not see {probe.parent} as rank 0's host does; set output_dir to "
            "a directory that all nodes share"
        ) from error
    except OSError as error:
        raise SetupError(_cannot_write(probe.parent, error)) from error


def _cannot_write(directory: Path, error: OSError) -> str:
    return (
        f"output_dir: cannot write checkpoints to {directory} ({error.strerror}); set output_dir to another directory"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.3g} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.3g} MB"
