"""config.json of Hugging Face directories to decoder settings and back.

Both forms of the rotary settings are read and written: ``rope_parameters`` (transformers 5) and ``rope_theta`` with
``rope_scaling`` (transformers 4).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from forgather_cli.config.schema import (
    FAMILIES,
    DecoderSettings,
    EncoderDecoderSettings,
    ModelOption,
    PretrainedSettings,
    RopeScaling,
    family_of,
)
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ModelError

MODELING_FILE = Path(__file__).parent / "modeling_qwen3_encdec.py"
"""What lies in the directory of an encoder-decoder, so that transformers can build it."""
AUTO_MAP = {
    "AutoConfig": f"{MODELING_FILE.stem}.Qwen3EncDecConfig",
    "AutoModelForSeq2SeqLM": f"{MODELING_FILE.stem}.Qwen3ForSeq2SeqLM",
}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": {
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768},
    "qwen3": {"vocab_size": 151936, "intermediate_size": 22016, "max_position_embeddings": 32768, "head_dim": 128},
}
"""What transformers 5.23 takes for a key that config.json leaves out, by model_type, over ``_COMMON``."""

_COMMON: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "residual_dropout": 0.0,  # ours; transformers keeps it without reading it
    "sliding_window": None,
}
_COPIED = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "initializer_range",
    "tie_word_embeddings", "attention_dropout", "residual_dropout",
)  # fmt: skip

_ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
        "mscale_all_dim", "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
"""The keys each rope type reads."""

_BOUNDS = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 10_000),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim", "n_head"), 1_000_000),
    **dict.fromkeys(("hidden_size", "n_embd", "intermediate_size"), 1_000_000),
    "vocab_size": 100_000_000,
    "max_position_embeddings": 10_000_000_000,
}
"""The most that a model may have, by the keys of config.json: each layer is a module, and sizes are multiplied."""


ENCODER_DECODER = "qwen3_encdec"
"""The model_type of our encoder-decoder in its config.json."""


def read_settings(directory: str | Path, setting: str = "model.path") -> DecoderSettings | EncoderDecoderSettings:
    """Resolved settings of the model in a Hugging Face directory. Raises ModelError, which begins with ``setting``."""
    path = Path(directory).expanduser()
    if not path.is_dir():
        raise ModelError(f"{setting}: no such directory: {path}")
    config = read_config(path, setting)
    try:
        return settings_from_hf(config)
    except ModelError as error:
        raise ModelError(f"{setting}: {path / 'config.json'}: {error}") from error
    except (TypeError, ValueError, AttributeError, LookupError) as error:  # a text where a number should be, and so on
        raise ModelError(f"{setting}: {path / 'config.json'}: cannot be read as a model's config: {error}") from error


def read_config(path: Path, setting: str) -> dict[str, Any]:
    """A parsed config.json, given by itself or by its directory, with infinities and NaN as numbers.

    Raises ModelError, which begins with ``setting``.
    """
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ModelError(f"{setting}: {path} has no config.json; expected a Hugging Face model directory")
    config: dict[str, Any] = _with_floats(read_json_object(file, lambda why: ModelError(f"{setting}: {why}")))
    kind = config.get("model_type")
    if config.get("is_encoder_decoder") and kind != ENCODER_DECODER:
        raise ModelError(
            f"{setting}: {file}: is an encoder-decoder ({kind!r:.80}), of which only those of model=qwen3_encdec are "
            "read; give a decoder"
        )
    for values in (config, *(value for value in config.values() if isinstance(value, dict))):  # text_config, say
        for problem in size_problems(values):
            raise ModelError(f"{setting}: {file}: {problem}")
    return config


def size_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """What in a config.json, or in a part of it, cannot be a model's size."""
    for key, most in _BOUNDS.items():
        value = values.get(key)
        whole = value is None or (type(value) is int and 1 <= value <= most)
        per_layer = key != "vocab_size" and not isinstance(value, int | float | str)  # as some models have them
        if not whole and not per_layer:
            yield f"{key} must be from 1 to {most:,}, got {value!r:.80}"


def _with_floats(value: Any) -> Any:
    """transformers 5 writes infinity, in Mamba2's time_step_limit say, as ``{"__float__": "Infinity"}``; so NaN."""
    if isinstance(value, list):
        return [_with_floats(part) for part in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: _with_floats(part) for key, part in value.items()}


def num_sentinels(model: ModelOption | Path) -> int:
    """Tokens that stand for spans, which the data of an encoder-decoder add to the tokenizer; 0 for other models.

    ``model``: an option, or the directory of a model. Raises ModelError for a config.json that cannot be read.
    """
    if isinstance(model, PretrainedSettings):
        model = Path(model.path).expanduser()
    if not isinstance(model, Path):
        return getattr(model, "num_sentinel_tokens", 0)
    file = model / "config.json"
    return int(read_json_object(file, ModelError).get("num_sentinel_tokens", 0)) if file.is_file() else 0


