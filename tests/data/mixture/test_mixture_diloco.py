"""A mixture under DiLoCo: the samples that the server gives out by number are the mixture's positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diloco.workers import finish, is_audited, served, worker
from mixing import at, config, data, loader, settle, write_files

from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.errors import ConfigError

PLAIN = ["data.weight_schedule=[]", "max_steps=6"]


@pytest.fixture(autouse=True)
def _files(own_directory: None) -> None:
    write_files()


def ids(made: TrainLoader) -> torch.Tensor:
    return torch.cat([batch["input_ids"] for step in made for batch in step.microbatches])


def given_out(dataset: Any, ranges: list[list[int]], **more: Any) -> TrainLoader:
    return at({"epoch": 0, "sample": ranges[0][0], "ranges": ranges}, loader(dataset, 4, 2, **more))


def test_a_sample_of_the_pool_is_a_position() -> None:
    dataset = data(*PLAIN, "data.sources.code.max_samples=7").train
    plain = loader(dataset, 8, 4)
    settle(plain, plain.state_dict(), 0, 60)
    wanted = torch.cat([ids(plain), ids(plain), ids(plain)])  # three epochs
    length = len(wanted) // 3
    ranges = [[40, 52], [3, 8], [length - 3, length + 9]]
    places = [place for start, stop in ranges for place in range(start, stop)]
    made = given_out(dataset, ranges)
    settle(made, made.state_dict(), 0, 60)
    assert made.data.steps_left(made.state_dict()) > 10**18
    assert torch.equal(ids(made), wanted[places])
    # of two ranks each its part, and on from where a checkpoint was saved
    ranks = [iter(given_out(dataset, ranges, rank=rank, size=2)) for rank in range(2)]
    steps = [
        torch.cat([b["input_ids"] for step in pair for b in step.microbatches]) for pair in zip(*ranks, strict=True)
    ]
    assert torch.equal(torch.cat(steps), wanted[places])
    first = given_out(dataset, ranges)
    start = first.state_dict()
    next(iter(first))
    saved = first.state_dict()
    assert saved["ranges"][0] == [44, 52]
    assert first.samples_between(start, saved) is None
    assert torch.equal(ids(at(saved, loader(dataset, 4, 2))), wanted[places[4:]])


def test_a_run_goes_on_alone_from_a_workers_checkpoint() -> None:
    made = given_out(data(*PLAIN).train, [[4, 8]])
    assert len(ids(made)) == 4
    assert made.state_dict() == {"epoch": 1, "sample": 0}
    assert not settle(made, {"epoch": 0, "sample": 4, "ranges": [[4, 8]]}, 3, 60)


REFUSED = {
    "weight_schedule": ([], "data.weight_schedule: is not there yet under callbacks.diloco"),
    "all end": (
        [*PLAIN, *(f"data.sources.{name}.max_epochs=2" for name in ("prose", "code", "notes"))],
        "data.sources: an end of all is not there yet under callbacks.diloco",
    ),
    "one stops": (
        [*PLAIN, "data.sources.code.max_epochs=2", "data.sources.code.on_exhausted=stop"],
        "data.sources: an end of all is not there yet under callbacks.diloco",
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_not_there_yet(words: str) -> None:
    given, told = REFUSED[words]
    with pytest.raises(ConfigError) as refused:
        config(*given, "+callbacks.diloco={}")
    [problem] = refused.value.problems
    assert problem.startswith(told)


def test_an_end_of_one_is_allowed() -> None:
    config(*PLAIN, "data.sources.code.max_epochs=2", "+callbacks.diloco={}")


def test_workers_share_a_mixture_and_have_the_same_weights(tmp_path: Path) -> None:
    files = Path.cwd()
    sources = [f"+data.sources.{name}={{type: text, files: ['{files / file}'], weight: {weight}}}"
               for name, file, weight in (("prose", "prose.txt", 0.7), ("code", "pages.jsonl", 0.3))]  # fmt: skip
    recipe = [
        "model=nano", "precision=fp32", "data=mixture", "data.tokenizer=bytes", "seq_len=32", *sources, "device=cpu",
        "callbacks=minimal", "global_batch_size=4", "per_device_train_batch_size=2", "eval_strategy=no", "save_steps=2",
        "max_steps=6",
    ]  # fmt: skip
    with served(tmp_path, recipe=recipe) as server:
        with worker(server, "a", recipe=recipe) as first, worker(server, "b", recipe=recipe) as second:
            first.read_until("round|step 1/")
            other = worker(server, "c", "data.sources.code.weight=0.5", recipe=recipe)
            assert (other.finish(), "data: has the fingerprint" in other.output) == (2, True), other.output
            finish(first, second)
        assert is_audited(server.run)
        assert server.used_samples() == list(range(len(server.used_samples())))
