"""Qwen3 with an encoder: the decoder's blocks twice, bidirectional in one stack, with cross-attention in the other.

Legend: B sequences, S tokens of the encoder, T tokens of the decoder in this call, V vocabulary, E hidden size,
H heads, K key-value heads, D head size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forgather_cli.config.schema import DecoderSettings, EncoderDecoderSettings
from forgather_cli.models.attention import Mask, block_mask, keeps_apart
from forgather_cli.models.cache import KVCache, LayerCache
from forgather_cli.models.decoder import MLP, Attention, Context, DecoderLayer, Projections, angles, causal_mask
from forgather_cli.models.layers import Embedding, Linear, RMSNorm, to_autocast
from forgather_cli.models.rope import RotaryEmbedding


class Memory(NamedTuple):
    """What the decoder reads of the encoder."""

    states: Tensor
    """(B, S, E), after the encoder's last norm."""
    mask: Mask
    """(B, 1, 1 or T, S), added to scores, as ``added_to_scores``, no row without a key; None: attend to everything."""
    has_keys: Tensor | None
    """(B, 1, 1 or T, 1) bool: False where nothing may be attended to, and the cross-attention adds nothing."""


class CrossAttention(Projections):
    """Attention of the decoder to the encoder's memory, without rotary angles: both sides count positions anew."""

    def forward(self, x: Tensor, memory: Memory, cache: LayerCache | None) -> Tensor:
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)).transpose(1, 2)  # (B, H, T, D)
        if cache is not None and cache.length:
            k, v = cache.held()
        else:
            states = to_autocast(memory.states).to(x.dtype)
            k = self.k_norm(self.k_proj(states).view(B, states.shape[1], -1, self.head_dim)).transpose(1, 2)
            v = self.v_proj(states).view(B, states.shape[1], -1, self.head_dim).transpose(1, 2)
            if cache is not None:
                k, v = cache.append(k, v)
        # under autocast the norms return fp32
        y = self.attend(q.to(v.dtype), k.to(v.dtype), v, memory.mask, is_causal=False)
        if memory.has_keys is not None:
            y = y * memory.has_keys
        out: Tensor = self.o_proj(y.transpose(1, 2).reshape(B, T, -1))
        return out


class Qwen3EncoderLayer(DecoderLayer):
    """The decoder's block; that it looks both ways is a matter of its mask."""


class Qwen3DecoderLayer(nn.Module):
    """Causal self-attention, cross-attention and MLP, each behind a norm and beside the residual stream."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        self.dropout = s.residual_dropout
        self.self_attn = Attention(s)
        self.cross_attn = CrossAttention(s)
        self.mlp = MLP(s)
        self.input_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.cross_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(s.hidden_size, s.rms_norm_eps)

    def forward(
        self,
        x: Tensor,
        memory: Memory,
        context: Context,
        cache: LayerCache | None = None,
        cross_cache: LayerCache | None = None,
    ) -> Tensor:
        x = x + self._dropped(self.self_attn(to_autocast(self.input_layernorm(x)), context, cache))
        x = x + self._dropped(self.cross_attn(to_autocast(self.cross_attention_layernorm(x)), memory, cross_cache))
        return x + self._dropped(self.mlp(to_autocast(self.post_attention_layernorm(x))))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training) if self.dropout else x


class Encoder(nn.Module):
    """Bidirectional layers and their final norm."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Qwen3EncoderLayer(s) for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        for layer in self.layers:
            x = layer(x, context)
        out: Tensor = self.norm(x)
        return out


