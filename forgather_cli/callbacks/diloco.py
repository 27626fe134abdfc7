"""DiLoCoCallback: train together with other jobs over slow links (``diloco/worker.py``)."""

from __future__ import annotations

import logging
from typing import Any

from forgather_cli.callbacks.base import BuiltIn
from forgather_cli.config.schema import DilocoSettings

log = logging.getLogger(__name__)


class DiLoCoCallback(BuiltIn[DilocoSettings]):
    """Brings the loop that exchanges weights with a server, and adds to the logs how that goes.

    Without a server, in config or environment, it does nothing.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._worker: Any = None

    @property
    def active(self) -> bool:
        """Whether there is a server."""
        return bool(self.settings.address())

    def outer_loop(self, run: Any) -> Any:
        """What averages weights for the loop (``trainer.outer.OuterLoop``); None without a server."""
        if self.active:
            from forgather_cli.diloco.worker import DilocoWorker

            self._worker = DilocoWorker(run, self.settings, self.settings.address())
        elif run.world.rank == 0:
            log.info("callbacks.diloco does nothing: no server (callbacks.diloco.server_addr, DILOCO_SERVER)")
        return self._worker

    def on_log_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._worker is not None:
            kwargs["logs"] |= self._worker.facts()
