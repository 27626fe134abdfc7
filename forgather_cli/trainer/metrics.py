"""Training metrics of one log interval, kept on the device until they are read.

Legend: N parameters, L layers, H hidden size, T sequence length in tokens.
"""

from __future__ import annotations

import math
import re
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from forgather_cli import distributed
from forgather_cli.data.loaders.collate import Counts
from forgather_cli.distributed import World, gather
from forgather_cli.documents.fields import AMOUNT, COUNT, NUMBER, FieldKind, check_fields, optional, several
from forgather_cli.loss.base import NamedSums
from forgather_cli.models.parts import num_elements

_SUM = FieldKind(lambda value: isinstance(value, Tensor) and value.numel() == 1, "one number")
_KINDS = {
    **dict.fromkeys(("loss_sum", "norm_square_sum", "norm_max"), _SUM),
    "counts": several(COUNT, COUNT, COUNT),
    "totals": several(COUNT, COUNT, AMOUNT, NUMBER, COUNT),
}


@dataclass(frozen=True)
class Interval:
    """What lies between two log reads of this process; times in seconds, ``flops`` in floating-point operations."""

    steps: int
    seconds: float
    active_seconds: float
    """``seconds`` without evaluation and saving."""
    data_seconds: float
    tokens: int
    flops: float


_TOGETHER = 16
"""Steps whose losses and norms are added up at once: a kernel costs a fifth when it follows its like."""


