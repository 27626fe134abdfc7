"""How far members who lie take a model from where honest ones bring it: ``scripts/diloco_campaign --influence``.

    scripts/diloco_campaign --influence                    # all lies, in all modes, with the control
    scripts/diloco_campaign --influence --modes sync --lies nine batch
    scripts/diloco_campaign --influence --honest 12 --seeds 400  # nobody lies: nobody is rejected, nor loses weight

Members are in this process, by a clock of its own: real steps of AdamW on a small model, and the server's own
``Rounds`` and ``OuterStep``, with nothing between them. Five members, eight rounds of ten steps, outer momentum 0.5. A
lie is told by one of five, and by two of five with ``max_share=1``; the loss on held-out text after rounds 3, 5 and 8
is compared with that of five honest members, and must be within ``NEAR`` of it. With ``max_share=null``, the control,
it must not, in the modes where the lie is one (``harms``).
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import math
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from forgather_cli.config.load import load_config
from forgather_cli.config.schema import DilocoServerSettings, OuterSettings
from forgather_cli.diloco.ledger import Submission
from forgather_cli.diloco.outer_step import OuterStep
from forgather_cli.diloco.rounds import Rounds
from forgather_cli.diloco.samples import total
from forgather_cli.diloco.submissions import square_of
from forgather_cli.diloco.wire import MAX_BATCH, WireError
from forgather_cli.run_dir import RunDir
from forgather_cli.worker import build

Weights = dict[str, Tensor]
TEXT = Path(__file__).parents[2] / "docs"
NEAR = 0.35
"""Nats; and where all are honest 0.02 with and without a bound."""
ROUNDS, STEPS, SEQ_LEN, BATCH, RATE = 8, 10, 64, 4, 3e-3
MODES = ("sync", "fragments", "async", "dylu")
SPEEDS = {"async": (1.0, 0.9, 0.8, 1.1, 1.0), "dylu": (1.0, 0.5, 0.7, 0.9, 1.0)}
"""Steps per second of members a to e; 1 in the other modes."""
INSTANT = 1e4  # steps per second of a liar who does not train; 8 where nobody paces it


@dataclass
class Member:
    """One that trains, with optimizer moments of its own."""

    name: str
    weights: Weights
    speed: float
    rng: random.Random
    batch: int = BATCH
    moments: dict[str, Any] | None = None
    snapshot: Weights = field(default_factory=dict)
    """The weights as published, of which changes are made."""


class World:
    """One model and text for all runs: building them takes longer than a round."""

    def __init__(self, model: Sequence[str] = ()) -> None:
        words = ["model=nano", "precision=fp32", "data=synthetic", f"data.seq_len={SEQ_LEN}", "data.num_samples=8",
                 "callbacks=minimal", "device=cpu", "seed=1", *model]  # fmt: skip
        with tempfile.TemporaryDirectory() as root:
            config = load_config("default", [*words, f"output_dir={root}/run"]).config
            self.model = build(config, RunDir(Path(root) / "run"), {}).model
        self.initial = {name: values.detach().clone() for name, values in self.model.named_parameters()}
        text = b"".join(path.read_bytes() for path in sorted(TEXT.glob("*.md")))
        bytes_ = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        self._held_out, self._text = bytes_[: 48 * SEQ_LEN].view(-1, SEQ_LEN), bytes_[48 * SEQ_LEN :]

    def set(self, weights: Weights) -> None:
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def loss_of(self, tokens: Tensor) -> Tensor:
        return F.cross_entropy(self.model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def evaluate(self, weights: Weights) -> float:
        self.set(weights)
        with torch.no_grad():
            return float(self.loss_of(self._held_out))

    def train(self, member: Member, steps: int) -> None:
        self.set(member.weights)
        optimizer = torch.optim.AdamW(self.model.parameters(), RATE)
        if member.moments is not None:
            optimizer.load_state_dict(member.moments)
        for _ in range(steps):
            starts = [member.rng.randrange(len(self._text) - SEQ_LEN) for _ in range(min(member.batch, BATCH))]
            self.loss_of(torch.stack([self._text[start : start + SEQ_LEN] for start in starts])).backward()
            optimizer.step()
            optimizer.zero_grad()
        member.moments = optimizer.state_dict()
        member.weights = {name: values.detach().clone() for name, values in self.model.named_parameters()}


class _Parts:
    """In the place of ``Submissions``: changes in memory, a part each."""

    def __init__(self) -> None:
        self.changes: dict[str, Weights] = {}

    def open(self, parts: Sequence[str]) -> Any:
        change = self.changes[parts[0]]

        class Sent:
            def rows(self, name: str, start: int, stop: int) -> Tensor:
                values = change[name]
                return (values if values.ndim else values.view(1))[start:stop].clone()

        return Sent()


@dataclass
class Told:
    """What a liar sees when it must send: the change of a member that has trained, the published weights' last change,
    the norm of the others' last changes by fragment, and the tensors of the exchange by fragment.
    """

    honest: Weights
    last: Weights
    norm: dict[int, float]
    names: dict[int, list[str]]
    round: int
    """Of the liar's own, from 0 on."""
    most: float
    """``max_share``, or 9 without."""


