"""A run directory held by one job: the lock, the files of a start, and undoing them if it never trains."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from forgather_cli import __version__
from forgather_cli.documents.regular_files import write_whole
from forgather_cli.errors import SetupError, TrainingError
from forgather_cli.launch.exit_status import MISTAKE, ExitStatus, Kind, newest_step, write_exit_record
from forgather_cli.run_dir import RunDir, resume_command, shown
from forgather_cli.terminal.folding import tell

_HIDDEN = ".before-"
_HELD: dict[int, Path] = {}
"""The locks that this process holds: descriptor -> file."""
_TAKING = threading.Lock()
_PACKAGES = ("torch", "hydra-core", "omegaconf", "safetensors", "tokenizers", "torchdata", "numpy")


class RunLock:
    """A run directory that only this process may write, inside ``with`` or until it ends.

    Each change made before training records how to undo it, by renames and truncations, which need no free disk space.
    Files that are not of a run are never touched.
    """

    def __init__(self, root: Path) -> None:
        """Make and lock the directory. Raises SetupError if it cannot be made or another job holds it."""
        self.run = run = RunDir(root)
        self._undo = ExitStack()
        self._changed: set[Path] = set()
        made = [path for path in (root, *root.parents) if not path.exists()]  # innermost first
        try:
            with _writing(root, "created"):
                root.mkdir(parents=True, exist_ok=True)
            self._lock = _take_lock(run)
        except SetupError:
            if made:  # else the lock may be another job's
                with suppress(OSError):
                    run.lock.unlink()
            _remove_empty(*made)
            raise
        if made:
            self._undo.callback(_remove_empty, *made[1:])
            self._undo.callback(shutil.rmtree, root, ignore_errors=True)
        for directory in (run.logs, run.checkpoints):
            self._undo.callback(_remove_empty, directory)
        self._undo.callback(run.secret.unlink, missing_ok=True)
        with _writing(root):
            _restore_overwritten(run)
            _forget_hidden(run)
        self._traces = self._training_traces()

    def prepare(
        self,
        tree_text: str,
        origin: dict[str, Any],
        *,
        overwrite: bool,
        resume: bool,
        ranks: int = 1,
        diloco: str | None = None,
    ) -> Path:
        """Refuse or empty a used directory and write the files of this start; returns its config file.

        ``ranks``: how many of them will have a log here. ``diloco``: a server's settings, which are there before the
        config is: the directory would be one of training else. Raises SetupError for a used directory that is neither
        to be overwritten nor resumed, and for one that cannot be written.
        """
        run = self.run
        if run.is_used() and not (resume or overwrite):
            raise SetupError(
                f"output_dir: {shown(run.root)} already holds a run; resume it with {resume_command(run)} (in a "
                "script: resume_from_checkpoint=true), choose another one, or delete it by overwrite_output_dir=true"
            )
        with _writing(run.root):
            if run.is_used() and overwrite:
                # moved away until the first step is done: a mistake in the settings costs no run
                self._undo.callback(_restore_overwritten, run)
                try:
                    run.being_set_aside.mkdir()
                    for found in _files_of(run):
                        found.rename(run.being_set_aside / found.name)
                    run.being_set_aside.rename(run.set_aside)
                finally:
                    self._traces = self._training_traces()
            for log in map(run.rank_log, range(ranks)):
                if log.is_symlink():  # of somebody else's, to any file
                    log.unlink()
                if log.exists():  # it is appended to
                    self._undo.callback(os.truncate, log, log.stat().st_size)
                else:
                    self._undo.callback(log.unlink, missing_ok=True)
            if ranks:
                run.logs.mkdir(exist_ok=True)
                run.rank_log(0).touch()
            if diloco is not None:
                self.write(run.diloco, diloco)
            later = run.later_starts()
            if resume and run.config.exists():
                path = run.later_config(max([0, *later]) + 1)
                self.write(path, tree_text)
            else:
                path = run.config
                self.write(path, tree_text)
                for n in later:
                    self._hide(run.later_config(n))
                self.write(run.origin, _yaml({**origin, "versions": versions()}))
            self._hide(run.exit)
        return path

    def write(self, path: Path, text: str) -> None:
        """Write a file that ``undo`` takes back: whole or not at all, the one before until then, since a later start
        reads it.
        """
        with _writing(self.run.root):
            self._hide(path, copy=True)
            write_whole(path, text)

    def _hide(self, path: Path, *, copy: bool = False) -> None:
        """Take a file away, once, or a ``copy`` of it; ``undo`` puts it back in place of what is there by then."""
        if path in self._changed:
            return
        self._changed.add(path)
        if path.exists():
            hidden = path.with_name(f"{_HIDDEN}{path.name}")
            shutil.copy2(path, hidden) if copy else path.rename(hidden)
            self._undo.callback(hidden.replace, path)
        else:
            self._undo.callback(path.unlink, missing_ok=True)

    def _training_traces(self) -> tuple[object, ...]:
        metrics = self.run.metrics
        return (*self.run.checkpoint_steps(), metrics.stat().st_mtime_ns if metrics.exists() else None)

    def undo(self) -> bool:
        """Put the directory back as it was found; False, changing nothing, if this job left metrics or checkpoints."""
        if self._training_traces() != self._traces:
            return False
        try:
            self._undo.close()
        except OSError as error:
            print(f"{error.filename} cannot be put back as it was: {error.strerror}", file=sys.stderr)
        return True

    def conclude(self, status: ExitStatus) -> bool:
        """Record in the directory how the job ended: True if it was put back as it was found, after a mistake, or after
        a failure before the first step of a job that overwrites a run; or if it is not there any more. Else
        ``exit.json`` is written for a failure; for any other end rank 0 has written it already (``trainer.finish``).
        """
        if not self.run.lock.exists():
            return True
        mistake = status.code == MISTAKE or self.run.set_aside.is_dir()
        if status.failed and mistake and status.kind != Kind.CUT and self.undo():
            return True
        _forget_hidden(self.run)
        if status.failed:
            try:
                write_exit_record(self.run, status.state, status.code, status.message)
            except OSError as error:
                print(f"{self.run.exit} cannot be written: {error.strerror}", file=sys.stderr)
        return False

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the lock. After a SetupError before training, undo what was written."""
        try:
            if isinstance(error, SetupError):
                self.undo()
        finally:
            _give_back(self._lock)


