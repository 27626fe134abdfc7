"""``forgather plan``: what a run will need, before it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.output import (
    AsJson,
    Col,
    human,
    human_bytes,
    human_flops,
    human_seconds,
    only_json,
    print_facts,
    print_json,
    print_table,
)
from forgather_cli.cli.words import ConfigDir, TrustConfig, Words, load
from forgather_cli.errors import ConfigError
from forgather_cli.hub import check_model
from forgather_cli.terminal.bars import doing

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded
    from forgather_cli.config.schema import Config, DilocoServerSettings
    from forgather_cli.plan.diloco import DilocoPlan
    from forgather_cli.plan.fit import Fit
    from forgather_cli.plan.memory import RankMemory
    from forgather_cli.plan.run import RunPlan


def plan(
    words: Words = None,
    config_dir: ConfigDir = None,
    params: Annotated[bool, typer.Option("--params", help="List every parameter with its optimizer group.")] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Find the largest micro-batch that memory has room for, and ways to more.")
    ] = False,
    memory: Annotated[
        str | None,
        typer.Option(
            "--memory", metavar="SIZE", help="With --fit: memory of a device, such as 24GiB; else of this machine."
        ),
    ] = None,
    confirms: Annotated[
        bool,
        typer.Option("--confirm", help="With --fit: try it, a few steps on random tokens in a process of its own."),
    ] = False,
    step_time: Annotated[
        float | None,
        typer.Option(
            "--step-time",
            metavar="SECONDS",
            min=1e-6,
            show_default=False,
            help="With diloco: how long a step takes; tells bytes per hour and the share of time in exchanges.",
        ),
    ] = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    """Show parameters, steps, operations and memory of a run before it runs.

    RECIPE may be a run too: its directory, or a config.yaml of it. Nothing is trained,
    tokenized or written. The number of tokens is known only where the corpus was
    tokenized before. With the callback [cyan]diloco[/], or settings of its server
    ([cyan]diloco.NAME=VALUE[/]), it shows what a worker sends and receives too.
    """
    from forgather_cli.config.diloco import split_server_overrides

    words, of_server = split_server_overrides(words or [])
    compose = partial(load, config_dir=config_dir, trust_config=trust_config)
    if fit:
        if params or of_server or step_time is not None:
            named = "--params" if params else of_server[0] if of_server else "--step-time"
            raise ConfigError(f"{named}: says nothing to --fit; leave one of them out")
        show_fit(compose, words, memory, confirms=confirms, as_json=as_json)
        return
    if memory is not None or confirms:
        raise ConfigError(f"{'--confirm' if memory is None else '--memory'}: needs --fit")
    config = compose(words).config
    check_model(config)
    callback = config.callbacks.diloco
    if step_time is not None and not of_server and callback is None:
        raise ConfigError("--step-time: needs +callbacks.diloco={} or settings of its server (diloco.sync_every=500)")
    server = _server_settings(of_server, {} if callback is None else callback.stated())
    from forgather_cli.plan.diloco import plan_diloco
    from forgather_cli.plan.run import make_plan

    with only_json(as_json):
        made = make_plan(config)
    shared = None
    if made.parameters and (of_server or callback is not None):
        shared = plan_diloco(made, server, None if callback is None else callback.bandwidth, step_time)
    if as_json:
        of_diloco = {} if shared is None else {"diloco": asdict(shared)}
        print_json({**plan_document(made, params=params), **of_diloco})
        return
    print_plan(made, params=params)
    if shared is not None:
        _print_diloco(shared, made)


def _server_settings(of_server: Sequence[str], stated: Mapping[str, Any]) -> DilocoServerSettings:
    """Of the server that a worker with ``stated`` settings trains with. Raises ConfigError where they contradict."""
    from forgather_cli.config.diloco import load_server_settings

    settings = load_server_settings([*(f"diloco.{name}={value}" for name, value in stated.items()), *of_server])
    if wrong := [name for name, value in stated.items() if getattr(settings, name) != value]:
        here, there = stated[wrong[0]], getattr(settings, wrong[0])
        raise ConfigError(
            f"callbacks.diloco.{wrong[0]}: is {here}, and diloco.{wrong[0]}={there} for the server, which would refuse "
            "the worker; leave one of them out"
        )
    return settings


def plan_document(made: RunPlan, *, params: bool = False) -> dict[str, Any]:
    """The plan as plain values; parameters one by one only if asked for. Bytes at the top are the fullest rank's."""
    document = {key: value for key, value in asdict(made).items() if key not in ("parameters", "ranks", "stages")}
    document |= {"num_parameters": made.num_parameters or None, "num_trained": made.num_trained or None}
    document |= {"parameters_by_kind": made.by_kind()}
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
        "fragment_bytes": memory.fragments,
        "host_bytes": memory.in_host_memory,
    }