def settings_from_hf(config: dict[str, Any]) -> DecoderSettings | EncoderDecoderSettings:
    """Resolved settings from a parsed config.json. Raises ModelError for what our models do not have."""
    if config.get("model_type") != ENCODER_DECODER:
        return decoder_settings_from_hf(config)
    stack = decoder_settings_from_hf({**config, "model_type": "qwen3", "architectures": None})
    return EncoderDecoderSettings(
        num_sentinel_tokens=int(config.get("num_sentinel_tokens", 0)),
        attention_dropout=stack.attention_dropout,
        residual_dropout=stack.residual_dropout,
    ).with_shape(stack)


def decoder_settings_from_hf(config: dict[str, Any]) -> DecoderSettings:
    """Resolved settings from a parsed config.json. Raises ModelError for what the decoder does not have."""
    model_type = _model_type(config)
    config = {**_COMMON, **_DEFAULTS[model_type], **config}
    _refuse(config)
    llama_like = model_type in ("llama", "qwen3")
    attention_bias = model_type == "qwen2" or (llama_like and bool(config.get("attention_bias", False)))
    for key in _BOUNDS.keys() & set(_COPIED):
        if config[key] is not None and type(config[key]) is not int:
            raise ModelError(f"{key} must be a whole number, got {config[key]!r:.80}")
    heads = config["num_attention_heads"]
    values = {key: config[key] for key in _COPIED}
    values["num_key_value_heads"] = config["num_key_value_heads"] or heads
    values["head_dim"] = config["head_dim"] or config["hidden_size"] // heads
    try:
        return DecoderSettings(
            **values,
            rope_theta=float(_rope(config).get("rope_theta") or 10000.0),
            rope_scaling=_rope_scaling(config),
            sliding_window=_sliding_window(model_type, config),
            attention_bias=attention_bias,
            attention_output_bias=attention_bias and model_type != "qwen2",
            mlp_bias=model_type == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=model_type == "qwen3",
        )
    except (TypeError, ValueError) as error:
        raise ModelError(f"cannot be read: {error}") from error


def _model_type(config: dict[str, Any]) -> str:
    named = config.get("architectures") or []
    known = {family.architecture: family.model_type for family in FAMILIES.values()}
    model_type = config.get("model_type") or known.get(named[0] if named else "")
    if model_type not in FAMILIES or (named and named[0] not in known):
        raise ModelError(
            f"unsupported architecture {named[0] if named else model_type!r}; "
            f"supported are {', '.join(known)} (model_type {', '.join(FAMILIES)}), others by model=transformers"
        )
    return str(model_type)


def _refuse(config: dict[str, Any]) -> None:
    partial = _rope(config).get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    wrong = {
        "hidden_act": config.get("hidden_act", "silu") not in ("silu", "swish"),
        "quantization_config": config.get("quantization_config") is not None,
        "partial_rotary_factor": partial not in (None, 1.0),
    }
    for key, unsupported in wrong.items():
        if unsupported:
            got = partial if key == "partial_rotary_factor" else config[key]
            raise ModelError(f"{key}={got!r} is not supported by the decoder")


def _sliding_window(model_type: str, config: dict[str, Any]) -> int | None:
    """The window of all layers; Qwen's windows of some layers are refused."""
    window = config["sliding_window"]
    if model_type in ("llama", "mistral"):
        return window if model_type == "mistral" else None
    if not config.get("use_sliding_window", False) or window is None:
        return None
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(config["num_hidden_layers"])
    ]
    if set(types) == {"full_attention"}:
        return None
    if set(types) != {"sliding_attention"}:
        raise ModelError("layer_types: sliding and full attention in one model are not supported by the decoder")
    return int(window)


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    """The rotary settings in the form of transformers 5; its ``rope_scaling`` wins where both forms are present."""
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, dict):
        raise ModelError(f"rope_parameters: expected a JSON object, got {found!r}")
    theta = config.get("rope_theta") or (config.get("rope_parameters") or {}).get("rope_theta")
    return {"rope_theta": theta, **found}


def _rope_scaling(config: dict[str, Any]) -> RopeScaling | None:
    rope = _rope(config)
    rope_type: Any = rope.get("rope_type") or rope.get("type") or "default"
    if rope_type not in _ROPE_KEYS:
        raise ModelError(f"rope_type={rope_type!r} is not supported; supported are {', '.join(_ROPE_KEYS)}")
    if rope_type == "default":
        return None
    if rope_type in ("yarn", "llama3"):
        # some models keep it outside the rotary settings; it then takes precedence in transformers
        outside = config.get("original_max_position_embeddings")
        fallback = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
        rope["original_max_position_embeddings"] = outside or fallback
    given = {key: rope[key] for key in _ROPE_KEYS[rope_type] if rope.get(key) is not None}
    return RopeScaling(rope_type=rope_type, **given)


def _hf_rope(s: DecoderSettings) -> dict[str, Any]:
    scaling = s.rope_scaling or RopeScaling()
    values: dict[str, Any] = {key: getattr(scaling, key) for key in _ROPE_KEYS[scaling.rope_type]}
    if "original_max_position_embeddings" in values:
        values["original_max_position_embeddings"] = (
            scaling.original_max_position_embeddings or s.max_position_embeddings
        )
    # truncate=true is the default that transformers 4 knows no name for
    given = {key: v for key, v in values.items() if v is not None and (key, v) != ("truncate", True)}
    return {"rope_type": scaling.rope_type, **given}


