"""The messages of config mistakes: ``path: what is wrong, got X; what to do``."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_type_hints

from forgather_cli.config import schema
from forgather_cli.config.as_typed import as_typed, text_in
from forgather_cli.config.options import GROUPS, SERVER, SearchPath
from forgather_cli.config.paths import entries, is_list, lookup, members, option_leaves, root_keys, settings
from forgather_cli.config.schema import typed
from forgather_cli.errors import ConfigError, did_you_mean
from forgather_cli.targets import free_arguments, import_target

_SHORT = {
    "learning_rate": "lr max_lr peak_lr", "num_train_epochs": "epochs num_epochs n_epochs max_epochs",
    "max_steps": "steps num_steps n_steps total_steps max_iters train_steps num_train_steps",
    "global_batch_size or per_device_train_batch_size": "batch_size bs bsz train_batch_size",
    "per_device_train_batch_size": "micro_batch_size batch_size_per_device mbs",
    "per_device_eval_batch_size": "eval_batch_size", "global_batch_size": "gbs total_batch_size",
    "gradient_accumulation_steps": "grad_accum grad_accum_steps accumulation_steps accumulate_grad_batches grad_acc",
    "weight_decay": "wd decay",
    "max_grad_norm": "clip grad_clip clip_grad clip_grad_norm gradient_clip gradient_clip_val gradient_clipping",
    "warmup_steps": "warmup warmup_ratio warmup_iters num_warmup_steps",
    "precision": "bf16 fp16 fp32 fp8 dtype torch_dtype amp_dtype mixed_precision amp",
    "lr_scheduler": "scheduler lr_scheduler_type lr_schedule", "optimizer": "optim opt",
    "trainer": "strategy ddp fsdp2 pipeline single", "trainer=fsdp2": "fsdp deepspeed zero zero_stage",
    "device": "use_cpu no_cuda cuda gpu accelerator",
    "logging_steps": "log_every log_interval log_every_n_steps log_steps",
    "eval_steps": "eval_every eval_interval val_interval evals_per_epoch run_val_every_n_steps",
    "save_steps": "save_every save_interval checkpoint_interval saves_per_epoch",
    "output_dir": "out out_dir outdir output run_dir save_dir", "resume_from_checkpoint": "resume checkpoint ckpt",
    "dataloader_num_workers": "workers num_workers",
    "nproc_per_node": "gpus nproc num_gpus n_gpus ngpus num_processes ranks world_size",
    "nnodes": "nodes num_nodes n_nodes", "torch_compile": "compile",
    "gradient_checkpointing": "activation_checkpointing enable_activation_checkpointing checkpointing recompute",
    "seq_len": "sequence_length sequence_len max_length max_seq_len block_size cutoff_len context_length ctx ctx_len",
    "hidden_size": "d_model dim n_embd hidden_dim width embed_dim",
    "num_hidden_layers": "layers n_layer n_layers num_layers depth",
    "num_attention_heads": "heads n_head n_heads num_heads",
    "num_key_value_heads": "kv_heads n_kv_heads num_kv_heads",
    "attn_implementation": "flash_attn flash_attention use_flash_attention attention",
    "model.path": "base_model model_name model_name_or_path pretrained pretrained_model",
    "tokenizer": "tokenizer_name tokenizer_path tokenizer_name_or_path", "data.dataset": "dataset_name hf_dataset",
    "min_lr_ratio": "eta_min lr_min min_lr lr_min_ratio cosine_min_lr_ratio",
    "betas": "beta1 beta2 adam_beta1 adam_beta2", "eps": "adam_epsilon adam_eps",
    "data.files": "data_path data_dir dataset_path train_file train_files", "data.files or data.dataset": "datasets",
    "data.text_key": "dataset_text_field text_column", "data.chat_template": "template chat_template_jinja",
    "data.cache_dir": "dataset_prepared_path tokenized_path",
    "data.eval_fraction": "val_set_size val_size test_size validation_split",
    "data.train_on": "train_on_inputs train_on_prompt assistant_only_loss completion_only_loss mask_history",
    "data.packing=best_fit": "sample_packing eval_sample_packing neat_packing packed",
    "adapter": "finetuning_type use_peft use_lora", "adapter=qlora": "load_in_4bit quantization_bit",
    "adapter.r": "lora_r lora_rank", "adapter.from_adapter": "lora_model_dir adapter_name_or_path",
    "adapter.target_modules": "lora_target lora_target_modules lora_attn_modules",
    "adapter.target_modules=all-linear": "lora_target_linear apply_lora_to_mlp",
    "trainable": "unfrozen_parameters modules_to_save lora_modules_to_save additional_target",
    "loss=liger": "use_liger_kernel enable_liger_kernel liger_kernel", "epoch_train_steps": "max_steps_per_epoch",
    "float32_matmul_precision": "tf32", "callbacks.early_stopping.patience": "early_stopping_patience",
    "callbacks.trackers": "wandb", "callbacks.trackers.project": "wandb_project",
    "callbacks.trackers.run_name": "wandb_name wandb_run_name",
}  # fmt: skip
"""What is suggested -> its names in other libraries, and short ones."""
ELSEWHERE = {name: setting for setting, names in _SHORT.items() for name in names.split()}

_MUST_BE = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "value_error": "a day as YYYY-MM-DD",
    "dataclass_type": "a mapping of settings",
    "dataclass_exact_type": "a mapping of settings",
}


@dataclass(frozen=True)
class Naming:
    """How messages name a setting: as the user typed it, with the file it is in.

    ``options``: group -> option; ``typed``: path -> key as typed; ``sources``: path -> the user's file that sets it;
    ``targets``: group -> class or function of the user's.
    """

    options: Mapping[str, str] = field(default_factory=dict)
    typed: Mapping[str, str] = field(default_factory=dict)
    sources: Mapping[str, Path] = field(default_factory=dict)
    search: SearchPath | None = None
    fields: tuple[str, ...] = ()
    """The names to suggest, where one settings class is decoded and no whole config."""
    targets: Mapping[str, str] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    """Path -> what the command line has typed for it."""

    def as_typed(self, path: str, value: object) -> str:
        """A value of a setting as it was typed."""
        of_list = re.sub(r"(\.\d+)+$", "", path)
        file = self.sources.get(of_list)
        text = (
            text_in(file, of_list, self.name(of_list), of_list.partition(".")[2]) if file else self.texts.get(of_list)
        )
        return as_typed(value, text or "")

    def name(self, path: str) -> str:
        """The path as it was typed: the key typed for it, or for a path above or below it."""
        if path in self.typed:
            return self.typed[path]
        if above := next((known for known in self.typed if path.startswith(f"{known}.")), None):
            return self.typed[above] + path.removeprefix(above)
        below = (typed for known, typed in self.typed.items() if known.startswith(f"{path}."))
        return path if lookup(path) else next(below, path)

    def where(self, path: str) -> str:
        """`` in FILE`` if a file of the user's sets the path, empty if the command line does."""
        if path in self.typed and path not in self.sources:
            return ""
        path = re.sub(r"(\.\d+)+$", "", path)  # of a list's
        file = self.sources.get(path) or next((f for p, f in self.sources.items() if p.startswith(f"{path}.")), None)
        return f" in {file}" if file else ""


