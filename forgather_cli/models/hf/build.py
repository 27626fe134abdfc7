"""``model=transformers`` to a model."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from forgather_cli.config.schema import TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.hf.library import config_of, library
from forgather_cli.models.hf.model import CausalLM
from forgather_cli.models.resize import grown_vocabulary

log = logging.getLogger(__name__)


def build_causal_lm(option: TransformersSettings, *, vocab_size: int, seq_len: int) -> CausalLM:
    """The model on the device that is current (meta too), without loaded weights; sizes in tokens.

    Raises ModelError.
    """
    config = config_of(option, vocab_size=vocab_size)
    text = config.get_text_config()
    if option.path is not None:
        text.vocab_size = grown_vocabulary(option, text.vocab_size, tokens=vocab_size)
    elif text.vocab_size < vocab_size:
        raise ModelError(
            f"model.config.vocab_size: the tokenizer has {vocab_size} tokens, got {text.vocab_size}; leave it out, or "
            f"set at least {vocab_size}"
        )
    make = partial(_construct, config, option)
    model = CausalLM(make(), partial(_on_meta, make))
    _check_causal(model)
    _check_length(model, seq_len)
    _keep_gradients_of_the_end(model)
    return model


def _construct(config: Any, option: TransformersSettings) -> Any:
    attention = {} if option.attn_implementation is None else {"attn_implementation": option.attn_implementation}
    auto = library().AutoModelForCausalLM
    try:
        return auto.from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False, **attention)
    except (ValueError, ImportError) as error:
        setting = "model.attn_implementation" if attention else "model.config"
        raise ModelError(f"{setting}: {type(config).__name__}: {' '.join(str(error).split())}") from error


def _on_meta(make: Callable[[], Any]) -> Any:
    with torch.device("meta"):
        return make()


def _check_causal(model: CausalLM) -> None:
    """Encoders have a class with a head too, which hides the next tokens only where the config says so."""
    cls = type(model.theirs)
    if getattr(model.config, "is_decoder", True) is False and "is_decoder=True" in inspect.getsource(cls):
        raise ModelError(
            f"model.config.is_decoder: {cls.__name__} with is_decoder=false sees the tokens it is to predict; set "
            "+model.config.is_decoder=true, or choose a decoder"
        )


def _check_length(model: CausalLM, seq_len: int) -> None:
    if model.max_positions is not None and seq_len > model.max_positions:
        raise ModelError(
            f"data.seq_len: {type(model.theirs).__name__} has {model.max_positions} learned positions "
            f"(max_position_embeddings), got {seq_len}; set data.seq_len={model.max_positions}, or more positions for "
            "fresh weights"
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and seq_len > limit:
        log.warning("data.seq_len=%d is longer than the model's max_position_embeddings=%d", seq_len, limit)


def _keep_gradients_of_the_end(model: CausalLM) -> None:
    """torch gives ``padding_idx`` no gradient. Where the end token pads too, it would never be learned."""
    config, embedding = model.config.get_text_config(), model.theirs.get_input_embeddings()
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    if getattr(embedding, "padding_idx", None) in (*ends, config.bos_token_id):
        embedding.padding_idx = None
