"""Which pieces of documents make up each sample of the packings best_fit and pad: tables, cached as memory maps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from forgather_cli.data.cache import Meta, build_once, digest
from forgather_cli.data.tokens import ArrayFile, Tokenized, TokenSplit

_VERSION = 1  # of the tables
Ints = NDArray[np.int64]


class PackingTable:
    """Pieces of rows: row i holds the pieces [rows[i], rows[i + 1]), each a start and a length in tokens."""

    def __init__(self, rows: ArrayFile, starts: ArrayFile, lengths: ArrayFile) -> None:
        self._rows, self._starts, self._lengths = rows, starts, lengths

    def __len__(self) -> int:
        return self._rows.length - 1

    def pieces(self, row: int) -> list[tuple[int, int]]:
        first, last = self._rows.array[row : row + 2].tolist()
        return list(zip(self._starts.array[first:last].tolist(), self._lengths.array[first:last].tolist(), strict=True))


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


def best_fit(lengths: Ints, seq_len: int) -> tuple[Ints, Ints]:
    """Pack pieces into rows: (order of the pieces, first piece of each row and their number at the end).

    Best-fit decreasing: longest first, each into the fullest row that takes it (Ding et al., "Fewer Truncations Improve
    Language Modeling", 2024). Rows are found by free space through a bit mask, so a piece costs about a microsecond.
    """
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(lengths), np.int64)
    rows_by_space: list[list[int]] = [[] for _ in range(seq_len + 1)]
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


def packed_tables(root: Path, data: Tokenized, seq_len: int, packing: str) -> dict[str, PackingTable]:
    """The tables of each split for best_fit or pad, from the cache or made now."""
    key = packing_key(data.fingerprint, seq_len, packing)

    def write(directory: Path) -> Meta:
        return {name: _write_table(directory / name, split, seq_len, packing) for name, split in _splits(data)}

    directory, meta = build_once(root, "packings", key, write)
    return {name: _open_table(directory / name, meta[name]) for name, _ in _splits(data)}


def packing_key(fingerprint: str, seq_len: int, packing: str) -> str:
    return digest([_VERSION, fingerprint, seq_len, packing])


def _splits(data: Tokenized) -> list[tuple[str, TokenSplit]]:
    return [("train", data.train)] + ([("eval", data.eval)] if data.eval else [])


def _write_table(stem: Path, split: TokenSplit, seq_len: int, packing: str) -> Meta:
    assert split.documents is not None
    starts, lengths = pieces_of(split.documents.array, seq_len)
    rows = np.arange(len(starts) + 1)
    if packing == "best_fit":
        order, rows = best_fit(lengths, seq_len)
        starts, lengths = starts[order], lengths[order]
    for name, array in (("rows", rows), ("starts", starts), ("lengths", lengths)):
        array.astype(np.int64).tofile(stem.with_suffix(f".{name}.bin"))
    return {"rows": len(rows) - 1, "pieces": len(starts)}


def _open_table(stem: Path, counts: dict[str, Any]) -> PackingTable:
    sizes = {"rows": counts["rows"] + 1, "starts": counts["pieces"], "lengths": counts["pieces"]}
    files = {name: ArrayFile(stem.with_suffix(f".{name}.bin"), "int64", size) for name, size in sizes.items()}
    return PackingTable(files["rows"], files["starts"], files["lengths"])
