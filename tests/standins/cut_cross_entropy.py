"""``linear_cross_entropy`` with the arguments of cut-cross-entropy 25.1.1, in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    e: Tensor,
    c: Tensor,
    targets: Tensor,
    ignore_index: int = -100,
    softcap: float | None = None,
    reduction: str = "mean",
    shift: bool = False,
    filter_eps: float | str | None = "high",
    impl: str = "cce",
) -> Tensor:
    assert e.size()[:-1] == targets.size()
    assert impl == "torch_compile", "the other one needs a GPU"
    assert (targets != ignore_index).any(), "nobody says what comes of no rows"
    assert filter_eps is None, "the filter leaves out the gradients of unlikely tokens"
    assert softcap is None
    assert not shift
    return F.cross_entropy((e @ c.T).float(), targets, ignore_index=ignore_index, reduction=reduction)
