"""Which pieces of documents make up each sample of a packing: tables, cached as memory maps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.cache import Cache, Meta, digest
from forgather_cli.data.tokens import ArrayFile, Split, Tokenized, TokenSplit

_VERSION = 1  # of the tables
Ints = NDArray[np.int64]


class PackingTable:
    """Pieces of rows: row i holds the pieces [rows[i], rows[i + 1]), each a start and a length in tokens.

    ``counts``: rows and pieces, and of conversations what was left out.
    """

    def __init__(self, rows: ArrayFile, starts: ArrayFile, lengths: ArrayFile, counts: dict[str, int]) -> None:
        self._rows, self._starts, self._lengths, self.counts = rows, starts, lengths, counts

    def __len__(self) -> int:
        return self._rows.length - 1

    @property
    def borders(self) -> Ints:
        """The first piece of each row, and their number at the end."""
        return self._rows.array

    def pieces(self, row: int) -> list[tuple[int, int]]:
        first, last = self._rows.array[row : row + 2].tolist()
        return list(zip(self._starts.array[first:last].tolist(), self._lengths.array[first:last].tolist(), strict=True))

    def rows_with(self, start: int, stop: int) -> list[int]:
        """Rows with any of the tokens [start, stop)."""
        begins = self._starts.array
        found = np.flatnonzero((begins < stop) & (begins + self._lengths.array > start))
        return sorted({int(row) for row in self._rows.array.searchsorted(found, "right") - 1})


def pieces_of(borders: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Documents cut into pieces of at most ``seq_len`` tokens, in order: (starts, lengths).

    A piece of one token, which holds no target by itself, is left out.
    """
    sizes = np.diff(borders)
    counts = -(-sizes // seq_len)
    owner = np.repeat(np.arange(len(sizes)), counts)
    within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = borders[owner] + within * seq_len
    lengths = np.minimum(seq_len, borders[owner + 1] - starts)
    keep = lengths > 1
    return starts[keep], lengths[keep]


def whole_pieces(borders: Ints, first_targets: Ints, seq_len: int, too_long: str) -> tuple[Ints, Ints, dict[str, int]]:
    """Conversations, one piece each: (starts, lengths, counts of what was left out).

    Of one longer than ``seq_len`` the first ``seq_len`` tokens (``cut``) or nothing (``drop``). One whose piece holds
    no target is left out: ``first_targets`` is the number of tokens before the first.
    """
    sizes = np.diff(borders)
    long = sizes > seq_len
    lengths = np.minimum(sizes, seq_len)
    keep = (first_targets < lengths) & ~(long & (too_long == "drop"))
    counts = {"cut": keep & long, "dropped": long & (too_long == "drop"), "empty": first_targets >= lengths}
    counts["empty"] &= ~counts["dropped"]
    return borders[:-1][keep], lengths[keep], {name: int(which.sum()) for name, which in counts.items()}


Whole = tuple[Callable[[Ints, Ints, int, str], tuple[Ints, Ints, dict[str, int]]], int]
"""What finds the pieces, and how many stay together, in rows so many times as long."""
ALONE: Whole = (whole_pieces, 1)


def in_turn(starts: Ints, lengths: Ints, seq_len: int) -> tuple[Ints, Ints, Ints]:
    """Pieces one after the other, cut where a row of ``seq_len`` tokens is full: (starts, lengths, first piece of each
    row and their number at the end)."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    rows = np.arange(0, total, seq_len)
    borders = np.union1d(ends - lengths, rows)
    owner = ends.searchsorted(borders, "right")
    begins = starts[owner] + borders - (ends - lengths)[owner]
    return begins, np.diff(borders, append=total), np.append(borders.searchsorted(rows), len(borders))


def best_fit(lengths: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Pack pieces into rows: (order of the pieces, first piece of each row and their number at the end).

    Best-fit decreasing: longest first, each into the fullest row that takes it (Ding et al., "Fewer Truncations Improve
    Language Modeling", 2024). Rows are found by free space through a bit mask, so a piece costs about a microsecond.
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows_by_space: list[list[int]] = [[] for _ in range(seq_len)]
    spaces = 0  # bit s is set where some row has s tokens free
    num_rows = 0
    for piece, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_space[space].pop()
            if not rows_by_space[space]:
                spaces ^= 1 << space
        else:
            space, row = seq_len, num_rows
            num_rows += 1
        row_of[piece] = row
        if space > length:
            rows_by_space[space - length].append(row)
            spaces |= 1 << (space - length)
    packed = np.lexsort((np.arange(len(lengths)), row_of))
    return packed, np.append(0, np.cumsum(np.bincount(row_of, minlength=num_rows)))


def packed_tables(
    cache: Cache, data: Tokenized, seq_len: int, packing: str, *, too_long: str | None = None, whole: Whole = ALONE
) -> dict[Split, PackingTable]:
    """The tables of each split for a packing, from the cache or made now. ``too_long``: of conversations, of which
    ``whole`` finds the pieces."""
    rules = [_VERSION, data.fingerprint, seq_len, packing]
    splits = data.splits()

    def write(directory: Path) -> Meta:
        meta: Meta = {"origin": {"packing": packing, "seq_len": seq_len}}
        for name, split in splits.items():
            meta[name] = _write_table(directory / name, split, seq_len, packing, too_long, whole)
        return meta

    directory, meta = cache.build_once("packings", digest(rules if too_long is None else [*rules, too_long]), write)
    tables: dict[Split, PackingTable] = {}
    for name in splits:
        counts = meta[name]
        sizes = {"rows": counts["rows"] + 1, "starts": counts["pieces"], "lengths": counts["pieces"]}
        files = {kind: ArrayFile(directory / f"{name}.{kind}.bin", "int64", size) for kind, size in sizes.items()}
        tables[name] = PackingTable(**files, counts=counts)
    return tables


def _write_table(stem: Path, split: TokenSplit, seq_len: int, packing: str, too_long: str | None, whole: Whole) -> Meta:
    assert split.documents is not None
    left_out: dict[str, int] = {}
    find, together = whole
    if too_long is None:
        starts, lengths = pieces_of(split.documents.array, seq_len)
    else:
        assert split.first_targets is not None
        firsts = split.first_targets.array
        starts, lengths, left_out = find(split.documents.array, firsts, seq_len, too_long)
    rows = together * np.arange(len(starts) // together + 1)
    if packing == "best_fit":
        order, rows = best_fit(lengths.reshape(-1, together).sum(1), together * seq_len)
        starts, lengths = (each.reshape(-1, together)[order].flatten() for each in (starts, lengths))
        rows *= together
    elif packing == "concat":
        starts, lengths, rows = in_turn(starts, lengths, seq_len)
    for name, array in (("rows", rows), ("starts", starts), ("lengths", lengths)):
        array.astype(np.int64).tofile(stem.with_suffix(f".{name}.bin"))
    return {"rows": len(rows) - 1, "pieces": len(starts), **left_out}
