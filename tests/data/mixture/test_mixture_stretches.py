"""A run's stretches: what is appended changes nothing before it, each ledger keeps its quotas, no sample is skipped."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from fractions import Fraction

import numpy as np
import pytest
from mixing import place, quotas

from forgather_cli.data.mixture.stretches import Mixture, Stretch, Supply, exact

PROSE, CODE, NOTES = Supply(1000), Supply(70, max_epochs=4), Supply(90)
SOURCES = {"prose": PROSE, "code": CODE, "notes": NOTES}
WEIGHTS = {"prose": 0.6, "code": 0.3, "notes": 0.1}


def stretch(begin: int, sources: Mapping[str, Supply], *weights: tuple[int, Mapping[str, float]]) -> Stretch:
    return Stretch(begin, sources, [(at, exact(entry)) for at, entry in weights])


def dealt(mixture: Mixture, end: int) -> list[tuple[str, int, int]]:
    sources, _, epochs, indices = mixture.deal(0, end).tolist()
    return [
        (mixture.names[source], epoch, index) for source, epoch, index in zip(sources, epochs, indices, strict=True)
    ]


def check_ledgers(mixture: Mixture, end: int) -> None:
    found = dealt(mixture, end)
    begins = [each.begin for each in mixture.stretches]
    counts = dict.fromkeys(mixture.names, 0)
    for position, (name, *_) in enumerate(found, 1):
        if position - 1 in begins:
            opened = dict(counts)
        counts[name] += 1
        if position in begins:
            continue  # already the next ledger's, at 0
        for source, quota in quotas(mixture, position).items():
            assert abs(counts[source] - opened[source] - quota) < 1
    assert mixture.counts(end) == counts


def test_passes_of_a_source_hold_each_sample_once() -> None:
    found = dealt(Mixture([stretch(0, SOURCES, (0, WEIGHTS))]), 2000)
    for name, source in SOURCES.items():
        own = [place for source_name, *place in found if source_name == name]
        assert own == [[*divmod(number, source.samples)] for number in range(len(own))]
    assert sum(name == "code" for name, *_ in found) == 280


def test_as_typed() -> None:
    """The example of the docs: a line up to half of the run, then another; the code ends within it."""
    begin, end = 500, 800
    later = {"prose": 0.2, "code": 0.8, "notes": 0}
    mixture = Mixture([stretch(0, SOURCES, (0, WEIGHTS), (begin, WEIGHTS), (end, later))])
    check_ledgers(mixture, 1200)
    assert quotas(mixture, begin) == {"prose": 300, "code": 150, "notes": 50}
    [(position, name)] = mixture.ends
    assert name == "code"
    assert begin < position < end
    assert mixture.counts(position)["code"] == 280
    assert mixture.end > 10**18
    before, after = quotas(mixture, 900), quotas(mixture, 1000)
    assert after["prose"] - before["prose"] == 100  # dropped: the others' weights among themselves


def test_a_line_has_its_mean() -> None:
    """Over all of it, as the staircase has the line's middles."""
    sources = {"a": Supply(10), "b": Supply(10)}
    line = (stretch(0, sources, (0, {"a": 1, "b": 3}), (640, {"a": 60, "b": 20})),)  # sums do not matter
    assert quotas(Mixture(line), 640) == {"a": 320, "b": 320}
    first = quotas(Mixture(line), 10)
    assert first["a"] / 10 == Fraction(1, 4) + Fraction(1, 2) * Fraction(1, 128)


def test_ends_are_known_and_training_ends_where_it_should() -> None:
    stopping = {"a": Supply(30, max_epochs=2, stops=True), "b": Supply(1000)}
    mixture = Mixture([stretch(0, stopping, (0, {"a": 1, "b": 2}))])
    assert mixture.end == 180
    assert mixture.ends == [(180, "a")]
    for position in (180, 200):
        assert mixture.counts(position) == quotas(mixture, position) == {"a": 60, "b": 120}
    with pytest.raises(IndexError, match="before position 180"):
        mixture.deal(170, 190)
    everything = {"a": Supply(30, max_epochs=1), "b": Supply(17, max_epochs=2), "c": Supply(5, max_epochs=3)}
    mixture = Mixture([stretch(0, everything, (0, {"a": 30, "b": 17, "c": 5}))])
    assert mixture.end == 79
    assert [name for _, name in mixture.ends] == ["a", "b", "c"]
    assert mixture.counts(79) == {"a": 30, "b": 34, "c": 15}
    at_once = {name: Supply(source.samples, max_epochs=1) for name, source in everything.items()}
    mixture = Mixture([stretch(0, at_once, (0, {"a": 30, "b": 17, "c": 5}))])  # no weight typed: as many as each has
    assert mixture.ends == [(52, "a"), (52, "b"), (52, "c")]
    assert sorted(dealt(mixture, 52)) == [
        (name, 0, i) for name, source in at_once.items() for i in range(source.samples)
    ]
    with pytest.raises(IndexError):
        place(mixture, 52)


def test_what_is_left_without_a_weight_ends_the_training() -> None:
    """A source whose turn is over has a begun sequence, which is made whole for the last of the other."""
    sources = {"a": Supply(10, max_epochs=1), "b": Supply(100)}
    mixture = Mixture([stretch(0, sources, (0, {"a": 1, "b": 2}), (4, {"a": 1, "b": 2}), (4, {"a": 1, "b": 0}))])
    assert mixture.end == 13
    assert mixture.counts(13) == {"a": 10, "b": 3}


