"""Options of the group ``model``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from forgather_cli.config.schema.base import FilePath, PositiveInt, Target, by_type, only_if, only_where, settings
from forgather_cli.config.schema.decoder import ModelSettings, WholeSettings

_OF_DIRECTORY = only_where(".path", bool, "set model.path=DIR")
_RESIZED = only_if(".resize_vocabulary", True)


@settings
class PretrainedSettings(WholeSettings):
    """A Hugging Face model of the Llama, Mistral, Qwen2 or Qwen3 family (config.json and safetensors)."""

    maker: ClassVar[str] = "forgather_cli.models.build:pretrained"
    weights: ClassVar[str] = "forgather_cli.models.build:PretrainedWeights"
    directory_setting: ClassVar[str] = "path"
    is_encoder_decoder: ClassVar[bool | None] = None
    head_gives_logits: ClassVar[bool] = True

    type: Literal["pretrained"] = "pretrained"
    path: FilePath  # its directory, a checkpoint, or OWNER/NAME on the Hugging Face hub
    replace_tokenizer: bool = False
    resize_vocabulary: bool = False  # true: add rows for tokens that the tokenizer has and the model lacks
    # rows: the resized vocabulary is rounded up to a multiple of this; null: it is not
    pad_vocab_to_multiple_of: Annotated[PositiveInt | None, _RESIZED] = None

    def num_parameters(self, vocab_size: int) -> int:
        return sum(file.stat().st_size for file in Path(self.path).glob("*.safetensors")) // 2


@settings
class TransformersSettings(WholeSettings):
    """Any causal language model of the transformers library, from a directory, the hub, or fresh.

    Under trainer=pipeline decoders like Llama.
    """

    maker: ClassVar[str] = "forgather_cli.models.hf.build:build_causal_lm"
    weights: ClassVar[str] = "forgather_cli.models.hf.weights:CausalLMWeights"
    directory_setting: ClassVar[str] = "path"

    type: Literal["transformers"] = "transformers"
    # directory with config.json, checkpoint, or OWNER/NAME on the hub; null: fresh weights
    path: FilePath | None = None
    # {model_type: gpt2, n_layer: 2, ...}, or a config.json; beside path: changes to its own
    config: dict[str, Any] | FilePath | None = None
    # eager, sdpa, flash_attention_2, ...; null: what transformers takes for the class
    attn_implementation: str | None = None
    trust_remote_code: bool = False  # always false: code that lies in a model directory is never run
    replace_tokenizer: Annotated[bool, _OF_DIRECTORY] = False
    resize_vocabulary: Annotated[bool, _OF_DIRECTORY] = False
    pad_vocab_to_multiple_of: Annotated[PositiveInt | None, _RESIZED] = None

    def problems(self, config: Any) -> Iterator[str]:
        if self.trust_remote_code:
            yield (
                "trust_remote_code: code that lies in a model directory is never run, got true; leave it out, and "
                "build a model class of your own with model._target_=module.function"
            )
        if self.path is None and self.config is None:
            yield (
                "model.path: model=transformers needs a directory (model.path=DIR) or, for fresh weights, a config "
                "(model.config={model_type: gpt2, n_layer: 2}); set one of them"
            )
        if self.path is not None and isinstance(self.config, str):
            yield (
                f"model.config: model.path={self.path} has a config.json, got {self.config!r} besides; leave one out, "
                "or give the changes as a mapping"
            )
        if self.path is None and isinstance(self.config, dict) and "model_type" not in self.config:
            yield (
                "model.config: names no model_type, so the class is unknown; add one, as in "
                "model.config={model_type: gpt2}"
            )


ModelOption = Annotated[ModelSettings | Target, by_type]
