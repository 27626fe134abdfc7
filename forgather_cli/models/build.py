"""A model option of the config to a model, and weights from safetensors into it."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from pathlib import Path

import torch
from torch import nn

from forgather_cli.config.schema import (
    Config,
    DecoderSettings,
    ModelOption,
    PretrainedSettings,
    Target,
    TransformersSettings,
)
from forgather_cli.errors import ModelError
from forgather_cli.models.decoder import Decoder, resolve_decoder
from forgather_cli.models.files import read_rows, tensor_files
from forgather_cli.models.init import init_parameters
from forgather_cli.models.pretrained import read_config, read_settings
from forgather_cli.models.resize import grown_vocabulary
from forgather_cli.targets import import_target

log = logging.getLogger(__name__)

_REMEDY = "by its config.json; mend config.json or save the model again"


def construct(config: Config, device: torch.device, *, vocab_size: int | None, seq_len: int) -> nn.Module:
    """The model of a run without weights, on meta, on the device or on the CPU (``construct_model_on``)."""
    where = {"meta": torch.device("meta"), "device": device, "cpu": torch.device("cpu")}[config.construct_model_on]
    if isinstance(config.model, Target) and where.type == "meta":
        where = torch.device("cpu")
    with where:
        return build_model(config.model, vocab_size=vocab_size, seq_len=seq_len)


def fill(config: Config, device: torch.device, module: nn.Module, seed: int) -> None:
    """Give a run's parameters their first values: from the pretrained directory, or drawn by (seed, name).

    A model of the user's keeps those of its constructor.
    """
    draws_on_device = config.construct_model_on == "device" and device.type != "cpu"
    draws_on_device = draws_on_device and isinstance(config.model, DecoderSettings)
    if draws_on_device:
        log.info("construct_model_on=device draws other numbers than meta and cpu do")
    initialize(config.model, module, seed, device_generator=draws_on_device)


def build_model(option: ModelOption, *, vocab_size: int | None, seq_len: int) -> nn.Module:
    """The whole model on the device that is current (meta too), without loaded weights.

    ``vocab_size`` is the tokenizer's, None where nothing tells, and ``seq_len`` the data's, in tokens; a ``_target_``
    gets them if its signature names them and its arguments do not. Raises ModelError.
    """
    if vocab_size is None:
        vocab_size = own_vocab_size(option)
        if vocab_size is None:
            raise ModelError(
                "model.vocab_size: unknown, since the data names no tokenizer; let data._target_ return a mapping with "
                "'tokenizer' or 'vocab_size', or set model.vocab_size"
            )
    if isinstance(option, DecoderSettings):
        return Decoder(resolve_decoder(option, vocab_size=vocab_size, seq_len=seq_len))
    if isinstance(option, PretrainedSettings):
        settings = read_settings(option.path)
        grown = grown_vocabulary(option, settings.vocab_size or 0, tokens=vocab_size)
        settings = dataclasses.replace(settings, vocab_size=grown)
        return Decoder(resolve_decoder(settings, vocab_size=vocab_size, seq_len=seq_len))
    if isinstance(option, TransformersSettings):
        from forgather_cli.models.hf.build import build_causal_lm

        return build_causal_lm(option, vocab_size=vocab_size, seq_len=seq_len)
    factory = import_target(option.path, "model")
    wanted = inspect.signature(factory).parameters
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len}
    if not vocab_size:  # it asks for none, or its own default counts
        del sizes["vocab_size"]
    sizes = {key: value for key, value in sizes.items() if key in wanted and key not in option.kwargs}
    model = factory(**sizes, **option.kwargs)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model._target_: {option.path} must return an nn.Module, got {type(model).__name__}")
    return model


def own_vocab_size(option: ModelOption) -> int | None:
    """Tokens that a model knows by its settings or its directory alone; None where it takes the tokenizer's.

    0 for a ``_target_`` that asks for none.
    """
    if isinstance(option, DecoderSettings):
        return option.vocab_size
    if isinstance(option, PretrainedSettings):
        return read_settings(option.path).vocab_size
    if isinstance(option, TransformersSettings):
        from forgather_cli.models.hf.build import config_of

        return config_of(option, vocab_size=0).get_text_config().vocab_size or None
    known = option.kwargs.get("vocab_size")
    if isinstance(known, int):
        return known
    wanted = inspect.signature(import_target(option.path, "model")).parameters.get("vocab_size")
    return 0 if wanted is None or wanted.default is not wanted.empty else None


def initialize(option: ModelOption, module: nn.Module, seed: int, *, device_generator: bool = False) -> None:
    """Give the parameters of a model of ``option``, or of a part of one, their first values.

    They are read from the directory where there is one, else drawn from (seed, name), on the CPU or with
    ``device_generator`` where they live. Raises ModelError.
    """
    if isinstance(option, PretrainedSettings):
        load_pretrained(module, Path(option.path), seed=seed)
    elif isinstance(option, TransformersSettings):
        from forgather_cli.models.hf.model import CausalLM
        from forgather_cli.models.hf.weights import load_causal_lm

        assert isinstance(module, CausalLM)
        module.draw_all(seed) if option.path is None else load_causal_lm(module, option, seed=seed)
    else:
        init_parameters(module, seed, device_generator=device_generator)


def directory_option(directory: Path) -> PretrainedSettings | TransformersSettings:
    """What loads a Hugging Face directory: the own decoder where it has that shape, else the transformers library.

    Raises ModelError where neither can.
    """
    try:
        read_settings(directory)
    except ModelError as error:
        if not isinstance(read_config(directory, "model.path").get("model_type"), str):
            raise
        from forgather_cli.models.hf.build import library

        try:
            library()
        except ModelError as missing:
            raise ModelError(f"{error}; for others {missing}") from error
        return TransformersSettings(path=str(directory))
    return PretrainedSettings(path=str(directory))


def load_pretrained(module: nn.Module, path: str | Path, *, seed: int = 0) -> None:
    """Copy the weights of a Hugging Face directory into a decoder or a part of one, by name, in the module's dtype.

    The directory must hold exactly the tensors of the whole model; one tensor at a time is in memory, of a sharded one
    the rows this rank holds. Rows beyond the directory's vocabulary (``resize_vocabulary``) follow from (seed, name).
    Raises ModelError with the missing, extra or wrong-shaped tensors.
    """
    directory = Path(path)
    files = tensor_files(directory)
    settings = read_settings(directory)
    names = _names_in_files(directory, settings, files)
    targets = {n: t for n, t in module.state_dict(keep_vars=True).items() if n in names}
    read_rows(targets, names, files, vocab_size=settings.vocab_size, seed=seed, remedy=_REMEDY)


def _names_in_files(directory: Path, settings: DecoderSettings, files: dict[str, Path]) -> dict[str, str]:
    """Parameter name -> the name it has in the files. Raises ModelError for missing and extra tensors."""
    with torch.device("meta"):
        whole = Decoder(settings)
    names = {name: name for name, _ in whole.named_parameters()}
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    ignored: set[str] = set()
    if settings.tie_word_embeddings:
        ignored = {head}
        names[embedding] = embedding if embedding in files else head
    missing = sorted(name for name, stored in names.items() if stored not in files)
    # old Llama exports carry the rotary frequencies, which follow from config.json
    extra = sorted(f for f in files if f not in {*names.values(), *ignored} and not f.endswith("rotary_emb.inv_freq"))
    if missing:
        raise ModelError(f"model.path: {directory} lacks {_some(missing)}, {_REMEDY}")
    if extra:
        raise ModelError(f"model.path: {directory} has {_some(extra)} too many, {_REMEDY}")
    return names


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    noun = "tensor" if len(names) == 1 else "tensors"
    return f"{len(names)} {noun} ({shown}{', ...' if len(names) > 5 else ''})"
