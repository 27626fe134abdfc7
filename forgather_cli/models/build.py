"""A model option of the config to a model, and weights from safetensors into it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.config.schema import (
    Config,
    DecoderSettings,
    EncoderDecoderSettings,
    ModelOption,
    PretrainedSettings,
    Target,
    TransformersSettings,
)
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ModelError
from forgather_cli.models.decoder import Decoder, resolve_decoder
from forgather_cli.models.encoder_decoder import Qwen3ForSeq2SeqLM
from forgather_cli.models.files import read_rows, tensor_files, whole_tensor
from forgather_cli.models.init import init_parameters
from forgather_cli.models.pretrained import read_config, read_settings
from forgather_cli.models.resize import NOISE, grown_vocabulary
from forgather_cli.shards import not_finite
from forgather_cli.targets import import_target, make

log = logging.getLogger(__name__)

_OF_TOKENS = ("lm_head.weight", "model.embed_tokens.weight")  # have a row for each token
_REMEDY = "by its config.json; mend config.json or save the model again"


def construct(
    config: Config, device: torch.device, *, vocab_size: int | None, seq_len: int, num_new: int = 0
) -> nn.Module:
    """The model of a run without weights, on meta, on the device or on the CPU (``construct_model_on``)."""
    where = {"meta": torch.device("meta"), "device": device, "cpu": torch.device("cpu")}[config.construct_model_on]
    if num_new and config.adapter.freezes_base:
        rows = own_vocab_size(config.model) or 0  # a frozen base learns no new ones
        if (vocab_size or 0) > rows:
            raise ModelError(
                f"data.add_tokens: {num_new} tokens are to be added to a base of {rows:,} rows, which an adapter "
                "leaves as it is; add them to the base first (forgather finalize BASE GROWN --add-tokens FILE, "
                "model.path=GROWN), or set data.add_tokens=false"
            )
    if isinstance(config.model, Target) and where.type == "meta":
        where = torch.device("cpu")
    with where:
        model = build_model(config.model, vocab_size=vocab_size, seq_len=seq_len, num_new=num_new)
    model.new_tokens = range((vocab_size or 0) - num_new, vocab_size or 0)  # type: ignore[assignment]
    if isinstance(config.model, Target) or isinstance(config.data, Target):
        return model
    if config.data.is_paired and not getattr(model, "is_encoder_decoder", False):
        raise ModelError(
            f"model: data={config.data.type} has examples of two sides, got a {type(model).__name__}, which reads one; "
            "choose model=qwen3_encdec"
        )
    if not config.data.is_paired and getattr(model, "is_encoder_decoder", False):
        raise ModelError(
            f"data: a {type(model).__name__} reads examples of two sides, got data={config.data.type}; choose data=ul2 "
            "or data=seq2seq"
        )
    return model


def fill(config: Config, device: torch.device, module: nn.Module, seed: int, *, num_known: int | None = None) -> None:
    """Give a run's parameters their first values: from the pretrained directory, or drawn by (seed, name).

    A model of the user's keeps those of its constructor. ``num_known``: see ``initialize``.
    """
    draws_on_device = config.construct_model_on == "device" and device.type != "cpu"
    draws_on_device = draws_on_device and not isinstance(config.model, Target) and config.model.draws_on_device
    if draws_on_device:
        log.info("construct_model_on=device draws other numbers than meta and cpu do")
    num_known = None if config.adapter.freezes_base else num_known  # beside an adapter no row changes
    initialize(config.model, module, seed, device_generator=draws_on_device, num_known=num_known)


def build_model(option: ModelOption, *, vocab_size: int | None, seq_len: int, num_new: int = 0) -> nn.Module:
    """The whole model on the device that is current (meta too), without loaded weights.

    ``vocab_size`` is the tokenizer's, None where nothing tells, and ``seq_len`` the data's, in tokens; a ``_target_``
    gets them if its signature names them and its arguments do not. A pretrained model gets rows for the last
    ``num_new`` tokens, which the data added. Raises ModelError.
    """
    if vocab_size is None:
        vocab_size = own_vocab_size(option)
        if vocab_size is None:
            raise ModelError(
                "model.vocab_size: unknown, since the data names no tokenizer; let data._target_ return a mapping with "
                "'tokenizer' or 'vocab_size', or set model.vocab_size"
            )
    sizes = {"vocab_size": vocab_size, "seq_len": seq_len}
    if not isinstance(option, Target):
        maker, given = option.load_maker(), option.arguments()
        wanted = inspect.signature(maker).parameters
        offered = {**sizes, "num_new": num_new}.items()
        built: nn.Module = maker(**given | {key: n for key, n in offered if key in wanted and given.get(key) is None})
        return built
    factory = import_target(option.path, "model")
    wanted = inspect.signature(factory).parameters
    if not vocab_size:  # it asks for none, or its own default counts
        del sizes["vocab_size"]
    sizes = {key: value for key, value in sizes.items() if key in wanted and key not in option.kwargs}
    model = make(factory, "model", option.path, **sizes, **option.kwargs)
    if not isinstance(model, nn.Module):
        raise ModelError(f"model._target_: {option.path} must return an nn.Module, got {type(model).__name__}")
    return model


def decoder(option: DecoderSettings, vocab_size: int, seq_len: int) -> Decoder:
    return Decoder(resolve_decoder(option, vocab_size=vocab_size, seq_len=seq_len))


def encoder_decoder(option: EncoderDecoderSettings, vocab_size: int, seq_len: int) -> Qwen3ForSeq2SeqLM:
    if option.init_from is not None:
        source = _qwen3_settings(option.init_from)
        option = option.with_shape(replace(source, vocab_size=max(source.vocab_size or 0, vocab_size)))
    return Qwen3ForSeq2SeqLM(option.with_shape(resolve_decoder(option.stack, vocab_size=vocab_size, seq_len=seq_len)))


def pretrained(option: PretrainedSettings, vocab_size: int, seq_len: int, num_new: int) -> nn.Module:
    found = read_settings(option.path)
    rows = grown_vocabulary(option, found.vocab_size or 0, tokens=vocab_size, num_new=num_new)
    return build_model(replace(found, vocab_size=rows), vocab_size=vocab_size, seq_len=seq_len)


def _qwen3_settings(directory: str) -> DecoderSettings:
    """The shape of the Qwen3 directory that both stacks of an encoder-decoder begin from. Raises ModelError."""
    path = Path(directory).expanduser()
    if path.is_dir() and (kind := read_config(path, "model.init_from").get("model_type")) != "qwen3":
        raise ModelError(f"model.init_from: {directory} is no Qwen3 model but {kind}; give the directory of a Qwen3")
    source = read_settings(path, "model.init_from")
    assert isinstance(source, DecoderSettings)
    if source.sliding_window is not None:
        raise ModelError(
            f"model.init_from: {directory} has a sliding window of {source.sliding_window} tokens, which an encoder "
            "has not; give a Qwen3 directory without one"
        )
    return source


def own_vocab_size(option: ModelOption) -> int | None:
    """Tokens that a model knows by its settings or its directory alone; None where it takes the tokenizer's.

    0 for a ``_target_`` that asks for none.
    """
    if not isinstance(option, Target):
        return weights_of(option).vocab_size()
    known = option.kwargs.get("vocab_size")
    if isinstance(known, int):
        return known
    wanted = inspect.signature(import_target(option.path, "model")).parameters.get("vocab_size")
    return 0 if wanted is None or wanted.default is not wanted.empty else None


def most_tokens(config: Config) -> int | None:
    """Tokens that the model knows or can learn, for the markers that chats add; None where it gets as many as there
    are: a directory's vocabulary grows, and fresh weights take the tokenizer's. Raises ModelError."""
    if config.data.add_tokens is False:
        return 0
    grows = not isinstance(config.model, Target) and config.model.directory is not None
    return None if grows else own_vocab_size(config.model)


def initialize(
    option: ModelOption, module: nn.Module, seed: int, *, device_generator: bool = False, num_known: int | None = None
) -> None:
    """Give the parameters of a model of ``option``, or of a part of one, their first values.

    They are read from the directory where there is one, else drawn from (seed, name), on the CPU or with
    ``device_generator`` where they live. ``num_known``: tokens that a directory's weights know, where the data added
    some; the rows of these are the mean of the others. Raises ModelError.
    """
    weights_of(option).fill(module, seed, device_generator=device_generator, num_known=num_known)
    source = None if isinstance(option, Target) else option.directory
    if source is not None and (void := not_finite(dict(module.named_parameters()))):
        more = f" and {len(void) - 1} more" if len(void) > 1 else ""
        raise ModelError(f"model.path: {source}: {void[0]}{more} holds values that are not finite; give another model")


class DrawnWeights:
    """The weights of a model option, ``ModelSettings.weights``: here they are drawn, in subclasses read from its
    directory. All raise ModelError."""

    def __init__(self, option: Any) -> None:
        self.option = option

    def vocab_size(self) -> int | None:
        """Tokens that the model knows by itself; None where it takes the tokenizer's."""
        return self.option.vocab_size  # type: ignore[no-any-return]

    def fill(self, module: Any, seed: int, *, device_generator: bool, num_known: int | None) -> None:
        """Give the parameters of the model, or of a part of it, their first values; see ``initialize``."""
        init_parameters(module, seed, device_generator=device_generator)

    def reader(self, module: Any) -> Callable[[str], Tensor]:
        """Reads whole tensors of the directory, one at a time, by the full name that ``module`` has for them."""
        files = tensor_files(Path(self.option.directory).expanduser())
        return lambda name: whole_tensor(files[name], name)