Lie = Callable[[Told], Weights]


def scaled(told: Told, change: Weights, times: float, only: int | None = None) -> Weights:
    """A change of so many times the usual norm in each fragment (``only`` one of them, the others as they are)."""
    found = {}
    for fragment, names in told.names.items():
        norm = math.sqrt(sum(float(change[name].square().sum()) for name in names))
        factor = times * told.norm[fragment] / max(norm, 1e-30) if only in (None, fragment) else 1.0
        found |= {name: change[name] * factor for name in names}
    return found


def _turned(told: Told) -> Weights:
    return scaled(told, told.honest, -1.0)


def _nine(told: Told) -> Weights:
    return scaled(told, told.honest, -9.0)


def _fragments_in_turn(told: Told) -> Weights:
    """-9 times the usual norm in every other fragment, or in every other half of the tensors."""
    names = [name for each in told.names.values() for name in each]
    half = {name for at, name in enumerate(names) if (at + told.round) % 2}
    large = scaled(told, told.honest, -9.0)
    return {name: large[name] if name in half else told.honest[name] for name in names}


def _often(told: Told) -> Weights:
    """Without training: what the weights were last changed by, turned."""
    return scaled(told, told.last, -9.0)


def _cancels(told: Told) -> Weights:
    """Just as large as is allowed, against where all go."""
    return scaled(told, told.last, -told.most)


def _creeps(told: Told) -> Weights:
    return scaled(told, told.honest, -(1.5**told.round))


def _swings(told: Told) -> Weights:
    """Huge ones and tiny ones in turn, the first at once."""
    return scaled(told, told.honest, -1e4 if told.round % 2 == 0 else 1e-9)


def _one_tensor(told: Told) -> Weights:
    """All of it in the tensors that few values make sensitive: the scales of norms."""
    zero = {name: torch.zeros_like(values) for name, values in told.honest.items()}
    turned = {name: (told.honest[name] if values.ndim < 2 else zero[name]) for name, values in told.honest.items()}
    for names in told.names.values():
        if not any(bool(turned[name].any()) for name in names):
            turned |= {name: told.honest[name] for name in names}
    return scaled(told, turned, told.most)


def _noise(told: Told) -> Weights:
    """Always the same random direction, far too large."""
    generator = torch.Generator().manual_seed(5)
    random = {name: torch.randn(values.shape, generator=generator) for name, values in told.honest.items()}
    return scaled(told, random, 10 * told.most)


