"""From a checked config to a finished run: take the run directory, train here or in ranks, return the exit code."""

from __future__ import annotations

import errno
import gc
import importlib
import logging
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.checkpoint.choice import candidates, would_resume
from forgather_cli.config.decided import decided, left_open
from forgather_cli.config.rules import owners, rule_problems
from forgather_cli.config.schema import EVALUATED, TOKEN_VARIABLE, Config, Option, Target
from forgather_cli.errors import CheckpointError, ConfigError, SetupError, did_you_mean
from forgather_cli.hub import check_model
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.error_report import report_failure
from forgather_cli.launch.exit_status import DONE, FAILED, ExitStatus, Kind, read_exit_record
from forgather_cli.launch.job import Job
from forgather_cli.launch.layout import Layout, plan_layout
from forgather_cli.launch.memory import check_memory
from forgather_cli.launch.place import Place, enter
from forgather_cli.launch.processes import leave_now, owned, remove_abandoned, torchrun_folder
from forgather_cli.launch.rank import Start, Work, run_rank, wait_for_start
from forgather_cli.launch.rank_log import lasting_output
from forgather_cli.launch.run_lock import RunLock
from forgather_cli.launch.supervise import Supervisor
from forgather_cli.run_dir import RunDir, resume_command, shown
from forgather_cli.targets import is_installed
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded


