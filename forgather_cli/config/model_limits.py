"""What the options of the group ``model`` ask of each other and of the rest, as config mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.families import family_of
from forgather_cli.config.schema import (
    Config,
    DecoderSettings,
    PipelineSettings,
    PretrainedSettings,
    RopeScaling,
    TransformersSettings,
)
from forgather_cli.errors import ModelError


def model_problems(config: Config) -> Iterator[str]:
    """Each names the settings and the remedy."""
    model = config.model
    if isinstance(model, DecoderSettings):
        yield from decoder_problems(model)
    if isinstance(model, TransformersSettings):
        yield from _transformers(model)
        if isinstance(config.trainer, PipelineSettings):
            yield (
                "trainer: pipeline cannot cut a model=transformers into stages; choose trainer=ddp or fsdp2, or "
                "model=pretrained, whose Llama, Mistral, Qwen2 and Qwen3 shapes it can cut"
            )
    if isinstance(model, PretrainedSettings | TransformersSettings):
        yield from _vocabulary(model)


def decoder_problems(model: DecoderSettings) -> Iterator[str]:
    """Settings of the decoder that do not fit together; also for those that a ``config.json`` says."""
    heads, groups = model.num_attention_heads, model.num_key_value_heads
    if model.head_dim is None and model.hidden_size % heads:
        yield (
            f"model.hidden_size: must be a multiple of model.num_attention_heads={heads}, got {model.hidden_size}; "
            f"set model.hidden_size={_nearest(model.hidden_size, 2 * heads)}, or set model.head_dim"
        )
    elif model.head_dim is None and model.hidden_size // heads % 2:
        yield (
            f"model.hidden_size: rotary embedding needs an even head size, got {model.hidden_size} / "
            f"model.num_attention_heads={heads} = {model.hidden_size // heads}; "
            f"set model.hidden_size={_nearest(model.hidden_size, 2 * heads)}"
        )
    elif model.head_dim is not None and model.head_dim % 2:
        yield (
            f"model.head_dim: rotary embedding needs an even head size, got {model.head_dim}; "
            f"set model.head_dim={_nearest(model.head_dim, 2)}"
        )
    if groups is not None and heads % groups:
        divisors = [str(number) for number in range(1, heads + 1) if heads % number == 0]
        yield (
            f"model.num_key_value_heads: must divide model.num_attention_heads={heads}, got {groups}; "
            f"set it to {_either(divisors)}"
        )
    try:
        family_of(model)
    except ModelError as error:
        yield str(error)


def _nearest(number: int, step: int) -> str:
    """The multiples of ``step`` around a number that is none."""
    below = number // step * step
    return _either([str(each) for each in (below, below + step) if each])


def _either(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


_ROPE = {
    "factor": ("linear", "dynamic", "yarn", "llama3"),
    "original_max_position_embeddings": ("yarn", "llama3"),
    **dict.fromkeys(("low_freq_factor", "high_freq_factor"), ("llama3",)),
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"), ("yarn",)),
}
"""Settings of ``rope_scaling`` -> the types that read them (``models/rope.py``)."""


def void_in_model(config: Config) -> Iterator[tuple[str, str, str]]:
    """(setting, the setting that makes it void, what would make it count)."""
    scaling = config.model.rope_scaling if isinstance(config.model, DecoderSettings) else None
    if isinstance(scaling, RopeScaling):
        path = "model.rope_scaling"
        for name, types in _ROPE.items():
            if scaling.rope_type not in types:
                yield f"{path}.{name}", f"{path}.rope_type", f"set rope_type={_either(list(types))}"


def _vocabulary(model: PretrainedSettings | TransformersSettings) -> Iterator[str]:
    if model.pad_vocab_to_multiple_of is not None and not model.resize_vocabulary:
        yield (
            "pad_vocab_to_multiple_of: nothing reads it with resize_vocabulary=false; set resize_vocabulary=true or "
            "leave pad_vocab_to_multiple_of out"
        )


def _transformers(model: TransformersSettings) -> Iterator[str]:
    if model.trust_remote_code:
        yield (
            "trust_remote_code: code that lies in a model directory is never run, got true; leave it out, and build a "
            "model class of your own with model._target_=module.function"
        )
    if model.path is None and model.config is None:
        yield (
            "model.path: model=transformers needs a directory (model.path=DIR) or, for fresh weights, a config "
            "(model.config={model_type: gpt2, n_layer: 2}); set one of them"
        )
    if model.path is not None and isinstance(model.config, str):
        yield (
            f"model.config: model.path={model.path} has a config.json, got {model.config!r} besides; leave one out, or "
            "give the changes as a mapping"
        )
    if model.path is None and isinstance(model.config, dict) and "model_type" not in model.config:
        yield (
            "model.config: names no model_type, so the class is unknown; add one, as in model.config={model_type: gpt2}"
        )
    if model.path is None and model.resize_vocabulary:
        yield (
            "resize_vocabulary: nothing reads it without model.path, fresh weights have the tokenizer's size; leave it "
            "out, or set vocab_size in model.config"
        )
