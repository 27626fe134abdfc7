"""Adapters on disk, as PEFT keeps them: ``adapter_config.json`` and ``adapter_model.safetensors``, beside the directory
of the model that they are for.

peft 0.21: ``peft_model.py: save_pretrained``, ``utils/save_and_load.py``. Of a base in four bits these files tell
nothing, so that ``quantization_config.json`` lies beside them, in the words of transformers' ``BitsAndBytesConfig``.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from torch import nn

from forgather_cli.adapters.layers import TokenRows, adapted_layers, is_adapter
from forgather_cli.adapters.targets import OF_EXPERTS, targets
from forgather_cli.checkpoint.format import read_header
from forgather_cli.checkpoint.load import ADAPTER_PREFIX
from forgather_cli.config.decode import decode_settings
from forgather_cli.config.schema import ALL_LINEAR, Config, DoRASettings, LoRASettings, QLoRASettings, typed
from forgather_cli.data.cache import Cache
from forgather_cli.data.text.corpus import content_hash
from forgather_cli.data.text.read import SourceFile
from forgather_cli.documents.fields import FieldError
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.hub import hub_name_of, is_hub_name, local_model
from forgather_cli.models.files import tensor_files
from forgather_cli.precision.dtypes import compute_dtype
from forgather_cli.terminal.bars import doing

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
QUANTIZATION = "quantization_config.json"


_SECONDS = 5.0
"""For the names of a model's layers, which take milliseconds."""


@contextmanager
def bounded(settings: LoRASettings) -> Iterator[None]:
    """Inside, names are matched with regular expressions that anybody may have written. Raises ModelError for what is
    none, and after seconds of this process's own time, which a busy machine does not make longer.

    ``re`` looks for signals while it searches (Python 3.11 to 3.14); they come in the main thread alone.
    """

    def stop(*_: Any) -> None:
        raise TimeoutError(f"they are not matched with names of layers in {_SECONDS:g} s")

    try:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGVTALRM, stop)
            signal.setitimer(signal.ITIMER_VIRTUAL, _SECONDS)
        yield
    except (TimeoutError, re.error, OverflowError, RecursionError) as error:
        given = [*settings.rank_pattern, *settings.alpha_pattern, settings.target_modules]
        raise ModelError(
            f"{settings.from_adapter or 'adapter'}: target_modules, rank_pattern and alpha_pattern are not "
            f"regular expressions of names ({error}), got {given!r:.200}; mend them"
        ) from error
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def base_of(directory: Path) -> dict[str, str]:
    """What a checkpoint says of the model that its adapter is for: directory, name, and hash of settings and weights.

    The hash is read once and kept while the files stay as they are. Raises ModelError, DataError.
    """
    files = [directory / "config.json", *sorted(set(tensor_files(directory).values()))]
    with doing("hashing the base model"):
        content = content_hash(Cache(None), [SourceFile(file, file.name) for file in files])
    place = directory.resolve()
    return {"path": str(place), "name": place.name, "sha256": content}


def write_config(directory: Path, model: nn.Module, config: Config, trained: Iterable[str] | None = None) -> None:
    """Write ``adapter_config.json`` of a model, or of its first part, that ``adapt`` has made; where its base lies in
    four bits ``quantization_config.json`` too. ``trained``: names of all trained parameters, where it is a part."""
    settings, option = config.adapter, cast(Any, config.model)
    assert isinstance(settings, LoRASettings)
    if trained is None:
        trained = [name for name, p in model.named_parameters() if p.requires_grad]
    place = Path(option.path).expanduser().resolve()
    whole = {name.rpartition(".")[0] for name in trained if not is_adapter(name)}
    found = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "inference_mode": True,
        "base_model_name_or_path": hub_name_of(place) or str(place),  # by name for other machines
        "r": settings.r,
        "lora_alpha": _plain(settings.lora_alpha),
        "lora_dropout": settings.lora_dropout,
        "bias": "none",
        "fan_in_fan_out": any(type(layer).__name__.endswith("Conv1D") for _, layer in adapted_layers(model)),
        "target_modules": settings.target_modules,
        "target_parameters": settings.target_parameters or None,
        "modules_to_save": sorted(whole) or None,
        "trainable_token_indices": _token_indices(model, trained),
        "use_rslora": settings.use_rslora,
        "use_dora": settings.is_dora,
        "init_lora_weights": settings.init_lora_weights,
        "rank_pattern": settings.rank_pattern,
        "alpha_pattern": {key: _plain(value) for key, value in settings.alpha_pattern.items()},
    }
    if getattr(model, "num_experts", None):
        found |= _beside_experts(cast(Any, model).twin(), settings)
    (directory / CONFIG).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if isinstance(settings, QLoRASettings):
        how = {
            "quant_method": "bitsandbytes",
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_use_double_quant": settings.double_quant,
            "bnb_4bit_compute_dtype": str(compute_dtype(config.precision)).removeprefix("torch."),
        }
        (directory / QUANTIZATION).write_text(json.dumps(how, indent=2) + "\n", encoding="utf-8")


