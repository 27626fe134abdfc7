"""``precision.stream``: the residual stream under bf16 autocast, against plain PyTorch with the same casts."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import paired
import pytest
import tiny
import torch
import torch.nn.functional as F
from parity import LAYOUTS, Result, composed_of, corpus, scratch, train
from torch import Tensor, nn

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config, LoRASettings
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.loss.losses import CrossEntropy
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.layers import RMSNorm
from forgather_cli.models.rope import RotaryEmbedding
from forgather_cli.plan.activations import activations_of
from forgather_cli.precision.dtypes import autocast_for
from forgather_cli.strategies.single import SingleDevice
from forgather_cli.trainer.build import model_spec

BF16, CPU = torch.bfloat16, torch.device("cpu")
SHAPE = {"num_key_value_heads": 1, "qk_norm": True, "attention_bias": True, "tie_word_embeddings": True}


def strategy_of(model: nn.Module, *words: str) -> SingleDevice:
    config = composed_of(("precision=bf16", *words))
    strategy = SingleDevice(CPU, CrossEntropy(), autocast_for(config.precision, CPU))
    strategy.materialize(model_spec(lambda: model, config, strategy))
    return strategy


def plain(model: Decoder, tokens: Tensor, stream: torch.dtype) -> Tensor:
    """The sum of the loss over targets, from the weights alone: each product in bf16, the stream in ``stream``."""
    w, s = dict(model.named_parameters()), model.settings
    B, T = tokens.shape
    head_dim = s.head_dim or 0

    def norm(x: Tensor, name: str) -> Tensor:
        weight, wide = w[f"{name}.weight"].to(stream).float(), x.float()
        scale = wide.square().mean(-1, keepdim=True).add(s.rms_norm_eps).rsqrt()
        return (wide * scale * weight).to(stream)

    def linear(x: Tensor, name: str) -> Tensor:
        bias = w.get(f"{name}.bias")
        return F.linear(x.to(BF16), w[f"{name}.weight"].to(BF16), None if bias is None else bias.to(BF16))

    def heads(x: Tensor) -> Tensor:
        return x.view(B, T, -1, head_dim).transpose(1, 2)

    positions = torch.arange(T)[:, None] * RotaryEmbedding(s).inv_freq
    cos, sin = torch.cat([positions.cos()] * 2, -1), torch.cat([positions.sin()] * 2, -1)

    def turned(x: Tensor) -> Tensor:
        wide = x.float()
        first, second = wide.chunk(2, -1)
        return (wide * cos + torch.cat([-second, first], -1) * sin).to(BF16)

    x = F.embedding(tokens, w["model.embed_tokens.weight"]).to(stream)
    for n in range(s.num_hidden_layers):
        at, y = f"model.layers.{n}", norm(x, f"model.layers.{n}.input_layernorm")
        y = y.to(BF16)
        q, k, v = (heads(linear(y, f"{at}.self_attn.{name}_proj")) for name in "qkv")
        q, k = turned(norm(q, f"{at}.self_attn.q_norm")), turned(norm(k, f"{at}.self_attn.k_norm"))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(B, T, -1)
        x = x + linear(y, f"{at}.self_attn.o_proj")
        y = norm(x, f"{at}.post_attention_layernorm").to(BF16)
        y = F.silu(linear(y, f"{at}.mlp.gate_proj")) * linear(y, f"{at}.mlp.up_proj")
        x = x + linear(y, f"{at}.mlp.down_proj")
    logits = F.linear(norm(x, "model.norm").to(BF16), w["model.embed_tokens.weight"].to(BF16)).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")


@pytest.mark.parametrize("stream", ["bf16", "null"])
def test_loss_and_gradients_are_those_of_the_same_casts_in_plain_pytorch(stream: str) -> None:
    model, batch = tiny.decoder(**SHAPE), tiny.token_batch()
    strategy = strategy_of(model, f"precision.stream={stream}")
    targets = torch.tensor(4 * 15.0)
    loss = strategy.forward_backward([batch], targets)
    ours = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    expected = plain(model, batch["input_ids"], BF16 if stream == "bf16" else torch.float32) / targets
    expected.backward()
    theirs = {name: p.grad for name, p in model.named_parameters()}
    assert loss == pytest.approx(expected.item(), rel=3e-6), "the other stream's is 3e-5 away"
    norms = [flat(each).norm().item() for each in (ours, theirs)]
    assert norms[0] == pytest.approx(norms[1], rel=5e-4)
    assert (flat(ours) - flat(theirs)).norm() <= 0.0045 * norms[1], "the other stream's are 0.0065 away"
    for name, gradient in theirs.items():
        assert ours[name].dtype == torch.float32
        assert (ours[name] - gradient).norm() <= 0.02 * gradient.norm(), name


def flat(gradients: dict[str, Any]) -> Tensor:
    return torch.cat([gradient.flatten() for gradient in gradients.values()])


def stream_of(model: nn.Module, batch: dict[str, Tensor], *words: str) -> set[torch.dtype]:
    """The dtypes of what enters and leaves layers, and reaches the head."""
    seen = set()
    strategy = strategy_of(model, *words)
    for module in model.modules():
        if type(module).__name__.endswith("Layer") or isinstance(module, RMSNorm):
            module.register_forward_hook(lambda _, args, out: seen.update((args[0].dtype, out.dtype)))
    strategy.forward_backward([batch], torch.tensor(60.0))
    return seen


def test_the_stream_is_in_bf16_from_the_embedding_to_the_head() -> None:
    assert stream_of(tiny.decoder(), tiny.token_batch(), "precision.stream=bf16") == {BF16}
    assert stream_of(tiny.decoder(), tiny.token_batch()) == {torch.float32}
    assert stream_of(tiny.decoder(), tiny.token_batch(), "precision.stream=fp32") == {torch.float32}
    assert stream_of(paired.model(), tiny.token_batch(), "precision.stream=bf16") == {BF16}


def test_adapters_whose_embedding_gives_out_fp32_leave_it_in_bf16() -> None:
    config = replace(composed_of(("precision=bf16", "precision.stream=bf16")), adapter=LoRASettings(r=4))
    model = tiny.decoder()
    model_spec(lambda: model, config, strategy_of(tiny.decoder()), init=lambda part: None).whole()
    with torch.autocast("cpu", BF16):
        assert model.model.embed_tokens(tiny.token_batch()["input_ids"]).dtype == BF16


def test_other_models_and_sharded_weights_refuse_it() -> None:
    with pytest.raises(ModelError, match=r"precision.stream: bf16 is for models of Forgather's own classes.*Llama"):
        strategy_of(tiny.llama(), "precision.stream=bf16")
    sharded = "precision=bf16", "precision.stream=fp32"
    for layout in (("trainer=fsdp2",), ("trainer=pipeline", "trainer.shard=2", "nproc_per_node=4")):
        with pytest.raises(
            ConfigError, match=r"precision.stream: where weights are sharded .* got fp32; set precision"
        ):
            load_config(None, [*sharded, *layout])
    kept: Config = load_config(None, ["precision=bf16", "precision.stream=bf16", "trainer=fsdp2"]).config
    assert kept.precision.stream == "bf16"  # type: ignore[union-attr]


def test_plan_counts_half_a_stream() -> None:
    def planned(*words: str) -> tuple[Any, ...]:
        found = activations_of(composed_of(("precision=bf16", *words)), tiny.decoder_settings())
        assert found is not None
        return *found.kept, found.kept_of_recomputed, found.ends

    in_fp32, in_bf16 = planned(), planned("precision.stream=bf16")
    saved = [4, 4, 2, 16]  # bytes of each of 32 numbers of a token: in two layers, in one made again, around them
    assert [(a - b) / 32 for a, b in zip(in_fp32, in_bf16, strict=True)] == saved
    assert in_bf16 == planned("trainer=fsdp2")


BASE = (
    *corpus(), "tokenizer=bytes", "precision=bf16", "model.num_hidden_layers=4", "global_batch_size=12",
    "max_steps=12", "eval_steps=6", "warmup_steps=2", "deterministic=true",
)  # fmt: skip


@functools.cache
def run(layout: str, *more: str) -> Result:
    rows = 6 if layout.startswith("ddp") else 12
    words = (*BASE, f"per_device_train_batch_size={rows}", *more)
    return train(LAYOUTS[layout], words, scratch() / f"stream-{run.cache_info().misses}")


@pytest.mark.parametrize("layout", ["ddp 2", "1F1B 2", pytest.param("ZBVZeroBubble 2", marks=pytest.mark.full)])
def test_strategies_agree_within_what_bf16_rounds(layout: str) -> None:
    reference, found = run("single", "precision.stream=bf16"), run(layout, "precision.stream=bf16")
    # one device is 1e-4 from itself in loss and 6e-3 in norm when it adds up gradients in another order
    assert found.losses == pytest.approx(reference.losses, rel=1e-3)
    assert found.eval_losses == pytest.approx(reference.eval_losses, rel=1e-3)
    assert found.norms == pytest.approx(reference.norms, rel=3e-2)


def test_it_trains_as_well_as_fp32_to_within_the_seeds_noise() -> None:
    def last(seed: int, stream: str) -> float:
        found = run("single", "max_steps=60", "eval_steps=60", f"seed={seed}", f"precision.stream={stream}")
        return found.eval_losses[-1]

    in_fp32, in_bf16 = ([last(seed, stream) for seed in (1, 2, 3)] for stream in ("fp32", "bf16"))
    noise = max(in_fp32) - min(in_fp32)
    assert in_bf16 != in_fp32
    for ours, theirs in zip(in_bf16, in_fp32, strict=True):
        assert abs(ours - theirs) <= 0.5 * noise
