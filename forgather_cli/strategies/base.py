"""The interface between the training loop and strategies: a strategy computes one optimizer step's gradients.

Legend: B sequences, T tokens, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from forgather_cli.config.schema import PostLocalSGD
from forgather_cli.distributed import World, gather
from forgather_cli.documents.encoding import Stateful
from forgather_cli.errors import ConfigError
from forgather_cli.labels import IGNORED, UNITS
from forgather_cli.models.init import allocate

Batch = dict[str, Tensor]
"""``input_ids`` and ``labels`` (B, T) int64, aligned (-100 = no target), and what else the model takes."""


def without_targets(batch: Batch) -> Batch:
    """``batch`` with every label -100 and no units, to take part in collectives without a loss; as it is without
    labels."""
    none = {key: torch.full_like(batch[key], value) for key, value in ((UNITS, 0), ("labels", IGNORED)) if key in batch}
    return {**batch, **none} if "labels" in batch else batch


def empty_batch(device: torch.device) -> Batch:
    """A batch of two tokens and no target, for a rank that never had one."""
    tokens = torch.zeros((1, 2), dtype=torch.int64, device=device)
    return without_targets({"input_ids": tokens, "labels": tokens, UNITS: tokens[:, 0]})


@dataclass
class GradientSharing:
    """With whom a rank averages its gradients, where that changes during a run: ``trainer/outer.py``, which averages
    weights between steps, sets it, and the strategy follows it from the next step on.
    """

    settings: PostLocalSGD
    among: Literal["all", "subgroup", "none"] = "all"
    """All ranks, those of this rank's subgroup, or nobody; of fewer than all, by the mean over a rank's own targets."""
    weights_are_equal: bool = True
    """On all ranks."""


Change = Callable[[nn.Module], nn.Module]
"""Changes a module in place, or returns a replacement."""


@dataclass(frozen=True)
class ModelSpec:
    """How to make a model. A field that is None: that step is left out.

    The order is fixed, for each part of the model that a rank trains: build, adapt, cut, checkpoint, compile, shard,
    allocate, init. Compiled code must include the recomputation of activations, and not a strategy's hooks.
    """

    build: Callable[[], nn.Module]
    """Makes the whole model, on meta where the caller chose so."""
    adapt: Change | None = None
    """Gives the whole model its dtype, and the layers of ``precision``."""
    checkpoint: Change | None = None
    """Activation checkpointing: makes a part recompute activations in the backward."""
    compile: Change | None = None
    """Compiles a part."""
    compile_with_loss: dict[str, Any] | None = None
    """Instead of ``compile``: arguments of ``torch.compile`` for the module of model and loss (``ModelWithLoss``)."""
    init: Callable[[nn.Module], None] | None = None
    """Fills the parameters of a part after they have memory; None if ``build`` delivers them filled."""

    def whole(self) -> nn.Module:
        """A whole model, before it is cut."""
        model = self.build()
        return model if self.adapt is None else self.adapt(model)

    def transformed(self, part: nn.Module) -> nn.Module:
        """A part after ``checkpoint`` and ``compile``, before it is sharded."""
        for change in (self.checkpoint, self.compile):
            part = part if change is None else change(part)
        return part

    def fill(self, part: nn.Module, device: torch.device) -> None:
        """Give a part that is not sharded its memory on ``device``, and its weights."""
        if allocate(part, device) and self.init is None:
            raise AssertionError("a model built on meta needs an init")
        part.to(device)
        if self.init is not None:
            self.init(part)


class Strategy(ABC):
    """Where one model's parameters live and how one optimizer step's gradients are computed.

    Every method is collective: all ranks call it, in the same order.
    """

    name: str
    """As in ``trainer=NAME``; logs and checkpoints hold it."""
    supports_fp16: bool = False
    supports_compile: bool = False
    compiles_with_loss: bool = False
    """It compiles model and loss as one with ``ModelSpec.compile_with_loss``; else only the parts are compiled."""
    supports_optimizer_in_backward: bool = False
    """Checked for a user's strategy (``check_supported``); for ours config checks the facts of the settings class."""
    device: torch.device
    parts: list[nn.Module]
    """Modules whose parameters this rank trains; several when pipeline stages interleave."""
    data_rank: int
    data_size: int
    """Which slice of the data this rank reads, of how many."""
    model_group: Any
    """Process group of the ranks that hold different parameters of one model; None: only this one."""
    ddp_group: Any = None
    """Process group of the ranks that hold the same layers and read other data; None: only this one."""
    pp_group: Any = None
    """Process group of the ranks of this rank's pipeline; None where the layers are not divided."""
    duplicates: frozenset[nn.Parameter] = frozenset()
    """Parameters of ``parts`` that another rank of ``model_group`` holds too and counts in the norm (tied weights)."""
    batch_multiple: int = 1
    """The number of sequences in a micro-batch must be a multiple of it."""
    gradient_sharing: GradientSharing | None = None
    """Set where ranks' weights drift apart between averages."""
    own_state: Stateful | None = None
    """Further state of this rank for checkpoints."""

    @abstractmethod
    def materialize(self, spec: ModelSpec) -> None:
        """Build the model with this rank's share of the parameters on ``device`` and set ``parts``."""

    @abstractmethod
    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        """Accumulate the gradients of one optimizer step into ``.grad`` of all ``parts``.

        The loss is the sum over targets divided by ``step_targets`` (0-dim, on ``device``: the targets of the whole
        step over all ranks, at least 1). Returns this rank's share of it, 0-dim fp32, detached; the shares' world
        sum is the step's loss.
        """

    @abstractmethod
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """This rank's share of one evaluation batch, no gradient: (sum over targets fp32, number of targets), 0-dim.

        The shares' world sums are the loss and its targets.
        """

    @abstractmethod
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        """Logits of a batch without gradient: (B, T, V) where the last layer lives, None elsewhere; with ``last_only``
        (B, 1, V) on every rank, so that all generate the same.

        ``cache`` is a ``models.cache.KVCache`` that this call reads and extends with this rank's layers.
        """