LIES: dict[str, tuple[Lie, dict[str, Any]]] = {
    # of the issue
    "batch": (_turned, {"batch": MAX_BATCH, "harms": ("sync", "fragments")}),
    "batch-nine": (_nine, {"batch": MAX_BATCH}),
    "often": (_often, {"instant": True}),
    "nine": (_nine, {}),
    "in-turn": (_fragments_in_turn, {}),
    "speed": (_turned, {"instant": True, "dylu": True, "harms": ()}),  # what a member states of its speed is not read
    "silent": (_turned, {"silent": True, "harms": ()}),  # what bounds it is round_timeout
    # of our own
    "cancels": (_cancels, {"instant": True}),
    "creeps": (_creeps, {}),
    "swings": (_swings, {"instant": True}),
    "one-tensor": (_one_tensor, {"instant": True}),
    "noise": (_noise, {"instant": True}),
}


@dataclass
class Run:
    """What came of a run: the loss by full rounds, and for each counted submission how much its weight was lowered."""

    losses: dict[int, float] = field(default_factory=dict)
    lowered: list[tuple[str, int, float]] = field(default_factory=list)
    """(worker, its how many-th, weight by its targets over the one it had)."""
    rejected: int = 0
    norms: list[list[Any]] = field(default_factory=list)
    """(worker, round, norms) as they came."""


