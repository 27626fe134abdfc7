"""``forgather plan --fit`` on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from forgather_cli.cli.output import Col, human_bytes, only_json, print_facts, print_json, print_table

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded
    from forgather_cli.config.schema import Config
    from forgather_cli.plan import RunPlan
    from forgather_cli.plan.confirm import Confirmed
    from forgather_cli.plan.fit import Fit, Room


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

    from forgather_cli.plan import make_plan
    from forgather_cli.plan.confirm import confirm
    from forgather_cli.plan.device_memory import budget_of
    from forgather_cli.plan.fit import find_fit

    config = config_with([])
    with only_json(as_json):
        made = make_plan(config)
        fit = find_fit(config, made.micro_batch, budget_of(config, memory), config_with)
        if not as_json:
            print_fit(fit, config, made)
        found = confirm(config, made, fit.sizes, fit.budget, _tell) if confirms and fit.sizes else None
    if as_json:
        print_json(_document(fit, found))
    elif found is not None:
        before = f"; out of memory with {', '.join(map(str, found.too_large))}" if found.too_large else ""
        size = f"per_device_train_batch_size={found.micro_batch}"
        print_facts({"confirmed": f"{size} trains, peak {human_bytes(found.peak)} on rank 0{before}"})


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _document(fit: Fit, found: Confirmed | None) -> dict[str, Any]:
    document = {**asdict(fit), "fits": fit.fits}
    document["budget"]["usable"] = fit.budget.usable
    del (
        document["sizes"],
        document["largest"]["overrides"],
        document["largest"]["cost"],
        document["largest"]["step_time"],
    )
    return {**document, "confirmed": None if found is None else asdict(found)}


def print_fit(fit: Fit, config: Config, made: RunPlan) -> None:
    """Tables for people."""
    budget = fit.budget
    back = f"{human_bytes(budget.kept_back)} of it kept back for the process and fragments"
    fits = "fits" if fit.fits else f"does not fit into {human_bytes(budget.usable)}"
    print_facts(
        {
            "memory": f"{human_bytes(budget.total)} ({budget.source}), {back}",
            "now": f"{_sequences(fit.now)}, about {human_bytes(fit.now_memory)}: {fits}",
            "largest": _largest(fit, config, made),
        }
    )
    if fit.ways:
        typer.echo("To fit more:")
        _print_ways(fit.ways)


def _sequences(count: int) -> str:
    return f"{count} sequence{'s' if count != 1 else ''} at a time"


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


def _print_ways(ways: Sequence[Room]) -> None:
    columns = (
        Col("settings"),
        Col("micro-batch", right=True),
        Col("memory", right=True),
        Col("step time", right=True, droppable=1),
        Col("cost", droppable=2),
    )
    times = ["-" if way.step_time is None else f"{way.step_time:.2f}x" for way in ways]
    print_table(columns, [
        (" ".join(way.overrides), str(way.micro_batch), human_bytes(way.memory), time, way.cost)
        for way, time in zip(ways, times, strict=True)
    ])  # fmt: skip
