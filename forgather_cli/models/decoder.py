"""The decoder: Llama, Mistral, Qwen2 and Qwen3 in one lean model, with Hugging Face's parameter names.

Legend: B sequences, T tokens of this call, S positions attended to (T, or more with a cache), V vocabulary,
E hidden size, H heads, K key-value heads, D head size.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.config.schema import DecoderSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.attention import HALF, Mask, attend_apart, block_mask, documents_of, keeps_apart
from forgather_cli.models.cache import KVCache, LayerCache
from forgather_cli.models.layers import Embedding, Linear, RMSNorm, to_autocast
from forgather_cli.models.rope import RotaryEmbedding, rotate

__all__ = ["Context", "Decoder", "DecoderLayer", "KVCache", "resolve_decoder"]

_log = logging.getLogger(__name__)


class Context(NamedTuple):
    """What all layers of one forward share."""

    cos: Tensor  # (T, 1, D) or (B, T, 1, D), fp32
    sin: Tensor
    mask: Mask
    is_causal: bool  # the mask is the plain causal one, and not made


class Projections(nn.Module):
    """What grouped-query attention multiplies with, and optional norms of queries and keys."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        assert s.head_dim is not None
        assert s.num_key_value_heads is not None
        self.head_dim = s.head_dim
        self.grouped = s.num_key_value_heads != s.num_attention_heads
        self.dropout = s.attention_dropout
        q_size, kv_size = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        std = s.initializer_range
        self.q_proj = Linear(s.hidden_size, q_size, bias=s.attention_bias, std=std)
        self.k_proj = Linear(s.hidden_size, kv_size, bias=s.attention_bias, std=std)
        self.v_proj = Linear(s.hidden_size, kv_size, bias=s.attention_bias, std=std)
        self.o_proj = Linear(q_size, s.hidden_size, bias=s.has_output_bias, std=0.0 if s.zero_init_outputs else std)
        self.q_norm = RMSNorm(s.head_dim, s.rms_norm_eps) if s.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(s.head_dim, s.rms_norm_eps) if s.qk_norm else nn.Identity()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, *, is_causal: bool) -> Tensor:
        """(B, H, T, D) of queries (B, H, T, D), keys and values (B, K, S, D)."""
        if mask is not None and not isinstance(mask, Tensor):
            return attend_apart(q, k, v, mask)
        grouped = self.grouped
        if grouped and q.is_cuda and (mask is not None or q.dtype == torch.float32):
            # in fp32, and with a mask unless cuDNN's kernel takes it (bf16 on an H200 it does, faster than this), SDPA
            # falls back to a slow path for grouped heads, which keeps T x T scores (torch 2.11)
            groups = q.shape[1] // k.shape[1]
            k, v, grouped = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1), False
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=is_causal,
            enable_gqa=grouped,
        )


class Attention(Projections):
    """Self-attention."""

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None) -> Tensor:
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim))  # (B, T, H, D)
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim))  # (B, T, K, D)
        v = self.v_proj(x).view(B, T, -1, self.head_dim)
        q = rotate(q, context.cos, context.sin, v.dtype).transpose(1, 2)  # (B, H, T, D)
        k = rotate(k, context.cos, context.sin, v.dtype).transpose(1, 2)  # (B, K, T, D)
        v = v.transpose(1, 2)
        if cache is not None:
            k, v = cache.append(k, v)  # (B, K, S, D)
        y = self.attend(q, k, v, context.mask, is_causal=context.is_causal)
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return out


class MLP(nn.Module):
    """SwiGLU (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        assert s.intermediate_size is not None
        std = s.initializer_range
        self.gate_proj = Linear(s.hidden_size, s.intermediate_size, bias=s.mlp_bias, std=std)
        self.up_proj = Linear(s.hidden_size, s.intermediate_size, bias=s.mlp_bias, std=std)
        out_std = 0.0 if s.zero_init_outputs else std
        self.down_proj = Linear(s.intermediate_size, s.hidden_size, bias=s.mlp_bias, std=out_std)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and MLP, each behind a norm and beside the residual stream, which stays fp32 under autocast
    unless ``precision.stream`` says bf16.
    """

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        self.dropout = s.residual_dropout
        self.self_attn = Attention(s)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)

    def forward(self, x: Tensor, context: Context, cache: LayerCache | None = None) -> Tensor:
        y = self.self_attn(to_autocast(self.input_layernorm(x)), context, cache)
        x = x + (F.dropout(y, self.dropout, self.training) if self.dropout else y)
        y = self.mlp(to_autocast(self.post_attention_layernorm(x)))
        return x + (F.dropout(y, self.dropout, self.training) if self.dropout else y)