def print_plan(made: RunPlan, *, params: bool = False) -> None:
    """Tables for people."""
    print_facts(_facts(made))
    if made.stages:
        memory = {each.rank: each.total for each in made.ranks}
        rows = []
        for s in made.stages:
            ranks = str(s.rank) if s.ranks == 1 else f"{s.rank}-{s.rank + s.ranks - 1}"
            layers = f"{s.first_layer}-{s.last_layer}" if s.last_layer > s.first_layer else s.first_layer
            ends = f"{'embedding, ' if s.has_embedding else ''}{layers}{', head' if s.has_head else ''}"
            size = human_bytes(memory[s.rank])
            rows.append((str(s.index), ranks, ends, f"{s.parameters:,}", f"{s.share:.1%}", size))
        columns = (
            Col("stage", right=True),
            Col("rank", right=True),
            Col("layers"),
            Col("parameters", right=True),
            Col("share", right=True),
            Col("memory of the rank", right=True, droppable=1),
        )
        print_table(columns, rows)
    if params:
        _print_parameters(made)


def _facts(made: RunPlan) -> dict[str, str]:
    """The numbers of the run, and the memory of the fullest rank by kind."""
    kinds = ", ".join(f"{kind} {human(count)}" for kind, count in made.by_kind().items())
    trainer = f"{made.trainer} on {made.world_size} ranks" if made.world_size > 1 else made.trainer
    if made.schedule is not None:
        trainer += f", schedule {made.schedule}, {len(made.stages)} stages"
    if made.bubble is not None:
        trainer += f", bubble {made.bubble:.1%}"
    elif "." in made.trainer:
        trainer += ", planned as if each rank held the whole model"
    ranks = made.global_batch // (made.micro_batch * made.accumulation)
    batch = f"{made.global_batch} {made.row}s = {made.micro_batch} x {made.accumulation} micro-steps"
    batch += f" x {ranks} ranks" if ranks > 1 else ""
    train = "not tokenized yet" if made.train_tokens is None else f"{made.train_tokens:,} tokens"
    total = made.tokens_per_step * made.steps if made.steps and made.tokens_per_step else None
    steps = "until the data ends; known when the corpus is tokenized"
    if made.steps is not None:
        steps = f"{made.steps:,} steps, {human(total) if total else 'unknown'} tokens"
        rows = made.steps * made.global_batch
        steps += f", {rows / made.train_samples:.2f} epochs" if made.train_samples else ""
    operations, per_token = "unknown", made.flops_per_token
    if per_token is not None and made.tokens_per_step is not None:
        operations = f"{human_flops(per_token)} per token, {human_flops(per_token * made.tokens_per_step)} per step"
        operations += f", {human_flops(per_token * total)} in all" if total else ""
    per_sequence = None if made.tokens_per_step is None else made.tokens_per_step // made.global_batch  # of both sides
    trained = {}
    if made.num_trained < made.num_parameters:
        trained = {"  trained": f"{made.num_trained:,}  ({made.num_trained / made.num_parameters:.2%})"}
    facts = {
        "model": f"{made.model}, vocabulary {_count(made.vocab_size)}, {_count(per_sequence)} tokens per {made.row}",
        "parameters": f"{made.num_parameters:,}  ({kinds})" if made.parameters else _UNKNOWN,
        **trained,
        "trainer": trainer,
        "precision": f"{made.precision} (auto: {made.auto_because})" if made.auto_because else made.precision,
        "batch": f"{batch}, {_count(made.tokens_per_step)} tokens per step",
        "train split": train if made.vocab_size and made.seq_len else "unknown: your data tells when it is made",
        "steps": steps,
        **{f"source {each.name}": str(each) for each in made.sources},
        "operations": operations,
        "memory": "unknown",
    }
    if (rank := made.fullest) is not None:
        where = "on one device" if made.world_size == 1 else f"on rank {rank.rank}, the fullest of {made.world_size}"
        if len({each.total for each in made.ranks}) == 1 < made.world_size:
            where = "on each rank"
        facts["memory"] = f"about {human_bytes(rank.total)} {where}"
        facts["  weights"] = human_bytes(rank.weights)
        facts["  gradients"] = human_bytes(rank.gradients)
        facts["  optimizer"] = _known(rank.optimizer)
        facts["  activations"] = f"{human_bytes(rank.activations)} (estimate)" if rank.activations else "unknown"
        if rank.buffers:
            facts["  buffers"] = f"{human_bytes(rank.buffers)} (estimate)"
        if rank.save_copy:
            facts["  copy of a save"] = f"{human_bytes(rank.save_copy)} in host memory (async_save)"
        facts["  fragments"] = f"{human_bytes(rank.fragments)} (estimate)"
        if rank.in_host_memory:
            facts["  in host memory"] = f"{human_bytes(rank.in_host_memory)} of it, not in the sum"
    return {**facts, "checkpoint": _known(made.checkpoint_bytes)}


