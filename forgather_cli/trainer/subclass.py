"""Subclasses of ``Trainer``: which methods of Hugging Face's are called if they are overridden, and what to do in the
place of the others.

Public names are those of transformers 5.24 (trainer.py); a test compares them with the installed library's.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from pathlib import Path

from forgather_cli.config.schema import Config
from forgather_cli.errors import ConfigError

HONOURED = frozenset(
    ("compute_loss", "create_optimizer", "create_scheduler", "get_train_dataloader", "get_eval_dataloader", "log")
)

_DATA = "override get_train_dataloader and get_eval_dataloader"
_OPTIMIZER = "override create_optimizer, or give optimizer_groups= or optimizer_cls_and_kwargs="
_STEP = "override compute_loss, or use a callback's on_forward_backward_begin, on_pre_optimizer_step and on_step_end"
_EVALUATION = (
    "override get_eval_dataloader or compute_loss, or give compute_metrics= and preprocess_logits_for_metrics="
)
_AROUND = "give it another name, and have that call this one"
_LAYOUT = "choose a strategy (trainer=) and precision="
_HUB = "nothing is uploaded: use `forgather finalize` and `hf upload` after training"
_FILES = "use a callback's on_save, which gets the checkpoint's path, or save_model() after training"

REFUSED: dict[str, str] = {
    "get_test_dataloader": "override get_eval_dataloader, which predict() asks too",
    "num_examples": _DATA,
    "get_batch_samples": _DATA,
    "set_initial_training_values": "set max_steps or num_train_epochs",
    "get_total_train_batch_size": "set global_batch_size",
    "create_optimizer_and_scheduler": "override create_optimizer and create_scheduler",
    "get_optimizer_cls_and_kwargs": _OPTIMIZER,
    "get_decay_parameter_names": _OPTIMIZER,
    "get_optimizer_group": _AROUND,
    "get_learning_rates": "override log, whose logs have learning_rate",
    "get_num_trainable_parameters": _AROUND,
    "training_step": _STEP,
    "loss_is_scaled_for_ga": "leave it out: whether compute_loss uses num_items_in_batch is seen",
    "compute_loss_context_manager": f"{_LAYOUT}, or open yours in compute_loss",
    "autocast_smart_context_manager": f"{_LAYOUT}, or open yours in compute_loss",
    "create_accelerator_and_postprocess": _LAYOUT,
    "get_sp_size": _LAYOUT,
    "get_cp_size": _LAYOUT,
    "get_tp_size": _LAYOUT,
    "evaluation_loop": _EVALUATION,
    "prediction_step": _EVALUATION,
    "train": _AROUND,
    "evaluate": f"{_AROUND}, or use a callback's on_evaluate",
    "predict": _AROUND,
    "end": _AROUND,
    "save_model": _FILES,
    "save_state": _FILES,
    "log_metrics": _AROUND,
    "save_metrics": _AROUND,
    "metrics_format": "override log",
    "store_flos": "total_flos is in every log: leave it out",
    "floating_point_ops": "total_flos is in every log: leave it out",
    "init_hf_repo": _HUB,
    "create_model_card": _HUB,
    "push_to_hub": _HUB,
    "hyperparameter_search": "use `forgather train --multirun`",
    "call_model_init": "give model_init=, a function without arguments",
    "add_callback": _AROUND,
    "pop_callback": _AROUND,
    "remove_callback": _AROUND,
    "is_local_process_zero": "leave it out",
    "is_world_process_zero": "leave it out",
}
"""Public names of that library's -> what to do instead."""

_LISTED = frozenset(
    ("_build_accelerator_args", "_clip_grad_norm", "_defer_fsdp_gradient_reduction", "_determine_best_metric",
     "_evaluate", "_finalize_training", "_finish_current_push", "_get_collator_with_removed_columns",
     "_get_dataloader", "_get_eval_sampler", "_get_grad_norm", "_get_learning_rate", "_get_num_items_in_batch",
     "_get_output_dir", "_get_train_sampler", "_has_mixed_mesh_grads", "_hp_search_setup", "_init_training_state",
     "_inner_training_loop", "_issue_warnings_after_load", "_load_best_model", "_load_callback_state",
     "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_load_rng_state", "_load_scaler",
     "_maybe_log_save_evaluate", "_mixed_mesh_grad_norm", "_move_model_to_device", "_prepare_context_parallel_inputs",
     "_prepare_for_training", "_prepare_input", "_prepare_inputs", "_push_from_checkpoint", "_remove_unused_columns",
     "_report_to_hp_search", "_run_epoch", "_save", "_save_checkpoint", "_save_optimizer_and_scheduler",
     "_save_rng_state", "_save_scaler", "_set_signature_columns_if_needed", "_sync_replicated_trainable_parameters",
     "_track_num_input_tokens", "_tune_save_checkpoint", "_update_auto_batch_size", "_validate_args", "_wrap_model")
)  # fmt: skip
"""Private ones; written by scripts/hugging_face_names from transformers 5.24.0."""


def private_methods() -> frozenset[str]:
    """Those of that library's class, which subclasses override too: of the installed version, read from its file
    (30 ms; to import it takes seconds), or those above where it is not installed.
    """
    found = importlib.util.find_spec("transformers")
    if found is None or found.origin is None:
        return _LISTED
    source = Path(found.origin).with_name("trainer.py").read_text(encoding="utf-8")
    [body] = [each.body for each in ast.parse(source).body if isinstance(each, ast.ClassDef) and each.name == "Trainer"]
    names = {each.name for each in body if isinstance(each, ast.FunctionDef)}
    return frozenset(name for name in names if name.startswith("_") and not name.startswith("__"))


def checked_overrides(kind: type, base: type, config: Config, *, made_strategy: bool) -> set[str]:
    """The names above that the subclass ``kind`` of ``base``, or a class mixed into it, defines anew.

    Raises ConfigError, with all of them, for those that nothing would call, or not as they are meant.
    """
    if kind is base:
        return set()
    honoured = HONOURED | {"default_callbacks"}  # which is ours
    names = honoured | REFUSED.keys() | private_methods()
    found = {name for name in names
             if inspect.getattr_static(kind, name, None) is not inspect.getattr_static(base, name, None)}  # fmt: skip
    in_stages = not made_strategy and config.trainer.cuts_layers
    of_stages = "gets the whole model, of which a rank of trainer=pipeline has only stages; give"
    problems = [
        f"{kind.__name__}.{name}: nothing calls it here; {REFUSED.get(name, 'override a public method')}"
        for name in sorted(found - honoured)
    ]
    if "compute_loss" in found and made_strategy:
        problems.append("compute_loss: the given strategy has a loss already; give its settings as strategy")
    if "compute_loss" in found and in_stages:
        problems.append(f"compute_loss: {of_stages} loss_fn=, a function of logits and labels")
    if "create_optimizer" in found and in_stages:
        problems.append(f"create_optimizer: {of_stages} optimizer_factory=, which gets this rank's parameters")
    if "create_optimizer" in found and config.fuse_optim_with_backward:
        problems.append(
            "create_optimizer: an optimizer of your own cannot run in the backward pass; set "
            "fuse_optim_with_backward=False"
        )
    if problems:
        raise ConfigError(problems)
    return found
