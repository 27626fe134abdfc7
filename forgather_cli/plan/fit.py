"""``forgather plan --fit``: the largest micro-batch that memory has room for, and settings that make room for more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from forgather_cli.config.schema import Config, DDPSettings, FSDP2Settings, PipelineSettings, SingleSettings
from forgather_cli.errors import ConfigError, ForgatherError
from forgather_cli.launch.layout import plan_layout
from forgather_cli.plan.device_memory import Budget
from forgather_cli.plan.memory import RankMemory
from forgather_cli.plan.run import memory_by_micro_batch

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
    ways: list[Room] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return self.now_memory <= self.budget.usable


def find_fit(config: Config, now: int, budget: Budget, load: Load) -> Fit:
    """``now`` is the plan's micro-batch. Raises ConfigError for a model whose activations cannot be predicted."""
    predict = _predictor(config)
    sizes = _sizes(config)
    largest = _largest(sizes, predict, budget)
    most = sizes[-1] if config.global_batch_size is not None else None
    reached = [size for size in sizes if size <= (largest.micro_batch or 0)]
    fit = Fit(budget, now, predict(now), largest, predict(sizes[0]), most, reached)
    if largest.micro_batch == sizes[-1]:
        return fit
    return replace(fit, ways=_ways(config, largest, budget, load))


def _predictor(config: Config) -> Callable[[int], int]:
    memory = memory_by_micro_batch(config)

    def fullest(micro_batch: int) -> int:
        ranks: list[RankMemory] = memory(micro_batch)
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


def _largest(sizes: Sequence[int], predict: Callable[[int], int], budget: Budget) -> Room:
    """By halving the sizes in question: memory grows with the micro-batch."""
    low, high = 0, len(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if predict(sizes[middle]) <= budget.usable else (low, middle)
    size = sizes[low - 1] if low else None
    return Room((), size, None if size is None else predict(size))


def _ways(config: Config, now: Room, budget: Budget, load: Load) -> list[Room]:
    """Those that allow a larger micro-batch, cheapest first; together if none does so alone."""
    tried = [(way, _room(way.overrides, budget, load)) for way in WAYS if _makes_sense(way, config, budget)]
    better = [(way, room) for way, room in tried if (room.micro_batch or 0) > (now.micro_batch or 0)]
    if not better:
        return _together([way for way, room in tried if room.overrides], now, budget, load)
    better.sort(key=lambda pair: (pair[0].price, -(pair[1].micro_batch or 0)))
    return [replace(room, cost=way.cost, step_time=way.step_time) for way, room in better]


def _together(ways: Sequence[Way], now: Room, budget: Budget, load: Load) -> list[Room]:
    """One after another, cheapest first, until something fits; of two for one setting the later one stays."""
    words: tuple[str, ...] = ()
    for way in sorted(ways, key=lambda way: way.price):
        taken = {_key(word) for word in way.overrides}
        more = (*(word for word in words if _key(word) not in taken), *way.overrides)
        room = _room(more, budget, load)
        if (room.micro_batch or 0) > (now.micro_batch or 0):
            return [replace(room, cost="all of them together")]
        words = more if room.overrides else words  # unless they contradict each other
    return []


def _key(word: str) -> str:
    return word.partition("=")[0]


def _room(overrides: tuple[str, ...], budget: Budget, load: Load) -> Room:
    """What fits with more overrides; nothing, without overrides, where the config does not allow them."""
    try:
        config = load(overrides)
        return replace(_largest(_sizes(config), _predictor(config), budget), overrides=overrides)
    except ForgatherError:
        return Room((), None, None)


def _makes_sense(way: Way, config: Config, budget: Budget) -> bool:
    """Several ranks are needed to share anything, and host memory is another one beside a GPU only."""
    if "cpu_offload=true" in way.overrides and not budget.on_gpu:
        return False
    if any(word.startswith("trainer=") for word in way.overrides):
        if isinstance(config.trainer, SingleSettings):
            return False
        return "cpu_offload=true" in way.overrides or not isinstance(config.trainer, FSDP2Settings | PipelineSettings)
    return not (isinstance(config.trainer, DDPSettings) and "fuse_optim_with_backward=true" in way.overrides)
