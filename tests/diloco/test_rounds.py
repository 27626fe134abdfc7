"""Registration, slots, samples, quorum, eviction and the ledger: pure logic, by the clock that the test is."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
from saving import full_disk

from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.diloco import wire
from forgather_cli.diloco.ledger import Line, Submission, drop_lines, hashes_of, read_ledger, write_line
from forgather_cli.diloco.registry import Registry
from forgather_cli.diloco.rounds import Rounds
from forgather_cli.diloco.samples import first, merge, subtract, take
from forgather_cli.diloco.wire import WireError
from forgather_cli.errors import SetupError

MODEL = "m"
SIZES = [(7.0, 100)] * 8
"""Of the weights, by fragment."""


def rounds(**settings: Any) -> Rounds:
    return Rounds(DilocoServerSettings(**{"sync_every": 2, **settings}), initial="i", model=MODEL)


def join(rounds: Rounds, name: str, now: float = 0.0, batch: int = 4, secret: str = "", **more: Any) -> int:
    return rounds.register(name, secret or name, batch=batch, model=MODEL, now=now, **more)[0]


def step(rounds: Rounds, now: float) -> Line | None:
    """What the server does when something has happened: close, compute, write, open."""
    if not (rounds.can_open() or rounds.close(now, SIZES)):
        return None
    line = rounds.opening("t")
    rounds.append(line, now)
    return line


def send(rounds: Rounds, name: str, now: float = 0.0, targets: int = 10, used: int = 99, **more: Any) -> None:
    member = rounds.line.member(name)
    told = (member.slot, name, member.round, (f"{name}{member.round}",), targets, merge(first(used, member.ranges)))
    rounds.submit(Submission(*told, **{"norms": (1.0,), **more}), now)


def given(line: Line | None) -> dict[str, Any]:
    return {member.worker: member.ranges for member in line.members}


def opened(names: str = "ba", **settings: Any) -> Rounds:
    """In the first round of these."""
    made = rounds(workers=len(names), **settings)
    for name in names:
        join(made, name)
    step(made, 0.0)
    return made


def test_slots_follow_the_names_and_joiners_come_behind() -> None:
    made = rounds()
    join(made, "z")
    assert step(made, 0.0) is None
    assert made.why_waiting() == "1 of 2 workers have registered"
    join(made, "b", batch=8)
    line = step(made, 0.0)
    assert [(member.slot, member.worker, member.batch) for member in line.members] == [(0, "b", 8), (1, "z", 4)]
    assert given(line) == {"b": ((0, 16),), "z": ((16, 24),)}
    join(made, "a")
    offered = made.offer(made.registry.workers["a"], -1, 0.0)
    assert offered is None, "it begins with the next round"
    send(made, "z"), send(made, "b")
    line = step(made, 1.0)
    assert [member.worker for member in line.members] == ["b", "z", "a"]
    assert line.cursor == 24 + 32


@pytest.mark.parametrize(
    ("pool", "count", "taken", "cursor", "left"),
    [
        ((), 4, ((10, 14),), 14, ()),
        (((2, 4),), 4, ((2, 4), (10, 12)), 12, ()),
        (((2, 9),), 4, ((2, 6),), 10, ((6, 9),)),
        (((1, 2), (4, 6), (8, 9)), 2, ((1, 2), (4, 5)), 10, ((5, 6), (8, 9))),
        (((8, 10),), 3, ((8, 11),), 11, ()),
    ],
)
def test_samples_come_from_the_pool_first(pool: Any, count: int, taken: Any, cursor: int, left: Any) -> None:
    assert take(count, 10, pool) == (taken, cursor, left)


def test_arithmetic_of_ranges() -> None:
    assert merge([(4, 6), (0, 2), (2, 3), (5, 9), (7, 7)]) == ((0, 3), (4, 9))
    assert subtract(((0, 10), (20, 30)), ((2, 4), (8, 22))) == ((0, 2), (4, 8), (22, 30))


@pytest.mark.parametrize(
    ("settings", "sent_at", "now", "ends"),
    [
        ({}, {"a": 1.0}, 99.0, False),
        ({}, {"a": 1.0, "b": 2.0}, 2.0, True),
        ({"quorum": 1}, {}, 99.0, False),
        ({"quorum": 1}, {"a": 1.0}, 1.0, True),
        ({"quorum": 1, "grace": 5.0}, {"a": 1.0}, 5.9, False),
        ({"quorum": 1, "grace": 5.0}, {"a": 1.0}, 6.0, True),
        ({"quorum": 1, "grace": 5.0}, {"a": 1.0, "b": 2.0}, 2.0, True),
        ({"round_timeout": 9.0}, {"a": 1.0}, 8.9, False),
        ({"round_timeout": 9.0}, {"a": 1.0}, 9.0, True),
        ({"round_timeout": 9.0}, {}, 99.0, False),
    ],
)
def test_when_a_round_ends(settings: Any, sent_at: dict[str, float], now: float, ends: bool) -> None:
    made = opened(eviction=None, **settings)
    for name, at in sent_at.items():
        send(made, name, at)
    line = step(made, now)
    assert (line is not None) == ends
    if line is not None:
        assert line.closed.missing == tuple(sorted({"a", "b"} - set(sent_at)))


def test_weights_are_by_targets_in_slot_order_whoever_comes_first() -> None:
    hashes = []
    for order in ("ab", "ba"):
        made = opened()
        for name in order:
            send(made, name, targets={"a": 1, "b": 2}[name])
        line = step(made, 0.0)
        assert [weight for _, weight in line.closed.submissions] == [0.3333333432674408, 0.6666666865348816]
        hashes.append(line.hash)
    assert hashes[0] == hashes[1]


def test_who_is_about_to_send_its_last_is_not_called_evicted() -> None:
    made = opened("abc", mode="async")
    made.registry.workers["b"].last_round = 0  # which it says before its parts have come
    made.registry.workers["a"].speed = made.registry.workers["b"].speed = 1.0
    send(made, "a"), send(made, "c")
    for _ in range(2):
        line = step(made, 1.0)
        assert (line.closed.evicted, line.closed.left) == ((), ())


def test_an_evicted_worker_is_fenced_and_its_samples_come_back() -> None:
    made = opened(eviction=10.0)
    generation = made.registry.workers["b"].generation
    send(made, "a", 1.0)
    made.worker(made.registry.workers["a"].generation, 8.0)
    assert made.evict(10.0) == []
    assert [worker.name for worker in made.evict(11.0)] == ["b"]
    line = step(made, 11.0)
    assert line.closed.evicted == ("b",)
    assert (given(line), line.cursor) == ({"a": ((8, 16),)}, 16)
    with pytest.raises(WireError, match="register anew") as caught:
        made.worker(generation, 12.0)
    assert caught.value.code == "fenced"
    join(made, "b", 12.0)
    assert made.answered(made.registry.workers["b"], 0, ["b0"]) == ("late", "round 0 has ended without it")
    for number, message in ((1, "b is no member"), (2, "is not open"), (-1, "is not open")):
        with pytest.raises(WireError, match=message):
            made.answered(made.registry.workers["b"], number, ["b1"])
    send(made, "a", 13.0)
    line = step(made, 13.0)
    assert [member.worker for member in line.members] == ["a", "b"], "in its slot of before"


def test_who_has_left_is_not_called_evicted_however_long_it_is_silent_nor_who_is_evicted_left() -> None:
    made = opened(eviction=10.0)
    made.registry.workers["b"].left = True
    made.worker(made.registry.workers["a"].generation, 15.0)
    assert made.evict(20.0) == []
    send(made, "a", 20.0)
    line = step(made, 20.0)
    assert (line.closed.evicted, line.closed.left) == ((), ("b",))
    join(made, "b", 20.0)
    send(made, "a", 21.0)
    step(made, 21.0)
    made.worker(made.registry.workers["a"].generation, 30.0)
    assert [worker.name for worker in made.evict(31.0)] == ["b"]
    send(made, "a", 31.0)
    line = step(made, 31.0)
    assert (line.closed.evicted, line.closed.left) == (("b",), ())


def test_where_all_are_gone_the_round_ends_empty_as_soon_as_somebody_comes() -> None:
    made = opened(eviction=10.0)
    made.evict(11.0)
    assert step(made, 11.0) is None
    join(made, "c", 12.0)
    line = step(made, 12.0)
    assert line.closed.submissions == ()
    assert ([member.slot for member in line.members], given(line)) == ([2], {"c": ((0, 8),)})


def test_rejected_and_short_submissions_give_their_samples_back() -> None:
    made = opened()
    send(made, "a", rejected="it is not finite")
    assert made.answered(made.registry.workers["a"], 0, ["a0"]) == ("rejected", "it is not finite")
    send(made, "b", used=6)
    line = step(made, 0.0)
    assert [sent.worker for sent, _ in line.closed.submissions] == ["b"]
    assert line.closed.rejected == (("a", "it is not finite"),)
    assert given(line) == {"a": ((0, 8),), "b": ((14, 16), (16, 22))}, "what is left comes first"
    join(made, "a", batch=2)
    send(made, "a", used=0), send(made, "b")
    line = step(made, 0.0)
    assert (given(line), line.cursor) == ({"a": ((0, 8),), "b": ((22, 30),)}, 30), "though it is more than it takes"


Round = dict[str, float | tuple[float, ...] | None]
"""What members send for a round: the norms of their changes. None: it is not finite."""


def play(made: Rounds, sent: Round, *, targets: dict[str, int] | None = None, **more: Any) -> dict[str, float]:
    """A round in sync mode; how much each change weighs beside the first."""
    for name, norms in sent.items():
        send(made, name, norms=norms if isinstance(norms, tuple) else () if norms is None else (norms,),
             rejected="void" if norms is None else "", targets=(targets or {}).get(name, 10), **more)  # fmt: skip
    closed = step(made, 0.0).closed
    assert all(why == "void" for _, why in closed.rejected), "no size is a reason to reject"
    return {sent.worker: round(weight / closed.submissions[0][1], 3) for sent, weight in closed.submissions}


def restored(made: Rounds, path: Path) -> Rounds:
    """As a server comes back that was killed in an open round: from the ledger and what was sent."""
    path.unlink(missing_ok=True)
    for line in made.lines:
        write_line(path, line)
    (workers := path.with_name("workers.json")).write_bytes(made.registry.to_line())
    registry = Registry.read(workers)
    for name, worker in registry.workers.items():
        worker.generation = made.registry.workers[name].generation
    again = Rounds(made.settings, initial="i", model=MODEL, ledger=read_ledger(path), registry=registry)
    for sent in made.sent.values():
        again.submit(sent, 0.0)
    return again


EVEN = {"a": 1.0, "b": 1.0, "c": 1.0}


@pytest.mark.parametrize(
    ("history", "targets", "weighs"),
    [
        ([EVEN | {"c": 2.0}], {}, [1, 1, 1]),
        ([EVEN | {"c": 4.0}], {}, [1, 1, 0.5]),  # in the first round: twice the median norm is 2
        ([EVEN | {"b": 1e-9, "c": 4.0}], {}, [1, 1, 0.5]),
        ([EVEN, {"a": 50.0, "b": 20.0, "c": 20.0}], {}, [1, 1.25, 1.25]),  # a common rise bounds who is beyond it
        ([EVEN], {"c": 30}, [1, 1, 2]),  # twice the median weight
        ([EVEN], {"c": 10**9}, [1, 1, 2]),
        ([EVEN | {"c": 9.0}], {"c": 10**9}, [1, 1, 0.222]),  # weight times norm is 2 still, not 4
        ([EVEN | {"c": 0.1}], {"c": 10**9}, [1, 1, 2]),
        ([{"a": 1.0, "b": 1e30}], {"b": 10}, [1, 0]),  # of two there is no median, but 100 times the weights' norm
        ([{"a": 1.0, "b": 1400.0}], {"b": 10}, [1, 0.5]),
        ([{"a": 1.0, "b": 1.0}], {"b": 10**6}, [1, 1e5]),
        ([EVEN | {"d": 1e30, "e": 1e30}], {}, [1, 1, 1, 0, 0]),
        ([{"a": 1400.0}], {}, [1]),  # alone, beside nothing
        ([EVEN, EVEN | {"c": None}], {}, [1, 1]),
        ([EVEN, {"a": 1.0, "b": 9.0, "c": None}], {}, [1, 0.222]),  # the newest of c is finite
    ],
)
def test_weight_times_norm_is_bounded_by_the_median_of_the_members(
    history: list[Round], targets: dict[str, int], weighs: list[float], tmp_path: Path
) -> None:
    """By weights of norm 7. A server that is killed in the last round decides the same, whoever comes first."""
    for order in (1, -1):
        made = opened("".join(history[0]))
        for sent in history[:-1]:
            play(made, sent, targets=targets)
        last = dict(list(history[-1].items())[::order])
        again = restored(made, tmp_path / "rounds.jsonl")
        assert list(play(made, last, targets=targets).values()) == pytest.approx(weighs, rel=1e-6)
        assert list(play(again, last, targets=targets).values()) == pytest.approx(weighs, rel=1e-6)
        assert made.line == again.line
    trusted = opened("".join(history[0]), max_share=None)
    plain = {name: round(targets.get(name, 10) / targets.get("a", 10), 3) for name in history[0]}
    weighs = play(trusted, {name: 10.0 ** (9 * at) for at, name in enumerate(history[0])}, targets=targets)
    assert weighs == pytest.approx(plain, rel=1e-6), "null bounds nothing"


def test_one_that_has_sent_alone_is_not_made_heavy_by_it() -> None:
    made = opened("abcde", quorum=1)
    play(made, dict.fromkeys("abcde", 1.0))
    send(made, "e", norms=(9.0,))
    ((_, weight),) = step(made, 0.0).closed.submissions
    assert weight == pytest.approx(2 / 9)
    send(made, "a", targets=3)
    ((_, weight),) = step(made, 0.0).closed.submissions
    assert weight == 1.0
    first = opened("abcde", quorum=1)  # nobody knows how large a change is: it is taken for as large as the weights
    send(first, "e", norms=(140.0,))
    ((_, weight),) = step(first, 0.0).closed.submissions
    assert weight == pytest.approx(2 * 7 / 140)


def test_fragments_have_bounds_of_their_own_and_count_by_steps_since_their_last_exchange() -> None:
    """Of three fragments with norms of 100, 1 and 1; who joins late has trained a third as long."""
    made = opened("abc", sync_every=6, num_fragments=3)
    norms = {0: 100.0, 1: 1.0, 2: 1.0}
    for number in range(9):  # all rise together, and fall again
        sent = {name: norms[number % 3] * (20 if number // 3 == 1 else 1) for name in "abc"}
        assert play(made, sent) == dict.fromkeys("abc", 1)
    join(made, "d")
    assert play(made, {"a": 100.0, "b": 100.0, "c": 400.0}) == {"a": 1, "b": 1, "c": 0.5}
    # d has a third of the steps and of the targets: of the others' norms it may have sqrt(1/3), times three by weight
    assert play(made, {"a": 1.0, "b": 1.0, "c": 0.3, "d": 3.4})["d"] == 0.333
    lowered = play(made, {"a": 1.0, "b": 1.0, "c": 0.6, "d": 9.8})
    assert lowered["d"] == pytest.approx(2 / 3 * 2 * math.sqrt(2 / 3) * 1.5 / 9.8, abs=2e-3)
    whole = (100.0, 1.0, 1.0)
    weighs = play(made, {"a": whole, "b": whole, "c": (100.0, 1.0, 8.0), "d": whole}, leaves=True)
    assert weighs == {"a": 1, "b": 1, "c": 0.25, "d": 1}, "the smallest factor counts"


def test_norms_of_others_are_brought_to_the_steps_of_a_change(tmp_path: Path) -> None:
    """In async mode with dylu: one of more steps than theirs may be as much longer, one of fewer by the square root."""
    made = rounds(mode="async", workers=3, sync_every=8)
    for name in "abc":
        join(made, name, dylu=True)
    step(made, 0.0)

    def weight(name: str, norm: float, speed: float) -> float:
        made.registry.workers[name].speed = speed
        send(made, name, norms=(norm,))
        again = restored(made, tmp_path / "rounds.jsonl")
        line, same = step(made, 0.0), step(again, 0.0)
        assert line.closed == same.closed
        ((_, weight),) = line.closed.submissions
        return weight

    for name in "abc":
        made.registry.workers[name].speed = 1.0
        send(made, name)
    assert [step(made, 0.0).closed.submissions[0][1] for _ in range(3)] == [1.0] * 3
    assert weight("a", 1.0, 0.25) == 1.0  # its next round has two steps
    assert made.line.member("a").steps == 2
    assert weight("a", 8.0, 0.25) == pytest.approx(0.5), "times its speed twice b's and c's 1.0 x sqrt(2 / 8)"
    assert weight("b", 1.0, 0.25) == 1.0
    assert made.line.member("b").steps == 4, "of the fastest, which counts for twice the median"
    assert weight("b", 1.0, 1.0) == 1.0
    # of eight steps: a's is 0.25 x 8.0 x 8 / 2 (linear), b's 1.0 x 8 / 4
    assert weight("c", 16.0, 1.0) == 1.0
    assert weight("c", 32.0, 1.0) == pytest.approx(0.5)


def test_whom_it_bounds_is_said() -> None:
    made = opened("abc")
    play(made, EVEN | {"c": 2.2})
    assert not made.registry.workers["c"].bounded, "a tenth is nothing"
    play(made, EVEN | {"c": 4.0})
    assert "diloco.max_share=2" in made.registry.workers["c"].bounded
    assert "0.5" in made.offer(made.registry.workers["c"], 1, 0.0)["bounded"]
    assert made.offer(made.registry.workers["a"], 1, 0.0)["bounded"] == ""


def test_in_async_mode_nobody_begins_rounds_much_faster_than_the_median(tmp_path: Path) -> None:
    """Nothing is rejected for it, and a server that starts again knows when rounds began."""
    made = opened("abc", mode="async", sync_every=10)

    def sends(name: str, now: float) -> None:
        worker = made.registry.workers[name]
        assert made.offer(worker, -1, worker.offered)["round"] == made.line.member(name).round, "it is under way"
        member = made.line.member(name)
        told = (member.slot, name, member.round, (f"{name}{member.round}",), 10, member.ranges)
        made.arrived(Submission(*told, norms=(1.0,)), now)
        while step(made, now):
            pass

    def next_at(name: str, now: float) -> bool:
        return made.offer(made.registry.workers[name], made.registry.workers[name].stood, now) is not None

    for name in "abc":
        assert made.offer(made.registry.workers[name], -1, 100.0)
    sends("c", 100.5)
    assert not next_at("c", 104.0), "before half of them have sent nobody knows"
    assert len(made.lines) == 1, "nor how large a change is"
    sends("a", 110.0)
    assert made.registry.workers["a"].speed == 1.0
    assert next_at("c", 110.0)
    assert made.registry.workers["c"].offered == 110.0
    sends("b", 110.0)
    assert next_at("a", 110.0)
    sends("c", 110.1)
    assert not next_at("c", 114.9)
    assert "max_share" in made.why_waiting(made.registry.workers["c"], 114.9)
    path = tmp_path / "workers.json"
    path.write_bytes(made.registry.to_line() + made.registry.to_line(made.registry.workers["a"]) + b'{"da')
    kept = Registry.read(path)
    assert {name: (each.stood, each.offered, each.speed) for name, each in kept.workers.items()} == {
        name: (each.stood, each.offered, each.speed) for name, each in made.registry.workers.items()}  # fmt: skip
    made = Rounds(made.settings, initial="i", model=MODEL, ledger=made.lines, registry=kept, now=114.0)
    join(made, "c", 114.9)
    assert not next_at("c", 114.9)
    assert next_at("c", 115.0)
    alone = opened("abc", mode="async")
    send(alone, "c", norms=(140.0,))
    assert step(alone, 3599.0) is None
    assert step(alone, 3600.0).closed.submissions[0][1] == pytest.approx(2 * 7 / 140)
    for settings, names in (({"max_share": None}, "abc"), ({}, "ab")):
        made = opened(names, mode="async", sync_every=10, **settings)
        assert made.offer(made.registry.workers["a"], -1, 0.0)
        sends("a", 0.1)
        assert next_at("a", 0.1)


def test_in_async_mode_a_new_name_is_no_faster_than_a_known_one() -> None:
    made = opened("abcd", mode="async", sync_every=10)
    for name, speed in zip("abcd", (1.0, 1.0, 2.0, 1.0), strict=True):
        made.registry.workers[name].speed = speed
    sent, now = 0, 1000.0
    for number in range(400):  # a liar registers anew for each round, and sends at once
        now += 0.1
        name = f"liar{sent}"
        if name not in made.registry.workers:
            join(made, name, now)
            step(made, now)
        if made.offer(made.registry.workers[name], -1, now) is not None:
            member = made.line.member(name)
            told = (member.slot, name, member.round, (f"{name}{number}",), 10, member.ranges)
            made.arrived(Submission(*told, norms=(1.0,)), now)
            made.registry.workers[name].left = True
            sent += 1
    assert 7 <= sent <= 8, "in 40 s, at twice a speed of one step per second, as a known one"


@pytest.mark.parametrize("settings", [{}, {"max_share": None}])
def test_an_async_server_goes_on_without_workers_json_or_with_one_that_lacks_members(settings: dict[str, Any]) -> None:
    made = opened("abcd", mode="async", **settings)
    for name in "abc":
        made.offer(made.registry.workers[name], -1, 1.0)
        member = made.line.member(name)
        told = (member.slot, name, member.round, (f"{name}{member.round}",), 10, member.ranges)
        made.arrived(Submission(*told, norms=(1.0,)), 2.0)
        while step(made, 2.0):
            pass
    for kept in ("", "a", "bd"):
        registry = Registry(workers={name: made.registry.workers[name] for name in kept})
        again = Rounds(made.settings, initial="i", model=MODEL, ledger=made.lines, registry=registry, now=3.0)
        assert sorted(again.registry.workers) == list("abcd")
        begun = {name: (each.stood, each.offered) for name, each in again.registry.workers.items() if name not in kept}
        assert begun == {name: (made.line.member(name).round, 3.0) for name in set("abcd") - set(kept)}
        for name in "abcd":
            join(again, name, 3.0)
        for name in "dab":  # the first ones wait, where nobody knows how fast the others are
            member = again.line.member(name)
            told = (member.slot, name, member.round, (f"{name}{member.round}",), 10, member.ranges)
            again.arrived(Submission(*told, norms=(1.0,)), 4.0)
        for name in "dab":
            ((sent, weight),) = step(again, 4.0).closed.submissions
            assert (sent.worker, weight) == (name, 1.0)


def test_a_batch_far_above_the_others_is_refused() -> None:
    made = rounds(workers=3)
    join(made, "z", batch=2**20)
    join(made, "a")
    assert made.registry.workers["z"].evicted is False, "of two nobody knows"
    join(made, "b", batch=4 * 64)
    with pytest.raises(WireError, match=r"batch: y has 16385 .* 64 times .* 256; .*max_share=null") as caught:
        join(made, "y", batch=64 * 256 + 1)
    assert caught.value.code == "refused"
    assert made.registry.workers["z"].evicted, "who came before there were three is seen then"
    with pytest.raises(WireError, match="batch: z") as caught:
        made.worker(made.registry.workers["z"].generation, 0.0)
    made = rounds(workers=3)
    join(made, "a", batch=8), join(made, "b", batch=8 * 64), join(made, "c", batch=8)
    step(made, 0.0)
    join(made, "a"), join(made, "c")
    join(made, "b", batch=8 * 64)  # it is a member, and may come back
    with pytest.raises(WireError, match="batch: b"):
        join(made, "b", batch=8 * 64 + 1)
    assert not made.registry.workers["b"].evicted, "the one of before goes on"
    trusted = rounds(max_share=None)
    join(trusted, "a"), join(trusted, "b"), join(trusted, "c", batch=2**20)


def test_there_are_so_many_workers_at_most_and_those_who_have_left_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_MEMBERS", 3)
    made = opened("abc")
    with pytest.raises(WireError, match="3 workers have registered, which is the most") as caught:
        join(made, "d")
    assert caught.value.code == "refused"
    join(made, "a")
    made.registry.workers["b"].left = True
    with pytest.raises(WireError, match="the most"):
        join(made, "d")  # b is a member of the open round
    send(made, "a"), send(made, "c")
    step(made, 0.0)
    join(made, "d")
    assert sorted(made.registry.workers) == ["a", "c", "d"]


@pytest.mark.parametrize(
    ("needed", "sent", "ends"),
    [
        ((), 0, math.inf),  # with nothing sent it would be for nothing
        ((30.0,), 1, 3630.0),
        ((30.0, 50.0), 2, 3630.0),
        ((5000.0,), 1, 8600.0),  # rounds of more than an hour
        ((5000.0, 6000.0), 2, 8600.0),
        ((5000.0, 6000.0, 7000.0), 3, 70000.0),
        ((30.0, 50.0, 40.0), 3, 600.0),
        ((30.0, 90.0, 80.0), 3, 900.0),
        ((30.0, 90.0, 80.0, 500.0), 4, 900.0),
        ((0.0, 0.0, 0.0), 3, 3600.0),  # sent before the server's start
    ],
)
def test_a_round_ends_without_who_sends_nothing(needed: tuple[float, ...], sent: int, ends: float) -> None:
    made = opened("abcde", eviction=None)
    for name, at in zip("abcde", needed, strict=False):
        send(made, name, at)
    assert step(made, min(ends, 1e6) - 0.1) is None
    if ends < math.inf:
        line = step(made, ends)
        assert (len(line.closed.submissions), line.closed.missing) == (sent, tuple("abcde"[sent:]))
        assert [member.worker for member in line.members] == list("abcde")
    forever = opened("ab", eviction=None, round_timeout=None)
    send(forever, "a", 1.0)
    assert step(forever, 1e9) is None


def test_one_who_sends_at_once_ends_no_round_that_takes_the_others_more_than_an_hour() -> None:
    """Once it is known what half of them need."""
    made = opened("abcde", eviction=None)
    for name in "abcde":
        send(made, name, 5000.0)
        step(made, 5000.0)
    assert made.line.round == 1
    send(made, "a", 5001.0)
    assert step(made, 5000.0 + 5000.0 + 3599.9) is None
    assert step(made, 5000.0 + 5000.0 + 3600.0).closed.missing == tuple("bcde")
    send(made, "a", 13_601.0)
    assert step(made, 13_600.0 + 5000.0 + 3599.9) is None, "a round that ends without them is no measure"


def test_a_quorum_is_of_those_that_count(tmp_path: Path) -> None:
    made = opened("abcd", quorum=2, grace=5.0)
    play(made, dict.fromkeys("abcd", 1.0))
    send(made, "a", 1.0), send(made, "b", 2.0, norms=(), rejected="void")
    assert step(made, 50.0) is None
    send(made, "c", 50.0)
    assert step(made, 54.9) is None
    line = step(made, 55.0)
    assert ([sent.worker for sent, _ in line.closed.submissions], line.closed.missing) == (["a", "c"], ("d",))
    assert [(sent.worker, sent.rejected) for sent in line.closed.offered] == [("b", "void")]


def test_ledgers_of_before_are_read_and_hashed_as_they_were(tmp_path: Path) -> None:
    """Without norms, or with one of all fragments; and nothing is known of those that were rejected."""
    made, path = opened(), tmp_path / "rounds.jsonl"
    play(made, {"a": 1.0, "b": None})
    newest = made.lines[-1].to_json()
    for norm in ("", ',"norm":1.0'):
        text = newest.replace(',"norms":[1.0]', norm)
        text = text[: text.index(',"left"')] + "}" + text[text.index(',"members"') :]
        path.write_text(f"{made.lines[0].to_json()}\n{text}\n")
        assert ("left" in text, "offered" in text, "norms" in text) == (False, False, False)
        lines = read_ledger(path)
        assert [line.hash for line in lines] == [line.hash for line in made.lines]
        again = Rounds(made.settings, initial="i", model=MODEL, ledger=lines, registry=made.registry)
        assert again.answered(again.registry.workers["b"], 0, ["b0"]) == ("late", "round 0 has ended without it")
        assert play(again, {"a": 1.0, "b": 1.0}) == {"a": 1, "b": 1}


def test_three_rejections_in_a_row_give_a_worker_up_though_silence_never_does(tmp_path: Path) -> None:
    """Also where the server is killed in between; and not if one counts, or it was away."""
    made = opened(eviction=None)
    for rejected in (True, True, False, True, None, True, True):
        send(made, "b")
        if rejected is None:
            made.registry.workers["a"].left = True  # and back for the next round
        else:
            send(made, "a", rejected="void" if rejected else "")
        assert not made.registry.workers["a"].evicted
        assert made.close(0.0, SIZES)
        if rejected is None:
            join(made, "a")
        made.append(made.opening("t"), 0.0)
        made = restored(made, tmp_path / "rounds.jsonl")
    assert made.registry.workers["a"].evicted
    assert (made.line.closed.rejected, made.line.closed.evicted) == ((("a", "void"),), ("a",))
    assert [member.worker for member in made.line.members] == ["b"]
    send(made, "b")
    assert step(made, 0.0) is not None, "nobody waits for it"


def test_the_largest_change_goes_where_the_sum_cannot_be_held() -> None:
    made = opened(quorum=1)
    send(made, "a", norms=(3.0,)), send(made, "b", norms=(29.0,))
    closed = made.close(0.0, SIZES)
    assert made.offer(made.registry.workers["a"], -1, 0.0) is None, "the round has ended"
    assert made.why_waiting() == "round 0 is being computed"
    closed = made.without_largest()
    ((who, why),) = closed.rejected
    assert (who, "fp32" in why) == ("b", True)
    assert made.closing is closed
    assert [(sent.worker, weight) for sent, weight in closed.submissions] == [("a", 1.0)]
    assert made.answered(made.registry.workers["b"], 0, ["b0"]) == ("pending", ""), "until the ledger has it"
    closed = made.without_largest()
    assert ([who for who, _ in closed.rejected], closed.submissions, closed.fragments) == (["a", "b"], (), ())
    made.append(made.opening("t"), 0.0)
    assert made.answered(made.registry.workers["b"], 0, ["b0"]) == ("rejected", why)


def test_a_submission_has_one_answer_however_often_it_comes() -> None:
    """It is held until the ledger has the round's end, and said with the next round, to who was given up too."""
    made = opened("abc")
    a, c = made.registry.workers["a"], made.registry.workers["c"]
    assert made.answered(a, 0, ["a0"]) is None
    for number in range(3):
        send(made, "a"), send(made, "b")
        for _ in range(2):
            assert made.answered(a, number, [f"a{number}"]) == ("pending", "")
            assert made.answered(a, number, ["other"])[0] == "late"
            assert made.offer(a, number, 0.0) is None
            if made.sent.get(2) is None:
                send(made, "c", norms=(), rejected="void")
                assert made.answered(c, number, [f"c{number}"]) == ("rejected", "void")
                assert made.close(0.0, SIZES)
        made.append(made.opening("t"), 0.0)
        assert made.answered(a, number, [f"a{number}"]) == ("counted", "")
        assert made.answered(a, number, ["other"]) == ("late", f"round {number} has ended without it")
        status, why = made.answered(c, number, [f"c{number}"])
        assert (status, why) == ("rejected", "void")
        assert made.offer(a, number, 0.0)["answer"] == ("counted", "")
        if number < 2:
            assert made.offer(c, number, 0.0)["answer"] == ("rejected", why)
    with pytest.raises(WireError, match="rejected 3 rounds of this worker in a row: void") as caught:
        made.worker(c.generation, 0.0)
    assert caught.value.code == "evicted"
    assert made.answered(a, 0, ["a0"]) == ("counted", "")
    with pytest.raises(WireError, match="round 4: is not open"):
        made.answered(a, 4, ["a0"])


