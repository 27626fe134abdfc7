# mypy: ignore-errors
# ruff: noqa: RUF012
"""Qwen3 with an encoder, for transformers 5: two stacks of Qwen3's blocks, cross-attention, one embedding.

This file stands alone: it lies in a model's directory, and needs torch and transformers only.

    AutoModelForSeq2SeqLM.from_pretrained(DIR, trust_remote_code=True)

Legend: B sequences, S tokens of the encoder, T tokens of the decoder in this call, V vocabulary, E hidden size,
H heads, K key-value heads, D head size.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

# What generate hands on and looks for in the output: `past_key_values` up to transformers 5.23, `cache` from 5.24.
CACHE = "cache" if "cache" in Seq2SeqLMOutput.__dataclass_fields__ else "past_key_values"


class Qwen3EncDecConfig(PreTrainedConfig):
    """Flat: both stacks have ``num_hidden_layers`` layers of one shape."""

    model_type = "qwen3_encdec"
    keys_to_ignore_at_inference = [CACHE]

    vocab_size: int = 151936
    hidden_size: int = 1024
    intermediate_size: int = 3072
    num_hidden_layers: int = 28
    num_attention_heads: int = 16
    num_key_value_heads: int = 8
    head_dim: int = 128
    max_position_embeddings: int = 40960
    rms_norm_eps: float = 1e-6
    rope_parameters: dict | None = None
    attention_bias: bool = False
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    initializer_range: float = 0.02
    hidden_act: str = "silu"
    use_cache: bool = True
    tie_word_embeddings: bool = True
    is_encoder_decoder: bool = True
    num_sentinel_tokens: int = 100
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    def get_text_config(self, decoder=None, encoder=None):
        return self


class Qwen3RMSNorm(nn.Module):
    def __init__(self, size, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class Qwen3RotaryEmbedding(nn.Module):
    """Positions (B, T) to cos and sin (B, T, 1, D), fp32."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        inv_freq, self.attention_scaling = self.frequencies()
        self.register_buffer("inv_freq", inv_freq, persistent=False)

    def frequencies(self):
        rope, config = self.config.rope_parameters, self.config
        if rope["rope_type"] != "default":
            return ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.int64).float() / config.head_dim
        return 1.0 / (rope["rope_theta"] ** exponents), 1.0

    @torch.no_grad()
    def forward(self, positions):
        angles = (positions[..., None].float() * self.inv_freq.float())[..., None, :]
        cos, sin = angles.cos() * self.attention_scaling, angles.sin() * self.attention_scaling
        return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x, cos, sin, dtype):
    """Rotate the pairs (i, i + D/2) of ``x`` (B, T, H, D) in fp32."""
    return (x * cos + x.roll(x.shape[-1] // 2, -1) * sin).to(dtype)


class Qwen3Projections(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim, self.dropout = config.head_dim, config.attention_dropout
        q_size, kv_size = config.num_attention_heads * self.head_dim, config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, q_size, bias=config.attention_bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=config.attention_bias)
        self.o_proj = nn.Linear(q_size, config.hidden_size, bias=config.attention_bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, config.rms_norm_eps)

    def attend(self, q, k, v, mask, is_causal=False):
        groups = q.shape[1] // k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        dropout = self.dropout if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=is_causal)


class Qwen3SelfAttention(Qwen3Projections):
    def __init__(self, config, layer_idx):
        super().__init__(config)
        self.layer_idx = layer_idx

    def forward(self, x, cos, sin, mask, is_causal=False, cache=None):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(B, T, -1, self.head_dim))
        v = self.v_proj(x).view(B, T, -1, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin, v.dtype).transpose(1, 2), rotate(k, cos, sin, v.dtype).transpose(1, 2)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        return self.o_proj(self.attend(q, k, v, mask, is_causal).transpose(1, 2).reshape(B, T, -1))


class Qwen3CrossAttention(Qwen3Projections):
    """Without rotary angles: both sides count positions anew."""

    def __init__(self, config, layer_idx):
        super().__init__(config)
        self.layer_idx = layer_idx

    def forward(self, x, memory, mask, has_keys, cache=None, is_filled=False):
        B, T, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(B, T, -1, self.head_dim)).transpose(1, 2)
        if is_filled:
            layer = cache.layers[self.layer_idx]
            k, v = layer.keys, layer.values
        else:
            k = self.k_norm(self.k_proj(memory).view(B, memory.shape[1], -1, self.head_dim)).transpose(1, 2)
            v = self.v_proj(memory).view(B, memory.shape[1], -1, self.head_dim).transpose(1, 2)
            if cache is not None:
                k, v = cache.update(k, v, self.layer_idx)
        y = self.attend(q, k, v, mask)
        if has_keys is not None:
            y = y * has_keys
        return self.o_proj(y.transpose(1, 2).reshape(B, T, -1))


class Qwen3MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Qwen3EncoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.dropout = config.residual_dropout
        self.self_attn = Qwen3SelfAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, mask):
        x = x + self.dropped(self.self_attn(self.input_layernorm(x), cos, sin, mask))
        return x + self.dropped(self.mlp(self.post_attention_layernorm(x)))

    def dropped(self, x):
        return F.dropout(x, self.dropout, self.training)


