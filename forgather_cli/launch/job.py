"""The job folder: files through which a launcher and the ranks that it has started on this node exchange messages.

    stop                   the number of the signal that the launcher received
    attempt-<n>/pid-<r>    process id of rank r in start n of the ranks
    attempt-<n>/status-<r> how it ended (ExitStatus)

Files appear whole, and only this user may read them. Nothing here needs torch, and a rank that hangs in a collective
still reads them, in a thread.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from forgather_cli.documents.regular_files import write_whole
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
    """In a rank: how often the launcher has started this node's ranks before."""

    @classmethod
    @contextlib.contextmanager
    def create(cls, *, node: int, nodes: int) -> Iterator[Job]:
        """A new job with this process as its launcher; its folder is removed at the end."""
        with temporary_folder("job") as root:
            yield cls(root, os.getpid(), node, nodes)

    @classmethod
    def from_environment(cls) -> Job | None:
        """The job of this rank; None if no launcher of ours has started this process."""
        text = os.environ.get(_VARIABLE)
        return None if text is None else cls(**{**(facts := json.loads(text)), "root": Path(facts["root"])})

    def environment(self, number: int) -> dict[str, str]:
        """The environment variable by which a rank of start ``number`` finds this job (``from_environment``)."""
        return {_VARIABLE: json.dumps({**asdict(self), "root": str(self.root), "number": number})}

    def discard(self) -> None:
        """Remove the folder now; for a launcher that ends at once."""
        shutil.rmtree(self.root, ignore_errors=True)

    # ----------------------------------------------------------------------------------- from the launcher to its ranks

    def request_stop(self, signum: int) -> None:
        """Ask all ranks of this node to save and stop."""
        write_whole(self.root / "stop", str(signum), mode=0o600)

    def stop_signal(self) -> int | None:
        """The signal for which the launcher asks the ranks to stop; None if it does not."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.root / "stop").read_text())
        return None

    # ----------------------------------------------------------------------------------- from the ranks to the launcher

    def attempts(self) -> int:
        """How many times ranks have been started so far; the newest attempt has this number less one."""
        return sum(1 for _ in self.root.glob("attempt-*"))

    def attempt(self, number: int) -> Attempt:
        return Attempt(self.root / f"attempt-{number}")


@dataclass(frozen=True)
class Attempt:
    """What the ranks of this node report between one start and the next."""

    folder: Path

    def write_pid(self, rank: int) -> None:
        """Report that this process is rank ``rank``. Raises FileNotFoundError if the launcher is gone."""
        self.folder.mkdir(exist_ok=True)
        write_whole(self.folder / f"pid-{rank}", str(os.getpid()), mode=0o600)

    def pids(self) -> dict[int, int]:
        """Process id by rank."""
        found = {}
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.name.removeprefix("pid-"))] = int(path.read_text())
        return found

    def write_status(self, status: ExitStatus) -> None:
        """Report how a rank ended. Its first status stays, unless that only named another rank's failure."""
        known = next((each for each in self.statuses() if each.rank == status.rank), None)
        if known is None or (known.failed and not known.is_cause and status.is_cause):
            write_whole(self.folder / f"status-{status.rank}", status.to_json(), mode=0o600)

    def statuses(self) -> list[ExitStatus]:
        """The exit statuses reported so far."""
        found = []
        for path in self.folder.glob("status-*"):
            with contextlib.suppress(OSError, ValueError):
                found.append(ExitStatus.from_json(path.read_text(encoding="utf-8")))
        return found
