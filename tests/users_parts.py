"""Parts of a user's own that break, each at the ``fault`` that it is given: ``_target_=users_parts.<name>``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR


def oops(fault: str, here: str) -> None:
    if fault == here:
        raise KeyError(f"oops in {here}")


class Words(nn.Module):
    def __init__(self, vocab_size: int, width: int = 8, fault: str = "") -> None:
        super().__init__()
        oops(fault, "constructor")
        if fault == "memory":
            torch.empty(1 << 60)
        self.fault, self.count = fault, 0
        self.embed = nn.Embedding(vocab_size, width)
        self.places = nn.Embedding(8, width) if fault == "places" else None
        self.head = nn.Linear(width, 5 if fault == "vocabulary" else vocab_size)

    def forward(self, input_ids: Tensor) -> Any:
        self.count += 1
        oops(self.fault, "forward")
        oops(self.fault, f"forward {self.count}")
        input_ids = input_ids[:, :-1] if self.fault == "tokens" else input_ids
        hidden = self.embed(input_ids)
        if self.places is not None:
            hidden = hidden + self.places(torch.arange(input_ids.shape[1]))
        if self.fault == "gradient":
            hidden = self.embed(input_ids).detach()
            return hidden @ self.head.weight.detach().T
        return None if self.fault == "nothing" else self.head(hidden)


class Fixed(Words):
    """A model that is not told how many tokens there are."""

    def __init__(self) -> None:
        super().__init__(60)


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """16 samples of 16 tokens below 50."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        oops(self.fault, "sample")
        ids = torch.arange(number, number + 16) % 50
        labels = ids.clone()
        changes = {"beyond": (ids, 50), "negative": (ids, -1), "label": (labels, 50), "negative label": (labels, -7)}
        if self.fault in changes:
            changed, value = changes[self.fault]
            changed[3] = value
        return {"input_ids": ids.float() if self.fault == "float" else ids, "labels": labels}


def rows(fault: str = "") -> dict[str, Any]:
    oops(fault, "constructor")
    return {"train": Rows(fault), "eval": Rows(fault.removeprefix("eval ")), "vocab_size": 50, "seq_len": 16}


class Ragged(Rows):
    """As many of 4 to 16 tokens, the first of 4."""

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        return {key: values[: 4 + 5 * number % 13] for key, values in super().__getitem__(number).items()}


def ragged() -> dict[str, Any]:
    """Data whose rows differ in length, and that do not say which is the longest."""
    return {"train": Ragged(""), "vocab_size": 50}


def loss(logits: Tensor, labels: Tensor, fault: str = "") -> Any:
    oops(fault, "call")
    value = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)
    broken = {"vector": value.expand(3), "gradient": value.detach(), "float": 3.0, "nothing": None, "text": "a"}
    return broken.get(fault, value)


class Signs(torch.optim.Optimizer):
    def __init__(self, params: Any, lr: float, fault: str = "") -> None:
        oops(fault, "constructor")
        self.fault = fault
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        oops(self.fault, "step")


class NoRate(torch.optim.Optimizer):
    """An optimizer without lr."""

    def __init__(self, params: Any) -> None:
        super().__init__([{"params": group["params"]} for group in params], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise AssertionError("is not reached")


class Halves(LambdaLR):
    def __init__(self, optimizer: Any, warmup_steps: int = 2, fault: str = "") -> None:
        oops(fault, "constructor")
        self.fault = fault
        super().__init__(optimizer, lambda step: 0.5**step)

    def step(self, epoch: Any = None) -> None:
        if self.last_epoch > 0:
            oops(self.fault, "step")
        super().step()


class Tell:
    def __init__(self, fault: str = "") -> None:
        oops(fault, "constructor")
        self.fault = fault

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        oops(self.fault, "event")
