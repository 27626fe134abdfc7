"""A callback that makes one rank fail at one place of a run: ``+callbacks.fault._target_=faults.Fault``; and one that
waits to be stopped.

``faults`` are words ``MOMENT-ACT``, one for each start of the ranks. MOMENT is setup, step, forward (of the model),
data (a wait for it), evaluation, generation or save; ACT raise, kill, exit, sleep, oom, stop (SIGTERM to itself) or
nothing. Every rank leaves its process id in the working directory, and each fault the file ``acted-N``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from users_callbacks import EveryEvent

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.launch import signals
from forgather_cli.models import texts


class Fault(TrainerCallback):
    """Acts once in each process: the first of the faults that no process before has done, on one rank."""

    def __init__(self, faults: list[str], rank: int = 1, after: int = 2, grace: float = 25.0) -> None:
        """``after``: the steps that are done first, except for a fault in set-up."""
        left = [n for n in range(len(faults)) if not Path(f"acted-{n}").exists()]
        self._moment, self._act = faults[left[0]].split("-") if left else ("", "nothing")
        self._mark = Path.cwd() / (f"acted-{left[0]}" if left else "acted")
        self._rank, self._after = rank, after
        self._ready = False
        signals.GRACE = grace

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        Path(f"pid-{self._me()}").write_text(str(os.getpid()))
        self._now("setup")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0:
            print(f"rank {self._me()} begins")
        if state.global_step >= self._after and self._me() == self._rank:
            self._now("step")
            if not self._ready:
                self._ready = True
                self._lie_in_wait(kwargs["model"], type(kwargs["train_dataloader"]))

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._ready:
            self._now("evaluation")

    def _lie_in_wait(self, model: torch.nn.Module, loader: type[Any]) -> None:
        """For moments that have no event. A rank's own random state is part of every checkpoint, and a loader's
        position is read after each step's batches."""
        if self._moment == "forward":
            model.register_forward_pre_hook(lambda *_: self._now("forward"))
        if self._moment == "data":
            loader.state_dict = self._before("data", loader.state_dict)
        if self._moment == "save":
            torch.get_rng_state = self._before("save", torch.default_generator.get_state)
        if self._moment == "generation":
            texts.finite = self._before("generation", texts.finite)

    def _before(self, moment: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def with_fault(*args: Any) -> Any:
            self._now(moment)
            return call(*args)

        return with_fault

    def _me(self) -> int:
        return dist.get_rank() if dist.is_initialized() else 0

    def _now(self, moment: str) -> None:
        if moment != self._moment or self._me() != self._rank or self._mark.exists():
            return
        self._mark.touch()
        getattr(self, f"_{self._act}", lambda: None)()

    def _raise(self) -> None:
        raise ZeroDivisionError(f"of rank {self._rank} in {self._moment}")

    def _oom(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    def _kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def _stop(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until_a_stop_is_noticed()

    def _exit(self) -> None:
        sys.exit(0)

    def _sleep(self) -> None:
        time.sleep(600)


class Hold(EveryEvent):
    """Stands still in one event, once that step is reached, until the run is killed or told to stop, by who could else
    come too late: steps of a tiny model take milliseconds. In the first start with that step, however soon it ends.
    """

    def __init__(self, event: str, step: int) -> None:
        self._event, self._step, self._waits = event, step, False

    def happens(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        run = kwargs["trainer"].run_dir.root
        if event == "on_train_begin":
            self._waits = not (first := run / f"hold-{self._step}").exists()
            first.touch()
        elif self._waits and event == self._event and state.global_step >= self._step:
            self._waits = False
            (run / f"held-{self._step}").touch()
            until_a_stop_is_noticed()


def until_a_stop_is_noticed() -> None:
    """In a thread of its own: steps of a tiny model are faster."""
    end = time.monotonic() + 300
    while time.monotonic() < end and all(thread.name != "forgather-grace" for thread in threading.enumerate()):
        time.sleep(0.005)