def hf_config(settings: DecoderSettings, tokenizer: Any = None, *, dtype: str = "float32") -> dict[str, Any]:
    """config.json of resolved ``settings``, for transformers 4.50 and later, with the ids of the tokenizer's special
    tokens. Raises ModelError if no family fits."""
    s, family = settings, family_of(settings)
    rope = _hf_rope(s)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(s, key) for key in _COPIED if key != "residual_dropout"},
        "hidden_act": "silu",
        "use_cache": True,
        "rope_parameters": {**rope, "rope_theta": s.rope_theta},
        "rope_theta": s.rope_theta,
        "rope_scaling": None if rope["rope_type"] == "default" else rope,
        **_special_tokens(tokenizer),
        "torch_dtype": dtype,
        "dtype": dtype,
    }
    if s.residual_dropout:
        config["residual_dropout"] = s.residual_dropout
    return {**config, **_family_keys(family.model_type, s)}


def _special_tokens(tokenizer: Any) -> dict[str, int | None]:
    return {name: getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _family_keys(model_type: str, s: DecoderSettings) -> dict[str, Any]:
    if model_type == "llama":
        return {"attention_bias": s.attention_bias, "mlp_bias": s.mlp_bias}
    if model_type == "mistral":
        return {"sliding_window": s.sliding_window}
    sliding = s.sliding_window is not None
    keys: dict[str, Any] = {
        "use_sliding_window": sliding,
        "sliding_window": s.sliding_window,
        "max_window_layers": 0 if sliding else s.num_hidden_layers,
        "layer_types": ["sliding_attention" if sliding else "full_attention"] * s.num_hidden_layers,
    }
    return {**keys, "attention_bias": s.attention_bias} if model_type == "qwen3" else keys


def write_config(
    directory: str | Path,
    settings: DecoderSettings | EncoderDecoderSettings,
    tokenizer: Any = None,
    dtype: str = "float32",
) -> None:
    """Write config.json and generation_config.json into an existing directory."""
    ids = _special_tokens(tokenizer)
    generation: dict[str, Any] = {key: value for key, value in ids.items() if value is not None}
    if isinstance(settings, EncoderDecoderSettings):
        config = _encoder_decoder_config(settings, tokenizer, dtype)
        generation["decoder_start_token_id"] = ids["pad_token_id"] or 0
        shutil.copyfile(MODELING_FILE, Path(directory) / MODELING_FILE.name)
    else:
        config = hf_config(settings, tokenizer, dtype=dtype)
    _write_json(Path(directory) / "config.json", config)
    _write_json(Path(directory) / "generation_config.json", {"_from_model_config": True, **generation})


def _encoder_decoder_config(s: EncoderDecoderSettings, tokenizer: Any, dtype: str) -> dict[str, Any]:
    """config.json, flat: transformers 5.23 rewrites keys that begin with ``decoder_`` and a part named ``decoder``."""
    shape = hf_config(s.stack, tokenizer, dtype=dtype)
    gone = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types", "rope_theta", "rope_scaling")
    return {
        **{key: value for key, value in shape.items() if key not in gone},
        "architectures": ["Qwen3ForSeq2SeqLM"],
        "model_type": ENCODER_DECODER,
        "auto_map": AUTO_MAP,
        "is_encoder_decoder": True,
        "num_sentinel_tokens": s.num_sentinel_tokens,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def architecture(model: nn.Module) -> str:
    """The class of a model; of one that runs a class of the transformers library, that one's."""
    return type(getattr(model, "theirs", model)).__name__


def write_model_files(model: nn.Module, processing_class: Any, directory: Path, *, with_config: bool = True) -> None:
    """Everything of a Hugging Face directory but the weights: configs where the model has one, tokenizer files.

    ``model`` is ours, or any module with a transformers ``config``; others get no config.json. Of an encoder-decoder,
    which transformers does not have, the modeling file lies beside. The tokenizer is saved through its ``save`` or
    ``save_pretrained``.
    """
    from forgather_cli.models.decoder import Decoder
    from forgather_cli.models.encoder_decoder import Qwen3ForSeq2SeqLM

    if not with_config:
        pass
    elif isinstance(model, Decoder | Qwen3ForSeq2SeqLM):
        dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
        write_config(directory, model.settings, processing_class, dtype)
    elif callable(save_files := getattr(model, "save_files", None)):  # a class of transformers in models/hf
        save_files(directory, processing_class)
    else:
        for part in (getattr(model, "config", None), getattr(model, "generation_config", None)):
            _saved(part, "save_pretrained", directory)
    _saved(processing_class, "save", directory) or _saved(processing_class, "save_pretrained", directory)


def _saved(part: Any, method: str, directory: Path) -> bool:
    save = getattr(part, method, None)
    if callable(save):
        save(directory)
    return callable(save)
