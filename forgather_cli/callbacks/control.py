"""TrainerControlCallback: lets ``forgather control`` reach the running job, and answers its commands."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.json_logger import plain
from forgather_cli.config.schema import ControlSettings
from forgather_cli.control import command_record, registry
from forgather_cli.control.command_queue import CommandQueue
from forgather_cli.control.command_record import ABORT, SAVE, STOP, ControlCommand
from forgather_cli.control.registry import Entry
from forgather_cli.control.server import PORTS, ControlServer
from forgather_cli.errors import ForgatherError
from forgather_cli.run_dir import step_of

log = logging.getLogger(__name__)

_NEWEST = 50  # records of the log history that the newest metrics are looked for in


class TrainerControlCallback(BuiltIn[ControlSettings]):
    """Serves commands on world rank 0, and answers each when it is done or has failed.

    All ranks agree on commands and the loop acts on them in ``trainer.step_sync``, which reads the queue made here. A
    step costs one call; ``status`` reads what it reports when it is called. Nothing here raises: a job that cannot be
    controlled trains on.
    """

    def __init__(self, *args: Any, job_id: str | None = None, **kwargs: Any) -> None:
        """``job_id``: in the place of the setting of this name."""
        super().__init__(*args, **kwargs)
        self.job_id = job_id
        self._trainer: Any = None
        self._queue: CommandQueue | None = None
        self._server: ControlServer | None = None
        self._entry: Entry | None = None
        self._about: dict[str, Any] = {}
        """The part of the status that does not change."""
        self._evaluating = False
        self._pace: tuple[float, int] | None = None
        """Time (seconds) and step at which this process began to train."""
        self._save_steps: dict[str, int] = {}
        """Id of a save command -> the step whose checkpoint answers it."""
        self._published: dict[int, Path] = {}

    # --------------------------------------------------------------------------------------------------------- events

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._trainer = trainer = kwargs["trainer"]
        job_id = self.job_id or args.job_id or registry.new_job_id(os.getpid())
        if registry.is_taken(job_id):
            log.warning("job_id: %s is the id of a job that runs; this one adds its process id", job_id)
            job_id = f"{job_id}_{os.getpid()}"
        self._evaluating, self._pace, self._save_steps, self._published = False, None, {}, {}
        self._queue = CommandQueue(trainer.run_dir, job_id, step=lambda: state.global_step)
        trainer.run.sync.commands = self._queue
        if not state.is_world_process_zero:
            return
        resumed = trainer.run_dir.checkpoint(state.resumed_step)
        if state.resumed_step and resumed.is_dir():
            self._published[state.resumed_step] = resumed
        for left in command_record.unfinished(trainer.run_dir):
            command_record.write(trainer.run_dir, left.failed("its job ended before it answered"))
        if self.settings.enable_http:
            self._listen(job_id)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluating = False
        if self._pace is None:
            self._pace = time.monotonic(), state.global_step
        if self._queue is not None and self._queue.has_open:
            self._answer_saves(state, control)

    def on_prediction_step(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluating = True

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluating = False

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        path = Path(kwargs["checkpoint"])
        self._published[step_of(path) or 0] = path
        self._answer_saves(self._trainer.state, control)  # not ``state``, which is that of the saved step

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for command in self._unfinished():
            self._answer_at_end(command, state.global_step)
        self._stop_listening()

    def on_exception(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        for command in self._unfinished():
            step = self._save_steps.get(command.id)
            path = None if step is None else self._trainer.run_dir.checkpoint(step)
            if path is not None and path.is_dir():  # published while the job failed
                self._commands.finish(command.done(path))
            else:
                self._commands.finish(command.failed(f"the job failed: {_one_line(kwargs.get('exception'))}"))
        self._stop_listening()

    # -------------------------------------------------------------------------------------------------------- answers

    @property
    def _commands(self) -> CommandQueue:
        assert self._queue is not None
        return self._queue

    def _unfinished(self) -> list[ControlCommand]:
        return [] if self._queue is None else self._queue.open()

    def _answer_saves(self, state: TrainerState, control: TrainerControl) -> None:
        """While training continues: answer the save commands whose checkpoint is published or has failed."""
        for command in self._commands.applied():
            if command.command != SAVE:
                continue
            if command.id not in self._save_steps:
                if control.should_save:  # the loop has not saved yet
                    continue
                self._save_steps[command.id] = state.global_step
            step = self._save_steps[command.id]
            if step in self._published:
                self._commands.finish(command.done(self._published[step]))
            elif (why := self._failure(step)) is not None:
                self._commands.finish(command.failed(f"the checkpoint of step {step} was not saved: {why}"))

    def _answer_at_end(self, command: ControlCommand, last: int) -> None:
        """Answer a command after training ended at step ``last``, when no checkpoint is being written any more."""
        step = self._save_steps.get(command.id, last)
        path, why = self._published.get(last) or self._published.get(step), self._failure(step)
        if command.command == ABORT:
            self._commands.finish(command.done())
        elif path is not None or (command.command == STOP and why is None):
            self._commands.finish(command.done(path))
        elif why is not None:
            self._commands.finish(command.failed(f"the checkpoint of step {step} was not saved: {why}"))
        elif self._trainer.control.should_abort_without_save:
            self._commands.finish(command.failed(f"the job was aborted at step {last} before it saved"))
        else:
            self._commands.finish(command.failed(f"the job ended at step {last} before it saved"))

    def _failure(self, step: int) -> str | None:
        """Why the checkpoint of a step was not published; None if it was, or may still be."""
        if step in self._published:
            return None
        return next((why for failed, why in reversed(self._trainer.checkpoints.failures) if failed == step), None)

    # ------------------------------------------------------------------------------------------------------- listening

    def _listen(self, job_id: str) -> None:
        settings = self.settings
        ports = PORTS if settings.port is None else [settings.port]
        self._about = {
            "job_id": job_id,
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "started_at": command_record.now(),
            "run_dir": str(self._trainer.run_dir.root.resolve()),
        }
        stacks = self._trainer.run.job.stacks
        reports = {"status": self.status} | ({} if stacks is None else {"stacks": stacks})
        try:
            token = None if settings.disable_auth else settings.given_token() or secrets.token_hex(32)
            self._server = ControlServer(job_id, self._commands, reports, host=settings.host, ports=ports, token=token)
            run = self.run
            entry = Entry(
                **self._about,
                host=settings.host,
                port=self._server.port,
                process_start_time=registry.start_of(os.getpid()) or "",
                logging_dir=str((run.logging_dir or run.root).resolve()),
            )
            registry.register(entry, token)
            self._entry = entry
        except Exception as error:  # whatever it is: training is worth more than being steered
            log.warning("control: this job takes no commands: %s", _one_line(error))
            self._stop_listening()
            return
        log.info("control: this is %s", job_id)
        reach = "any process of this machine"
        if not settings.host.startswith(registry.LOOPBACK):
            reach = "whoever reaches this machine"
            log.warning(
                "callbacks.control.host=%s: other machines reach this job, and the token travels unencrypted",
                settings.host,
            )
        if settings.disable_auth:
            log.warning("callbacks.control.disable_auth=true: %s can stop this job", reach)

    def _stop_listening(self) -> None:
        """Take the job out of the registry and close the server."""
        server, self._server = self._server, None
        entry, self._entry = self._entry, None
        try:
            if entry is not None:
                registry.unregister(entry)
            if server is not None:
                server.close()
        except OSError as error:
            log.warning("control: %s", error)

    # --------------------------------------------------------------------------------------------------------- status

    def status(self) -> dict[str, Any]:
        """What ``forgather control status`` shows. Called in the server's threads, while training continues."""
        state, run = self._trainer.state, self._trainer.run_dir
        newest = state.log_history[: -_NEWEST - 1 : -1]
        step = state.global_step  # after the logs: training goes on meanwhile, and no log is of a later one
        logs: dict[str, Any] = next((record for record in newest if "loss" in record), {})
        evaluation: dict[str, Any] = next((record for record in newest if "eval_loss" in record), {})
        metrics = {key: value for key, value in evaluation.items() if key.startswith("eval_")}
        metrics |= {key: value for key, value in logs.items() if key != "step"}
        seconds_left = None
        if self._pace is not None and state.max_steps and step > self._pace[1]:
            since, first = self._pace  # by the mean time of this process's steps, with evaluations and saves
            seconds_left = max(0, state.max_steps - step) * (time.monotonic() - since) / (step - first)
        saved = run.checkpoint_steps()
        document = {
            **self._about,
            "state": self._state(),
            "step": step,
            "global_step": step,  # Hugging Face's name
            "max_steps": state.max_steps or None,
            "epoch": state.epoch,
            "eta_seconds": seconds_left,
            "metrics": metrics,
            "logs": logs,  # the newest training log, with the step that it is of
            "checkpoints": [{"step": n, "path": str(run.checkpoint(n).absolute())} for n in saved],
            # what a kill would lose; a rollback has gone back to before the later ones
            "steps_since_checkpoint": step - max((n for n in saved if n <= step), default=state.resumed_step),
            "commands": [command.document() for command in self._unfinished()],
            "strategy": self._trainer.strategy.name,
            "world_size": self._trainer.run.world.size,
        }
        found: dict[str, Any] = plain(document)
        return found

    def _state(self) -> str:
        """starting, training, evaluating, saving (in the background, too) or stopping."""
        trainer = self._trainer
        control = trainer.control
        if control.should_training_stop or control.should_abort_without_save or trainer.run.sync.signum is not None:
            return "stopping"
        if self._evaluating:
            return "evaluating"
        if not trainer.checkpoints.is_done:
            return "saving"
        return "starting" if self._pace is None else "training"


def _one_line(error: object) -> str:
    """An exception in one line."""
    if isinstance(error, OSError) and error.strerror:
        return ": ".join(str(part) for part in (error.filename, error.strerror) if part)
    text = " ".join(str(error).split())
    return text if isinstance(error, ForgatherError) and text else f"{type(error).__name__}: {text}"
