"""True norms of full parameters, however ranks share them: each rank adds up its rows, one sum over ranks is the whole.

Legend: N parameters of the run, on whichever rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli.distributed import all_sum, gather
from forgather_cli.models.parts import named_tensors
from forgather_cli.shards import box_of, local, locals_of, needs_exchange


class FullParameters:
    """The parameters of a Trainer's model over all ranks, by their names in the full model; tied ones once.

    Where each rank trains by itself (post-local SGD), values are root mean squares over the ranks, as the logged
    gradient norm is; while ranks agree that is everybody's value.
    """

    def __init__(self, trainer: Any, *, trained_only: bool = False) -> None:
        """Collective."""
        strategy = trainer.strategy
        self.device: torch.device = strategy.device
        apart = strategy.gradient_sharing is not None
        self._group: Any = trainer.run.world.group if apart else strategy.model_group
        self._copies = trainer.run.world.size if apart else 1
        held = {n: t for n, t in named_tensors(strategy.parts).items() if isinstance(t, nn.Parameter)}
        own = {n: p for n, p in held.items() if p.requires_grad or not trained_only}
        counted = {n: p for n, p in own.items() if p not in strategy.duplicates}
        mine = {n: (tuple(p.shape), torch.empty(0, dtype=p.dtype), needs_exchange(p)) for n, p in counted.items()}
        full = {name: facts for of_rank in gather(mine, trainer.run.cpu_group) for name, facts in of_rank.items()}
        self.shapes = {name: shape for name, (shape, _, _) in full.items()}
        """Of the full parameters, by name; equal on all ranks, also in their order."""
        self.cut_by_columns = {name for name, (_, _, is_cut) in full.items() if is_cut}
        """Names of those of which no rank holds whole rows."""
        self._dtypes = {name: empty.dtype for name, (_, empty, _) in full.items()}
        self.held = [(place, counted[name]) for place, name in enumerate(self.shapes) if name in counted]
        """What this rank counts: places in ``shapes`` and parameters, of which it may hold some rows only."""
        self._by_device: list[tuple[Tensor, list[nn.Parameter], Tensor]] = []
        """Places, parameters, and what stands for a missing gradient, by where they are: with cpu_offload of fsdp2 rows
        are in host memory, and 0-dim parameters on the device."""
        for device in dict.fromkeys(p.device for _, p in self.held):
            found = [(place, p) for place, p in self.held if p.device == device]
            places = torch.tensor([place for place, _ in found], device=self.device)
            self._by_device.append((places, [p for _, p in found], torch.zeros((), device=device)))

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Collective, each step of it. Every parameter by name, whole, as a copy on the device."""
        held = dict(self.held)
        for place, (name, shape) in enumerate(self.shapes.items()):
            whole = torch.zeros(shape, dtype=self._dtypes[name], device=self.device)
            if place in held:
                whole[box_of(held[place]).slices] = local(held[place]).detach()
            # of a byte that one rank has, and the others as 0, the sum is that byte: exact, and for every dtype
            all_sum(whole.view(-1).view(torch.uint8), self._group if self._copies == 1 else None)
            yield name, whole

    def weights(self) -> Tensor:
        """Collective. Squared L2 norms of the parameters, (N,) float64 on the device."""
        return self._squares((places, list(parameters)) for places, parameters, _ in self._by_device)

    def gradients(self) -> Tensor:
        """Collective. Squared L2 norms of the gradients, (N,) float64 on the device; 0 where there is none."""
        return self._squares(
            (places, [zero if p.grad is None else p.grad for p in parameters])
            for places, parameters, zero in self._by_device
        )

    def _squares(self, found: Iterable[tuple[Tensor, list[Tensor]]]) -> Tensor:
        """Norms as fp32 has them; float64 lets no square of one overflow or vanish, and no sum lose digits."""
        squares = torch.zeros(len(self.shapes), dtype=torch.float64, device=self.device)
        with torch.no_grad():
            for places, tensors in found:
                norms = torch.stack(torch._foreach_norm(locals_of(tensors), 2, torch.float32))
                squares[places] = norms.to(squares).square_()
        return self.whole(squares)

    def whole(self, shares: Tensor) -> Tensor:
        """Collective. What is quadratic in a parameter, in place, from this rank's share of it."""
        all_sum(shares, self._group)
        return shares if self._copies == 1 else shares.div_(self._copies)


class HostCopy:
    """Numbers on their way from the device to the host, which waits for them when they are read and not before."""

    def __init__(self, numbers: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers.device.type == "cuda":
            host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            numbers = host.copy_(numbers, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()
        self._numbers = numbers

    @property
    def is_here(self) -> bool:
        """True if nothing has to be waited for, ever: what is computed on the CPU."""
        return self._event is None

    def read(self) -> list[float]:
        if self._event is not None:
            self._event.synchronize()
        numbers: list[float] = self._numbers.tolist()
        return numbers
