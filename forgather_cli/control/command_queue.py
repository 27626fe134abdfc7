"""The commands of one job: submitted by the server's threads, applied and finished by the main thread."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

from forgather_cli.callbacks.base import CommandCounts
from forgather_cli.control import command_record
from forgather_cli.control.command_record import ABORT, APPLIED, QUEUED, SAVE, SAVE_AND_STOP, STOP, ControlCommand
from forgather_cli.errors import ControlError
from forgather_cli.run_dir import RunDir

MAX_OPEN = 100
"""Commands that may be unfinished at once."""
_MAX_KEPT = 1000
"""Commands kept in memory; older ones are only in RUN/control."""
_COUNTS = {
    SAVE: CommandCounts(saves=1),
    STOP: CommandCounts(stops=1),
    SAVE_AND_STOP: CommandCounts(saves=1, stops=1),
    ABORT: CommandCounts(aborts=1),
}


class CommandQueue:
    """The commands of one job. Implements ``callbacks.base.CommandSource``.

    Every change of a command is written to RUN/control, so that its answer outlives the job. Ranks without a server
    have a queue too, which stays empty.
    """

    def __init__(self, run: RunDir, job_id: str, *, step: Callable[[], int] = lambda: 0) -> None:
        """``step()``: how many optimizer steps are done."""
        self._run, self._job_id, self._step = run, job_id, step
        self._lock = threading.Lock()
        self._asked = CommandCounts()
        self._commands: dict[str, ControlCommand] = {}
        self._open: dict[str, CommandCounts] = {}
        """Id of each unfinished command -> the counts of all commands up to it, itself included."""

    # ------------------------------------------------------------------------------------------------ server's threads

    def submit(self, name: str) -> ControlCommand:
        """Queue a command, one of ``command_record.COMMANDS``. Raises ControlError if too many are unfinished.

        A save that is asked for while another is under way is that one: many in a row would push out older checkpoints.
        """
        with self._lock:
            if name == SAVE and (saves := [each for i in self._open if (each := self._commands[i]).command == SAVE]):
                return saves[0]
            if len(self._open) >= MAX_OPEN:
                raise ControlError(f"{MAX_OPEN} commands wait for an answer already; ask again when the job has acted")
            command = ControlCommand(
                secrets.token_hex(6), self._job_id, name, asked_at=command_record.now(), asked_at_step=self._step()
            )
            one, before = _COUNTS[name], self._asked
            asked = CommandCounts(before.saves + one.saves, before.stops + one.stops, before.aborts + one.aborts)
            self._open[command.id] = asked
            self._set(command)
            self._forget()
            self._asked = asked  # last: from here on the main thread may act on it
        return command

    def get(self, command_id: str) -> ControlCommand | None:
        with self._lock:
            return self._commands.get(command_id)

    # ----------------------------------------------------------------------------------------------------- main thread

    def asked(self) -> CommandCounts:
        """The commands submitted so far. The step sync sums them over ranks."""
        return self._asked

    def on_agreed(self, all_ranks: CommandCounts) -> None:
        """Mark as applied the queued commands that ``all_ranks``, the counts agreed on, include."""
        with self._lock:
            for command_id, asked in self._open.items():
                command = self._commands[command_id]
                if command.state == QUEUED and min(all_ranks.since(asked)) >= 0:
                    self._set(command.applied(self._step()))

    @property
    def has_open(self) -> bool:
        """True if a command is unfinished. Takes no lock: it is read at every step."""
        return bool(self._open)

    def open(self) -> list[ControlCommand]:
        """Unfinished commands, the oldest first."""
        with self._lock:
            return [self._commands[command_id] for command_id in self._open]

    def applied(self) -> list[ControlCommand]:
        """Unfinished commands that all ranks act on."""
        return [command for command in self.open() if command.state == APPLIED]

    def finish(self, command: ControlCommand) -> None:
        """Store a command that is done or has failed. Does nothing if it is finished already."""
        with self._lock:
            if self._open.pop(command.id, None) is not None:
                self._set(command)

    def _set(self, command: ControlCommand) -> None:
        self._commands[command.id] = command
        command_record.write(self._run, command)

    def _forget(self) -> None:
        old = [command_id for command_id in self._commands if command_id not in self._open]
        for command_id in old[: max(0, len(self._commands) - _MAX_KEPT)]:
            del self._commands[command_id]