def after_step(run: RunDir, *, first: bool) -> None:
    """Rank 0 calls it, for the process that has the lock. The first step shows that settings, data and model are sound:
    a run set aside goes then. Raises TrainingError if the run directory is gone.
    """
    if first:
        _remove_tree(run.set_aside)
        _forget_hidden(run)
    check_in_place(run)


def check_in_place(run: RunDir) -> None:
    """Raise TrainingError if the directory of a job that trains is not there any more. Costs microseconds."""
    if not run.lock.exists():
        raise TrainingError(
            f"{shown(run.root)}: was removed or moved while this run trained in it, so it ends and saves nothing more; "
            "if it was moved, forgather resume goes on with it where it is now"
        )


def _forget_hidden(run: RunDir) -> None:
    """Delete the files that a start has hidden, which needs no undo any more."""
    for path in run.root.glob(f"{_HIDDEN}*"):
        path.unlink()


def restore_overwritten(run: RunDir) -> None:
    """Put back a run that a killed job had set aside and never overwritten, before anything of it is read.

    Does nothing while a job holds the directory: taking the lock will fail then, and say so. Raises SetupError.
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
        _give_back(lock)
    what = "overwrite_output_dir=true was cut off before its first step: this is the run from before it"
    tell(f"{shown(run.root)}: {what}", sys.stderr)


def is_held(run: RunDir) -> bool:
    """Whether a job holds the run directory now."""
    if run.lock.resolve() in _HELD.values():
        return True
    try:
        with run.lock.open("rb") as lock:
            fcntl.lockf(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:  # among them that there is no lock
        return error.errno in (errno.EACCES, errno.EAGAIN)
    return False


def remove_run(run: RunDir) -> list[Path]:
    """Delete a run's own files, and its directory if nothing else is there; returns what else is. Raises SetupError."""
    try:
        lock = _take_lock(run)
    except SetupError as error:
        raise SetupError(f"{run.root}: is not removed: {error}") from error
    try:
        for path in run.own_files():
            if path.is_dir() and not path.is_symlink():
                _remove_tree(path)
            else:
                path.unlink()
        kept = sorted(run.root.iterdir())
        if not kept:
            run.root.resolve().rmdir()
    except OSError as error:
        raise SetupError(f"{error.filename}: cannot be removed: {error.strerror}; make it writable") from error
    finally:
        _give_back(lock)
    return kept


