"""From a config to the numbers of its run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from forgather_cli.config.decided import decided
from forgather_cli.config.pipeline_layout import Stage, bubble
from forgather_cli.config.schema import (
    Config,
    EncoderDecoderSettings,
    FSDP2Settings,
    PipelineSettings,
    Target,
    value_at,
)
from forgather_cli.errors import ConfigError
from forgather_cli.hub import with_local_model
from forgather_cli.launch.layout import batch_and_steps, plan_layout
from forgather_cli.plan import memory, pipeline
from forgather_cli.plan.activations import activations_of, paired_activations
from forgather_cli.plan.memory import RankMemory
from forgather_cli.plan.parameters import PlannedParameter, frozen_bytes, optimizer_bytes, parameter_rows, weight_bytes
from forgather_cli.plan.pipeline import PlannedStage
from forgather_cli.terminal.bars import doing

if TYPE_CHECKING:
    from torch import nn

    from forgather_cli.data.splits import DataSource, SourceUse
    from forgather_cli.trainer.metrics import Flops


@dataclass(frozen=True)
class RunPlan:
    """The numbers of one run. Bytes are those of the fullest rank; None where they cannot be known before the run."""

    model: str
    vocab_size: int | None
    """None: only data of the user's will tell it, and without it nothing of the model is known."""
    seq_len: int | None
    parameters: list[PlannedParameter]
    trainer: str
    """As in ``trainer=NAME``; of a user's strategy its path."""
    precision: str
    auto_because: str
    """What made ``precision=auto`` choose it; empty where it was chosen by name."""
    world_size: int
    micro_batch: int
    accumulation: int
    global_batch: int
    """Rows per optimizer step."""
    tokens_per_step: int | None
    train_tokens: int | None
    """Tokens of the train split, from an existing cache."""
    train_samples: int | None
    """Rows of it."""
    steps: int | None
    flops_per_token: float | None
    ranks: list[RankMemory]
    """Every rank's memory; empty where it is not known."""
    checkpoint_bytes: int | None
    stages: list[PlannedStage] = field(default_factory=list)
    """Of a pipeline, in the model's order."""
    schedule: str | None = None
    bubble: float | None = None
    """Share of its time that a rank of the pipeline waits, 0 to 1; an estimate."""
    sources: list[SourceUse] = field(default_factory=list)
    """Of a mixture, where tokens are cached and ``steps`` is known."""
    row: str = "sequence"
    """What one is, which batch sizes count."""

    @property
    def num_parameters(self) -> int:
        return sum(row.numel for row in self.parameters)

    @property
    def num_trained(self) -> int:
        return sum(row.numel for row in self.parameters if row.trained)

    @property
    def fullest(self) -> RankMemory | None:
        """The rank that needs most."""
        return max(self.ranks, key=lambda rank: rank.total, default=None)

    def by_kind(self) -> dict[str, int]:
        """Parameters of each kind, in the order of the model."""
        sums: dict[str, int] = {}
        for row in self.parameters:
            sums[row.kind] = sums.get(row.kind, 0) + row.numel
        return sums


@doing("planning the run")
def make_plan(config: Config) -> RunPlan:
    """Plan a run of ``config``; builds the model on meta. Raises ConfigError and SetupError as training would."""
    config = with_local_model(config, weights=False)
    config, decisions = decided(config)
    world_size = plan_layout(config).world
    source = _source(config)
    counts, (seq_len, decoder_len) = source.counts() or {}, source.sides()
    vocab_size, num_new = _vocabulary(config, source, counts)
    batch, steps = batch_and_steps(config, counts.get("train_samples"))
    if sources := source.uses(counts, steps, batch.global_batch) if steps else []:  # which may all end before
        rounding = 0 if config.dataloader_drop_last else batch.global_batch - 1
        steps = (sum(each.sequences for each in sources) + rounding) // batch.global_batch
    made = RunPlan(
        model=config.model.path if isinstance(config.model, Target) else config.model.type,
        vocab_size=vocab_size,
        seq_len=seq_len,
        parameters=[],
        trainer=str(value_at(config, "trainer")),
        precision=config.precision.type,
        auto_because=next((each.why for each in decisions if each.path == "precision"), ""),
        world_size=world_size,
        micro_batch=batch.micro_batch,
        accumulation=batch.accumulation,
        global_batch=batch.global_batch,
        tokens_per_step=None if seq_len is None else batch.global_batch * (seq_len + decoder_len),
        train_tokens=counts.get("train_tokens"),
        train_samples=counts.get("train_samples"),
        steps=steps,
        flops_per_token=None,
        ranks=[],
        checkpoint_bytes=None,
        sources=sources,
        row="pair" if config.data.has_pairs and getattr(config.data, "packing", "") == "pad" else "sequence",
    )
    return made if vocab_size is None else _with_model(made, config, vocab_size, num_new, decoder_len)


