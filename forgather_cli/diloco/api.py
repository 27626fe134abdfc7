"""The requests that a DiLoCo server answers (ASGI), and what they share with its loop."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from forgather_cli.checkpoint.files import sibling, sync_directory
from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco import wire
from forgather_cli.diloco.global_model import GlobalModel
from forgather_cli.diloco.ledger import Submission
from forgather_cli.diloco.outer_step import header_of
from forgather_cli.diloco.registry import Worker, clock
from forgather_cli.diloco.request import CHUNK, Gone, Receive, Request, Send
from forgather_cli.diloco.rounds import Rounds
from forgather_cli.diloco.wire import WireError
from forgather_cli.documents.fields import ANYTHING, FLAG, FieldError, FieldKind, check_fields, list_of, optional
from forgather_cli.documents.regular_files import append, write_whole
from forgather_cli.errors import CheckpointError
from forgather_cli.run_dir import RunDir, is_name

log = logging.getLogger(__name__)

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ROUND = re.compile(r"[0-9]{1,12}")
_WHOLE = FieldKind(lambda value: type(value) is int and 0 <= value <= wire.MAX_NUMBER, "a whole number up to 2^53")
_RATE = FieldKind(lambda value: type(value) in (int, float) and 0 <= value <= wire.MAX_NUMBER, "a number up to 2^53")
_SHORT = FieldKind(
    lambda value: isinstance(value, str) and len(value) <= wire.MAX_TEXT, f"a text of up to {wire.MAX_TEXT} letters"
)
_MAPPING = FieldKind(lambda value: isinstance(value, dict), "an object")
_COUNT, _SPEED = optional(_WHOLE), optional(_RATE)
_REPORT = {"step": _COUNT, "tokens_per_second": _SPEED, "sent": _COUNT, "received": _COUNT}
"""What a worker tells of itself: in heartbeats, and from 0.3 on with each submission."""
_AFTER = FieldKind(lambda value: value == -1 or _WHOLE.holds(value), "a round, or -1")


@dataclass
class Service:
    """What requests tell the server's loop, and it them. It belongs to the event loop, so nothing is locked."""

    run: RunDir
    settings: DilocoServerSettings
    model: GlobalModel
    rounds: Rounds
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    polling: dict[int, int] = field(default_factory=dict)
    """Generation -> number of its long polls: who waits here is alive."""
    told: set[int] = field(default_factory=set)
    """Generations that know that training is over."""
    over: str = ""
    """Why training is over; empty while it is not."""
    leaving: bool = False
    """This process ends; the run may go on."""
    commands: set[str] = field(default_factory=set)
    """Of control, those that are still to be followed: save, stop or stop_now."""
    norm: float | None = None
    """Of the last round's mean change."""
    received: int = 0
    sent: int = 0
    """Bytes of weights."""
    started: float = field(default_factory=clock)
    noted: int = 0
    """Lines of ``RUN/workers.json`` since it was written as a whole."""
    written: float = 0.0
    """When that was."""

    def notify(self) -> None:
        """Wake what waits for a change."""
        self.changed.set()
        self.changed = asyncio.Event()

    def now(self) -> float:
        """The time, at which those who wait here were heard of."""
        now = clock()
        for worker in self.rounds.live():
            if worker.generation in self.polling:
                worker.heard = now
        return now

    def examined(self, sent: Submission) -> Submission:
        """A submission with the norms of its change, or why it is none that could count: reads all of its parts."""
        if sent.rejected:
            return sent
        if sent.targets > (most := self.model.most_targets(sent.ranges, sent.targets)):
            why = f"targets: the samples that it names have at most {most}, got {sent.targets}; where rows differ in "
            why += "length, let data of your own state the longest as data.seq_len"
            return replace(sent, rejected=why[:_MOST_REASON])
        fragments = self.rounds.fragments_of(sent.round, leaves=sent.leaves)
        try:
            content = self.model.submissions.open(sent.parts)
            return replace(sent, norms=content.norms([self.model.outer.names([each]) for each in fragments]))
        except ValueError as error:
            why = str(error)
        except (CheckpointError, OSError, KeyError, TypeError, AttributeError) as error:
            why = f"a part cannot be read: {error}"
        return replace(sent, rejected=why[:_MOST_REASON])

    def note(self, *workers: Worker) -> None:
        """Keep what is known of these workers, in one line more; or of all where none is named, or there are too many
        lines, in one line that takes the place of the others, at most once a second. Raises OSError.
        """
        self.noted += 1
        if workers and (self.noted <= wire.MAX_MEMBERS or clock() - self.written < 1):
            append(self.run.diloco_workers, self.rounds.registry.to_line(*workers))
        else:
            write_whole(self.run.diloco_workers, self.rounds.registry.to_line(), durable=True)
            self.noted, self.written = 0, clock()


