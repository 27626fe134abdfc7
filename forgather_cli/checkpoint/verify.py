"""Verifying a checkpoint by all ranks together: each reads some of the bytes, and all hear of what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from forgather_cli.checkpoint.files import Range
from forgather_cli.checkpoint.gather import gather, rank_in
from forgather_cli.checkpoint.manifest import FileEntry, Level, Manifest


def find_problems(path: Path, manifest: Manifest, level: Level, group: Any = None) -> list[str]:
    """Collective. ``file: what is wrong`` for every damaged file of the checkpoint at ``path``, equal on all ranks."""
    if group is None or level == "none":
        return manifest.problems(path, level)
    import torch.distributed as dist

    mine = share_out(manifest.files, dist.get_world_size(group))[rank_in(group)]
    found = {name: manifest.files[name].problem(path / name, level, ranges) for name, ranges in mine.items()}
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
