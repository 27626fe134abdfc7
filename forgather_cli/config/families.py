"""Which Hugging Face architecture a set of decoder settings is.

A checkpoint of the decoder is a directory that transformers loads as it lies, so settings that no architecture there
can express are refused before training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from forgather_cli.config.schema import DecoderSettings
from forgather_cli.errors import ModelError


@dataclass(frozen=True)
class Family:
    """One architecture: its ``model_type`` and class, and the settings it has no room for."""

    model_type: str
    architecture: str
    conflicts: Callable[[DecoderSettings], list[str]]
    """The settings, as typed, that this family cannot express."""


def output_bias(s: DecoderSettings) -> bool:
    """Whether the attention's output projection has a bias: null follows ``attention_bias``."""
    return s.attention_bias if s.attention_output_bias is None else s.attention_output_bias


def _named(**flags: bool) -> list[str]:
    return [name for name, conflicting in flags.items() if conflicting]


def _llama(s: DecoderSettings) -> list[str]:
    return _named(
        qk_norm=s.qk_norm,
        sliding_window=s.sliding_window is not None,
        attention_output_bias=output_bias(s) != s.attention_bias,
        num_attention_heads=s.hidden_size % s.num_attention_heads != 0,
    )


def _mistral(s: DecoderSettings) -> list[str]:
    return _named(
        qk_norm=s.qk_norm,
        attention_bias=s.attention_bias,
        attention_output_bias=output_bias(s) and not s.attention_bias,
        mlp_bias=s.mlp_bias,
    )


def _qwen2(s: DecoderSettings) -> list[str]:
    return _named(
        qk_norm=s.qk_norm,
        attention_bias=not s.attention_bias,
        attention_output_bias=output_bias(s),
        mlp_bias=s.mlp_bias,
    )


def _qwen3(s: DecoderSettings) -> list[str]:
    return _named(
        qk_norm=not s.qk_norm,
        attention_output_bias=output_bias(s) != s.attention_bias,
        mlp_bias=s.mlp_bias,
    )


FAMILIES = {
    family.model_type: family
    for family in (
        Family("llama", "LlamaForCausalLM", _llama),
        Family("mistral", "MistralForCausalLM", _mistral),
        Family("qwen2", "Qwen2ForCausalLM", _qwen2),
        Family("qwen3", "Qwen3ForCausalLM", _qwen3),
    )
}
"""By model_type, in order of preference."""

_SETTINGS = ("qk_norm", "sliding_window", "attention_bias", "attention_output_bias", "mlp_bias")


def family_of(settings: DecoderSettings) -> Family:
    """The first family that can express ``settings``. Raises ModelError naming the settings that do not go together."""
    for family in FAMILIES.values():
        if not family.conflicts(settings):
            return family
    given = {name: getattr(settings, name) for name in _SETTINGS if getattr(settings, name) not in (None, False)}
    if settings.attention_bias and not output_bias(settings):
        given["attention_output_bias"] = False
    if settings.hidden_size % settings.num_attention_heads:
        given.update(hidden_size=settings.hidden_size, num_attention_heads=settings.num_attention_heads)
    listed = ", ".join(f"model.{name}={str(value).lower()}" for name, value in given.items())
    raise ModelError(
        f"{listed}: no Hugging Face architecture ({', '.join(FAMILIES)}) has this combination; "
        f"qk_norm excludes mlp_bias, mlp_bias needs equal attention biases and no sliding_window"
    )
