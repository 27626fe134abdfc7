"""Further names of what a Trainer has, in the words of the source documents: docs/python_api.md has the table. No
recipe's path goes through them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from forgather_cli.callbacks.build import CALLBACKS
from forgather_cli.callbacks.textgen import as_table
from forgather_cli.checkpoint.components import Component, Sharing
from forgather_cli.loss import UserLoss, cross_entropy_sum, num_targets
from forgather_cli.trainer.checkpoints import Checkpoints, kept_tensors, load_model
from forgather_cli.trainer.generate import generated
from forgather_cli.trainer.trainer import Loop


class SourceNames(Loop):
    """A loop with these names; see ``Trainer``."""

    @classmethod
    def default_callbacks(cls) -> list[Any]:
        """Fresh ones of those that every script's run has. What an override returns stands in their place."""
        return [kind() for kind in CALLBACKS if kind.config_name in ("metrics", "info", "progress", "json")]

    def load_best_model(self) -> None:
        """Collective. Load the weights of the best checkpoint that is kept, by ``metric_for_best_model``."""
        self.checkpoint_manager.wait()
        self.checkpoint_manager.load_best()

    def load_checkpoint(self, path: Any) -> None:
        """Collective. Load the weights of the checkpoint at ``path`` now; the next ``train()`` goes on from it. True is
        the newest in ``output_dir``, if there is one.
        """
        run, resume = self.run, path if path is True else str(path)
        if (reader := self.checkpoint_manager.find(resume)) is not None:
            load_model(reader, kept_tensors(run), run.cpu_group)
            run.config = replace(run.config, resume_from_checkpoint=resume)

    @property
    def train_dataloader(self) -> Any:
        """That of the events, from ``train()`` on; before it there is ``get_train_dataloader()``."""
        return self.run.train_loader

    @property
    def checkpoint_manager(self) -> Checkpoints:
        """Collective where there is none yet. ``checkpoints``, which each ``train()`` makes anew."""
        if not hasattr(self, "checkpoints"):
            self.checkpoints = Checkpoints(self.run, self.callbacks.by_name)
        return self.checkpoints

    @cached_property  # in whose place a subclass may set one of its own
    def loss_fn(self) -> Callable[..., Tensor]:
        """``(logits, labels)`` -> the mean over the targets: the script's own function, else cross entropy with the
        settings' ``label_smoothing`` and ``z_loss``.
        """
        if isinstance(self._settings_loss, UserLoss):
            return self._settings_loss.function
        names = ("z_loss", "label_smoothing")
        options: dict[str, Any] = {name: getattr(self.run.config.loss, name, 0.0) for name in names}
        shift = 0 if getattr(self.model, "is_encoder_decoder", False) else 1

        def loss_fn(logits: Tensor, labels: Tensor) -> Tensor:
            total = cross_entropy_sum(logits, labels, shift=shift, **options)
            return total / num_targets(labels, shift).clamp(min=1)

        return loss_fn

    def unwrapped_model(self) -> nn.Module:
        """``model``, which nothing wraps: under fsdp2 with this rank's rows, under pipeline this rank's first stage."""
        return self.model

    def pipeline_generate(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, generation_config: Any = None, **settings: Any
    ) -> Tensor:
        """Collective. ``generate`` as transformers' ``model.generate``, under every strategy: of prompts (B, T), which
        ``attention_mask`` leaves padding out of, come (B, T + n), padded behind the end of each text.

        ``generation_config``: that library's object, or a dict of ``settings``.
        """
        settings, tokenizer = (as_table(generation_config) or {}) | settings, self.processing_class
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        rows = [row[kept > 0].tolist() for row, kept in zip(input_ids, mask, strict=True)]
        whole = generated(self, rows, settings)
        new = [input_ids.new_tensor(ids[len(row) :]) for ids, row in zip(whole, rows, strict=True)]
        pads = settings.get("pad_token_id"), *(getattr(tokenizer, f"{kind}_token_id", None) for kind in ("pad", "eos"))
        return torch.cat((input_ids, pad_sequence(new, True, next((i for i in pads if i is not None), 0))), 1)

    def get_state_components(self) -> list[Any]:
        """Those of Forgather: the model, and from ``train()`` on optimizer, scheduler, trainer, data, rng, callbacks.

        An override returns its own, ``StateComponent`` each, beside these or alone; it is asked once for each training,
        when model and optimizer are made. These are in every checkpoint anyway.
        """
        shared = Sharing.REPLICATED if self.run.strategy.model_group is None else Sharing.PER_RANK
        weights = {"model": self.model, "optimizer": self.run.optimizer}
        held = [Component(key, each, shared) for key, each in weights.items() if each is not None]
        return held if self.run.optimizer is None else [*held, *self.checkpoints.restorable()]

    def get_process_groups(self) -> dict[str, Any]:
        """``ddp_group``, the ranks that read other data for the same layers, and ``pp_group``, those of one pipeline,
        where there are several. An override adds groups of its own, by the names that its components have for them."""
        names = ("ddp_group", "pp_group")
        return {name: group for name in names if (group := getattr(self.run.strategy, name)) is not None}
