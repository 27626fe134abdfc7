"""Rows of whole pairs. Legend: B rows, T = 2 seq_len tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from forgather_cli.data.packing import Ints, PackingTable
from forgather_cli.data.samples import PackedDataset
from forgather_cli.data.tokens import TokenSplit
from forgather_cli.labels import FOR_LOSS, LENGTHS, UNITS

REFERENCE = f"{FOR_LOSS}reference"
"""The key of the reference's summed log-probabilities, (B, P, 2) fp64, chosen and rejected; nan where there is none."""


def whole_pairs(borders: Ints, first_targets: Ints, seq_len: int, too_long: str) -> tuple[Ints, Ints, dict[str, int]]:
    """Pieces, as ``packing.whole_pieces``, of pairs, which are two documents each, one behind the other. Where one is
    longer than ``seq_len`` the beginning of the prompt is left out of both (``cut``), or the pair (``drop``, and where
    nothing of the prompt would be left)."""
    sizes = np.diff(borders)
    cut = np.maximum(sizes.reshape(-1, 2).max(1) - seq_len, 0).repeat(2)
    dropped = (cut > 0) & (too_long == "drop")
    empty = (cut >= first_targets) | (first_targets >= sizes)
    empty = empty.reshape(-1, 2).any(1).repeat(2) & ~dropped
    keep = ~dropped & ~empty
    counts = {"cut": keep & (cut > 0), "dropped": dropped, "empty": empty}
    return (borders[:-1] + cut)[keep], (sizes - cut)[keep], {name: int(which.sum()) for name, which in counts.items()}


class PreferenceRows(PackedDataset):
    """Row i is whole pairs, each side a document apart: 2p the chosen one of the row's pair p, 2p + 1 the rejected
    one. A batch has ``labels.UNITS``, how many each row has.

    Padding is documents of at most ``side`` tokens, so that no position is beyond those of a side.
    """

    def __init__(self, split: TokenSplit, table: PackingTable, side: int, pad_token_id: int) -> None:
        super().__init__(split.tokens, table, 2 * side, pad_token_id, isolate=True, targets=split.targets, restart=True)
        self._side = side

    @property
    def num_pairs(self) -> int:
        return int(self.table.borders[-1]) // 2

    @cached_property
    def max_pairs(self) -> int:
        """Of any row."""
        return int(np.diff(self.table.borders).max()) // 2

    def row_pairs(self, row: int) -> range:
        """The numbers of a row's pairs, below ``num_pairs``."""
        first, last = self.table.borders[row : row + 2].tolist()
        return range(first // 2, last // 2)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = super().__getitems__(indices)
        documents, behind = batch["document_ids"], torch.arange(self.seq_len) - batch[LENGTHS][:, None]
        units = torch.tensor([len(self.row_pairs(index)) for index in indices])
        documents += (behind.clamp(min=0) // self._side).to(documents.dtype)
        batch["position_ids"] %= self._side
        return {**batch, UNITS: units}
