"""What each rank holds under each strategy, in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from forgather_cli.config.schema import (
    Config,
    DDPSettings,
    DoRASettings,
    FSDP2Settings,
    NoAdapter,
    PipelineSettings,
    QATSettings,
    QLoRASettings,
)
from forgather_cli.plan.parameters import (
    FP32,
    HALF,
    PlannedParameter,
    frozen_bytes,
    gradient_bytes,
    optimizer_bytes,
    weight_bytes,
)

_WIDTH = {"fp32": 4, "bf16": 2, "fp16": 2}
HALF_PRODUCTS = ("bf16", "bf16_true", "fp16", "fp8")
"""Options of ``precision`` whose matrices and activations are half precision, or less."""

_FRAGMENTS = 0.15
"""Of a rank's tensors: glibc's heap took 6 to 27 % more over nano to 60m, most on one device
(torch 2.13, glibc 2.36; ``trainer/process.py`` says why)."""
_FRAGMENTS_ON_GPU = 0.05
"""CUDA's allocator reserved 3 % (1b) and 13 % (160m) more than was in use, in bf16 (torch 2.11, H200)."""


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank's tensors by kind; None where unknown. ``scripts/bench/plan_memory.py`` compares the total with
    what a process on a CPU takes beyond its interpreter.
    """

    rank: int
    weights: int
    gradients: int
    optimizer: int | None
    activations: int | None
    """Estimate."""
    buffers: int = 0
    """What the strategy holds besides: gathered weights, half copies of weights, buckets of gradients. Estimate."""
    in_host_memory: int = 0
    """Of all these bytes, those that lie in host memory beside a GPU (cpu_offload, save_copy)."""
    save_copy: int = 0
    """Weights and moments that the rank writes, copied to host memory by an asynchronous save and kept there."""
    frozen: int = 0
    """Of the weights, those that are not trained."""
    on_gpu: bool = False

    @property
    def fragments(self) -> int:
        """What lies free between blocks that are in use. Estimate; frozen weights are read once, and leave no gaps."""
        share = _FRAGMENTS_ON_GPU if self.on_gpu else _FRAGMENTS
        return int(share * (self.tensors - max(0, self.frozen - self.in_host_memory)))

    @property
    def total(self) -> int:
        """All kinds that are known together, host memory left out."""
        return self.tensors + self.fragments

    @property
    def tensors(self) -> int:
        """All kinds that are known together, fragments and host memory left out."""
        kinds = (self.weights, self.gradients, self.optimizer, self.activations, self.buffers, self.save_copy)
        return sum(kind or 0 for kind in kinds) - self.in_host_memory


def uses_gpu(config: Config) -> bool:
    import torch

    return config.device.startswith("cuda") or (config.device != "cpu" and torch.cuda.is_available())


def as_saved(config: Config, ranks: Sequence[RankMemory]) -> list[RankMemory]:
    """Where the memory is, and what ``async_save`` adds: it copies what a rank writes and keeps that memory; ranks that
    hold the same share the writing. An adapter is written without its base.
    """
    on_gpu = uses_gpu(config)
    ranks = [replace(rank, on_gpu=on_gpu) for rank in ranks]
    if not config.async_save or config.save_strategy == "no":
        return ranks
    trainer = config.trainer
    holders = 1 if isinstance(trainer, PipelineSettings) else len(ranks)
    if isinstance(trainer, FSDP2Settings):
        holders = min(trainer.replicate, len(ranks))
    found = []
    for rank in ranks:
        base = 0 if isinstance(config.adapter, NoAdapter) else rank.frozen
        copy = (rank.weights - base + (rank.optimizer or 0)) // holders
        in_host = rank.in_host_memory + copy if on_gpu else rank.in_host_memory
        found.append(replace(rank, save_copy=copy, in_host_memory=in_host))
    return found


def replicated(
    config: Config, rows: Sequence[PlannedParameter], world: int, activations: int | None
) -> list[RankMemory]:
    """One device, or data parallel: every rank holds everything.

    DDP's buckets are a second copy of the gradients, unless the gradients are views of them
    (``gradient_as_bucket_view``; torch.nn.parallel.DistributedDataParallel's documentation).
    """
    every = gradient_bytes(rows)
    gradients = max(row.gradient_bytes for row in rows) if config.fuse_optim_with_backward else every
    copied = isinstance(config.trainer, DDPSettings) and not config.trainer.gradient_as_bucket_view
    buffers = half_copies(config, rows) + unpacked_bytes(config, rows) + (every if copied and world > 1 else 0)
    made = RankMemory(
        0, weight_bytes(rows), gradients, optimizer_bytes(rows), activations, buffers, frozen=frozen_bytes(rows)
    )
    return [replace(made, rank=rank) for rank in range(world)]


def unpacked_bytes(config: Config, rows: Sequence[PlannedParameter]) -> int:
    """What an adapter makes of the matrix that it works on: the weight of one in four bits; for DoRA's norms some rows
    in fp32, where the weight is not that."""
    width = HALF if config.precision.type in HALF_PRODUCTS else FP32
    largest = max((row.numel for row in rows if row.kind in ("attention", "mlp")), default=0)
    if isinstance(config.adapter, DoRASettings) and width == HALF:
        from forgather_cli.adapters.layers import AT_ONCE

        return FP32 * min(largest, AT_ONCE)
    return width * largest if isinstance(config.adapter, QLoRASettings) else 0


def half_copies(config: Config, rows: Sequence[PlannedParameter]) -> int:
    """What is kept of each fp32 matrix in half precision, from a micro-batch's forward to its backward, of large ones
    for all micro-batches of a step (``models.transform.shared_halves``).

    An embedding is looked up only, unless the head shares it.
    """
    if isinstance(config.precision, QATSettings):
        return rounded_copies(config, rows)
    if config.precision.type not in ("bf16", "fp16"):
        return 0
    tied = not any(row.kind == "head" for row in rows)
    matrices = [row for row in rows if len(row.shape) == 2 and row.weight_bytes == FP32 * row.numel]
    return HALF * sum(row.numel for row in matrices if row.kind != "embedding" or tied)


def rounded_copies(config: Config, rows: Sequence[PlannedParameter]) -> int:
    """What ``precision=qat`` keeps of each matrix that it rounds, unless it rounds again, in fp32.

    The weight before it was cut off at the largest number, and as it is multiplied; for int4-weight-only two more on
    the way there (torchao 0.18).
    """
    if not isinstance(config.precision, QATSettings):
        return 0
    copies = 4 if config.precision.qat_recipe == "int4-weight-only" else 2
    kept = [row for row in rows if row.layer is not None and not config.recomputes(row.layer)]
    matrices = (row.numel for row in kept if row.kind in ("attention", "mlp") and len(row.shape) == 2)
    return copies * FP32 * sum(matrices)


# ------------------------------------------------------------------------------------------------------------- fsdp2


def sharded(
    config: Config, trainer: FSDP2Settings, rows: Sequence[PlannedParameter], world: int, activations: int | None
) -> list[RankMemory]:
    """FSDP2: each rank holds a slice of the rows of every parameter; with ``replicate`` several ranks the same."""
    shards = max(1, world // trainer.replicate)
    buffers = _gathered_bytes(config, trainer, rows) + rounded_copies(config, rows) + unpacked_bytes(config, rows)
    made = [shard_of(config, rows, rank, shards, activations, buffers) for rank in range(world)]
    if not trainer.cpu_offload:
        return made
    return [replace(r, in_host_memory=r.weights + r.gradients + (r.optimizer or 0)) for r in made]


def shard_of(
    config: Config,
    rows: Sequence[PlannedParameter],
    rank: int,
    shards: int,
    activations: int | None,
    buffers: int,
) -> RankMemory:
    """Of a rank that shares all rows of ``rows`` with its ``shards - 1`` neighbours.

    Weights and gradients are padded to equal rows on all ranks (torch 2.13, ``_fsdp_param.py``), moments are not.
    """
    padded: dict[str, int] = {}  # bytes by parameter
    optimizer: int | None = 0
    for row in rows:
        count = row.shape[0] if row.shape else 1  # a scalar is on every rank
        largest = -(-count // shards)
        own = min(largest, max(0, count - rank % shards * largest)) if row.shape else 1  # the last ones less or none
        padded[row.name] = row.weight_bytes // count * largest
        if optimizer is not None:
            optimizer = None if row.state_bytes is None else optimizer + row.state_bytes * own // count
    weights = sum(padded.values())
    each = [sum(padded[row.name] for row in unit if row.trained) for unit in units(rows)]
    gradients = max(each) if config.fuse_optim_with_backward else sum(each)
    return RankMemory(rank, weights, gradients, optimizer, activations, buffers, frozen=weights - sum(each))


def _gathered_bytes(config: Config, trainer: FSDP2Settings, rows: Sequence[PlannedParameter]) -> int:
    """Whole weights while they are computed with, and whole gradients of a unit before they are reduced.

    The unit at work and the one fetched ahead of it, beside the root's (embedding, norm, head), which stays from
    forward to backward; all of them with ``reshard_after_forward=false``.
    """
    width = gathered_width(config, trainer.param_dtype)
    reduced = _WIDTH[trainer.reduce_dtype or "fp32"]
    whole = units(rows)
    root, *blocks = (sum(row.numel for row in unit) for unit in whole)
    gathered = sum(sorted(blocks)[-2:]) if trainer.reshard_after_forward else sum(blocks)
    trained = max(sum(row.numel for row in unit if row.trained) for unit in whole)
    return width * (root + gathered) + reduced * trained


def gathered_width(config: Config, param_dtype: str | None = None) -> int:
    """Bytes of a gathered weight."""
    return _WIDTH[param_dtype or ("bf16" if config.precision.type in HALF_PRODUCTS else "fp32")]


def units(rows: Sequence[PlannedParameter]) -> list[list[PlannedParameter]]:
    """What is gathered together: first the parameters outside of layers, then each layer's."""
    found: dict[tuple[str, int] | None, list[PlannedParameter]] = {None: []}
    for row in rows:
        found.setdefault(None if row.layer is None else (row.stack, row.layer), []).append(row)
    return list(found.values())
