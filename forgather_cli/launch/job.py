"""The folder through which a launcher and the ranks it has started on this node speak to each other.

The launcher asks for a stop; a rank tells its process id and how it ended. Each restart of the ranks has a folder of
its own. Files appear whole, and only this user may read them. Nothing here needs torch, and a rank that hangs in a
collective can still be told.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from forgather_cli.input_files import write_whole
from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.launch.processes import temporary_folder

_VARIABLE = "FORGATHER_JOB"


@dataclass(frozen=True)
class Job:
    """One job's folder on this node, as the launcher or as a rank sees it."""

    root: Path
    launcher: int
    """Process id."""
    node: int
    nodes: int
    number: int = 0
    """Of a rank: how often the launcher has started this node's ranks before."""

    @classmethod
    @contextlib.contextmanager
    def made(cls, *, node: int, nodes: int) -> Iterator[Job]:
        """A new job of this process, with its folder."""
        with temporary_folder("job") as root:
            yield cls(root, os.getpid(), node, nodes)

    @classmethod
    def entered(cls) -> Job | None:
        """The job whose launcher has started this process; None if none has."""
        told = os.environ.get(_VARIABLE)
        return None if told is None else cls(**{**(facts := json.loads(told)), "root": Path(facts["root"])})

    def environment(self, number: int) -> dict[str, str]:
        """What makes ``entered`` find this job in a rank of the start with that number."""
        return {_VARIABLE: json.dumps({**asdict(self), "root": str(self.root), "number": number})}

    def discard(self) -> None:
        """Remove the folder; for a launcher that ends without unwinding."""
        shutil.rmtree(self.root, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- to the ranks

    def ask_to_stop(self, signum: int) -> None:
        write_whole(self.root / "stop", str(signum), mode=0o600)

    def stop_asked(self) -> int | None:
        """The signal that the launcher has got."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.root / "stop").read_text())
        return None

    # --------------------------------------------------------------------------------------------- from the ranks

    def attempts(self) -> int:
        """How many times ranks have been started so far."""
        return sum(1 for _ in self.root.glob("attempt-*"))

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.root / f"attempt-{number}")


@dataclass(frozen=True)
class Attempt:
    """What the ranks of this node tell between one start and the next."""

    folder: Path

    def enter(self, rank: int) -> None:
        """Tell that this process is rank ``rank``. Raises FileNotFoundError where the launcher has left."""
        self.folder.mkdir(exist_ok=True)
        write_whole(self.folder / f"pid-{rank}", str(os.getpid()), mode=0o600)

    def pids(self) -> dict[int, int]:
        """Process id by rank."""
        found = {}
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.name.removeprefix("pid-"))] = int(path.read_text())
        return found

    def tell(self, status: ExitStatus) -> None:
        """Only a rank's first word counts, except that what it was told by others gives way to what it knows."""
        known = next((each for each in self.statuses() if each.rank == status.rank), None)
        if known is None or (known.failed and not known.is_cause and status.is_cause):
            write_whole(self.folder / f"status-{status.rank}", status.to_json(), mode=0o600)

    def statuses(self) -> list[ExitStatus]:
        """How those ranks have ended that have told it."""
        found = []
        for path in self.folder.glob("status-*"):
            with contextlib.suppress(OSError, ValueError):
                found.append(ExitStatus.from_json(path.read_text(encoding="utf-8")))
        return found