def test_a_submission_names_only_samples_that_it_was_given() -> None:
    made = opened()
    worker, hash = made.registry.workers["b"], made.lines[0].hash
    assert made.check_ranges(worker, 0, hash, [(8, 10), (10, 16)]) == ((8, 16),)
    for wrong in ([(0, 8)], [(8, 17)], [(8, 12), (10, 16)]):
        with pytest.raises(WireError, match="was given"):
            made.check_ranges(worker, 0, hash, wrong)
    with pytest.raises(WireError, match="begin anew"):
        made.check_ranges(worker, 0, "0" * 64, [(8, 16)])


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        ({"model": "other"}, "refused", "the model differs"),
        ({"data": "d2"}, "refused", "data: has the fingerprint d2 here, d at the others"),
        ({"tokenizer": "t2"}, "refused", "tokenizer: has"),
        ({"stated": {"sync_every": 3}}, "refused", "sync_every: is 3 at c, 2 at the server"),
        ({"round": 0, "parent": "f" * 64}, "refused", r"stands on round 0 \(ffffffffffff\)"),
        ({"name": "a", "secret": "thief"}, "held", r"a: another worker has this id \(process 0 on , heard of 1 s ago"),
        ({"name": "a", "secret": "thief", "now": 120.0}, "held", "until it is silent for 120 s"),
    ],
)
def test_who_may_not_register(more: dict[str, Any], code: str, message: str) -> None:
    made = rounds()
    join(made, "a", data="d", tokenizer="t")
    given: dict[str, Any] = {"name": "c", "secret": "c", "batch": 1, "model": MODEL, "now": 1.0, **more}
    with pytest.raises(WireError, match=message) as caught:
        made.register(given.pop("name"), given.pop("secret"), **given)
    assert (caught.value.status, caught.value.code) == (409, code)