class TrainMetrics:
    """Accumulates losses and norms on the device and counts and times on the host.

    ``state_dict`` holds the open interval's sums and the run's totals, so that a resumed run logs the same numbers;
    times and speeds are of this process alone.
    """

    def __init__(
        self,
        device: torch.device,
        world: World,
        skip_steps: int,
        flops: Flops,
        *,
        norms_differ: bool = False,
        may_overflow: bool = False,
        sources: Sequence[str] = (),
        names: Sequence[str] = (),
    ) -> None:
        """``norms_differ``: ranks have gradient norms of their own, whose mean square is logged. ``may_overflow``: the
        number of ``skipped_steps`` is logged. ``sources``: of a mixture; ``names``: of sums that a loss adds to.
        """
        self._world, self._norms_differ, self._flops = world, norms_differ, flops
        self._skip_steps = skip_steps  # steps of this process whose times are not counted (compilation, warm-up)
        # float64: a sum of 1000 losses weighted by targets keeps more digits than one fp32 loss has
        self._shared = torch.zeros(2 * len(names) + 2, dtype=torch.float64, device=device)
        self.named = NamedSums(names, self._shared[:-2].view(2, len(names)))
        self._loss_sum, self._norm_square_sum = self._shared[-2], self._shared[-1]
        self._sources, self._by_source = sources, Counter[str]()  # tokens
        self._norm_max = torch.zeros((), device=device)
        self._losses: list[tuple[Tensor, int]] = []  # not in the sums yet, with what they are divided by
        self._norms: list[Tensor] = []
        self._steps = self._targets = self._units = self._tokens = self._decoder_tokens = 0
        self._num_bytes: int | None = 0  # of the targets; None: not known of this interval
        self._skipped = 0  # of the interval's steps
        self._total_skipped = 0 if may_overflow else None
        self.total_tokens = self.total_samples = 0
        self.total_flops = 0.0
        self._run_loss = 0.0
        self._run_targets = self._run_units = 0
        self._process_steps = 0
        # of this process's whole work
        self.data_seconds = 0.0
        """Spent waiting for data."""
        self.evaluation_seconds = self.save_seconds = self.profile_seconds = 0.0
        """Not active."""
        self.sync_seconds = 0.0
        """Spent waiting for the step sync of all ranks."""
        self.exchange_seconds = 0.0
        """Spent in averaging weights with other jobs, and waiting for them."""
        self.first_step_seconds = 0.0
        """Spent in the first step, where things are compiled and warmed up."""
        self.restart_clock()

    def restart_clock(self) -> None:
        """Begin a new timed interval now."""
        self._mark = time.perf_counter()
        self._data_before, self._paused_before = self.data_seconds, self._paused_seconds
        self._timed_steps = self._timed_tokens = 0
        self._timed_flops = 0.0

    @property
    def _paused_seconds(self) -> float:
        return self.evaluation_seconds + self.save_seconds + self.profile_seconds

    def add(self, counts: Counts, loss: Tensor, norm: Tensor, *, skipped: bool = False) -> None:
        """Count one optimizer step: what it held over all ranks, this rank's share of its loss, its global gradient
        norm.

        ``skipped`` (collective, waits for the device): its gradients overflowed, so its norm says nothing, and its loss
        counts only if it is finite.
        """
        if skipped:
            self._skipped += 1
            self._total_skipped = (self._total_skipped or 0) + 1
        else:
            self._norms.append(norm)
        if not skipped or bool(distributed.all_sum(loss.clone(), self._world.group).isfinite()):
            self._losses.append((loss, counts.units))
            self._targets += counts.targets
            self._units += counts.units
            if self._num_bytes is not None:
                self._num_bytes += counts.num_bytes
            if len(self._losses) == _TOGETHER:
                self._add_up()
        flops = self._flops.total(counts.positions, counts.square_lengths, counts.decoder_positions)
        self._steps += 1
        self._tokens += counts.tokens
        self._by_source.update(dict(zip(self._sources, counts.by_source, strict=True)))
        self._decoder_tokens += counts.decoder_tokens
        self.total_tokens += counts.tokens
        self.total_samples += counts.samples
        self.total_flops += flops
        self._process_steps += 1
        if self._process_steps == 1:
            self.first_step_seconds = time.perf_counter() - self._mark - (self.data_seconds - self._data_before)
        if self._process_steps <= self._skip_steps:
            self.restart_clock()
        else:
            self._timed_steps += 1
            self._timed_tokens += counts.tokens
            self._timed_flops += flops

    def _add_up(self) -> None:
        for loss, units in self._losses:
            self._loss_sum.add_(loss, alpha=units)
        for norm in self._norms:
            self._norm_square_sum.addcmul_(norm, norm)
            torch.maximum(self._norm_max, norm, out=self._norm_max)
        self._losses, self._norms = [], []

    @property
    def total_targets(self) -> int:
        """Of the whole run."""
        return self._run_targets + self._targets

    @property
    def pending(self) -> bool:
        """True if steps have been counted since the last read."""
        return self._steps > 0

    def read(self) -> tuple[dict[str, float], Interval]:
        """Collective. Close the interval: the one point where metrics reach the host. Returns (logs, interval)."""
        self._add_up()
        sums = torch.cat([self._shared, self._norm_max.double()[None]])
        if self._world.group is not None:
            shared = len(sums) - (1 if self._norms_differ else 2)
            sums[:shared] = distributed.all_sum(sums[:shared].clone(), self._world.group)
            sums[-2:shared] /= self._world.size
        *named, loss_sum, norm_square_sum, norm_max = sums.tolist()
        self._run_loss += loss_sum
        self._run_targets += self._targets
        self._run_units += self._units
        seconds = max(time.perf_counter() - self._mark, 1e-9)
        interval = Interval(
            steps=self._timed_steps,
            seconds=seconds,
            active_seconds=max(seconds - (self._paused_seconds - self._paused_before), 1e-9),
            data_seconds=self.data_seconds - self._data_before,
            tokens=self._timed_tokens,
            flops=self._timed_flops,
        )
        logs: dict[str, float] = {}  # without what no step of the interval had, since all of them overflowed
        if self._targets or not self._skipped:
            logs["loss"] = loss_sum / max(self._units, 1)
        if self._num_bytes:
            logs["bits_per_byte"] = loss_sum / math.log(2) / self._num_bytes
        if self._steps > self._skipped or not self._steps:
            logs["grad_norm"] = math.sqrt(norm_square_sum / max(self._steps - self._skipped, 1))
            logs["max_grad_norm"] = norm_max
        if self._total_skipped is not None:
            logs["skipped_steps"] = self._total_skipped
        logs |= {"tokens": self._tokens, "targets": self._targets}
        logs |= {"total_tokens": self.total_tokens, "total_flos": self.total_flops}
        if self._decoder_tokens:
            logs["encoder_tokens"] = self._tokens - self._decoder_tokens
            logs["decoder_tokens"] = self._decoder_tokens
        logs |= {f"tokens/{name}": self._by_source[name] for name in self._sources}
        parts = zip(self.named.names, named, named[len(self.named.names) :], strict=False)
        logs |= {name: total / count for name, total, count in parts if count}
        if interval.steps:
            logs["tok_per_sec"] = interval.tokens / interval.active_seconds
            logs["step_time"] = interval.active_seconds / interval.steps
            logs["data_time"] = interval.data_seconds / interval.steps
        for kept in (self._shared, self._norm_max):
            kept.zero_()
        self._by_source.clear()
        self._steps = self._targets = self._units = self._tokens = self._decoder_tokens = 0
        self._num_bytes = self._skipped = 0
        self.restart_clock()
        return logs, interval

    def seconds_by_kind(self, total: float) -> dict[str, float]:
        """Where ``total`` seconds of this process went, on this rank; steps take what nothing else does."""
        told = {
            "data_seconds": self.data_seconds,
            "first_step_seconds": self.first_step_seconds,
            "evaluation_seconds": self.evaluation_seconds,
            "save_seconds": self.save_seconds,
            **({"sync_seconds": self.sync_seconds} if self._world.size > 1 else {}),
            **({"exchange_seconds": self.exchange_seconds} if self.exchange_seconds else {}),
        }
        return {"step_seconds": max(0.0, total - sum(told.values()) - self.profile_seconds), **told}

    def mean_loss(self) -> float:
        """Mean loss over the targets (units) of the whole run, up to the last read."""
        return self._run_loss / max(self._run_units, 1)

    def fold(self) -> None:
        """Collective. Before a save: rank 0, whose state is saved, takes over the other ranks' shares of the loss."""
        self._add_up()
        group = self._world.group
        if group is None:
            return
        distributed.all_sum(self._shared[:-1], group)
        self._keep_on_rank_0()
        if self._norms_differ:
            distributed.all_sum(self._norm_square_sum, group).div_(self._world.size)

    def _keep_on_rank_0(self) -> None:
        if self._world.rank != 0:
            self._shared[:-1].zero_()

    def state_dict(self) -> dict[str, Any]:
        """Of rank 0 after ``fold``, of all ranks."""
        named = {name: self.named.table[:, place].cpu() for place, name in enumerate(self.named.names)}
        units, targets = [self._units, self._run_units], [self._targets, self._run_targets]
        return {
            **({} if units == targets else {"units": units}),
            **({"by_source": dict(self._by_source), "named": named} if self._sources or named else {}),
            "loss_sum": self._loss_sum.cpu(),
            "norm_square_sum": self._norm_square_sum.cpu(),
            "norm_max": self._norm_max.cpu(),
            "counts": [self._steps, self._targets, self._tokens],
            "decoder_tokens": self._decoder_tokens,
            "num_bytes": self._num_bytes,
            "totals": [self.total_tokens, self.total_samples, self.total_flops, self._run_loss, self._run_targets],
            "skipped": [self._skipped, self._total_skipped],
        }

    @staticmethod
    def samples_of(state: dict[str, Any]) -> int:
        """``total_samples`` of a state."""
        return int(state["totals"][1])

    def load_state_dict(self, state: dict[str, Any]) -> None:
        check_fields(state, _KINDS, "metrics")
        self._losses, self._norms = [], []
        self._loss_sum.copy_(state["loss_sum"])
        for place, name in enumerate(self.named.names):
            self.named.table[:, place] = state.get("named", {}).get(name, 0.0)
        self._by_source = Counter(state.get("by_source", {}))
        self._keep_on_rank_0()
        self._norm_square_sum.copy_(state["norm_square_sum"])
        self._norm_max.copy_(state["norm_max"])
        self._steps, self._targets, self._tokens = state["counts"]
        # checkpoints of 0.1 lack these, those of 0.2 the bytes, which are not known then of an interval that has begun
        more = {"decoder_tokens": 0, "skipped": (0, None), "num_bytes": None if self._steps else 0, **state}
        kinds = {"decoder_tokens": COUNT, "num_bytes": optional(COUNT), "skipped": several(COUNT, optional(COUNT))}
        self.total_tokens, self.total_samples, self.total_flops, self._run_loss, self._run_targets = state["totals"]
        more = {"units": (self._targets, self._run_targets), **more}
        check_fields(more, {**kinds, "units": several(COUNT, COUNT)}, "metrics")
        self._decoder_tokens, self._num_bytes = more["decoder_tokens"], more["num_bytes"]
        self._units, self._run_units = more["units"]
        self._skipped, total = more["skipped"]
        self._total_skipped = self._total_skipped if total is None else total


