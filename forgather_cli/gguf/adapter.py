"""An adapter as a GGUF file, which llama.cpp's ``--lora`` lays beside a file of its base.

Of a matrix NAME of the base it has ``NAME.lora_a`` (r, in) and ``NAME.lora_b`` (out, r), of experts X of each; to its
product llama.cpp adds that of the two, times ``adapter.lora.alpha`` / r (src/llama-adapter.cpp, src/llama-graph.cpp,
October 2026). It takes neither rows of tokens nor whole matrices, and of an embedding alone nothing that DoRA has.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
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
from forgather_cli.gguf.families import turned
from forgather_cli.gguf.files import contents_of, general
from forgather_cli.gguf.layout import Architecture, Change, TensorEntry
from forgather_cli.gguf.options import GgufType
from forgather_cli.gguf.write import Contents, write_gguf
from forgather_cli.models.build import build_model, directory_option

TYPES = ("f32", "f16", "bf16", "q8_0")
_MOVES = 100 * prove.BOUNDS["f32"]
"""By how much an adapter has to move a log-probability where it is compared, so that the bound tells: nats."""


@dataclass(frozen=True)
class AdapterArchitecture(Architecture):
    """An adapter as llama.cpp knows it."""

    pairs: tuple[TensorEntry, ...] = ()
    """Its tensors; a source is a name in the adapter's file."""
    beside: tuple[tuple[str, str, bool], ...] = ()
    """Of each adapted matrix the tensor in the base's file, the parameter, and whether that has a layer's adapter."""

    @property
    def vocab_size(self) -> int:
        return 0  # it has none

    def entries(self, names: Iterable[str]) -> Iterator[TensorEntry]:
        yield from self.pairs

    @property
    def least_layers(self) -> int:
        """So many layers of the base have each kind of matrix with an adapter."""
        first: dict[str, int] = {}
        for name, *_ in self.beside:
            if block := re.match(r"blk\.(\d+)\.(.*)", name):
                first[block[2]] = min(first.get(block[2], int(block[1])), int(block[1]))
        return 1 + max(first.values(), default=0)


def architecture_of_adapter(adapter: AdapterDirectory, types: Sequence[GgufType] = ()) -> AdapterArchitecture:
    """What llama.cpp calls an adapter. Raises ConfigError for what it does not have, and for other types."""
    if kind := next((kind for kind in types if kind not in TYPES), None):
        raise ConfigError(f"--gguf: {kind} is of a whole model; an adapter takes {', '.join(TYPES)}, or add --merge")

    def refused(what: str) -> ConfigError:
        return ConfigError(
            f"--gguf: {what} has no counterpart in llama.cpp's adapters, got {adapter.path}; add --merge, or leave "
            "--gguf out"
        )

    base, settings = architecture_of(read_json_object(adapter.base / "config.json", ModelError)), adapter.settings
    if settings.is_dora or adapter.trainable:
        raise refused("DoRA" if settings.is_dora else "what is trained whole (modules_to_save)")
    with torch.device("meta"):
        model = build_model(directory_option(adapter.base), vocab_size=base.vocab_size, seq_len=1)
    with bounded(settings):
        found_layers, parameters = targets(model, settings), parameter_targets(model, settings)
    attach_adapters(model, settings, found_layers, parameters, torch.float32)
    attach_rows_of(model, settings, torch.float32)
    found: dict[str, tuple[str, layers.LowRank, int, bool]] = {}
    for path, layer in layers.adapted_layers(model):
        if isinstance(layer, layers.TokenRows | layers.AdaptedEmbedding):
            raise refused(f"{'rows of tokens' if isinstance(layer, layers.TokenRows) else 'an adapter'} in {path}")
        for number, own in enumerate(layer.adapted):
            of_module = isinstance(layer, layers.AdaptedParameters)
            shape = layer.adapters[own] if of_module else layer.adapter
            experts = layers.parameter_sizes(layer, own)[0] if of_module and layer.get_parameter(own).ndim > 2 else 0
            inside = ".base_layer" * (len(layer.adapted) - 1 - number)
            found[f"{path}.{own}"] = f"{ADAPTER_PREFIX}{path}{inside}", shape, experts, not of_module
    # of most: the rest is in lora_b; 0 would mean a scale of 1
    alpha = Counter(shape.scaling * shape.rank for _, shape, *_ in found.values()).most_common(1)[0][0] or 1.0
    entries = list(base.entries(found))
    if left := found.keys() - {entry.sources[0] for entry in entries}:
        raise refused(f"an adapter of {min(left)}, which the embedding is too,")
    pairs = []
    for entry in entries:
        stored, shape, experts, _ = found[entry.sources[0]]
        lower, raised = _changes(shape.scaling * shape.rank / alpha, experts, entry.change)
        pairs.append(TensorEntry(f"{entry.name}.lora_a", (f"{stored}.lora_A.weight",), lower))
        pairs.append(TensorEntry(f"{entry.name}.lora_b", (f"{stored}.lora_B.weight",), raised))
    metadata = {"adapter.type": "lora", "adapter.lora.alpha": float(alpha)}
    beside = tuple((entry.name, entry.sources[0], found[entry.sources[0]][3]) for entry in entries)
    return AdapterArchitecture(base.name, metadata, base.is_tied, {}, None, base.period, tuple(pairs), beside)


