"""The decoder: logits and gradients against transformers; masks, cache and transforms against itself."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forgather_cli.config.schema import DecoderSettings, RopeScaling, RunSettings
from forgather_cli.config.schema.decoder import family_of
from forgather_cli.models.decoder import Decoder, KVCache, resolve_decoder
from forgather_cli.models.pretrained import hf_config
from forgather_cli.models.transform import apply_activation_checkpointing, blocks_of, compile_blocks

V = 101


def small(**changes: Any) -> DecoderSettings:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, **changes}
    return resolve_decoder(DecoderSettings(**shape), vocab_size=V, seq_len=32)


def decoder(seed: int = 0, **changes: Any) -> Decoder:
    """A decoder in eval mode with weights large enough, biases included, for every path to show in the logits."""
    torch.manual_seed(seed)
    model = Decoder(small(**changes)).eval()
    for name, p in model.named_parameters():
        nn.init.normal_(p, mean=1.0 if "norm" in name else 0.0, std=0.2)
    return model


def ids(batch: int = 2, length: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, V, (batch, length), generator=torch.Generator().manual_seed(seed))


def as_transformers(model: Decoder) -> Any:
    config = transformers.AutoConfig.for_model(**hf_config(model.settings))
    theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    theirs.load_state_dict(model.state_dict())
    return theirs


YARN = RopeScaling(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-gqa-tied": {"num_key_value_heads": 2, "tie_word_embeddings": True},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-head-dim": {"head_dim": 16, "rope_theta": 500.0},
    "mistral": {"sliding_window": 7, "num_key_value_heads": 1},
    "mistral-odd-heads": {"num_attention_heads": 3, "head_dim": 8},
    "qwen2": {"attention_bias": True, "attention_output_bias": False, "num_key_value_heads": 2},
    "qwen2-window": {"attention_bias": True, "attention_output_bias": False, "sliding_window": 5},
    "qwen3": {"qk_norm": True, "head_dim": 12, "num_key_value_heads": 2, "rms_norm_eps": 1e-3},
    "qwen3-biases-window": {"qk_norm": True, "attention_bias": True, "sliding_window": 9},
    "linear": {"rope_scaling": RopeScaling(rope_type="linear", factor=2.5)},
    "dynamic-within": {"rope_scaling": RopeScaling(rope_type="dynamic", factor=3.0), "max_position_embeddings": 64},
    "dynamic-beyond": {"rope_scaling": RopeScaling(rope_type="dynamic", factor=3.0), "max_position_embeddings": 10},
    "yarn": {"rope_scaling": YARN, "max_position_embeddings": 64},
    "yarn-mscale": {
        "rope_scaling": dataclasses.replace(
            YARN, original_max_position_embeddings=50, mscale=0.7, mscale_all_dim=0.4, truncate=False, beta_fast=8.0
        ),
        "rope_theta": 100.0,  # so that truncation moves the ramp
        "max_position_embeddings": 200,
    },
    "yarn-factor": {"rope_scaling": dataclasses.replace(YARN, attention_factor=1.3), "max_position_embeddings": 64},
    "llama3": {
        "rope_scaling": RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=64),
        "max_position_embeddings": 512,
        "rope_theta": 100.0,
    },
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", SHAPES)
def test_logits_and_every_gradient_equal_transformers(name: str) -> None:
    ours = decoder(**SHAPES[name])
    theirs = as_transformers(ours)
    assert type(theirs).__name__ == family_of(ours.settings).architecture
    assert type(theirs).__name__.lower().startswith(name.split("-")[0]) or "llama" in type(theirs).__name__.lower()
    mine, other = ours(ids()), theirs(ids()).logits
    torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)
    weights = torch.randn(mine.shape, generator=torch.Generator().manual_seed(2)) / mine.numel() ** 0.5
    (mine * weights).sum().backward()
    (other * weights).sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    assert gradients.keys() == {n for n, _ in ours.named_parameters()}
    for n, p in ours.named_parameters():
        mine, other = (gradient / gradients[n].abs().max() for gradient in (p.grad, gradients[n]))
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5, msg=lambda m, n=n: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_padding_and_position_ids_as_in_transformers() -> None:
    ours = decoder(num_key_value_heads=2)
    theirs = as_transformers(ours)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    expected = theirs(ids(), attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(ours(ids(), attention_mask=mask)[mask.bool()], expected[mask.bool()])
    shuffled = torch.arange(24).flip(0)
    torch.testing.assert_close(ours(ids(), position_ids=shuffled), theirs(ids(), position_ids=shuffled[None]).logits)


@pytest.mark.parametrize("changes", [{}, {"sliding_window": 4, "num_key_value_heads": 2}], ids=["full", "window"])
def test_isolated_documents_equal_documents_run_alone(changes: dict[str, Any]) -> None:
    model, tokens = decoder(**changes), ids(2, 20)
    lengths = [[7, 1, 12], [15, 5, 0]]
    documents = torch.stack([torch.repeat_interleave(torch.arange(3), torch.tensor(row)) for row in lengths])
    together = model(tokens, document_ids=documents)
    for row, split in enumerate(lengths):
        start = 0
        for length in filter(None, split):
            alone = model(tokens[row : row + 1, start : start + length])
            torch.testing.assert_close(together[row, start : start + length], alone[0], rtol=1e-5, atol=1e-5)
            start += length


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "left-padded"])
@pytest.mark.parametrize(("name", "value"), [("num_key_value_heads", 2), ("sliding_window", 6), ("qk_norm", True)])
@torch.no_grad()
def test_cached_logits_equal_uncached(name: str, value: Any, padded: bool) -> None:
    model, tokens = decoder(**{name: value}), ids(2, 21)
    mask = torch.ones_like(tokens)
    if padded:
        mask[1, :6] = 0
    cache, past = KVCache(), 0
    for step in (9, 1, 1, 4, 1, 5):
        end = past + step
        kwargs = {"attention_mask": mask[:, :end]} if padded else {}
        last = model(tokens[:, past:end], cache=cache, last_only=True, **kwargs)
        uncached = model(tokens[:, :end], **kwargs)
        torch.testing.assert_close(last[:, 0], uncached[:, -1], rtol=1e-5, atol=1e-5)
        past = end
    assert cache.length == 21


@torch.no_grad()
def test_cache_grows_past_its_first_capacity_and_excludes_documents() -> None:
    model, tokens, cache = decoder(), ids(1, 300), KVCache()
    for start in range(0, 300, 60):
        last = model(tokens[:, start : start + 60], cache=cache, last_only=True)
    torch.testing.assert_close(last, model(tokens)[:, -1:], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="document_ids and cache exclude"):
        model(ids(), document_ids=ids(), cache=KVCache())


def test_dropouts_act_in_training_only() -> None:
    model = decoder(attention_dropout=0.5, residual_dropout=0.5)
    torch.testing.assert_close(model(ids()), decoder()(ids()), rtol=0, atol=0)
    for off in ("attention_dropout", "residual_dropout"):
        model = decoder(**{"attention_dropout": 0.5, "residual_dropout": 0.5, off: 0.0}).train()
        assert not torch.allclose(model(ids()), model(ids())), off


def test_bf16_autocast_stays_near_fp32_and_norms_stay_fp32() -> None:
    model = decoder(qk_norm=True, num_key_value_heads=2)
    seen: list[torch.dtype] = []
    model.model.norm.register_forward_hook(lambda m, a, out: seen.append(out.dtype))
    exact = model(ids())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        rounded = model(ids())
    assert rounded.dtype == torch.bfloat16
    assert seen == [torch.float32] * 2
    assert (rounded - exact).norm() < 0.03 * exact.norm()


def test_angles_stay_fp32_in_a_bf16_model() -> None:
    model = decoder().to(torch.bfloat16)
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, decoder().model.rotary_emb.inv_freq, rtol=0, atol=0)
    assert model(ids()).dtype == torch.bfloat16


def test_activation_checkpointing_changes_neither_names_nor_gradients() -> None:
    plain, recomputed = decoder(residual_dropout=0.2).train(), decoder(residual_dropout=0.2).train()
    names = list(recomputed.state_dict())
    apply_activation_checkpointing(recomputed)
    assert list(recomputed.state_dict()) == names
    copied, calls = copy.deepcopy(recomputed), []
    copied.model.layers["0"].mlp.register_forward_hook(lambda *_: calls.append(1))
    for model in (plain, copied):
        torch.manual_seed(3)
        model(ids()).square().mean().backward()
    assert len(calls) == 2, "forward and recomputation, both of the copy"
    for (name, a), b in zip(plain.named_parameters(), copied.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=0, atol=0, msg=name)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.13's dynamo reads it itself
@pytest.mark.parametrize("recomputed", [False, True])
def test_blocks_compile_in_place_once_for_all_layers(recomputed: bool) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    model, reference = decoder(num_hidden_layers=3), decoder(num_hidden_layers=3)
    counter = CompileCounterWithBackend("eager")
    if recomputed:
        apply_activation_checkpointing(model)
    names = list(model.state_dict())
    compile_blocks(model, RunSettings(torch_compile_fullgraph=True))
    for block in blocks_of(model):
        block.compile(backend=counter, fullgraph=True)  # the default backend, inductor, needs a compiler and 20 s
    for either in (model, reference):
        either(ids()).square().mean().backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert list(model.state_dict()) == names
    assert counter.frame_count == 1, "one compilation for all layers"


def test_blocks_of_other_models() -> None:
    blocks = nn.Sequential(*(nn.TransformerEncoderLayer(4, 1) for _ in range(2)))
    model = nn.ModuleDict({"wte": nn.Embedding(4, 4), "h": blocks, "ln": nn.LayerNorm(4)})
    assert blocks_of(model) == list(blocks)


def test_resolving_fills_every_null_and_tells_of_sequences_too_long(caplog: pytest.LogCaptureFixture) -> None:
    s = resolve_decoder(DecoderSettings(hidden_size=64, num_attention_heads=4), vocab_size=257, seq_len=128)
    assert (s.intermediate_size, s.num_key_value_heads, s.head_dim) == (192, 4, 16)
    assert (s.vocab_size, s.max_position_embeddings, s.attention_output_bias) == (257, 128, False)
    small(max_position_embeddings=16)
    assert "data.seq_len=32 is longer than model.max_position_embeddings=16" in caplog.text


def test_on_a_gpu_grouped_heads_are_repeated_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SDPA would keep T x T scores for them."""
    attention, seen = decoder(num_key_value_heads=2).model.layers["0"].self_attn, []

    def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **more: Any) -> torch.Tensor:
        seen.append((k.shape[1], more["enable_gqa"]))
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", sdpa)
    for dtype in (torch.float32, torch.bfloat16):
        with FakeTensorMode():
            q, k = (torch.empty(1, heads, 8, 8, device="cuda", dtype=dtype) for heads in (4, 2))
            attention.attend(q, k, k, None, is_causal=True)
    assert seen == [(4, False), (2, True)]
