"""Memory of the tensors that a forward keeps for its backward; estimates.

Legend: E hidden size, H heads, K key-value heads, D head size, I width of the MLP, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather_cli.config.schema import (
    Config,
    CutCrossEntropySettings,
    DecoderSettings,
    EncoderDecoderSettings,
    FSDP2Settings,
    LigerSettings,
    LinearCrossEntropySettings,
    PipelineSettings,
    QATSettings,
)
from forgather_cli.plan.memory import HALF_PRODUCTS
from forgather_cli.plan.parameters import FP32, HALF

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Activations:
    """What one token costs on its way through the decoder, in bytes.

    Counted by hand from ``models/decoder.py`` with SDPA, which keeps no T x T scores: per token and layer the inputs
    of two norms and of the linear layers behind them (4 E), rotated q and k, v, and the attention's output
    ((2 H + 2 K) D), and SwiGLU's gate, up, activation and product (4 I); with norms of queries and keys what goes into
    these ((H + K) D). A layer that is computed again keeps E,
    and the rest of one layer at a time. A layer's backward holds the gradients of its MLP's insides (3 I) beside.
    The plain loss keeps logits and their log-softmax (2 V) and makes the gradient (V), in fp32; the chunked one (2 V)
    of a chunk of tokens. Liger's chunks have room for E logits per token of the batch, and Cut Cross-Entropy keeps none
    on a GPU, as their sources say. Around the layers there are the embedding's and the last norm's results and
    gradients (8 E). A linear layer that is not trained keeps no input, and layers before the first trained parameter
    keep nothing; an adapter keeps its input and the small product, with DoRA what is scaled too.
    ``tests/plan/test_plan_fit.py`` compares all of a run with what torch's allocator hands out.
    """

    kept: Sequence[int]
    """From forward to backward, of each layer where it is not computed again."""
    kept_of_recomputed: int
    """Of one that is."""
    recomputes: Callable[[int], bool]
    """Whether a layer, by its number in the full model, is computed again."""
    at_work: int
    """Gradients in the layer whose backward runs."""
    ends: int
    """Before the first layer and behind the last."""
    loss: int
    """In the loss, behind the last layer."""
    loss_tokens: int | None
    """Tokens that the loss takes at a time; None: all of a micro-batch."""

    def of(self, layers: range, tokens: int, *, loss: bool = True, in_flight: int = 1) -> int:
        """Bytes of ``in_flight`` micro-batches of ``tokens`` each that wait for their backward in ``layers``.

        Most is held as the last layer's backward begins: if it is computed again, all of its activations are there.
        """
        waiting = sum(
            min(self.kept_of_recomputed, self.kept[n]) if self.recomputes(n) else self.kept[n] for n in layers
        )
        waiting *= tokens * in_flight
        again = layers and self.recomputes(layers[-1])
        at_work = tokens * (self.at_work + (self.kept[layers[-1]] if again else 0)) if layers else 0
        if not loss:
            return waiting + at_work
        chunked = self.loss_tokens is not None
        in_loss = min(tokens, self.loss_tokens or tokens) if chunked else tokens * in_flight
        return waiting + max(at_work, in_loss * self.loss + tokens * self.ends)  # the loss is done before the layers


def activations_of(config: Config, shape: Any, model: nn.Module | None = None) -> Activations | None:
    """``shape``: the model's resolved settings; None for a model that is not the decoder. ``model``: it itself, where
    some of it is frozen.
    """
    if not isinstance(shape, DecoderSettings):
        return None
    hidden, vocab = shape.hidden_size, shape.vocab_size or 0
    heads, kv, head_dim = shape.num_attention_heads, shape.num_key_value_heads or 0, shape.head_dim or 0
    mlp, trainer, precision = shape.intermediate_size or 0, config.trainer, config.precision

    width = stream = FP32  # of an activation inside of layers, and in the residual stream: fp32 under autocast
    if precision.type in HALF_PRODUCTS:
        policy = isinstance(trainer, FSDP2Settings) or (isinstance(trainer, PipelineSettings) and trainer.shard > 1)
        width, stream = HALF, HALF if policy or _rounds_stream(config) else FP32

    layer = ((2 * heads + 2 * kv) * head_dim + 4 * mlp + 2 * hidden) * width + 2 * hidden * stream
    if shape.qk_norm:
        layer += (heads + kv) * head_dim * stream
    if isinstance(precision, QATSettings) and "dynamic-act" in precision.qat_recipe:
        # each of the seven linear layers keeps its own input, before it was cut off at the largest number, and as it is
        # multiplied, in place of the input itself
        layer += FP32 * (8 * hidden + 2 * heads * head_dim + mlp)

    kept = [layer] * shape.num_hidden_layers
    if model is not None and not all(parameter.requires_grad for parameter in model.parameters()):
        kept = _kept_beside_frozen(model, layer, width)

    loss, loss_tokens = 3 * vocab * FP32, None
    match config.loss:
        case LinearCrossEntropySettings(chunk_size=size):
            loss, loss_tokens = 2 * vocab * FP32, size
        case LigerSettings():
            loss = hidden * FP32
        case CutCrossEntropySettings() if config.device != "cpu":
            loss = 0

    return Activations(
        kept=kept,
        kept_of_recomputed=hidden * stream,
        recomputes=config.recomputes,
        at_work=3 * mlp * width,
        ends=8 * hidden * stream,
        loss=loss,
        loss_tokens=loss_tokens,
    )


def _rounds_stream(config: Config) -> bool:
    return config.precision.type == "bf16_true" or getattr(config.precision, "stream", None) == "bf16"


def _kept_beside_frozen(model: nn.Module, layer: int, width: int) -> list[int]:
    """Of each layer, where all of it keeps ``layer`` if it is trained."""
    stack: Any = model
    stack, passes, kept = stack.model, stack.model.embed_tokens.weight.requires_grad, []
    for block in stack.layers.values():
        passes = passes or any(parameter.requires_grad for parameter in block.parameters())
        size = layer if passes else 0
        attention, mlp = block.self_attn, block.mlp
        together = [attention.q_proj, attention.k_proj, attention.v_proj], [mlp.gate_proj, mlp.up_proj], [mlp.down_proj]
        for linears in together:
            if passes and not any(_keeps_input(linear) for linear in linears):
                size -= width * linears[0].in_features
        for linear in block.modules():
            if (adapter := getattr(linear, "adapter", None)) is not None:
                size += width * adapter.rank
                size += width * linear.out_features if adapter.is_dora else 0
                # in place of its input, what that is multiplied with, and the product
                size += width * 2 * linear.in_features if adapter.dropout else 0
        kept.append(size)
    return kept


def _keeps_input(linear: Any) -> bool:
    adapter = getattr(linear, "adapter", None)
    return linear.weight.requires_grad or (adapter is not None and not adapter.dropout)


def paired_activations(
    config: Config, shape: EncoderDecoderSettings, micro_batch: int, encoder_len: int, decoder_len: int
) -> int:
    """Bytes of a micro-batch of rows of ``encoder_len`` and ``decoder_len`` tokens.

    Both stacks as ``Activations``; a decoder's layer has besides, of its own tokens, the inputs of a norm and of what
    is behind it, queries before and behind their norm and the attention's output, and of the encoder's tokens keys and
    values, and what goes into the keys' norm. All layers share the masks, which are of all three attentions where rows
    are packed, else of the encoder's alone.
    """
    stack = shape.stack
    costs = activations_of(config, stack)
    assert costs is not None
    width = stream = FP32
    if config.precision.type in HALF_PRODUCTS:
        policy = isinstance(config.trainer, FSDP2Settings)
        width, stream = HALF, HALF if policy or _rounds_stream(config) else FP32
    head, kv = stack.head_dim or 0, stack.num_key_value_heads or 0
    own = stack.hidden_size * (width + stream) + stack.num_attention_heads * head * (2 * width + stream)
    read = kv * head * (2 * width + stream)
    layers = range(stack.num_hidden_layers)
    tokens, decoder_tokens = micro_batch * encoder_len, micro_batch * decoder_len
    cross = decoder_tokens * own + tokens * read
    # it is made again, a layer at a time
    at_once = sum(not config.recomputes(n) for n in layers) + int(config.recomputes(layers[-1]))
    is_packed = getattr(config.data, "packing", None) == "best_fit"
    scores = encoder_len**2 + (decoder_len * (encoder_len + decoder_len) if is_packed else 0)
    masks = micro_batch * scores * width
    return costs.of(layers, tokens, loss=False) + costs.of(layers, decoder_tokens) + at_once * cross + masks
