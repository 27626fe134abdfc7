"""Documents kept apart by kernels instead of a mask, on a CPU: borders, blocks, gradients, memory, recompilation.

``varlen_attn`` is torch's own down to its kernel, which stands in; flex attention runs forward alone (its backward
raises on a CPU).
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_decoder import decoder, ids
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask, create_mask

from forgather_cli.config.schema import RunSettings
from forgather_cli.data.loaders.prefetch import with_starts
from forgather_cli.models import attention
from forgather_cli.models.decoder import causal_mask

T = 300
LENGTHS = [[40, 1, 129, 130], [300], [128, 128, 44], [3, 297]]


def documents(lengths: list[list[int]] = LENGTHS) -> Tensor:
    return torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]).int()


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Models on a CPU do what they do on a GPU, and ``varlen_attn`` takes fp32."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "standins")
    standin = importlib.import_module("varlen_on_cpu")
    monkeypatch.setattr(attention, "DEVICES", ("cpu",))
    monkeypatch.setattr(attention, "HALF", (torch.float32,))
    monkeypatch.setattr("forgather_cli.models.decoder.HALF", (torch.float32,))
    standin.calls.clear()
    return standin


SHAPES: dict[str, dict[str, Any]] = {
    "heads": {},
    "grouped": {"num_key_value_heads": 2},
    "norms": {"qk_norm": True, "num_key_value_heads": 1},
    "window": {"sliding_window": 70, "num_key_value_heads": 2},
    "wide window": {"sliding_window": 1000},
}


@pytest.mark.parametrize("name", SHAPES)
def test_varlen_gives_the_logits_and_gradients_of_the_mask(name: str, kernels: Any, monkeypatch: Any) -> None:
    model, tokens = decoder(**SHAPES[name]), ids(4, T)
    batch = with_starts({"document_ids": documents()})
    weights = torch.randn(4, T, 101, generator=torch.Generator().manual_seed(2))

    def run(**inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        logits = model(tokens, **inputs)
        (logits * weights).sum().backward()
        return logits, [p.grad / p.grad.abs().max() for p in model.parameters() if p.grad is not None]

    found = run(**batch)
    assert len(kernels.calls) == 2
    with monkeypatch.context() as patch:
        patch.setattr(attention, "DEVICES", ())
        expected = run(document_ids=documents())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert len(kernels.calls) == 2  # the mask's are not its
