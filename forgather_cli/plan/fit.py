"""``forgather plan --fit``: the largest micro-batch that memory has room for, and settings that make room for more."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from forgather_cli.config.schema import Config, DDPSettings, FSDP2Settings, PipelineSettings, SingleSettings
from forgather_cli.errors import ConfigError, ForgatherError
from forgather_cli.hardware import gpu_of
from forgather_cli.launch.layout import plan_layout
from forgather_cli.launch.processes import available_memory
from forgather_cli.plan.memory import uses_gpu
from forgather_cli.plan.run import memory_by_micro_batch

# -------------------------------------------------------------------------------------------------- memory of a device

GIB = 2**30
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
_SIZE = re.compile(r"\s*([\d.]+)\s*([KMGT]?)(I?B)?\s*", re.IGNORECASE)

_CUDA_CONTEXT = int(0.7 * GIB)  # driver, kernels and libraries' workspaces: 0.5 to 0.9 GiB by device and version
_CPU_PROCESS = int(0.42 * GIB)  # Python, torch and what else is imported


@dataclass(frozen=True)
class Budget:
    """Memory of one rank in bytes."""

    total: int
    kept_back: int
    """For what no plan counts: the process itself."""
    on_gpu: bool
    source: str
    """Where ``total`` comes from."""

    @property
    def usable(self) -> int:
        return max(0, self.total - self.kept_back)


def budget_of(config: Config, given: str | None) -> Budget:
    """The memory for a rank of ``config``; ``given`` is that of one device, as typed. Raises ConfigError."""
    on_gpu = uses_gpu(config)
    if given is not None:
        total, source = _parsed_size(given), "--memory"
        on_gpu = config.device != "cpu"  # of a device that need not be here
    elif (gpu := gpu_of(config.device)) is not None:
        total, source = int(gpu.total_memory), gpu.name
    else:
        ranks = plan_layout(config).ranks_per_node
        total = available_memory() // ranks
        source = "available memory of this machine" + (f", shared by {ranks} ranks" if ranks > 1 else "")
    return Budget(total, _CUDA_CONTEXT if on_gpu else _CPU_PROCESS, on_gpu, source)


def _parsed_size(text: str) -> int:
    """``24GiB``, ``24G`` and ``24GB`` alike: powers of 1024, as devices are sold."""
    found = _SIZE.fullmatch(text)
    try:
        size = int(float(found[1]) * 2 ** _UNITS[found[2].upper()]) if found else 0
    except ValueError:
        size = 0
    if size <= 0:
        raise ConfigError(f"--memory: must be a size such as 24GiB or 800MiB, got {text!r}")
    return size


# ------------------------------------------------------------------------------------------------------------ what fits

_MOST = 1 << 16  # sequences at a time beyond which nobody looks

Load = Callable[[Sequence[str]], Config]
"""The config with some more overrides. Raises ConfigError."""


@dataclass(frozen=True)
class Way:
    """Overrides that save memory, and what they cost."""

    overrides: tuple[str, ...]
    price: int
    """0 nothing, 1 little, 2 a slower step, 3 another training: ways are listed in this order."""
    cost: str
    step_time: float | None = None
    """Relative to before, where it is known beforehand."""


WAYS = (
    Way(("loss=linear_cross_entropy",), 0, "same result; logits exist for a chunk of tokens at a time", 1.0),
    Way(("precision=bf16",), 1, "products in bf16; faster on devices made for it"),
    Way(("trainer=fsdp2",), 1, "shards weights and moments; they travel in every step"),
    Way(("gradient_checkpointing=true",), 2, "same result; a layer's forward runs twice", 4 / 3),
    Way(("trainer=pipeline",), 2, "each rank has some of the layers, and waits in the bubble"),
    Way(("trainer=fsdp2", "cpu_offload=true"), 2, "weights and moments in host memory; steps on the CPU"),
    Way(("fuse_optim_with_backward=true", "max_grad_norm=null"), 3, "no gradients kept; no clipping, no accumulation"),
    Way(("precision=bf16_true",), 3, "weights and moments in bf16 too; small updates are rounded away"),
    Way(("optimizer=adafactor",), 3, "hardly any moments; another optimizer, tune learning_rate anew"),
)  # fmt: skip


@dataclass(frozen=True)
class Room:
    """What fits: the largest micro-batch and its memory in bytes; None where a single sequence is too much."""

    overrides: tuple[str, ...]
    micro_batch: int | None
    memory: int | None
    cost: str = ""
    step_time: float | None = None


@dataclass(frozen=True)
class Fit:
    """The answer. Sequences are per rank, bytes those of the fullest rank."""

    budget: Budget
    now: int
    """Micro-batch that the settings lead to."""
    now_memory: int
    largest: Room
    needed: int
    """Bytes of the smallest micro-batch."""
    most: int | None
    """The largest micro-batch that ``global_batch_size`` allows; None without one."""
    sizes: list[int]
    """Micro-batches that are possible, up to the largest that fits."""
    beyond: tuple[int, int] | None
    """The next possible micro-batch, which does not fit, and its bytes; None where there is none."""
    ways: list[Room] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.now_memory <= self.budget.usable

    @property
    def limit(self) -> str | None:
        """What keeps the micro-batch from being larger: ``global_batch_size``, or ``memory``; None if nothing does."""
        return "memory" if self.beyond is not None else "global_batch_size" if self.most is not None else None

    @property
    def free(self) -> int:
        """Bytes that the largest micro-batch leaves."""
        return self.budget.usable - (self.largest.memory or 0)


def find_fit(config: Config, now: int, budget: Budget, load: Load) -> Fit:
    """``now`` is the plan's micro-batch. Raises ConfigError for a model whose activations cannot be predicted."""
    sizes, needed = _sizes(config), _memory_needed(config)
    largest = _largest(sizes, needed, budget)
    most = sizes[-1] if config.global_batch_size is not None else None
    reached = [size for size in sizes if size <= (largest.micro_batch or 0)]
    beyond = None if len(reached) == len(sizes) else (sizes[len(reached)], needed(sizes[len(reached)]))
    fit = Fit(budget, now, needed(now), largest, needed(sizes[0]), most, reached, beyond)
    if beyond is None:
        return fit

    def room(overrides: tuple[str, ...]) -> Room | None:
        """What fits with more overrides; None where the config does not allow them."""
        try:
            changed = load(overrides)
            return replace(_largest(_sizes(changed), _memory_needed(changed), budget), overrides=overrides)
        except ForgatherError:
            return None

    rooms = [(way, found) for way in _sensible(config, budget) if (found := room(way.overrides)) is not None]
    have = largest.micro_batch or 0
    if better := [(way, found) for way, found in rooms if (found.micro_batch or 0) > have]:
        better.sort(key=lambda pair: (pair[0].price, -(pair[1].micro_batch or 0)))
        return replace(fit, ways=[replace(found, cost=way.cost, step_time=way.step_time) for way, found in better])
    # none does so alone: one after another, cheapest first, until something fits
    words: tuple[str, ...] = ()
    for way, _ in sorted(rooms, key=lambda pair: pair[0].price):
        taken = {word.partition("=")[0] for word in way.overrides}  # of two for one setting the later one stays
        more = (*(word for word in words if word.partition("=")[0] not in taken), *way.overrides)
        if (found := room(more)) is None:
            continue  # they contradict each other
        if (found.micro_batch or 0) > have:
            return replace(fit, ways=[replace(found, cost="all of them together")])
        words = more
    return fit


