"""The server of one run: the rounds that follow from what workers send (``api.py``).

One event loop answers requests and decides what happens (``_keep``); what takes long (rounds, checkpoints, a look at a
submission, files) is done in threads meanwhile. All state that is decided on belongs to the loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco import wire
from forgather_cli.diloco.api import Api, Service
from forgather_cli.diloco.global_model import GlobalModel
from forgather_cli.diloco.http_server import serving
from forgather_cli.diloco.ledger import Closed, drop_lines, hashes_of, read_ledger, write_line
from forgather_cli.diloco.registry import Registry, Worker, clock
from forgather_cli.diloco.rounds import Rounds
from forgather_cli.errors import SetupError, TrainingError
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import DONE, STOPPED, ExitStatus, Kind, done, write_exit_record
from forgather_cli.run_dir import RunDir, resume_command, shown
from forgather_cli.terminal.folding import tell

log = logging.getLogger(__name__)
T = TypeVar("T")

_TICK = 0.2  # seconds between two looks at the clock
_FAREWELL = 60.0  # seconds in which workers are told that training is over: two of their heartbeats


class Server:
    """The loop of one run: it opens, closes and computes rounds, and saves."""

    def __init__(
        self, model: GlobalModel, run: RunDir, settings: DilocoServerSettings, rank: RankContext, *tokens: str
    ) -> None:
        """Bring the run to where its ledger ends. ``tokens``: of members, and of control. Raises SetupError."""
        self._model, self._run, self._settings, self._rank = model, run, settings, rank
        ledger = read_ledger(run.rounds)
        registry = Registry.read(run.diloco_workers)
        initial, kept = model.begin(ledger)
        if goes_back := len(kept) < len(ledger):
            model.submissions.drop(kept[-1].round)
            drop_lines(run.rounds, len(kept), run.dropped_rounds)
        shapes, dropped, now = wire.model_hash(model.shapes.items()), hashes_of(run.dropped_rounds), clock()
        self._rounds = Rounds(
            settings, initial=initial, model=shapes, ledger=kept, dropped=dropped, registry=registry, now=now
        )
        self._service = Service(run, settings, model, self._rounds)
        if (line := self._rounds.line) is not None:
            for member in line.members:
                if (submission := model.submissions.sent(member.round, member.slot)) is not None:
                    if goes_back or not submission.norms:  # else that was answered
                        submission = self._service.examined(submission)
                    self._rounds.submit(submission, now)
            self._forget()
        elif model.saved < 0:
            model.save(0, "", 0, now, {})
            if model.saved < 0:
                raise SetupError(f"{run.checkpoints}: the initial weights could not be saved (see above)")
        self._metrics = RecordFile(run.metrics)
        self._metrics.begin(line.round if line else 0)
        self._thread = ThreadPoolExecutor(1, "diloco-rounds")
        self._api = Api(self._service, *tokens)
        self._told: set[str] = set()
        """Workers of whom the log says that their influence is bounded."""
        self._note()

    # ----------------------------------------------------------------------------------------------------- what happens

    async def serve(self, listener: socket.socket) -> ExitStatus:
        """Serve until the rounds are over or something stops them. Raises TrainingError."""
        files = self._settings.tls_certificate, self._settings.tls_key
        async with serving(self._api, listener, self._api.knows, tls=files):
            try:
                status = await self._keep()
                write_exit_record(self._run, status.state, status.code, status.message, len(self._rounds.lines[1:]))
                return status
            finally:
                self._service.leaving = True
                self._service.notify()

    async def _keep(self) -> ExitStatus:
        """Open, close and compute rounds, and save, as it is time; returns how it ended."""
        rounds, ended_round = self._rounds, False
        while True:
            if evicted := rounds.evict(self._service.now()):
                self._note(*evicted)
            if (signum := self._rank.poll()) is not None:
                self._rank.acknowledge(signum)
                await self._save_last()
                return ExitStatus(0, Kind.STOPPED, STOPPED, f"stopped by {signal.Signals(signum).name}")
            at_rest = rounds.line is None or not rounds.live() or ended_round
            stops = "stop_now" in self._service.commands or ("stop" in self._service.commands and at_rest)
            if stops or rounds.finished:
                self._service.over = rounds.finished or "stopped by a command"
                self._service.notify()
                await self._save_last()
                await self._bid_farewell()
                if rounds.finished:
                    tell(f"\n{rounds.finished}; raise it to go on")
                    tell(f"newest   {shown(self._run.checkpoint(self._model.saved))}")
                    return done(0, rounds.finished)
                return ExitStatus(0, Kind.STOPPED, DONE, f"stopped by a command after {len(rounds.lines[1:])} rounds")
            if "save" in self._service.commands:
                self._service.commands.remove("save")
                await self._save()
            if ended_round := bool(rounds.can_open() or rounds.close(self._service.now(), self._model.sizes)):
                await self._next_round()
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._service.changed.wait(), _TICK)

    async def _next_round(self) -> None:
        """Compute the end of the closing round, if there is one, and open the next."""
        rounds, closing, begun = self._rounds, self._rounds.closing, clock()
        if closing is not None:
            closing = await self._stepped(closing)
            for name, why in closing.rejected:
                log.warning("round %d: the submission of %s is rejected: %s", rounds.lines[-1].round, name, why)
            if closing.evicted:
                self._note(*(rounds.registry.workers[name] for name in closing.evicted))
        line = rounds.opening(datetime.now(UTC).isoformat(timespec="milliseconds"))
        seconds = clock() - rounds.opened
        try:
            write_line(self._run.rounds, line)
        except OSError as error:
            what = f"{self._run.rounds}: cannot be written: {error.strerror}"
            raise TrainingError(f"{what}; make room, then resume") from error
        rounds.append(line, clock())
        for member in rounds.lines[-2].members if closing else ():
            if member not in line.members:  # of its round, which is over, it will name no more
                self._model.submissions.forget(member.worker)
        for worker in rounds.registry.workers.values():
            if worker.bounded and worker.name not in self._told:
                self._told.add(worker.name)
                log.warning("%s: %s", worker.name, worker.bounded)
        self._service.notify()
        self._rank.stepped(line.round)
        if closing is None:
            print(f"round 0 is open: {', '.join(member.worker for member in line.members)}", flush=True)
            return
        targets = sum(sent.targets for sent, _ in closing.submissions)
        metrics = {
            "round": line.round,
            "tokens": targets,
            "total_tokens": rounds.tokens,
            "outer_grad_norm": self._service.norm,
            "members": len(closing.submissions),
            "round_time": seconds,
            "staleness": max((line.round - 1 - sent.round for sent, _ in closing.submissions), default=0),
            "outer_step_time": clock() - begun,
        }
        try:
            self._metrics.add(metrics, step=line.round, epoch=0.0)
        except OSError as error:
            log.warning("%s: lacks round %d: %s", self._run.metrics, line.round, error.strerror)
        absent = {what: getattr(closing, what) for what in ("missing", "evicted", "left")}
        absent["rejected"] = [name for name, _ in closing.rejected]
        told = "".join(f", {what} {', '.join(who)}" for what, who in absent.items() if who)
        what = f"round {line.round - 1} of {len(closing.submissions)} workers: {targets:,} targets"
        print(f"{what}, norm {self._service.norm:.4g}, {seconds:.1f} s{told}", flush=True)
        self._forget()
        if line.round % self._settings.save_every == 0:
            await self._save()

    async def _stepped(self, closing: Closed) -> Closed:
        """Compute the end of a round; returns it without the changes that make weights that fp32 cannot hold."""
        while not math.isfinite(norm := await self._in_thread(self._model.step, closing, len(self._rounds.lines))):
            closing = self._rounds.without_largest()
            await self._in_thread(self._model.begin, self._rounds.lines)
        self._service.norm = norm
        return closing

    def _note(self, *workers: Worker) -> None:
        try:
            self._service.note(*workers)
        except OSError as error:  # after a restart they are given up once more
            log.warning("%s: cannot be written: %s", self._run.diloco_workers, error.strerror)

    async def _save(self) -> None:
        if (line := self._rounds.line) is not None:
            metrics = {} if self._service.norm is None else {"outer_grad_norm": self._service.norm}
            oldest = self._rounds.lines[min([line.round, *(member.round for member in line.members)])]
            opened = datetime.fromisoformat(oldest.time).timestamp()  # what members send for it came later
            await self._in_thread(self._model.save, line.round, line.hash, oldest.round, opened, metrics)
            self._model.submissions.forget("")

    async def _save_last(self) -> None:
        """Before the end. Raises TrainingError."""
        await self._save()
        if (line := self._rounds.line) is not None and self._model.saved != line.round:
            what = f"round {line.round} could not be saved (see above), but what it was made of is kept"
            raise TrainingError(f"{what}; make room, then {resume_command(self._run)}")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of what takes long; a signal is acknowledged meanwhile, and acted on afterwards."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        while not (await asyncio.wait({future}, timeout=_TICK))[0]:
            if (signum := self._rank.poll()) is not None:
                self._rank.acknowledge(signum)
        return future.result()

    async def _bid_farewell(self) -> None:
        """Until all workers know that training is over, or a minute has passed."""
        end = clock() + _FAREWELL
        while {worker.generation for worker in self._rounds.live()} - self._service.told and clock() < end:
            if self._rank.poll() is not None:
                return
            await asyncio.sleep(_TICK)
            self._rounds.evict(self._service.now())
        await asyncio.sleep(_TICK)  # the last answer is on its way

    def _forget(self) -> None:
        """Delete the published weights that nobody can ask for any more; replay needs the first."""
        self._model.published.forget(self._rounds.needed() | ({0} if self._settings.keep_submissions else set()))
