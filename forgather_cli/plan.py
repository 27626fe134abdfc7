"""What a run will need, before it runs: parameters, steps, operations and memory. Nothing is trained or downloaded.

Legend: E hidden size, H heads, K key-value heads, D head size, I width of the MLP, V vocabulary, T tokens per sequence.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather_cli.config.batch import batch_plan
from forgather_cli.config.schema import (
    Config,
    DecoderSettings,
    LinearCrossEntropySettings,
    Target,
)
from forgather_cli.optim.groups import ParameterRow, describe

if TYPE_CHECKING:
    from torch import nn

_FP32 = 4  # bytes


@dataclass(frozen=True)
class PlannedParameter(ParameterRow):
    """One parameter: how it is trained, and what it belongs to."""

    numel: int
    kind: str
    """embedding, attention, mlp, norm, head or other."""


@dataclass(frozen=True)
class RunPlan:
    """The numbers of one run. Bytes are per rank; None where they cannot be known before the run."""

    model: str
    vocab_size: int
    seq_len: int
    parameters: list[PlannedParameter]
    micro_batch: int
    accumulation: int
    global_batch: int
    """Sequences per optimizer step."""
    tokens_per_step: int
    train_tokens: int | None
    """Tokens of the train split, from an existing cache."""
    steps: int | None
    flops_per_token: float
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int | None
    activation_bytes: int | None
    """Estimate."""
    checkpoint_bytes: int | None

    @property
    def num_parameters(self) -> int:
        return sum(row.numel for row in self.parameters)

    @property
    def memory_bytes(self) -> int:
        """All kinds that are known together."""
        kinds = (self.weight_bytes, self.gradient_bytes, self.optimizer_bytes, self.activation_bytes)
        return sum(kind or 0 for kind in kinds)

    def by_kind(self) -> dict[str, int]:
        """Parameters of each kind, in the order of the model."""
        sums: dict[str, int] = {}
        for row in self.parameters:
            sums[row.kind] = sums.get(row.kind, 0) + row.numel
        return sums


def make_plan(config: Config) -> RunPlan:
    """Plan a run of ``config`` on one device; builds the model without memory. Raises SetupError as training would."""
    from forgather_cli.trainer.metrics import Flops

    seq_len = _seq_len(config)
    counts = _cached_counts(config)
    vocab_size = counts.get("vocab_size") or _vocab_size(config)
    model = _build(config, vocab_size, seq_len)
    rows = parameter_rows(model, config)
    batch = batch_plan(config, 1)
    states = [row.state_bytes for row in rows]
    weights = sum(row.numel for row in rows) * _FP32
    optimizer = None if None in states else sum(state or 0 for state in states)
    return RunPlan(
        model=type(model).__name__,
        vocab_size=vocab_size,
        seq_len=seq_len,
        parameters=rows,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        global_batch=batch.global_batch,
        tokens_per_step=batch.global_batch * seq_len,
        train_tokens=counts.get("train_tokens"),
        steps=_steps(config, counts.get("train_samples"), batch.global_batch),
        flops_per_token=Flops.of([model]).of_sequence(seq_len) / seq_len,
        weight_bytes=weights,
        gradient_bytes=max(row.numel for row in rows) * _FP32 if config.fuse_optim_with_backward else weights,
        optimizer_bytes=optimizer,
        activation_bytes=_activation_bytes(config, getattr(model, "settings", None), batch.micro_batch, seq_len),
        checkpoint_bytes=None if optimizer is None else weights + optimizer,
    )


def _seq_len(config: Config) -> int:
    if isinstance(config.data, Target):
        return int(config.data.kwargs.get("seq_len", 1024))
    return config.data.seq_len


def _vocab_size(config: Config) -> int:
    """The tokenizer's; of a ``bpe`` that is not trained yet the size it is asked for."""
    if isinstance(config.data, Target):
        return int(getattr(config.model, "vocab_size", None) or 257)
    if config.data.tokenizer == "bpe":
        return config.data.bpe_vocab_size
    from forgather_cli.data.tokenize import load_tokenizer

    return load_tokenizer(config.data.tokenizer).vocab_size


