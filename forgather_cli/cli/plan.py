"""``forgather plan``: what a run will need, before it runs."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.fit import show_fit
from forgather_cli.cli.output import (
    AsJson,
    Col,
    human,
    human_bytes,
    human_flops,
    only_json,
    print_facts,
    print_json,
    print_table,
)
from forgather_cli.cli.source import TrustConfig, load_run_or_recipe
from forgather_cli.cli.words import ConfigDir, Words
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from forgather_cli.plan import PlannedStage, RankMemory, RunPlan


def plan(
    words: Words = None,
    config_dir: ConfigDir = None,
    params: Annotated[bool, typer.Option("--params", help="List every parameter with its optimizer group.")] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Find the largest micro-batch that memory has room for, and ways to more.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option("--memory", metavar="SIZE", help="With --fit: of a device, such as 24GiB; else what is here."),
    ] = None,
    confirms: Annotated[
        bool, typer.Option("--confirm", help="With --fit: try it, a few steps on random tokens in a process apart.")
    ] = False,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    """Show parameters, steps, operations and memory of a run before it runs.

    RECIPE may be a run too: its directory, or a config.yaml of it. Nothing is trained,
    tokenized or written. The number of tokens is known only where the corpus was
    tokenized before.
    """
    compose = partial(load_run_or_recipe, config_dir=config_dir, trust_config=trust_config)
    if fit:
        if params:
            raise ConfigError("--params: says nothing to --fit; leave one of them out")
        show_fit(compose, words or [], memory, confirms=confirms, as_json=as_json)
        return
    if memory is not None or confirms:
        raise ConfigError(f"{'--confirm' if memory is None else '--memory'}: needs --fit")
    loaded = compose(words)
    from forgather_cli.plan import make_plan

    with only_json(as_json):
        made = make_plan(loaded.config)
    if as_json:
        print_json(plan_document(made, params=params))
    else:
        print_plan(made, params=params)


def plan_document(made: RunPlan, *, params: bool = False) -> dict[str, Any]:
    """The plan as plain values; parameters one by one only if asked for. Bytes at the top are the fullest rank's."""
    document = {key: value for key, value in asdict(made).items() if key not in ("parameters", "ranks", "stages")}
    document |= {"num_parameters": made.num_parameters or None, "parameters_by_kind": made.by_kind()}
    document |= _bytes(made.fullest) if made.fullest else {}
    document |= {"ranks": [{"rank": each.rank, **_bytes(each)} for each in made.ranks]}
    document |= {"stages": [asdict(stage) for stage in made.stages]} if made.stages else {}
    return {**document, "parameters": [asdict(row) for row in made.parameters]} if params else document


def _bytes(memory: RankMemory) -> dict[str, int | None]:
    return {
        "memory_bytes": memory.total,
        "weight_bytes": memory.weights,
        "gradient_bytes": memory.gradients,
        "optimizer_bytes": memory.optimizer,
        "activation_bytes": memory.activations,
        "buffer_bytes": memory.buffers,
        "save_copy_bytes": memory.save_copy,
        "host_bytes": memory.in_host_memory,
    }


def print_plan(made: RunPlan, *, params: bool = False) -> None:
    """Tables for people."""
    print_facts(dict(_rows(made)))
    if made.stages:
        _print_stages(made)
    if params:
        _print_parameters(made)


def _rows(made: RunPlan) -> list[tuple[str, str]]:
    kinds = ", ".join(f"{kind} {human(count)}" for kind, count in made.by_kind().items())
    total = made.tokens_per_step * made.steps if made.steps and made.tokens_per_step else None
    train = "not tokenized yet" if made.train_tokens is None else f"{made.train_tokens:,} tokens"
    return [
        ("model", f"{made.model}, vocabulary {_count(made.vocab_size)}, {_count(made.seq_len)} tokens per sequence"),
        ("parameters", f"{made.num_parameters:,}  ({kinds})" if made.parameters else _UNKNOWN),
        ("trainer", _trainer(made)),
        ("batch", f"{_sequences(made)}, {_count(made.tokens_per_step)} tokens per step"),
        ("train split", train if made.vocab_size and made.seq_len else "unknown: your data tells when it is made"),
        ("steps", _steps(made, total)),
        ("operations", _flops(made, total)),
        *_memory(made),
        ("checkpoint", _known(made.checkpoint_bytes)),
    ]  # fmt: skip