def _memory_needed(config: Config) -> Callable[[int], int]:
    """Bytes of the fullest rank by micro-batch."""
    memory = memory_by_micro_batch(config)

    def fullest(micro_batch: int) -> int:
        ranks = memory(micro_batch)
        if any(rank.activations is None for rank in ranks):
            raise ConfigError(
                "--fit: the activations of this model are not known, only those of the decoder; set "
                "auto_find_batch_size=true, which tries"
            )
        return max(rank.total for rank in ranks)

    return fullest


def _sizes(config: Config) -> Sequence[int]:
    """Possible micro-batches, ascending: what divides a rank's share of the global batch, or any."""
    unit, data_ranks = 1, plan_layout(config).world
    if isinstance(config.trainer, PipelineSettings):
        unit, data_ranks = config.trainer.n_microbatches, config.trainer.shard
    if config.global_batch_size is None:
        return range(unit, _MOST + unit, unit)
    share = config.global_batch_size // data_ranks
    if config.fuse_optim_with_backward:  # which does not accumulate
        return [share]
    return [size for size in range(unit, share + 1, unit) if share % size == 0]


def _largest(sizes: Sequence[int], needed: Callable[[int], int], budget: Budget) -> Room:
    """Memory grows with the micro-batch, so that halving finds it."""
    fitting = bisect_right(sizes, budget.usable, key=needed)
    size = sizes[fitting - 1] if fitting else None
    return Room((), size, None if size is None else needed(size))


def _sensible(config: Config, budget: Budget) -> list[Way]:
    """Several ranks are needed to share anything, and host memory is another one beside a GPU only."""
    found = []
    for way in WAYS:
        offloads = "cpu_offload=true" in way.overrides
        if any(word.startswith("trainer=") for word in way.overrides):
            shared = isinstance(config.trainer, FSDP2Settings | PipelineSettings)
            fits = not isinstance(config.trainer, SingleSettings) and (budget.on_gpu if offloads else not shared)
        else:
            fused = "fuse_optim_with_backward=true" in way.overrides
            fits = not (fused and isinstance(config.trainer, DDPSettings))
        if fits:
            found.append(way)
    return found
