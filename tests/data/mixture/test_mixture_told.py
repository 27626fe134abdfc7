"""What is said of a mixture: before a run and at its start by source, and of samples that are shown."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import pytest
import torch
from mixing import QUIET, config, data, loader, place, settle, write_files
from program import document, forgather

from forgather_cli.data.mixture.stretches import Mixture, Stretch
from forgather_cli.inspection.samples import Samples

RUN = [*QUIET, "max_steps=100"]
ENDS = ["data.sources.prose.max_epochs=2", "data.weight_schedule=[]"]


@pytest.fixture(autouse=True)
def _files(own_directory: None) -> None:
    write_files()


def mixture_of(total: int, *words: str) -> tuple[Mixture, dict[str, int]]:
    """As training deals it, and the samples of each source."""
    dataset = data(*words).train
    made = loader(dataset, 8, 4)
    settle(made, made.state_dict(), 0, total)
    return Mixture([Stretch.from_state(each) for each in made.state_dict()["stretches"]]), {**dataset.sizes}


def walked(mixture: Mixture, end: int) -> tuple[Counter[str], dict[str, int]]:
    """Sequences of each source by a walk, and the last position of each plus one."""
    names = [place(mixture, position)[0] for position in range(end)]
    return Counter(names), {name: position + 1 for position, name in enumerate(names)}


@pytest.mark.parametrize("words", [[], ENDS, ["data.sources.code.max_samples=5"]], ids=["schedule", "ends", "fewer"])
def test_a_plan_tells_what_a_walk_counts(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert document(capsys, "plan", "mix.yaml", *RUN, *words)["sources"] == []  # nothing is tokenized yet
    mixture, sizes = mixture_of(100, *words)
    sizes |= {"code": 5} if "max_samples" in "".join(words) else {}
    counts, lasts = walked(mixture, 800)
    found = document(capsys, "plan", "mix.yaml", *RUN, *words)
    assert found["steps"] == 100
    assert [each["name"] for each in found["sources"]] == ["prose", "code", "notes"]
    for each in found["sources"]:
        name = each["name"]
        assert (each["sequences"], each["tokens"]) == (counts[name], counts[name] * 32)
        assert each["share"] == pytest.approx(counts[name] / 800)
        assert each["passes"] == pytest.approx(counts[name] / sizes[name])
        ends = name == "prose" and words == ENDS
        assert each["ends"] == (-(-lasts[name] // 8) if ends else None)


def test_a_plan_ends_where_the_sources_do(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*ENDS, "data.sources.code.max_epochs=1", "data.sources.notes.max_epochs=1"]
    _, sizes = mixture_of(100, *words)
    total = 2 * sizes["prose"] + sizes["code"] + sizes["notes"]
    found = document(capsys, "plan", "mix.yaml", *RUN, *words)
    assert (found["steps"], sum(each["sequences"] for each in found["sources"])) == (total // 8, total)
    assert sum(each["share"] for each in found["sources"]) == pytest.approx(1)
    last = document(capsys, "plan", "mix.yaml", *RUN, *words, "dataloader_drop_last=false")
    assert last["steps"] == -(-total // 8)
    dry = document(capsys, "train", "mix.yaml", *RUN, *words, "--dry-run")
    assert dry["plan"]["sources"] == found["sources"]


def test_who_is_read_often_without_a_limit_is_warned_of(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    words = ["data.weight_schedule=[]", "data.sources.notes.max_epochs=9", "max_steps=100"]
    assert forgather("train", "mix.yaml", *QUIET, *words, "+callbacks.info={}", "output_dir=run") == 0
    told = "".join(capfd.readouterr())
    mixture, sizes = mixture_of(100, *words)
    counts, _ = walked(mixture, 800)
    passes = {name: counts[name] / sizes[name] for name in sizes}
    assert min(passes.values()) < 4 < passes["notes"]
    for name in sizes:
        assert f"{counts[name]:,} sequences ({counts[name] / 800:.1%})" in told
        is_warned = passes[name] > 4 and name != "notes"
        assert (f"data.sources.{name}: is read {passes[name]:.1f} times" in caplog.text) is is_warned
    assert forgather("plan", "mix.yaml", *QUIET, *words, "data.sources.notes.max_epochs=null") == 0
    assert f"data.sources.notes: is read {passes['notes']:.1f} times" in caplog.text
    capfd.readouterr()
    assert forgather("resume", "run", "max_steps=110") == 0
    resumed, _ = walked(mixture, 880)
    assert f"{resumed['prose']:,} sequences" in "".join(capfd.readouterr())


@pytest.mark.parametrize("split", ["train", "eval"])
def test_samples_are_shown_with_their_sources_as_training_reads_them(split: Any) -> None:
    given, splits = config(), data()
    found = list(islice(Samples(given, splits, split).read(), 110))
    if split == "train":
        mixture, _ = mixture_of(12)
        read = loader(splits.train, 8, 4, seed=given.seed)
        settle(read, read.state_dict(), 0, 12)
        rows = torch.cat([batch["input_ids"] for step in islice(read, 13) for batch in step.microbatches])
        names = [place(mixture, position)[0] for position in range(104)]
    else:
        alone = {name: splits.sources[name][1].eval for name in ("code", "notes", "prose")}
        rows = torch.stack([rows["input_ids"] for each in alone.values() for rows in each])
        names = [name for name, each in alone.items() for _ in each]
    assert [each.ids for each in found][: len(rows)] == rows.tolist()
    assert [each.mixture_source for each in found][: len(rows)] == names
    later = next(Samples(given, splits, split).read(5))
    assert (later.ids, later.mixture_source) == (rows[5].tolist(), names[5])
    files = {"prose": "prose.txt", "code": "pages.jsonl", "notes": "notes.txt"}
    for each in found:
        assert each.source is not None
        assert f"{files[str(each.mixture_source)]}" in each.source
        pages = [part for part in each.parts[:-1] if each.mixture_source == "code" and not part.before]
        for part in pages:
            assert part.place is not None
            assert f"A page, number {(part.place[1] or 0) - 1}. " in "".join(each.pieces)


def test_samples_of_a_schedule_in_epochs_are_those_of_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    """Its steps are as many as whole batches fill, which shares of the run are of."""
    words = ["max_steps=-1", "data.sources.code.max_samples=9", "data.weight_schedule.1.at=0.99"]
    words += ["data.weight_schedule.0.at=0"]
    splits = data(*words)
    steps = document(capsys, "plan", "mix.yaml", *QUIET, *words)["steps"]
    assert steps == len(loader(splits.train, 8, 4))
    mixture, _ = mixture_of(steps, *words)
    found = Samples(config(*words), splits, "train").read()
    number = 8 * steps
    assert [each.mixture_source for each in islice(found, number)] == [place(mixture, n)[0] for n in range(number)]


def test_one_source_is_shown_alone(capsys: pytest.CaptureFixture[str]) -> None:
    found = document(capsys, "data", "show", "mix.yaml", *QUIET, "--source", "notes", "--count", "4")["samples"]
    mixture, _ = mixture_of(12)
    places = [position for position in range(200) if place(mixture, position)[0] == "notes"]
    assert [each["index"] for each in found] == places[:4]
    assert {each["mixture_source"] for each in found} == {"notes"}
    assert forgather("data", "show", "mix.yaml", *QUIET, "--source", "notes", "--count", "1") == 0
    assert "document 0, notes, " in capsys.readouterr().out


def test_a_mixture_has_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    """Of what nobody has told the steps of a run."""
    data()
    assert document(capsys, "data", "stats", "mix.yaml", *QUIET)["splits"]["train"]["samples"] > 0


@pytest.mark.parametrize(
    ("words", "told"),
    [(["mix.yaml", *QUIET, "--source", "nots"], "--source: the train split has no source 'nots'; did you mean notes?"),
     (["data=synthetic", "--source", "notes"], "--source: the train split has no source 'notes'; sources: none")],
    ids=["mistyped", "no mixture"],
)  # fmt: skip
def test_a_source_that_is_not_there(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("data", "show", *words) == 2
    assert told in capsys.readouterr().err