class Stack(nn.Module):
    """Embedding, layers and final norm. Layers are keyed by index, so that one left out does not rename the others."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        assert s.vocab_size is not None
        self.embed_tokens: Embedding | None = Embedding(s.vocab_size, s.hidden_size, std=s.initializer_range)
        self.embeds = True
        """False: ``embed_tokens`` only carries the weight that the head shares."""
        self.layers = nn.ModuleDict({str(i): DecoderLayer(s) for i in range(s.num_hidden_layers)})
        self.norm: RMSNorm | None = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.rotary_emb = RotaryEmbedding(s)

    def forward(self, x: Tensor, context: Context, cache: KVCache | None) -> Tensor:
        """``x`` is token ids (B, T) where this stack has the embedding, else hidden states (B, T, E)."""
        if self.embed_tokens is not None and self.embeds:
            x = self.embed_tokens(x)
        for key, layer in self.layers.items():
            x = layer(x, context, None if cache is None else cache.layer(key))
        return x if self.norm is None else self.norm(x)


class Decoder(nn.Module):
    """A causal language model. ``settings`` must be resolved (``resolve_decoder``).

    ``embed_tokens``, some layers, ``norm`` or ``lm_head`` may be taken out (set to None, deleted from ``layers``; see
    ``cut``): the rest runs on hidden states instead of token ids and keeps its parameter names.
    """

    has_plain_head = True
    """Logits are what ``head`` makes of ``hidden_states(...)``: a loss may be compiled together with it."""
    document_kernels = ("varlen_attn", "flex attention")
    """What keeps documents apart on a GPU, first in half precision."""

    def __init__(self, settings: DecoderSettings) -> None:
        super().__init__()
        assert settings.vocab_size is not None, "resolve_decoder first"
        self.settings = settings
        self.model = Stack(settings)
        head_std = 0.0 if settings.zero_init_outputs else settings.initializer_range
        self.lm_head: Linear | None = Linear(settings.hidden_size, settings.vocab_size, bias=False, std=head_std)
        if settings.tie_word_embeddings and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def head(self) -> Linear:
        """The layer from hidden states to logits."""
        if self.lm_head is None:
            raise AssertionError("this part of the model has no head")
        return self.lm_head

    @property
    def num_hidden_layers(self) -> int:
        return self.settings.num_hidden_layers

    @property
    def hidden_size(self) -> int:
        return self.settings.hidden_size

    def cut(self, first: int, last: int, *, is_first: bool, is_last: bool) -> None:
        """Keep layers ``first`` to ``last`` alone, the embedding if ``is_first``, norm and head if ``is_last``.

        A tied head keeps the embedding with it, which then only carries the weight under its name.
        """
        stack = self.model
        for index in range(self.num_hidden_layers):
            if not first <= index <= last:
                del stack.layers[str(index)]
        if not is_last:
            stack.norm = self.lm_head = None
        if not is_first:
            stack.embeds = False
            if not (is_last and self.settings.tie_word_embeddings):
                stack.embed_tokens = None

    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, T, V), or (B, 1, V) of the last position with ``last_only``.

        input_ids (B, T) int64. ``document_ids`` (B, T) int: attention stays inside equal ids; ``document_starts``
        (B, n) int32 says where they begin in each row (the rest is T), for ``varlen_attn``. ``attention_mask`` (B, S)
        1 = token, 0 = padding on either side. ``position_ids`` (T,) or (B, T); without them positions count tokens from
        the left, padding left out. ``cache`` holds the positions before these and is extended by them; with rope type
        ``dynamic``, whose angles change with the length for all positions, it stays empty.
        """
        x = self.hidden_states(
            input_ids,
            position_ids=position_ids,
            document_ids=document_ids,
            document_starts=document_starts,
            attention_mask=attention_mask,
            cache=cache,
        )
        if last_only:
            x = x[:, -1:]
        return x if self.lm_head is None else self.lm_head(x)

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        document_starts: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What ``head`` is applied to, (B, T, E), after the final norm. Arguments as in ``forward``."""
        if self.model.rotary_emb.dynamic:
            cache = None
        context = self.context(input_ids, position_ids, document_ids, attention_mask, cache, document_starts)
        x: Tensor = self.model(input_ids, context, cache)
        if cache is not None:
            cache.length += input_ids.shape[1]
        return x

    def context(
        self,
        x: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KVCache | None = None,
        document_starts: Tensor | None = None,
    ) -> Context:
        """Angles and mask for input ``x`` (B, T, ...); only its shape, device and dtype are read."""
        past = 0 if cache is None else cache.length
        if cache is not None and document_ids is not None:
            raise ValueError("document_ids and cache exclude each other")
        cos, sin = angles(self.model.rotary_emb, x, past, position_ids, attention_mask)
        s, embedding = self.settings, self.model.embed_tokens
        if document_starts is not None and attention_mask is None and keeps_apart(document_ids, s.attention_dropout):
            dtype = x.dtype if embedding is None or x.is_floating_point() else embedding.weight.dtype
            dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else dtype
            if dtype in HALF and s.head_size % 8 == 0 and s.head_size <= 256:
                return Context(cos, sin, documents_of(document_starts, x.shape[1], s.sliding_window), is_causal=False)
        mask, is_causal = causal_mask(x, past, s.sliding_window, document_ids, attention_mask, s.attention_dropout)
        return Context(cos, sin, mask, is_causal)


def angles(
    rotary_emb: RotaryEmbedding, x: Tensor, past: int, position_ids: Tensor | None, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of the tokens ``x`` (B, T, ...), which follow on ``past`` others; see ``Decoder.forward``."""
    T = x.shape[1]
    known = past + T if position_ids is None and attention_mask is None else None
    if position_ids is None and attention_mask is None:
        position_ids = torch.arange(past, past + T, device=x.device)
    elif position_ids is None:  # (B, T), padding left out
        assert attention_mask is not None
        position_ids = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[:, past : past + T]
    found: tuple[Tensor, Tensor] = rotary_emb(position_ids, known)
    return found


