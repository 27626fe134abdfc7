"""``varlen_attn`` on a CPU: one causal attention for each document, in any dtype, with gradients.

Only the kernels stand in. The function, its signature, its backward and its fake are torch's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import varlen

calls: list[tuple[int, int]] = []
"""Borders and the longest document of each call."""


def _each(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, window: list[int] | None) -> Iterator[tuple[Any, ...]]:
    """Of each document its place, queries, keys and values, (H, n, D) all, and the mask (n, n)."""
    left, right = window or (-1, -1)
    for begin, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        if begin < end:
            n = torch.arange(end - begin)
            behind = n[:, None] - n
            mask = (behind >= (-right if right >= 0 else -len(n))) & (behind <= (left if left >= 0 else len(n)))
            groups = q.shape[1] // k.shape[1]
            heads = (q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1))
            yield slice(begin, end), *(x[begin:end].transpose(0, 1) for x in heads), mask


def _forward(q: Tensor, k: Tensor, v: Tensor, borders: Tensor, other: Tensor, max_q: int, max_k: int,
             is_causal: bool = False, scale: float | None = None, window: list[int] | None = None,
             enable_gqa: bool = False, *_: Any) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert borders.dtype == torch.int32
    assert enable_gqa or q.shape[1] == k.shape[1]
    assert int(borders.diff().min()) >= 0
    assert borders[-1] == len(q)
    assert int(borders.diff().max()) <= max_q
    calls.append((len(borders), max_q))
    out = torch.empty_like(q)
    for place, *heads, mask in _each(q, k, v, borders, window):
        out[place] = F.scaled_dot_product_attention(*heads, attn_mask=mask).transpose(0, 1)
    return out, out.new_zeros(q.shape[1], len(q), dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)


def _backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, borders: Tensor, other: Tensor,
              max_q: int, max_k: int, is_causal: bool, rng: Tensor, scale: float | None = None,
              window: list[int] | None = None) -> tuple[Tensor, ...]:  # fmt: skip
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    for place, queries, keys, values, mask in _each(q, k, v, borders, window):
        d_out, factor = grad[place].transpose(0, 1), q.shape[-1] ** -0.5
        p = (queries @ keys.mT * factor).masked_fill(~mask, -torch.inf).softmax(-1)
        dp = d_out @ values.mT
        ds = p * (dp - (dp * p).sum(-1, keepdim=True)) * factor
        for d, value in ((dq, ds @ keys), (dk, ds.mT @ queries), (dv, p.mT @ d_out)):
            d[place] = value.transpose(0, 1)
    return dq, *(d.unflatten(1, (k.shape[1], -1)).sum(2) for d in (dk, dv))


varlen._varlen_attn.register_kernel("cpu")(_forward)
varlen._varlen_attn_backward.register_kernel("cpu")(_backward)