def _token_indices(model: nn.Module, trained: Iterable[str]) -> list[int] | dict[str, list[int]] | None:
    """As peft has them: a list for the embedding and what is tied to it, else by layer."""
    ids = next((list(layer.token_ids) for _, layer in adapted_layers(model) if isinstance(layer, TokenRows)), None)
    owners = [name.split(".token_adapter.")[0].rpartition(".")[2] for name in trained if ".token_adapter." in name]
    return ids if len(owners) < 2 else dict.fromkeys(sorted(owners), ids or [])


def _beside_experts(model: nn.Module, settings: LoRASettings) -> dict[str, Any]:
    """What an adapter of a model with experts has in the place of ``target_modules``.

    Of some families peft 0.21 takes names that the layers of experts had in transformers 4, which ``all-linear`` and
    regular expressions find too, for their stacks now (``utils/transformers_weight_conversion.py``). So layers are
    named, and those with such a name by their parameter.
    """
    layers, wanted = targets(model, settings), settings.target_modules
    as_layers = [name for name in layers if settings.is_for_layers_alone or name.rpartition(".")[2] not in OF_EXPERTS]
    as_parameters = [f"{name}.weight" for name in layers if name not in as_layers]
    if wanted == ALL_LINEAR:
        as_layers = sorted({name.rpartition(".")[2] for name in as_layers})
    ranks = {name: settings.rank_of(name.removesuffix(".weight")) for name in as_parameters}
    scales = {name: settings.alpha_of(name.removesuffix(".weight")) for name in as_parameters}
    return {
        "target_modules": as_layers,
        "target_parameters": [*settings.target_parameters, *as_parameters] or None,
        "rank_pattern": settings.rank_pattern | {n: r for n, r in ranks.items() if r != settings.r},
        "alpha_pattern": {
            key: _plain(value)
            for key, value in (settings.alpha_pattern | scales).items()
            if key not in scales or value != settings.lora_alpha
        },
    }


def _plain(number: float) -> int | float:
    return int(number) if number == int(number) else number


@dataclass(frozen=True)
class AdapterDirectory:
    """An adapter that is there: its settings, and the model that it is for."""

    path: Path
    settings: LoRASettings
    base: Path
    trainable: list[str] | None
    """What trains its ``modules_to_save`` again."""
    is_of_peft: bool
    """Peft has written it, and is here to load it."""


