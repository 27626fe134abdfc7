"""Quantized model directories: made in place from plain ones, and loaded.

torchao's tensors in safetensors files (``torchao.prototype.safetensors``, torchao 0.18) and a ``quantization_config``
in config.json, which ``transformers.AutoModelForCausalLM.from_pretrained`` reads.

Linear layers become what the recipe says. Embedding and head, which the recipes leave alone, are stored as int8 with
one scale per row: in small models they are most of the bytes.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from forgather_cli.checkpoint.format import read_header
from forgather_cli.checkpoint.tensors import INDEX, SINGLE, Weights, dtype_of
from forgather_cli.config.schema import QuantizeRecipe
from forgather_cli.distributed import pick_device
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ModelError, SetupError
from forgather_cli.finalize.export import read_config, write_json
from forgather_cli.models.build import build_model, directory_option
from forgather_cli.models.init import reset_buffers
from forgather_cli.models.pretrained import settings_from_hf
from forgather_cli.quantized.convert import Conversion, indivisible, misaligned, sorted_out
from forgather_cli.quantized.package import need_torchao
from forgather_cli.quantized.recipes import group_size_of, needs_cuda, stored_as, why_not_here
from forgather_cli.terminal.bars import Bar

_log = logging.getLogger(__name__)

_SUPPORT = "torchao.prototype.safetensors.safetensors_support"
_TABLES: QuantizeRecipe = "int8-weight-only"
"""How embedding and head are stored."""
_CONFIG = "config.json"


@dataclass(frozen=True)
class _Plan:
    """What becomes of each tensor of a directory."""

    configs: dict[str, Any]
    """Name of a weight -> torchao's config of what it is stored as; of the others no entry."""
    dtype: torch.dtype | None
    """What floating tensors are cast to first; None: nothing."""
    device: torch.device
    """Where weights are quantized."""


# ------------------------------------------------------------------------------------------------------------- making


def check_recipe(recipe: QuantizeRecipe, device: torch.device) -> None:
    """Raise SetupError with the reason if this machine cannot run the recipe."""
    need_torchao(f"--quantize {recipe}", _SUPPORT)
    if (reason := why_not_here(recipe, device)) is not None:
        raise SetupError(
            f"--quantize {recipe}: {reason}; choose int8-weight-only, int8-dynamic-act-int8-weight or "
            "int8-dynamic-act-int4-weight, which run everywhere"
        )


def quantize_directory(
    directory: Path,
    recipe: QuantizeRecipe,
    *,
    group_size: int | None = None,
    exclude: Iterable[str] = ("lm_head",),
    tables: bool = True,
    shard_bytes: int = 1_000_000_000,
) -> None:
    """Turn a plain model directory, in place, into a quantized one.

    ``group_size``: weights that share a scale; None: the recipe's. ``exclude``: regular expressions of layers that the
    recipe leaves alone. ``tables``: store embedding and head as int8 rows where the recipe does not take them. One
    tensor is in memory, and the quantized form of ``shard_bytes`` of them. Raises SetupError.
    """
    device = pick_device("auto") if needs_cuda(recipe) else torch.device("cpu")
    check_recipe(recipe, device)
    config = read_config(directory)
    done, as_rows = sort_layers(directory, recipe, group_size=group_size, exclude=exclude, tables=tables)
    for line in (*done, *([f"stored as int8 rows: {', '.join(as_rows)}"] if as_rows else [])):
        _log.info("%s", line)
    stored, rows = stored_as(recipe, group_size), stored_as(_TABLES)
    configs = {f"{name}.weight": stored for name in done.converted} | {f"{name}.weight": rows for name in as_rows}
    plan = _Plan(configs, torch.bfloat16 if needs_cuda(recipe) else None, device)
    _write(directory, Weights(directory), plan, shard_bytes)
    _write_config(directory, config, stored, plan, list(done.left), bool(as_rows))