def test_a_restarted_worker_takes_over_and_a_silent_id_can_be_taken(tmp_path: Path) -> None:
    made = rounds()
    first = join(made, "a")
    second = join(made, "a", 1.0)
    with pytest.raises(WireError, match="register anew"):
        made.worker(first, 1.0)
    assert made.worker(second, 1.0).name == "a"
    join(made, "a", 122.0, secret="another")
    third = made.registry.workers["a"].generation
    assert third not in (first, second, None)
    (path := tmp_path / "workers.json").write_bytes(made.registry.to_line())
    again = Registry.read(path)
    assert again.to_line() == made.registry.to_line()
    assert again.workers["a"].generation is None, "whoever goes on after a restart says where it stands"


def test_max_rounds_and_max_tokens_end_training() -> None:
    for limit in ({"max_rounds": 1}, {"max_tokens": 20}):
        made = opened(**limit)
        assert made.finished is None
        send(made, "a"), send(made, "b")
        assert step(made, 0.0) is not None
        assert str(made.finished).startswith(f"diloco.{next(iter(limit))}=")
        send(made, "a"), send(made, "b")
        assert step(made, 0.0) is None


def test_the_ledger_is_the_state_and_a_torn_line_is_cut(tmp_path: Path) -> None:
    path, made = tmp_path / "rounds.jsonl", opened()
    send(made, "a"), send(made, "b", rejected="why")
    step(made, 0.0)
    for line in made.lines:
        write_line(path, line)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"round":2,"hash"')
    assert read_ledger(path) == made.lines
    assert path.read_bytes() == whole
    again = Rounds(made.settings, initial="i", model=MODEL, ledger=read_ledger(path), registry=made.registry)
    assert (again.line, again.slots, again.tokens) == (made.line, made.slots, made.tokens)
    assert whole.count(b'"why"') == 1
    for wrong, message in (
        (whole.replace(b'"targets":10', b'"targets":11'), "2 does not follow"),
        (whole + b"1\n", "3 is no"),
    ):
        path.write_bytes(wrong)
        with pytest.raises(SetupError, match=f"line {message}"):
            read_ledger(path)