def _build(config: Config, vocab_size: int, seq_len: int) -> nn.Module:
    import torch

    from forgather_cli.models.build import build_model

    with torch.device("meta"):
        return build_model(config.model, vocab_size=vocab_size, seq_len=seq_len)


def _cached_counts(config: Config) -> dict[str, int | None]:
    """Tokens and samples of the splits, only where they are counted already."""
    from forgather_cli.data.build import cached_token_counts

    return cached_token_counts(config.data) or {}


def _steps(config: Config, samples: int | None, global_batch: int) -> int | None:
    """Optimizer steps of the run; None where the length of an epoch is unknown."""
    if config.max_steps > 0:
        return config.max_steps
    per_epoch = config.epoch_train_steps
    if per_epoch is None and samples is not None:
        per_epoch = samples // global_batch if config.dataloader_drop_last else -(-samples // global_batch)
    if per_epoch is None or config.num_train_epochs < 0:
        return None
    return math.ceil(per_epoch * config.num_train_epochs - 1e-9)


# ------------------------------------------------------------------------------------------------------ parameters


def parameter_rows(model: nn.Module, config: Config) -> list[PlannedParameter]:
    """Every parameter, tied ones once, with its optimizer group."""
    described = describe(
        config.optimizer, model.named_parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
    )
    return [
        PlannedParameter(**vars(row), numel=math.prod(row.shape), kind=_kind(row.name)) for row in described.parameters
    ]


_KINDS = (
    ("norm", r"norm"),
    ("embedding", r"embed"),
    ("head", r"(^|\.)(lm_)?head\."),
    ("attention", r"attn|attention"),
    ("mlp", r"mlp|feed_forward|ffn"),
)


def _kind(name: str) -> str:
    return next((kind for kind, pattern in _KINDS if re.search(pattern, name)), "other")


# ------------------------------------------------------------------------------------------------------ activations


def _activation_bytes(config: Config, shape: Any, micro_batch: int, seq_len: int) -> int | None:
    """Memory of the tensors that the forward keeps for the backward, for one micro-batch; an estimate.

    Counted by hand from ``models/decoder.py`` with SDPA, which keeps no T x T scores: per token and layer the inputs
    of two norms and of the linear layers behind them (4 E), rotated q and k, v, and the attention's output
    ((2 H + 2 K) D), and SwiGLU's gate, up, activation and product (4 I). Activation checkpointing keeps E per layer
    and recomputes one layer at a time. The plain loss keeps logits and their log-softmax (2 V) and makes the gradient
    (V), in fp32; the chunked one a chunk of them. None for a model that is not the decoder.
    """
    if not isinstance(shape, DecoderSettings):
        return None
    heads, kv, head_dim = shape.num_attention_heads, shape.num_key_value_heads or 0, shape.head_dim or 0
    width = 2 if config.precision.type == "bf16" else _FP32
    inner = (2 * heads + 2 * kv) * head_dim + 4 * (shape.intermediate_size or 0) + 2 * shape.hidden_size
    layer = inner * width + 2 * shape.hidden_size * _FP32  # the residual stream stays fp32
    layers = shape.num_hidden_layers
    kept = layers * shape.hidden_size * _FP32 + layer if config.gradient_checkpointing else layers * layer
    tokens = micro_batch * seq_len
    return tokens * kept + _loss_bytes(config, tokens, shape.vocab_size or 0)


def _loss_bytes(config: Config, tokens: int, vocab_size: int) -> int:
    if isinstance(config.loss, LinearCrossEntropySettings):
        tokens = min(tokens, config.loss.chunk_size)
    return 3 * tokens * vocab_size * _FP32
