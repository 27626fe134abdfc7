"""The rounds of a job that trains with others through a DiLoCo server (Douillard et al. 2023, arXiv:2311.08105).

A round: the weights that the server has published, ``sync_every`` steps of training on samples that the server gives
out, and the change of the weights (the pseudo-gradient, start minus end) sent back. A checkpoint with the submission is
published before it is sent, so a job killed at any moment sends the same one again.

From the loop: ``begin`` -> steps, each with ``before_step`` and ``after_step`` -> ``end``. ``_exchange`` is called by
all but ``after_step``, which makes the submission at the end of a round.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from forgather_cli.config.schema import DilocoSettings
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.diloco import wire
from forgather_cli.diloco.client import Away, Client, Fenced, TokenBucket
from forgather_cli.diloco.encoding import Compression, decode, encode, is_lossy
from forgather_cli.diloco.parts import Part, Parts
from forgather_cli.distributed import gather
from forgather_cli.errors import ConfigError, ForgatherError, SetupError, TrainingError
from forgather_cli.input_files import read_json_object, write_whole
from forgather_cli.launch.exit_status import STOPPED, ExitStatus, Kind, done
from forgather_cli.models.parts import trainable_parameters
from forgather_cli.trainer.run import Run
from forgather_cli.trainer.step_sync import Counts

log = logging.getLogger(__name__)

_POLL = 1.0  # seconds that the server may take to answer that there is nothing new, between two looks at signals
_PAUSES = (0.1, 0.5, 1.0, 2.0, 5.0)  # seconds between two tries, the last again and again
_MAX_REJECTED = 3  # submissions in a row, then the worker ends
SLOT_SEEDS = 1 << 20
"""Ranks apart are the seeds of two workers' dropout."""

_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "I8": torch.int8, "U8": torch.uint8}
"""Of tensors on the wire."""

T = TypeVar("T")