class Qwen3DecoderLayer(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.dropout = config.residual_dropout
        self.self_attn = Qwen3SelfAttention(config, layer_idx)
        self.cross_attn = Qwen3CrossAttention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.cross_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, memory, cos, sin, mask, is_causal, cross_mask, has_keys, cache, is_filled):
        own, cross = (None, None) if cache is None else (cache.self_attention_cache, cache.cross_attention_cache)
        x = x + self.dropped(self.self_attn(self.input_layernorm(x), cos, sin, mask, is_causal, own))
        read = self.cross_attn(self.cross_attention_layernorm(x), memory, cross_mask, has_keys, cross, is_filled)
        x = x + self.dropped(read)
        return x + self.dropped(self.mlp(self.post_attention_layernorm(x)))

    def dropped(self, x):
        return F.dropout(x, self.dropout, self.training)


class Qwen3EncDecPreTrainedModel(PreTrainedModel):
    config_class = Qwen3EncDecConfig
    base_model_prefix = "model"
    main_input_name = "input_ids"
    supports_gradient_checkpointing = False
    _no_split_modules = ["Qwen3EncoderLayer", "Qwen3DecoderLayer"]
    _supports_sdpa = True

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, Qwen3RotaryEmbedding):  # of a model that was built on meta
            with torch.no_grad():
                module.inv_freq.copy_(module.frequencies()[0])


def positions_of(x, past, mask):
    """(B or 1, T): tokens counted from the left, padding left out."""
    if mask is None:
        return torch.arange(past, past + x.shape[1], device=x.device)[None]
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, past : past + x.shape[1]]


class Qwen3Encoder(Qwen3EncDecPreTrainedModel):
    """What ``generate`` calls once: token ids to the memory (B, S, E)."""

    def __init__(self, config, embed_tokens, rotary_emb):
        super().__init__(config)
        self.layers = nn.ModuleList(Qwen3EncoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.shared = (embed_tokens, rotary_emb)  # in a tuple, so that they are parameters of the model alone

    def forward(self, input_ids=None, attention_mask=None, inputs_embeds=None, **kwargs):
        embed_tokens, rotary_emb = self.shared
        x = embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        cos, sin = rotary_emb(positions_of(x, 0, attention_mask))
        mask = None
        if attention_mask is not None:  # padding attends to itself: a row without any key would be NaN in some kernels
            mask = attention_mask[:, None, None, :].bool() | torch.eye(x.shape[1], dtype=torch.bool, device=x.device)
        for layer in self.layers:
            x = layer(x, cos, sin, mask)
        return BaseModelOutput(last_hidden_state=self.norm(x))


class Qwen3Decoder(Qwen3EncDecPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList(Qwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, *inputs):
        for layer in self.layers:
            x = layer(x, *inputs)
        return self.norm(x)


class Qwen3EncDecModel(Qwen3EncDecPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.encoder = Qwen3Encoder(config, self.embed_tokens, self.rotary_emb)
        self.decoder = Qwen3Decoder(config)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value
        self.encoder.shared = (value, self.rotary_emb)


class Qwen3ForSeq2SeqLM(Qwen3EncDecPreTrainedModel, GenerationMixin):
    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen3EncDecModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_encoder(self, *args, **kwargs):
        self.model.encoder.shared = (self.model.embed_tokens, self.model.rotary_emb)
        return self.model.encoder

    def get_decoder(self):
        return self.model.decoder

    def get_input_embeddings(self):
        return self.model.embed_tokens

    def set_input_embeddings(self, value):
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, value):
        self.lm_head = value

    def prepare_decoder_input_ids_from_labels(self, labels):
        """Labels (B, T) one to the right, behind the start token, which is the padding token."""
        start = labels.new_full((len(labels), 1), self.config.pad_token_id)
        return torch.cat((start, labels[:, :-1]), 1).masked_fill_(
            torch.cat((start, labels[:, :-1]), 1) == -100, start[0, 0]
        )

    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        past_key_values=None,
        labels=None,
        use_cache=None,
        cache=None,
        **kwargs,
    ):
        """Logits (B, T, V); ``labels[t]`` is what position t of the decoder predicts, -100 = nothing."""
        cache = past_key_values if cache is None else cache
        if decoder_input_ids is None and labels is not None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        if encoder_outputs is None:
            encoder_outputs = self.get_encoder()(input_ids, attention_mask=attention_mask)
        memory = encoder_outputs[0]
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and labels is None and cache is None:
            cache = EncoderDecoderCache(DynamicCache(config=self.config), DynamicCache(config=self.config))
        past = 0 if cache is None else cache.get_seq_length()
        x = self.model.embed_tokens(decoder_input_ids)
        T, device = x.shape[1], x.device
        cos, sin = self.model.rotary_emb(positions_of(x, past, decoder_attention_mask))
        mask, is_causal = None, past == 0 and T > 1
        if decoder_attention_mask is not None or (past and T > 1):
            keys, is_causal = torch.arange(past + T, device=device), False
            mask = (keys <= keys[past:, None])[None, None]
            if decoder_attention_mask is not None:
                mask = mask & decoder_attention_mask[:, None, None, :].bool() | (keys == keys[past:, None])
        cross_mask = has_keys = None
        if attention_mask is not None:
            cross_mask = attention_mask[:, None, None, :].bool()
            has_keys = cross_mask.any(-1, keepdim=True)
            cross_mask = cross_mask | ~has_keys
        x = self.model.decoder(x, memory, cos, sin, mask, is_causal, cross_mask, has_keys, cache, past > 0)
        logits = self.lm_head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100)
        return Seq2SeqLMOutput(loss=loss, logits=logits, encoder_last_hidden_state=memory, **{CACHE: cache})