class Simulation:
    """A run of five members, some of whom lie."""

    def __init__(
        self, world: World, mode: str, *, lie: str | None = None, liars: int = 0, max_share: float | None = 2.0,
        seed: int = 0, speeds: Sequence[float] | None = None, rounds: int = ROUNDS, members: int = 5,
    ) -> None:  # fmt: skip
        self.world, self.mode, self.is_async = world, mode, mode in ("async", "dylu")
        count = 2 if mode == "fragments" else 1
        self._exchanges, self._last, self._is_paced = rounds * count, rounds, max_share is not None
        self._per_round = count
        settings = DilocoServerSettings(
            workers=members, mode="async" if self.is_async else "sync", sync_every=STEPS, compression="fp32",
            outer=OuterSettings(lr=0.7, momentum=0.5), num_fragments=count, max_share=max_share, eviction=None,
        )  # fmt: skip
        self.rounds = Rounds(settings, initial="i", model="m")
        shapes = {name: tuple(values.shape) for name, values in world.initial.items()}
        self.outer, self.parts = OuterStep(settings, shapes), _Parts()
        self.master = {name: values.clone() for name, values in world.initial.items()}
        self.published = {name: values.clone() for name, values in self.master.items()}
        self.names = {each: self.outer.names([each]) for each in range(count)}
        self.lie, self.more = LIES[lie] if lie else (None, {})
        self.liars = set("abcde"[members - liars : members]) if lie else set()
        self.most = max_share or 9.0
        self.last = {name: values.clone() for name, values in world.initial.items()}
        self.result = Run()
        self._norm = {fragment: 1.0 for fragment in self.names}
        self._sent: dict[str, int] = {}
        given = speeds or SPEEDS.get(mode, (1.0,) * members)
        self.members = {
            name: Member(name, dict(self.published), speed, random.Random(100 * seed + at))
            for at, (name, speed) in enumerate(zip("abcde"[:members], given, strict=False))
        }
        self._arrivals = 0

    def _join(self) -> None:
        for name, member in self.members.items():
            batches = [member.batch]
            if name in self.liars and (wanted := self.more.get("batch")):
                batches = [wanted, 64 * BATCH]
            for batch in batches:
                try:
                    dylu = self.is_async and (
                        self.mode == "dylu" or (name in self.liars and self.more.get("dylu", False))
                    )
                    self.rounds.register(name, name, batch=batch, model="m", now=0.0, dylu=dylu)
                    member.batch = batch
                    break
                except WireError:
                    continue

    def _sizes(self) -> list[tuple[float, int]]:
        found = [[self.master[name] for name in names] for names in self.names.values()]
        return [(math.sqrt(sum(map(square_of, held))), sum(map(torch.numel, held))) for held in found]

    def _step(self, now: float) -> bool:
        """What the server does: close, compute, write, open."""
        rounds = self.rounds
        if not (rounds.can_open() or rounds.close(now, self._sizes())):
            return False
        if (closed := rounds.closing) is not None:
            before = {name: values.clone() for name, values in self.master.items()}
            self.outer.step(self.master, closed, self.parts, self._arrivals)
            self._arrivals += len(closed.submissions)
            names = self.outer.names(closed.fragments)
            for name in names:
                self.last[name] = before[name] - self.master[name]
                self.published[name] = self.master[name].clone()
            self.result.rejected += len(closed.rejected)
            shares = [rounds._share(sent) for sent, _ in closed.submissions]
            for (sent, weight), share in zip(closed.submissions, shares, strict=True):
                self._sent[sent.worker] = self._sent.get(sent.worker, 0) + 1
                full = share / (sum(shares) or 1)
                self.result.lowered.append((sent.worker, self._sent[sent.worker], weight / full if full else 1.0))
                if sent.worker not in self.liars:
                    for fragment, norm in zip(rounds.fragments_of(sent.round, leaves=False), sent.norms, strict=True):
                        self._norm[fragment] = norm
            self.parts.changes = {
                k: v
                for k, v in self.parts.changes.items()
                if k not in {p for s, _ in closed.submissions for p in s.parts}
            }
        rounds.append(rounds.opening("t"), now)
        return True

    def _fetch(self, member: Member, number: int) -> None:
        """Take what is published; of fragments those that were exchanged, or all at the start."""
        made = self.rounds.lines[number].closed
        names = self.outer.names(made.fragments) if made and member.snapshot else list(self.published)
        if self.is_async:
            names = list(self.published)
        for name in names:
            member.weights[name] = self.published[name]
            member.snapshot[name] = self.published[name]

    def _submit(self, member: Member, offer: dict[str, Any], now: float, trains: bool) -> None:
        fragments = self.rounds.fragments_of(offer["round"], leaves=False)
        names = [name for fragment in fragments for name in self.names[fragment]]
        honest = {name: member.snapshot[name] - member.weights[name] for name in names}
        change, targets = honest, total(offer["ranges"]) * (SEQ_LEN - 1)
        if member.name in self.liars:
            assert self.lie is not None
            turn = self._sent.get(member.name, 0)
            if not trains:  # what it would have trained is what the others have
                honest = {name: self.last[name] for name in names}
            last, of = {name: self.last[name] for name in names}, {f: self.names[f] for f in fragments}
            change = self.lie(Told(honest, last, self._norm, of, turn, self.most))
        norms = tuple(math.sqrt(sum(square_of(change[name]) for name in self.names[f])) for f in fragments)
        part = f"{member.name}{offer['round']}"
        self.parts.changes[part] = change
        slot, ranges = self.rounds.slots[member.name], tuple((a, b) for a, b in offer["ranges"])
        sent = Submission(slot, member.name, offer["round"], (part,), targets, ranges, norms=norms,
                          rejected="" if all(map(math.isfinite, norms)) else "it is not finite")  # fmt: skip
        self.result.norms.append([member.name, offer["round"], norms])
        self.rounds.arrived(sent, now)

    def run(self) -> Run:
        self._join()
        self._step(0.0)
        trains = {name: not (name in self.liars and self.more.get("instant")) for name in self.members}
        after = dict.fromkeys(self.members, -1)
        queue = [(0.0, name, "asks") for name in self.members]
        offers: dict[str, dict[str, Any]] = {}
        ends = {
            round: round * STEPS / 0.8 for round in (3, 5, 8) if round <= self._last
        }  # seconds, as long as c takes in async mode
        now = 0.0
        while queue:
            now, name, what = heapq.heappop(queue)
            if self.is_async:
                for round in [round for round, end in ends.items() if end + 1e-6 < now]:
                    self.result.losses[round] = self.world.evaluate(self.master)
                    del ends[round]
                if not ends:
                    break
            member = self.members[name]
            if what == "asks":
                worker = self.rounds.registry.workers[name]
                offer = self.rounds.offer(worker, after[name], now)
                if offer is None:
                    if self.is_async:
                        wait = (
                            max(min(self.rounds.begins(worker), now + 0.5) - now, 0.05)
                            if math.isfinite(self.rounds.begins(worker))
                            else 0.05
                        )
                        heapq.heappush(queue, (now + wait, name, "asks"))
                    continue
                offers[name] = offer
                self._fetch(member, offer["round"])
                if name in self.liars and self.more.get("silent"):
                    continue
                took = offer["steps"] / (member.speed if trains[name] else INSTANT if self._is_paced else 8.0)
                heapq.heappush(queue, (now + took, name, "sends"))
            else:
                offer = offers[name]
                if trains[name]:
                    self.world.train(member, offer["steps"])
                self._submit(member, offer, now, trains[name])
                after[name] = offer["round"]
                if self.is_async:
                    while self._step(now):
                        pass
                    heapq.heappush(queue, (now, name, "asks"))
                    continue
            if not self.is_async and not queue:
                silent = self.rounds.waited_for()
                if not self._step(now) and silent:
                    now += 4000.0
                    assert self._step(now), "a round that somebody does not send for has no end"
                number = self.rounds.lines[-1].round
                if number % self._per_round == 0:
                    full = number // self._per_round
                    if full in ends:
                        self.result.losses[full] = self.world.evaluate(self.master)
                if number >= self._exchanges:
                    break
                queue = [(now, each, "asks") for each in self.members]
        return self.result


