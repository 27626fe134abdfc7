"""The two recipes of docs/mixtures.md as they stand there, smaller by the command line alone: what each rank trains on
under each strategy, and after resuming in another, is what each source has where the arithmetic says."""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chats
import pytest
import torch
from handed import rows_of
from mixing import place
from program import forgather, printed
from tiny import training_curve
from torch import Tensor
from two_ranks import train_in_pool

from forgather_cli.config.load import load_config
from forgather_cli.data.cache import digest
from forgather_cli.data.mixture.stretches import Mixture, Stretch, Supply, exact
from forgather_cli.data.order import Order
from forgather_cli.worker import read_data

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[3] / "docs" / "mixtures.md"
BATCH, STEPS = 8, 20
QUIET = ["precision=fp32", "callbacks=minimal", "device=cpu", "logging_steps=1", "warmup_steps=2", "save_steps=1000",
         "max_eval_samples=4", "save_total_limit=null", f"global_batch_size={BATCH}",
         "+callbacks.handed._target_=handed.Handed"]  # fmt: skip
WORDS = {
    "mix": [*QUIET, f"max_steps={STEPS}", "data.seq_len=32", "model.hidden_size=32", "model.num_hidden_layers=2",
            "model.num_attention_heads=2"],
    "chats": [*QUIET, "learning_rate=1e-3", "data.seq_len=64", "data.sources.tools.max_samples=7"],
}  # fmt: skip
LAYOUTS = {
    "single": ["trainer=single", "per_device_train_batch_size=8"],
    "ddp": ["trainer=ddp", "per_device_train_batch_size=3"],  # 4 rows of each rank, in two micro-batches
    "fsdp2": ["trainer=fsdp2", "per_device_train_batch_size=2"],
    "pipeline": ["trainer=pipeline", "per_device_train_batch_size=4", "n_microbatches=2"],
}
MOVES = [("single", "ddp"), ("single", "fsdp2"), ("single", "pipeline"), ("fsdp2", "single"), ("pipeline", "single")]
FEWER = [("single", "pipeline"), ("fsdp2", "single")]


@pytest.fixture(scope="module", autouse=True)
def _folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The working directory of all tests here, which share their runs."""
    before = Path.cwd()
    os.chdir(tmp_path_factory.mktemp("recipes"))
    for block in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL):
        Path(block.split("\n")[0].removeprefix("# ")).write_text(block)
    for folder, name, count, text in [("prose", "a.md", 150, "A line of prose, number {}, of no use.\n"),
                                      ("prose", "b.md", 40, "{}\n\nAnother text, in another file.\n"),
                                      ("notes", "n.txt", 30, "note {}\n")]:  # fmt: skip
        Path(folder).mkdir(exist_ok=True)
        Path(folder, name).write_text("".join(text.format(n) for n in range(count)))
    chats.write_chats(Path("help.jsonl"), 30)
    chats.write_table(Path("tools.parquet"), [{"dialog": chats.conversation(n)} for n in range(50, 80)])
    tokenizer = chats.write_tokenizer(Path("base"), None, ["<|endoftext|>"])
    chats.write_model(Path("base"), "llama", len(tokenizer))
    yield
    os.chdir(before)
    for cached in (whole, stopped, alone):
        cached.cache_clear()


def train(recipe: str, layout: str, run: str, *words: str) -> None:
    given = [*WORDS[recipe], *LAYOUTS[layout], f"output_dir={run}", *words]
    if layout == "single":
        assert forgather("train", f"{recipe}.yaml", *given) == 0
        return
    [(code, output), _] = train_in_pool(Path.cwd(), given, f"{recipe}.yaml")
    assert code == 0, output


@functools.cache
def whole(recipe: str, layout: str) -> str:
    """A run that nothing interrupts."""
    train(recipe, layout, run := f"{recipe}-{layout}")
    return run


@functools.cache
def stopped(recipe: str, layout: str) -> str:
    """One that ends with a checkpoint within a line of the schedule."""
    train(recipe, layout, run := f"{recipe}-{layout}-stopped", "+callbacks.handed.stop_after=12")
    return run


@functools.cache
def alone(recipe: str) -> dict[str, Any]:
    """Each source as a run that reads nothing else has it, with the mixture's tokenizer."""
    if recipe == "mix":
        kept = max(Path(whole(recipe, "single"), "checkpoints").iterdir()) / "model"
        common = [f"data.tokenizer={kept}", "data.seq_len=32"]
        settings = {
            "prose": ["data=text", "data.files=[prose/*.md]"],
            "code": ["data=python_stdlib"],
            "notes": ["data=text", "data.files=[notes/*.txt]"],
        }
    else:
        common = ["model=pretrained", "model.path=base", "data.seq_len=64"]
        instruct = ["data=instruct", "data.chat_template=chatml"]
        settings = {
            "help": [*instruct, "data.files=[help.jsonl]"],
            "tools": [*instruct, "data.files=[tools.parquet]", "+data.mapping={dialog: messages}"],
            "prose": ["data=text", "data.files=[prose/*.md]", "data.isolate_documents=true"],
        }
    return {name: read_data(load_config(None, [*common, *own]).config).train for name, own in settings.items()}