def _files_of(run: RunDir) -> list[Path]:
    """What a run of ours leaves directly in its directory; other files are not touched."""
    starts = [run.later_config(n) for n in run.later_starts()]
    files = [
        run.metrics,
        run.rollbacks,
        run.data_files,
        run.samples,
        run.exit,
        run.hang,
        run.config,
        run.origin,
        *starts,
    ]
    files += [run.diloco, run.diloco_address, run.diloco_token, run.diloco_workers, run.rounds]
    folders = [run.logs, run.tensorboard, run.trackers, run.checkpoints, run.control]
    folders += [run.diloco_worker, run.submissions, run.weights]
    return [path for path in (*files, *folders) if path.exists()]


def _restore_overwritten(run: RunDir) -> None:
    """Put back a run that was set aside by a job that never trained; delete it if that job did train.

    If this is interrupted, the next job completes it.
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


def _remove_empty(*paths: Path) -> None:
    for path in paths:
        try:
            path.rmdir()
        except OSError:
            return


def _take_lock(run: RunDir) -> int:
    """Hold RUN/.lock; returns its descriptor.

    A record lock, which belongs to the process: one of flock(2) would live on in data workers for the seconds they
    need to notice that their parent was killed, and a restart would be refused. It does not keep out this process
    itself, which gives it back when it closes any descriptor of the file: ``_HELD`` does, before one is opened.
    """
    path = run.lock.resolve()
    with _TAKING:
        if path in _HELD.values():
            raise _held_by(run, path.read_text(errors="replace"))
        with _writing(run.root):
            lock = os.open(run.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(lock, 200).decode(errors="replace")
            os.close(lock)
            raise _held_by(run, holder) from error
        try:
            with _writing(run.lock):
                os.ftruncate(lock, 0)
                os.write(lock, f"pid {os.getpid()} on {socket.gethostname()}\n".encode())
        except SetupError:
            os.close(lock)
            raise
        _HELD[lock] = path
        return lock


def _give_back(lock: int) -> None:
    os.close(lock)
    del _HELD[lock]


def _held_by(run: RunDir, holder: str) -> SetupError:
    return SetupError(
        f"output_dir: {shown(run.root)} is being written by another job ({holder.strip() or 'unknown process'}); wait "
        "for it or choose another one"
    )


def _remove_tree(directory: Path) -> None:
    """Delete a directory; renamed first, so that a kill in between leaves nothing that looks whole."""
    if directory.is_dir():
        doomed = directory.with_name(f".{directory.name.lstrip('.')}.deleted")
        shutil.rmtree(doomed, ignore_errors=True)
        directory.rename(doomed)
        shutil.rmtree(doomed)


def versions() -> dict[str, str]:
    """Versions of Python and of the packages a run depends on, without importing them."""
    found = {"forgather": __version__, "python": sys.version.split()[0]}
    for name in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def _yaml(value: dict[str, Any]) -> str:
    """A YAML document with texts of several lines as blocks."""
    import yaml

    class BlockDumper(yaml.SafeDumper):
        pass

    def text(dumper: Any, value: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    BlockDumper.add_representer(str, text)
    return yaml.dump(value, Dumper=BlockDumper, sort_keys=False, allow_unicode=True, width=120)
