"""Examples to rows: several of them in two lengths, or one padded; and rows to batches.

Legend: B rows, S tokens of the encoder's side, T of the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forgather_cli.data.paired.denoise import Example
from forgather_cli.labels import IGNORED, LENGTHS, TASKS

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Shape:
    """How rows look. In ``pad`` each holds one example, padded on the right."""

    packing: Literal["best_fit", "pad"]
    encoder: int
    """Tokens of a row's encoder side; of one that is padded at most."""
    decoder: int
    pad_token_id: int
    """Also what the decoder begins with."""
    has_tasks: bool = False

    def described(self) -> dict[str, Any]:
        """What is worth saying of rows."""
        if self.packing == "pad":
            return {"row_tokens": None}
        lengths = {"pack_encoder": self.encoder, "pack_decoder": self.decoder}
        return {**lengths, "row_tokens": self.encoder + self.decoder}


def batch_of_rows(rows: Sequence[Sequence[Example]], shape: Shape) -> dict[str, Tensor]:
    """Rows of examples as a batch.

    ``input_ids`` (B, S), ``decoder_input_ids`` and ``labels`` (B, T) int64. Packed rows have ``document_ids`` (B, S)
    and ``decoder_document_ids`` (B, T) int32, equal inside one example, and ``position_ids`` of both sides, which begin
    anew with each; padded ones, as long as the longest, ``attention_mask`` (B, S). With tasks ``task_ids`` (B, T) int8.
    ``sequence_lengths`` (B, 2): tokens of both sides without padding.
    """
    packed, pad, count = shape.packing == "best_fit", shape.pad_token_id, len(rows)
    S, T = shape.encoder, shape.decoder
    if not packed:
        S = max(len(example.source) for row in rows for example in row)
        T = max(len(example.target) for row in rows for example in row)
    ids, mask = np.full((count, S), pad, np.int64), np.zeros((count, S), np.int64)
    decoder_ids, labels = np.full((count, T), pad, np.int64), np.full((count, T), IGNORED, np.int64)
    # padding is an example of its own on either side, so that the decoder's sees nothing of the encoder
    documents, decoder_documents = np.full((count, S), -1, np.int32), np.full((count, T), -2, np.int32)
    positions, decoder_positions = np.zeros((count, S), np.int64), np.zeros((count, T), np.int64)
    tasks, lengths = np.full((count, T), -1, np.int8), np.zeros((count, 2), np.int64)
    for number, row in enumerate(rows):
        begin = start = 0
        for document, example in enumerate(row):
            end, stop = begin + len(example.source), start + len(example.target)
            ids[number, begin:end] = example.source
            mask[number, begin:end] = 1
            labels[number, start:stop] = example.target
            decoder_ids[number, start + 1 : stop] = example.target[:-1]
            tasks[number, start:stop] = example.task
            documents[number, begin:end] = decoder_documents[number, start:stop] = document
            positions[number, begin:end] = np.arange(end - begin)
            decoder_positions[number, start:stop] = np.arange(stop - start)
            begin, start = end, stop
        lengths[number] = begin, start
    arrays: dict[str, NDArray[Any]] = {"input_ids": ids, "decoder_input_ids": decoder_ids, "labels": labels}
    if packed:
        arrays |= {"document_ids": documents, "decoder_document_ids": decoder_documents}
        arrays |= {"position_ids": positions, "decoder_position_ids": decoder_positions}
    else:
        arrays["attention_mask"] = mask
    arrays[LENGTHS] = lengths
    if shape.has_tasks:
        arrays[TASKS] = tasks
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def padded_batch(rows: Sequence[dict[str, Tensor]], pad_token_id: int) -> dict[str, Tensor]:
    """Rows that ``batch_of_rows`` has made one by one, without the batch's dimension, as the batch it makes of all."""
    fill = {"input_ids": pad_token_id, "decoder_input_ids": pad_token_id, "labels": IGNORED, TASKS: -1}
    return {
        name: pad_sequence([row[name] for row in rows], batch_first=True, padding_value=fill.get(name, 0))
        for name in rows[0]
    }


_LOOKED_AT = 8
_MOST = 256  # examples that are looked at; with all of a large block rows are no fuller, and take time with its square


def best_fit_in_two(sources: Ints, targets: Ints, encoder: int, decoder: int) -> list[list[int]]:
    """Pack examples into rows of ``encoder`` and ``decoder`` tokens: the numbers of each row's examples.

    Row by row: the largest example that is left, then whatever leaves least room, by itself or with a second one, on
    the side that has more room: a row with room on one side alone holds nothing more.
    """
    sizes = np.stack([sources / encoder, targets / decoder], 1)
    order = np.argsort(-sizes.max(1), kind="stable")
    sizes, alive = sizes[order], np.arange(len(order))
    rows: list[list[int]] = []
    while len(alive):
        row, left = [alive[0]], 1.0 - sizes[alive[0]]
        alive = alive[1:]
        while len(fits := np.flatnonzero((left - sizes[alive]).min(1) >= -1e-9)):
            if len(fits) > _MOST:  # of all sizes
                fits = fits[np.linspace(0, len(fits) - 1, _MOST).astype(np.int64)]
            after = left - sizes[alive[fits]]  # (fits, 2)
            alone = after.max(1)
            spread = np.linspace(0, len(fits) - 1, _LOOKED_AT // 2).astype(np.int64)
            first = np.concatenate([np.argsort(alone, kind="stable")[: _LOOKED_AT // 2], spread])
            both = after[first][:, None] - sizes[alive[fits]]  # (first, fits, 2)
            room = np.where(both.min(2) >= -1e-9, both.max(2), np.inf)
            room[np.arange(len(first)), first] = alone[first]
            one, other = np.unravel_index(room.argmin(), room.shape)
            taken = np.unique(fits[[first[one], other]])
            row += alive[taken].tolist()
            left = left - sizes[alive[taken]].sum(0)
            alive = np.delete(alive, taken)
        rows.append(order[row].tolist())
    return rows