def missing(path: str, naming: Naming) -> str:
    """The message for a required setting without a value."""
    group, setting = path.split(".")[0], lookup(path)
    if path in GROUPS:
        return f"{path}: required; choose an option: {path}={'|'.join(_options(path, naming))}"
    by = f" by {group}={naming.options[group]}" if group in naming.options else ""
    return f"{path}: required{by}; set {path}={'[...]' if setting and is_list(setting.annotation) else '...'}"


def from_pydantic(errors: Sequence[Any], tree: dict[str, Any], naming: Naming, known: set[str]) -> list[str]:
    """Pydantic's errors in our words, one per path; ``known`` paths are reported already."""
    by_path: dict[str, list[Any]] = {}
    for error in errors:
        by_path.setdefault(_path(error, tree), []).append(error)
    return [
        _message(path, by_path[path], naming)
        for path in by_path
        if not any(other.startswith(f"{path}.") for other in by_path)  # the error below it is the more precise one
        and not any(f"{path}.".startswith(f"{each}.") for each in known)
    ]


def _path(error: Any, tree: Any) -> str:
    """The dotted path of an error: pydantic's location without the names of union members in it."""
    parts: list[str | int] = []
    node, loc = tree, error["loc"]
    for part, following in zip(loc, (*loc[1:], None), strict=True):
        if part == "_target_" and isinstance(node, dict) and following in node:
            continue  # the union's name for an option with a _target_, beside which the setting stands
        if isinstance(node, dict) and part in node:
            parts, node = [*parts, part], node[part]
        elif isinstance(node, list) and isinstance(part, int):
            parts, node = ([*parts, part], node[part]) if part < len(node) else (parts, None)
        elif part == loc[-1] and error["type"] == "missing" and not isinstance(part, int):
            parts.append(part)
    return ".".join(map(str, parts))


