"""``forgather plan``: what a run will need, before it runs."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.common import (
    AsJson,
    Col,
    ConfigDir,
    Words,
    human,
    human_bytes,
    human_flops,
    load,
    only_json,
    print_facts,
    print_json,
    print_table,
)

if TYPE_CHECKING:
    from forgather_cli.plan import RunPlan


def plan(
    words: Words = None,
    config_dir: ConfigDir = None,
    params: Annotated[bool, typer.Option("--params", help="List every parameter with its optimizer group.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show parameters, steps, operations and memory of a run before it runs.

    Nothing is trained, tokenized or written. The number of tokens is known only
    where the corpus was tokenized before.
    """
    loaded = load(words, config_dir)
    from forgather_cli.plan import make_plan

    with only_json(as_json):
        made = make_plan(loaded.config)
    if as_json:
        print_json(plan_document(made, params=params))
    else:
        print_plan(made, params=params)


def plan_document(made: RunPlan, *, params: bool = False) -> dict[str, Any]:
    """The plan as plain values; parameters one by one only if asked for."""
    document = {key: value for key, value in asdict(made).items() if key != "parameters"}
    document |= {"num_parameters": made.num_parameters, "parameters_by_kind": made.by_kind()}
    document |= {"memory_bytes": made.memory_bytes}
    return {**document, "parameters": [asdict(row) for row in made.parameters]} if params else document


def print_plan(made: RunPlan, *, params: bool = False) -> None:
    """Tables for people."""
    print_facts(dict(_rows(made)))
    if params:
        _print_parameters(made)


def _rows(made: RunPlan) -> list[tuple[str, str]]:
    kinds = ", ".join(f"{kind} {human(count)}" for kind, count in made.by_kind().items())
    sequences = f"{made.global_batch} sequences = {made.micro_batch} x {made.accumulation} micro-steps"
    total = made.tokens_per_step * made.steps if made.steps else None
    return [
        ("model", f"{made.model}, vocabulary {made.vocab_size:,}, {made.seq_len} tokens per sequence"),
        ("parameters", f"{made.num_parameters:,}  ({kinds})"),
        ("batch", f"{sequences}, {made.tokens_per_step:,} tokens per step"),
        ("train split", f"{made.train_tokens:,} tokens" if made.train_tokens else "not tokenized yet"),
        ("steps", _steps(made, total)),
        ("operations", _flops(made, total)),
        ("memory", f"about {human_bytes(made.memory_bytes)} on one device"),
        ("  weights", human_bytes(made.weight_bytes)),
        ("  gradients", human_bytes(made.gradient_bytes)),
        ("  optimizer", human_bytes(made.optimizer_bytes) if made.optimizer_bytes is not None else "unknown"),
        ("  activations", f"{human_bytes(made.activation_bytes)} (estimate)" if made.activation_bytes else "unknown"),
        ("checkpoint", human_bytes(made.checkpoint_bytes) if made.checkpoint_bytes is not None else "unknown"),
    ]  # fmt: skip


def _flops(made: RunPlan, total: int | None) -> str:
    per_token = made.flops_per_token
    in_all = f", {human_flops(per_token * total)} in all" if total else ""
    return f"{human_flops(per_token)} per token, {human_flops(per_token * made.tokens_per_step)} per step{in_all}"


def _steps(made: RunPlan, total: int | None) -> str:
    if made.steps is None:
        return "until the data ends; known when the corpus is tokenized"
    epochs = f", {total / made.train_tokens:.2f} epochs" if made.train_tokens and total else ""
    return f"{made.steps:,} steps, {human(total)} tokens{epochs}"


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
