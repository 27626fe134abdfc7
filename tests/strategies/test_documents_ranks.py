"""Documents of packed rows kept apart by ``varlen_attn``, from the loader to the weights, under every strategy."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parity import LAYOUTS, Share, assert_parity, composed_of, corpus, merged, run_rank, train
from ranks import run_ranks

from forgather_cli.config.schema import Config
from forgather_cli.data.loaders import loader
from forgather_cli.data.loaders.prefetch import with_starts
from forgather_cli.models import attention, decoder

WORDS = (
    *corpus(), "data.isolate_documents=true", "global_batch_size=12", "max_steps=6", "eval_steps=3",
    "optimizer.eps=1e-6",
)  # fmt: skip


def with_kernels(config: Config, path: Path) -> tuple[Share, int]:
    """A rank that does what it does on a GPU, with the kernel's stand-in, and how often that ran."""
    sys.path.append(str(Path(__file__).parents[1] / "standins"))
    standin = importlib.import_module("varlen_on_cpu")
    standin.calls.clear()

    def moved(items: Iterator[Any], device: Any, pin: Any, starts: bool) -> Iterator[Any]:
        for batches, rest in items:
            yield [with_starts(batch) if starts else batch for batch in batches], rest

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "DEVICES", ("cpu",))
        patch.setattr(decoder, "HALF", (torch.float32,))
        patch.setattr(loader, "to_device", moved)
        return run_rank(config, path), len(standin.calls)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("name", ["single", "ddp 2", "fsdp2 2", "1F1B 2"])
def test_every_strategy_trains_as_one_device_does_with_masks(name: str, tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    words = (*WORDS, f"model.num_hidden_layers={layout.layers}")
    config = composed_of((*words, *layout.overrides, f"output_dir={tmp_path / 'found'}"))
    given = config, tmp_path / "found"
    done = [with_kernels(*given)] if layout.ranks == 1 else run_ranks(layout.ranks, with_kernels, *given)
    assert all(calls for _, calls in done)
    found = merged([share for share, _ in done], tmp_path / "found")
    assert_parity(found, train(LAYOUTS["single"], words, tmp_path / "masks"))
