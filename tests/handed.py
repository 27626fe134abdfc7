"""A callback that keeps what each rank trains on: ``+callbacks.handed._target_=handed.Handed``.

``OUTPUT_DIR/handed-RANK.jsonl`` gets a line for each step: its number, whose slice of the data it is, and the ids and
labels of its rows, as the strategy takes them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tiny
import torch
import torch.distributed as dist
from torch import Tensor

from forgather_cli.callbacks.base import TrainerCallback


class Handed(TrainerCallback):
    def __init__(self, stop_after: int | None = None) -> None:
        """``stop_after``: the step after which this process ends, with a checkpoint."""
        self._stop_after = stop_after

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        strategy = kwargs["trainer"].strategy
        self._slice, self._steps = strategy.data_rank, tiny.note_batches(strategy)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        [batches], self._steps[:] = list(self._steps), []
        rows = {key: torch.cat([batch[key] for batch in batches]).tolist() for key in ("input_ids", "labels")}
        with Path(args.output_dir, f"handed-{rank}.jsonl").open("a") as file:
            file.write(json.dumps({"step": state.global_step, "slice": self._slice, **rows}) + "\n")
        control.should_training_stop |= state.global_step == self._stop_after


def rows_of(run: Path | str) -> dict[int, tuple[Tensor, Tensor]]:
    """(ids, labels) of the global batch of each step, in the order of its positions, from all slices. What ranks of
    one slice have is compared."""
    found: dict[int, dict[int, Any]] = {}
    for path in Path(run).glob("handed-*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            rows = line["input_ids"], line["labels"]
            assert found.setdefault(line["step"], {}).setdefault(line["slice"], rows) == rows, (run, line["step"])
    return {
        step: tuple(torch.cat([torch.tensor(slices[n][part]) for n in sorted(slices)]) for part in (0, 1))
        for step, slices in sorted(found.items())
    }
