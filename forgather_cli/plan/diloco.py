"""What training with others through a DiLoCo server costs: bytes on the wire, time and memory."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.errors import SetupError
from forgather_cli.plan.parameters import FP32
from forgather_cli.plan.run import RunPlan

if TYPE_CHECKING:
    from forgather_cli.diloco.encoding import Compression

Shapes = Mapping[str, tuple[int, ...]]

_OTHERS: tuple[tuple[Compression | None, Compression | None, int | None], ...] = (
    ("fp32", None, None), ("bf16", None, None), ("int8", None, None), ("int4", None, None),
    ("int8", "int8", None), ("int4", "int8", None), (None, None, 1), (None, None, 4),
)  # fmt: skip
"""What is shown beside the settings: compression up and down, and fragments; None leaves it as it is."""


@dataclass(frozen=True)
class Traffic:
    """What one worker exchanges under some settings: bytes of weights with the headers of their files, to which some
    kB of messages come. An exchange is that of one fragment, in the mean over them.
    """

    compression: str
    compression_down: str
    num_fragments: int
    steps: int
    """From one exchange to the next."""
    sent: int
    received: int
    seconds: float | None
    """On the wire; None without a bandwidth."""
    share: float | None
    """Of the time, 0 to 1, in which training stands still for exchanges; None without bandwidth or time of a step."""
    exchanges_per_hour: float | None
    """None without the time of a step."""


@dataclass(frozen=True)
class DilocoPlan:
    """Bytes and seconds of one worker; memory of its fullest rank, and of the server."""

    settings: DilocoServerSettings
    bandwidth: float | None
    """Bytes per second, both ways together."""
    step_time: float | None
    traffic: list[Traffic]
    """Under these settings first, then under others that are told apart by compression and fragments."""
    exchanges: int | None
    """Of the whole run, whose last one is of all fragments; None where its steps are not known."""
    sent_in_all: int | None
    received_in_all: int | None
    """With the weights that the run begins with."""
    worker_snapshot: int
    """The weights as published, in host memory."""
    worker_error: int
    """What compression has lost and is sent the next time, in host memory."""
    worker_exchange: int
    """Beside them while an exchange is made. Estimate."""
    server_memory: int
    """Estimate."""


def plan_diloco(
    made: RunPlan, settings: DilocoServerSettings, bandwidth: float | None, step_time: float | None
) -> DilocoPlan:
    """For a worker of the planned run. ``bandwidth``: bytes per second, both ways together; ``step_time``: seconds.

    Raises SetupError for more fragments than the model can be divided into.
    """
    from forgather_cli.diloco.encoding import is_lossy

    shapes = {row.name: row.shape for row in made.parameters}
    traffic = [_traffic(shapes, settings, bandwidth, step_time)]
    for up, down, count in _OTHERS:
        other = replace(
            settings, compression=up or settings.compression, compression_down=down or settings.compression_down,
            num_fragments=count or settings.num_fragments,
        )  # fmt: skip
        if other != settings and not list(other.problems()):
            with contextlib.suppress(SetupError):  # too few layers for so many fragments
                traffic.append(_traffic(shapes, other, bandwidth, step_time))
    pieces = _fragments(shapes, settings)
    sent_of = [_file_bytes(piece, settings.compression, is_part=True) for piece in pieces]
    received_of = [_file_bytes(piece, settings.compression_down) for piece in pieces]
    exchanges = None if made.steps is None else -(-made.steps // (settings.sync_every // len(pieces)))
    sent = received = None
    if exchanges is not None:
        before = [number % len(pieces) for number in range(exchanges - 1)]
        sent = sum(sent_of[each] for each in before) + _file_bytes(shapes, settings.compression, is_part=True)
        received = _file_bytes(shapes, "fp32") + sum(received_of[each] for each in before)
    by_rank: dict[int, float] = {}  # of the model, what each rank sends: its stages', or an equal share
    for stage in made.stages:
        by_rank[stage.rank] = by_rank.get(stage.rank, 0.0) + stage.share / stage.ranks
    share = max(by_rank.values(), default=1 / made.world_size)
    whole, fragment = FP32 * made.num_parameters, FP32 * max(sum(map(math.prod, each.values())) for each in pieces)
    lossy = is_lossy(settings.compression)
    in_exchange = max(sent_of) + (fragment if lossy else 0) + (fragment if settings.compression_down != "fp32" else 0)
    copies = 3 if settings.mode == "async" else 2  # weights, momentum, and what is delayed
    largest = FP32 * max(map(math.prod, shapes.values()))
    return DilocoPlan(
        settings=settings,
        bandwidth=bandwidth,
        step_time=step_time,
        traffic=traffic,
        exchanges=exchanges,
        sent_in_all=sent,
        received_in_all=received,
        worker_snapshot=int(share * whole),
        worker_error=int(share * whole) if lossy else 0,
        worker_exchange=int(share * in_exchange),
        server_memory=copies * whole + 3 * largest,  # of a tensor its change, one worker's, and that as it was sent
    )


def _traffic(
    shapes: Shapes, settings: DilocoServerSettings, bandwidth: float | None, step_time: float | None
) -> Traffic:
    pieces = _fragments(shapes, settings)
    sent = sum(_file_bytes(piece, settings.compression, is_part=True) for piece in pieces) // len(pieces)
    received = sum(_file_bytes(piece, settings.compression_down) for piece in pieces) // len(pieces)
    steps = settings.sync_every // len(pieces)
    seconds = None if bandwidth is None else (sent + received) / bandwidth
    share = per_hour = None
    if step_time is not None:
        stands_still = max(0.0, (seconds or 0.0) - settings.overlap * step_time)
        interval = steps * step_time + stands_still
        share, per_hour = None if seconds is None else stands_still / interval, 3600 / interval
    return Traffic(
        settings.compression, settings.compression_down, len(pieces), steps, sent, received, seconds, share, per_hour
    )


def _fragments(shapes: Shapes, settings: DilocoServerSettings) -> list[Shapes]:
    from forgather_cli.diloco.fragments import fragments

    return [{name: shapes[name] for name in names} for names in fragments(shapes, settings.num_fragments)]


def _file_bytes(shapes: Shapes, compression: Compression, *, is_part: bool = False) -> int:
    """Of a safetensors file with these tensors: one that a worker sends, or what it fetches of a published one, with
    the ranges that it asks for.
    """
    import torch

    from forgather_cli.diloco.encoding import encode

    header, end = {}, 0
    for name, shape in shapes.items():
        for key, tensor in encode(name, torch.empty(shape, device="meta"), compression).items():
            header[key] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
            end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"))
    if is_part:
        text += json.dumps({"__metadata__": {"rows": json.dumps({name: [0, 10] for name in shapes})}})
    return 8 + len(text) + end
