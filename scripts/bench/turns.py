"""Training loops of one process that take turns, so that a machine which slows down slows all of them down alike."""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

BLOCK = 10  # steps of one turn


class Turns:
    """The runners of one process, of which one is awake: it hands over after ``block`` steps of its optimizer.

    Every rank hands over after the same steps, so collectives of different runners never meet.
    """

    def __init__(
        self, names: tuple[str, ...], average: Callable[[list[float]], float] = statistics.median, *, block: int = BLOCK
    ) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._average, self._block = average, block
        self._turn = threading.Condition()
        self._order = list(names)
        self._awake = names[0]
        self._steps = dict.fromkeys(names, 0)
        self._last: tuple[float, float] | None = None
        self.blocks: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        """Seconds of wall-clock and of CPU time per step, of each turn."""
        self._seconds: list[tuple[float, float]] = []
        register_optimizer_step_post_hook(self._stepped)

    @contextlib.contextmanager
    def taking(self, name: str) -> Iterator[None]:
        threading.current_thread().name = name
        self._await(name)
        try:
            yield
        finally:
            self._hand_over(name, leave=True)

    def _stepped(self, *_: Any) -> None:
        name, now = threading.current_thread().name, (time.perf_counter(), time.process_time())
        if self._last is not None:
            self._seconds.append((now[0] - self._last[0], now[1] - self._last[1]))
        self._last = now
        self._steps[name] += 1
        if self._steps[name] % self._block == 0:
            wall, cpu = zip(*self._seconds, strict=True)
            self.blocks[name].append((self._average(list(wall)), self._average(list(cpu))))
            self._hand_over(name)
            self._await(name)

    def _hand_over(self, name: str, *, leave: bool = False) -> None:
        with self._turn:
            follower = self._order[(self._order.index(name) + 1) % len(self._order)]
            if leave:
                self._order.remove(name)
            self._awake = follower
            self._turn.notify_all()

    def _await(self, name: str) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._awake == name)
        self._last, self._seconds = None, []


def in_turns(turns: Turns, run: Callable[[str], None]) -> None:
    """Run ``run(name)`` for each name of ``turns`` in a thread of its own; the process ends where one raises."""

    def taking(name: str) -> None:
        try:
            with turns.taking(name):
                run(name)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    threads = [threading.Thread(target=taking, args=(name,), name=name) for name in turns.blocks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ratio(mine: list[float], other: list[float]) -> str:
    """Median and quartiles of what each turn took over the other's turn of the same round."""
    percent = [(one / two - 1) * 100 for one, two in zip(mine, other, strict=True)]
    low, middle, high = statistics.quantiles(percent, n=4)
    return f"{middle:+.1f} % ({low:+.1f} to {high:+.1f})"
