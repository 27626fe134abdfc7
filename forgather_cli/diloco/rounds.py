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
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import cache
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
_FEW = 3
"""Members, or workers, fewer than which have no majority to be compared with."""
_BATCHES = 64
"""So many times the median of the workers' batches is too many sequences for a step."""
_RATE = 2.0
"""So many times the median speed of the members is as fast as one may begin rounds in async mode."""
_UNHEARD = 3600.0
"""Seconds that are waited before half of the members have sent."""
LARGEST = 100.0
"""So many times the norm of the weights is more than any change may be."""


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
        self._is_async, self.registry = settings.mode == "async", registry or Registry()
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
        self._sizes: Sizes = ()
        """Of the weights that the closing round started from."""
        self._norms: dict[tuple[str, int], tuple[float, int]] = {}
        """(worker, fragment) -> norm of the newest change that the worker has offered, and the steps it is of."""
        self._shares: dict[str, float] = {}
        """Worker -> weight, before it was lowered, of the newest change that it has offered."""
        self._needed = 0.0
        """Seconds after which half of the members had sent, in the newest round of sync mode in which they have."""
        self.opened = now
        for worker in self.registry.workers.values():
            worker.heard, worker.offered = now, min(worker.offered, now)
        for line in ledger:
            self.append(line, now)
        for member in self.members:  # whoever it is where workers.json was lost
            worker = self.registry.workers.setdefault(member.worker, Worker(member.worker, "", member.batch, heard=now))
            if worker.stood is None:  # nor what versions before 0.3 did not know
                worker.stood, worker.offered = member.round, now

    @property
    def line(self) -> Line | None:
        """The ledger's last line; None before the first round."""
        return self.lines[-1] if self.lines else None

    @property
    def members(self) -> Sequence[Participant]:
        """Of the open round; none before the first."""
        return self.line.members if self.line else ()

    def member(self, name: str) -> Participant | None:
        """What this worker is to train, if it is a member of the open round."""
        return self.line.member(name) if self.line else None

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

    def register(self, name: str, secret: str, *, batch: int, model: str, now: float, **told: Any) -> tuple[int, str]:
        """A worker joins, or comes back: its new generation, and whether the server knows the round it stands on.
        ``told``: what else the message to ``/register`` may hold.

        Raises WireError: refused for another model, data, tokenizer, other settings or an unknown round; held where
        another process has the id.
        """
        registry = self.registry
        if model != self._model:
            self._refuse("the model differs: its parameters have other names or shapes; use the server's recipe")
        round, parent = told.get("round"), told.get("parent")
        for what in ("data", "tokenizer"):
            mine, theirs = getattr(registry, what), told.get(what)
            if mine is not None and theirs is not None and mine != theirs:
                self._refuse(f"{what}: has the fingerprint {theirs} here, {mine} at the others; use the same {what}")
        for key, value in (told.get("stated") or {}).items():
            if value != (here := getattr(self.settings, key, None)):
                self._refuse(f"{key}: is {value} at {name}, {here} at the server, which decides it; leave {key} out")
        if told.get("dylu") and not self._is_async:
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
                why = f"{name}: another worker has this id (process {before.pid} on {before.host}, heard of "
                why += f"{silent:.0f} s ago); choose another worker_id, or wait until it is silent for {needed:.0f} s"
                raise WireError(409, why, wire.HELD)
        standing = {member.worker: member.batch for member in self.members}
        if before is None and len(registry.workers) >= wire.MAX_MEMBERS:
            registry.workers = {at: each for at, each in registry.workers.items() if not each.is_gone or at in standing}
            if len(registry.workers) >= wire.MAX_MEMBERS:
                self._refuse(f"{wire.MAX_MEMBERS} workers have registered, which is the most; wait until one has left")
        generation = secrets.randbits(52)  # which nobody guesses, and JSON holds
        worker = Worker(
            name, secret, batch, generation=generation, heard=now,
            last_round=round if told.get("leaves") and stood == "known" else None,
            **{key: told[key] for key in ("host", "pid", "run", "dylu") if key in told},
        )  # fmt: skip
        if before is not None:
            worker.stood, worker.offered, worker.speed = before.stood, before.offered, before.speed
        elif standing:  # so that a new name is no faster than one that is known
            worker.offered = now
        there = {each.name: each for each in self.live()} | {name: worker}
        usual = _median(each.batch for each in there.values())
        for each in there.values() if self._is_bounded(len(there)) else ():
            if each.batch > _BATCHES * usual and standing.get(each.name) != each.batch:
                why = f"batch: {each.name} has {each.batch} sequences in a step, more than {_BATCHES} times the median "
                why += f"of the workers that have registered, {usual}; lower global_batch_size, or serve with "
                each.why, each.evicted = f"{why}diloco.max_share=null where all of them are trusted", True
        if worker.why:
            self._refuse(worker.why)
        registry.data = registry.data or told.get("data")
        registry.tokenizer = registry.tokenizer or told.get("tokenizer")
        registry.workers[name] = worker
        return generation, stood

    def _refuse(self, message: str) -> NoReturn:
        raise WireError(409, message, wire.REFUSED)

    def worker(self, generation: int, now: float) -> Worker:
        """The worker with this generation, which has been heard of now. Raises WireError for an older one."""
        for worker in self.registry.workers.values():
            if worker.generation == generation and worker.why:
                raise WireError(409, f"it has given this worker up: {worker.why}", wire.EVICTED)
            if worker.generation == generation and not worker.is_gone:
                worker.heard = now
                return worker
        why = "a newer one took over, the server has started again, or it gave the worker up"
        raise WireError(409, f"this registration is no longer valid: {why}; register anew", wire.FENCED)

    def offer(self, worker: Worker, after: int, now: float) -> dict[str, Any] | None:
        """What the worker is to train, as ``/next`` answers it, if that is of a round later than ``after``, and time
        for it; and what has become of its submission for that one.
        """
        member = self.member(worker.name)
        if member is None or member.round <= after or (self.closing is not None and not self._is_async):
            return None
        number = member.round
        if now < self.begins(worker):
            if self._usual_speed():
                worker.bounded = f"round {number}: {self.why_waiting(worker, now)}"
            return None
        if worker.stood != number:
            worker.stood, worker.offered = number, now
        return {
            "state": wire.OPEN, "round": number, "hash": self.lines[number].hash, "slot": member.slot,
            "steps": member.steps, "ranges": [list(each) for each in member.ranges],
            "weights": versions(self.lines, number, self.settings.num_fragments),
            "answer": self._decided(member.slot, after), "bounded": worker.bounded,
        }  # fmt: skip

    def begins(self, worker: Worker) -> float:
        """When the worker may begin its next round: in async mode no faster than by ``_RATE`` times the median speed
        of the members, one that joins them counted from its registration.
        """
        member, usual = self.member(worker.name), self._usual_speed()
        if member is None or member.round == worker.stood or usual is None:
            return -math.inf
        return worker.offered + (member.steps / (_RATE * usual) if usual else _UNHEARD)

    def _usual_speed(self) -> float | None:
        """The median speed of the members, 0 while half of them have sent nothing; None where it bounds nothing."""
        workers = [self.registry.workers.get(member.worker) for member in self.members]
        speeds = [worker.speed or 0.0 for worker in workers if worker and not worker.is_gone]
        return _median(speeds) if self._is_async and self._is_bounded(len(speeds)) else None

    def _is_bounded(self, many: int) -> bool:
        """Whether the influence of one of so many members is."""
        return self.settings.max_share is not None and many >= _FEW

    def why_waiting(self, worker: Worker | None = None, now: float = 0.0) -> str:
        """What a worker without a round waits for."""
        if worker and (left := self.begins(worker) - now) > 0:
            what = "is offered no rounds faster than by twice the median speed of the members, which is measured"
            return f"it {what} (diloco.max_share); its next one begins in {left:.0f} s, or once more have sent"
        if self.line is None:
            return f"{len(self.live())} of {self.settings.workers} workers have registered"
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
            self._refuse(f"round {round}: {worker.name} stands on {hash[:12]}, not {known[:12]} as here; begin anew")
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

    def arrived(self, submission: Submission, now: float) -> None:
        """A checked submission for the open round has come, and is on disk by now."""
        worker = self.registry.workers[submission.worker]
        member = self.lines[-1].member(worker.name)
        worker.speed = None if member is None else member.steps / max(now - worker.offered, 1e-3)
        self.submit(submission, now)

    def submit(self, submission: Submission, now: float) -> None:
        """What has come for the open round, perhaps before the server's start."""
        self.sent[submission.slot], self._arrived[submission.slot] = submission, now
        self._remember(submission)

    # -------------------------------------------------------------------------------------- how much a change may weigh

    def _weights(self, line: Line, counted: Sequence[Submission]) -> list[float]:
        """Of these changes in the mean: by targets, or equal; lowered, before they are divided by their sum, where a
        member would have more influence than ``max_share`` allows. All follows from the ledger and what was sent, so a
        server that was killed comes to the same.
        """
        limit, shares = self.settings.max_share, [self._share(sent) for sent in counted]
        capped, lowered = list(map(float, shares)), list(map(float, shares))
        if limit is not None and counted:
            large = [max(weights, 0.02 * math.sqrt(count)) for weights, count in self._sizes]  # weights may begin at 0
            # of who has sent nothing yet no more is expected than of the least, and than the weights
            theirs = {member.worker: self._shares.get(member.worker, min(shares)) for member in line.members}
            theirs |= {sent.worker: share for sent, share in zip(counted, shares, strict=True)}
            is_bounded = self._is_bounded(len(theirs))
            cap = limit * _median(theirs.values()) if is_bounded else math.inf

            @cache
            def most(fragment: int, steps: int) -> float:
                """How large a change of so many steps, times its weight, may be."""
                products, known = [], [self._norms.get((name, fragment), (large[fragment], 0))[0] for name in theirs]
                for name, share in theirs.items():
                    norm, own = self._norms.get((name, fragment), (min(known), steps))
                    ratio = steps / own  # many steps go one way, or wander
                    products.append(min(share, cap) * norm * (ratio if ratio > 1 else math.sqrt(ratio)))
                return limit * _median(products)

            for at, sent in enumerate(counted):
                capped[at] = lowered[at] = min(shares[at], cap)
                for fragment, norm in zip(self.fragments_of(sent.round, leaves=sent.leaves), sent.norms, strict=False):
                    bound = LARGEST * large[fragment] * capped[at]
                    if is_bounded:
                        bound = min(bound, most(fragment, self._steps_behind(sent, fragment)))
                    if capped[at] * norm > bound:
                        lowered[at] = min(lowered[at], bound / norm)
                if lowered[at] < 0.9 * shares[at]:
                    self.registry.workers[sent.worker].bounded = (
                        f"round {line.round}: its weight in the mean is lowered, to {lowered[at] / shares[at]:.2g} of "
                        f"what it was, so that its influence is at most diloco.max_share={limit:g} times the median "
                        "of the members'; raise that, or set null where all members are trusted"
                    )
        # the least as it was too: one alone is not made as heavy again as it was
        total = max(sum(lowered), min(shares if self._is_async else capped, default=0.0)) or 1.0
        return [float32(each / total) for each in lowered]

    def _share(self, sent: Submission) -> float:
        """The weight of a change before it is divided by the sum of all. That of a fragment is of all that was trained
        since its last exchange; in async mode each weighs the same, and what is compared is how fast one may come.
        """
        if self._is_async:
            worker, usual = self.registry.workers.get(sent.worker), self._usual_speed()
            speed = (worker and worker.speed) or 1.0
            return 0.0 if not sent.targets else min(speed, _RATE * usual) if usual else speed
        if self.settings.weighting == "equal":
            return 1
        recent = self.lines[max(1, sent.round + 2 - self.settings.num_fragments) : sent.round + 1]
        before = [old for line in recent if line.closed for old, _ in line.closed.submissions if old.slot == sent.slot]
        return sent.targets + sum(old.targets for old in before)

    def _remember(self, sent: Submission) -> None:
        """What the next ones are compared with, also if it does not count."""
        if sent.norms:
            self._shares[sent.worker] = self._share(sent)
        for fragment, norm in zip(self.fragments_of(sent.round, leaves=sent.leaves), sent.norms, strict=False):
            self._norms[sent.worker, fragment] = norm, self._steps_behind(sent, fragment)

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
        """Workers that have registered, are not given up and take part in ``round`` (None: the next)."""
        number = len(self.lines) if round is None else round
        there = [worker for worker in self.registry.workers.values() if not worker.is_gone]
        return [worker for worker in there if worker.last_round is None or number <= worker.last_round]

    def evict(self, now: float) -> list[Worker]:
        """Give up the workers that were not heard of for ``eviction`` seconds; returns them."""
        limit = self.settings.eviction
        found = [] if limit is None else [worker for worker in self.live() if now - worker.heard > limit]
        for worker in found:
            worker.evicted = True
        return found

    def waited_for(self) -> list[str]:
        """Members of the open round that have not sent and are not given up, by slot."""
        live = {worker.name for worker in self.live(len(self.lines) - 1)}
        return [each.worker for each in self.members if each.slot not in self.sent and each.worker in live]

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
            waits = self._usual_speed() == 0 and now - self.opened < _UNHEARD  # there is too little to compare it with
            is_due = bool(settled and not waits) or any(line.member(worker.name) is None for worker in self.live())
        else:
            settled = [sent for _, sent in sorted(self.sent.items())]
            counted = sorted(self._arrived[sent.slot] for sent in settled if not sent.rejected)
            quorum = math.inf if settings.quorum is None else settings.quorum
            enough = len(counted) >= quorum and now - counted[int(quorum) - 1] >= settings.grace
            limit, half = settings.round_timeout, max(1, (len(line.members) + 1) // 2)
            # of what came before the server's start nobody knows how long it took
            took = sorted(at - self.opened for slot in self.sent if (at := self._arrived[slot]) > self.opened)
            if limit == "auto" and len(took) < half:
                limit = max([self._needed, *took[:1]]) + _UNHEARD
            elif limit == "auto":
                self._needed = took[half - 1]
                limit = max(600.0, 10 * self._needed)
            overdue = limit is not None and now - self.opened >= limit
            nobody_left = not self.waited_for() and bool(counted or self.live())
            is_due = nobody_left or bool((counted and enough) or (settled and overdue))
        if is_due:
            self._sizes = sizes
            self.closing = self._closed(line, settled)
        return self.closing

    def without_largest(self) -> Closed:
        """How the closing round ends without the largest of its changes, since fp32 cannot hold what comes of them."""
        assert self.closing is not None
        largest = max((sent for sent, _ in self.closing.submissions), key=lambda sent: math.hypot(*sent.norms))
        why = f"its change, of the norm {math.hypot(*largest.norms):.3g}, makes weights that fp32 cannot hold"
        kept = [sent for sent, _ in self.closing.submissions if sent is not largest]
        settled = [*kept, *self.closing.offered, replace(largest, rejected=why)]
        self.closing = self._closed(self.lines[-1], sorted(settled, key=lambda sent: sent.slot))
        return self.closing

    def _closed(self, line: Line, settled: Sequence[Submission]) -> Closed:
        """The end of the open round with these submissions. Gives up a worker with too many rejections in a row."""
        struck = {sent.worker: sent.rejected for sent in settled if sent.rejected and self._is_last_straw(sent.worker)}
        for name, why in struck.items():
            why = f"it has rejected {wire.MAX_REJECTED} rounds of this worker in a row: {why}"
            self.registry.workers[name].evicted, self.registry.workers[name].why = True, why
        counted = [sent for sent in settled if not sent.rejected]
        live = {worker.name for worker in self.live(line.round)}
        silent = {member.worker for member in line.members} - {sent.worker for sent in self.sent.values()}
        left = {name for name in silent if self.registry.workers[name].left}
        given_up = {name for name in silent - left if self.registry.workers[name].evicted}
        return Closed(
            tuple(zip(counted, self._weights(line, counted), strict=True)),
            self.fragments_of(line.round, leaves=all(sent.leaves for sent in counted)) if counted else (),
            missing=() if self._is_async else tuple(sorted(silent & live)),
            rejected=tuple((sent.worker, sent.rejected) for sent in settled if sent.rejected),
            evicted=tuple(sorted(given_up | struck.keys())),
            left=tuple(sorted(left)),
            offered=tuple(sent for sent in settled if sent.rejected),
        )

    def _is_last_straw(self, name: str) -> bool:
        """Whether one more rejection is too many in a row for a worker."""
        rejected = []  # or counted, of all that it has sent
        for closed in (line.closed for line in self.lines if line.closed):
            rejected += [False for sent, _ in closed.submissions if sent.worker == name]
            rejected += [True for who, _ in closed.rejected if who == name]
        return rejected[1 - wire.MAX_REJECTED :] == [True] * (wire.MAX_REJECTED - 1)

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
        gone = [each for ranges in (*(sent.ranges for sent in counted.values()), *held.values()) for each in ranges]
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
        """Of a worker's next round; with DyLU its share of the fastest one's that has it too, by the speeds that the
        server has measured (arXiv:2401.09135).
        """
        steps = self.settings.sync_every // self.settings.num_fragments
        if not worker.dylu or not worker.speed:
            return steps
        fastest = max(each.speed or 0.0 for each in self.live() if each.dylu)
        fastest = min(fastest, _RATE * (self._usual_speed() or math.inf))
        return max(1, min(steps, int(steps * worker.speed / fastest)))

    def append(self, line: Line, now: float) -> None:
        """The line is in the ledger: its round is open."""
        self.lines.append(line)
        self.slots |= {member.worker: member.slot for member in line.members}
        if line.closed is not None:
            counted = [sent for sent, _ in line.closed.submissions]
            self.tokens += sum(sent.targets for sent in counted)
            for sent in (*counted, *line.closed.offered):
                self._remember(sent)
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


def _median(numbers: Iterable[float]) -> float:
    """Of two in the middle the larger."""
    found = sorted(numbers)
    return found[len(found) // 2]


def float32(number: float) -> float:
    """The nearest fp32 number."""
    return float(struct.unpack("f", struct.pack("f", number))[0])
