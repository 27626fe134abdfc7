"""Rows of whole pairs. Legend: B rows, T = 2 seq_len tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from forgather_cli.data.packing import PackingTable
from forgather_cli.data.samples import PackedDataset
from forgather_cli.data.tokens import TokenSplit
from forgather_cli.labels import LENGTHS, SIDES, UNITS


class PreferenceRows(PackedDataset):
    """Row i is whole pairs, each side a document apart, the chosen one first. A batch has ``labels.UNITS``, how many
    each row has, and ``labels.SIDES``.

    Padding is documents of at most ``side`` tokens, so that no position is beyond those of a side.
    """

    def __init__(self, split: TokenSplit, table: PackingTable, side: int, pad_token_id: int) -> None:
        super().__init__(split.tokens, table, 2 * side, pad_token_id, isolate=True, targets=split.targets, restart=True)
        self._side = side

    @property
    def num_pairs(self) -> int:
        return int(self.table.borders[-1]) // 2

    @property
    def max_pairs(self) -> int:
        """Of any row."""
        borders = self.table.borders
        return int((borders[1:] - borders[:-1]).max()) // 2

    def row_pairs(self, row: int) -> range:
        """The numbers of a row's pairs, below ``num_pairs``."""
        first, last = self.table.borders[row : row + 2].tolist()
        return range(first // 2, last // 2)

    def __getitems__(self, indices: Sequence[int]) -> dict[str, Tensor]:
        batch = super().__getitems__(indices)
        documents, behind = batch["document_ids"], torch.arange(self.seq_len) - batch[LENGTHS][:, None]
        sides = torch.where(behind < 0, documents, -1).to(torch.int16)
        units = torch.tensor([len(self.row_pairs(index)) for index in indices])
        documents += (behind.clamp(min=0) // self._side).to(documents.dtype)
        batch["position_ids"] %= self._side
        return {**batch, UNITS: units, SIDES: sides}
