"""Documents of packed rows kept apart without scores of T x T, and which kernel attention runs in.

On a GPU ``varlen_attn`` takes the rows as one line of documents where it can (bf16, fp16), else flex attention leaves
out blocks of scores; what either needs is made once per batch. Elsewhere, and with dropout of the scores, which neither
has, there is a mask. Source: ``torch/nn/attention/varlen.py`` and ``flex_attention.py``, torch 2.11 to 2.13.

Legend: B sequences, T queries, S keys, H heads, K key-value heads, D head size, N documents.
"""

from __future__ import annotations

import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor

from forgather_cli.hardware import kernel_of

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DEVICES = ("cuda",)
"""Where documents are kept apart without a mask."""
HALF = (torch.bfloat16, torch.float16)
"""What ``varlen_attn`` computes in: it is FlashAttention."""
_BLOCK = 128  # flex attention's own


class DocumentLine(NamedTuple):
    """Those of a batch for ``varlen_attn``, which takes all rows as one line."""

    borders: Tensor
    """(N + 1,) int32: where each begins among B x T, and the end. Some are empty, so that sizes seldom change."""
    window: tuple[int, int]
    options: dict[str, Any]
    """That heads may be grouped, where the function takes it: torch 2.11 does not."""


Mask: TypeAlias = "Tensor | DocumentLine | BlockMask | None"
"""Of scores, (1 or B, 1, T, S) with True = attend, or what a kernel keeps documents apart by."""


def keeps_apart(document_ids: Tensor | None, dropout: float) -> TypeGuard[Tensor]:
    """Whether a kernel does, without a mask of scores."""
    return document_ids is not None and document_ids.device.type in DEVICES and not dropout


def has_varlen(device: torch.device) -> bool:
    return device.type in DEVICES and (device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0))


def documents_of(starts: Tensor, length: int, window: int | None) -> DocumentLine:
    """``starts`` (B, n) int32: where documents begin in each row of ``length`` tokens, as the loader says."""
    from torch.nn.attention.varlen import varlen_attn

    rows = torch.arange(len(starts), device=starts.device, dtype=torch.int32)[:, None]
    borders = F.pad((starts + length * rows).flatten(), (0, 1), value=len(starts) * length)
    if not torch.compiler.is_compiling() and "torch._dynamo" in sys.modules:  # and is not imported to be told
        torch._dynamo.maybe_mark_dynamic(borders, 0)  # else compiled blocks are compiled again for another size
    options = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
    return DocumentLine(borders, (-1 if window is None or window >= length else window - 1, 0), options)


def block_mask(
    ids: Tensor, mask: Tensor | None, asking: Tensor | None = None, *, causal: bool = False, window: int | None = None
) -> BlockMask:
    """Attention of documents, numbered (B, T) in ``asking`` (None: as the keys), to those of the same number in ``ids``
    (B, S), of which ``mask`` (B, S) is 0 at padding.

    Blocks in whose range of numbers there is none of the other's are left out. Nothing of T x S is made, as
    ``create_block_mask`` does where it is not compiled.
    """
    from torch.nn.attention.flex_attention import BlockMask

    keys = 2 * ids + (1 if mask is None else mask.to(ids.dtype))  # the padding of each is a document of its own
    queries = keys if asking is None else 2 * asking + 1

    def may_see(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        seen = queries[b, q] == keys[b, k]
        seen = seen & (k <= q) if causal else seen
        return seen if window is None else seen & (k > q - window)

    low, high = (x[:, :, None] for x in _ranges(queries))
    low_key, high_key = (x[:, None] for x in _ranges(keys))
    near = (low <= high_key) & (high >= low_key)
    whole = torch.zeros_like(near)
    if causal:
        n = torch.arange(near.shape[1], device=near.device)
        behind = n[:, None] - n  # blocks from a query's back to a key's
        span = queries.shape[1] + _BLOCK if window is None else window
        whole = near & (low == high) & (low_key == high_key) & (behind > 0) & ((behind + 1) * _BLOCK <= span)
        near &= ~whole & (behind >= 0) & ((behind - 1) * _BLOCK + 1 < span)
    blocks: BlockMask = BlockMask.from_kv_blocks(
        *_listed(near), *_listed(whole), _BLOCK, may_see, (queries.shape[1], keys.shape[1])
    )
    return blocks


def _ranges(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest and the highest of each block."""
    padding = ids[:, -1:].expand(-1, -ids.shape[1] % _BLOCK)
    blocks = torch.cat([ids, padding], 1).view(len(ids), -1, _BLOCK)
    return blocks.amin(2), blocks.amax(2)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each of queries has, and which, before all others."""
    listed = blocks.to(torch.int32).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(-1, dtype=torch.int32)[:, None], listed.to(torch.int32)[:, None]


def attend_apart(q: Tensor, k: Tensor, v: Tensor, how: DocumentLine | BlockMask) -> Tensor:
    """(B, H, T, D) of queries (B, H, T, D), keys and values (B, K, S, D); 0 where a query sees no key."""
    groups, D = q.shape[1] // k.shape[1], q.shape[-1]
    if not isinstance(how, DocumentLine):
        from torch.nn.attention.flex_attention import flex_attention

        flex: Any = flex_attention if torch.compiler.is_compiling() else _compiled(flex_attention)
        if D < 16:  # which its kernel wants at least
            q, k, v = (F.pad(x, (0, 16 - D)) for x in (q, k, v))
        out: Tensor = flex(q, k, v, block_mask=how, scale=D**-0.5, enable_gqa=groups > 1)[..., :D]
        return out
    from torch.nn.attention.varlen import varlen_attn

    if groups > 1 and not how.options:
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    (B, _, T, _), borders = q.shape, how.borders
    q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))  # (B T, heads, D)
    # the longest is T at most; for its length the host would have to wait
    line: Any = varlen_attn(q, k, v, borders, borders, T, T, window_size=how.window, **how.options)
    y: Tensor = line.unflatten(0, (B, T)).transpose(1, 2)
    return y


_compiled: Any = functools.cache(torch.compile)  # eager, flex attention makes all scores


def kernels_of(model: Any, device: torch.device, dtype: torch.dtype, length: int) -> str | None:
    """What attention of ``model`` runs in, for people; None for a model that does not tell its heads."""
    shape: Any = getattr(model, "settings", None) or getattr(model, "config", None)
    shape = shape.get_text_config() if hasattr(shape, "get_text_config") else getattr(shape, "stack", shape)
    heads = getattr(shape, "num_attention_heads", None)
    if not isinstance(heads, int) or device.type not in ("cpu", "cuda"):
        return None
    both = heads, getattr(shape, "num_key_value_heads", None) or heads
    kernel = kernel_of(device, dtype, both, getattr(shape, "head_dim", None) or shape.hidden_size // heads, length)
    ways, dropout = getattr(model, "document_kernels", ()), dropout_of(shape)
    if not ways or device.type not in DEVICES:
        return kernel
    way = ways[0] if dtype in HALF and has_varlen(device) else ways[-1]
    way = f"a mask of all scores, which attention_dropout={dropout} needs" if dropout else way
    return f"{kernel}; documents of a row are kept apart by {way}"


def dropout_of(shape: Any) -> float:
    """Of scores, by a model's settings or config."""
    return max(getattr(shape, name, None) or 0.0 for name in ("attention_dropout", "attn_pdrop"))
