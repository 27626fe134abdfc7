"""An attention of transformers that keeps documents apart by blocks, and is SDPA's otherwise.

A class that goes through that library's attention interface asks it for masks, and then for attention, by a name in its
config. Under this one masks of documents are blocks for flex attention, which is told from a mask of scores where it
is used: recomputation and generation need no switch. Source: transformers 5.17 to 5.24, ``masking_utils.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from forgather_cli.models.attention import dropout_of, keeps_apart

NAME = "forgather_documents"
"""In a config; it is not written to files."""

_packed = False
"""Whether the forward that asks for masks is of documents."""


def takes_blocks(theirs: Any) -> bool:
    """Whether flex attention can stand in for the attention of a model's class."""
    return theirs._supports_flex_attn and theirs.config._attn_implementation in ("sdpa", NAME)


@contextmanager
def masks_of(documents: Tensor, theirs: Any) -> Iterator[None]:
    """Around a forward of documents."""
    global _packed
    _packed = keeps_apart(documents, dropout_of(theirs.config.get_text_config())) and takes_blocks(theirs)
    if _packed:
        _register()
        theirs.config._attn_implementation = NAME
    try:
        yield
    finally:
        _packed = False


@functools.cache
def _register() -> None:
    from transformers import AttentionInterface, masking_utils
    from transformers.integrations.flex_attention import flex_attention_forward
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def mask(*args: Any, **kwargs: Any) -> Any:
        return (masking_utils.flex_attention_mask if _packed else masking_utils.sdpa_mask)(*args, **kwargs)

    def attention(module: Any, q: Any, k: Any, v: Any, mask: Any, **kwargs: Any) -> Any:
        forward = sdpa_attention_forward if mask is None or hasattr(mask, "dtype") else flex_attention_forward
        return forward(module, q, k, v, mask, **kwargs)

    AttentionInterface.register(NAME, attention)
    masking_utils.AttentionMaskInterface.register(NAME, mask)
