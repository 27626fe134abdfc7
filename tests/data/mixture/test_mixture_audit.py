"""``mixture.jsonl`` and ``forgather data audit``: what was read, on any ranks, and what each kind of fault shows."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
from mixing import QUIET, data, write_files
from program import forgather, printed
from ranks import run_ranks
from tiny import training_curve
from two_ranks import train_in_pool

from forgather_cli.callbacks.base import Divergence
from forgather_cli.data.mixture.dataset import MixtureSteps
from forgather_cli.data.mixture.stretches import Mixture, Stretch
from forgather_cli.trainer.epochs import Epochs

CONSTANT = ["data.weight_schedule=[]", "+data.sources.notes.max_samples=3"]  # which are read in many passes
OTHER = [*CONSTANT, "data.sources.code.weight=2"]


@pytest.fixture(autouse=True)
def _files(own_directory: None) -> None:
    write_files()


def lines() -> list[Any]:
    return [json.loads(line) for line in Path("run/mixture.jsonl").read_text().splitlines()]


def mixture_of(stretches: Any) -> Mixture:
    return Mixture([Stretch.from_state(each) for each in stretches])


def audited(capsys: pytest.CaptureFixture[str]) -> tuple[int, int]:
    """(lost, repeated); what was read of each source is what its lines say."""
    done = printed(capsys, "data", "audit", "run", "--json")
    told = done.json()
    assert done.code == (1 if told["lost"] or told["repeated"] else 0)
    total = sum(each["sequences"] for each in told["sources"].values())
    for_people = printed(capsys, "data", "audit", "run")
    assert for_people.code == done.code
    rows = [line.split() for line in for_people.out.splitlines() if line]
    assert rows[-2:] == [["lost", str(told["lost"])], ["repeated", str(told["repeated"])]]
    assert {row[0]: row[1] for row in rows if row[0] in told["sources"]} == {
        name: str(each["sequences"]) for name, each in told["sources"].items()
    }
    end = lines()[-1]
    assert total == end["position"] - told["lost"] + told["repeated"]
    assert all(each["share"] == each["sequences"] / total for each in told["sources"].values())
    if done.code == 0:
        counts = mixture_of(end["stretches"]).counts(end["position"])
        assert {name: each["sequences"] for name, each in told["sources"].items()} == counts
    return told["lost"], told["repeated"]


def broken(patch: pytest.MonkeyPatch, fault: str) -> None:
    """A loader that hands out other samples in its third step, or that begins elsewhere."""
    requests, load = MixtureSteps._requests, Epochs.load_state_dict

    def other(self: MixtureSteps, position: Any) -> Iterator[Any]:
        for number, ([(epoch, samples), *rest], after) in enumerate(requests(self, position)):
            if number == 2 and self._share.rank == self._share.size - 1:
                first, second, *others = samples
                changed = {
                    "skipped": [second, *others],
                    "repeated": [first, *samples],
                    "replaced": [second, *samples[1:]],
                }
                samples = changed.get(fault, samples)
            yield [(epoch, samples), *rest], after

    def moved(self: Epochs, state: Any) -> None:
        by = {"forward": 16, "back": -16}.get(fault, 0)
        left = state["stretches"][:-1] if fault == "stretch" else state["stretches"]
        load(self, {**state, "position": state["position"] + by, "sample": state["sample"] + by, "stretches": left})

    patch.setattr(MixtureSteps, "_requests", other)
    patch.setattr(Epochs, "load_state_dict", moved)


def scripted(folder: str, words: list[str], steps: int, fault: str = "") -> None:
    """Train up to a step, from the newest checkpoint on."""
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        asked: list[int] = []

        def ask(state: Any, control: Any, **kwargs: Any) -> None:
            if fault in ("rollback", "killed") and state.global_step == 6 and not asked:
                asked.append(6)
                control.divergence = Divergence("asked for", "rollback")
            control.should_abort_without_save |= fault == "killed" and bool(asked) and state.global_step == 5

        broken(patch, fault)
        tiny.script(
            "run", tiny.decoder(vocab_size=257), data(*words).train, callbacks=[tiny.acts(on_step_end=ask)],
            max_steps=steps, global_batch_size=8, save_steps=4, save_strategy="steps", logging_steps=1,
            resume_from_checkpoint=True,
        ).train()  # fmt: skip


def train(ranks: int, words: list[str], steps: int, fault: str = "") -> None:
    given = str(Path.cwd()), words, steps, fault
    if ranks == 1:
        scripted(*given)
    else:
        run_ranks(ranks, scripted, *given)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(
    ("fault", "lost", "repeated"),
    [("", 0, 0), ("skipped", 1, 0), ("repeated", 0, 1), ("replaced", 1, 1), ("forward", 16, 0), ("back", 0, 16),
     ("rollback", 0, 0), ("killed", 0, 0)],
)  # fmt: skip
def test_what_is_lost_and_what_is_repeated(
    ranks: int, fault: str, lost: int, repeated: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """After a change of weights too, and where the run goes on afterwards."""
    at_start = fault in ("rollback", "killed")
    train(ranks, CONSTANT, 8 if at_start else 4, fault if at_start else "")
    train(ranks, OTHER, 8)
    train(ranks, OTHER, 12, "" if at_start else fault)
    assert audited(capsys) == (lost, repeated)
    train(ranks, CONSTANT, 14)
    assert audited(capsys) == (lost, repeated)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stretch_that_is_gone(ranks: int, capsys: pytest.CaptureFixture[str]) -> None:
    train(ranks, CONSTANT, 4)
    train(ranks, OTHER, 8)
    true = mixture_of(lines()[-1]["stretches"]).counts(64)
    train(ranks, OTHER, 12, "stretch")
    assert [each["begin"] for each in lines()[-1]["stretches"]] == [0, 64]
    wrong = mixture_of(lines()[-1]["stretches"]).counts(64)
    gone = sum(max(true[name] - wrong[name], 0) for name in true)
    assert gone > 4
    assert audited(capsys) == (gone, gone)


def test_lines_of_what_is_read_again_are_cut(capsys: pytest.CaptureFixture[str]) -> None:
    """As a job leaves them that was killed; with data workers, a schedule, and other ranks then."""
    assert forgather("train", "mix.yaml", *QUIET, "max_steps=4", "dataloader_num_workers=1", "output_dir=run") == 0
    assert [(each["step"], each["position"], each["starts"]) for each in lines()] == [(0, 0, True), (4, 32, False)]
    late = {**lines()[-1], "step": 6, "position": 48}
    Path("run/mixture.jsonl").write_text(
        "".join(json.dumps(each) + "\n" for each in [*lines(), late]) + '{"step": 7, "po'
    )
    words = [*QUIET, "output_dir=run", "resume_from_checkpoint=true", "trainer=ddp", "per_device_train_batch_size=2"]
    [(code, output), _] = train_in_pool(Path.cwd(), words, "mix.yaml")
    assert code == 0, output
    assert [(each["step"], each["position"], each["starts"]) for each in lines()] == [
        (0, 0, True), (4, 32, False), (4, 32, True), (8, 64, False), (12, 96, False)]  # fmt: skip
    assert audited(capsys) == (0, 0)
    assert training_curve("run")[-1][0] == 12
    done = printed(capsys, "data", "audit", "run")
    assert done.code == 0
    assert [line.split() for line in done.out.splitlines() if line][-2:] == [["lost", "0"], ["repeated", "0"]]


def test_lines_that_cannot_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("data", "audit", "run") == 2
    train(1, CONSTANT, 4)
    whole = Path("run/mixture.jsonl").read_text()
    for name in ("order", "sources", "stretches", "begin", "starts"):
        Path("run/mixture.jsonl").write_text(whole.replace(f'"{name}"', '"other"'))
        assert forgather("data", "audit", "run") == 2
    for damage in ("{}\n", "nothing\n", whole.replace('"prose": [', '"prose": ["x", ')):
        Path("run/mixture.jsonl").write_text(damage)
        assert forgather("data", "audit", "run") == 2
    Path("run/mixture.jsonl").write_text("nothing\n" + whole)
    train(1, CONSTANT, 8)  # trains all the same
    assert forgather("data", "audit", "run") == 2


def test_a_run_from_another_runs_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """What is read from there on is known."""
    words = [*QUIET, *CONSTANT]
    assert forgather("train", "mix.yaml", *words, "max_steps=4", "output_dir=first") == 0
    more = ["max_steps=8", "output_dir=run", "resume_from_checkpoint=first/checkpoints/step-00000004"]
    assert forgather("train", "mix.yaml", *words, *more) == 0
    done = printed(capsys, "data", "audit", "run", "--json")
    assert done.code == 0, done
    assert sum(each["sequences"] for each in done.json()["sources"].values()) == 32
