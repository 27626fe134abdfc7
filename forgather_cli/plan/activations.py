"""Memory of the tensors that a forward keeps for its backward; estimates.

Legend: E hidden size, H heads, K key-value heads, D head size, I width of the MLP, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forgather_cli.config.schema import (
    Config,
    CutCrossEntropySettings,
    DecoderSettings,
    FSDP2Settings,
    LigerSettings,
    LinearCrossEntropySettings,
    PipelineSettings,
    QATSettings,
)
from forgather_cli.plan.memory import HALF_PRODUCTS
from forgather_cli.plan.parameters import FP32, HALF


@dataclass(frozen=True)
class Activations:
    """What one token costs on its way through the decoder, in bytes.

    Counted by hand from ``models/decoder.py`` with SDPA, which keeps no T x T scores: per token and layer the inputs
    of two norms and of the linear layers behind them (4 E), rotated q and k, v, and the attention's output
    ((2 H + 2 K) D), and SwiGLU's gate, up, activation and product (4 I). Activation checkpointing keeps E per layer
    and recomputes one layer at a time. A layer's backward holds the gradients of its MLP's insides (3 I) beside.
    The plain loss keeps logits and their log-softmax (2 V) and makes the gradient (V), in fp32; the chunked one (2 V)
    of a chunk of tokens. Liger's chunks have room for E logits per token of the batch, and Cut Cross-Entropy keeps none
    on a GPU, as their sources say. Around the layers there are the embedding's and the last norm's results and
    gradients (8 E). ``tests/test_plan_fit.py`` compares all of a run with what torch's allocator hands out.
    """

    kept: int
    """From forward to backward, per layer."""
    at_work: int
    """In the layer whose backward runs: gradients, and under checkpointing what its second forward keeps."""
    ends: int
    """Before the first layer and behind the last."""
    loss: int
    """In the loss, behind the last layer."""
    loss_tokens: int | None
    """Tokens that the loss takes at a time; None: all of a micro-batch."""

    def of(self, layers: int, tokens: int, *, loss: bool = True, in_flight: int = 1) -> int:
        """Bytes of ``in_flight`` micro-batches of ``tokens`` each that wait for their backward in ``layers``."""
        waiting = tokens * in_flight * layers * self.kept
        at_work = tokens * self.at_work if layers else 0
        if not loss:
            return waiting + at_work
        chunked = self.loss_tokens is not None
        in_loss = min(tokens, self.loss_tokens or tokens) if chunked else tokens * in_flight
        return waiting + max(at_work, in_loss * self.loss + tokens * self.ends)  # the loss is done before the layers


def activations_of(config: Config, shape: Any) -> Activations | None:
    """``shape``: the model's resolved settings; None for a model that is not the decoder."""
    if not isinstance(shape, DecoderSettings):
        return None
    heads, kv, head_dim = shape.num_attention_heads, shape.num_key_value_heads or 0, shape.head_dim or 0
    width, stream = _widths(config)
    inner = (2 * heads + 2 * kv) * head_dim + 4 * (shape.intermediate_size or 0) + 2 * shape.hidden_size
    layer = inner * width + 2 * shape.hidden_size * stream + _rounded(config, shape)
    again, (loss, loss_tokens) = config.gradient_checkpointing, _loss(config, shape)
    return Activations(
        kept=shape.hidden_size * stream if again else layer,
        at_work=(layer if again else 0) + 3 * (shape.intermediate_size or 0) * width,
        ends=8 * shape.hidden_size * stream,
        loss=loss,
        loss_tokens=loss_tokens,
    )


def _loss(config: Config, shape: DecoderSettings) -> tuple[int, int | None]:
    """Bytes per token in the loss, and how many tokens it takes at a time; None: all."""
    vocab = shape.vocab_size or 0
    match config.loss:
        case LinearCrossEntropySettings(chunk_size=chunk_size):
            return 2 * vocab * FP32, chunk_size
        case LigerSettings():
            return shape.hidden_size * FP32, None
        case CutCrossEntropySettings() if config.device != "cpu":
            return 0, None
    return 3 * vocab * FP32, None


def _rounded(config: Config, shape: DecoderSettings) -> int:
    """Bytes per token and layer of activations that ``precision=qat`` rounds: each of the seven linear layers keeps its
    own input, before it was cut off at the largest number, and as it is multiplied, in place of the input itself.
    """
    if not isinstance(config.precision, QATSettings) or "dynamic-act" not in config.precision.qat_recipe:
        return 0
    heads = shape.num_attention_heads * (shape.head_dim or 0)
    return FP32 * (8 * shape.hidden_size + 2 * heads + (shape.intermediate_size or 0))


def _widths(config: Config) -> tuple[int, int]:
    """Bytes of an activation inside of layers, and in the residual stream, which stays fp32 under autocast."""
    if config.precision.type not in HALF_PRODUCTS:
        return FP32, FP32
    trainer = config.trainer
    has_policy = isinstance(trainer, FSDP2Settings) or (isinstance(trainer, PipelineSettings) and trainer.shard > 1)
    autocast = config.precision.type != "bf16_true" and not has_policy
    return HALF, FP32 if autocast else HALF
