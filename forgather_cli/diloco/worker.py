"""The rounds of a job that trains with others through a DiLoCo server (Douillard et al. 2023, arXiv:2311.08105).

A round: the weights that the server has published, steps of training on samples that the server gives out, and the
change of the weights (the pseudo-gradient, start minus end) sent back. A checkpoint with the submission is published
before it is sent, so a job killed at any moment sends the same one again.

From the loop: ``begin`` -> steps, each with ``before_step`` and ``after_step`` -> ``end``. ``after_step`` makes the
submission at the end of a round; ``_meet``, called by the others, sends it and takes the next round's weights. With
``overlap`` (Streaming DiLoCo, arXiv:2501.18512) threads do that while training goes on (``_fly``), and after so many
steps ``_meet`` takes what they have brought.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any

from forgather_cli.config.schema import DilocoSettings
from forgather_cli.data.loaders.collate import Counts
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.diloco import wire
from forgather_cli.diloco.client import Client, Fenced
from forgather_cli.diloco.exchange import Exchange, Values
from forgather_cli.diloco.link import Link
from forgather_cli.diloco.samples import as_ranges, first, subtract, total
from forgather_cli.distributed import gather
from forgather_cli.errors import ControlError, ForgatherError, SetupError
from forgather_cli.launch.exit_status import ExitStatus
from forgather_cli.trainer.run import TrainingRun

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds that the server may take to answer that there is nothing new, between two looks at signals
_LOOK = 0.05  # seconds between two looks at what other threads, ranks and files do
_STATE = ("_round", "_hash", "_slot", "_given", "_targets", "_pending", "local_step", "sync_every", "total_sync_time")
SLOT_SEEDS = 1 << 20
"""Ranks apart are the seeds of two workers' dropout."""


