"""The server of one run: HTTP for workers and ``forgather diloco status``, and the rounds that follow from it.

One event loop answers requests and decides what happens (``_keep``); what takes long (rounds, checkpoints, a look at a
submission, files) is done in threads meanwhile. All state that is decided on belongs to the loop, so nothing is locked.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import json
import logging
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, TypeVar

import uvicorn

from forgather_cli.callbacks.json_logger import RecordFile
from forgather_cli.checkpoint.files import replace_file, sibling, sync_directory
from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco import wire
from forgather_cli.diloco.global_model import GlobalModel
from forgather_cli.diloco.ledger import Submission, read_ledger, write_line
from forgather_cli.diloco.outer_step import header_of
from forgather_cli.diloco.request import CHUNK, Gone, Receive, Request, Send, checked, pairs
from forgather_cli.diloco.rounds import Registry, Rounds
from forgather_cli.diloco.wire import WireError
from forgather_cli.errors import SetupError, TrainingError
from forgather_cli.input_files import read_json_object
from forgather_cli.launch.context import RankContext
from forgather_cli.launch.exit_status import DONE, STOPPED, ExitStatus, Kind, done, write_exit_record
from forgather_cli.run_dir import RunDir, is_name

log = logging.getLogger(__name__)
T = TypeVar("T")

_TICK = 0.2  # seconds between two looks at the clock
_FAREWELL = 60.0  # seconds in which workers are told that training is over: two of their heartbeats
_SHA256 = re.compile(r"[0-9a-f]{64}")


class _Uvicorn(uvicorn.Server):
    """Signals are ours (``launch/signals.py``)."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Server:
    """An ASGI application, and what runs it."""

    def __init__(
        self, model: GlobalModel, run: RunDir, settings: DilocoServerSettings, rank: RankContext, token: str
    ) -> None:
        """Bring the run to where its ledger ends. Raises SetupError."""
        self._model, self._run, self._settings, self._rank = model, run, settings, rank
        self._token = f"Bearer {token}".encode()
        ledger = read_ledger(run.rounds)
        registry = Registry.from_document(read_json_object(run.diloco_workers)) if run.diloco_workers.exists() else None
        initial = model.begin(ledger)
        self._rounds = Rounds(
            settings,
            initial=initial,
            model=wire.model_hash(model.shapes.items()),
            ledger=ledger,
            registry=registry,
            now=time.monotonic(),
        )
        if (line := self._rounds.line) is not None:
            for member in line.members:
                if (submission := model.submissions.sent(member.round, member.slot)) is not None:
                    self._rounds.submit(submission, time.monotonic())
            self._forget()
        elif model.saved < 0:
            model.save(0, "", 0, time.time(), {})
            if model.saved < 0:
                raise SetupError(f"{run.checkpoints}: the initial weights could not be saved (see above)")
        self._metrics = RecordFile(run.metrics)
        self._metrics.begin(line.round if line else 0)
        self._thread = ThreadPoolExecutor(1, "diloco-rounds")
        self._changed = asyncio.Event()
        self._polling: dict[int, int] = {}
        """Generation -> number of its long polls: who waits here is alive."""
        self._told: set[int] = set()
        """Generations that know that training is over."""
        self._over = ""
        """Why training is over; empty while it is not."""
        self._leaving = False
        """This process ends; the run may go on."""
        self._wants_save, self._wants_stop, self._stops_now = False, False, False
        self._norm: float | None = None
        self._received = self._sent = 0
        self._started = time.monotonic()

    # ----------------------------------------------------------------------------------------------------- what happens

    async def serve(self, listener: socket.socket) -> ExitStatus:
        """Serve until the rounds are over or something stops them. Raises TrainingError."""
        http = _Uvicorn(
            uvicorn.Config(
                self,
                http="h11",
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                log_level="warning",
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=2,
                ssl_certfile=self._settings.tls_certificate,
                ssl_keyfile=self._settings.tls_key,
            )
        )
        serving = asyncio.create_task(http.serve([listener]))
        try:
            status = await self._keep()
            line = self._rounds.line
            write_exit_record(self._run, status.state, status.code, status.message, line.round if line else 0)
            return status
        finally:
            self._leaving = True
            self._notify()
            http.should_exit = True
            await serving

    async def _keep(self) -> ExitStatus:
        """Open, close and compute rounds, and save, as it is time; returns how it ended."""
        rounds, ended_round = self._rounds, False
        while True:
            if rounds.evict(self._now()):
                self._write_registry()
            if (signum := self._rank.stop.signum) is not None:
                self._rank.stop.acknowledge(signum)
                await self._save_last()
                return ExitStatus(0, Kind.STOPPED, STOPPED, f"stopped by {signal.Signals(signum).name}")
            at_rest = rounds.line is None or not rounds.live() or ended_round
            if self._stops_now or rounds.finished or (self._wants_stop and at_rest):
                self._over = rounds.finished or "stopped by a command"
                self._notify()
                await self._save_last()
                await self._bid_farewell()
                number = rounds.line.round if rounds.line else 0
                if rounds.finished:
                    print(f"\n{rounds.finished}; raise it to go on\nnewest   {self._run.checkpoint(self._model.saved)}")
                    return done(0, rounds.finished)
                return ExitStatus(0, Kind.STOPPED, DONE, f"stopped by a command after {number} rounds")
            if self._wants_save:
                self._wants_save = False
                await self._save()
            if ended_round := bool(rounds.can_open() or rounds.close(self._now())):
                await self._next_round()
                continue
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _TICK)

    async def _next_round(self) -> None:
        """Compute the end of the closing round, if there is one, and open the next."""
        rounds, closing, begun = self._rounds, self._rounds.closing, time.monotonic()
        if closing is not None:
            assert rounds.line is not None
            self._norm = await self._in_thread(self._model.step, closing, rounds.line.round + 1)
        line, seconds = (
            rounds.opening(datetime.now(UTC).isoformat(timespec="milliseconds")),
            time.monotonic() - rounds.opened,
        )
        try:
            write_line(self._run.rounds, line)
        except OSError as error:
            raise TrainingError(
                f"{self._run.rounds}: cannot be written: {error.strerror}; make room, then resume"
            ) from error
        rounds.append(line, time.monotonic())
        self._notify()
        self._rank.stepped(line.round)
        if closing is None:
            print(f"round 0 is open: {', '.join(member.worker for member in line.members)}", flush=True)
            return
        targets = sum(sent.targets for sent, _ in closing.submissions)
        metrics = {
            "round": line.round,
            "tokens": targets,
            "total_tokens": rounds.tokens,
            "outer_grad_norm": self._norm,
            "staleness": max((line.round - 1 - sent.round for sent, _ in closing.submissions), default=0),
            "members": len(closing.submissions),
            "round_time": seconds,
            "outer_step_time": time.monotonic() - begun,
        }
        self._metrics.add(metrics, step=line.round, epoch=0.0)
        absent = {
            "missing": closing.missing,
            "rejected": [name for name, _ in closing.rejected],
            "evicted": closing.evicted,
        }
        told = "".join(f", {what} {', '.join(who)}" for what, who in absent.items() if who)
        what = f"round {line.round - 1} of {len(closing.submissions)} workers: {targets:,} targets"
        print(f"{what}, norm {self._norm:.4g}, {seconds:.1f} s{told}", flush=True)
        self._forget()
        if line.round % self._settings.save_every == 0:
            await self._save()

    async def _save(self) -> None:
        if (line := self._rounds.line) is not None:
            metrics = {} if self._norm is None else {"outer_grad_norm": self._norm}
            opened = datetime.fromisoformat(line.time).timestamp()
            oldest = min([line.round, *(member.round for member in line.members)])
            await self._in_thread(self._model.save, line.round, line.hash, oldest, opened, metrics)

    async def _save_last(self) -> None:
        """Before the end. Raises TrainingError."""
        await self._save()
        if (line := self._rounds.line) is not None and self._model.saved != line.round:
            what = f"round {line.round} could not be saved (see above), but what it was made of is kept"
            raise TrainingError(f"{what}; make room, then forgather resume {self._run.root}")

    async def _in_thread(self, function: Callable[..., T], *arguments: Any) -> T:
        """The result of what takes long; a signal is acknowledged meanwhile, and acted on afterwards."""
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        while not (await asyncio.wait({future}, timeout=_TICK))[0]:
            if (signum := self._rank.stop.signum) is not None:
                self._rank.stop.acknowledge(signum)
        return future.result()

    async def _bid_farewell(self) -> None:
        """Until all workers know that training is over, or a minute has passed."""
        end = time.monotonic() + _FAREWELL
        while {worker.generation for worker in self._rounds.live()} - self._told and time.monotonic() < end:
            if self._rank.stop.signum is not None:
                return
            await asyncio.sleep(_TICK)
            self._rounds.evict(self._now())
        await asyncio.sleep(_TICK)  # the last answer is on its way

    def _forget(self) -> None:
        """Delete the published weights that nobody can ask for any more; replay needs the first."""
        self._model.published.forget(self._rounds.needed() | ({0} if self._settings.keep_submissions else set()))

    def _notify(self) -> None:
        """Wake what waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _now(self) -> float:
        """The time, at which those who wait here were heard of."""
        now = time.monotonic()
        for worker in self._rounds.live():
            if self._polling.get(worker.generation):
                worker.heard = now
        return now

    def _write_registry(self) -> None:
        path = self._run.diloco_workers
        replace_file(path, json.dumps(self._rounds.registry.to_document()).encode(), sibling(path, "tmp"))

    # --------------------------------------------------------------------------------------------------------- requests

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        path = str(scope["path"]).strip("/").split("/")
        request = Request(str(scope["method"]), path, headers, receive, send)
        try:
            self._admit(headers)
            await self._route(request)
        except Gone:
            return
        except WireError as error:
            document = {"error": error.message} | ({"code": error.code} if error.code else {})
            more = {"www_authenticate": 'Bearer realm="forgather"'} if error.status == 401 else {}
            await request.answer(error.status, document, connection="close", **more)
        except OSError as error:
            await request.answer(
                507, {"error": f"the server's disk: {error.strerror}; try again later"}, connection="close"
            )

    def _admit(self, headers: dict[str, str]) -> None:
        """Check token and version. Raises WireError."""
        if not hmac.compare_digest(headers.get("authorization", "").encode("latin-1"), self._token):
            raise WireError(401, "the token is missing or wrong: set DILOCO_TOKEN or token_file to the server's")
        if (version := headers.get(wire.VERSION_HEADER.lower())) != str(wire.WIRE_VERSION):
            raise WireError(
                426,
                f"the wire's version is {wire.WIRE_VERSION} here, {version} there; install the same forgather on both",
            )

    async def _route(self, request: Request) -> None:
        match request.method, request.path:
            case "POST", ["register"]:
                await request.answer(200, self._register(await request.document()))
            case "POST", ["next"]:
                await request.answer(200, await self._next(await request.document(), request.receive))
            case "POST", ["submit"]:
                await request.answer(202, await self._submit(await request.document()))
            case "POST", ["heartbeat"]:
                await request.answer(200, self._heartbeat(await request.document()))
            case "POST", ["leave"]:
                await request.answer(200, self._leave(await request.document()))
            case "POST", ["control"]:
                await request.answer(202, self._control(await request.document()))
            case "GET", ["status"]:
                await request.answer(200, self.status())
            case "GET" | "POST" as method, ["weights" | "changes" as what, number, *rest] if number.isdecimal():
                made = self._model.published
                path = (made.weights if what == "weights" else made.changes)(int(number))
                if (method, rest) == ("GET", ["header"]):
                    try:
                        size = len(await asyncio.to_thread(header_of, path))
                    except FileNotFoundError:
                        size = 0
                    self._sent += await request.answer_file(path, [(0, size)])
                elif (method, rest) == ("POST", []):
                    ranges = pairs(await request.document(), "ranges")
                    self._sent += await request.answer_file(path, ranges)
                else:
                    raise WireError(404, f"{method} /{'/'.join(request.path)}: there is no such thing here")
            case "GET", ["parts", sha256] if _SHA256.fullmatch(sha256):
                there = self._model.submissions.has(sha256)
                await request.answer(200 if there else 404, {} if there else {"error": "no such part here; PUT it"})
            case "PUT", ["parts", sha256] if _SHA256.fullmatch(sha256):
                await request.answer(await self._receive_part(request, sha256), {})
            case method, path:
                raise WireError(404, f"{method} /{'/'.join(path)}: there is no such thing here")

    def _register(self, raw: dict[str, Any]) -> dict[str, Any]:
        kinds = {
            "worker": str, "secret": str, "host": str, "pid": int, "run": str, "model": str, "batch": int,
            "data": (str, type(None)), "tokenizer": (str, type(None)), "stated": dict,
            "round": (int, type(None)), "parent": (str, type(None)), "leaves": bool, "dylu": bool,
        }  # fmt: skip
        given = checked(raw, kinds)
        name, secret = given.pop("worker"), given.pop("secret")
        if not is_name(name):
            raise WireError(400, f"worker: must be of letters, digits and ._-, at most 100, got {name!r:.120}")
        if given["batch"] < 1:
            raise WireError(400, f"batch: must be above 0, got {given['batch']}")
        generation, stood = self._rounds.register(name, secret, now=time.monotonic(), **given)
        self._write_registry()
        self._notify()
        settings = self._settings
        shared = ("mode", "sync_every", "compression", "compression_down", "num_fragments", "overlap", "alpha",
                  "weighting", "max_rounds", "workers")  # fmt: skip
        told = {key: getattr(settings, key) for key in shared} | {"seed": self._model.seed}
        return {"generation": generation, "settings": told, "stood": stood}

    async def _next(self, raw: dict[str, Any], receive: Receive) -> dict[str, Any]:
        given = checked(raw, {"generation": int, "after": int, "wait": (int, float)})
        generation, end = given["generation"], time.monotonic() + min(max(given["wait"], 0.0), wire.MAX_WAIT)
        leaving = asyncio.ensure_future(receive())  # answers when the client goes
        self._polling[generation] = self._polling.get(generation, 0) + 1
        try:
            while True:
                if self._over:
                    self._told.add(generation)
                    return {"state": wire.STOPPED, "reason": self._over}
                worker = self._rounds.worker(generation, time.monotonic())
                if (offer := self._rounds.offer(worker, given["after"])) is not None:
                    return offer
                if self._leaving:
                    return {"state": wire.WAITING, "why": "the server has stopped, until somebody resumes its run"}
                if (left := end - time.monotonic()) <= 0:
                    return {"state": wire.WAITING, "why": self._rounds.why_waiting()}
                change = asyncio.ensure_future(self._changed.wait())
                await asyncio.wait({change, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if leaving.done():
                    raise Gone
        finally:
            leaving.cancel()
            self._polling[generation] -= 1
            if not self._polling[generation]:
                del self._polling[generation]

    async def _submit(self, raw: dict[str, Any]) -> dict[str, Any]:
        kinds = {"generation": int, "round": int, "hash": str, "parts": list, "targets": int, "leaves": bool,
                 "speed": (int, float, type(None))}  # fmt: skip
        given = checked(raw, kinds)
        number, ranges = given["round"], pairs(raw, "ranges")
        parts = tuple(sorted({str(part) for part in given["parts"]}))
        if wrong := [part for part in parts if not _SHA256.fullmatch(part)]:
            raise WireError(400, f"parts: must be SHA-256 sums in hex, got {wrong[0]!r:.80}")
        if given["targets"] < 0:
            raise WireError(400, f"targets: must be a number of targets, got {given['targets']}")
        rounds, submissions = self._rounds, self._model.submissions
        worker = rounds.worker(given["generation"], time.monotonic())
        answer = rounds.answered(worker, number, parts)
        if given["leaves"] and worker.last_round != number:
            worker.last_round = number
            self._write_registry()
            self._notify()
        if answer is None:
            used = rounds.check_ranges(worker, number, given["hash"], ranges)
            if lacking := [part for part in parts if not submissions.has(part)]:
                raise WireError(400, f"parts: {lacking[0]} is not here; PUT it to /parts first")
            names = self._model.outer.names(rounds.fragments_of(number, leaves=given["leaves"]))
            problem = await asyncio.to_thread(submissions.problem, parts, names)
            submission = Submission(
                rounds.slots[worker.name], worker.name, number, parts, given["targets"], used, given["leaves"], problem
            )
            worker = rounds.worker(given["generation"], time.monotonic())  # a newer one may have taken over meanwhile
            answer = rounds.answered(worker, number, parts)
            if answer is None:  # no pause between this and the answer: it is on disk when the round counts it
                submissions.write(submission)
                worker.speed = given["speed"]
                rounds.submit(submission, time.monotonic())
                answer = (wire.REJECTED, problem) if problem else (wire.COUNTED, "")
                self._notify()
        if answer[0] == wire.REJECTED:
            log.warning("round %d: the submission of %s is rejected: %s", number, worker.name, answer[1])
        return {"status": answer[0]} | ({"reason": answer[1]} if answer[1] else {})

    def _heartbeat(self, raw: dict[str, Any]) -> dict[str, Any]:
        number, count = (int, float, type(None)), (int, type(None))
        kinds = {"generation": int, "step": count, "tokens_per_second": number, "sent": count, "received": count}
        given = checked(raw, kinds)
        if self._over:
            self._told.add(given["generation"])
            return {"state": wire.STOPPED, "reason": self._over}
        worker = self._rounds.worker(given["generation"], time.monotonic())
        worker.step, worker.tokens_per_second = given["step"], given["tokens_per_second"]
        worker.sent, worker.received = given["sent"] or 0, given["received"] or 0
        return {"state": wire.OK}

    def _leave(self, raw: dict[str, Any]) -> dict[str, Any]:
        worker = self._rounds.worker(checked(raw, {"generation": int})["generation"], time.monotonic())
        worker.evicted = True
        self._write_registry()
        self._notify()
        return {"state": wire.OK}

    def _control(self, raw: dict[str, Any]) -> dict[str, Any]:
        command = raw.get("command")
        if command not in ("save", "stop", "stop_now"):
            raise WireError(400, f"command: must be save, stop or stop_now, got {command!r:.80}")
        self._wants_save |= command == "save"
        self._wants_stop |= command == "stop"
        self._stops_now |= command == "stop_now"
        self._notify()
        return {"round": self._rounds.line.round if self._rounds.line else None}

    async def _receive_part(self, request: Request, sha256: str) -> int:
        """Take a part to disk; returns the HTTP status. Raises WireError, Gone, OSError."""
        submissions = self._model.submissions
        most, length = submissions.most_bytes, request.headers.get("content-length", "0")
        if not length.isdecimal() or int(length) > most:
            raise WireError(
                413, f"a part of this model has at most {most} bytes, got {length:.20}; send the server's model"
            )
        if submissions.has(sha256):
            async for _ in request.body():
                pass
            return 200
        path = submissions.part(sha256)
        temporary, digest, size, held = sibling(path, "tmp"), hashlib.sha256(), 0, b""
        file = await asyncio.to_thread(temporary.open, "wb", 0)
        try:
            with file:

                def write(content: bytes) -> None:
                    digest.update(content)
                    view = memoryview(content)
                    while view:
                        view = view[file.write(view) :]

                async for chunk in request.body():
                    held, size = held + chunk, size + len(chunk)
                    if size > most:
                        raise WireError(413, f"a part of this model has at most {most} bytes; send the server's model")
                    if len(held) >= CHUNK:
                        await asyncio.to_thread(write, held)
                        held = b""
                await asyncio.to_thread(write, held)
                if digest.hexdigest() != sha256:
                    raise WireError(
                        400, f"the body's SHA-256 is {digest.hexdigest()}, not that of its name; send it again"
                    )
                await asyncio.to_thread(os.fsync, file.fileno())
            temporary.replace(path)
            await asyncio.to_thread(sync_directory, path.parent)
        finally:
            self._received += size
            temporary.unlink(missing_ok=True)
        return 202

    # ----------------------------------------------------------------------------------------------------------- status

    def status(self) -> dict[str, Any]:
        """What ``forgather diloco status`` shows."""
        rounds, now, line = self._rounds, self._now(), self._rounds.line
        members = {} if line is None else {member.worker: member.slot for member in line.members}
        state = "stopping" if self._over or self._wants_stop else "computing" if rounds.closing else "training"
        return {
            "state": state if line is not None or self._over else "waiting",
            "run": str(self._run.root),
            "round": None if line is None else line.round,
            "hash": None if line is None else line.hash,
            "round_seconds": now - rounds.opened,
            "waits_for": rounds.waited_for(),
            "why": rounds.why_waiting(),
            "workers_expected": self._settings.workers,
            "sync_every": self._settings.sync_every,
            "compression": self._settings.compression,
            "max_rounds": self._settings.max_rounds,
            "tokens": rounds.tokens,
            "outer_grad_norm": self._norm,
            "checkpoint": self._model.saved if self._model.saved >= 0 else None,
            "received": self._received,
            "sent": self._sent,
            "seconds": now - self._started,
            "workers": [
                {
                    "worker": worker.name,
                    "slot": rounds.slots.get(worker.name),
                    "state": self._worker_state(worker.name, worker.evicted, members),
                    "host": worker.host,
                    "pid": worker.pid,
                    "run": worker.run,
                    "step": worker.step,
                    "tokens_per_second": worker.tokens_per_second,
                    "sent": worker.sent,
                    "received": worker.received,
                    "silent": now - worker.heard,
                }
                for _, worker in sorted(rounds.registry.workers.items())
            ],
        }

    def _worker_state(self, name: str, evicted: bool, members: dict[str, int]) -> str:
        if evicted:
            return "evicted"
        if name not in members:
            return "joining"
        if (sent := self._rounds.sent.get(members[name])) is not None:
            return "rejected" if sent.rejected else "sent"
        return "training"