def _message(path: str, errors: list[Any], naming: Naming) -> str:
    first = errors[0]
    kind, value, name = first["type"], first["input"], naming.name(path)
    got = f"got {_shown(value)}{naming.where(path)}"
    if kind == "missing" and isinstance(first["loc"][-1], int):
        return f"{name}: must have more values, {got}; give {first['loc'][-1] + 1} or more"
    if kind == "missing":
        return missing(path, naming)
    if kind == "too_long":
        return f"{name}: must have {first['ctx']['max_length']} values, {got}; give fewer"
    if kind == "unexpected_keyword_argument":
        return unknown(path, naming, first["loc"])
    options = [each for each in entries(path) if each != "_target_"]
    if kind.startswith("union_tag") and (path in (*GROUPS, "callbacks") or options):
        got = f"got {_shown(value.get('type') if isinstance(value, dict) else value)}{naming.where(path)}"
        types = ", ".join(options or _types(path.rpartition(".")[2]))
        return f"{name}: an option names a _target_ or its type, {got}; types: {types}"
    wanted, literals = [], []
    for error in errors:
        if error["type"] == "literal_error":
            wanted.append(str(error["ctx"]["expected"]).replace("'", ""))
            literals += re.findall(r"'([^']+)'", str(error["ctx"]["expected"]))
        elif error["type"].startswith("union_tag"):
            wanted.append("a mapping with a _target_")
        else:  # pydantic's "Input should be greater than 0", "Input should have ..."
            text = re.sub(r"^\w+ should (be|have) ", lambda m: "" if m[1] == "be" else "with ", error["msg"])
            wanted.append(_MUST_BE.get(error["type"], text))
    wanted = [each for each in wanted if each != "a whole number" or "a number" not in wanted]
    kinds, remedy = {error["type"] for error in errors}, ""
    if literals and isinstance(value, str):
        ul2 = path == "data.source" and value == "mixture"
        remedy = " ul2 over a mixture is not there yet" if ul2 else did_you_mean(value, literals)
    elif "int_type" in kinds and isinstance(value, float) and value.is_integer():
        remedy = f" write {name}={int(value)}"
    elif "list_type" in kinds and isinstance(value, str):
        remedy = f" write {name}=[{value}]"
    elif kinds <= {"dataclass_type", "dataclass_exact_type"} and name.startswith("callbacks.") and value is False:
        remedy = f" remove it with ~{name}"
    elif "tuple_type" in kinds:  # betas alone are of this type
        remedy = f" write {name}=[0.9,0.95]"
    elif {"string_type", "list_type"} & kinds and isinstance(value, int | float):  # booleans are int
        text = naming.as_typed(path, value)
        got = f"got {text}{naming.where(path)}"
        if "string_type" not in kinds:
            remedy = f""" write "{name}=['{text}']\""""
        elif naming.where(path) or path.rpartition(".")[2].isdigit():  # of a list
            remedy = f" write '{text}' with the quotes"
        else:
            remedy = f""" write {name}="'{text}'\""""
    return f"{name}: must be {' or '.join(dict.fromkeys(wanted))}, {got}{remedy and f';{remedy}'}"


