"""Memory of the tensors that a forward keeps for its backward; estimates.

Legend: E hidden size, H heads, K key-value heads, D head size, I width of the MLP, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from forgather_cli.config.schema import Config, DecoderSettings, LinearCrossEntropySettings
from forgather_cli.plan.parameters import FP32


@dataclass(frozen=True)
class Activations:
    """What one token costs on its way through the decoder, in bytes.

    Counted by hand from ``models/decoder.py`` with SDPA, which keeps no T x T scores: per token and layer the inputs
    of two norms and of the linear layers behind them (4 E), rotated q and k, v, and the attention's output
    ((2 H + 2 K) D), and SwiGLU's gate, up, activation and product (4 I). Activation checkpointing keeps E per layer
    and recomputes one layer at a time. The plain loss keeps logits and their log-softmax (2 V) and makes the gradient
    (V), in fp32; the chunked one a chunk of them.
    """

    kept: int
    """From forward to backward, per layer."""
    recomputed: int
    """While a checkpointed layer runs again."""
    loss: int
    """In the loss, behind the last layer."""
    loss_tokens: int | None
    """Tokens that the loss takes at a time; None: all of a micro-batch."""

    def of(self, layers: int, tokens: int, *, loss: bool = True, in_flight: int = 1) -> int:
        """Bytes of ``in_flight`` micro-batches of ``tokens`` each that wait for their backward in ``layers``."""
        layers_bytes = tokens * (in_flight * layers * self.kept + (self.recomputed if layers else 0))
        if not loss:
            return layers_bytes
        chunked = self.loss_tokens is not None
        in_loss = min(tokens, self.loss_tokens or tokens) if chunked else tokens * in_flight
        return layers_bytes + in_loss * self.loss


def activations_of(config: Config, shape: Any) -> Activations | None:
    """``shape``: the model's resolved settings; None for a model that is not the decoder."""
    if not isinstance(shape, DecoderSettings):
        return None
    heads, kv, head_dim = shape.num_attention_heads, shape.num_key_value_heads or 0, shape.head_dim or 0
    width = 2 if config.precision.type == "bf16" else FP32
    inner = (2 * heads + 2 * kv) * head_dim + 4 * (shape.intermediate_size or 0) + 2 * shape.hidden_size
    layer = inner * width + 2 * shape.hidden_size * FP32  # the residual stream stays fp32
    again = config.gradient_checkpointing
    return Activations(
        kept=shape.hidden_size * FP32 if again else layer,
        recomputed=layer if again else 0,
        loss=3 * (shape.vocab_size or 0) * FP32,
        loss_tokens=config.loss.chunk_size if isinstance(config.loss, LinearCrossEntropySettings) else None,
    )