def mixture(recipe: str) -> Mixture:
    """What the recipe asks for, put into numbers by hand."""
    sizes = {name: len(data) for name, data in alone(recipe).items()}
    if recipe == "mix":
        supplies = {name: Supply(size, 4 if name == "code" else None) for name, size in sizes.items()}
        begin = {"prose": "0.6", "code": "0.3", "notes": "0.1"}
        schedule = [(0, begin), (10 * BATCH, begin), (16 * BATCH, {"prose": "0.2", "code": "0.8", "notes": "0"})]
    else:
        assert sizes["tools"] > 7
        supplies = {name: Supply(min(size, 7) if name == "tools" else size) for name, size in sizes.items()}
        schedule = [(0, {name: str(supply.samples) for name, supply in supplies.items()})]
    return Mixture([Stretch(0, supplies, [(at, exact(weights)) for at, weights in schedule])])


def row(recipe: str, stands: Mixture, position: int) -> dict[str, Tensor]:
    name, epoch, index = place(stands, position)
    data, limit, seed = alone(recipe)[name], stands.stretches[0].sources[name].samples, int(digest([42, name])[:16], 16)
    if limit < len(data):  # the first of pass 0's order, in another order in each later pass
        if epoch:
            [index] = Order(limit, seed, epoch)[index : index + 1]
        epoch = 0
    [number] = Order(len(data), seed, epoch)[index : index + 1]
    return dict(data[number])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recipe", WORDS)
def test_every_position_has_its_source_s_row(recipe: str, layout: str) -> None:
    rows, stands = rows_of(whole(recipe, layout)), mixture(recipe)
    steps = training_curve(whole(recipe, layout))[-1][0]
    assert [*rows] == [*range(1, steps + 1)]
    if recipe == "mix":
        assert steps == STEPS
    else:  # three epochs of all, each read once in each
        assert steps == sum(supply.samples for supply in stands.stretches[0].sources.values()) // BATCH * 3
    counts = stands.counts(steps * BATCH)
    assert min(counts.values()) > 0
    assert any(counts[name] > supply.samples for name, supply in stands.stretches[0].sources.items())  # a second pass
    ids, labels = (torch.cat([step[part] for step in rows.values()]) for part in (0, 1))
    assert len(ids) == steps * BATCH
    for position, (row_ids, row_labels) in enumerate(zip(ids, labels, strict=True)):
        wanted = row(recipe, stands, position)
        assert torch.equal(row_ids, wanted["input_ids"]), position
        assert torch.equal(row_labels, wanted["labels"]), position


def assert_like_single(recipe: str, run: str, exact_to: int = 0) -> None:
    """Losses and norms of a run in other layouts are those of one device, as parity has it; its audit is clean."""
    mine, theirs = training_curve(run), training_curve(whole(recipe, "single"))
    assert [step for step, *_ in mine] == [step for step, *_ in theirs]
    for (step, *ours), (_, *wanted) in zip(mine, theirs, strict=True):
        if step <= exact_to:
            assert ours == wanted
        assert ours == pytest.approx(wanted, rel=1e-5), step


def assert_clean(run: str, capsys: pytest.CaptureFixture[str]) -> None:
    done = printed(capsys, "data", "audit", run, "--json")
    assert done.code == 0, done
    told = done.json()
    assert (told["lost"], told["repeated"]) == (0, 0)
    assert sum(each["sequences"] for each in told["sources"].values()) == BATCH * training_curve(run)[-1][0]


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "pipeline"])
@pytest.mark.parametrize("recipe", WORDS)
def test_every_strategy_computes_the_same(recipe: str, layout: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_like_single(recipe, whole(recipe, layout))
    assert_clean(whole(recipe, layout), capsys)


@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [pytest.param(recipe, *move, marks=() if recipe == "mix" or move in FEWER else pytest.mark.full)
     for recipe in WORDS for move in MOVES],
)  # fmt: skip
def test_another_layout_goes_on_with_the_same_rows(
    recipe: str, before: str, after: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = f"{recipe}-{before}-{after}"
    shutil.copytree(stopped(recipe, before), run)
    for file in Path(run).glob("handed-*.jsonl"):  # what was read up to there is checked of whole runs
        file.unlink()
    train(recipe, after, run, "resume_from_checkpoint=true")
    found, wanted = rows_of(run), rows_of(whole(recipe, "single"))
    assert [*found] == [step for step in wanted if step > 12]
    for step, (ids, labels) in found.items():
        assert torch.equal(ids, wanted[step][0]), step
        assert torch.equal(labels, wanted[step][1]), step
    assert_like_single(recipe, run, exact_to=12 if before == "single" else 0)
    assert_clean(run, capsys)
    lines = [json.loads(line) for line in Path(run, "mixture.jsonl").read_text().splitlines()]
    assert all(line["stretches"] == lines[0]["stretches"] for line in lines)