def test_lines_are_on_disk_elsewhere_before_they_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, dropped, made = tmp_path / "rounds.jsonl", tmp_path / "dropped.jsonl", opened()
    for _ in range(2):
        send(made, "a"), send(made, "b")
        step(made, 0.0)
    for line in made.lines:
        write_line(path, line)
    assert (hashes_of(dropped), read_ledger(dropped)) == (set(), [])
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))
    lines = path.read_bytes().splitlines(keepends=True)
    for kept in (2, 1):
        drop_lines(path, kept, dropped)
        assert path.read_bytes() == b"".join(lines[:kept])
    assert dropped.read_bytes() == lines[2] + lines[1]
    assert synced == [len(lines[2]), len(lines[2] + lines[1])]
    assert hashes_of(dropped) == {line.hash for line in made.lines[1:]}
    write_line(path, made.lines[1])
    assert synced[-1] == path.stat().st_size == len(lines[0] + lines[1])


@pytest.mark.parametrize("before", [0, 1])
def test_a_line_that_a_disk_does_not_take_whole_leaves_nothing(tmp_path: Path, before: int) -> None:
    path, made = tmp_path / "rounds.jsonl", opened()
    for _ in range(before):
        write_line(path, made.lines[0])
    size = path.stat().st_size if before else 0
    with full_disk(size + 9), pytest.raises(OSError, match="No space left"):
        write_line(path, made.lines[0])
    assert path.stat().st_size == size


