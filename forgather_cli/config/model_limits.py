"""What the options of the group ``model`` ask of each other and of the rest, as config mistakes."""

from __future__ import annotations

from collections.abc import Iterator

from forgather_cli.config.schema import Config, PipelineSettings, PretrainedSettings, TransformersSettings


def model_problems(config: Config) -> Iterator[str]:
    """Each names the settings and the remedy."""
    model = config.model
    if isinstance(model, TransformersSettings):
        yield from _transformers(model)
        if isinstance(config.trainer, PipelineSettings):
            yield (
                "trainer: pipeline cannot cut a model=transformers into stages; choose trainer=ddp or fsdp2, or "
                "model=pretrained, whose Llama, Mistral, Qwen2 and Qwen3 shapes it can cut"
            )
    if isinstance(model, PretrainedSettings | TransformersSettings):
        yield from _vocabulary(model)


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
