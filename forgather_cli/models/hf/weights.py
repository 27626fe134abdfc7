"""The weights of a directory into a model of the transformers library."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.config.schema import TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.files import read_rows, tensor_files
from forgather_cli.models.hf.library import config_of, library
from forgather_cli.models.hf.model import CausalLM
from forgather_cli.models.resize import rows_like
from forgather_cli.shards import fill_local

log = logging.getLogger(__name__)

_REMEDY = "by its config.json; mend config.json or save the model again"


def load_causal_lm(model: CausalLM, option: TransformersSettings, *, seed: int = 0) -> None:
    """Copy the weights of the option's directory into this rank's rows of ``model``, in its dtype.

    Tensor by tensor and row by row where the files hold the model's own tensors, if under older names; where
    transformers would convert them (experts stored one by one), it reads them whole into the memory of each rank first.
    Rows beyond the directory's vocabulary follow from (seed, name). Raises ModelError.
    """
    assert option.path is not None
    directory = Path(option.path)
    files = tensor_files(directory)
    targets = _distinct(model.state_dict(keep_vars=True))
    stored = _stored_names(model, targets, files)
    if stored is not None:
        rows = config_of(option, vocab_size=0).get_text_config().vocab_size
        read_rows(targets, stored, files, vocab_size=rows, seed=seed, remedy=_REMEDY)
        return
    log.info("%s: its tensors are not the model's one by one, so every rank has transformers read them all", directory)
    found = _by_transformers(option)
    for name, target in targets.items():
        fill_local(target, _grown(found[name], target, name, seed))


def _distinct(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tied ones once, by their first name."""
    first = {id(tensor): name for name, tensor in reversed(list(tensors.items()))}
    return {name: tensor for name, tensor in tensors.items() if first[id(tensor)] == name}


def _stored_names(model: CausalLM, targets: Mapping[str, Tensor], files: Mapping[str, Path]) -> dict[str, str] | None:
    """Name -> name in the files; None where they do not hold exactly the model's tensors."""
    every: dict[str, Tensor] = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in targets.items()}
    own_name = _renaming(model.theirs, every)
    names: dict[str, str] = {}
    for stored in files:
        name = own_name(stored)
        if name is None or (name not in every and not _is_ignored(stored, model.theirs)):
            return None
        if name in every:
            names.setdefault(first[id(every[name])], stored)
    return names if names.keys() == targets.keys() else None


def _renaming(theirs: Any, every: dict[str, Tensor]) -> Any:
    """A function from a name in the files to the model's, None for a tensor that transformers would convert.

    The rules are those that ``from_pretrained`` follows (transformers 5.23, ``core_model_loading.py``).
    """
    from transformers import conversion_mapping, core_model_loading

    rules = conversion_mapping.get_model_conversion_mapping(theirs)
    converters = [rule for rule in rules if isinstance(rule, core_model_loading.WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, core_model_loading.WeightRenaming)]
    prefix = theirs.base_model_prefix

    def own_name(stored: str) -> str | None:
        name, converter = core_model_loading.rename_source_key(stored, renamings, converters, prefix, every)
        if name not in every and stored in every:
            return stored
        return None if converter is not None else str(name)

    return own_name


def _is_ignored(stored: str, theirs: Any) -> bool:
    """Whether the class knows of files with this tensor, which it no longer has (causal masks, rotary frequencies)."""
    known = theirs._keys_to_ignore_on_load_unexpected or ()
    patterns = [*known, r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"\.attn\.(masked_)?bias$"]
    return any(re.search(pattern, stored) for pattern in patterns)


def _by_transformers(option: TransformersSettings) -> dict[str, Tensor]:
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


def _grown(stored: Tensor, target: Tensor, name: str, seed: int) -> Tensor:
    """``stored`` with rows for new tokens, where the target has more."""
    more = target.shape[0] - stored.shape[0] if target.ndim else 0
    if not more:
        return stored
    return torch.cat((stored, rows_like([stored], more, name=name, seed=seed).to(stored)))
