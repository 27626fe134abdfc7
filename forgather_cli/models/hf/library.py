"""The transformers library: imported where it is used, and asked for a model's config and class."""

from __future__ import annotations

import importlib
import inspect
import logging
import warnings
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from forgather_cli.config.schema import TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.pretrained import read_config

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
    stored = {} if isinstance(source, dict) or source is None else _read(Path(source), _setting(option))
    merged = {**stored, **changes}
    kind = _config_class(merged, _setting(option))
    _refuse_unknown(kind, changes)
    if option.path is None:
        if (text := kind.sub_configs.get("text_config")) is not None:
            raise ModelError(
                f"model.config: model_type {kind.model_type!r} is a text model with others around it; for fresh "
                f"weights take the text model alone, model_type: {text.model_type}"
            )
        merged = {**_fresh(vocab_size), **merged}
    try:
        config = kind.from_dict(merged)
    except Exception as error:  # whatever a config class checks: its own kinds of exceptions
        reason = " ".join(str(error).split())
        where = _setting(option) if option.path is None else f"{_setting(option)}: {option.path}"
        raise ModelError(f"{where}: {kind.__name__} refused it: {reason}") from error
    if getattr(config, "output_router_logits", False):
        _log.warning("output_router_logits: the router's auxiliary loss is not trained here, it is left out")
    return config


def _setting(option: TransformersSettings) -> str:
    return "model.config" if option.path is None else "model.path"


def _read(path: Path, setting: str) -> dict[str, Any]:
    """A parsed config.json, given by itself or by its directory."""
    if not path.exists():
        raise ModelError(f"{setting}: no such directory: {path}; names on the hub are not downloaded, give a local one")
    return read_config(path, setting)


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


def _refuse_unknown(kind: Any, changes: dict[str, Any]) -> None:
    """Config classes keep whatever they are given: a misspelt key would be read by nobody."""
    defaults = kind()
    for key in changes:
        if not hasattr(defaults, key) and not _is_read(kind, key):
            near = get_close_matches(key, [*defaults.to_dict(), *kind.attribute_map], n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "leave it out"
            raise ModelError(f"model.config.{key}: {kind.__name__} has no such setting; {hint}")


def _is_read(kind: Any, key: str) -> bool:
    """Whether the model's module asks for a key that its config class does not declare (Qwen3-MoE's head_dim)."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    source = inspect.getsource(importlib.import_module(auto.MODEL_FOR_CAUSAL_LM_MAPPING[kind].__module__))
    return f'"{key}"' in source or f"config.{key}" in source


def _fresh(vocab_size: int) -> dict[str, Any]:
    """What a fresh model takes from the tokenizer: its size, and no special tokens of another one."""
    return {"vocab_size": vocab_size, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
