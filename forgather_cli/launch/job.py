"""The folder through which a launcher and the ranks it has started on this node speak to each other.

The launcher asks for a stop; a rank tells its process id and how it ended. Each restart of the ranks has a folder of
its own. Files appear whole, and only this user may read them. Nothing here needs torch, and a rank that hangs in a
collective can still be told.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.launch.place import ATTEMPT
from forgather_cli.launch.process import is_running

_VARIABLE = "FORGATHER_JOB"


@dataclass(frozen=True)
class Job:
    """One job's folder on this node, as the launcher or as a rank of one attempt sees it."""

    root: Path
    launcher: int
    """Process id."""
    node: int
    nodes: int
    restarts: int
    """How often the ranks may be restarted."""

    @classmethod
    @contextlib.contextmanager
    def made(cls, *, node: int, nodes: int, restarts: int) -> Iterator[Job]:
        """A new job of this process; its folder goes at the end, and those of killed launchers of this user go now."""
        for facts_file in Path(tempfile.gettempdir()).glob("forgather-*/job.json"):
            # its lock also tells of launchers in other containers, its process id of those before 0.2 that held none
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), _locked(facts_file.parent):
                if not is_running(int(json.loads(facts_file.read_text())["launcher"])):
                    shutil.rmtree(facts_file.parent, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="forgather-", ignore_cleanup_errors=True) as folder:
            job = cls(Path(folder), os.getpid(), node, nodes, restarts)
            facts = {"launcher": job.launcher, "node": node, "nodes": nodes, "restarts": restarts}
            with _locked(job.root):
                publish(job.root / "job.json", json.dumps(facts))
                yield job

    @classmethod
    def entered(cls) -> Job | None:
        """The job whose launcher has started this process; None if none has.

        Raises FileNotFoundError where that launcher has ended.
        """
        root = os.environ.get(_VARIABLE)
        return None if root is None else cls(Path(root), **json.loads(Path(root, "job.json").read_text()))

    def environment(self, attempt: int) -> dict[str, str]:
        """What makes ``entered`` find this job, and ``place.launched`` the number of this start."""
        return {_VARIABLE: str(self.root), ATTEMPT: str(attempt)}

    def discard(self) -> None:
        """Remove the folder; for a launcher that ends without unwinding."""
        shutil.rmtree(self.root, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------- to the ranks

    def ask_to_stop(self, signum: int) -> None:
        publish(self.root / "stop", str(signum))

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

    def rendezvous_folder(self, attempt: int) -> Path | None:
        """The folder where all ranks of a start meet; None where they are on several nodes."""
        return self.attempt(attempt).folder / "rendezvous" if self.nodes == 1 else None


@dataclass(frozen=True)
class Attempt:
    """What the ranks of this node tell between one start and the next."""

    folder: Path

    def enter(self, rank: int) -> None:
        """Tell that this process is rank ``rank``."""
        self.folder.mkdir(exist_ok=True)
        publish(self.folder / f"pid-{rank}", str(os.getpid()))

    def pids(self) -> dict[int, int]:
        """Process id by rank."""
        found = {}
        for path in self.folder.glob("pid-*"):
            with contextlib.suppress(OSError, ValueError):
                found[int(path.name.removeprefix("pid-"))] = int(path.read_text())
        return found

    def tell(self, status: ExitStatus) -> None:
        """Only a rank's first word counts, except that what it was told by others gives way to what it knows."""
        known = self.status(status.rank)
        if known is None or (known.failed and not known.is_cause and status.is_cause):
            publish(self._word_of(status.rank), status.to_json())

    def status(self, rank: int) -> ExitStatus | None:
        """How a rank says it ended."""
        with contextlib.suppress(OSError, ValueError):
            return ExitStatus.from_json(self._word_of(rank).read_text(encoding="utf-8"))
        return None

    def statuses(self) -> list[ExitStatus]:
        """Of all ranks that have told one."""
        ranks = [int(path.name.removeprefix("status-")) for path in self.folder.glob("status-*")]
        return [status for rank in ranks if (status := self.status(rank)) is not None]

    def _word_of(self, rank: int) -> Path:
        return self.folder / f"status-{rank}"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder while this process lives, in whatever container. Raises OSError if another one holds it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def publish(path: Path, text: str) -> None:
    """Write a file that is whole as soon as it is there, for this user alone."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(temporary, "w", encoding="utf-8", opener=partial(os.open, mode=0o600)) as file:
        file.write(text)
    temporary.replace(path)
