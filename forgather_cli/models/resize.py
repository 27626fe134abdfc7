"""Rows for new tokens: an embedding or head that grows with the vocabulary.

A new row is the mean of the old ones plus a little noise. With the mean, the probabilities of the old tokens hardly
change: they share what is left of 1 by the weight of one average token per new one. The noise tells new tokens apart.
Source: Hewitt 2021, "Initializing New Word Embeddings for Pretrained Language Models", and ``mean_resizing`` of
transformers' ``resize_token_embeddings``, whose noise (3e-5 of the spread) is too small to survive in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from forgather_cli.config.schema import PretrainedSettings, TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.init import stable_seed

NOISE = 0.01
"""Standard deviation of the noise, as a share of the old rows' in the same column."""

_BLOCK_ROWS = 4096


def grown_vocabulary(
    option: PretrainedSettings | TransformersSettings, rows: int, *, tokens: int, num_new: int = 0
) -> int:
    """Rows that the model at ``option.path``, which has ``rows`` of them, gets for a tokenizer of ``tokens`` tokens.

    The last ``num_new`` tokens get rows in any case. Rows without a token (padded vocabularies) are kept. Raises
    ModelError if there are too few for the others and nobody said resize.
    """
    if not option.resize_vocabulary:
        if rows < tokens - num_new:
            raise ModelError(
                f"data.tokenizer: has {tokens - num_new} tokens, the model in {option.path} only {rows}; set "
                f"model.resize_vocabulary=true to add rows for the others, or data.tokenizer={option.path}"
            )
        return max(rows, tokens)
    multiple = option.pad_vocab_to_multiple_of or 1
    return -(-max(rows, tokens) // multiple) * multiple


def new_rows(weight: Tensor, count: int, *, name: str = "", seed: int = 0) -> Tensor:
    """``count`` rows to append to ``weight`` (V, ...), in its dtype and on its device.

    A function of ``weight``, ``name`` and ``seed`` alone. Beside ``weight`` it needs memory for a few thousand rows.
    """
    blocks = weight.detach().split(_BLOCK_ROWS)  # type: ignore[no-untyped-call]
    return rows_like(blocks, count, name=name, seed=seed).to(weight)


def rows_like(blocks: Iterable[Tensor], count: int, *, name: str, seed: int, noise: float = NOISE) -> Tensor:
    """``count`` rows after those of ``blocks``, (rows, ...) each, which are read once and in order; fp32 on the CPU."""
    mean, std = _moments(blocks)
    drawn = torch.empty((count, *mean.shape)).normal_(generator=torch.Generator().manual_seed(stable_seed(seed, name)))
    return (mean + noise * std * drawn).float()


def _moments(blocks: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation over rows, fp64: sums in fp64 are exact enough not to depend on the blocks' sizes."""
    rows, total, squares = 0, torch.zeros(()).double(), torch.zeros(()).double()
    for block in blocks:
        values = block.cpu().double()
        rows += len(values)
        total = total + values.sum(0)
        squares = squares + values.square().sum(0)
    mean = total / rows
    return mean, (squares / rows - mean.square()).clamp(min=0).sqrt()
