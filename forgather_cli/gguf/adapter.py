"""An adapter as a GGUF file, which llama.cpp's ``--lora`` lays beside a file of its base.

Of a matrix NAME of the base it has ``NAME.lora_a`` (r, in) and ``NAME.lora_b`` (out, r), of experts X of each;
llama.cpp adds their product times ``adapter.lora.alpha`` / r (src/llama-adapter.cpp and llama-graph.cpp, October 2026).
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from forgather_cli.adapters import layers
from forgather_cli.adapters.directory import CONFIG, WEIGHTS, AdapterDirectory, bounded
from forgather_cli.adapters.model import attach_adapters, attach_rows_of
from forgather_cli.adapters.targets import parameter_targets, targets
from forgather_cli.checkpoint.files import remove
from forgather_cli.checkpoint.load import ADAPTER_PREFIX
from forgather_cli.checkpoint.tensors import SINGLE, Weights
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.finalize.sample import Sample
from forgather_cli.gguf import prove
from forgather_cli.gguf.architecture import architecture_of
from forgather_cli.gguf.contents import contents_of, general
from forgather_cli.gguf.families import turned
from forgather_cli.gguf.layout import Architecture, Change, Metadata, TensorEntry
from forgather_cli.gguf.options import GgufType
from forgather_cli.gguf.write import Contents, write_gguf
from forgather_cli.models.build import build_model, directory_option

TYPES = ("f32", "f16", "bf16", "q8_0")
_MOVES = 100 * prove.BOUNDS["f32"]
"""By how much an adapter has to move a log-probability, so that the bound tells anything of it: nats."""


@dataclass(frozen=True)
class AdaptedMatrix:
    """A matrix of the base with what lies beside it."""

    name: str
    """In the base's file."""
    parameter: str
    """In the model."""
    is_layer: bool
    """Its layer is adapted, else the parameter itself."""
    pair: tuple[TensorEntry, ...]
    """The sources are names in the adapter's file."""


@dataclass(frozen=True)
class AdapterArchitecture(Architecture):
    """An adapter as llama.cpp knows it."""

    matrices: tuple[AdaptedMatrix, ...] = ()

    def entries(self, names: Iterable[str]) -> Iterator[TensorEntry]:
        for matrix in self.matrices:
            yield from matrix.pair

    def least_layers(self) -> int:
        """In so many layers of the base each kind of matrix is adapted that is in any."""
        blocks = reversed([re.match(r"blk\.(\d+)\.(.*)", each.name) for each in self.matrices])
        return 1 + max({block[2]: int(block[1]) for block in blocks if block}.values(), default=0)


def architecture_of_adapter(adapter: AdapterDirectory, types: Sequence[GgufType] = ()) -> AdapterArchitecture:
    """What llama.cpp calls an adapter. Raises ConfigError for what it does not have, and for other types."""
    if kind := next((kind for kind in types if kind not in TYPES), None):
        raise ConfigError(f"--gguf: {kind} is of a whole model; an adapter takes {', '.join(TYPES)}, or add --merge")

    def refused(what: str) -> ConfigError:
        return ConfigError(
            f"--gguf: {what} has no counterpart in llama.cpp's adapters, got {adapter.path}; add --merge, or leave "
            "--gguf out"
        )

    base = replace(architecture_of(read_json_object(adapter.base / "config.json", ModelError)), rope_factors=None)
    if (settings := adapter.settings).is_dora or adapter.trainable:
        raise refused("DoRA" if settings.is_dora else "what is trained whole (modules_to_save)")
    with torch.device("meta"):
        model = build_model(directory_option(adapter.base), vocab_size=base.vocab_size, seq_len=1)
    with bounded(settings):
        attach_adapters(model, settings, targets(model, settings), parameter_targets(model, settings), torch.float32)
    attach_rows_of(model, settings, torch.float32)
    alpha = settings.lora_alpha * (math.sqrt(settings.r) if settings.use_rslora else 1)
    found: dict[str, tuple[str, bool, float, int]] = {}
    layer: Any
    for path, layer in layers.adapted_layers(model):
        if isinstance(layer, layers.TokenRows | layers.AdaptedEmbedding):
            raise refused(f"an adapter of {path}" if hasattr(layer, "adapter") else f"training of rows of {path}")
        of_module = isinstance(layer, layers.AdaptedParameters)
        for number, own in enumerate(layer.adapted):
            shape = layer.adapters[own] if of_module else layer.adapter
            experts = len(layer.get_parameter(own)) if of_module and layer.get_parameter(own).ndim > 2 else 0
            stored = f"{ADAPTER_PREFIX}{path}{'.base_layer' * (len(layer.adapted) - 1 - number)}"
            found[f"{path}.{own}"] = stored, not of_module, shape.scaling * shape.rank / alpha, experts
    matrices = []
    for entry in base.entries(found):
        stored, is_layer, factor, experts = found[entry.sources[0]]
        names = f"{stored}.lora_A.weight", f"{stored}.lora_B.weight"
        changes = zip("ab", names, _changes(factor, experts, entry.change), strict=True)
        pair = tuple(TensorEntry(f"{entry.name}.lora_{which}", (name,), change) for which, name, change in changes)
        matrices.append(AdaptedMatrix(entry.name, entry.sources[0], is_layer, pair))
    if left := found.keys() - {each.parameter for each in matrices}:
        raise refused(f"an adapter of {min(left)}, which is the embedding's,")
    metadata: Metadata = {"adapter.type": "lora", "adapter.lora.alpha": float(alpha)}
    return AdapterArchitecture(base.name, metadata, base.is_tied, {}, None, base.period, tuple(matrices))