def _changes(factor: float, experts: int, change: Change | None) -> tuple[Change | None, Change]:
    """What is made of A and of B: what ``change`` does with rows of the product, it does with those of B."""

    def raised(tensor: Tensor) -> Tensor:
        made = tensor.float() * factor
        if experts:
            made = made.unflatten(1, (-1, experts)).permute(2, 0, 1)
        return made if change is None or change is turned else change(made)  # whose product is (in, out) in torch

    return (lambda tensor: tensor.unflatten(0, (experts, -1))) if experts else None, raised


def size_beside(base: Contents, adapter: AdapterDirectory, types: Sequence[GgufType]) -> int:
    """Bytes of an adapter's files, nearly, and of the first layers of its base, twice, beside which it is proved."""
    count = max(base.architecture.period, architecture_of_adapter(adapter).least_layers)
    first = sum(8 * spec.num_elements for entry, spec in base.specs() if prove.is_in_first(entry.name, count))
    return first + 2 * (1 + len(types)) * sum(file.stat().st_size for file in adapter.path.glob(WEIGHTS))


def write_and_prove_adapter(
    directory: Path, name: str, types: Sequence[GgufType], sample: Sample, stop: list[int], lineage: dict[str, Any],
    tokenizer: Tokenizer, adapter: AdapterDirectory, say: Callable[[str], None],
) -> list[dict[str, Any]]:  # fmt: skip
    """``write_and_prove`` of an adapter, which lies in ``directory`` too. Raises SetupError, ProofError."""
    made, folder = architecture_of_adapter(adapter), directory / "first_layers"
    base = contents_of(adapter.base, tokenizer, stop, {})
    sequences = prove.sequences_of(sample, base.architecture.context_length)
    count, file = prove.write_first_layers(adapter.base, base, tokenizer, folder, made.least_layers)
    linked = folder / "adapter"
    linked.mkdir()
    (linked / SINGLE).symlink_to(directory / WEIGHTS)
    contents = Contents(made, Weights(linked), {**general(name, lineage), "general.type": "adapter"})
    first = replace(
        made,
        pairs=tuple(entry for entry in made.pairs if prove.is_in_first(entry.name, count)),
        beside=tuple(each for each in made.beside if prove.is_in_first(each[0], count)),
    )
    write_gguf(linked / "adapter-F32.gguf", replace(contents, architecture=first), "f32")
    say("loading the first layers in fp32 and the adapter into llama.cpp and comparing")
    facts = {"layers": count, **_put_beside(folder, adapter, first, contents.weights, sequences)}
    if not facts["moves"]:
        say("the adapter moves nothing there, as before training: of its numbers llama.cpp tells nothing")
    lora = str(linked / "adapter-F32.gguf"), facts["adapter_scale"]
    structure = {**facts, **prove.prove(file, folder, tokenizer, sequences, "f32", stop, lora)}
    proven, proofs = prove.said_by(linked / "adapter-F32.gguf"), []
    for kind in types:
        file = directory / f"{name}-{kind.upper()}.gguf"
        say(f"writing {file.name}")
        write_gguf(file, contents, kind)
        prove.compare_contents(file, proven, linked, contents, kind)
        cost = prove.cost_of_rounding(prove.expect(directory, sequences, kind))
        prove.check_cost(file, cost, kind)
        proofs.append({**structure, "file": file.name, "type": kind, **cost, "structure": structure})
    remove(folder)
    return proofs


def _put_beside(
    folder: Path, adapter: AdapterDirectory, first: AdapterArchitecture, weights: Weights, sequences: list[list[int]]
) -> dict[str, float]:
    """Put the adapter of the first layers beside them, scaled so that it moves what is compared by more than the bound
    is wide. Returns the scale, and by how much it moves a log-probability as it is, and scaled."""
    before = prove.expect(folder, sequences, "f32").exact
    likely, settings = prove.likely_of(before), adapter.settings
    save_file({name: weights[name] for entry in first.pairs for name in entry.sources}, folder / WEIGHTS)
    config = read_json_object(adapter.path / CONFIG, ModelError) | {
        "base_model_name_or_path": str(folder),
        "target_modules": [name.removesuffix(".weight") for _, name, is_layer in first.beside if is_layer],
        "target_parameters": [name for _, name, is_layer in first.beside if not is_layer],
    }
    scale, moves = 1.0, list[float]()
    while True:
        patterns = {key: value * scale for key, value in settings.alpha_pattern.items()}
        config |= {"lora_alpha": settings.lora_alpha * scale, "alpha_pattern": patterns}
        (folder / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        after = prove.expect(folder, sequences, "f32").exact
        moves.append(float((after - before)[likely].abs().max()))
        if not 0 < moves[-1] < _MOVES or len(moves) > 3:
            return {"adapter_scale": scale, "moves": moves[0], "moves_scaled": moves[-1]}
        scale *= 2 * _MOVES / moves[-1]
