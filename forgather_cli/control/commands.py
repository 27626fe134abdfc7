"""The commands of one job: taken in by the server's threads, agreed on and answered by the main thread."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from forgather_cli.callbacks.base import Asked
from forgather_cli.control import records
from forgather_cli.control.records import ABORT, APPLIED, QUEUED, SAVE, SAVE_AND_STOP, STOP, Command
from forgather_cli.errors import ControlError
from forgather_cli.run_dir import RunDir

MAX_OPEN = 100
"""Commands that may wait for an answer at once."""
_MAX_KEPT = 1000
"""Commands that are remembered; the older ones are in RUN/control alone."""
_COUNTS = {SAVE: Asked(saves=1), STOP: Asked(stops=1), SAVE_AND_STOP: Asked(saves=1, stops=1), ABORT: Asked(aborts=1)}


class CommandQueue:
    """What one job was asked for. Implements ``callbacks.base.Commands``.

    Every command is written to RUN/control at each change, so that its answer outlives the job. Ranks that no server
    asks have one too, which stays empty.
    """

    def __init__(self, run: RunDir, job_id: str, *, step: Callable[[], int] = lambda: 0) -> None:
        """``step`` tells how many optimizer steps are done."""
        self._run, self._job_id, self._step = run, job_id, step
        self._lock = threading.Lock()
        self._asked = Asked()
        self._commands: dict[str, Command] = {}
        self._open: dict[str, Asked] = {}
        """Id of each command without an answer -> what was asked for up to and with it."""

    # ------------------------------------------------------------------------------------------------ server's threads

    def submit(self, name: str) -> Command:
        """Take in a command, one of ``records.COMMANDS``. Raises ControlError if too many wait for an answer."""
        with self._lock:
            if len(self._open) >= MAX_OPEN:
                raise ControlError(f"{MAX_OPEN} commands wait for an answer already; ask again when the job has acted")
            command = Command(
                secrets.token_hex(6), self._job_id, name, asked_at=records.now(), asked_at_step=self._step()
            )
            one, before = _COUNTS[name], self._asked
            asked = Asked(before.saves + one.saves, before.stops + one.stops, before.aborts + one.aborts)
            self._open[command.id] = asked
            self._set(command)
            self._forget()
            self._asked = asked  # last: from here on the main thread may act on it
        return command

    def get(self, command_id: str) -> Command | None:
        with self._lock:
            return self._commands.get(command_id)

    # ----------------------------------------------------------------------------------------------------- main thread

    def asked(self) -> Asked:
        return self._asked

    def agreed(self, all_ranks: Asked) -> None:
        with self._lock:
            for command_id, asked in self._open.items():
                command = self._commands[command_id]
                if command.state == QUEUED and min(all_ranks.since(asked)) >= 0:
                    self._set(command.applied(self._step()))

    @property
    def has_open(self) -> bool:
        """True if a command waits for an answer. Costs nothing."""
        return bool(self._open)

    def open(self) -> list[Command]:
        """Commands without an answer, the oldest first."""
        with self._lock:
            return [self._commands[command_id] for command_id in self._open]

    def applied(self) -> list[Command]:
        """Those of them that all ranks act on."""
        return [command for command in self.open() if command.state == APPLIED]

    def finish(self, command: Command) -> None:
        """Answer a command, which is done or has failed. The first answer counts."""
        with self._lock:
            if self._open.pop(command.id, None) is not None:
                self._set(command)

    def _set(self, command: Command) -> None:
        self._commands[command.id] = command
        records.write(self._run, command)

    def _forget(self) -> None:
        old = [command_id for command_id in self._commands if command_id not in self._open]
        for command_id in old[: max(0, len(self._commands) - _MAX_KEPT)]:
            del self._commands[command_id]
