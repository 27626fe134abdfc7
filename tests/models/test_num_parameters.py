"""What settings say of a model's size, without torch, is what is built of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import DecoderSettings, EncoderDecoderSettings
from forgather_cli.models.build import build_model

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