_MOST_REASON = 300  # letters of a reason, which is in the ledger


class Api:
    """The ASGI application."""

    def __init__(self, service: Service, token: str, control: str) -> None:
        """``token``: of members; ``control``: of whoever may stop the server."""
        self._service = service
        self._token, self._control_token = f"Bearer {token}".encode(), f"Bearer {control}".encode()
        self._check = asyncio.Lock()  # one submission at a time is decoded to be looked at, so memory does not grow

    def knows(self, headers: Sequence[tuple[bytes, bytes]]) -> bool:
        """Whether they have a token."""
        shown = dict(headers).get(b"authorization", b"")
        return hmac.compare_digest(shown, self._token) or hmac.compare_digest(shown, self._control_token)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """Answer one request (ASGI)."""
        if scope["type"] != "http":
            return
        headers = {key.decode("latin-1").lower(): value.decode("latin-1") for key, value in scope["headers"]}
        path = str(scope["path"]).strip("/").split("/")
        request = Request(str(scope["method"]), path, headers, receive, send)
        try:
            if not self.knows(scope["headers"]):
                raise WireError(401, "the token is missing or wrong: set DILOCO_TOKEN or token_file to the server's")
            if (version := headers.get(wire.VERSION_HEADER.lower())) != str(wire.WIRE_VERSION):
                what = f"the wire's version is {wire.WIRE_VERSION} here, {version} there"
                raise WireError(426, f"{what}; install the same forgather on both")
            await self._route(request)
        except Gone:
            return
        except WireError as error:
            document = {"error": error.message} | ({"code": error.code} if error.code else {})
            more = {"www_authenticate": 'Bearer realm="forgather"'} if error.status == 401 else {}
            await request.answer(error.status, document, connection="close", **more)
        except OSError as error:
            told = {"error": f"the server's disk: {error.strerror}; try again later"}
            await request.answer(507, told, connection="close")

    async def _route(self, request: Request) -> None:
        match request.method, request.path:
            case "POST", ["register" | "heartbeat" | "leave" as what]:
                answers = {"register": self._register, "heartbeat": self._heartbeat, "leave": self._leave}
                await request.answer(200, answers[what](await request.document()))
            case "POST", ["next"]:
                await request.answer(200, await self._next(await request.document(), request.receive))
            case "POST", ["submit"]:
                await request.answer(202, await self._submit(await request.document()))
            case "POST", ["control"]:
                if not hmac.compare_digest(request.headers["authorization"].encode("latin-1"), self._control_token):
                    where = "RUN/diloco.control-token at the server"
                    raise WireError(403, f"a member's token gives no control; show the one in {where}")
                await request.answer(202, self._control(await request.document()))
            case "GET", ["status"]:
                await request.answer(200, status(self._service))
            case "GET" | "POST" as method, ["weights" | "changes" as what, number, *rest] if _ROUND.fullmatch(number):
                made = self._service.model.published
                path = (made.weights if what == "weights" else made.changes)(int(number))
                if (method, rest) == ("GET", ["header"]):
                    try:
                        ranges = [(0, len(await asyncio.to_thread(header_of, path)))]
                    except FileNotFoundError:
                        ranges = []
                elif (method, rest) == ("POST", []):
                    ranges = _pairs(await request.document(), "ranges")
                else:
                    raise WireError(404, f"{method} /{'/'.join(request.path)}: there is no such thing here")
                count = await request.answer_file(path, ranges)
                self._service.sent += count  # not before the wait: others add to it meanwhile
            case "GET", ["parts", sha256] if _SHA256.fullmatch(sha256):
                there = self._service.model.submissions.has(sha256)
                await request.answer(200 if there else 404, {} if there else {"error": "no such part here; PUT it"})
            case "PUT", ["parts", sha256] if _SHA256.fullmatch(sha256):
                await request.answer(await self._receive_part(request, sha256), {})
            case method, path:
                raise WireError(404, f"{method} /{'/'.join(path)}: there is no such thing here")

    def _register(self, raw: dict[str, Any]) -> dict[str, Any]:
        kinds = {
            "worker": _SHORT, "secret": _SHORT, "host": _SHORT, "pid": _WHOLE, "run": _SHORT, "model": _SHORT,
            "batch": _WHOLE, "data": optional(_SHORT), "tokenizer": optional(_SHORT), "stated": _MAPPING,
            "round": _COUNT, "parent": optional(_SHORT), "leaves": FLAG, "dylu": FLAG,
        }  # fmt: skip
        given = _checked(raw, kinds)
        name, secret = given.pop("worker"), given.pop("secret")
        if not is_name(name):
            raise WireError(400, f"worker: must be of letters, digits and ._-, at most 100, got {name!r:.120}")
        if not 1 <= given["batch"] <= wire.MAX_BATCH:
            raise WireError(400, f"batch: must be from 1 to {wire.MAX_BATCH} sequences, got {given['batch']}")
        generation, stood = self._service.rounds.register(name, secret, now=clock(), **given)
        self._service.note(self._service.rounds.registry.workers[name])
        self._service.model.submissions.forget(name)  # of its start before, which sends no more
        self._service.notify()
        shared = ("mode", "sync_every", "compression", "compression_down", "stochastic_rounding", "num_fragments",
                  "overlap", "alpha", "weighting", "max_rounds", "workers")  # fmt: skip
        told = {key: getattr(self._service.settings, key) for key in shared} | {"seed": self._service.model.seed}
        return {"generation": generation, "settings": told, "stood": stood}

    async def _next(self, raw: dict[str, Any], receive: Receive) -> dict[str, Any]:
        given, rounds = _checked(raw, {"generation": _WHOLE, "after": _AFTER, "wait": _RATE}), self._service.rounds
        generation, end = given["generation"], clock() + min(given["wait"], wire.MAX_WAIT)
        leaving = asyncio.ensure_future(receive())  # answers when the client goes
        self._service.polling[generation] = self._service.polling.get(generation, 0) + 1
        try:
            while True:
                worker = rounds.worker(generation, now := clock())
                if self._service.over:
                    self._service.told.add(generation)
                    return {"state": wire.STOPPED, "reason": self._service.over}
                if (offer := rounds.offer(worker, given["after"], now)) is not None:
                    self._service.note(worker)
                    return offer
                if self._service.leaving:
                    return {"state": wire.WAITING, "why": "the server has stopped, until somebody resumes its run"}
                if (left := end - now) <= 0:
                    return {"state": wire.WAITING, "why": rounds.why_waiting(worker, now)}
                change = asyncio.ensure_future(self._service.changed.wait())
                await asyncio.wait({change, leaving}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                change.cancel()
                if leaving.done():
                    raise Gone
        finally:
            leaving.cancel()
            self._service.polling[generation] -= 1
            if not self._service.polling[generation]:
                del self._service.polling[generation]

    async def _submit(self, raw: dict[str, Any]) -> dict[str, Any]:
        kinds = {"generation": _WHOLE, "round": _WHOLE, "hash": _SHORT, "parts": list_of(ANYTHING), "leaves": FLAG}
        given = _checked(raw, kinds)
        number, ranges = given["round"], _pairs(raw, "ranges")
        parts = tuple(sorted({str(part) for part in given["parts"]}))
        if wrong := [part for part in parts if not _SHA256.fullmatch(part)]:
            raise WireError(400, f"parts: must be SHA-256 sums in hex, got {wrong[0]!r:.80}")
        problem, report = "", dict.fromkeys(["targets", *_REPORT])
        try:
            report = _checked(raw, {"targets": _WHOLE, **_REPORT})
        except WireError as error:
            problem = error.message
        rounds, submissions = self._service.rounds, self._service.model.submissions
        worker = rounds.worker(given["generation"], clock())
        answer = rounds.answered(worker, number, parts)
        if given["leaves"]:
            worker.last_round = number
            self._service.note(worker)
            self._service.notify()
        if answer is None:
            used = rounds.check_ranges(worker, number, given["hash"], ranges)
            with submissions.keeping(parts):
                if lacking := [part for part in parts if not submissions.has(part)]:
                    return {"status": wire.LACKING, "parts": lacking}
                submission = Submission(
                    rounds.slots[worker.name], worker.name, number, parts, report["targets"] or 0, used,
                    given["leaves"], problem,
                )  # fmt: skip
                async with self._check:
                    submission = await asyncio.to_thread(self._service.examined, submission)
                # a newer one may have taken over meanwhile
                worker = rounds.worker(given["generation"], now := clock())
                answer = rounds.answered(worker, number, parts)
                if answer is None:  # no pause between this and the answer: it is on disk when the round counts it
                    submissions.write(submission)
                    if report["step"] is not None:
                        _note(worker, report)
                    rounds.arrived(submission, now)
                    self._service.note(worker)
                    answer = rounds.answered(worker, number, parts)
                    self._service.notify()
        assert answer is not None
        return {"status": answer[0]} | ({"reason": answer[1]} if answer[1] else {})

    def _heartbeat(self, raw: dict[str, Any]) -> dict[str, Any]:
        given = _checked(raw, {"generation": _WHOLE, **_REPORT})
        worker = self._service.rounds.worker(given["generation"], clock())
        if self._service.over:
            self._service.told.add(given["generation"])
            return {"state": wire.STOPPED, "reason": self._service.over}
        _note(worker, given)
        return {"state": wire.OK}

    def _leave(self, raw: dict[str, Any]) -> dict[str, Any]:
        worker = self._service.rounds.worker(_checked(raw, {"generation": _WHOLE})["generation"], clock())
        worker.left = True
        self._service.note(worker)
        self._service.notify()
        return {"state": wire.OK}

    def _control(self, raw: dict[str, Any]) -> dict[str, Any]:
        command = raw.get("command")
        if command not in ("save", "stop", "stop_now"):
            raise WireError(400, f"command: must be save, stop or stop_now, got {command!r:.80}")
        self._service.commands.add(command)
        self._service.notify()
        return {"round": self._service.rounds.line.round if self._service.rounds.line else None}

    async def _receive_part(self, request: Request, sha256: str) -> int:
        """Take a part to disk; returns the HTTP status. Raises WireError, Gone, OSError."""
        submissions, rounds, whose = self._service.model.submissions, self._service.rounds, ""
        most, length = submissions.most_bytes, request.headers.get("content-length", "0")
        if (generation := request.headers.get(wire.GENERATION_HEADER.lower(), "")).isdecimal():
            whose = rounds.worker(int(generation[:20]), clock()).name
        else:
            most *= max(1, len(rounds.live()))
        if submissions.has(sha256):
            async for _ in request.body():
                pass
            return 200

        path, coming = submissions.part(sha256), int(length[:20]) if length.isdecimal() else 0
        temporary, digest, size, held = sibling(path, "tmp"), hashlib.sha256(), 0, b""

        def hold(name: str) -> None:
            submissions.unnamed[whose][name] = max(size, coming, most // 4096)  # so many files at most
            if sum(submissions.unnamed[whose].values()) > most:
                what = f"a worker's parts that no submission has named take at most {most} bytes, twice its change"
                raise WireError(413, f"{what}; submit those that are here, and send the server's model")

        try:
            hold(temporary.name)
            with await asyncio.to_thread(temporary.open, "wb", 0) as file:

                def write(content: bytes) -> None:
                    digest.update(content)
                    view = memoryview(content)
                    while view:
                        view = view[file.write(view) :]

                async for chunk in request.body():
                    held, size = held + chunk, size + len(chunk)
                    hold(temporary.name)
                    if len(held) >= CHUNK:
                        await asyncio.to_thread(write, held)
                        held = b""
                await asyncio.to_thread(write, held)
                if digest.hexdigest() != sha256:
                    what = f"the body's SHA-256 is {digest.hexdigest()}, not that of its name"
                    raise WireError(400, f"{what}; send it again")
                await asyncio.to_thread(os.fsync, file.fileno())
            if not path.exists():  # else another one has brought it meanwhile, and it may be named by now
                temporary.replace(path)
                submissions.unnamed[whose][sha256] = submissions.unnamed[whose].pop(temporary.name, size)
            await asyncio.to_thread(sync_directory, path.parent)
        finally:
            self._service.received += size
            submissions.unnamed[whose].pop(temporary.name, None)
            temporary.unlink(missing_ok=True)
        return 202


def _note(worker: Worker, report: dict[str, Any]) -> None:
    """Show what a worker tells of itself."""
    worker.step, worker.tokens_per_second = report["step"], report["tokens_per_second"]
    worker.sent, worker.received = report["sent"] or 0, report["received"] or 0


def status(service: Service) -> dict[str, Any]:
    """What ``forgather diloco status`` shows."""
    rounds, now, line = service.rounds, service.now(), service.rounds.line
    state = "stopping" if service.over or "stop" in service.commands else "computing" if rounds.closing else "training"
    facts = {key: getattr(service.settings, key) for key in ("sync_every", "compression", "max_rounds")}
    facts |= {key: getattr(service, key) for key in ("received", "sent")}
    shown = ("host", "pid", "run", "step", "tokens_per_second", "sent", "received", "bounded")
    workers = []
    for name, worker in sorted(rounds.registry.workers.items()):
        known = {key: getattr(worker, key) for key in shown} | {"silent": now - worker.heard}
        workers.append({"worker": name, "slot": rounds.slots.get(name), "state": _state_of(worker, rounds), **known})
    return {
        "state": state if line is not None or service.over else "waiting",
        "run": str(service.run.root),
        "round": line and line.round,
        "hash": line and line.hash,
        "round_seconds": now - rounds.opened,
        "waits_for": rounds.waited_for(),
        "why": rounds.why_waiting(),
        "workers_expected": service.settings.workers,
        **facts,
        "tokens": rounds.tokens,
        "outer_grad_norm": service.norm,
        "checkpoint": service.model.saved if service.model.saved >= 0 else None,
        "seconds": now - service.started,
        "workers": workers,
    }


def _state_of(worker: Worker, rounds: Rounds) -> str:
    member = rounds.member(worker.name)
    if worker.is_gone:
        return "evicted" if worker.evicted else "left"
    if member is None:
        return "joining" if worker.last_round is None else "left"
    if (sent := rounds.sent.get(member.slot)) is not None:
        return "rejected" if sent.rejected else "sent"
    return "training"


def _checked(raw: dict[str, Any], kinds: Mapping[str, FieldKind]) -> dict[str, Any]:
    """The fields of a message; one that may be null, or is a mapping, may lack. Raises WireError."""
    given = {name: raw.get(name, {} if kind is _MAPPING else None) for name, kind in kinds.items()}
    try:
        check_fields(given, kinds)
    except FieldError as error:
        raise WireError(400, str(error)) from error
    return given


def _pairs(raw: dict[str, Any], name: str) -> list[tuple[int, int]]:
    """A list of pairs of whole numbers. Raises WireError."""
    try:
        found = [(start, stop) for start, stop in raw[name]]
    except (KeyError, TypeError, ValueError):
        found = [("", "")]
    if any(type(number) is not int or not 0 <= number <= wire.MAX_NUMBER for pair in found for number in pair):
        raise WireError(400, f"{name}: must be pairs of whole numbers, got {raw.get(name)!r:.80}")
    return found