def table(
    world: World, modes: Sequence[str], lies: Sequence[str], kinds: Sequence[str], say: Callable[[str], None]
) -> list[str]:
    """Run all; returns what went further than it may."""
    failed = []
    for mode in modes:
        honest = Simulation(world, mode).run().losses
        say(f"{mode:10} honest             " + "  ".join(f"{honest[r]:7.3f}" for r in (3, 5, 8)))
        for lie in lies:
            for kind in kinds:
                liars, share = {"one": (1, 2.0), "two": (2, 1.0), "control": (1, None)}[kind]
                began = time.monotonic()
                found = Simulation(world, mode, lie=lie, liars=liars, max_share=share).run().losses
                apart = [found.get(r, math.nan) - honest[r] for r in (3, 5, 8)]
                is_near = all(each < NEAR for each in apart)
                bad = is_near and mode in LIES[lie][1].get("harms", MODES) if kind == "control" else not is_near
                say(f"{mode:10} {lie:10} {kind:8}" + "  ".join(f"{each:+7.3f}" for each in apart)
                    + ("  FAILED" if bad else "") + f"  ({time.monotonic() - began:.0f} s)")  # fmt: skip
                if bad:
                    failed.append(f"{mode}, {lie}, {kind}")
    return failed


def honest(
    world: World, modes: Sequence[str], trials: int, seeds: int, say: Callable[[str], None], rounds: int = ROUNDS
) -> list[str]:
    """Members of one recipe, of speeds of their own in async mode: what they do not bear. Then ``seeds`` runs of
    ``Rounds`` alone, with the norms of a run that is drawn, in an order and at times that are.
    """
    failed = []
    for mode in modes:
        recorded: list[list[list[Any]]] = []
        apart, least = [], 1.0
        for seed in range(trials):
            rng = random.Random(seed)
            speeds = [rng.uniform(0.7, 1.3) if mode in SPEEDS else 1.0 for _ in range(5)]
            more: dict[str, Any] = {"seed": seed, "speeds": speeds, "rounds": rounds}
            one = Simulation(world, mode, **more).run()
            other = Simulation(world, mode, max_share=None, **more).run()
            recorded.append(one.norms)
            least = min([least, *(factor for _, number, factor in one.lowered if number > 2)])
            at = max(one.losses.keys() & other.losses.keys(), default=0)
            apart.append(abs(one.losses[at] - other.losses[at]) if at else math.nan)
            failed += [f"{mode}, seed {seed}: {one.rejected} rejected"] if one.rejected else []
        say(f"{mode:10} {trials} trials: at most {max(apart):.3f} nats from max_share=null, least weight {least:.3f}")
        failed += [f"{mode}: {max(apart):.3f} nats from max_share=null"] if not max(apart) <= 0.02 else []
        alone = min((_replayed(mode, recorded, seed) for seed in range(seeds)), default=1.0)
        say(f"{mode:10} {seeds} seeds of Rounds alone: least weight {alone:.3f}")
        failed += [f"{mode}: a weight of {min(least, alone):.3f}"] if min(least, alone) < 0.9 else []
    return failed


