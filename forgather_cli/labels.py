"""Which position predicts which label, and what is padding, for both families of models.

Labels of a causal model are aligned with ``input_ids``: position t predicts ``labels[t + 1]``. Those of an
encoder-decoder, whose batches have ``decoder_input_ids``, say what position t of the decoder predicts, as in Hugging
Face. Everything that counts tokens, or counts or compares targets, asks here.

Legend: B sequences, T tokens, N = B * T.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

IGNORED = -100
"""The label of a position without a target."""

TASKS = "task_ids"
"""The key of a batch that says of each label's position which task (denoiser) it is of; only evaluation reads it."""


LENGTHS = "sequence_lengths"
"""The key of a batch that says how many tokens each row has without padding: (B,), of an encoder-decoder's two sides
(B, 2). Who counts tokens takes it out (``take_num_tokens``)."""


SOURCES = "source_ids"
"""The key of a batch that says of which source (of a mixture) each row is, and its index there, (B, 2); whoever counts
by source reads it."""


STARTS = "document_starts"
"""The key of a batch that says where documents begin in each row, (B, n), to models that take it (``with_starts``)."""


UNITS = "units"
"""The key of a batch that says how many units of the denominator each row has, (B,) int64: of preferences its pairs."""


FOR_LOSS = "for_loss_"
"""What the keys of tensors (B, ...) begin with that the loss reads, and no model."""


def label_shift(batch: Mapping[str, Any]) -> int:
    """By how many positions a label stands behind the position that predicts it: 1, or 0 in an encoder-decoder."""
    return 0 if "decoder_input_ids" in batch else 1


def num_targets(labels: Tensor, shift: int = 1) -> Tensor:
    """Counted targets of ``labels`` (B, T), 0-dim int64 on the same device."""
    return (labels[:, shift:] != IGNORED).sum()


def targets_of(batch: Mapping[str, Tensor]) -> Tensor:
    """What the loss of a batch is divided by, as ``num_targets``: its units, or else counted targets."""
    if UNITS in batch:
        return batch[UNITS].sum()
    return (batch["labels"][:, label_shift(batch) :] != IGNORED).sum()


def bytes_of(targets: Tensor, token_bytes: Tensor) -> Tensor:
    """Bytes of text that each target stands for, int64 of the same shape; ``token_bytes`` (V,) int64: of each token.
    What is not counted stands for none, nor is an id that the tokenizer does not have."""
    known = (targets >= 0) & (targets < len(token_bytes))
    return token_bytes[targets * known] * known


def take_num_tokens(batch: dict[str, Tensor]) -> tuple[Tensor | int, Tensor | int]:
    """Tokens of a batch without padding, and the decoder's among them, 0-dim on the batch's device; takes ``LENGTHS``
    out. A batch without it has the padding that its masks say.
    """
    lengths = batch.pop(LENGTHS, None)
    if lengths is not None:
        return lengths.sum(), lengths[:, 1].sum() if lengths.dim() == 2 else 0
    counts: list[Tensor | int] = []
    for side in ("", "decoder_"):
        ids, mask = batch.get(f"{side}input_ids"), batch.get(f"{side}attention_mask")
        if ids is not None and mask is not None and mask.shape == ids.shape:
            counts.append(mask.sum())
        else:
            counts.append(0 if ids is None else ids.numel())
    return counts[0] + counts[1], counts[1]


def shifted(labels: Tensor, shift: int = 1) -> Tensor:
    """The target of each position (N,); with a shift of 1 the last position of a sequence has none."""
    # shifting labels instead of logits saves a copy of N x V numbers
    return F.pad(labels[:, shift:], (0, shift), value=IGNORED).flatten()
