"""Taking a run directory for one job: the lock, what may be there already, and the files that say what was started."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from forgather_cli.errors import SetupError
from forgather_cli.input_files import write_whole
from forgather_cli.launch.exit_status import newest_step
from forgather_cli.run_dir import RunDir

_HIDDEN = ".before-"
_PACKAGES = ("forgather", "torch", "hydra-core", "omegaconf", "safetensors", "tokenizers", "torchdata", "numpy")


class RunLock:
    """A run directory that this process alone may write, inside ``with`` or until it ends.

    ``undo`` puts the directory back as it was found; files of others are never touched.
    """

    def __init__(self, root: Path) -> None:
        """Make and lock the directory. Raises SetupError if it cannot be made or another job holds it."""
        self.run = RunDir(root)
        self._before: dict[Path, bytes | None] = {}
        self._hidden: list[tuple[Path, Path]] = []
        self._made = [path for path in (root, *root.parents) if not path.exists()]  # innermost first
        try:
            with _writing(root, "created"):
                root.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(self.run)
        except SetupError:
            if self._made:  # else the lock may be another job's
                with suppress(OSError):
                    self.run.lock.unlink()
            _remove_empty(self._made)
            raise
        with _writing(root):
            _restore_overwritten(self.run)
            forget_hidden(self.run)
        self._traces = self._training_traces()

    def write(self, path: Path, text: str) -> None:
        """Write a file of the run that ``undo`` takes back: whole or not at all, since a later start reads it."""
        self.remember(path)
        with _writing(self.run.root):
            write_whole(path, text)

    def remember(self, path: Path) -> None:
        """Note what is at ``path`` now, for ``undo``."""
        self._before.setdefault(path, path.read_bytes() if path.is_file() else None)

    def hide(self, path: Path) -> None:
        """Take a file away until ``undo`` puts it back. Needs no room on the disk, neither now nor then."""
        if path.exists():
            hidden = path.with_name(f"{_HIDDEN}{path.name}")
            path.rename(hidden)
            self._hidden.append((path, hidden))

    def set_aside(self) -> None:
        """Move away what a run left here, until the first step is done: a mistake in the settings costs no run."""
        moving = self.run.being_set_aside
        moving.mkdir()
        try:
            for path in _files_of(self.run):
                path.rename(moving / path.name)
            moving.rename(self.run.set_aside)
        finally:
            if moving.is_dir():
                _restore_overwritten(self.run)
        self._traces = self._training_traces()

    def has_set_aside(self) -> bool:
        """True if a run that is to be overwritten is still there."""
        return self.run.set_aside.is_dir()

    def _training_traces(self) -> tuple[object, ...]:
        metrics = self.run.metrics
        return (*self.run.checkpoint_steps(), metrics.stat().st_mtime_ns if metrics.exists() else None)

    def has_trained(self) -> bool:
        """True if this job has left metrics or checkpoints."""
        return self._training_traces() != self._traces

    def undo(self) -> None:
        """Put back what this job found, also where no room is left. Only for a job that has not trained."""
        self.run.secret.unlink(missing_ok=True)
        for path, content in self._before.items():
            now = path.read_bytes() if path.is_file() else b""
            if content is None:
                path.unlink(missing_ok=True)
            elif now != content and now.startswith(content):  # a log, which was appended to
                os.truncate(path, len(content))
            elif now != content:
                try:
                    write_whole(path, content)
                except OSError as error:
                    print(f"{path} cannot be put back as it was: {error.strerror}", file=sys.stderr)
        for path, hidden in self._hidden:
            hidden.rename(path)
        if self._made:
            shutil.rmtree(self.run.root, ignore_errors=True)
            _remove_empty(self._made[1:])
            return
        for directory in (self.run.logs, self.run.checkpoints):
            _remove_empty([directory])
        _restore_overwritten(self.run)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Let another job have the directory. A SetupError before training takes back what was written."""
        try:
            if isinstance(error, SetupError) and not self.has_trained():
                self.undo()
        finally:
            os.close(self._lock)


def begin_training(run: RunDir) -> None:
    """Delete what was set aside. Any process may, for the one that holds the directory."""
    _remove_tree(run.set_aside)
    forget_hidden(run)


def forget_hidden(run: RunDir) -> None:
    """Delete what a start that came to train, or was killed, has hidden."""
    for path in run.root.glob(f"{_HIDDEN}*"):
        path.unlink()