class DilocoWorker:
    """An ``OuterLoop`` (``trainer.outer``) over the jobs of one server. Methods are collective over the job's ranks."""

    component = "diloco"
    ranks_differ = False
    weights_are_equal = True

    def __init__(self, run: TrainingRun, settings: DilocoSettings, address: str) -> None:
        self._run, self._settings = run, settings
        self._link, self._exchange = Link(run, settings, address), Exchange(run)
        self._generation = 0
        self._joined = False
        self._has_left = False
        """The server has its last submission."""
        self._is_bounded = False
        """The log says that the server bounds this worker's influence."""
        # of the server, the same for all workers
        self._is_async = False
        self._overlap, self._alpha = 0, 0.0
        self._round_steps = 0
        # where this worker stands
        self._round: int | None = None
        self._hash, self._slot = "", 0
        self.sync_every = 0
        """Steps of the present round, DyLU's where that is on."""
        self._given: list[list[int]] = []
        """Samples, from the first one that the next submission names."""
        self._targets = 0
        self.local_step = 0
        """Steps that are done since the last submission."""
        self._pending: dict[str, Any] | None = None
        """A submission until the weights that it leads to are here."""
        self._counts: bool | None = True
        """What the server has answered to it; None while it has not."""
        self._flight: Future[tuple[dict[str, Any], Values]] | None = None
        """Of this rank's thread, while training goes on: the next round, and its weights."""
        self._brought: tuple[dict[str, Any], Values] | None = None
        """The same once it is over."""
        self._over = threading.Event()
        """Set to end that thread."""
        self._is_saved = False
        """The checkpoint with the pending submission is published, or will not be."""
        # what logs show
        self.sync_count = self.reconnections = self.dylu_adjustments = 0
        self.total_sync_time = 0.0
        self.pseudo_gradient_norm = self.staleness = math.nan
        """Of the last submission; rounds of others that came between its weights and itself."""
        self._began = self._mark = time.monotonic()
        self._trained_seconds, self._trained_tokens = 0.0, 0
        """Of the steps since the last submission."""
        self._tokens_per_second: float | None = None

    @property
    def ended(self) -> ExitStatus | None:
        """Why training has ended, if the server or its silence has ended it."""
        return self._link.ended

    # -------------------------------------------------------------------------------------------------------- the loop

    def begin(self) -> None:
        """Register, and stand at a round's weights: a new job, or one that was left behind, at the newest; another one
        where its checkpoint is.
        """
        run = self._run
        if run.train_loader is None or not is_map_style(run.train_loader.dataset):
            what = "needs training data whose samples have numbers, which the server gives out to the workers, got a"
            remedy = "choose data=text or another that is tokenized before training"
            raise SetupError(f"callbacks.diloco: {what} stream; {remedy}")
        _ = self._exchange.parts  # collective
        self._meet()
        self._mark = time.monotonic()

    def before_step(self, wait_for_save: Callable[[], None]) -> None:
        """Between two rounds exchange weights, once the checkpoint with the submission is there."""
        if self._is_flying and self._joined:
            if self._flight is None:
                self._take_off()
        elif not self._joined or self._pending is not None:
            wait_for_save()
            self._is_saved = True
            self._meet()
        self._mark = time.monotonic()

    def after_optimizer_step(self) -> None: ...
    def after_last_step(self) -> None: ...

    def after_step(self, counts: Counts) -> None:
        """At the end of a round make the submission, and ask for the checkpoint that holds it."""
        self.local_step += 1
        self._targets += counts.units
        self._trained_tokens += counts.tokens
        self._trained_seconds += time.monotonic() - self._mark
        self._tokens_per_second = self._trained_tokens / self._trained_seconds
        if self._pending is None and (self.local_step >= self.sync_every or not self._left or self._is_last):
            self._make_submission()
            self._run.control.should_save = True

    def end(self) -> None:
        """Send the last round, after which the server waits for this worker no longer."""
        self._is_saved = True
        if self._is_last:
            self._meet()
            if self.local_step and self.ended is None:  # trained while the one before was under way
                self._make_submission()
                self._meet()
        if self.ended is None and not self._has_left and not (self._is_last and self._pending):
            self._leave()  # a callback has ended training, or there was no step to train
        self._over.set()
        self._link.stop_heartbeats()

    def _leave(self) -> None:
        """Send what is done, and tell the server that nobody need wait for this worker."""
        try:
            if self._pending is None or self._submit():
                self._link.call("/leave", {"generation": self._generation})
        except Fenced as error:
            log.info("%s", error)

    @property
    def _is_last(self) -> bool:
        """Training is over with the step that is done."""
        return 0 < self._run.state.max_steps <= self._run.state.global_step

    @property
    def _left(self) -> list[list[int]]:
        """The samples that this worker still has, those to be trained on first in front."""
        left: list[list[int]] = self._run.epochs.state_dict().get("ranges", [])
        return left

    @property
    def _is_flying(self) -> bool:
        """Training goes on while the submission is on its way."""
        if self._pending is None or self._pending["leaves"] or self._is_last:
            return False
        return self.local_step < self._overlap and bool(self._left)

    # ------------------------------------------------------------------------------------------------------- exchanges

    def _meet(self) -> None:
        """Register where that is due; send the pending submission, and take the next round's weights. Returns without
        them where training ends.
        """
        start = time.monotonic()
        while self.ended is None and (not self._joined or (self._pending is not None and not self._is_flying)):
            try:
                if not self._join() or not self._step_on():
                    break
            except Fenced as error:
                log.warning("%s; registering again", error)
                self.reconnections += 1
                self._joined, self._flight, self._brought = False, None, None
                time.sleep(_POLL)  # two that have one id, in copies of a run directory, fence each other for ever
        self.total_sync_time += time.monotonic() - start

    def _step_on(self) -> bool:
        """What comes next of an exchange. False if training ends instead."""
        if self._is_flying:
            return True
        if self._pending is None:
            if self._round is None:
                return self._enter(after=-1)
            return self._exchange.is_complete or self._enter(after=self._round - 1)
        if not self._land():
            return False
        if self._brought is None and not self._submit():
            return False
        if self._pending["leaves"]:
            self._pending, self._has_left = None, True
            return True
        assert self._round is not None
        return self._enter(after=self._round)

    def _join(self) -> bool:
        """Register, if that is due. False if training ends instead."""
        if self._joined:
            return True
        run, settings, parts = self._run, self._settings, self._exchange.parts
        (worker, secret), description = self._link.identity() if run.world.rank == 0 else ("", ""), run.data_description
        document = {
            "worker": worker,
            "secret": secret,
            "host": socket.gethostname()[: wire.MAX_TEXT],
            "pid": os.getpid(),
            "run": str(run.run_dir.root)[-wire.MAX_TEXT :],
            "model": wire.model_hash(parts.shapes),
            "data": f"{description.get('order', description.get('fingerprint'))}, seed {run.seed}",
            "tokenizer": description.get("tokenizer"),
            "batch": run.batch_plan.global_batch,
            "stated": settings.stated(),
            "dylu": settings.follows_speed(),
            "round": self._round,
            "parent": self._hash or None,
            "leaves": self._pending is not None and self._pending["leaves"],
        }
        answer = self._link.call("/register", document)
        if answer is None:
            return False
        is_first, told = not self._exchange.names, answer["settings"]
        self._generation = answer["generation"]
        self._link.client.headers = {wire.GENERATION_HEADER: str(self._generation)}
        self._is_async, self._overlap, self._alpha = told["mode"] == "async", told["overlap"], told["alpha"]
        self._exchange.agree(told)
        self._round_steps = told["sync_every"] // told["num_fragments"]
        if answer["stood"] == "rewound":
            log.warning("the DiLoCo server has lost round %s; this worker goes on from its newest one", self._round)
            self._round, self._hash, self._pending = None, "", None
            self._exchange.forget()
        if is_first:
            self._link.start_heartbeats(self._report)
        self._joined = True
        return True

    def _report(self) -> dict[str, Any]:
        return {
            "generation": self._generation,
            "step": self._run.state.global_step,
            "sent": self._link.sent,
            "tokens_per_second": self._tokens_per_second,
            "received": self._link.received,
        }

    def _enter(self, after: int) -> bool:
        """Wait for a round behind ``after`` and take its weights and samples; in the middle of that very round go on in
        it. False if training ends instead.
        """
        opened, fresh = self._brought or (self._wait_for_round(after), {})
        if opened is None:
            return False
        if self._pending is not None and self._counts is None:
            self._settle(*(opened["answer"] or (wire.LATE, "")))
        if (bounded := opened.get("bounded")) and not self._is_bounded:
            self._is_bounded = True
            log.warning("the DiLoCo server says: %s", bounded)
        if self._brought is None and not self._link.on_all_ranks(
            lambda: fresh.update(self._fetch(self._link.client, opened))
        ):
            return False
        run, number = self._run, int(opened["round"])
        self._brought = None
        self._slot = int(opened["slot"])
        self._exchange.hold(fresh, opened["weights"])
        run.seed_rank = run.world.rank + self._slot * SLOT_SEEDS
        if number == self._round:
            return True
        follows = self._round is not None and (self._is_async or number == self._round + 1)
        if self._pending is None or not self._counts or not follows:
            self._begin_at(opened)
        else:
            assert self._round is not None
            changed = [each for each, made_by in enumerate(opened["weights"]) if made_by == number]
            self._exchange.set_weights(changed, share=self._alpha if self._overlap else 0.0)
            self.staleness = number - 1 - self._round
        trained = 0 if self._pending is None else total(self._pending["left"]) - total(self._left)
        if self.sync_every not in (0, opened["steps"]):
            self.dylu_adjustments += 1
        self._round, self._hash, self.sync_every = number, opened["hash"], opened["steps"]
        self._given, self._pending = opened["ranges"], None
        left = subtract(as_ranges(self._given), first(trained, self._given))
        assert run.train_loader is not None
        start, length = left[0][0] if left else 0, len(run.train_loader.dataset)
        given = [list(each) for each in left]
        run.epochs.load_state_dict({"epoch": start // length, "sample": start % length, "ranges": given})
        self.sync_count += 1
        return True

    def _fetch(self, client: Client, opened: dict[str, Any]) -> Values:
        return self._exchange.fetch(client, opened["weights"], follows=self._round == int(opened["round"]) - 1)

    def _begin_at(self, opened: dict[str, Any]) -> None:
        """Stand at the first step of a round: the server's weights, and the round's step of the schedule."""
        run, number = self._run, int(opened["round"])
        if self._round is not None and self._counts:
            log.warning(
                "this worker comes back at round %d, it stood at round %d; from here on the run is not the one that it "
                "would have been", number, self._round,
            )  # fmt: skip
        self._exchange.set_weights(range(len(self._exchange.names)))
        self.local_step, self._targets, self._pending, self._counts = 0, 0, None, True
        while not self._is_async and run.state.global_step < number * self._round_steps:
            run.state.global_step += 1
            run.lr_scheduler.step()

    def _wait_for_round(self, after: int) -> dict[str, Any] | None:
        """The round behind ``after`` that has opened with this worker; None if training ends instead."""
        why, told = "", time.monotonic()
        while True:
            answer = self._link.call("/next", {"generation": self._generation, "after": after, "wait": _POLL})
            if answer is None:
                return None
            if answer["state"] == wire.STOPPED:
                self._link.end_by_server(answer["reason"])
                return None
            if answer["state"] == wire.OPEN:
                return answer
            if answer.get("why") != why or time.monotonic() - told > 60:
                why, told = answer.get("why", ""), time.monotonic()
                log.info("waiting for the other workers: %s", why)

    # ------------------------------------------------------------------------------------------------- what it has done

    def _make_submission(self) -> None:
        """Encode what this job has changed, of the fragment whose turn it is; of all of them after the last step."""
        run, leaves, round, left = self._run, self._is_last, self._round, self._left
        assert round is not None
        count = len(self._exchange.names)
        written = self._exchange.write_change(round, range(count) if leaves else [round % count])
        told = gather(written, run.cpu_group)
        self.pseudo_gradient_norm = math.sqrt(sum(square for _, _, square, _ in told))
        self._pending = {
            "files": [(name, digest) for name, digest, _, parts in told if parts],
            "targets": self._targets,
            "ranges": [list(each) for each in first(total(self._given) - total(left), self._given)],
            "leaves": leaves,
            "left": left,
            "step": run.state.global_step,
        }
        self.local_step = self._targets = 0
        self._trained_seconds, self._trained_tokens = 0.0, 0
        self._is_saved, self._counts = False, None

    def _manifest(self) -> dict[str, Any]:
        pending = self._pending
        assert pending is not None
        told = {key: pending[key] for key in ("targets", "ranges", "leaves")}
        parts = [digest for _, digest in pending["files"]]
        return {"round": self._round, "hash": self._hash, "parts": parts, **told, **self._report()}

    def _submit(self) -> bool:
        """Send the pending submission. False if training ends instead."""
        assert self._pending is not None
        files = self._pending["files"]
        # asked before anything is sent: after a kill it may have counted long ago, and the files be gone
        while (answer := self._link.call("/submit", self._manifest())) and answer["status"] == wire.LACKING:
            if not self._link.on_all_ranks(lambda: self._exchange.upload(self._link.client, files)):
                return False
        if answer is None:
            return False
        if answer["status"] != wire.PENDING:
            self._settle(answer["status"], answer.get("reason", ""))
        return True

    def _settle(self, status: str, reason: str) -> None:
        """Take the server's answer to the pending submission."""
        self._counts = status == wire.COUNTED
        self._exchange.settle(counts=self._counts)
        if not self._counts:
            log.warning("round %s of this worker does not count: %s", self._round, reason or "it came too late")

    # -------------------------------------------------------------------------------------- while training goes on

    def _take_off(self) -> None:
        """Begin to exchange in a thread of each rank. Whatever fails there is done again when it is due."""
        flight: Future[tuple[dict[str, Any], Values]] = Future()
        self._flight = flight

        def fly() -> None:
            try:
                flight.set_result(self._fly(self._link.client.copy()))
            except Exception as error:
                flight.set_exception(error)

        threading.Thread(target=fly, name="diloco-exchange", daemon=True).start()

    def _fly(self, client: Client) -> tuple[dict[str, Any], Values]:
        """Send the pending submission, and return the next round and this rank's parts of its weights. No collectives:
        rank 0 waits at the server for the files of the others. Raises ForgatherError.
        """
        run, pending = self._run, self._pending
        assert pending is not None
        with contextlib.closing(client):
            while not (self._is_saved or run.run_dir.checkpoint(pending["step"]).exists()):
                self._pause()
            self._exchange.upload(client, pending["files"])
            if run.world.rank == 0:
                while (status := client.call("/submit", self._manifest())["status"]) == wire.LACKING:
                    self._pause()
                if status not in (wire.COUNTED, wire.PENDING):
                    raise ControlError(f"the submission does not count: it is {status}")
            body = {"generation": self._generation, "after": self._round, "wait": _POLL}
            while (opened := client.call("/next", body))["state"] == wire.WAITING:
                self._pause()
            if opened["state"] == wire.STOPPED:
                raise ControlError("the server has stopped")
            if (answer := opened["answer"]) is None or answer[0] != wire.COUNTED:
                raise ControlError(f"the submission does not count: {answer}")
            return opened, self._fetch(client, opened)

    def _pause(self) -> None:
        if self._over.wait(_LOOK):
            raise ControlError("training is over")

    def _land(self) -> bool:
        """Wait for the threads of all ranks. What they bring is in ``_brought`` if none has failed. False if training
        ends instead.
        """
        flight, self._flight = self._flight, None
        if flight is None:
            return True
        while not all(gather(flight.done(), self._run.cpu_group)):
            if self._run.sync.poll():
                self._flight = flight
                return False
            wait([flight], timeout=_LOOK)
        failure = flight.exception()
        if any(gather(failure is not None, self._run.cpu_group)):
            if not isinstance(failure, ForgatherError | None):
                raise failure
            log.info("an exchange beside training has failed (%s); it is made again", failure or "on another rank")
            return True
        self._brought = flight.result()
        return True

    # ---------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> dict[str, Any]:
        """Of each rank. The round's first weights are not there: the server has them."""
        counts = [self.sync_count, self._link.retries, self.reconnections, self.dylu_adjustments]
        own = {name.lstrip("_"): getattr(self, name) for name in _STATE}
        return {**own, "counts": counts, **self._exchange.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._joined, self._flight, self._brought = False, None, None
        self._exchange.load_state_dict(state)
        for name in _STATE:
            setattr(self, name, state[name.lstrip("_")])
        self._counts = None if self._pending else True
        self.sync_count, self._link.retries, self.reconnections, self.dylu_adjustments = state["counts"]

    def facts(self) -> dict[str, float]:
        """How the exchanges go, for logs: counts, seconds, bytes of all ranks; the norm is of the last round."""
        own = ("local_step", "sync_every", "total_sync_time", "sync_count", "reconnections", "dylu_adjustments")
        found = {name: getattr(self, name) for name in own} | {
            "sync_retries": self._link.retries,
            "sync_share": self.total_sync_time / max(time.monotonic() - self._began, 1e-9),
            "bytes_sent": self._link.sent,
            "bytes_received": self._link.received,
            "norm": self.pseudo_gradient_norm,
            "staleness": self.staleness,
        }
        return {f"diloco/{name}": value for name, value in found.items() if not math.isnan(value)}
