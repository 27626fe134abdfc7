"""A whole model of a base and an adapter: each adapted matrix plus its product, summed in fp32, in the base's dtype.
Matrices that the adapter was trained beside in four bits are unpacked."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn

from forgather_cli.adapters.directory import AdapterDirectory
from forgather_cli.adapters.layers import TokenRows, adapted_layers, without_adapters
from forgather_cli.adapters.nf4 import packed_layers
from forgather_cli.checkpoint.tensors import spec_of, write_weights
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ModelError
from forgather_cli.inference.source import Located, load_located


def write_merged(found: Located, adapter: AdapterDirectory, directory: Path) -> None:
    """Write a model directory with weights, config.json and tokenizer. Raises SetupError.

    A head that shares the embedding's weight, of which one alone has an adapter, becomes a weight of its own:
    tied again, the two would be neither (transformers#45127).
    """
    source = load_located(found, device="cpu")
    rows = MergedRows(source.model)
    directory.mkdir()
    config = read_json_object(adapter.base / "config.json", ModelError)
    if rows.is_untied:
        config["tie_word_embeddings"] = False
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = adapter.base / "generation_config.json"
    if generation.is_file():
        (directory / generation.name).write_bytes(generation.read_bytes())
    source.tokenizer.save(directory)
    write_weights(directory, [spec_of(name, *rows.kind(name)) for name in rows.base], rows)


class MergedRows:
    """The tensors of a model without its adapters, by full name, each merged when it is asked for."""

    def __init__(self, model: nn.Module) -> None:
        self._packed = {f"{name}.weight": layer for name, layer in packed_layers(model)}
        self._layers = {f"{name}.{own}": (layer, own) for name, layer in adapted_layers(model) for own in layer.adapted}
        with without_adapters(model):
            every: dict[str, Tensor] = model.state_dict(keep_vars=True)
        names: dict[int, list[str]] = {}
        for name, tensor in every.items():
            names.setdefault(id(tensor), []).append(name)
        tied = [group for group in names.values() if len(group) > 1]
        apart = [group for group in tied if not self._are_equal(group)]
        self.is_untied = bool(apart)
        # a weight that others share is stored once, under its first name, unless an adapter tells them apart
        self.base = {name: every[name] for group in names.values() for name in (group if group in apart else group[:1])}

    def _are_equal(self, names: list[str]) -> bool:
        """Whether matrices that share one weight share what is added to it too."""
        layers = [self._layers[name][0] for name in names if name in self._layers]
        sources = {id(layer.source[0]) if isinstance(layer, TokenRows) else None for layer in layers}
        return not layers or (len(layers) == len(names) and len(sources) == 1 and None not in sources)

    def kind(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape of a tensor, the base's."""
        if (layer := self._packed.get(name)) is not None:
            return layer.stored_dtype, tuple(layer.stored_shape)
        return self.base[name].dtype, tuple(self.base[name].shape)

    @torch.no_grad()
    def __getitem__(self, name: str) -> Tensor:
        dtype, _ = self.kind(name)
        if name in self._layers:
            layer, own = self._layers[name]
            return layer.merged(own).to(dtype)
        return self._packed[name].as_stored().to(dtype) if name in self._packed else self.base[name].detach()
