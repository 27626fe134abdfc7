"""A small mixture of text, and loaders of it."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

from chats import conversation, write_lines

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.mixture.stretches import Mixture
from forgather_cli.data.splits import DataSplits
from forgather_cli.worker import read_data

RECIPE = """
defaults: [train, override model: nano, override data: mixture, _self_]
data:
  tokenizer: bytes
  seq_len: 32
  sources:
    prose: {type: text, files: [prose.txt], weight: 0.6}
    code: {type: text, files: [pages.jsonl], weight: 0.3, packing: best_fit}
    notes: {type: text, files: [notes.txt], weight: 0.1, packing: pad}
  weight_schedule:
    - {at: 4, weights: {prose: 0.6, code: 0.3, notes: 0.1}}
    - {at: 0.8, weights: {prose: 0.2, code: 0.8, notes: 0}}
max_steps: 12
global_batch_size: 8
"""
QUIET = ["precision=fp32", "callbacks=minimal", "device=cpu", "logging_steps=1", "warmup_steps=1", "save_steps=4",
         "save_total_limit=null"]  # fmt: skip


def write_files() -> None:
    """The recipe ``mix.yaml`` and what it reads."""
    Path("prose.txt").write_text("".join(f"A line of prose, number {n}, of no use.\n" for n in range(90)))
    write_lines(Path("pages.jsonl"), [{"text": f"A page, number {n}. " * (1 + n % 4)} for n in range(60)])
    Path("notes.txt").write_text("".join(f"note {n}\n" for n in range(60)))
    write_lines(Path("chats.jsonl"), [{"messages": conversation(n)} for n in range(30)])
    Path("mix.yaml").write_text(RECIPE)


def config(*words: str) -> Config:
    return load_config("mix.yaml", [*QUIET, *words]).config


def data(*words: str) -> DataSplits:
    return read_data(config(*words))


def loader(dataset: Any, global_batch: int, micro_batch: int, **given: Any) -> TrainLoader:
    return TrainLoader(dataset, **{"seed": 1, **given}, global_batch_size=global_batch, micro_batch_size=micro_batch)


def settle(made: TrainLoader, position: Any, step: int, total: int) -> bool:
    """The loader goes to a position as training does, at which the run is at ``step`` of ``total``. True: the order
    from there on was another one before."""
    settled = made.data.settled(position, step, total)
    made.load_state_dict(settled)
    return settled != position


def place(mixture: Mixture, position: int) -> tuple[str, int, int]:
    """(source, pass, index in the pass)."""
    [[source], _, [number], [index]] = mixture.deal(position, position + 1).tolist()
    return mixture.names[source], number, index


def quotas(mixture: Mixture, position: int) -> dict[str, Fraction]:
    """What each source should have had since its stretch began."""
    ledger, _ = mixture._ledgers_to(position)[-1]
    values, unit = ledger.dealing.quotas.at(position - ledger.stretch.begin)
    return {name: Fraction(value, unit) for name, value in zip(ledger.names, values, strict=True)}


def at(state: Any, made: TrainLoader) -> TrainLoader:
    """It goes on from a position."""
    made.load_state_dict(state)
    return made