def sort_layers(
    directory: Path,
    recipe: QuantizeRecipe,
    *,
    group_size: int | None = None,
    exclude: Iterable[str] = ("lm_head",),
    tables: bool = True,
) -> tuple[Conversion, list[str]]:
    """The linear layers that the recipe takes, and why it leaves the others; the tables that become int8 rows.

    Raises ModelError where it takes none.
    """
    with torch.device("meta"):
        model = build_model(directory_option(directory), vocab_size=1, seq_len=1)
    size = group_size_of(recipe, group_size)
    tied = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}

    def why_not(layer: nn.Linear) -> str | None:
        if id(layer.weight) in tied:
            return "the weight is the embedding's too"
        if recipe == "float8-dynamic-act-float8-weight":
            return misaligned(layer)
        return indivisible(layer, size)

    names, left = sorted_out(model, exclude, why_not)
    if not names:
        why = "; ".join(f"{name}: {why}" for name, why in list(left.items())[:3]) or "it has none"
        kind = (read_config(directory).get("architectures") or ["the model"])[0]
        raise ModelError(
            f"--quantize {recipe}: no linear layer of {kind} can be quantized ({why}); leave --quantize out"
        )
    # embeddings and the layer that makes logits: as many rows as there are tokens
    embeddings = {name: m for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
    rows = max((m.num_embeddings for m in embeddings.values()), default=0)
    found = {name: m for name, m in embeddings.items() if m.num_embeddings == rows}
    found |= {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and m.out_features == rows}
    # in a module with quantized weights transformers 5.23 leaves buffers without values (integrations/torchao.py marks
    # it as initialized): Gemma's embedding would be scaled by whatever memory holds
    buffered = {id(m.weight) for m in embeddings.values() if list(m.buffers(recurse=False))}
    as_rows = [n for n, m in found.items() if tables and n not in names and id(m.weight) not in buffered]
    left = {name: why for name, why in left.items() if name not in as_rows}
    what = f"are stored as {recipe}" + (f" in groups of {size}" if size else "")
    return Conversion(what, tuple(names), left), as_rows


# ------------------------------------------------------------------------------------------------------------- writing


def _write(directory: Path, weights: Weights, plan: _Plan, shard_bytes: int) -> None:
    """New files beside the old ones, which then go."""
    metadata = _metadata(weights, plan)
    old = {directory / name for name in (SINGLE, INDEX)} | set(directory.glob("model-*-of-*.safetensors"))
    groups: list[list[str]] = [[]]  # the tensors of each new file: shard_bytes of old ones, or one tensor
    room = shard_bytes
    for name in weights.names:
        size = weights.spec(name).num_bytes
        if size > room and groups[-1]:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= size
    with Bar("quantizing", "bytes", total=sum(weights.spec(name).num_bytes for name in weights.names)) as bar:
        files = [_write_file(directory, n, names, weights, plan, metadata, bar) for n, names in enumerate(groups)]
    for path in old:
        path.unlink(missing_ok=True)
    if len(files) == 1:
        (directory / _part(0)).rename(directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for n, (names, _) in enumerate(files):
        final = f"model-{n + 1:05d}-of-{len(files):05d}.safetensors"
        (directory / _part(n)).rename(directory / final)
        weight_map |= dict.fromkeys(names, final)
    index = {"metadata": {"total_size": sum(size for _, size in files)}, "weight_map": weight_map}
    write_json(directory / INDEX, index)


def _part(number: int) -> str:
    return f"quantized-{number}.safetensors"


def _write_file(
    directory: Path, number: int, names: list[str], weights: Weights, plan: _Plan, metadata: dict[str, str], bar: Bar
) -> tuple[list[str], int]:
    """(names of the tensors in the file, their bytes)."""
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= _flattened(name, _become(name, weights.read(name), plan))[0]
        bar.add(weights.spec(name).num_bytes)
    # all files tell of all tensors: transformers 5.23 takes the last one's list for the whole
    save_file(tensors, directory / _part(number), {"format": "pt", **metadata})
    shutil.copymode(directory / _CONFIG, directory / _part(number))  # safetensors 0.8 lets the owner alone read it
    return list(tensors), sum(t.numel() * t.element_size() for t in tensors.values())


def _become(name: str, tensor: Tensor, plan: _Plan) -> Tensor:
    """``tensor`` as torchao stores it."""
    if plan.dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(plan.dtype)
    config = plan.configs.get(name)
    if config is None:
        return tensor
    from torchao.quantization import quantize_

    layer = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta")  # (out, in)
    layer.weight = nn.Parameter(tensor.to(plan.device), requires_grad=False)
    quantize_(nn.Sequential(layer), config)
    return layer.weight.data


def _flattened(name: str, tensor: Tensor) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The plain tensors that ``tensor`` consists of, in host memory, and what the header tells of it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    tensors, metadata = flatten_tensor_state_dict({name: tensor})
    return {key: part.cpu().contiguous() for key, part in tensors.items()}, metadata


def _metadata(weights: Weights, plan: _Plan) -> dict[str, str]:
    """What torchao writes into headers, which depends on shape and dtype alone: found from zeros, once per kind."""
    kinds: dict[Any, str] = {}
    found: dict[str, str] = {}
    for name in weights.names:
        spec = weights.spec(name)
        kind = (spec.shape, spec.dtype, id(plan.configs.get(name)))
        if kind not in kinds:
            zeros = torch.zeros(spec.shape, dtype=dtype_of(spec))
            kinds[kind] = _flattened(name, _become(name, zeros, plan))[1][name]
        found[name] = kinds[kind]
    return {**found, "tensor_names": json.dumps(weights.names)}


def _write_config(
    directory: Path, config: dict[str, Any], quantized: Any, plan: _Plan, left: list[str], has_rows: bool
) -> None:
    from torchao.core.config import config_to_dict

    config["quantization_config"] = {
        "quant_method": "torchao",
        "quant_type": {"default": config_to_dict(quantized)},
        "modules_to_not_convert": left,
        "include_input_output_embeddings": has_rows,
        "untie_embedding_weights": False,
    }
    if plan.dtype is not None:
        config |= {key: "bfloat16" for key in ("dtype", "torch_dtype") if key in config}
    write_json(directory / _CONFIG, config)


# ------------------------------------------------------------------------------------------------------------- loading


def load_quantized(directory: Path, device: torch.device) -> nn.Module:
    """The model of a directory that ``quantize_directory`` made, in eval mode on ``device``.

    The own models for the families they cover, else transformers' class. Raises SetupError.
    """
    need_torchao(f"{directory}", _SUPPORT)
    config = read_json_object(directory / _CONFIG, ModelError)
    quantization = config["quantization_config"]
    method = quantization.get("quant_method") if isinstance(quantization, dict) else None
    if method != "torchao":
        raise ModelError(f"{directory}: is quantized by {method}, which is not read here; give the model before that")
    try:
        settings = settings_from_hf({**config, "quantization_config": None})
    except ModelError:
        return _through_transformers(directory, device)
    with torch.device("meta"):
        model = build_model(settings, vocab_size=1, seq_len=1)
    state = _read_tensors(directory, device)
    if settings.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        raise ModelError(f"{directory}: {str(error).splitlines()[-1].strip()}; quantize the model again") from error
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.get_submodule("model.rotary_emb").to_empty(device=device)
    reset_buffers(model)
    return model.eval()


def _read_tensors(directory: Path, device: torch.device) -> dict[str, Tensor]:
    from safetensors import safe_open
    from torchao.prototype.safetensors.safetensors_support import unflatten_tensor_state_dict

    found: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for path in sorted(directory.glob("*.safetensors")):
        read_header(path)  # first: the library waits at a pipe
        with safe_open(path, framework="pt", device=str(device)) as file:
            metadata |= file.metadata() or {}
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    try:
        tensors, extra = unflatten_tensor_state_dict(found, metadata)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{directory}: cannot be read as torchao's tensors: {error}") from error
    if extra:
        raise ModelError(f"{directory}: {min(extra)} belongs to no tensor; quantize the model again")
    return dict(tensors)


def _through_transformers(directory: Path, device: torch.device) -> nn.Module:
    from forgather_cli.models.hf.build import library

    try:
        model: nn.Module = library().AutoModelForCausalLM.from_pretrained(
            directory, local_files_only=True, use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{directory}: transformers cannot load it: {' '.join(str(error).split())}") from error
    return model.to(device).eval()