def _with_model(made: RunPlan, config: Config, vocab_size: int, num_new: int, decoder_len: int) -> RunPlan:
    """What follows from the model. Without a length of sequences neither operations nor activations are known."""
    from forgather_cli.data.text.auto_tokenizer import warn_of_other_ids
    from forgather_cli.models.pretrained import architecture
    from forgather_cli.trainer.metrics import Flops

    seq_len = made.seq_len
    model, rows, stages, memory_of = _on_meta(config, vocab_size, num_new, seq_len, decoder_len, made.world_size)
    warn_of_other_ids(model, config.data)
    piped: Any = config.trainer if stages else None
    optimizer, total = optimizer_bytes(rows), sum(row.numel for row in rows)
    base = frozen_bytes(rows) if config.adapter.freezes_base else 0  # which a checkpoint has by its hash
    planned = []
    for stage, held in stages:
        shard, count = piped.shard if piped else 1, sum(row.numel for row in held)
        numbers = {"rank": stage.rank * shard, "ranks": shard, "parameters": count, "share": count / total}
        planned.append(PlannedStage(**vars(stage) | numbers))
    return replace(
        made,
        model=architecture(model),
        parameters=rows,
        flops_per_token=_flops_per_token(Flops.of([model]), seq_len, decoder_len) if seq_len else None,
        ranks=memory_of(made.micro_batch),
        checkpoint_bytes=None if optimizer is None else weight_bytes(rows) - base + optimizer,
        stages=planned,
        schedule=str(piped.schedule) if piped else None,
        bubble=bubble(piped, made.world_size // piped.shard) if piped else None,
    )


def memory_by_micro_batch(config: Config) -> Callable[[int], list[RankMemory]]:
    """Every rank's memory as a function of the micro-batch; builds the model on meta once. Raises as ``make_plan``."""
    config, _ = decided(with_local_model(config, weights=False))
    source = _source(config)
    seq_len, decoder_len = source.sides()
    vocab_size, num_new = _vocabulary(config, source, source.counts() or {})
    if seq_len is None or vocab_size is None:
        raise ConfigError(
            "data._target_: its vocabulary and the length of its sequences are known when it is made; for --fit set "
            "model.vocab_size and data.seq_len"
        )
    return _on_meta(config, vocab_size, num_new, seq_len, decoder_len, plan_layout(config).world)[-1]


def _on_meta(
    config: Config, vocab_size: int, num_new: int, seq_len: int | None, decoder_len: int, world: int
) -> tuple[
    nn.Module, list[PlannedParameter], list[tuple[Stage, list[PlannedParameter]]], Callable[[int], list[RankMemory]]
]:
    """The model without memory, its parameters, a pipeline's stages with theirs, and every rank's memory as a function
    of the micro-batch.
    """
    import torch

    from forgather_cli.models.build import build_model
    from forgather_cli.models.transform import cast_parameters
    from forgather_cli.precision.dtypes import parameter_dtype
    from forgather_cli.trainer.build import choose_trained

    def build() -> nn.Module:
        with torch.device("meta"):
            # of rows with two sides positions begin anew with each example
            length = seq_len if isinstance(config.data, Target) else config.data.seq_len
            model = build_model(config.model, vocab_size=vocab_size, seq_len=length or 1, num_new=num_new)
        if (dtype := parameter_dtype(config.precision)) is not None:
            cast_parameters(model, dtype)
        choose_trained(model, config)
        return model

    model, trainer = build(), config.trainer
    rows = parameter_rows(model, config)
    shape = getattr(model, "settings", None)
    costs = activations_of(config, shape, model) if seq_len else None
    piped = trainer if isinstance(trainer, PipelineSettings) else None  # other strategies: as if each rank held all
    stages = [] if piped is None else pipeline.stages_of(piped, build, rows, world)
    layers = len({(row.stack, row.layer) for row in rows if row.layer is not None})

    def memory_of(micro_batch: int) -> list[RankMemory]:
        tokens = micro_batch * (seq_len or 1)
        activations = None if costs is None else costs.of(range(layers), tokens)
        if isinstance(shape, EncoderDecoderSettings) and seq_len:
            activations = paired_activations(config, shape, micro_batch, seq_len, decoder_len)
        if piped is not None:
            ranks = pipeline.by_rank(config, piped, stages, world, costs, tokens // piped.n_microbatches)
        elif isinstance(trainer, FSDP2Settings):
            ranks = memory.sharded(config, trainer, rows, world, activations)
        else:
            ranks = memory.replicated(config, rows, world, activations)
        return memory.as_saved(config, ranks)

    return model, rows, stages, memory_of


def _source(config: Config) -> DataSource[Any]:
    from forgather_cli.data.build import source_of
    from forgather_cli.models.build import most_tokens
    from forgather_cli.models.pretrained import num_sentinels

    return source_of(config.data, num_sentinels=num_sentinels(config.model), model_tokens=most_tokens(config))


def _flops_per_token(flops: Flops, encoder: int, decoder: int) -> float:
    squares = encoder * encoder + decoder * decoder + encoder * decoder
    return flops.total(encoder + decoder, squares, decoder) / (encoder + decoder)


def _vocabulary(config: Config, source: DataSource[Any], counts: dict[str, int | None]) -> tuple[int | None, int]:
    """(tokens of the tokenizer, how many of them chats add to it). Of data of the user's, which tell when they are
    made, the model's; None where that takes theirs."""
    from forgather_cli.models.build import own_vocab_size

    known = counts.get("vocab_size")
    if known and not config.data.add_tokens:
        return known, 0
    known, num_new = source.vocabulary()
    return own_vocab_size(config.model) if known is None else known, num_new