@lasting_output()
def launch(compose: Callable[[], Loaded], work: Work, place: Place | None = None, run: RunDir | None = None) -> int:
    """Train the config that ``compose`` returns: do ``work`` here, or in ranks that are started here; returns the exit
    code (0, 1, 2, 75, 128 + signal).

    ``place``: this process's rank where torchrun or the like has started it; of such ranks only rank 0 composes, and
    ``run`` is the directory that the command names, which a signal before that leaves as it was found. Raises
    ConfigError and SetupError before anything is started; later errors are shown and logged here.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: its store warns of ranks that are gone
    if place is not None:
        return _join(place, compose, work, run)
    loaded = compose()
    remove_abandoned()
    layout = _checked_layout(loaded)
    if layout.node > 0:
        return launch_ranks(layout, None, None).code
    check_port(layout)
    root = output_dir(loaded)
    loaded = as_begun(loaded, RunDir(root))
    if layout.nodes == 1 and (reason := _nothing_left(RunDir(root), loaded)) is not None:
        tell(f"nothing left to train: {reason}; raise max_steps or num_train_epochs to train further")
        return DONE
    with RunLock(root) as held:
        config, path = _begin(held, loaded, layout)
        conclude_run = partial(_conclude_run, held)
        control, before, kept = config.callbacks.control, os.environ.get(TOKEN_VARIABLE), held.run.checkpoint_steps()
        first = config
        while True:  # once, or again with smaller micro-batches after memory has run out (auto_find_batch_size)
            if layout.in_process:
                rank = RankContext(Place(), conclude_run=conclude_run)
                status = run_rank(rank, Start(held.run, config), work)
            else:
                if control is not None and control.auth_token is not None:  # config.yaml does not hold it
                    os.environ[TOKEN_VARIABLE] = control.auth_token
                try:
                    status = launch_ranks(layout, held.run, path, conclude_run)
                finally:
                    os.environ.pop(TOKEN_VARIABLE, None)
                    os.environ.update({} if before is None else {TOKEN_VARIABLE: before})
            if status.smaller_batch is None:
                break
            config = _with_smaller_batch(held, config, path, status, kept)
        if config is not first and not status.failed:
            size = config.per_device_train_batch_size
            tell(f"auto_find_batch_size: found per_device_train_batch_size={size}, which forgather resume uses too")
        conclude_run(status)
    return status.code


@lasting_output()
def serve(loaded: Loaded, work: Work, diloco: str) -> int:
    """Do ``work`` here that takes the place of training, whatever the config says of ranks; returns the exit code.

    ``diloco``: the content of ``diloco.yaml``, which tells the run's directory from one of training.
    """
    check_surroundings(loaded.config)
    with RunLock(output_dir(loaded)) as held:
        config, _ = _begin(held, loaded, plan_layout(loaded.config, loaded.given), diloco=diloco)
        rank = RankContext(Place(), conclude_run=partial(_conclude_run, held))
        status = run_rank(rank, Start(held.run, config), work)
        _conclude_run(held, status)
    return status.code


def _join(place: Place, compose: Callable[[], Loaded], work: Work, run: RunDir | None) -> int:
    """Train as one rank of a world that torchrun or Slurm has started; returns the exit code, under torchrun 0 after a
    signal too (``RankContext.exit_code``).

    Only rank 0 composes the config and locks the run directory; the others wait until it shares them.
    """
    enter(place)
    rank = RankContext(place, run=run)
    with ExitStack() as stack:
        if place.local_rank == 0 and (folder := torchrun_folder(os.environ.get("TORCHELASTIC_ERROR_FILE"))) is not None:
            with suppress(OSError):  # another command has just removed it
                stack.enter_context(owned(folder))

        def begin(rank: RankContext) -> Start:
            loaded = compose()
            layout = _checked_layout(loaded, place)
            rendezvous = rank.connect()
            again = rendezvous.earlier_root() if rendezvous is not None and place.attempt else None
            held = stack.enter_context(RunLock(Path(again) if again else output_dir(loaded)))
            rank.run, rank.conclude_run = held.run, partial(_conclude_run, held)
            config, _ = _begin(held, as_begun(loaded, held.run), layout, again=again is not None)
            return Start(held.run, config)

        status = run_rank(rank, wait_for_start if place.rank else begin, work)
        rank.conclude_run(status)
    code = rank.exit_code(status)
    if status.failed and place.size > 1:  # unwinding may wait for ranks that are gone
        leave_now(code)
    return code


def launch_ranks(
    layout: Layout,
    run: RunDir | None,
    path: Path | None,
    conclude_run: Callable[[ExitStatus], None] = lambda status: None,
) -> ExitStatus:
    """Run this node's ranks under torchrun's agent, on the config at ``path``; a failure of theirs is shown here, once.

    For ``run`` and ``conclude_run`` see ``Supervisor``.
    """
    elastic = logging.getLogger("torch.distributed.elastic")
    elastic.addHandler(logging.NullHandler())  # its report of failed ranks would come before ours, on standard error
    elastic.propagate = False
    with Job.create(node=layout.node, nodes=layout.nodes) as job:
        status = Supervisor(layout, job, run, conclude_run).run(path)
    if status.failed and sys.stderr.isatty():
        sys.stderr.write("\r\x1b[K\x1b[?25h")  # a bar that rank 0 could not take away, and the cursor it hid
    if status.failed and status.smaller_batch is None:
        report_failure(status, rank_named=layout.world > 1)
    if status.kind == Kind.ERROR and run is not None:
        tell(f"the log of rank {status.rank} is {shown(run.rank_log(status.rank))}", sys.stderr)
    return status


def _with_smaller_batch(held: RunLock, config: Config, path: Path, status: ExitStatus, kept: list[int]) -> Config:
    """The config with which a run starts again that has run out of memory, with smaller micro-batches.

    All ranks end and start again, under every strategy: ranks that wait in a collective for the one without memory
    could not agree on anything. The sequences of one optimizer step stay the same, so the losses do too. What is tried
    is written to ``path``, the config of this start: ranks read it, and a resume uses it. ``kept``: the steps of
    checkpoints that were there at the start.
    """
    from forgather_cli.config.decode import dump_saved, load_tree

    size, was = status.smaller_batch, status.batch
    assert size is not None
    tell(
        f"\nauto_find_batch_size: out of memory with {was} sequences at a time; starting again with {size}", sys.stderr
    )
    steps = None  # follows from global_batch_size
    if config.global_batch_size is None:
        steps = config.per_device_train_batch_size * (config.gradient_accumulation_steps or 1) // size
    has_saved = set(held.run.checkpoint_steps()) - set(kept)
    tree: dict[str, Any] = {
        "per_device_train_batch_size": size,
        "gradient_accumulation_steps": steps,
        "resume_from_checkpoint": True if has_saved else config.resume_from_checkpoint,
    }
    held.write(path, dump_saved({**load_tree(path), **tree}))
    gc.collect()  # trainers are cycles, and CUDA's allocator keeps what it has got
    if (torch := sys.modules.get("torch")) is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    return replace(config, **tree)


# ------------------------------------------------------------------------------------------------------ the directory


def output_dir(loaded: Loaded) -> Path:
    """The run directory: ``output_dir`` as given, else the default with a number added if it exists already."""
    base = Path(loaded.config.output_dir or "outputs")
    if "output_dir" in loaded.given:
        return base
    candidates = [base, *(base.with_name(f"{base.name}_{n}") for n in range(2, 1000))]
    return next(path for path in candidates if not path.exists())


def as_begun(loaded: Loaded, run: RunDir) -> Loaded:
    """``loaded`` with the day that a chat template writes, and what the machine decides (``config/decided.py``), which
    is said: those that ``run`` was begun with, else today and what its device is best at. Raises ConfigError where that
    contradicts other settings.
    """
    from forgather_cli.config.decode import load_saved, to_tree

    data, begun = loaded.config.data, None
    is_open = left_open(loaded.config) or data.template_date is None
    if is_open and run.config.exists() and not loaded.config.overwrite_output_dir:  # on whatever machine that was
        begun = load_saved(run.newest_config())
    if data.template_date is None:
        day = getattr(begun.data if begun else None, "template_date", None) or f"{datetime.now():%Y-%m-%d}"
        changed: dict[str, Any] = {"template_date": day}
        loaded.tree["data"] |= changed
        loaded = replace(loaded, config=replace(loaded.config, data=replace(data, **changed)))
    config, decisions = decided(loaded.config, begun)
    if problems := rule_problems(config) if decisions else []:
        here = ", ".join(each.says for each in decisions)
        raise ConfigError([f"{problem} ({here})" for problem in problems])
    tree = {**loaded.tree}
    for each in decisions:
        if each.why:
            tell(f"{each.says} ({each.why})")
        group, _, name = each.path.rpartition(".")
        tree |= {group: {**tree[group], name: each.value}} if group else {name: to_tree(each.value)}
    return replace(loaded, config=config, tree=tree)


def _nothing_left(run: RunDir, loaded: Loaded) -> str | None:
    """Why a run that is to be resumed is at its end already; None if it is not. Changes nothing.

    Raises ConfigError if max_steps is smaller than the step that it has reached.
    """
    from forgather_cli.config.decode import load_tree

    config = loaded.config
    if config.resume_from_checkpoint is not True:
        return None
    try:
        newest = max(candidates(run), key=lambda each: each.step, default=None)
    except CheckpointError:
        return None  # whoever resumes it says what is wrong
    if newest is not None and 0 < config.max_steps < newest.step and config.resume_components == "all":
        raise ConfigError(
            f"max_steps: the run has a checkpoint of step {newest.step}, got {config.max_steps}; give {newest.step} or "
            f"more, or remove the later checkpoints from {run.checkpoints} to resume from an earlier one"
        )
    ended = read_exit_record(run)
    if ended is None and run.exit.exists():
        tell(f"{run.exit}: cannot be read, so the run goes on from its newest checkpoint", sys.stderr)
    if ended is None or ended.state != "done" or (newest is not None and newest.step != ended.step):
        return None
    if config.max_steps != ended.step:  # it counts epochs, or was stopped early: then any other setting is a reason
        own = ("output_dir", "overwrite_output_dir", "resume_from_checkpoint", "resume_components")
        saved, tree = load_tree(run.newest_config()), loaded.tree
        if any(saved.get(key) != tree.get(key) for key in {*saved, *tree}.difference(own)):
            return None
    if newest is not None:
        if newest.manifest is None or newest.manifest.problems(newest.path, config.verify_checkpoint):
            return None
        if config.average_last is not None and not run.average(newest.step, config.average_last).is_dir():
            return None
    return f"step {ended.step} is the last ({ended.reason})"


def _begin(
    held: RunLock, loaded: Loaded, layout: Layout, *, again: bool = False, diloco: str | None = None
) -> tuple[Config, Path]:
    """Write the files of this start; returns the config with its directory, and its file. ``again``: a restart of all
    ranks by whoever started them.
    """
    from forgather_cli.config.decode import dump_saved

    for note in loaded.notes:
        tell(note)
    root = held.run.root
    config = replace(loaded.config, output_dir=str(root))
    path = held.prepare(
        dump_saved({**loaded.tree, "output_dir": str(root)}),
        origin_of(loaded),
        overwrite=config.overwrite_output_dir and config.resume_from_checkpoint is not True and not again,
        resume=config.resume_from_checkpoint is not False or again,
        ranks=layout.world,
        diloco=diloco,
    )
    return config, path


def origin_of(loaded: Loaded) -> dict[str, Any]:
    """The content of ``origin.yaml`` besides versions."""
    token = getattr(loaded.config.callbacks.control, "auth_token", None)

    def hidden(text: str) -> str:
        return text.replace(token, "***") if token else text

    return {
        "recipe": loaded.recipe,
        "recipe_path": str(loaded.recipe_path) if loaded.recipe_path else None,
        "overrides": [hidden(each) for each in loaded.overrides],
        "directory": str(Path.cwd()),
        "option_files": loaded.option_files,
        "given": sorted(loaded.given),
        "started_at": datetime.now().astimezone().isoformat(timespec="seconds"),
        "recipe_text": hidden(loaded.recipe_text),
    }


def _conclude_run(held: RunLock, status: ExitStatus) -> None:
    """Conclude the run in its directory. The last line printed is the command that resumes it, where there is one."""
    if held.conclude(status):
        return
    chosen = None if status.state == "done" else would_resume(held.run)
    if chosen is not None:
        how = "" if status.failed else f"{status.message}; "
        stream = sys.stderr if status.code == FAILED else sys.stdout
        tell(f"\n{how}to resume from step {chosen.step}:\n{resume_command(held.run)}", stream)


# ----------------------------------------------------------------------------------------- checks before ranks start


def _checked_layout(loaded: Loaded, place: Place | None = None) -> Layout:
    """The layout of a run that can begin here. Raises ConfigError and SetupError for what is seen before."""
    check_surroundings(loaded.config)
    check_best_metric(loaded.config)
    layout = plan_layout(loaded.config, loaded.given, place)
    check_memory(loaded.config, layout)
    return layout


def check_surroundings(config: Config) -> None:
    """Raise SetupError for what the config needs and this machine lacks, before anything is imported that takes time:
    a model in the directory of ``model.path``, and packages, with the command that installs them.
    """
    check_model(config)
    for path, option in owners("", config):
        for package in option.needs[1:] if isinstance(option, Option) else ():
            if find_spec(package.replace("-", "_")) is None:
                what = f"{path[:-1]}={option.type}: needs the package {package}"
                raise SetupError(f"{what}; pip install 'forgather[{option.needs[0]}]'")
    # here, where a terminal can be asked; ranks have none
    trackers, said = config.callbacks.trackers, {"WANDB_API_KEY", "WANDB_MODE"} & os.environ.keys()
    asks = trackers is not None and "wandb" in trackers.names and "mode" not in trackers.init_kwargs.get("wandb", {})
    if asks and not said and config.node_rank == 0 and is_installed("wandb"):
        try:
            importlib.import_module("wandb").login()
        except Exception as error:  # another class in other versions (wandb 0.31: UsageError)
            remedy = "run wandb login, export WANDB_API_KEY, or WANDB_MODE=offline"
            raise SetupError(f"callbacks.trackers: wandb has no key here ({error}); {remedy}") from error


def check_best_metric(config: Config) -> None:
    """Raise ConfigError for a ``metric_for_best_model`` that no evaluation has. What data with tasks, benchmarks and
    parts of the user's add is known at the first one.
    """
    metric, scheduler, callbacks = config.metric_for_best_model, config.lr_scheduler, config.callbacks
    has_more = callbacks.custom or getattr(callbacks, "tasks", None) or isinstance(scheduler, Target)
    known = (*EVALUATED, *getattr(config.loss, "metrics", ()))
    if not has_more and config.data.is_paired is False and metric.removeprefix("eval_") not in known:
        names = ", ".join(f"eval_{name}" for name in known)
        near = did_you_mean(metric, known)
        raise ConfigError(
            f"metric_for_best_model: no evaluation has {metric};{near} set it to one that it has ({names}), or add a "
            "callback of yours that measures it"
        )


def check_port(layout: Layout) -> None:
    """Raise SetupError if the port of ``rdzv_endpoint`` is in use on this machine.

    torch would take any process that listens there for the store, and wait (2.13, ``_create_tcp_store``).
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