def test_with_overlap_samples_are_given_ahead_and_what_is_left_stays() -> None:
    made = opened(sync_every=4, num_fragments=2, overlap=1)
    line = made.line
    assert given(line) == {"a": ((0, 12),), "b": ((12, 24),)}, "2 steps of 4, and one more"
    send(made, "a", used=8), send(made, "b", used=8, leaves=True)
    line = step(made, 0.0)
    assert line.closed.fragments == (0,)
    assert given(line)["a"] == ((8, 12), (24, 32)), "what is left comes first"
    send(made, "a", used=8, leaves=True), send(made, "b", used=8, leaves=True)
    line = step(made, 0.0)
    assert line.closed.fragments == (0, 1), "the last exchange is of all"


def test_in_async_mode_each_submission_is_a_round_and_the_others_go_on() -> None:
    made = opened(mode="async")
    a, b = made.registry.workers["a"], made.registry.workers["b"]
    send(made, "b")
    line = step(made, 0.0)
    assert [(sent.worker, weight) for sent, weight in line.closed.submissions] == [("b", 1.0)]
    assert [(member.worker, member.round) for member in line.members] == [("a", 0), ("b", 1)]
    assert given(line) == {"a": ((0, 8),), "b": ((16, 24),)}
    assert made.offer(a, 0, 0.0) is None
    assert made.offer(b, 0, 0.0) == {"state": "open", "round": 1, "hash": line.hash, "slot": 1, "steps": 2,
                                "ranges": [[16, 24]], "weights": [1], "answer": ("counted", ""),
                                "bounded": ""}  # fmt: skip
    send(made, "a")
    assert step(made, 0.0)
    assert made.answered(a, 0, ["a0"]) == ("counted", "")
    assert made.answered(a, 0, ["other"])[0] == "late"
    assert made.needed() == {1, 2}, "b trains from round 1"
    join(made, "c", 1.0)
    line = step(made, 1.0)
    assert [(member.worker, member.round) for member in line.members] == [("a", 2), ("b", 1), ("c", 3)]
    assert line.closed.fragments == ()