class CrossDecoder(nn.Module):
    """Causal layers that read the encoder's memory, and their final norm."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Qwen3DecoderLayer(s) for _ in range(s.num_hidden_layers))
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps)

    def forward(self, x: Tensor, memory: Memory, context: Context, cache: KVCache | None) -> Tensor:
        for number, layer in enumerate(self.layers):
            own = () if cache is None else (cache.layer(str(number)), cache.layer(f"cross.{number}"))
            x = layer(x, memory, context, *own)
        out: Tensor = self.norm(x)
        return out


class Stacks(nn.Module):
    """The shared embedding and both stacks."""

    def __init__(self, s: DecoderSettings) -> None:
        super().__init__()
        assert s.vocab_size is not None
        self.embed_tokens = Embedding(s.vocab_size, s.hidden_size, std=s.initializer_range)
        self.encoder = Encoder(s)
        self.decoder = CrossDecoder(s)
        self.rotary_emb = RotaryEmbedding(s)


class Qwen3ForSeq2SeqLM(nn.Module):
    """An encoder-decoder language model. ``settings`` must be resolved (``resolve_encoder_decoder``)."""

    is_encoder_decoder = True
    has_plain_head = True
    document_kernels = ("flex attention",)

    def __init__(self, settings: EncoderDecoderSettings) -> None:
        super().__init__()
        self.settings = settings
        stack = settings.stack
        assert stack.vocab_size is not None, "resolve_encoder_decoder first"
        self.model = Stacks(stack)
        self.lm_head = Linear(stack.hidden_size, stack.vocab_size, bias=False, std=stack.initializer_range)
        if settings.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    @property
    def head(self) -> Linear:
        """The layer from hidden states to logits."""
        return self.lm_head

    def forward(
        self,
        input_ids: Tensor,
        *,
        decoder_input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        cache: KVCache | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits (B, T, V), or (B, 1, V) of the last position with ``last_only``.

        input_ids (B, S) and decoder_input_ids (B, T) int64; without the latter the decoder reads the former.
        ``attention_mask`` (B, S) and ``decoder_attention_mask`` (B, positions so far): 1 = token, 0 = padding on either
        side. ``document_ids`` (B, S) and ``decoder_document_ids`` (B, T): all three attentions stay inside equal ids,
        which are given for both sides or none. Position ids as in ``Decoder``. ``cache`` holds the decoder's positions
        before these and the keys of the encoder's memory: where it is filled, the encoder does not run again.
        """
        x = self.hidden_states(
            input_ids,
            decoder_input_ids=decoder_input_ids,
            attention_mask=attention_mask,
            decoder_attention_mask=decoder_attention_mask,
            position_ids=position_ids,
            decoder_position_ids=decoder_position_ids,
            document_ids=document_ids,
            decoder_document_ids=decoder_document_ids,
            cache=cache,
        )
        logits: Tensor = self.lm_head(x[:, -1:] if last_only else x)
        return logits

    def hidden_states(
        self,
        input_ids: Tensor,
        *,
        decoder_input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        decoder_position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        decoder_document_ids: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """What ``head`` is applied to, (B, T, E), after the decoder's final norm. Arguments as in ``forward``."""
        if decoder_input_ids is None:  # a rank without data takes part with two tokens
            decoder_input_ids, decoder_document_ids = input_ids, document_ids
            decoder_attention_mask, decoder_position_ids = attention_mask, position_ids
        stacks, past, dropout = self.model, 0 if cache is None else cache.length, self.settings.attention_dropout
        if past:  # the memory's keys are in the cache; only its mask is needed
            states = input_ids.new_empty(*input_ids.shape, 0)
        else:
            cos, sin = angles(stacks.rotary_emb, input_ids, 0, position_ids, attention_mask)
            states = stacks.embed_tokens(input_ids)
            mask = added_to_scores(both_ways_mask(input_ids, document_ids, attention_mask, dropout), states)
            states = stacks.encoder(states, Context(cos, sin, mask, is_causal=False))
        x: Tensor = stacks.embed_tokens(decoder_input_ids)
        mask, has_keys = cross_mask(attention_mask, document_ids, decoder_document_ids, dropout)
        memory = Memory(states, added_to_scores(mask, x), has_keys)
        cos, sin = angles(stacks.rotary_emb, decoder_input_ids, past, decoder_position_ids, decoder_attention_mask)
        mask, is_causal = causal_mask(
            decoder_input_ids, past, None, decoder_document_ids, decoder_attention_mask, dropout
        )
        x = stacks.decoder(x, memory, Context(cos, sin, added_to_scores(mask, x), is_causal), cache)
        if cache is not None:
            cache.length += decoder_input_ids.shape[1]
        return x


def both_ways_mask(x: Tensor, document_ids: Tensor | None, attention_mask: Tensor | None, dropout: float) -> Mask:
    """Which keys the encoder's tokens ``x`` (B, S) attend to, (B, 1, 1 or S, S); None: all."""
    if document_ids is None and attention_mask is None:
        return None
    if keeps_apart(document_ids, dropout):
        return block_mask(document_ids, attention_mask)
    S = x.shape[1]
    mask = torch.ones((1, 1, 1, S), dtype=torch.bool, device=x.device)
    if document_ids is not None:
        mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if attention_mask is not None:
        # padding attends to itself: a row without any key would be NaN in some kernels
        mask = mask & attention_mask[:, None, None, :].bool() | torch.eye(S, dtype=torch.bool, device=x.device)
    return mask


def cross_mask(
    attention_mask: Tensor | None, document_ids: Tensor | None, decoder_document_ids: Tensor | None, dropout: float
) -> tuple[Mask, Tensor | None]:
    """Which of the encoder's tokens the decoder's attend to, True = attend; and ``has_keys`` of ``Memory``."""
    mask: Tensor | None = None
    if document_ids is not None and decoder_document_ids is not None:
        if keeps_apart(document_ids, dropout):
            return block_mask(document_ids, attention_mask, decoder_document_ids), None
        mask = decoder_document_ids[:, None, :, None] == document_ids[:, None, None, :]
    if attention_mask is not None:
        tokens = attention_mask[:, None, None, :].bool()
        mask = tokens if mask is None else mask & tokens
    if mask is None:
        return None, None
    has_keys = mask.any(-1, keepdim=True)
    return mask | ~has_keys, has_keys


def added_to_scores(mask: Mask, x: Tensor) -> Mask:
    """A bool mask as what SDPA adds to scores, 0 or -inf, in the dtype that a layer computes in with states like ``x``;
    what a kernel keeps apart by as it is.

    From a bool mask SDPA makes it in every layer, where it stays for the backward (torch 2.13, ``attention.cpp``).
    """
    if not isinstance(mask, Tensor):
        return mask
    return torch.where(mask, torch.zeros((), dtype=to_autocast(x[:0]).dtype, device=x.device), -torch.inf)