_UNKNOWN = "unknown: your data tells its vocabulary when it is made; set model.vocab_size to know more"


def _count(number: int | None) -> str:
    return "unknown" if number is None else f"{number:,}"


def _known(size: int | None) -> str:
    return "unknown" if size is None else human_bytes(size)


def _print_parameters(made: RunPlan) -> None:
    columns = (
        Col("parameter", copied=True),
        Col("shape", droppable=1),
        Col("numbers", right=True, droppable=2),
        Col("kind", droppable=3),
        Col("group"),
        Col("optimizer"),
        Col("decay", right=True),
    )
    rows = [
        (
            r.name, " x ".join(map(str, r.shape)), f"{r.numel:,}", r.kind, r.group, r.optimizer,
            "-" if r.weight_decay is None else f"{r.weight_decay:g}",
        )
        for r in made.parameters
    ]  # fmt: skip
    print_table(columns, rows)


# -------------------------------------------------------------------------------------------------------------- diloco


def _print_diloco(shared: DilocoPlan, made: RunPlan) -> None:
    """What a worker exchanges with its server, and what other settings change."""
    settings, traffic = shared.settings, shared.traffic[0]
    every = f"every {traffic.steps:,} steps"
    every += f", of one of {settings.num_fragments} fragments" if settings.num_fragments > 1 else ""
    every += f", beside {settings.overlap} steps of training" if settings.overlap else ""

    def both_ways(times: float) -> str:
        return f"sends {human_bytes(traffic.sent * times)}, receives {human_bytes(traffic.received * times)}"

    facts = {
        "diloco": f"{settings.workers} workers, mode {settings.mode}, {settings.compression} up, "
        f"{settings.compression_down} down",
        "exchange": f"{every}; a worker {both_ways(1)}",
        "  in 1,000 steps": both_ways(1000 / traffic.steps),
    }
    if traffic.exchanges_per_hour is not None:
        facts["  in an hour"] = both_ways(traffic.exchanges_per_hour)
    if shared.exchanges is not None:
        sent, received = human_bytes(shared.sent_in_all), human_bytes(shared.received_in_all)
        facts["  in the whole run"] = f"{shared.exchanges:,} exchanges: sends {sent}, receives {received}"
    facts["  time"] = "unknown; set callbacks.diloco.bandwidth=BYTES_PER_SECOND"
    if traffic.seconds is not None:
        share = "give --step-time SECONDS to know its share" if traffic.share is None else f"{traffic.share:.1%} of all"
        facts["  time"] = f"{human_seconds(traffic.seconds)} at {human_bytes(shared.bandwidth)}/s both ways; {share}"
    lost = f", {human_bytes(shared.worker_error)} of what compression has lost" if shared.worker_error else ""
    where = "host memory" if made.world_size == 1 else "host memory of a worker's fullest rank"
    facts["  memory"] = (
        f"{human_bytes(shared.worker_snapshot)} of weights as published{lost}, {human_bytes(shared.worker_exchange)} "
        f"more in an exchange, in {where}"
    )
    facts["  on disk"] = f"a checkpoint of {_known(made.checkpoint_bytes)} before each exchange"
    facts["server's memory"] = f"about {human_bytes(shared.server_memory)}"
    print_facts(facts)
    columns = [
        Col("up"), Col("down"), Col("fragments", right=True), Col("steps", right=True), Col("sent", right=True),
        Col("received", right=True), Col("time", right=True), Col("of all", right=True),
    ]  # fmt: skip
    rows = [
        (each.compression, each.compression_down, str(each.num_fragments), f"{each.steps:,}", human_bytes(each.sent),
         human_bytes(each.received), human_seconds(each.seconds), "-" if each.share is None else f"{each.share:.1%}")
        for each in shared.traffic
    ]  # fmt: skip
    known = 6 if shared.bandwidth is None else 7 if shared.step_time is None else 8
    typer.echo("An exchange under these settings, and under others:")
    print_table(columns[:known], [row[:known] for row in rows])