def test_with_dylu_the_slower_worker_gets_fewer_steps() -> None:
    made = rounds(mode="async", sync_every=10)
    join(made, "a", dylu=True), join(made, "b", dylu=True)
    step(made, 0.0)
    made.registry.workers["a"].speed, made.registry.workers["b"].speed = 4.0, 1.0
    send(made, "b")
    line = step(made, 0.0)
    assert [member.steps for member in line.members] == [10, 2]
    made.registry.workers["b"].speed = 0.01
    send(made, "b")
    line = step(made, 0.0)
    assert [member.steps for member in line.members] == [10, 1]
    made.registry.workers["b"].speed = 1.0
    join(made, "c")
    made.registry.workers["c"].speed = 2.0**53
    made.settings = DilocoServerSettings(mode="async", sync_every=10, max_share=None)  # else it waits for the others
    send(made, "b")
    assert step(made, 0.0).member("b").steps == 2, "who has not asked for it is none of them"
    with pytest.raises(WireError, match="dylu"):
        join(rounds(), "a", dylu=True)


def test_where_a_worker_stands_that_comes_back() -> None:
    made = opened()
    stands: dict[str, Any] = {"batch": 4, "model": MODEL, "now": 1.0, "parent": made.lines[0].hash}
    for leaves, last in ((True, 0), (False, None)):
        assert made.register("a", "a", **stands, round=0, leaves=leaves)[1] == "known"
        assert made.registry.workers["a"].last_round == last
    for number in (-1, 1, None):
        with pytest.raises(WireError, match=rf"stands on round {number} .* it has round 0 "):
            made.register("a", "a", **stands, round=number)
    lost = {**stands, "parent": "f" * 64}
    assert opened(rewind=True).register("a", "a", **lost, round=7)[1] == "rewound", "as it is told to"
    again = Rounds(made.settings, initial="i", model=MODEL, dropped={"f" * 64})
    assert again.register("a", "a", **lost, round=0, leaves=True)[1] == "rewound"
    assert again.registry.workers["a"].last_round is None
    made.registry.workers["b"].left = True
    join(made, "b", secret="another"), join(made, "b", secret="another")
    generations = [join(made, f"c{number}") for number in range(64)]
    assert max(generations).bit_length() == 52  # but in one case of 2**64