_HARMLESS = (
    "peft_type", "peft_version", "task_type", "inference_mode", "revision", "base_model_name_or_path", "bias",
    "fan_in_fan_out", "modules_to_save", "megatron_core", "runtime_config", "use_dora", "init_lora_weights",
    "qalora_group_size", "save_embedding_layers", "auto_mapping", "eva_config",
)  # fmt: skip
_LEAVE_THE_BASE = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Starts (``init_lora_weights``) beside which peft 0.21 does not change the base."""


def read_adapter(directory: Path) -> AdapterDirectory:
    """The adapter in a directory. Raises ModelError for one that is not LoRA, DoRA or QLoRA as we do it, and where its
    base is not on this machine.
    """
    file = directory / CONFIG
    found = read_json_object(file, ModelError)
    kind = found.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"{file}: peft_type must be LORA, got {kind!r}; other adapters are not read")
    start = found.get("init_lora_weights", True)
    if start not in _LEAVE_THE_BASE:
        # the decomposition of these two gives the same base each time that peft loads them
        again = "PeftModel.from_pretrained(BASE, ADAPTER)" if str(start).lower() in ("pissa", "olora") else "MODEL"
        convert = "" if start == "loftq" else " or save_pretrained(DIR, path_initial_model_for_weight_conversion=START)"
        raise ModelError(
            f"{file}: init_lora_weights {start!r} changed the base too, so that this is no LoRA of it; convert it with "
            f"peft: {again}.merge_and_unload().save_pretrained(WHOLE),{convert} where it was trained"
        )
    known = ("r", "lora_alpha", "lora_dropout", "target_modules", "target_parameters", "use_rslora", "rank_pattern",
             "alpha_pattern", "trainable_token_indices")  # fmt: skip
    for key, value in found.items():
        if key not in (*known, *_HARMLESS) and value not in (None, False, [], {}, "", 0):
            raise ModelError(f"{file}: {key} is not known here, got {value!r:.80}; merge the adapter with peft")
    if found.get("bias", "none") != "none":
        raise ModelError(f"{file}: bias must be none, got {found['bias']!r:.80}; merge the adapter with peft")
    values = {"target_modules": [], **{key: found[key] for key in known if found.get(key) is not None}}
    cls: type[LoRASettings] = DoRASettings if found.get("use_dora") else LoRASettings
    if (directory / QUANTIZATION).is_file():
        cls, values = QLoRASettings, {**values, "double_quant": _double_quant(directory / QUANTIZATION, cls)}
    try:
        settings = decode_settings(cls, values)
    except (ConfigError, FieldError) as error:
        raise ModelError(f"{file}: {error}") from error
    if (weights := directory / WEIGHTS).is_file():
        specs = [spec for spec, _ in read_header(weights).values() if is_adapter(spec.name) and spec.num_bytes]
        widest = max((number for spec in specs for number in spec.shape), default=0)
        if specs and (rank := max([settings.r, *settings.rank_pattern.values()])) > widest:  # too wide to be made
            raise ModelError(f"{file}: r is {rank:,}, and the matrices in {WEIGHTS} are up to {widest:,} wide; mend it")
    if isinstance(settings.target_modules, list):  # peft's is a set
        settings = replace(settings, target_modules=sorted(settings.target_modules))
    if settings.trainable_token_indices is None:  # there it means none
        settings = replace(settings, trainable_token_indices=[])
    base, saved = found.get("base_model_name_or_path"), found.get("modules_to_save") or []
    if not isinstance(base, str) or not isinstance(saved, list) or not all(isinstance(each, str) for each in saved):
        raise ModelError(f"{file}: names no base_model_name_or_path, or modules_to_save is no list of names")
    if is_hub_name(base) and not (directory / base).exists():
        place = local_model(base, f"{file}: base_model_name_or_path")
    else:
        place = Path(base) if Path(base).is_absolute() or Path(base).exists() else directory / base
    if not (place / "config.json").is_file():
        raise ModelError(
            f"{file}: the model that it is for is not at {base}; bring it there, or write its directory into "
            "base_model_name_or_path"
        )
    trainable = [rf"(^|\.){re.escape(name)}\.[^.]*$" for name in saved] or None
    is_of_peft = "auto_mapping" in found and find_spec("peft") is not None
    return AdapterDirectory(directory, settings, place, trainable, is_of_peft)


def check_same_base(adapter: AdapterDirectory, base: Path) -> None:
    """Raise ModelError where an adapter that is gone on from is for another model than that in ``base``."""
    if adapter.base.resolve() == base.resolve():
        return
    theirs, ours = base_of(adapter.base)["sha256"], base_of(base)["sha256"]
    if theirs != ours:
        raise ModelError(
            f"adapter.from_adapter: the adapter in {adapter.path} is for the model in {adapter.base} (sha256 "
            f"{theirs:.12}), and model.path={base} holds another (sha256 {ours:.12}); set model.path to that one"
        )


def _double_quant(file: Path, cls: type[LoRASettings]) -> bool:
    """Of a base in NF4. Raises ModelError for another one."""
    found = read_json_object(file, ModelError)
    kind, double = found.get("bnb_4bit_quant_type"), found.get("bnb_4bit_use_double_quant", False)
    if not found.get("load_in_4bit") or kind != "nf4" or not isinstance(double, bool) or cls is not LoRASettings:
        raise ModelError(
            f"{file}: must be load_in_4bit with bnb_4bit_quant_type nf4 and beside LoRA, got {kind!r:.80} beside "
            f"{cls.type}; merge the adapter with peft"
        )
    return double


def adapter_to_go_on(settings: LoRASettings) -> AdapterDirectory:
    """The adapter of ``from_adapter``. Raises ModelError where it is another kind of one than ``settings``."""
    assert settings.from_adapter is not None
    directory = Path(settings.from_adapter).expanduser()
    if not (directory / CONFIG).is_file():
        raise ModelError(f"adapter.from_adapter: {directory} has no {CONFIG}; give the directory of an adapter")
    found = read_adapter(directory)
    differ: list[str] = []
    for key in ("type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules"):
        there, here = (sorted(v) if isinstance(v := getattr(s, key), list) else v for s in (found.settings, settings))
        same = key == "type" and found.settings.is_dora == settings.is_dora  # whose adapters are the same matrices
        if there != here and not same and (differ or key != "target_modules"):  # which may be the same in other words
            differ.append(f"adapter{'' if key == 'type' else f'.{key}'}={typed(there)} (got {typed(here)})")
    if differ:
        raise ModelError(
            f"adapter.from_adapter: {directory} has other settings; leave these out, or set {', '.join(differ)}"
        )
    return found


def own_name(stored: str) -> str:
    """The full name of a tensor of an adapter's file."""
    return stored.removeprefix(ADAPTER_PREFIX)