class LateReader:
    """Reads a device scalar of every step two steps late, so that the host never waits for the device's queue."""

    DELAY = 2

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._queue: deque[tuple[Tensor, Any]] = deque()

    def push(self, value: Tensor) -> float | None:
        """Queue this step's value; returns the one of two steps ago, None at first."""
        event = None
        if self._cuda:
            host = torch.empty((), dtype=value.dtype, pin_memory=True)
            host.copy_(value, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            value = host
        self._queue.append((value, event))
        return self._pop() if len(self._queue) > self.DELAY else None

    def drain(self) -> list[float]:
        """All values still queued; waits for the device."""
        return [self._pop() for _ in range(len(self._queue))]

    def _pop(self) -> float:
        value, event = self._queue.popleft()
        if event is not None:
            event.synchronize()
        return float(value)


_ENCODERS = re.compile(r"\.encoder\.|\.cross_attn\.[kv]_")
"""Parameters of an encoder-decoder that the encoder's tokens are multiplied with."""


@dataclass(frozen=True)
class Flops:
    """Floating-point operations of forward and backward per token: 6 (N - input embedding) + 12 L H T; of frozen
    weights, which have no gradient, 4 N.

    Source: PaLM (Chowdhery et al. 2022, arXiv:2204.02311), appendix B, with H = heads x head size. The look-up in the
    input embedding costs nothing; a tied one is counted, since it is the head's matrix too. A model whose settings
    tell no layers or width counts 6 N alone. Of an encoder-decoder each stack's weights count for its own tokens, the
    keys and values of the cross-attention for the encoder's, and T is the other side's length there.
    """

    weights: float
    """6 (N - input embedding), 4 of what is frozen; of an encoder-decoder of what the encoder's tokens meet."""
    attention: float
    """12 L H of one stack, to be multiplied by T."""
    decoder_weights: float = 0.0
    """As ``weights``, for the decoder's tokens of an encoder-decoder."""

    @classmethod
    def of(cls, parts: Iterable[nn.Module], group: Any = None) -> Flops:
        """Collective. Of the parts of one model on all ranks of ``group`` (CPU) together."""
        parts = list(parts)
        found = gather((_operations(parts), max((_attention(part) for part in parts), default=0.0)), group)
        used: dict[str, float] = {}
        for sizes, _ in found:
            used |= sizes
        decoder = 0.0
        if any(getattr(part, "is_encoder_decoder", False) for part in parts):
            decoder = sum(count for name, count in used.items() if not _ENCODERS.search(name))
        return cls(sum(used.values()) - decoder, max(attention for _, attention in found), decoder)

    def total(self, positions: int, square_lengths: int, decoder_positions: int = 0) -> float:
        """Of ``positions``, ``decoder_positions`` among them: padding is computed too. See ``Counts``."""
        weights = (positions - decoder_positions) * self.weights + decoder_positions * self.decoder_weights
        return weights + square_lengths * self.attention


def _attention(model: nn.Module) -> float:
    shape: Any = getattr(model, "settings", None) or getattr(model, "config", None)
    layers = getattr(shape, "num_hidden_layers", 0) or 0
    heads = getattr(shape, "num_attention_heads", 0) or 0
    head_dim = getattr(shape, "head_dim", None) or (getattr(shape, "hidden_size", 0) or 0) // max(heads, 1)
    return 12.0 * layers * heads * head_dim


def _operations(parts: list[nn.Module]) -> dict[str, float]:
    """Name -> operations of a token with it, of every parameter but embeddings that no linear layer shares.

    Tied ones once per rank and name. A model may say of which it takes only a share (``active_share(name)``: experts).
    """
    modules = [module for part in parts for module in part.modules()]
    linear = {id(m.weight) for m in modules if isinstance(m, nn.Linear)}
    looked_up = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)} - linear
    named = {id(p): (n, p, part) for part in reversed(parts) for n, p in reversed(list(part.named_parameters()))}
    return {
        n: (6.0 if p.requires_grad else 4.0) * num_elements(p) * _share(part, n)
        for key, (n, p, part) in named.items()
        if key not in looked_up
    }


def _share(part: nn.Module, name: str) -> float:
    share: Any = getattr(part, "active_share", None)
    return 1.0 if share is None else float(share(name))