class DilocoWorker:
    """An ``OuterLoop`` (``trainer.outer``) over the jobs of one server. Methods are collective over the job's ranks."""

    component = "diloco"
    ranks_differ = False
    weights_are_equal = True

    def __init__(self, run: Run, settings: DilocoSettings, address: str) -> None:
        self._run, self._settings = run, settings
        self.ended: ExitStatus | None = None
        limit = None if settings.bandwidth is None else settings.bandwidth / run.world.size
        tls = ssl.create_default_context(cafile=settings.ca_file)
        self._client = Client(address, settings.read_token(), TokenBucket(limit), tls=tls)
        self._parts: Parts | None = None
        self._generation = 0
        self._joined = False
        self._heartbeat: _Heartbeat | None = None
        # of the server, the same for all workers
        self.sync_every = 0
        self._compression: Compression = "fp32"
        self._compression_down: Compression = "fp32"
        # where this worker stands
        self._round: int | None = None
        self._hash, self._slot = "", 0
        self._given: list[list[int]] = []
        self._targets = 0
        self._rejected = 0
        """Submissions in a row."""
        self.local_step = 0
        """Steps of the present round that are done."""
        self._pending: dict[str, Any] | None = None
        """The round's submission, once its steps are done."""
        self._snapshot: dict[Part, Tensor] = {}
        """The round's first weights, this rank's parts in fp32; needed until its steps are done."""
        self._error: dict[Part, Tensor] = {}
        """What compression has lost so far and is still to be sent."""
        self._next_error: dict[Part, Tensor] = {}
        """The same if the pending submission counts."""
        # what logs show
        self.sync_count = self.sync_retries = self.reconnections = 0
        self.total_sync_time = 0.0
        self.pseudo_gradient_norm = math.nan
        self._began = time.monotonic()

    # -------------------------------------------------------------------------------------------------------- the loop

    def begin(self) -> None:
        """Register, and stand at a round's weights: a new job, or one that was left behind, at the newest; another one
        where its checkpoint is.
        """
        run = self._run
        if run.train_loader is None or not is_map_style(run.train_loader.dataset):
            raise SetupError(
                "callbacks.diloco: needs training data whose samples have numbers, which the server gives out to the "
                "workers, got a stream; choose data=text or another that is tokenized before training"
            )
        if self._parts is None:
            self._parts = Parts(dict(trainable_parameters(run.strategy.parts)), run.cpu_group, run.world.rank)
        self._exchange()

    def before_step(self, wait_for_save: Callable[[], None]) -> None:
        """Between two rounds exchange weights, once the checkpoint with the submission is there."""
        if not self._joined or self._pending is not None:
            wait_for_save()
            self._exchange()

    def after_optimizer_step(self) -> None: ...
    def before_last_save(self) -> None: ...

    def after_step(self, counts: Counts) -> None:
        """At the end of a round make the submission, and ask for the checkpoint that holds it."""
        run = self._run
        self.local_step += 1
        self._targets += counts.targets
        left = run.epochs.state_dict().get("ranges", [])
        if self.local_step >= self.sync_every or not left or self._is_last:
            self._make_submission(left)
            run.control.should_save = True

    def end(self) -> None:
        """Send the last round, after which the server waits for this worker no longer."""
        if self._is_last and self._pending is not None:
            self._exchange()
        if self._heartbeat is not None:
            self._heartbeat.stop()

    # ------------------------------------------------------------------------------------------------------- exchanges

    def _exchange(self) -> None:
        """Register where that is due; send the pending submission, and take the next round's weights. Returns without
        them where training ends.
        """
        start = time.monotonic()
        while self.ended is None and (not self._joined or self._pending is not None):
            try:
                if not self._join():
                    break
                if self._pending is not None and not self._submit():
                    break
                if self._is_last:
                    self._pending = None
                elif self._round is None or self._pending is not None:
                    if not self._enter(after=-1 if self._round is None else self._round):
                        break
                elif not self._snapshot and not self._enter(after=self._round - 1):
                    break
            except Fenced as error:
                log.warning("%s; registering again", error)
                self.reconnections += 1
                self._joined = False
        self.total_sync_time += time.monotonic() - start

    @property
    def _is_last(self) -> bool:
        """Training is over with the step that is done."""
        return 0 < self._run.state.max_steps <= self._run.state.global_step

    def _join(self) -> bool:
        """Register, if that is due. False if training ends instead."""
        if self._joined:
            return True
        answer = self._ask(self._register)
        if answer is None:
            return False
        self._generation, told = answer["generation"], answer["settings"]
        self.sync_every, self._compression = told["sync_every"], told["compression"]
        self._compression_down = told["compression_down"]
        if self._run.world.rank == 0 and self._heartbeat is None:
            self._heartbeat = _Heartbeat(self._client.copy(), self._settings.interval())
            self._heartbeat.start(lambda: {"generation": self._generation, "step": self._run.state.global_step})
        self._joined = True
        return True

    def _register(self) -> dict[str, Any]:
        run, s, parts = self._run, self._settings, self._parts
        assert parts is not None
        worker, secret = self._identity()
        description = run.data_description
        document = {
            "worker": worker,
            "secret": secret,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "run": str(run.run_dir.root),
            "model": wire.model_hash(parts.shapes),
            "num_tensors": len(parts.shapes),
            "data": f"{description.get('fingerprint')}, seed {run.seed}",
            "tokenizer": description.get("tokenizer"),
            "batch": run.batch_plan.global_batch,
            "stated": s.stated(),
            "round": self._round,
            "parent": self._hash or None,
            "leaves": self._is_last and self._pending is not None,
        }
        return self._client.call("/register", document)

    def _enter(self, after: int) -> bool:
        """Wait for a round behind ``after`` and take its weights and samples; in the middle of that very round go on in
        it. False if training ends instead.
        """
        opened = self._wait_for_round(after)
        if opened is None:
            return False
        run, parts = self._run, self._parts
        assert parts is not None
        number = int(opened["round"])
        if not self._all_ranks(lambda: self._fetch(number)):
            return False
        self._slot = int(opened["slot"])
        run.seed_rank = run.world.rank + self._slot * SLOT_SEEDS
        if number == self._round:
            return True
        if self._round is not None and number != self._round + 1:
            log.warning(
                "this worker comes back at round %d, it stood at round %d; from here on the run is not the one that it "
                "would have been", number, self._round,
            )  # fmt: skip
        parts.set(self._snapshot)
        self._round, self._hash, self._given = number, opened["hash"], opened["ranges"]
        self.local_step, self._targets, self._pending, self._next_error = 0, 0, None, {}
        assert run.train_loader is not None
        first, length = self._given[0][0] if self._given else 0, len(run.train_loader.dataset)
        run.epochs.load_state_dict({"epoch": first // length, "sample": first % length, "ranges": self._given})
        while run.state.global_step < number * self.sync_every:  # of one that joins later
            run.state.global_step += 1
            run.lr_scheduler.step()
        self.sync_count += 1
        return True

    def _wait_for_round(self, after: int) -> dict[str, Any] | None:
        """The round behind ``after`` that has opened with this worker; None if training ends instead."""
        why, told = "", time.monotonic()
        while True:
            answer = self._ask(
                lambda: self._client.call("/next", {"generation": self._generation, "after": after, "wait": _POLL})
            )
            if answer is None:
                return None
            if answer["state"] == wire.STOPPED:
                self._stop(done(self._run.world.rank, f"stopped by the DiLoCo server: {answer['reason']}"))
                return None
            if answer["state"] == wire.OPEN:
                return answer
            if answer.get("why") != why or time.monotonic() - told > 60:
                why, told = answer.get("why", ""), time.monotonic()
                log.info("waiting for the other workers: %s", why)

    def _fetch(self, number: int) -> None:
        """This rank's parts of a round's first weights, into ``_snapshot``."""
        parts, down = self._parts, self._compression_down
        assert parts is not None
        if down != "fp32" and self._snapshot and self._round == number - 1:
            wanted = [(part, name) for part in parts.own for name in (part.name, f"{part.name}:scale")]
            read = self._read(f"/changes/{number}", wanted)
            for part in parts.own:
                sent = {name: read[part, name] for name in (part.name, f"{part.name}:scale") if (part, name) in read}
                self._snapshot[part] += decode(part.name, sent, part.held_shape, down)
        else:
            found = self._read(f"/weights/{number}", [(part, part.name) for part in parts.own])
            self._snapshot = {part: values.view(part.held_shape) for (part, _), values in found.items()}

    def _read(self, path: str, wanted: list[tuple[Part, str]]) -> dict[tuple[Part, str], Tensor]:
        """The rows of parts, of those tensors ``wanted`` that the server's safetensors file has."""
        head = self._client.get(f"{path}/header")
        begin = 8 + int.from_bytes(head[:8], "little")
        entries = json.loads(head[8:begin])
        found: dict[tuple[Part, str], Tensor] = {}
        ranges = []
        for part, name in wanted:
            if (entry := entries.get(name)) is not None:
                shape, first = entry["shape"], begin + entry["data_offsets"][0]
                rows = (part.rows, *shape[1:]) if shape else ()
                found[part, name] = values = torch.empty(rows, dtype=_DTYPES[entry["dtype"]])
                row = values.itemsize * math.prod(shape[1:])
                ranges.append((first + part.start * row, first + (part.start + part.rows) * row))
        if ranges:
            buffers = [values.view(-1).view(torch.uint8).numpy().data for values in found.values()]
            self._client.read(path, ranges, buffers)
        return found

    @torch.no_grad()
    def _make_submission(self, left: list[list[int]]) -> None:
        """Encode what this rank's parts have changed by, and write it to a file of the run directory."""
        from safetensors.torch import save_file

        run, parts = self._run, self._parts
        assert parts is not None
        tensors: dict[str, Tensor] = {}
        square = torch.zeros((), dtype=torch.float64)
        for part in parts.own:
            change = self._snapshot[part] - parts.values(part).to("cpu", torch.float32)
            square += change.double().square().sum()
            if part in self._error:
                change += self._error[part]
            sent = encode(part.name, change, self._compression)
            tensors |= sent
            if is_lossy(self._compression):
                self._next_error[part] = change - decode(part.name, sent, part.held_shape, self._compression)
            if self._compression_down == "fp32":  # else its changes come
                del self._snapshot[part]
        directory = self._directory()
        directory.mkdir(exist_ok=True)
        for old in directory.glob(f"*-{run.world.rank}.safetensors"):
            old.unlink()
        file = directory / f"round-{self._round}-{run.world.rank}.safetensors"
        rows = json.dumps({part.name: [part.start, part.rows] for part in parts.own})
        save_file(tensors, file, metadata={"rows": rows})
        with file.open("rb") as written:
            os.fsync(written.fileno())
            digest = hashlib.file_digest(written, "sha256").hexdigest()
        told = gather((file.name, digest, float(square), len(parts.own)), run.cpu_group)
        self.pseudo_gradient_norm = math.sqrt(sum(each[2] for each in told))
        self._pending = {
            "files": [(name, digest) for name, digest, _, count in told if count],
            "targets": self._targets,
            "ranges": _without(self._given, left),
            "norm": self.pseudo_gradient_norm,
        }

    def _submit(self) -> bool:
        """Send the pending submission. False if training ends instead."""
        run, pending = self._run, self._pending
        assert pending is not None
        mine = pending["files"][run.world.rank :: run.world.size]  # as many as there were ranks when they were written

        def upload() -> None:
            for name, digest in mine:
                if not self._client.has(f"/parts/{digest}"):
                    self._client.put(f"/parts/{digest}", self._directory() / name)

        if not self._all_ranks(upload):
            return False
        body = {
            "generation": self._generation,
            "round": self._round,
            "hash": self._hash,
            "parts": [digest for _, digest in pending["files"]],
            **{key: pending[key] for key in ("targets", "ranges", "norm")},
            "leaves": self._is_last,
        }
        answer = self._ask(lambda: self._client.call("/submit", body))
        if answer is None:
            return False
        if answer["status"] == wire.COUNTED:
            self._error, self._rejected = self._next_error, 0
            return True
        why = answer.get("reason") or "it came too late"
        log.warning("round %s of this worker does not count: %s", self._round, why)
        self._rejected += answer["status"] == wire.REJECTED
        if self._rejected == _MAX_REJECTED:
            raise TrainingError(
                f"the DiLoCo server has rejected {_MAX_REJECTED} rounds of this worker in a row ({why}); lower "
                "learning_rate or sync_every, or look for samples that make the loss void"
            )
        return True

    # ------------------------------------------------------------------------------------------------------- all ranks

    def _ask(self, action: Callable[[], T]) -> T | None:
        """What ``action`` returns on rank 0, on all ranks, tried until the server answers; None if training ends
        instead: by a signal, a command, or since the server has been silent for too long.
        """
        found: list[T] = []

        def on_rank_0() -> None:
            if self._run.world.rank == 0:
                found.append(action())

        if not self._all_ranks(on_rank_0):
            return None
        return gather(found[0] if found else None, self._run.cpu_group)[0]

    def _all_ranks(self, action: Callable[[], None]) -> bool:
        """Run ``action`` on every rank, again where the server does not answer. False if training ends instead.

        Raises what it raised on any rank.
        """
        run, is_done, silent = self._run, False, time.monotonic()
        tries, allowed = 0, self._settings.timeout * max(1, self._settings.max_sync_retries)
        while True:
            failure: ForgatherError | None = None
            if not is_done:
                try:
                    action()
                    is_done = True
                except (Away, Fenced, ConfigError) as error:
                    failure = error
            failures = gather(_told(failure), run.cpu_group)
            stops = run.sync.poll()
            if fatal := next((each for each in failures if each and each[0] != "away"), None):
                raise {"fenced": Fenced, "config": ConfigError}[fatal[0]](fatal[1])
            away = next((each[1] for each in failures if each), None)
            if away is None:
                if tries:
                    log.info("the DiLoCo server answers again")
                return not stops
            if stops:
                return False
            quiet = gather(time.monotonic() - silent, run.cpu_group)[0]
            if tries == 0 or quiet > allowed:
                log.warning("%s; trying again for %.0f s", away, allowed)
            if quiet > allowed:
                self._stop(
                    ExitStatus(
                        run.world.rank, Kind.STOPPED, STOPPED,
                        f"stopped: {away}, for {allowed:g} s; "
                        "start it, and resume this run",
                    )
                )  # fmt: skip
                return False
            self.sync_retries += 1
            time.sleep(_PAUSES[min(tries, len(_PAUSES) - 1)])
            tries += 1

    def _stop(self, status: ExitStatus) -> None:
        self.ended = status
        self._run.control.should_training_stop = self._run.control.should_save = True
        if self._heartbeat is not None:
            self._heartbeat.stop()

    # ---------------------------------------------------------------------------------------------------------- states

    def state_dict(self) -> dict[str, Any]:
        """Of each rank. The round's first weights are not there: the server has them."""
        return {
            "round": self._round,
            "hash": self._hash,
            "slot": self._slot,
            "given": self._given,
            "local_step": self.local_step,
            "targets": self._targets,
            "pending": self._pending,
            "errors": [[_key(part), part_errors] for part, part_errors in self._error.items()],
            "next_errors": [[_key(part), part_errors] for part, part_errors in self._next_error.items()],
            "counts": [self.sync_count, self.sync_retries, self.reconnections, self.total_sync_time],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        run = self._run
        self._joined, self._snapshot = False, {}
        for name in ("round", "hash", "slot", "given", "targets", "pending"):
            setattr(self, f"_{name}", state[name])
        self.local_step = state["local_step"]
        self.sync_count, self.sync_retries, self.reconnections, self.total_sync_time = state["counts"]
        self._parts = Parts(dict(trainable_parameters(run.strategy.parts)), run.cpu_group, run.world.rank)
        own = {tuple(_key(part)): part for part in self._parts.own}
        for target, saved in ((self._error, state["errors"]), (self._next_error, state["next_errors"])):
            target.clear()
            target |= {own[tuple(key)]: values for key, values in saved if tuple(key) in own}
            if len(target) < len(saved):
                target.clear()
                log.warning("diloco: what compression has lost was saved by another layout of ranks and starts at zero")

    def facts(self) -> dict[str, float]:
        """How the exchanges go, for logs: counts, seconds, bytes of this rank; the norm is of the last round."""
        norm = {} if math.isnan(self.pseudo_gradient_norm) else {"diloco/norm": self.pseudo_gradient_norm}
        return {
            "diloco/sync_count": self.sync_count,
            "diloco/local_step": self.local_step,
            "diloco/sync_retries": self.sync_retries,
            "diloco/reconnections": self.reconnections,
            "diloco/total_sync_time": self.total_sync_time,
            "diloco/sync_share": self.total_sync_time / max(time.monotonic() - self._began, 1e-9),
            "diloco/bytes_sent": self._client.sent,
            "diloco/bytes_received": self._client.received,
            **norm,
        }

    def _directory(self) -> Path:
        return self._run.run_dir.diloco_worker

    def _identity(self) -> tuple[str, str]:
        """The worker's id, and what proves that another start is the same worker; made up once."""
        path = self._directory() / "worker.json"
        path.parent.mkdir(exist_ok=True)
        known = read_json_object(path) if path.exists() else {}
        secret = str(known.get("secret") or secrets.token_hex(16))
        made_up = f"{socket.gethostname()}-{secrets.token_hex(3)}"
        stated = self._settings.worker_id or os.environ.get("DILOCO_WORKER_ID", "")
        worker = stated or str(known.get("worker_id") or made_up)
        if known != {"worker_id": worker, "secret": secret}:
            write_whole(path, json.dumps({"worker_id": worker, "secret": secret}), 0o600)
        return worker, secret


class _Heartbeat:
    """Tells the server that this worker lives, from a thread of its own."""

    def __init__(self, client: Client, interval: float) -> None:
        self._client, self._interval, self._over = client, interval, threading.Event()

    def start(self, facts: Callable[[], dict[str, Any]]) -> None:
        threading.Thread(target=self._run, args=(facts,), name="diloco-heartbeat", daemon=True).start()

    def stop(self) -> None:
        self._over.set()

    def _run(self, facts: Callable[[], dict[str, Any]]) -> None:
        while not self._over.wait(self._interval):
            try:
                self._client.call("/heartbeat", facts())
            except ForgatherError as error:  # the next exchange finds out what it means
                log.debug("heartbeat: %s", error)


def _told(failure: ForgatherError | None) -> tuple[str, str] | None:
    kinds = ((Away, "away"), (Fenced, "fenced"), (ConfigError, "config"))
    return next(((name, str(failure)) for kind, name in kinds if isinstance(failure, kind)), None)


def _key(part: Part) -> list[Any]:
    return [part.name, part.start, part.rows]


def _without(given: list[list[int]], left: list[list[int]]) -> list[list[int]]:
    """The first of the samples ``given``, all but those ``left``, which are the last."""
    count = sum(stop - start for start, stop in given) - sum(stop - start for start, stop in left)
    used = []
    for start, stop in given:
        if count > 0:
            used.append([start, min(stop, start + count)])
        count -= stop - start
    return used