def causal_mask(
    x: Tensor, past: int, window: int | None, document_ids: Tensor | None, attention_mask: Tensor | None, dropout: float
) -> tuple[Mask, bool]:
    """The mask, or None and whether SDPA is to be plainly causal, which is faster."""
    if document_ids is not None and keeps_apart(document_ids, dropout):
        return block_mask(document_ids, attention_mask, causal=True, window=window), False
    T, S = x.shape[1], past + x.shape[1]
    windowed = window is not None and window < S
    if document_ids is None and attention_mask is None and not windowed:
        if T == 1:
            return None, False
        if past == 0:  # True, not a comparison of T: in a graph of any length SDPA gets no symbol
            return None, True
    keys = torch.arange(S, device=x.device)
    queries = keys[past:, None]
    mask = keys <= queries
    if window is not None and windowed:
        mask &= keys > queries - window
    mask = mask[None, None]
    if document_ids is not None:
        mask = mask & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
    if attention_mask is not None:
        # padding attends to itself: a row without any key would be NaN in some kernels
        mask = mask & attention_mask[:, None, None, :].bool() | (keys == queries)
    return mask, False


def resolve_decoder(settings: DecoderSettings, *, vocab_size: int, seq_len: int) -> DecoderSettings:
    """``settings`` with every null filled in. Raises ModelError for sizes that do not fit together.

    ``vocab_size`` is the tokenizer's, ``seq_len`` the data's, both in tokens.
    """
    s = settings
    if s.vocab_size is not None and s.vocab_size < vocab_size:
        raise ModelError(
            f"model.vocab_size: the tokenizer has {vocab_size} tokens, got {s.vocab_size}; "
            f"set model.vocab_size=null or at least {vocab_size}, or take another data.tokenizer"
        )
    if problem := next(s.problems(), None):
        raise ModelError(problem)
    resolved = dataclasses.replace(
        s,
        intermediate_size=s.mlp_size,
        num_key_value_heads=s.num_key_heads,
        head_dim=s.head_size,
        vocab_size=s.vocab_size or vocab_size,
        max_position_embeddings=s.max_position_embeddings or seq_len,
        attention_output_bias=s.has_output_bias,
    )
    if seq_len > (longest := resolved.max_position_embeddings or seq_len):
        _log.warning("data.seq_len=%d is longer than model.max_position_embeddings=%d", seq_len, longest)
    return resolved
