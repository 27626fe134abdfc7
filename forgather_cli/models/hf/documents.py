"""Documents in one sequence, kept apart by a model of transformers.

Its masks follow positions: where they begin anew, a document does (``find_packed_sequence_indices`` in
``masking_utils.py``, transformers 5). That a class makes its masks so is seen when it is asked to.

Legend: B sequences, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from forgather_cli.errors import ModelError


def positions_in_documents(document_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
    """The place of each token in its document, (B, T) int64. Padding, 0 in ``attention_mask``, is one of its own."""
    ids = document_ids if attention_mask is None else 2 * document_ids + attention_mask.to(document_ids)
    index = torch.arange(ids.shape[1], device=ids.device).expand(ids.shape)
    begins = torch.ones_like(ids, dtype=torch.bool)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return index - torch.where(begins, index, 0).cummax(1).values


@contextmanager
def requires_isolation(name: str) -> Iterator[None]:
    """Raises ModelError at the end of a forward that has not looked for documents in its positions."""
    from transformers import masking_utils

    asked: list[Tensor] = []
    find = masking_utils.find_packed_sequence_indices

    def noted(position_ids: Tensor) -> Any:
        asked.append(position_ids)
        return find(position_ids)

    masking_utils.find_packed_sequence_indices = noted
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = find
    if not asked:
        raise ModelError(
            f"isolate_documents: {name} makes its masks without looking for documents; set isolate_documents=false"
        )