def test_a_resume_changes_nothing_before_it() -> None:
    mixture = Mixture([stretch(0, SOURCES, (0, WEIGHTS))])
    kept = dealt(mixture, 333)
    more = {**SOURCES, "more": Supply(40)}
    weights = {"prose": 0.1, "code": 0.1, "notes": 0.1, "more": 0.7}
    mixture = mixture.appended(stretch(333, more, (333, weights)))
    assert dealt(mixture, 400)[:333] == kept
    assert mixture.places(333) == {**Mixture([stretch(0, SOURCES, (0, WEIGHTS))]).places(333), "more": (0, 0)}
    twice = mixture.appended(stretch(333, SOURCES, (0, WEIGHTS)))
    assert [each.begin for each in twice.stretches] == [0, 333]
    own = [place for name, *place in dealt(mixture, 500) if name == "more"]
    assert own[:41] == [[*divmod(i, 40)] for i in range(41)]  # it starts at its beginning
    away = {"code": CODE, "more": more["more"]}
    mixture = mixture.appended(stretch(450, away, (450, {"code": 1, "more": 1})))
    place = mixture.places(450)["prose"]
    mixture = mixture.appended(stretch(500, more, (500, weights)))
    assert mixture.places(500)["prose"] == place  # kept for its return
    assert next(found for found in dealt(mixture, 600)[500:] if found[0] == "prose") == ("prose", *place)
    check_ledgers(mixture, 700)
    for name in mixture.names:  # over all stretches: none twice, none left out
        size = more[name].samples
        numbers = [epoch * size + index for found, epoch, index in dealt(mixture, 700) if found == name]
        assert numbers == list(range(len(numbers)))
    again = mixture.appended(stretch(420, SOURCES, (0, WEIGHTS)))  # from a checkpoint before: what was behind is gone
    assert [each.begin for each in again.stretches] == [0, 333, 420]
    assert dealt(again, 420) == dealt(mixture, 420)


def test_a_line_goes_on_where_it_was() -> None:
    line = ((0, WEIGHTS), (1000, {"prose": 0.1, "code": 0.1, "notes": 0.8}))
    unended = {name: Supply(source.samples) for name, source in SOURCES.items()}
    whole = Mixture([stretch(0, unended, *line)])
    resumed = whole.appended(stretch(437, unended, *line))
    for position in (450, 700, 1300):
        ahead = {name: quota - quotas(whole, 437)[name] for name, quota in quotas(whole, position).items()}
        assert quotas(resumed, position) == ahead


def test_the_rest_of_max_epochs_is_left_to_a_resume() -> None:
    sources = {"a": Supply(50, max_epochs=2), "b": Supply(1000)}
    mixture = Mixture([stretch(0, sources, (0, {"a": 1, "b": 1}))])
    mixture = mixture.appended(stretch(101, sources, (101, {"a": 4, "b": 1})))
    [(end, _)] = mixture.ends
    assert mixture.counts(end)["a"] == 100
    mixture = mixture.appended(stretch(end + 7, {**sources, "a": Supply(50, max_epochs=3)}, (0, {"a": 4, "b": 1})))
    assert mixture.counts(5000)["a"] == 150
    assert mixture.appended(stretch(300, {**sources, "a": Supply(50, 2, stops=True)}, (0, {"a": 4, "b": 1}))).end == 300


def test_another_number_of_samples_keeps_the_place_in_the_pass() -> None:
    def then(position: int, before: int, after: int) -> tuple[int, int]:
        mixture = Mixture([stretch(0, {"a": Supply(before)}, (0, {"a": 1}))])
        return place(mixture.appended(stretch(position, {"a": Supply(after)}, (0, {"a": 1}))), position)[1:]

    assert then(30, 50, 40) == (0, 30)
    assert then(45, 50, 40) == (1, 0)  # of this pass all 40 were read
    assert then(30, 50, 60) == (0, 30)
    assert then(130, 50, 40) == then(130, 50, 60) == (3, 0)  # the order of a later pass is of its number
    assert then(100, 50, 40) == then(100, 50, 60) == (2, 0)
    assert then(130, 50, 50) == (2, 30)


def test_the_state_is_plain_json_and_the_order_of_sources_means_nothing() -> None:
    mixture = Mixture([stretch(0, SOURCES, (0, WEIGHTS), (500, {"prose": 1e-6, "code": 1 / 3, "notes": 2}))])
    mixture = mixture.appended(stretch(300, {"prose": PROSE, "new": NOTES}, (-20, {"prose": 1, "new": "0.30"})))
    state = json.loads(json.dumps([each.state() for each in mixture.stretches]))
    assert dealt(Mixture([Stretch.from_state(each) for each in state]), 700) == dealt(mixture, 700)
    for each in state:
        each["sources"] = dict(reversed(each["sources"].items()))
        each["weights"] = [[at, dict(reversed(weights.items()))] for at, weights in each["weights"]]
    assert dealt(Mixture([Stretch.from_state(each) for each in state]), 700) == dealt(mixture, 700)


@pytest.mark.parametrize("seed", range(4))
def test_a_seek_equals_a_walk(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"source{i}" for i in range(rng.randint(2, 8))]
    mixture = Mixture([])
    for begin in (0, 3000, 3100, 9000):
        own = rng.sample(names, rng.randint(1, len(names)))
        sources = {name: Supply(rng.randint(1, 900), rng.choice([None, None, 2])) for name in own}
        sources[own[0]] = Supply(77)
        entries = [(begin + at, {name: rng.randint(1, 99) / 100 for name in own}) for at in (-100, 50, 50, 2000)]
        mixture = mixture.appended(stretch(begin, sources, *entries))
    check_ledgers(mixture, 12_000)
    whole = mixture.deal(0, 12_000)
    state = [each.state() for each in mixture.stretches]
    for begin in (0, 2990, 3099, 4096, 8990, 11_000):
        other = Mixture([Stretch.from_state(each) for each in state])
        np.testing.assert_array_equal(other.deal(begin, begin + 120), whole[:, begin : begin + 120])