class PretrainedWeights(DrawnWeights):
    """Those of the decoder, or of our encoder-decoder, in a directory."""

    def vocab_size(self) -> int | None:
        return read_settings(self.option.path).vocab_size

    def fill(self, module: Any, seed: int, *, device_generator: bool, num_known: int | None) -> None:
        """By name, in the module's dtype.

        The directory must hold exactly the tensors of the whole model; one tensor at a time is in memory, of a sharded
        one the rows this rank holds. Rows beyond the directory's vocabulary (``resize_vocabulary``) follow from (seed,
        name); with ``num_known`` those behind so many are their mean.
        """
        directory = Path(self.option.path).expanduser()
        files, settings = tensor_files(directory), read_settings(directory)
        names = _names_in_files(directory, settings, files)
        targets = {n: t for n, t in module.state_dict(keep_vars=True).items() if n in names}
        rows, known = settings.vocab_size, {} if num_known is None else dict.fromkeys(_OF_TOKENS, num_known)
        noise = 0.0 if known else NOISE
        read_rows(targets, names, files, vocab_size=rows, known=known, noise=noise, seed=seed, remedy=_REMEDY)


class StackWeights(DrawnWeights):
    """Those of an encoder-decoder: drawn, or both stacks, embedding and head from a Qwen3 directory."""

    @torch.no_grad()
    def fill(self, module: Any, seed: int, *, device_generator: bool, num_known: int | None) -> None:
        """The cross-attention is drawn (``fresh``) or copied from the self-attention, ``zero``: but for its output,
        which is 0. Rows for tokens that the directory's tokenizer does not have follow from (seed, name)."""
        cross_attention = self.option.cross_attention
        if self.option.init_from is None or cross_attention == "fresh":
            init_parameters(module, seed, device_generator=device_generator)
        if self.option.init_from is None:
            return
        directory = Path(self.option.init_from).expanduser()
        files, settings = tensor_files(directory), _qwen3_settings(str(directory))
        known = _names_in_files(directory, settings, files)
        targets: dict[str, torch.Tensor] = {}
        stored: dict[str, str] = {}
        for name, tensor in module.state_dict(keep_vars=True).items():
            source = name.replace("model.encoder.", "model.").replace("model.decoder.", "model.")
            if ".cross_att" in name:
                if cross_attention == "fresh":
                    continue
                if cross_attention == "zero" and ".o_proj." in name:
                    tensor.zero_()
                    continue
                source = source.replace("cross_attn", "self_attn")
                source = source.replace("cross_attention_layernorm", "input_layernorm")
            if source in known:  # a tied head is not
                targets[name], stored[name] = tensor, known[source]
        rows, tokens = settings.vocab_size, _num_tokens(directory)
        trained = None if tokens is None else dict.fromkeys(_OF_TOKENS, tokens)
        read_rows(targets, stored, files, vocab_size=rows, known=trained, seed=seed, remedy=_REMEDY)


def weights_of(option: ModelOption) -> DrawnWeights:
    """The weights of ``option``; a model of the user's has drawn its own."""
    return DrawnWeights(option) if isinstance(option, Target) else resolve_name(option.weights)(option)


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


def _num_tokens(directory: Path) -> int | None:
    """The largest id of a directory's tokenizer + 1; None where it has no tokenizer.json."""
    path = directory / "tokenizer.json"
    if not path.exists():
        return None
    content = read_json_object(path, lambda why: ModelError(f"model.init_from: {why}"))
    vocab = content.get("model", {}).get("vocab", {})
    ids = [*(vocab.values() if isinstance(vocab, dict) else range(len(vocab)))]
    return 1 + max([*map(int, ids), *(int(added["id"]) for added in content.get("added_tokens", []))])


def _names_in_files(
    directory: Path, settings: DecoderSettings | EncoderDecoderSettings, files: dict[str, Path]
) -> dict[str, str]:
    """Parameter name -> the name it has in the files. Raises ModelError for missing and extra tensors."""
    with torch.device("meta"):
        whole = build_model(settings, vocab_size=1, seq_len=1)
    names = {name: name for name, _ in whole.named_parameters()}
    head, embedding = _OF_TOKENS
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
