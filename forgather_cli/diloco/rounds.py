"""Who takes part in a round, what each is given, and when it ends. No HTTP, no torch.

``Rounds`` is told what happens (``register``, ``submit``, the time) and asked what follows (``offer``, ``close``,
``opening``). A round ends with one exchange: of all weights, or of one fragment of them. In sync mode it waits for its
members, and nothing is decided by the order in which they arrive: slots follow the sorted worker ids, samples and sums
follow the slots. In async mode each submission is a round of its own, which all others train on through.

Times are seconds of a clock that only goes forward.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco import wire
from forgather_cli.diloco.ledger import Closed, Line, Participant, Submission, round_hash, versions
from forgather_cli.diloco.registry import Registry, Worker
from forgather_cli.diloco.samples import Range, merge, subtract, take, total
from forgather_cli.diloco.wire import WireError

Sizes = Sequence[tuple[float, int]]
"""Of the global weights, for each fragment: their norm, and how many they are."""

_SILENCE = 120.0
"""Seconds after which another process may take a worker's id, where eviction is off."""


class Rounds:
    """The rounds of one run. ``now`` is always the present time."""

    def __init__(
        self,
        settings: DilocoServerSettings,
        *,
        initial: str,
        model: str,
        ledger: Sequence[Line] = (),
        dropped: Collection[str] = (),
        registry: Registry | None = None,
        now: float = 0.0,
    ) -> None:
        """``initial``: SHA-256 of the initial weights; ``model``: ``wire.model_hash`` of the trainable parameters;
        ``dropped``: hashes of rounds that the server itself has gone back from.
        """
        self.settings, self._initial, self._model, self._dropped = settings, initial, model, dropped
        self.registry = registry or Registry()
        self.lines: list[Line] = []
        self.slots: dict[str, int] = {}
        self.sent: dict[int, Submission] = {}
        """What has come for the open round, by slot."""
        self.closing: Closed | None = None
        """The end of the open round, while its result is computed."""
        self.tokens = 0
        """Targets of all counted submissions of closed rounds."""
        self._arrived: dict[int, float] = {}
        """When that was, by slot."""
        self._settled: list[Submission] = []
        """What the closing round ends with, the rejected too, in slot order."""
        self._rates: dict[tuple[str, int], float] = {}
        """(worker, fragment) -> norm per step of the newest change that the worker has offered, counted or not."""
        self.opened = now
        for worker in self.registry.workers.values():
            worker.heard = now
        for line in ledger:
            self.append(line, now)
        for member in self.line.members if self.line else ():  # whoever it is where workers.json was lost
            self.registry.workers.setdefault(member.worker, Worker(member.worker, "", member.batch, heard=now))

    @property
    def line(self) -> Line | None:
        """The ledger's last line; None before the first round."""
        return self.lines[-1] if self.lines else None

    @property
    def finished(self) -> str | None:
        """Why training is over; None while it is not."""
        rounds, settings = len(self.lines) - 1, self.settings
        if settings.max_rounds is not None and rounds >= settings.max_rounds:
            return f"diloco.max_rounds={settings.max_rounds} is reached"
        if settings.max_tokens is not None and self.tokens >= settings.max_tokens:
            return f"diloco.max_tokens={settings.max_tokens} is reached"
        return None

    # ------------------------------------------------------------------------------------------------- what workers say

    def register(
        self,
        name: str,
        secret: str,
        *,
        batch: int,
        model: str,
        now: float,
        data: str | None = None,
        tokenizer: str | None = None,
        stated: Mapping[str, Any] | None = None,
        round: int | None = None,
        parent: str | None = None,
        host: str = "",
        pid: int = 0,
        run: str = "",
        leaves: bool = False,
        dylu: bool = False,
    ) -> tuple[int, str]:
        """A worker joins, or comes back: its new generation, and whether the server knows the round it stands on.

        Raises WireError: refused for another model, data, tokenizer, other settings or an unknown round; held where
        another process has the id.
        """
        registry = self.registry
        if model != self._model:
            self._refuse("the model differs: its parameters have other names or shapes; use the server's recipe")
        for what, mine, theirs in (("data", registry.data, data), ("tokenizer", registry.tokenizer, tokenizer)):
            if mine is not None and theirs is not None and mine != theirs:
                self._refuse(f"{what}: has the fingerprint {theirs} here, {mine} at the others; use the same {what}")
        for key, value in (stated or {}).items():
            if value != (here := getattr(self.settings, key, None)):
                self._refuse(f"{key}: is {value} at {name}, {here} at the server, which decides it; leave {key} out")
        if dylu and not self._is_async:
            self._refuse("dylu: counts only where the server's diloco.mode is async, it is sync; leave dylu out")
        stood = "fresh"
        if parent is not None:
            known = self.lines[round].hash if round is not None and 0 <= round < len(self.lines) else None
            stood = "known" if known == parent else "rewound"
            if stood == "rewound" and parent not in self._dropped and not self.settings.rewind:
                here = "no round" if self.line is None else f"round {self.line.round} ({self.line.hash[:12]})"
                self._refuse(
                    f"{name} stands on round {round} ({parent[:12]}), which this server does not know: it has {here}; "
                    "connect it to the server that it trained with, or begin a new run; after a server has lost rounds "
                    "for good, diloco.rewind=true takes workers back to where it is"
                )
        secret, before = hashlib.sha256(secret.encode()).hexdigest(), registry.workers.get(name)
        if before is not None and before.secret not in ("", secret) and not before.is_gone:
            silent, needed = now - before.heard, self.settings.eviction or _SILENCE
            if silent <= needed:
                raise WireError(
                    409,
                    f"{name}: another worker has this id (process {before.pid} on {before.host}, heard of "
                    f"{silent:.0f} s ago); choose another worker_id, or wait until it is silent for {needed:.0f} s",
                    wire.HELD,
                )
        generation = secrets.randbits(52)  # which nobody guesses, and JSON holds
        registry.data, registry.tokenizer = registry.data or data, registry.tokenizer or tokenizer
        registry.workers[name] = Worker(
            name, secret, batch, host, pid, run, generation,
            last_round=round if leaves and stood == "known" else None, dylu=dylu, heard=now,
        )  # fmt: skip
        return generation, stood

    def _refuse(self, message: str) -> NoReturn:
        raise WireError(409, message, wire.REFUSED)

    def worker(self, generation: int, now: float) -> Worker:
        """The worker with this generation, which has been heard of now. Raises WireError for an older one."""
        for worker in self.registry.workers.values():
            if worker.generation == generation and worker.why:
                many = f"has rejected {wire.MAX_REJECTED} rounds of this worker in a row"
                raise WireError(409, f"it {many}: {worker.why}", wire.EVICTED)
            if worker.generation == generation and not worker.is_gone:
                worker.heard = now
                return worker
        raise WireError(
            409,
            "this registration is no longer valid: a newer one took over, the server has started again, or it gave the "
            "worker up; register anew",
            wire.FENCED,
        )

    def offer(self, worker: Worker, after: int) -> dict[str, Any] | None:
        """What the worker is to train, as ``/next`` answers it, if that is of a round later than ``after``; and what
        has become of its submission for that one.
        """
        line = self.line
        member = None if line is None else line.member(worker.name)
        if member is None or member.round <= after or (self.closing is not None and not self._is_async):
            return None
        number = member.round
        return {
            "state": wire.OPEN, "round": number, "hash": self.lines[number].hash, "slot": member.slot,
            "steps": member.steps, "ranges": [list(each) for each in member.ranges],
            "weights": versions(self.lines, number, self.settings.num_fragments),
            "answer": self._decided(member.slot, after),
        }  # fmt: skip

    def why_waiting(self) -> str:
        """What a worker without a round waits for."""
        if self.line is None:
            here, wanted = len(self.live()), self.settings.workers
            return f"{here} of {wanted} workers have registered"
        if self.closing is not None:
            return f"round {self.line.round} is being computed"
        if not self.line.members:
            return f"round {self.line.round} waits for workers: all have left"
        return f"round {self.line.round} waits for {', '.join(self.waited_for()) or 'its end'}"

    def answered(self, worker: Worker, round: int, parts: Iterable[str]) -> tuple[str, str] | None:
        """(status, reason) of a submission that needs no look at its parts; None for one that is new.

        Raises WireError for a round that the worker has no part in.
        """
        line, slot = self.line, self.slots.get(worker.name)
        if line is None or slot is None or not 0 <= round <= line.round:
            raise WireError(400, f"round {round}: is not open, nor was it; ask /next which one is")
        parts, late = tuple(sorted(parts)), (wire.LATE, f"round {round} has ended without it")
        if (decided := self._decided(slot, round, parts)) is not None:
            return decided
        member = line.member(worker.name)
        if member is None or member.round != round:
            if round < line.round:
                return late
            raise WireError(400, f"round {round}: {worker.name} is no member of it; ask /next for its round")
        if (before := self.sent.get(slot)) is not None:
            if before.rejected:
                return wire.REJECTED, before.rejected
            if before.parts != parts:
                return wire.LATE, f"slot {slot} has sent something else for it before"
            return wire.COUNTED if self._is_async else wire.PENDING, ""
        return late if self.closing is not None and not self._is_async else None

    def _decided(self, slot: int, round: int, parts: tuple[str, ...] | None = None) -> tuple[str, str] | None:
        """(status, reason) of what a slot has sent for a round, if a line of the ledger says it; late where that were
        other parts.
        """
        for closed in (later.closed for later in self.lines[round + 1 :]):
            for sent in (*(sent for sent, _ in closed.submissions), *closed.offered) if closed else ():
                if (sent.slot, sent.round) == (slot, round):
                    if parts is not None and sent.parts != parts:
                        return wire.LATE, f"round {round} has ended without it"
                    return (wire.REJECTED, sent.rejected) if sent.rejected else (wire.COUNTED, "")
        return None

    def check_ranges(self, worker: Worker, round: int, hash: str, ranges: Iterable[Sequence[int]]) -> tuple[Range, ...]:
        """The samples that a submission names, merged. Raises WireError for others than the worker was given, and for a
        round that is not this run's.
        """
        if hash != (known := self.lines[round].hash):
            self._refuse(
                f"round {round}: {worker.name} stands on {hash[:12]}, the server's is {known[:12]}; begin anew"
            )
        used = [(start, stop) for start, stop in ranges if stop > start]
        member = self.lines[-1].member(worker.name)
        merged, given = merge(used), () if member is None else member.ranges
        if total(merged) != total(used) or total(subtract(given, merged)) != total(given) - total(merged):
            raise WireError(400, f"ranges: {worker.name} was given {list(given)}, got {used}; name some of those")
        return merged

    def fragments_of(self, round: int, *, leaves: bool) -> tuple[int, ...]:
        """Those that a submission of a round must hold: one in turn, a worker's last one all."""
        count = self.settings.num_fragments
        return tuple(range(count)) if leaves else (round % count,)

    def arrived(self, sent: Submission, sizes: Sizes) -> Submission:
        """A submission as it is answered now: in async mode rejected if it is too large, else that is decided later."""
        return self._judged(sent, sizes) if self._is_async else sent

    def submit(self, submission: Submission, now: float) -> None:
        """A checked submission for the open round, on disk by now."""
        self.sent[submission.slot], self._arrived[submission.slot] = submission, now
        self._rates |= self._rates_of(submission)

    # ------------------------------------------------------------------------------------------- how large a change is

    def _judged(self, sent: Submission, sizes: Sizes) -> Submission:
        """The submission, rejected if it is too large in a fragment: per step more than ``max_change`` times what the
        smaller half of the members and one more have offered last. That lies between two honest ones' as long as most
        members are honest, whatever the others send, and follows from the ledger and what has come since.
        """
        assert self.line is not None
        own, most = self._rates_of(sent), self.settings.max_change
        rates = ChainMap(own, self._rates)
        for fragment, norm in zip(self.fragments_of(sent.round, leaves=sent.leaves), sent.norms, strict=False):
            found = sorted(rates.get((member.worker, fragment), math.inf) for member in self.line.members)
            (weights, count), steps = sizes[fragment], self._steps_behind(sent, fragment)
            usual = max(found[len(found) // 2] * steps, 1e-3 * weights)
            bound, what = most * usual, f"diloco.max_change={most:g} times the usual one, {usual:.3g}"
            if len(found) == 1 or found[-1] == math.inf:  # nobody, or not everybody, to compare with
                initial = 0.02 * math.sqrt(count)  # a norm that weights which begin at zero may well reach
                bound, what = min((bound, what), (100 * max(weights, initial), "100 times the norm of the weights"))
            if norm > bound and not sent.rejected:
                where = f" of fragment {fragment}" if self.settings.num_fragments > 1 else ""
                remedy = "lower learning_rate or sync_every, or raise diloco.max_change where such changes are right"
                return replace(sent, rejected=f"its change{where} has the norm {norm:.3g}, more than {what}; {remedy}")
        return sent

    def _rates_of(self, sent: Submission) -> dict[tuple[str, int], float]:
        fragments = self.fragments_of(sent.round, leaves=sent.leaves)
        return {
            (sent.worker, fragment): norm / self._steps_behind(sent, fragment)
            for fragment, norm in zip(fragments, sent.norms, strict=False)
        }

    def _steps_behind(self, sent: Submission, fragment: int) -> int:
        """The steps that a worker was given for its change of a fragment: those since the fragment was exchanged, or
        the worker began anew.
        """
        begun, steps = versions(self.lines, sent.round, self.settings.num_fragments)[fragment], 0
        for number in range(sent.round, begun - 1, -1):
            member = self.lines[number].member(sent.worker)
            if member is None or (steps and self._decided(sent.slot, number) != (wire.COUNTED, "")):
                break
            steps += member.steps
        return steps

    # ------------------------------------------------------------------------------------------------- what follows

    def live(self, round: int | None = None) -> list[Worker]:
        """Workers that have registered, are not given up and take part in ``round`` (None: the next), by name."""
        number = len(self.lines) if round is None else round
        workers = sorted(self.registry.workers.values(), key=lambda worker: worker.name)
        return [each for each in workers if not each.is_gone and (each.last_round is None or number <= each.last_round)]

    def evict(self, now: float) -> list[Worker]:
        """Give up the workers that were not heard of for ``eviction`` seconds; returns them."""
        limit = self.settings.eviction
        found = [] if limit is None else [worker for worker in self.live() if now - worker.heard > limit]
        for worker in found:
            worker.evicted = True
        return found

    def waited_for(self) -> list[str]:
        """Members of the open round that have not sent and are not given up, by slot."""
        if self.line is None:
            return []
        live = {worker.name for worker in self.live(self.line.round)}
        return [each.worker for each in self.line.members if each.slot not in self.sent and each.worker in live]

    def can_open(self) -> bool:
        """Whether the first round can begin."""
        return self.line is None and len(self.live()) >= self.settings.workers

    def close(self, now: float, sizes: Sizes) -> Closed | None:
        """How the open round ends, if it is time: it takes nothing more from now on. None if it is not.

        With nobody to wait for and nothing sent it ends too, once there is somebody for the next one.
        """
        line, settings = self.line, self.settings
        if line is None or self.closing is not None or self.finished:
            return None
        if self._is_async:  # the first that has come, while the other members go on
            settled = list(self.sent.values())[:1]
            is_due = bool(settled) or any(line.member(worker.name) is None for worker in self.live())
        else:
            settled = [self._judged(sent, sizes) for _, sent in sorted(self.sent.items())]
            counted = sorted(self._arrived[sent.slot] for sent in settled if not sent.rejected)
            quorum = math.inf if settings.quorum is None else settings.quorum
            enough = len(counted) >= quorum and now - counted[int(quorum) - 1] >= settings.grace
            overdue = settings.round_timeout is not None and now - self.opened >= settings.round_timeout
            nobody_left = not self.waited_for() and bool(counted or self.live())
            is_due = nobody_left or bool(counted and (enough or overdue))
        if is_due:
            self._settled, self.closing = settled, self._closed(line, settled)
        return self.closing

    def without_largest(self) -> Closed:
        """How the closing round ends without the largest of its changes, since fp32 cannot hold what comes of them."""
        assert self.line is not None
        assert self.closing is not None
        largest = max((sent for sent, _ in self.closing.submissions), key=lambda sent: math.hypot(*sent.norms))
        why = f"its change, of the norm {math.hypot(*largest.norms):.3g}, makes weights that fp32 cannot hold"
        rejected = replace(largest, rejected=why)
        self._settled = [rejected if sent is largest else sent for sent in self._settled]
        self.closing = self._closed(self.line, self._settled)
        return self.closing

    def _closed(self, line: Line, settled: Sequence[Submission]) -> Closed:
        """The end of the open round with these submissions. Gives up a worker with too many rejections in a row."""
        struck = {sent.worker: sent.rejected for sent in settled if sent.rejected and self._is_last_straw(sent.worker)}
        for name, why in struck.items():
            self.registry.workers[name].evicted, self.registry.workers[name].why = True, why
        counted = [sent for sent in settled if not sent.rejected]
        live = {worker.name for worker in self.live(line.round)}
        silent = {member.worker for member in line.members} - {sent.worker for sent in self.sent.values()}
        left = {name for name in silent if self.registry.workers[name].left}
        given_up = {name for name in silent - left if self.registry.workers[name].evicted}
        # a fragment's change is of all that was trained since its last exchange
        recent = self.lines[max(1, len(self.lines) - self.settings.num_fragments + 1) :]
        before = [old for each in recent if each.closed for old, _ in each.closed.submissions]
        targets = [each.targets + sum(old.targets for old in before if old.slot == each.slot) for each in counted]
        equal = self.settings.weighting == "equal"
        weights = [float32(1 / len(counted) if equal else each / max(sum(targets), 1)) for each in targets]
        return Closed(
            tuple(zip(counted, weights, strict=True)),
            self.fragments_of(line.round, leaves=all(sent.leaves for sent in counted)) if counted else (),
            missing=() if self._is_async else tuple(sorted(silent & live)),
            rejected=tuple((sent.worker, sent.rejected) for sent in settled if sent.rejected),
            evicted=tuple(sorted(given_up | struck.keys())),
            left=tuple(sorted(left)),
            offered=tuple(sent for sent in settled if sent.rejected),
        )

    def _is_last_straw(self, name: str) -> bool:
        """Whether one more rejection is too many in a row for a worker."""
        before = 0
        for closed in (line.closed for line in reversed(self.lines)):
            if closed is not None and any(sent.worker == name for sent, _ in closed.submissions):
                return False
            before += closed is not None and any(who == name for who, _ in closed.rejected)
            if before == wire.MAX_REJECTED - 1:
                return True
        return False

    def opening(self, time: str) -> Line:
        """The line that ends the closing round, if there is one, and opens the next with those who are here."""
        before, closed, settings = self.line, self.closing, self.settings
        number = 0 if before is None else before.round + 1
        counted = {sent.worker: sent for sent, _ in closed.submissions} if closed else {}
        settled = counted.keys() | ({name for name, _ in closed.rejected} if closed else set())
        stood = {} if before is None else {member.worker: member for member in before.members}
        workers = self.registry.workers
        goes_on = [name for name in stood if self._is_async and name not in settled and not workers[name].is_gone]
        names = {worker.name for worker in self.live()} | set(goes_on)
        slots = dict(self.slots)
        for name in sorted(names):
            slots.setdefault(name, len(slots))
        # what each still has of what it was given; the rest that was not used comes back
        held = {name: stood[name].ranges for name in goes_on}
        held |= {name: subtract(stood[name].ranges, counted[name].ranges) for name in counted if name in names}
        gone = [each for sent in counted.values() for each in sent.ranges]
        gone += [each for ranges in held.values() for each in ranges]
        given = [each for member in stood.values() for each in member.ranges]
        cursor = 0 if before is None else before.cursor
        pool = subtract(merge([*(() if before is None else before.pool), *given]), gone)
        members = []
        for name in sorted(names, key=lambda name: slots[name]):
            if name in goes_on:
                members.append(stood[name])
                continue
            steps, batch, left = self._steps(workers[name]), workers[name].batch, held.get(name, ())
            wanted = (steps + settings.overlap) * batch  # it trains on before it has the next round's
            fresh, cursor, pool = take(max(0, wanted - total(left)), cursor, pool)
            members.append(Participant(slots[name], name, batch, number, steps, (*left, *fresh)))
        parent = self._initial if before is None else before.hash
        return Line(number, round_hash(parent, number, closed), parent, time, closed, tuple(members), cursor, pool)

    def _steps(self, worker: Worker) -> int:
        """Of a worker's next round; with DyLU its share of the fastest worker's, by their speeds (arXiv:2401.09135)."""
        steps = self.settings.sync_every // self.settings.num_fragments
        fastest = max((each.speed for each in self.live() if each.speed), default=None)
        if not worker.dylu or not worker.speed or not fastest:
            return steps
        return max(1, int(steps * worker.speed / fastest))

    def append(self, line: Line, now: float) -> None:
        """The line is in the ledger: its round is open."""
        self.lines.append(line)
        self.slots |= {member.worker: member.slot for member in line.members}
        if line.closed is not None:
            counted = [sent for sent, _ in line.closed.submissions]
            self.tokens += sum(sent.targets for sent in counted)
            for sent in (*counted, *line.closed.offered):
                self._rates |= self._rates_of(sent)
        stand = {member.slot: member.round for member in line.members}
        self.sent = {slot: sent for slot, sent in self.sent.items() if stand.get(slot) == sent.round}
        self.closing = None
        self.opened = now

    def needed(self) -> set[int]:
        """The rounds whose published weights a worker may still ask for: those of members, and of the round before."""
        line, count = self.line, self.settings.num_fragments
        if line is None:
            return {0}
        stand = {line.round, line.round - 1, *(member.round for member in line.members)}
        return {version for round in stand for version in versions(self.lines, round, count)}

    @property
    def _is_async(self) -> bool:
        return self.settings.mode == "async"


def float32(number: float) -> float:
    """The nearest fp32 number."""
    (nearest,) = struct.unpack("f", struct.pack("f", number))
    return float(nearest)
