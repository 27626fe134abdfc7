"""The weights of a directory into a model of the transformers library."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.config.schema import TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.build import DrawnWeights
from forgather_cli.models.files import read_rows, tensor_files, whole_tensor
from forgather_cli.models.hf.build import config_of, library
from forgather_cli.models.hf.model import CausalLM
from forgather_cli.models.resize import NOISE, rows_like
from forgather_cli.shards import fill_local

log = logging.getLogger(__name__)

_IGNORED = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$")
_REMEDY = "by its config.json; mend config.json or save the model again"


class CausalLMWeights(DrawnWeights):
    """Those of a model of the library: of a directory, or as its class draws them."""

    def vocab_size(self) -> int | None:
        return config_of(self.option, vocab_size=0).get_text_config().vocab_size or None

    def fill(self, module: Any, seed: int, *, device_generator: bool, num_known: int | None) -> None:
        """Of a directory: into this rank's rows of ``module``, in its dtype.

        Tensor by tensor and row by row where the files hold the model's own tensors, if under older names; where
        transformers would convert them (experts stored one by one), it reads them whole into the memory of each rank
        first. Rows beyond the directory's vocabulary follow from (seed, name); with ``num_known`` those behind so many
        are their mean.
        """
        if self.option.path is None:
            module.draw_all(seed)
            return
        path = Path(self.option.path)
        files = tensor_files(path)
        every: dict[str, Tensor] = module.state_dict(keep_vars=True)
        first = {id(tensor): name for name, tensor in reversed(list(every.items()))}
        targets = {name: tensor for name, tensor in every.items() if first[id(tensor)] == name}  # tied ones once
        known = {} if num_known is None else dict.fromkeys(_names_of_tokens(module), num_known)
        noise = 0.0 if known else NOISE
        stored = stored_names(module, files)
        if stored is not None:
            rows = self.vocab_size()
            own = {name: stored[name] for name in targets}
            read_rows(targets, own, files, vocab_size=rows, known=known, noise=noise, seed=seed, remedy=_REMEDY)
            return
        log.info("%s: its tensors are not the model's one by one, so every rank has transformers read them all", path)
        found = whole_by_transformers(self.option)
        for name, target in targets.items():
            whole = found[name][: known.get(name)] if name in known else found[name]
            if target.ndim and (more := target.shape[0] - whole.shape[0]):  # rows for new tokens
                whole = torch.cat((whole, rows_like([whole], more, name=name, seed=seed, noise=noise).to(whole)))
            fill_local(target, whole)

    def reader(self, module: Any) -> Callable[[str], Tensor]:
        """Where transformers would convert some tensors (experts stored one by one), it reads all into memory first."""
        files = tensor_files(Path(self.option.path).expanduser())
        names = stored_names(module, files)
        if names is None:
            return whole_by_transformers(self.option).__getitem__
        return lambda name: whole_tensor(files[names[name]], names[name])


def _names_of_tokens(model: CausalLM) -> list[str]:
    """Parameters with a row for each token: of the embedding and of the output layer."""
    theirs = model.twin()
    layers = theirs.get_input_embeddings(), theirs.get_output_embeddings()
    own = {id(parameter) for layer in layers if layer is not None for parameter in layer.parameters()}
    return [name for name, each in theirs.named_parameters(remove_duplicate=False) if id(each) in own]


def stored_names(model: CausalLM, files: Mapping[str, Path]) -> dict[str, str] | None:
    """Name -> name in the files, of the whole model, of which ``model`` may be a stage; None where they do not hold
    exactly its tensors.

    The rules are those that ``from_pretrained`` follows (transformers 5.23, ``core_model_loading.py``).
    """
    from transformers import conversion_mapping, core_model_loading

    theirs = model.twin()
    every: dict[str, Tensor] = theirs.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(list(every.items()))}
    rules = conversion_mapping.get_model_conversion_mapping(theirs)
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    # tensors that files may have and the class no longer has: causal masks, rotary frequencies
    ignored = [*(theirs._keys_to_ignore_on_load_unexpected or ()), *_IGNORED]
    names: dict[str, str] = {}
    for stored in files:
        renamed = core_model_loading.rename_source_key(stored, renamings, converters, theirs.base_model_prefix, every)
        name, converter = renamed
        if name not in every and stored in every:
            name = stored
        elif converter is not None:  # transformers would convert it
            return None
        if name in every:
            names.setdefault(first[id(every[name])], stored)
        elif not any(re.search(pattern, stored) for pattern in ignored):
            return None
    return names if names.keys() == set(first.values()) else None


def whole_by_transformers(option: TransformersSettings) -> dict[str, Tensor]:
    """The whole model's tensors on the CPU, in the dtype of the files."""
    config = config_of(option, vocab_size=0)
    try:
        whole, report = library().AutoModelForCausalLM.from_pretrained(
            option.path,
            config=config,
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"model.path: transformers cannot load {option.path}: {error}") from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if names := sorted(map(str, report.get(kind, ()))):
            shown = f"{', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
            raise ModelError(
                f"model.path: {option.path} has {len(names)} {kind.replace('_', ' ')} ({shown}), {_REMEDY}"
            )
    tensors: dict[str, Tensor] = whole.state_dict()
    return tensors
