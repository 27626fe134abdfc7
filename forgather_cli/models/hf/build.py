"""``model=transformers`` to a model: the library, imported where it is used, a model's config and its class."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

import torch

from forgather_cli.config.schema import TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.hf.model import CausalLM
from forgather_cli.models.pretrained import read_config
from forgather_cli.models.resize import grown_vocabulary

_log = logging.getLogger(__name__)

_OLDEST = 5  # from it on a class can be built on meta and says how parameters and buffers begin (_init_weights)
_INSTALL = "pip install 'forgather[transformers]'"


@cache
def library() -> Any:
    """The package, without its progress bars. Raises ModelError if it is missing or too old."""
    try:
        # it imports torchao where that is installed, which tells of every kernel it cannot load (torchao 0.18)
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = importlib.import_module("transformers")
                importlib.import_module("transformers.modeling_utils")
        finally:
            logging.disable(before)
    except ImportError as error:
        raise ModelError(f"model=transformers: needs the transformers package ({error}); {_INSTALL}") from error
    if int(found.__version__.split(".")[0]) < _OLDEST:
        raise ModelError(f"model=transformers: needs transformers {_OLDEST}, got {found.__version__}; {_INSTALL} -U")
    found.utils.logging.disable_progress_bar()
    found.utils.logging.set_verbosity_error()
    return found


def config_of(option: TransformersSettings, *, vocab_size: int) -> Any:
    """The config of the model that ``option`` describes, without memory for it.

    A fresh model's ``vocab_size`` is that of the tokenizer where its config says none. Raises ModelError.
    """
    changes = option.config if isinstance(option.config, dict) else {}
    source = option.path if option.path is not None else option.config
    setting, stored = "model.config" if option.path is None else "model.path", {}
    if source is not None and not isinstance(source, dict):  # a config.json, or its directory
        if not Path(source).exists():
            raise ModelError(
                f"{setting}: no such directory: {source}; names on the hub are not downloaded, give a local one"
            )
        stored = read_config(Path(source), setting)
    merged = {**stored, **changes}
    kind = _config_class(merged, setting)
    defaults = kind()
    for key in changes:  # config classes keep whatever they are given: a misspelt key would be read by nobody
        if not hasattr(defaults, key) and not _is_read(kind, key):
            near = get_close_matches(key, [*defaults.to_dict(), *kind.attribute_map], n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "leave it out"
            raise ModelError(f"model.config.{key}: {kind.__name__} has no such setting; {hint}")
    if option.path is None:
        if (text := kind.sub_configs.get("text_config")) is not None:
            raise ModelError(
                f"model.config: model_type {kind.model_type!r} is a text model with others around it; for fresh "
                f"weights take the text model alone, model_type: {text.model_type}"
            )
        # from the tokenizer its size, and no special tokens of another one
        fresh = {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        merged = {**fresh, **merged}
    try:
        config = kind.from_dict(merged)
    except Exception as error:  # whatever a config class checks: its own kinds of exceptions
        reason = " ".join(str(error).split())
        where = setting if option.path is None else f"{setting}: {option.path}"
        raise ModelError(f"{where}: {kind.__name__} refused it: {reason}") from error
    return config


def _config_class(values: dict[str, Any], setting: str) -> Any:
    """The class for ``model_type``. Raises ModelError for one without a causal language model."""
    transformers, model_type = library(), values.get("model_type")
    auto = importlib.import_module("transformers.models.auto")
    known = sorted(auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    near = get_close_matches(str(model_type), known, n=3)
    hint = f"; did you mean {' or '.join(near)}?" if near else ""
    if model_type not in auto.configuration_auto.CONFIG_MAPPING_NAMES:
        code = ", whose auto_map names code of its own, which is never run" if "auto_map" in values else ""
        raise ModelError(
            f"{setting}: transformers {transformers.__version__} has no model_type {model_type!r}{code}"
            f"{hint or '; choose one of its own classes, or install a newer transformers'}"
        )
    if model_type not in known:
        raise ModelError(
            f"{setting}: model_type {model_type!r} has no causal language model in transformers "
            f"{transformers.__version__}{hint or '; choose one that has, like gpt2, llama or gemma2'}"
        )
    if values.get("quantization_config") is not None:
        raise ModelError(f"{setting}: the model is quantized, which cannot be trained; give the one it was made from")
    return auto.configuration_auto.CONFIG_MAPPING[model_type]


def _is_read(kind: Any, key: str) -> bool:
    """Whether the model's module asks for a key that its config class does not declare (Qwen3-MoE's head_dim)."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    source = inspect.getsource(importlib.import_module(auto.MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__))
    return f'"{key}"' in source or f"config.{key}" in source


def build_causal_lm(option: TransformersSettings, *, vocab_size: int, seq_len: int, num_new: int = 0) -> CausalLM:
    """The model on the device that is current (meta too), without loaded weights; sizes in tokens, of which a directory
    does not know the last ``num_new``.

    Raises ModelError.
    """
    config = config_of(option, vocab_size=vocab_size)
    text = config.get_text_config()
    if option.path is not None:
        text.vocab_size = grown_vocabulary(option, text.vocab_size, tokens=vocab_size, num_new=num_new)
    elif text.vocab_size < vocab_size:
        raise ModelError(
            f"model.config.vocab_size: the tokenizer has {vocab_size} tokens, got {text.vocab_size}; leave it out, or "
            f"set at least {vocab_size}"
        )

    def make() -> Any:
        attention = {} if option.attn_implementation is None else {"attn_implementation": option.attn_implementation}
        auto = library().AutoModelForCausalLM
        try:
            return auto.from_config(config, dtype=torch.get_default_dtype(), trust_remote_code=False, **attention)
        except (ValueError, ImportError) as error:
            setting = "model.attn_implementation" if attention else "model.config"
            raise ModelError(f"{setting}: {type(config).__name__}: {' '.join(str(error).split())}") from error

    def on_meta() -> Any:
        with torch.device("meta"):
            return make()

    model = CausalLM(make(), on_meta)
    _check(model, seq_len)
    # torch gives padding_idx no gradient: where the end token pads too, it would never be learned
    text, embedding = model.config.get_text_config(), model.theirs.get_input_embeddings()
    ends = text.eos_token_id if isinstance(text.eos_token_id, list) else [text.eos_token_id]
    if getattr(embedding, "padding_idx", None) in (*ends, text.bos_token_id):
        embedding.padding_idx = None
    return model


def _check(model: CausalLM, seq_len: int) -> None:
    """Raise ModelError for a model that sees the tokens it is to predict, or has too few positions for the data."""
    cls = type(model.theirs)
    # encoders have a class with a head too, which hides the next tokens only where the config says so
    if getattr(model.config, "is_decoder", True) is False and "is_decoder=True" in inspect.getsource(cls):
        raise ModelError(
            f"model.config.is_decoder: {cls.__name__} with is_decoder=false sees the tokens it is to predict; set "
            "+model.config.is_decoder=true, or choose a decoder"
        )
    if model.max_positions is not None and seq_len > model.max_positions:
        raise ModelError(
            f"data.seq_len: {cls.__name__} has {model.max_positions} learned positions "
            f"(max_position_embeddings), got {seq_len}; set data.seq_len={model.max_positions}, or more positions for "
            "fresh weights"
        )
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if isinstance(limit, int) and seq_len > limit:
        _log.warning("data.seq_len=%d is longer than the model's max_position_embeddings=%d", seq_len, limit)
