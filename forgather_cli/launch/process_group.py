"""The default process group of a run, while it lasts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from forgather_cli.config.schema import Config, SingleSettings
from forgather_cli.launch.place import Place
from forgather_cli.launch.rendezvous import Rendezvous, within
from forgather_cli.launch.stacks import record_collectives

_TEAR_DOWN = 10.0  # seconds


@contextmanager
def initialised(config: Config, place: Place, rendezvous: Rendezvous | None) -> Iterator[None]:
    """Collective. A process group of all ranks inside; of one rank too, except for trainer=single, which needs none.

    Collectives that wait longer than ``hang_timeout`` raise. After an error the group is left as it is: to tear it
    down may wait for ranks that are gone, and the process ends anyway.
    """
    if isinstance(config.trainer, SingleSettings):
        yield
        return
    import torch.distributed as dist

    from forgather_cli.distributed import listen_on_loopback

    record_collectives()
    if place.local_size == place.size:
        listen_on_loopback()
    dist.init_process_group(
        _backend(config.device),
        store=_store(rendezvous),
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=config.hang_timeout),
    )
    if rendezvous is not None:
        rendezvous.all_here()
    try:
        yield
    except BaseException:
        if place.size == 1:
            dist.destroy_process_group()
        raise
    within(_TEAR_DOWN, dist.destroy_process_group)


def _backend(device: str) -> str:
    import torch

    on_cuda = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    return "cpu:gloo,cuda:nccl" if on_cuda else "gloo"


def _store(rendezvous: Rendezvous | None) -> Any:
    if rendezvous is not None:
        return rendezvous.group_store()
    from torch.distributed import HashStore  # type: ignore[attr-defined]

    return HashStore()