def check_shares(strategy: Strategy, here: World, group: Any) -> None:
    """Collective, over ``group`` (CPU). Raise ConfigError unless each slice of the data is read by equally many ranks,
    which hold different parts of one model: else losses and gradients would be counted twice, or data left out.
    """
    size = max(strategy.data_size, 1)
    holders = 1 if strategy.model_group is None else dist.get_world_size(strategy.model_group)
    copies, rest = divmod(here.size, size)
    slices = gather(strategy.data_rank, group)
    if rest or holders % copies or sorted(slices) != sorted([*range(size)] * copies):
        raise ConfigError(
            f"strategy: {strategy.name} divides the data by data_size={strategy.data_size} with data_rank {slices} on "
            f"{here.size} rank{'s' if here.size > 1 else ''}, of which {holders} hold{'s' if holders == 1 else ''} one "
            "model (model_group); data_size times the ranks that share a slice and a model must be all ranks"
        )


def check_supported(args: Any, strategy: Strategy) -> None:
    """Raise ConfigError for settings that a user's strategy does not support; config has checked ours."""
    name = f"the strategy {strategy.name}"
    problems = []
    if args.torch_compile and not strategy.supports_compile:
        problems.append(f"torch_compile: {name} cannot train compiled blocks; set torch_compile=false")
    if args.fuse_optim_with_backward and not strategy.supports_optimizer_in_backward:
        problems.append(f"fuse_optim_with_backward: {name} cannot; set it to false")
    if args.precision.scales_loss and not strategy.supports_fp16:
        problems.append(f"precision: {name} cannot scale the loss of {args.precision.type}; set precision=bf16")
    if problems:
        raise ConfigError(problems)