def _shown(value: Any) -> str:
    text = typed(value) if value is None or isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def unknown(path: str, naming: Naming, loc: Sequence[Any] = ()) -> str:
    """The message for a setting of an option that is not selected, or of none at all. ``loc``: pydantic's."""
    name, where, setting = naming.name(path), naming.where(path), lookup(path)
    group, _, word = path.partition(".")
    if kind := next((found for name_of, found in entries(path).items() if name_of in loc), None):
        fields, key = {each.name: each.init for each in dataclasses.fields(kind)}, path.rpartition(".")[2]
        if not fields.get(key, True):
            return f"{name}: is the same for all{where}, and stands above; set {group}.{key} instead"
        near = did_you_mean(key, list(fields)) or " leave it out"
        return f"{name}: {kind.type} has no such setting{where};{near}"
    if setting is not None and setting.types and group in naming.options:  # an option that is not selected has it
        types = {option: option_leaves(naming.search, group, option) for option in _options(group, naming)}
        kinds = {option: found.get(f"{group}.type", (option,))[0] for option, found in types.items()}
        having = [option for kind in setting.types for option in kinds if kinds[option] == kind]  # the usual one first
        having = having or list(setting.types)
        needed = [missing(each, naming) for each, (value, _) in types.get(having[0], {}).items() if value == "???"]
        needs = "".join(f" {each.rpartition('; set ')[2]}" for each in needed if not each.startswith(f"{path}:"))
        remedy = f"choose {group}={having[0]}{needs} or {f'remove it with ~{name}' if where else f'leave {name} out'}"
        chosen = f"{group}={naming.options[group]} is selected"
        return f"{name}: only {group}={'|'.join(having)} has this setting, but {chosen}{where}; {remedy}"
    if group == "callbacks" and word and "." not in word:
        near = did_you_mean(word, [each.split(".")[1] for each in settings() if each.startswith("callbacks.")])
        if not near and word in (*schema.TRACKERS, "comet"):
            near = f" did you mean callbacks.trackers.names=[{word}]?"
        return f"{name}: unknown callback{where};{near} One of your own needs {path}._target_=module.Class"
    if group == SERVER and naming.options:
        remedy = f"leave it out, or give it to the server: forgather diloco server RECIPE {name}=..."
        return f"{name}: only forgather diloco server has this setting{where}; {remedy}"
    if naming.fields and "." not in path:
        return f"{name}: unknown setting;{did_you_mean(name, list(naming.fields)) or ' leave it out'}"
    own = _arguments(naming.targets) if "." not in path else {}
    near = did_you_mean(name, own, own) or nearest(name)
    return f"{name}: unknown setting{where};{near or ' forgather config show lists all'}"


def _arguments(targets: Mapping[str, str]) -> dict[str, str]:
    """What classes and functions of the user's take, by name: the setting."""
    found: dict[str, str] = {}
    for group, target in targets.items():
        with suppress(ConfigError, TypeError, ValueError):  # it cannot be imported, or has no signature
            parameters = inspect.signature(import_target(target, group)).parameters
            found |= {name: f"{group}.{name}" for name in free_arguments(parameters, 0)}
    return found


def nearest(name: str) -> str:
    """`` did you mean ...?``: our name for another library's, a sibling of a dotted name, or a bare key."""
    parent, dot, last = name.rpartition(".")
    siblings = {setting.leaf: path for path, setting in settings().items() if path == f"{parent}.{setting.leaf}"}
    if last in ELSEWHERE:  # model.n_layer too
        setting = siblings.get(ELSEWHERE[last], ELSEWHERE[last])
        is_option = setting in GROUPS and last in _types(setting)  # bf16=true means precision=bf16
        return f" did you mean {setting}{f'={last}' if is_option else ''}?"
    if dot and (near := did_you_mean(last, list(siblings), shown=siblings)):
        return near
    if in_full := [path for path in settings() if path.startswith("callbacks.") and path.endswith(f".{name}")]:
        return f" did you mean {' or '.join(in_full)}?"
    if dot:
        return f" did you mean {last}?" if last in root_keys() else ""
    leaves = [setting.leaf for path, setting in settings().items() if setting.types]
    words = [*root_keys(), *GROUPS, *dict.fromkeys(leaves)]
    holding = sorted(word for word in words if name in word.split("_"))  # batch: global_batch_size and the like
    return did_you_mean(name, words) or (f" settings with this word: {', '.join(holding)}" if holding else "")


def _options(group: str, naming: Naming) -> list[str]:
    return naming.search.option_names(group) if naming.search else _types(group)


def _types(group: str) -> list[str]:
    if group == "callbacks":
        return ["default", "full", "minimal"]
    return [cls.type for cls in members(get_type_hints(schema.Config, include_extras=True)[group])]