def _replayed(mode: str, recorded: list[list[list[Any]]], seed: int) -> float:
    """The least share of its weight that a member keeps after its second exchange, where norms come from other runs."""
    rng = random.Random(1000 + seed)
    norms: dict[str, Iterator[tuple[float, ...]]] = {}
    run = rng.choice(recorded)
    for name, source in zip("abcde", rng.sample("abcde", 5), strict=True):
        norms[name] = iter([each for who, _, each in run if who == source])
    is_async, count = mode in SPEEDS, 2 if mode == "fragments" else 1
    settings = DilocoServerSettings(workers=5, mode="async" if is_async else "sync", sync_every=STEPS,
                                    num_fragments=count, eviction=None)  # fmt: skip
    rounds, least, sent = Rounds(settings, initial="i", model="m"), 1.0, dict.fromkeys("abcde", 0)
    for name in "abcde":
        rounds.register(name, name, batch=BATCH, model="m", now=0.0)
    rounds.can_open()
    rounds.append(rounds.opening("t"), 0.0)
    now = 0.0
    for turn in itertools.count():
        for name in rng.sample("abcde", 5):
            now += rng.uniform(1.5, 2.5) if is_async else 0.0
            worker, member = rounds.registry.workers[name], rounds.lines[-1].member(name)
            own = next(norms[name], None)
            if own is None or member is None:
                return least
            worker.stood, worker.offered = member.round, now - 10.0 * rng.uniform(0.9, 1.1)
            part, slot = (f"{name}{turn}",), rounds.slots[name]
            rounds.arrived(Submission(slot, name, member.round, part, 100, member.ranges, norms=own), now)
            while (closed := rounds.close(now, [(20.0 / count, 142_000 // count)] * count)) is not None:
                shares = [rounds._share(each) for each, _ in closed.submissions]
                for (each, weight), share in zip(closed.submissions, shares, strict=True):
                    sent[each.worker] += 1
                    if sent[each.worker] > 2 * count:
                        least = min(least, weight * sum(shares) / share)
                rounds.append(rounds.opening("t"), now)
    return least


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--lies", nargs="+", choices=LIES, default=tuple(LIES))
    parser.add_argument("--kinds", nargs="+", choices=("one", "two", "control"), default=("one", "two", "control"))
    parser.add_argument("--honest", type=int, metavar="TRIALS", help="nobody lies: so many trials in each mode")
    parser.add_argument("--seeds", type=int, default=400, help="with --honest: runs of Rounds alone")
    arguments = parser.parse_args(words)
    torch.set_num_threads(1)
    say = partial(print, flush=True)
    if arguments.honest:
        failed = honest(World(), arguments.modes, arguments.honest, arguments.seeds, say)
    else:
        failed = table(World(), arguments.modes, arguments.lies, arguments.kinds, say)
    print("\n".join(["failed:", *failed]) if failed else "all within bounds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
