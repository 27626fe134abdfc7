"""From a checked config to a finished run: the directory, where the ranks are, and the exit code."""

from __future__ import annotations

import errno
import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.checkpoint.retention import list_checkpoints
from forgather_cli.config.schema import TOKEN_VARIABLE, Config
from forgather_cli.errors import CheckpointError, ConfigError, ForgatherError, SetupError
from forgather_cli.launch.exit_status import (
    DONE,
    FAILED,
    MISTAKE,
    ExitStatus,
    Kind,
    read_exit_record,
    resume_command,
    write_exit_record,
)
from forgather_cli.launch.job import Job
from forgather_cli.launch.layout import Layout, plan_layout
from forgather_cli.launch.packages import check_packages
from forgather_cli.launch.place import Place, enter
from forgather_cli.launch.process import leave_now
from forgather_cli.launch.rank import Rank, Start, shared
from forgather_cli.launch.rank_log import lasting_output
from forgather_cli.launch.rendezvous import Rendezvous
from forgather_cli.launch.report import report_failure
from forgather_cli.launch.run_lock import RunLock, forget_hidden, prepare
from forgather_cli.launch.smaller_batch import until_it_fits
from forgather_cli.launch.supervise import Supervisor
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded


def output_dir(loaded: Loaded) -> Path:
    """Where the run goes; the directory made up from date and time gets a number where another run has that name."""
    base = Path(loaded.config.output_dir or "outputs")
    if "output_dir" in loaded.given:
        return base
    candidates = [base, *(base.with_name(f"{base.name}_{n}") for n in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


@lasting_output()
def launch(loaded: Loaded) -> int:
    """Train in this process, or start ranks that do; returns the exit code (0, 1, 2, 75).

    Raises ConfigError and SetupError for what is found before the run directory is taken; later ones are shown and
    logged here.
    """
    check_packages(loaded.config)
    layout = plan_layout(loaded.config, loaded.given)
    if layout.node > 0:
        return supervised(layout, None, None).code
    check_port(layout)
    root = output_dir(loaded)
    if layout.nodes == 1 and (reason := _nothing_left(RunDir(root), loaded)) is not None:
        print(f"nothing left to train: {reason}; raise max_steps or num_train_epochs to go on")
        return DONE
    with RunLock(root) as held:
        config, path = _begin(held, loaded, layout)
        status = until_it_fits(held, config, path, partial(_train, layout, held, path))
        _settle(held, status)
    return status.code


def _nothing_left(run: RunDir, loaded: Loaded) -> str | None:
    """Why a run that is to be gone on with is at its end already; None if it is not. Changes nothing.

    Raises ConfigError where its end is to lie behind what it has reached.
    """
    from forgather_cli.checkpoint.manifest import read_manifest
    from forgather_cli.config.decode import load_tree

    config, steps = loaded.config, run.checkpoint_steps()
    if config.resume_from_checkpoint is not True:
        return None
    if steps and 0 < config.max_steps < steps[-1] and config.resume_components == "all":
        raise ConfigError(
            f"max_steps: the run has a checkpoint of step {steps[-1]}, got {config.max_steps}; give {steps[-1]} or "
            f"more, or remove the later checkpoints from {run.checkpoints} to go on from an earlier one"
        )
    ended = read_exit_record(run)
    if ended is None or ended.state != "done" or (steps and steps[-1] != ended.step):
        return None
    if config.max_steps != ended.step:  # it counts epochs, or was stopped early: then any other setting is a reason
        own = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "resume_components")
        saved, tree = load_tree(run.newest_config()), loaded.tree
        if any(saved.get(key) != tree.get(key) for key in {*saved, *tree}.difference(own)):
            return None
    if steps and config.verify_checkpoint != "none":
        path = run.checkpoint(steps[-1])
        try:
            if read_manifest(path).problems(path, config.verify_checkpoint):
                return None
        except CheckpointError:
            return None
    return f"step {ended.step} is the last ({ended.reason})"


def _train(layout: Layout, held: RunLock, path: Path, config: Config) -> ExitStatus:
    """Train once; ``path`` holds the config."""
    settle = partial(_settle, held)
    if layout.in_process:
        return Rank(Place(), settle=settle).train(lambda rank: _start(config, held))
    control = config.callbacks.control
    if control is None or control.auth_token is None:
        return supervised(layout, held.run, path, settle)
    before = os.environ.get(TOKEN_VARIABLE)
    os.environ[TOKEN_VARIABLE] = control.auth_token  # the ranks' config.yaml holds none
    try:
        return supervised(layout, held.run, path, settle)
    finally:
        os.environ.pop(TOKEN_VARIABLE) if before is None else os.environ.update({TOKEN_VARIABLE: before})


@lasting_output()
def join(place: Place, compose: Callable[[], Loaded]) -> int:
    """Be one rank of a world that others have started; returns the exit code, which is 0 after a signal too.

    Only rank 0 composes the config and takes the run directory; the others wait for what it says. Raises ConfigError
    and SetupError like ``launch``, on rank 0.
    """
    enter(place)
    if place.rank > 0:
        rank = Rank(place)
        status = rank.train(shared)
        return _left(rank, status)
    rendezvous: Rendezvous | None = None
    try:
        loaded = compose()
        check_packages(loaded.config)
        layout = plan_layout(loaded.config, loaded.given, place)
        rendezvous = Rendezvous(place) if place.size > 1 else None
        again = rendezvous.earlier_root() if rendezvous is not None and place.attempt else None
        with RunLock(Path(again) if again else output_dir(loaded)) as held:
            config, _ = _begin(held, loaded, layout, again=again is not None)
            rank = Rank(place, rendezvous=rendezvous, settle=lambda status: _settle(held, status))
            status = rank.train(lambda rank: _start(config, held))
            _settle(held, status)
        return _left(rank, status)
    except ForgatherError as error:
        _tell_mistake(place, rendezvous, error)
        raise


def _left(rank: Rank, status: ExitStatus) -> int:
    code = rank.exit_code(status)
    if status.failed and rank.place.size > 1:  # unwinding may wait for ranks that are gone
        leave_now(code)
    return code


def _tell_mistake(place: Place, rendezvous: Rendezvous | None, error: ForgatherError) -> None:
    """Let the other ranks leave too, which say nothing of it."""
    if place.size == 1:
        return
    problems = tuple(error.problems) if isinstance(error, ConfigError) else ()
    rendezvous = rendezvous or Rendezvous(place)
    rendezvous.fail(ExitStatus(0, Kind.MISTAKE, error.exit_code, str(error), problems))
    rendezvous.leave()


# ------------------------------------------------------------------------------------------------------ the directory


def _begin(held: RunLock, loaded: Loaded, layout: Layout, *, again: bool = False) -> tuple[Config, Path]:
    """Write what is started; returns the config with its directory, and its file. ``again``: a restart of all ranks."""
    root = held.run.root
    config = replace(loaded.config, output_dir=str(root))
    path = prepare(
        held,
        _config_text({**loaded.tree, "output_dir": str(root)}),
        _origin(loaded),
        overwrite=config.overwrite_output_dir and config.resume_from_checkpoint is not True and not again,
        resume=config.resume_from_checkpoint is not False or again,
        ranks=layout.world,
    )
    return config, path


def _start(config: Config, held: RunLock) -> Start:
    return Start(held.run, lambda: config)


def _config_text(tree: dict[str, Any]) -> str:
    from forgather_cli.config.decode import dump_tree

    return dump_tree(tree)


def _origin(loaded: Loaded) -> dict[str, Any]:
    """What ``origin.yaml`` tells besides versions."""
    token = getattr(loaded.config.callbacks.control, "auth_token", None)

    def hidden(text: str) -> str:
        return text.replace(token, "***") if token else text

    return {
        "recipe": loaded.recipe,
        "recipe_path": str(loaded.recipe_path) if loaded.recipe_path else None,
        "overrides": [hidden(each) for each in loaded.overrides],
        "directory": str(Path.cwd()),
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe_text": hidden(loaded.recipe_text),
    }


def _settle(held: RunLock, status: ExitStatus) -> None:
    """Leave the directory as an status asks: as it was found after a mistake, else with ``exit.json``, which a run that
    has come to its end has written itself. The last line is how to go on, where there is something to go on from.
    """
    run = held.run
    mistake = status.code == MISTAKE or held.has_set_aside()
    if status.failed and mistake and status.kind != Kind.CUT and not held.has_trained():
        held.undo()
        return
    forget_hidden(run)
    if status.failed:
        try:
            write_exit_record(run, status.state, status.code, status.message)
        except OSError as error:
            print(f"{run.exit} cannot be written: {error.strerror}", file=sys.stderr)
    kept = [] if status.state == "done" else list_checkpoints(run)
    kept = [info for info in kept if info.healthy] or kept  # as a resume chooses
    if kept:
        told = "" if status.failed else f"{status.message}; "
        stream = sys.stderr if status.code == FAILED else sys.stdout
        print(f"\n{told}to go on from step {kept[-1].step}:\n{resume_command(run)}", file=stream, flush=True)


# ----------------------------------------------------------------------------------------------------------- our ranks


def supervised(
    layout: Layout, run: RunDir | None, path: Path | None, settle: Callable[[ExitStatus], None] = lambda status: None
) -> ExitStatus:
    """Run ranks of this node under torchrun's agent, on the config at ``path``. Why they failed is shown here, once.

    ``run`` and ``settle`` are the Supervisor's.
    """
    _quiet_elastic()
    with Job.made(node=layout.node, nodes=layout.nodes, restarts=layout.restarts) as job:
        status = Supervisor(layout, job, run, settle).train(path)
    if status.failed and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K\x1b[?25h")  # a bar that rank 0 could not take away, and the cursor it hid
    if status.failed and status.smaller_batch is None:
        report_failure(status, rank_named=layout.world > 1)
    if status.kind == Kind.ERROR and run is not None:
        print(f"the log of rank {status.rank} is {run.rank_log(status.rank)}", file=sys.stderr, flush=True)
    return status


def _quiet_elastic() -> None:
    """Its account of failed ranks would come before ours, on standard error, for want of a handler of its own."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False


def check_port(layout: Layout) -> None:
    """Raise SetupError if the port where the ranks are to meet is taken.

    torch takes whoever listens there for the store, and waits (2.13, ``_create_tcp_store``).
    """
    if layout.nodes == 1 or layout.endpoint is None:
        return
    port = int(layout.endpoint.rpartition(":")[2])
    with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
        except OSError as error:
            if error.errno in (errno.EADDRINUSE, errno.EACCES):
                raise SetupError(
                    f"rdzv_endpoint: port {port} of this machine cannot be taken: {error.strerror}; choose another one"
                ) from error