def test_what_a_worker_without_a_round_waits_for() -> None:
    made = rounds()
    assert (made.waited_for(), made.needed()) == ([], {0})
    join(made, "a"), join(made, "b")
    with pytest.raises(WireError, match="round 0: is not open"):
        made.answered(made.registry.workers["a"], 0, ["a0"])
    step(made, 0.0)
    assert (made.waited_for(), made.needed()) == (["a", "b"], {0})
    assert made.why_waiting() == "round 0 waits for a, b"
    send(made, "a")
    assert made.why_waiting() == "round 0 waits for b"
    send(made, "b")
    assert made.why_waiting() == "round 0 waits for its end"
    for worker in made.registry.workers.values():
        worker.last_round = 0
    line = step(made, 0.0)
    assert (line, made.needed()) == (made.line, {0, 1})
    assert made.why_waiting() == "round 1 waits for workers: all have left"


def weights(made: Rounds, **targets: int) -> list[float]:
    for name, count in targets.items():
        send(made, name, targets=count)
    closed = made.close(0.0, SIZES)
    made.append(made.opening("t"), 0.0)
    return [weight for _, weight in closed.submissions]


def test_a_fragment_counts_all_that_was_trained_since_its_last_exchange() -> None:
    made = opened(num_fragments=2)
    assert weights(made, a=10, b=30) == [0.25, 0.75]
    assert weights(made, a=10, b=30) == [0.25, 0.75]
    assert weights(made, a=50, b=50) == [0.4285714328289032, 0.5714285969734192]
    offered = made.offer(made.registry.workers["a"], 0, 0.0)
    assert offered["weights"] == [3, 2], "the rounds that have made each fragment"
    made = opened(sync_every=6, num_fragments=3)
    assert weights(made, a=10, b=30) == [0.25, 0.75]
    assert weights(made, a=30, b=10) == [0.5, 0.5], "with what was trained in the very first round"
    made = opened(num_fragments=2, weighting="equal")
    assert weights(made, a=10, b=30) == [0.5, 0.5]
    made = opened("a")
    assert (weights(made, a=1), weights(made, a=0)) == ([1.0], [0.0])


@pytest.mark.parametrize("fragments", [1, 2])
def test_weights_that_begin_at_zero_may_grow(fragments: int) -> None:
    for norm, weight in ((20.0, 1.0), (40.0, 0.5)):
        made = opened("a", num_fragments=fragments)
        send(made, "a", norms=(norm,))
        closed = made.close(0.0, [(0.0, 100)] * fragments)
        assert [weight for _, weight in closed.submissions] == [weight]


def test_in_async_mode_one_round_ends_at_a_time() -> None:
    made = opened(mode="async")
    send(made, "b"), send(made, "a")
    for name in "ba":
        assert [sent.worker for sent, _ in made.close(0.0, SIZES).submissions] == [name]
        if name == "b":
            assert made.offer(made.registry.workers["a"], -1, 0.0)["round"] == 0, "which goes on meanwhile"
        made.append(made.opening("t"), 0.0)
