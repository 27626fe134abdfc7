"""Parameters: how many, and their first values, a function of (seed, name) and of nothing else."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import DecoderSettings, EncoderDecoderSettings
from forgather_cli.models.build import build_model
from forgather_cli.models.decoder import Decoder, resolve_decoder
from forgather_cli.models.init import allocate, init_parameters, stable_seed


def settings(**changes: Any) -> DecoderSettings:
    shape = {"hidden_size": 32, "num_hidden_layers": 3, "initializer_range": 0.05, "qk_norm": True, **changes}
    return resolve_decoder(DecoderSettings(**shape), vocab_size=99, seq_len=16)


def built(where: str, seed: int = 7, **changes: Any) -> Decoder:
    with torch.device(where):
        model = Decoder(settings(**changes))
    assert allocate(model, "cpu") is (where == "meta")
    init_parameters(model, seed)
    return model


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    for name in a.keys() & b.keys():
        assert torch.equal(a[name], b[name]), name


@pytest.mark.parametrize("tied", [False, True])
def test_meta_equals_cpu_bit_for_bit_and_runs(tied: bool) -> None:
    torch.manual_seed(0)
    meta = built("meta", tie_word_embeddings=tied)
    torch.manual_seed(1)
    cpu = built("cpu", tie_word_embeddings=tied)
    assert_equal(meta.state_dict(), cpu.state_dict())
    assert (meta.lm_head.weight is meta.model.embed_tokens.weight) is tied
    tokens = torch.arange(16)[None]
    assert torch.equal(meta(tokens), cpu(tokens)), "rotary frequencies too"


def test_values_follow_the_rules_and_the_seed() -> None:
    model = built("meta", attention_bias=True)
    for name, p in model.named_parameters():
        if "norm" in name:
            assert (p == 1).all(), name
        elif name.endswith("bias"):
            assert (p == 0).all(), name
        else:
            assert abs(p.std().item() / 0.05 - 1) < 0.1, name
            assert abs(p.mean().item()) < 0.005, name
    weights = [p for n, p in model.named_parameters() if "mlp.up_proj" in n]
    assert not torch.equal(weights[0], weights[1]), "each parameter has numbers of its own"
    assert not torch.equal(weights[0], built("meta", seed=8).model.layers["0"].mlp.up_proj.weight)


@pytest.mark.parametrize("tied", [False, True])
def test_outputs_may_begin_at_zero_and_the_rest_as_before(tied: bool) -> None:
    usual = built("meta", tie_word_embeddings=tied, attention_bias=True)
    model = built("meta", tie_word_embeddings=tied, attention_bias=True, zero_init_outputs=True)
    for (name, p), before in zip(model.named_parameters(), usual.parameters(), strict=True):
        output = any(part in name for part in ("o_proj", "down_proj", "lm_head"))
        assert torch.equal(p, torch.zeros_like(p) if output else before), name
    tokens = torch.arange(16)[None]
    embedded = model.model.embed_tokens(tokens)
    torch.testing.assert_close(model.hidden_states(tokens), model.model.norm(embedded), msg="blocks add nothing")


def test_a_part_of_the_model_gets_the_same_values() -> None:
    whole = built("cpu")
    with torch.device("meta"):
        part = Decoder(settings())
    del part.model.layers["0"], part.model.layers["1"]
    part.model.embed_tokens = None
    allocate(part, "cpu")
    init_parameters(part, 7)
    assert set(part.state_dict()) < set(whole.state_dict())
    assert_equal(part.state_dict(), whole.state_dict())
    layer = copy.deepcopy(whole.model.layers["2"])
    for p in layer.parameters():
        nn.init.zeros_(p)
    init_parameters(layer, 7, prefix="model.layers.2.")
    assert_equal(layer.state_dict(), whole.model.layers["2"].state_dict())


def test_global_generator_is_left_alone() -> None:
    model, other = built("meta"), nn.Linear(3, 3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    init_parameters(model, 1)
    init_parameters(other, 1)
    assert torch.equal(torch.rand(3), expected)


def test_numbers_are_the_same_in_every_version() -> None:
    assert stable_seed(42, "model.norm.weight") == 5961895171008054977
    assert stable_seed(42, "model.norm.weight") != stable_seed(4, "2:model.norm.weight")


def test_bf16_parameters_are_rounded_fp32_draws_and_a_generator_of_the_device_draws_alike_each_time() -> None:
    exact, rounded = built("cpu"), Decoder(settings()).to(torch.bfloat16)
    init_parameters(rounded, 7)
    for (name, a), b in zip(exact.named_parameters(), rounded.parameters(), strict=True):
        assert torch.equal(a.bfloat16(), b), name
    again = built("cpu")
    for model in (exact, again):
        init_parameters(model, 3, device_generator=True)
    assert_equal(exact.state_dict(), again.state_dict())


class Other(nn.Module):
    """A user's model of torch's own layers, one of them with buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.b = nn.Embedding(5, 3)


def test_other_modules_are_reset_from_their_names() -> None:
    with torch.device("meta"):
        meta = Other()
    allocate(meta, "cpu")
    init_parameters(meta, 1)
    cpu = Other()
    init_parameters(cpu, 1)
    assert_equal(meta.state_dict(), cpu.state_dict())
    assert 0 < meta.a.weight.abs().max() <= 1 / 4**0.5, "the layer's own distribution"
    assert (meta.norm.running_var == 1).all()
    reseeded = Other()
    init_parameters(reseeded, 2)
    assert not torch.equal(reseeded.a.weight, cpu.a.weight)


VOCABULARY = 300
SETTINGS: list[DecoderSettings | EncoderDecoderSettings] = [
    DecoderSettings(attention_bias=True, mlp_bias=True),
    DecoderSettings(attention_bias=True, attention_output_bias=False, tie_word_embeddings=True),
    DecoderSettings(qk_norm=True, num_attention_heads=4, num_key_value_heads=2, head_dim=10, vocab_size=1000),
    DecoderSettings(hidden_size=72, num_attention_heads=4, intermediate_size=100),
    EncoderDecoderSettings(),
    EncoderDecoderSettings(tie_word_embeddings=False, attention_bias=True),
    EncoderDecoderSettings(num_key_value_heads=2, head_dim=20, intermediate_size=100),
]


@pytest.mark.parametrize("option", [*SETTINGS, "nano", "1b"])
def test_settings_count_the_parameters_of_their_model(option: Any) -> None:
    option = load_config(None, [f"model={option}"]).config.model if isinstance(option, str) else option
    with torch.device("meta"):
        model = build_model(option, vocab_size=VOCABULARY, seq_len=64)
    assert option.num_parameters(VOCABULARY) == sum(each.numel() for each in model.parameters())
