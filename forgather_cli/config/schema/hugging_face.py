"""What callbacks written for Hugging Face ask of ``args`` besides the settings themselves.

Names are those of ``TrainingArguments`` (transformers 5.23) that ``transformers.integrations`` reads: TensorBoard,
WandB, Trackio, MLflow, Comet, ClearML, Neptune, DVCLive, SwanLab, CodeCarbon.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from forgather_cli.config.schema.run import RunSettings

HF_PROJECT = "huggingface"
"""That library's name for a project that nobody has named."""


class HuggingFaceArguments:
    """Facts that follow from the settings, or from what torchrun and the like have put into the environment."""

    output_dir: str | None
    per_device_train_batch_size: int
    per_device_eval_batch_size: int

    trackio_space_id: str | None = None
    trackio_bucket_id: str | None = None
    trackio_static_space_id: str | bool | None = False  # no Space is made or frozen
    hub_private_repo: bool | None = None

    # what TrainingArguments alone can set; a recipe's data come as the model takes them, in the order of its seed
    data_seed: int | None = None
    train_sampling_strategy: str = "random"
    length_column_name: str = "length"
    remove_unused_columns: bool = False
    label_names: list[str] | None = None
    gradient_checkpointing_kwargs: dict[str, Any] | None = None
    save_only_model: bool = False
    prediction_loss_only: bool = False
    include_for_metrics: Sequence[str] = ()
    eval_accumulation_steps: int | None = None
    tf32: bool | None = None
    log_level: str = "passive"
    log_level_replica: str = "warning"
    disable_tqdm: bool | None = None
    report_to: Sequence[str] = ()  # services that a Trainer is to tell by itself; a recipe gives them as callbacks

    @property
    def run_name(self) -> str | None:
        """The run directory's name, as ``callbacks.trackers`` calls a run."""
        return None if self.output_dir is None else Path(self.output_dir).resolve().name

    @property
    def project(self) -> str:
        return HF_PROJECT

    @property
    def world_size(self) -> int:
        """Processes of the job."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        """This process among all of the job."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        """This process among those of its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def train_batch_size(self) -> int:
        """Sequences per rank and micro-step."""
        return self.per_device_train_batch_size

    @property
    def eval_batch_size(self) -> int:
        return self.per_device_eval_batch_size

    def to_dict(self) -> dict[str, Any]:
        """The settings as plain values, options of groups as dicts, tokens as their names in angle brackets."""
        from forgather_cli.config.decode import to_tree

        settings: dict[str, Any] = without_tokens(to_tree(cast("RunSettings", self)))
        return {**settings, "run_name": self.run_name}

    def to_json_string(self) -> str:
        return json.dumps(self.to_dict(), indent=2, default=str)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """``to_dict`` and the batch sizes; what is no number, text or bool as a text."""
        values = {**self.to_dict(), "train_batch_size": self.train_batch_size, "eval_batch_size": self.eval_batch_size}
        return {key: each if isinstance(each, bool | int | float | str) else str(each) for key, each in values.items()}


def without_tokens(tree: Any) -> Any:
    """A tree of settings that may be sent away: of ``auth_token`` and the like only the name is left."""
    if isinstance(tree, Mapping):
        return {
            key: f"<{str(key).upper()}>" if str(key).endswith("_token") and value is not None else without_tokens(value)
            for key, value in tree.items()
        }
    return [without_tokens(each) for each in tree] if isinstance(tree, list | tuple) else tree