# --------------------------------------------------------------------------------------------------------------- --fit


def show_fit(
    compose: Callable[[Sequence[str]], Loaded],
    words: Sequence[str],
    memory: str | None,
    *,
    confirms: bool,
    as_json: bool,
) -> None:
    """Find and print what fits; ``compose`` makes a config of words. Raises ConfigError and SetupError."""

    def config_with(more: Sequence[str]) -> Config:
        return compose([*words, *more]).config

    from forgather_cli.plan.confirm import confirm
    from forgather_cli.plan.fit import budget_of, find_fit
    from forgather_cli.plan.run import make_plan

    config = config_with([])
    check_model(config)
    with only_json(as_json):
        made = make_plan(config)
        with doing("looking for settings that fit"):
            fit = find_fit(config, made.micro_batch, budget_of(config, memory), config_with)
        if not as_json:
            print_fit(fit, config, made)
        found = None
        if confirms and fit.sizes:
            found = confirm(config, made, fit.sizes, fit.budget, partial(print, file=sys.stderr, flush=True))
    if as_json:
        document = {**asdict(fit), "fits": fit.fits, "confirmed": None if found is None else asdict(found)}
        document |= {"limit": fit.limit, "free": fit.free}
        document["budget"]["usable"] = fit.budget.usable
        del document["sizes"], document["beyond"]
        document["largest"] = {key: document["largest"][key] for key in ("micro_batch", "memory")}
        print_json(document)
    elif found is not None:
        before = f"; out of memory with {', '.join(map(str, found.too_large))}" if found.too_large else ""
        size = f"per_device_train_batch_size={found.micro_batch}"
        print_facts({"confirmed": f"{size} trains, peak {human_bytes(found.peak)} on rank 0{before}"})


def print_fit(fit: Fit, config: Config, made: RunPlan) -> None:
    """Tables for people."""
    budget = fit.budget
    back = f"{human_bytes(budget.kept_back)} of it kept back for the process"
    fits = "fits" if fit.fits else f"does not fit into {human_bytes(budget.usable)}"
    now = f"{fit.now} sequence{'s' if fit.now != 1 else ''} at a time"
    facts = {
        "memory": f"{human_bytes(budget.total)} ({budget.source}), {back}",
        "now": f"{now}, about {human_bytes(fit.now_memory)}: {fits}",
        "largest": _largest(fit, config, made),
    }
    if fit.largest.micro_batch is not None and fit.limit is not None:
        if fit.beyond is not None:
            limit, size = f"memory: the next size, {fit.beyond[0]}, needs about {human_bytes(fit.beyond[1])}", ""
        else:
            limit = f"global_batch_size={config.global_batch_size}, not memory"
            size = "; a larger one, or a larger model or seq_len, has room"
        facts["limited by"] = f"{limit}; {human_bytes(fit.free)} stay free{size}"
    print_facts(facts)
    if fit.ways:
        typer.echo("To fit more:")
        columns = (
            Col("settings", copied=True),
            Col("micro-batch", right=True),
            Col("memory", right=True),
            Col("step time", right=True, droppable=1),
            Col("cost", fold=True),
        )
        rows = []
        for way in fit.ways:
            time = "-" if way.step_time is None else f"{way.step_time:.2f}x"
            rows.append((" ".join(way.overrides), str(way.micro_batch), human_bytes(way.memory), time, way.cost))
        print_table(columns, rows)


def _largest(fit: Fit, config: Config, made: RunPlan) -> str:
    size, memory = fit.largest.micro_batch, fit.largest.memory
    if size is None:
        return f"none: the smallest micro-batch needs about {human_bytes(fit.needed)}"
    text = f"per_device_train_batch_size={size}, about {human_bytes(memory)}"
    if config.global_batch_size is None:
        return f"{text}; without a global_batch_size it changes the size of a step"
    steps = made.micro_batch * made.accumulation // size
    why = f", all of a step's {size} per rank" if size == fit.most else ""
    return f"{text}{why or f' ({steps} micro-steps of global_batch_size={config.global_batch_size})'}"