def _changes(factor: float, experts: int, change: Change | None) -> tuple[Change | None, Change]:
    """What is made of A and of B: what ``change`` does with rows of the product, it does with those of B."""

    def lower(tensor: Tensor) -> Tensor:
        return tensor.reshape(experts, -1, tensor.shape[1])

    def raised(tensor: Tensor) -> Tensor:
        made = tensor.float() * factor
        if experts:
            made = made.reshape(len(made), -1, experts).permute(2, 0, 1)
        return made if change is None or change is turned else change(made)  # (out, r) beside GPT-2's (in, out) too

    return lower if experts else None, raised


def size_beside(base: Contents, adapter: AdapterDirectory, types: Sequence[GgufType]) -> int:
    """Bytes of an adapter's files, nearly, and twice those of the base's first layers, beside which it is proved."""
    count = max(base.architecture.period, architecture_of_adapter(adapter).least_layers())
    first = sum(8 * spec.num_elements for entry, spec in base.specs() if prove.is_in_first(entry.name, count))
    return first + 2 * (1 + len(types)) * sum(file.stat().st_size for file in adapter.path.glob(WEIGHTS))


def write_and_prove_adapter(
    directory: Path, name: str, types: Sequence[GgufType], sample: Sample, stop: list[int], lineage: dict[str, Any],
    tokenizer: Tokenizer, adapter: AdapterDirectory, say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """``write_and_prove`` of an adapter, which lies in ``directory`` too. Raises SetupError, ProofError."""
    made, folder = architecture_of_adapter(adapter), directory / "first_layers"
    beside, lora = folder / "adapter", folder / "first-layers-adapter-F32.gguf"
    tokenizer.save(beside)
    (beside / SINGLE).symlink_to((directory / WEIGHTS).resolve())
    shutil.copyfile(adapter.base / "config.json", beside / "config.json")
    # with the adapter's own tokenizer, template and ends, that nothing but the weights is told apart
    base = replace(contents_of(beside, tokenizer, stop, {}), weights=Weights(adapter.base))
    sequences = prove.sequences_of(sample, base.architecture.context_length)
    count, file = prove.write_first_layers(adapter.base, base, tokenizer, folder, made.least_layers())
    contents = Contents(made, Weights(beside), {**general(name, lineage), "general.type": "adapter"})
    first = replace(made, matrices=tuple(each for each in made.matrices if prove.is_in_first(each.name, count)))
    write_gguf(lora, replace(contents, architecture=first), "f32")
    save_file({name: contents.weights[name] for each in first.entries(()) for name in each.sources}, beside / WEIGHTS)
    say("loading the first layers in fp32 and the adapter into llama.cpp and comparing")
    told = _scaled(beside, adapter, first, sequences)
    if not told["moves"]:
        say("the adapter moves nothing there, as before training: of its numbers llama.cpp tells nothing")
    proof = prove.prove(file, beside, tokenizer, sequences, "f32", stop, lora=(str(lora), told["adapter_scale"]))
    proofs = []
    for kind in types:
        file = directory / f"{name}-{kind.upper()}.gguf"
        say(f"writing {file.name}")
        write_gguf(file, contents, kind)
        prove.compare_contents(file, prove.said_by(lora), beside, contents, kind)
        found = prove.expect(directory, sequences, kind)
        losses = [F.nll_loss(each, found.targets, ignore_index=-1) for each in (found.exact, found.stored)]
        told["perplexity_ratio"] = math.exp(losses[1] - losses[0])
        proofs.append({**proof, **told, "file": file.name, "type": kind, "layers": count})
    remove(folder)
    return proofs


def _scaled(
    beside: Path, adapter: AdapterDirectory, first: AdapterArchitecture, sequences: list[list[int]]
) -> dict[str, float]:
    """Have the folder ``beside`` say what the adapter of the first layers is, scaled until it moves them by more than
    the bound of the proof. Returns the scale, and by how much a log-probability is moved without and with it."""
    config, settings = read_json_object(adapter.path / CONFIG, ModelError), adapter.settings
    config["base_model_name_or_path"] = str(beside.parent)
    config["target_modules"] = [m.parameter.removesuffix(".weight") for m in first.matrices if m.is_layer]
    config["target_parameters"] = [m.parameter for m in first.matrices if not m.is_layer]
    before = prove.expect(beside.parent, sequences, "f32").exact
    scale, moves = 1.0, list[float]()
    while True:
        config["lora_alpha"] = settings.lora_alpha * scale
        config["alpha_pattern"] = {key: value * scale for key, value in settings.alpha_pattern.items()}
        (beside / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        apart = prove.expect(beside, sequences, "f32").exact - before
        moves.append(float(apart.gather(1, before.argmax(1, keepdim=True)).abs().max()))
        if not 0 < moves[-1] < _MOVES or len(moves) > 3:
            return {"adapter_scale": scale, "moves": moves[0], "moves_scaled": moves[-1]}
        scale *= 2 * _MOVES / moves[-1]