_UNKNOWN = "unknown: your data tells its vocabulary when it is made; set model.vocab_size to know more"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _trainer(made: RunPlan) -> str:
    ranks = f" on {made.world_size} ranks" if made.world_size > 1 else ""
    if made.bubble is not None:
        return f"{made.trainer}{ranks}, schedule {made.schedule}, {len(made.stages)} stages, bubble {made.bubble:.1%}"
    users = ", planned as if each rank held the whole model" if "." in made.trainer else ""
    return f"{made.trainer}{ranks}{users}"


def _sequences(made: RunPlan) -> str:
    """``32 sequences = 8 x 2 micro-steps x 2 ranks``."""
    ranks = made.global_batch // (made.micro_batch * made.accumulation)
    of_ranks = f" x {ranks} ranks" if ranks > 1 else ""
    return f"{made.global_batch} sequences = {made.micro_batch} x {made.accumulation} micro-steps{of_ranks}"


def _memory(made: RunPlan) -> list[tuple[str, str]]:
    """Of the fullest rank, by kind."""
    rank = made.fullest
    if rank is None:
        return [("memory", "unknown")]
    where = "on one device" if made.world_size == 1 else f"on rank {rank.rank}, the fullest of {made.world_size}"
    if len({each.total for each in made.ranks}) == 1 < made.world_size:
        where = "on each rank"
    estimate = f"{human_bytes(rank.activations)} (estimate)" if rank.activations else "unknown"
    rows = [
        ("memory", f"about {human_bytes(rank.total)} {where}"),
        ("  weights", human_bytes(rank.weights)),
        ("  gradients", human_bytes(rank.gradients)),
        ("  optimizer", _known(rank.optimizer)),
        ("  activations", estimate),
    ]
    if rank.buffers:
        rows.append(("  buffers", f"{human_bytes(rank.buffers)} (estimate)"))
    if rank.save_copy:
        rows.append(("  copy of a save", f"{human_bytes(rank.save_copy)} in host memory (async_save)"))
    if rank.in_host_memory:
        rows.append(("  in host memory", f"{human_bytes(rank.in_host_memory)} of it, not in the sum"))
    return rows


def _known(size: int | None) -> str:
    return "unknown" if size is None else human_bytes(size)


def _print_stages(made: RunPlan) -> None:
    columns = (
        Col("stage", right=True),
        Col("rank", right=True),
        Col("layers"),
        Col("parameters", right=True),
        Col("share", right=True),
        Col("memory of the rank", right=True, droppable=1),
    )
    memory = {each.rank: each.total for each in made.ranks}
    rows = [
        (str(s.index), _ranks(s), _layers(s), f"{s.parameters:,}", f"{s.share:.1%}", human_bytes(memory[s.rank]))
        for s in made.stages
    ]
    print_table(columns, rows)


def _ranks(stage: PlannedStage) -> str:
    return str(stage.rank) if stage.ranks == 1 else f"{stage.rank}-{stage.rank + stage.ranks - 1}"


def _layers(stage: PlannedStage) -> str:
    """``embedding, 0-3``."""
    layers = f"{stage.first_layer}-{stage.last_layer}" if stage.last_layer > stage.first_layer else stage.first_layer
    return f"{'embedding, ' if stage.has_embedding else ''}{layers}{', head' if stage.has_head else ''}"


def _flops(made: RunPlan, total: int | None) -> str:
    per_token = made.flops_per_token
    if per_token is None or made.tokens_per_step is None:
        return "unknown"
    in_all = f", {human_flops(per_token * total)} in all" if total else ""
    return f"{human_flops(per_token)} per token, {human_flops(per_token * made.tokens_per_step)} per step{in_all}"


def _steps(made: RunPlan, total: int | None) -> str:
    if made.steps is None:
        return "until the data ends; known when the corpus is tokenized"
    epochs = f", {total / made.train_tokens:.2f} epochs" if made.train_tokens and total else ""
    return f"{made.steps:,} steps, {human(total) if total else 'unknown'} tokens{epochs}"


def _print_parameters(made: RunPlan) -> None:
    columns = (
        Col("parameter"),
        Col("shape", droppable=1),
        Col("numbers", right=True, droppable=2),
        Col("kind", droppable=3),
        Col("group"),
        Col("optimizer"),
        Col("decay", right=True),
    )
    rows = [
        (r.name, " x ".join(map(str, r.shape)), f"{r.numel:,}", r.kind, r.group, r.optimizer, f"{r.weight_decay:g}")
        for r in made.parameters
    ]
    print_table(columns, rows)