def restore_overwritten(run: RunDir) -> None:
    """Put back a run that a killed job had set aside and never overwritten, before anything of it is read.

    It does nothing where a job holds the directory, which will be told when it is taken. Raises SetupError.
    """
    if run.note_set_aside() is None:
        return
    try:
        lock = _take_lock(run)
    except SetupError:
        return
    try:
        with _writing(run.root):
            _restore_overwritten(run)
    finally:
        os.close(lock)
    print(
        f"{run.root}: overwrite_output_dir=true was cut off before its first step: this is the run from before it",
        file=sys.stderr,
    )


def _files_of(run: RunDir) -> list[Path]:
    """What a run of ours leaves directly in its directory; other files are not touched."""
    starts = [run.later_config(n) for n in run.later_starts()]
    files = [run.metrics, run.rollbacks, run.samples, run.exit, run.hang, run.config, run.origin, *starts]
    return [path for path in (*files, run.logs, run.tensorboard, run.checkpoints, run.control) if path.exists()]


def _restore_overwritten(run: RunDir) -> None:
    """Put back a run that was set aside by a job that never trained; delete it if the job did.

    Whenever this is cut off, the next job does the rest.
    """
    aside, moving = run.set_aside, run.being_set_aside
    if aside.is_dir() and newest_step(run) > 0:  # else there may be an evaluation from before the first step
        _remove_tree(aside)
    elif aside.is_dir():
        for path in _files_of(run):
            _remove_tree(path) if path.is_dir() else path.unlink()
        aside.rename(moving)
    if moving.is_dir():
        for path in moving.iterdir():
            path.rename(run.root / path.name)
        moving.rmdir()


@contextmanager
def _writing(path: Path, done: str = "written") -> Iterator[None]:
    """Turn an OSError into a SetupError that names the file, or ``path``."""
    try:
        yield
    except OSError as error:
        where = path if done == "created" else error.filename or path
        remedy = "make room" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
        raise SetupError(
            f"output_dir: {where} cannot be {done}: {error.strerror}; {remedy} or choose another one"
        ) from error


def _remove_empty(paths: list[Path]) -> None:
    for path in paths:
        try:
            path.rmdir()
        except OSError:
            return


def _take_lock(run: RunDir) -> int:
    """Hold RUN/.lock; returns its descriptor.

    A record lock, which belongs to the process: one of flock(2) would live on in data workers for the seconds they
    need to notice that their parent was killed, and a restart would be refused.
    """
    with _writing(run.root):
        lock = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(lock, 200).decode(errors="replace").strip() or "unknown process"
        os.close(lock)
        raise SetupError(
            f"output_dir: {run.root} is being written by another job ({holder}); wait for it or choose another one"
        ) from error
    try:
        with _writing(run.lock):
            os.ftruncate(lock, 0)
            os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
    except SetupError:
        os.close(lock)
        raise
    return lock


def prepare(
    held: RunLock, tree_text: str, origin: dict[str, Any], *, overwrite: bool, resume: bool, ranks: int = 1
) -> Path:
    """Refuse or empty a used directory and write what is started; returns the config file of this start.

    ``ranks`` have logs of their own here.

    Raises SetupError for a used directory that is neither to be overwritten nor gone on with, and for one that cannot
    be written.
    """
    run = held.run
    if run.is_used() and not (resume or overwrite):
        raise SetupError(
            f"output_dir: {run.root} already holds a run; go on with it by resume_from_checkpoint=true, "
            "or delete it by overwrite_output_dir=true"
        )
    with _writing(run.root):
        if run.is_used() and overwrite:
            held.set_aside()
        for rank in range(ranks):
            held.remember(run.rank_log(rank))
        if ranks:
            run.logs.mkdir(exist_ok=True)
            run.rank_log(0).touch()
        later = run.later_starts()
        if resume and run.config.exists():
            path = run.later_config(max([0, *later]) + 1)
            held.write(path, tree_text)
        else:
            path = run.config
            held.write(path, tree_text)
            for n in later:
                held.hide(run.later_config(n))
            held.write(run.origin, _yaml({**origin, "versions": versions()}))
        held.hide(run.exit)
        return path


def _remove_tree(directory: Path) -> None:
    """Delete a directory; renamed first, so that a kill in between leaves nothing that looks whole."""
    if directory.is_dir():
        doomed = directory.with_name(f".{directory.name.lstrip('.')}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        directory.rename(doomed)
        shutil.rmtree(doomed)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a run depends on, without importing them."""
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _yaml(value: dict[str, Any]) -> str:
    """A YAML document with texts of several lines as blocks."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    return yaml.dump(value, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)
