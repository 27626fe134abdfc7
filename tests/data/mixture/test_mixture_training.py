"""Training on a mixture: which samples stand where, on any ranks, through kills and changes; its rows and its ends."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from chats import write_lines
from mixing import QUIET, at, config, data, loader, place, settle, write_files
from program import Process, forgather
from ranks import run_ranks
from tiny import metrics, training_curve
from two_ranks import fault, train_in_pool

from forgather_cli.callbacks.base import Divergence
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.data.build import load_data, source_of
from forgather_cli.data.cache import digest
from forgather_cli.data.loaders.loader import TrainLoader
from forgather_cli.data.mixture.dataset import MixtureDataset
from forgather_cli.data.mixture.stretches import Mixture, Stretch
from forgather_cli.data.order import Order
from forgather_cli.loss.model_io import model_kwargs, model_logits
from forgather_cli.run_dir import RunDir
from forgather_cli.worker import read_data


@pytest.fixture(autouse=True)
def _files(own_directory: None) -> None:
    write_files()


def settled(dataset: Any, step: int = 0, total: int = 12, position: Any = None, **given: Any) -> TrainLoader:
    """A loader that begins as training does."""
    made = loader(dataset, 8, 4, **given)
    settle(made, position or made.state_dict(), step, total)
    return made


def rows(loaders: list[TrainLoader], steps: int) -> list[tuple[torch.Tensor, Any]]:
    """The rows of each step that these ranks read together, and the position behind it."""
    found: list[tuple[torch.Tensor, Any]] = []
    streams = [iter(each) for each in loaders]
    while len(found) < steps:
        shares = [next(stream, None) for stream in streams]
        if None in shares:
            streams = [iter(each) for each in loaders]
            continue
        batches = [batch["input_ids"] for share in shares if share is not None for batch in share.microbatches]
        found.append((torch.cat(batches), loaders[0].state_dict()))
    return found


def same(found: list[tuple[torch.Tensor, Any]], wanted: list[tuple[torch.Tensor, Any]]) -> bool:
    return len(found) == len(wanted) and all(
        torch.equal(a, b) and p == q for (a, p), (b, q) in zip(found, wanted, strict=True)
    )


def expected(given: Config, stretches: Any, begin: int, end: int, seed: int = 1) -> torch.Tensor:
    """The rows at positions, from each source read alone and the arithmetic of ``stretches``."""
    option: Any = given.data
    mixture = Mixture([Stretch.from_state(each) for each in json.loads(json.dumps(stretches))])
    alone = {name: load_data(option.option(name)).train for name in option.sources}
    found = []
    for position in range(begin, end):
        name, epoch, index = place(mixture, position)
        [number] = Order(len(alone[name]), key(seed, name), epoch)[index : index + 1]
        found.append(alone[name][number]["input_ids"])
    return torch.stack(found)


def key(seed: int, name: str) -> int:
    return int(digest([seed, name])[:16], 16)


def test_training_reads_what_the_arithmetic_says() -> None:
    given = config()
    made = settled(read_data(given).train)
    [*_, (_, last)] = found = rows([made], 60)
    assert (last["position"], [each["begin"] for each in last["stretches"]]) == (480, [0])
    assert torch.equal(torch.cat([step for step, _ in found]), expected(given, last["stretches"], 0, 480))
    assert last["epoch"] == 480 // (len(made) * 8)  # whole batches alone, and no position is left out
    at_steps = [entry[0] for entry in last["stretches"][0]["weights"]]
    assert at_steps == [0, 4 * 8, 10 * 8]  # 0.8 of 12 steps, rounded up


def test_the_order_of_a_source_is_format() -> None:
    """Runs of before go on."""
    assert Order(1000, key(42, "prose"), 0)[0:4] == [648, 805, 466, 717]


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_and_micro_batches_share_one_order(size: int) -> None:
    dataset = data().train
    alone = rows([settled(dataset)], 40)
    assert same(rows([settled(dataset, rank=rank, size=size, num_workers=rank % 2) for rank in range(size)], 40), alone)
    # from any position, in another layout
    for step in (3, 11, 25):
        position = json.loads(json.dumps(alone[step - 1][1]))
        ranks = [at(position, loader(dataset, 8, 3, rank=rank, size=size)) for rank in range(size)]
        for each in ranks:
            assert not settle(each, position, step, 12)
        assert same(rows(ranks, 5), alone[step : step + 5])


def test_other_weights_begin_where_they_are_changed() -> None:
    before = rows([settled(data().train)], 20)
    given = config("data.sources.code.weight=2.5", "data.weight_schedule=[]", "global_batch_size=4")
    changed = loader(read_data(given).train, 4, 4)
    position = before[-1][1]
    changed.load_state_dict(position)
    assert settle(changed, position, 20, 40)
    found = rows([changed], 40)
    stretches = found[-1][1]["stretches"]
    assert [each["begin"] for each in stretches] == [0, 160]
    assert stretches[0] == position["stretches"][0]
    together = torch.cat([step for step, _ in (*before, *found)])
    assert torch.equal(together, expected(given, stretches, 0, 320))
    mixture = Mixture([Stretch.from_state(each) for each in stretches])
    seen = Counter(place(mixture, position) for position in range(320))
    assert set(seen.values()) == {1}  # no sample twice in a pass, over the change


def test_a_source_comes_goes_and_returns_where_it_was() -> None:
    with_all = ["data.weight_schedule=[]"]
    without = [*with_all, "~data.sources.code"]
    more = [*with_all, "+data.sources.more={type: text, files: [notes.txt], weight: 0.5}"]
    position, step = None, 0
    places = []
    for words in (with_all, without, more):
        made = loader(data(*words).train, 8, 4)
        position = position or made.state_dict()
        made.load_state_dict(position)
        assert settle(made, position, step, 99)
        position, step = rows([made], 10)[-1][1], step + 10
        places.append(Mixture([Stretch.from_state(each) for each in position["stretches"]]).places(8 * step))
    first, second, third = places
    assert first["code"] == second["code"] < third["code"]
    mixture = Mixture([Stretch.from_state(each) for each in position["stretches"]])
    assert next(found for p in range(160, 240) if (found := place(mixture, p))[0] == "more") == ("more", 0, 0)
    assert next(found for p in range(160, 240) if (found := place(mixture, p))[0] == "code") == ("code", *first["code"])


def test_max_samples_are_the_first_of_pass_0_in_each_pass() -> None:
    words = [
        "~data.sources.code",
        "~data.sources.notes",
        "data.weight_schedule=[]",
        "data.sources.prose.max_samples=16",
    ]
    dataset = data(*words).train
    steps = rows([made := settled(dataset)], 6)
    passes = [torch.cat([step for step, _ in steps[n : n + 2]]) for n in (0, 2, 4)]
    whole = dataset.__getitems__(Order(len(dataset), key(1, "prose"), 0)[0:16])["input_ids"]
    assert torch.equal(passes[0], whole)
    assert len(made) == 2
    for one in passes[1:]:
        assert sorted(one.tolist()) == sorted(whole.tolist())
        assert not torch.equal(one, whole)


@pytest.mark.parametrize("fewer", [True, False])
def test_other_max_samples_begin_with_the_next_pass(fewer: bool) -> None:
    """In pass 0 they only move its end; a later pass over another number of samples is another order."""
    words = ["~data.sources.code", "~data.sources.notes", "data.weight_schedule=[]"]
    before, after = (24, 16) if fewer else (16, 24)
    old, new = (data(*words, f"data.sources.prose.max_samples={each}").train for each in (before, after))
    first = new.__getitems__(Order(len(new), key(1, "prose"), 0)[0:24])["input_ids"].tolist()
    for steps, rest in ((1, first[8:after]), (before // 8 + 1, [])):  # where the change is, what is left of its pass
        position = rows([settled(old)], steps)[-1][1]
        made = loader(new, 8, 4)
        assert settle(made, position, steps, 12)
        found = [row for step, _ in rows([made], 8) for row in step.tolist()]
        assert found[: len(rest)] == rest
        for begin in (len(rest), len(rest) + after):
            assert sorted(found[begin : begin + after]) == sorted(first[:after])


def test_sequential_order() -> None:
    words = ["~data.sources.code", "~data.sources.notes", "data.weight_schedule=[]"]
    dataset = data(*words).train
    [(first, _)] = rows([settled(dataset, shuffle=False)], 1)
    assert torch.equal(first, dataset.__getitems__(range(8))["input_ids"])


@pytest.mark.parametrize("isolate", ["null", "false", "true"])
def test_rows_of_any_packing_share_a_batch(isolate: str) -> None:
    """Each as its source gives it; what it does not have is as a model takes it without."""
    chats = "+data.sources.{}={{type: instruct, files: [chats.jsonl], packing: {}, weight: 1}}"
    words = [chats.format(name, name) for name in ("best_fit", "pad", "concat")]
    given = config(*words, "data.weight_schedule=[]", "+data.chat_template=chatml", f"data.isolate_documents={isolate}",
                   "seq_len=64")  # fmt: skip
    option: Any = given.data
    made = read_data(given)
    assert isinstance(made.train, MixtureDataset)
    assert made.tokenizer.vocab_size == 257 + 2  # the template's markers, to text too
    numbers = [*made.train.firsts[:-1], *(first - 1 for first in made.train.firsts[1:])]
    batch = made.train.__getitems__(numbers)
    sizes = list(made.train.sizes.values())
    wanted = [*((n, 0) for n in range(len(sizes))), *((n, size - 1) for n, size in enumerate(sizes))]
    assert batch.pop("source_ids").tolist() == [list(each) for each in wanted]
    sources = {name: load_data(option.option(name), model_tokens=None).train for name in option.sources}
    keys = {"input_ids", "labels", "document_ids", "position_ids", "sequence_lengths"}
    assert set(batch) == (keys if isolate != "false" else {"input_ids", "labels", "sequence_lengths"})
    absent = {"document_ids": torch.zeros(64), "position_ids": torch.arange(64), "sequence_lengths": torch.tensor(64)}
    for number, name in enumerate(made.train.sizes):
        for row, index in ((number, 0), (number + len(sizes), len(sources[name]) - 1)):
            alone = {**absent, **sources[name][index]}
            for found, values in batch.items():
                assert torch.equal(values[row], alone[found].to(values.dtype)), (name, found)


USERS = """
import torch

def rows():
    found = []
    for n in range(20):
        real = torch.arange(64) >= 24 if n % 2 else torch.arange(64) < 40 - n
        ids = (torch.arange(64) * 7 + n) % 250
        found.append({"input_ids": ids, "labels": torch.where(real, ids, -100), "attention_mask": real.long()})
    return found
"""


@pytest.mark.parametrize("isolate", ["false", "true"])
def test_a_row_is_to_the_model_what_it_is_alone(isolate: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside rows of a user's, which are padded on either side and have a mask, by which their tokens count."""
    Path("padded_rows.py").write_text(USERS)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    chats = "+data.sources.{}={{type: instruct, files: [chats.jsonl], packing: {}, weight: 1}}"
    words = [*(chats.format(name, name) for name in ("best_fit", "pad")), "+data.chat_template=chatml", "seq_len=64",
             f"data.isolate_documents={isolate}", "data.weight_schedule=[]",
             "+data.sources.mine={_target_: padded_rows.rows, weight: 1}"]  # fmt: skip
    made = read_data(given := config(*words)).train
    assert isinstance(made, MixtureDataset)
    option: Any = given.data
    model = tiny.decoder(vocab_size=259)
    numbers = [part[n] for part in made.parts_by_source.values() for n in (0, 1)]
    batch = made.__getitems__(numbers)
    with torch.no_grad():
        found = model_logits(model, model_kwargs(batch))
        for row, name in enumerate(name for name in made.sizes for _ in (0, 1)):
            own = load_data(option.option(name), model_tokens=None).train[row % 2]
            alone = {key: torch.as_tensor(value)[None] for key, value in own.items()}
            mask = alone.get("attention_mask", torch.ones(1, 64, dtype=torch.int64))
            real = (mask[0] > 0) & (torch.arange(64) < alone.get("sequence_lengths", torch.tensor([64])))
            logits = model_logits(model, model_kwargs(alone))[0]
            torch.testing.assert_close(found[row][real], logits[real], rtol=1e-4, atol=1e-5)
            tokens = alone.get("sequence_lengths", mask.sum(1))
            assert batch["sequence_lengths"][row] == tokens, name


def test_evaluation_is_the_union_of_what_is_held_out() -> None:
    given = config()
    option: Any = given.data
    made = read_data(given)
    alone = [load_data(option.option(name)).eval for name in sorted(option.sources)]
    assert len(made.eval) == sum(map(len, alone))
    ids = made.eval.__getitems__(range(len(made.eval)))["input_ids"]
    wanted = [each.__getitems__(range(len(each)))["input_ids"] for each in alone]
    assert torch.equal(ids, torch.cat(wanted))


def test_one_bpe_of_all_texts_whatever_their_weights() -> None:
    words = ["data.tokenizer=bpe", "data.bpe_vocab_size=300", "data.weight_schedule=[]"]
    first, second = data(*words), data(*words, "data.sources.code.weight=9")
    assert first.fingerprint == second.fingerprint
    assert first.tokenizer.vocab_size == 300
    assert len(first.tokenizer.encode(" of no use")) < 5  # as only prose has it
    assert data(*words, "~data.sources.code").fingerprint != first.fingerprint
    counts = source_of(config(*words).data).counts()
    assert counts is not None
    assert {name: first.description[name] for name in ("train_tokens", "train_samples", "eval_tokens")} == {
        name: counts[name] for name in ("train_tokens", "train_samples", "eval_tokens")
    }


def test_a_bpe_learns_from_chats_too_without_their_markers_and_what_is_held_out() -> None:
    said = [{"role": "user", "content": "zqxj wvkf " * 40}, {"role": "assistant", "content": "vmpz ghtb " * 40}]
    write_lines(Path("more.jsonl"), [{"messages": said}] * 4)
    write_lines(Path("kept.jsonl"), [{"messages": [{**each, "content": "ydrw " * 90} for each in said]}])
    chats = "+data.sources.chats={type: instruct, files: [more.jsonl], eval_files: [kept.jsonl], weight: 1}"
    words = [chats, "data.tokenizer=bpe", "data.bpe_vocab_size=400", "data.chat_template=chatml", "data.seq_len=512"]
    for others in ([], ["~data.sources.prose", "~data.sources.code", "~data.sources.notes"]):
        tokenizer = data(*words, "data.weight_schedule=[]", *others).tokenizer
        assert [len(tokenizer.encode(word)) for word in (" wvkf", " ghtb", "<|im_start|>")] == [1, 1, 1]
        assert len(tokenizer.encode(" ydrw")) > 1
        assert not {"im", "_start", "|>"} & {tokenizer.decode([number]) for number in range(tokenizer.vocab_size)}


@pytest.mark.parametrize(
    ("sources", "tokenizer"),
    [("prose: {type: text, files: [prose.txt]}, c: {type: instruct, files: [chats.jsonl]}", "bpe"),
     ("c: {type: instruct, files: [chats.jsonl]}", "bytes"), ("t: {type: tokens, files: [t.npy]}", "bytes")],
    ids=["text", "chats", "tokens"],
)  # fmt: skip
def test_a_recipe_s_tokenizer_is_that_of_a_mixture_with_text(sources: str, tokenizer: str) -> None:
    """As of each option alone."""
    words = ["data=mixture", "model=nano", f"+data={{sources: {{{sources}}}}}"]
    assert load_config("default", words).config.data.tokenizer == tokenizer


# --------------------------------------------------------------------------------------------------------- whole runs


def test_a_killed_run_goes_on_as_if_nothing_had_been() -> None:
    """In one layout bit by bit; on two ranks the same data, and weights that are changed begin there."""
    assert forgather("train", "mix.yaml", *QUIET, "output_dir=whole") == 0
    died = fault("step-kill", rank=0, after=7)
    with Process("train", "mix.yaml", *QUIET, *died, "output_dir=run") as job:
        job.finish()
    shutil.copytree("run", "two")
    assert forgather("resume", "run") == 0
    assert training_curve("run")[-5:] == training_curve("whole")[-5:]
    final = "checkpoints/step-00000012/model/model.safetensors"
    assert Path("run", final).read_bytes() == Path("whole", final).read_bytes()

    words = [*QUIET, "output_dir=two", "resume_from_checkpoint=true", "trainer=ddp", "per_device_train_batch_size=2"]
    [(code, output), _] = train_in_pool(Path.cwd(), words, "mix.yaml")
    assert code == 0, output
    both = training_curve("two")[-5:], training_curve("whole")[-5:]
    assert [step for step, *_ in both[0]] == [step for step, *_ in both[1]]
    assert np.allclose(*both, rtol=1e-4)
    positions = [position_of(run) for run in ("whole", "run", "two")]
    assert positions[0] == positions[1] == positions[2]
    assert positions[0]["position"] == 96

    assert forgather("resume", "run", "max_steps=15", "data.sources.code.weight=0.5", "data.weight_schedule=[]") == 0
    assert [each["begin"] for each in position_of("run")["stretches"]] == [0, 96]
    assert forgather("resume", "run", "max_steps=16", "+data.sources.code.max_samples=3") == 0
    assert [each["begin"] for each in position_of("run")["stretches"]] == [0, 96, 120]


def position_of(run: str) -> Any:
    return json.loads((RunDir(Path(run)).checkpoint(training_curve(run)[-1][0]) / "state.json").read_text())[
        "components"
    ]["data"]


def test_training_ends_where_the_sources_end() -> None:
    words = ["data.weight_schedule=[]", "max_steps=200", "eval_strategy=no"]
    assert forgather("train", "mix.yaml", *QUIET, *words, "+data.sources.notes={max_epochs: 1, on_exhausted: stop}",
                     "output_dir=stopped") == 0  # fmt: skip
    notes = load_data(config().data.option("notes")).train
    ended = training_curve("stopped")[-1][0]
    assert abs(ended * 8 * 0.1 - len(notes)) <= 1
    assert metrics("stopped")[-1]["step"] == ended < 200


def scripted(folder: str, root: str, act: str) -> tuple[list[torch.Tensor], Any]:
    """The rows that this rank trains on, step by step, and the position at the end."""
    with contextlib.chdir(folder):
        dataset = data().train
        left = [5 if act == "rollback" else 4]

        def ask(state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == left[0]:
                left[0] = None
                if act == "rollback":
                    control.divergence = Divergence("asked for", "rollback")
                control.should_epoch_stop |= act == "epoch"

        trainer = tiny.script(
            root, tiny.decoder(vocab_size=257), dataset, callbacks=[tiny.acts(on_step_end=ask)], max_steps=12,
            global_batch_size=8, save_steps=2, save_strategy="steps", logging_steps=1, resume_from_checkpoint=True,
        )  # fmt: skip
        noted = tiny.note_batches(trainer.strategy)
        trainer.train()
        return [torch.cat([batch["input_ids"] for batch in step]) for step in noted], trainer.run.epochs.state_dict()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("act", "begins"), [("rollback", [0, 40]), ("epoch", [0])])
def test_no_position_is_left_out(ranks: int, act: str, begins: list[int]) -> None:
    """Where a run goes back and skips the data since, or ends an epoch early; the step is fetched ahead on ranks."""
    given = str(Path.cwd()), "run", act
    shares = [scripted(*given)] if ranks == 1 else run_ranks(ranks, scripted, *given)
    position = shares[0][1]
    assert [each["begin"] for each in position["stretches"]] == begins
    trained = torch.cat([torch.cat(step) for step in zip(*(steps for steps, _ in shares), strict=True)])
    assert torch.equal(trained, expected(config(), position["stretches"], 0, position["position"], seed=42))
    assert position["position"] == len(trained) == 8 * (13 if act == "rollback" else 12)
    saved = json.loads(Path("run/checkpoints/step-00000004/state.json").read_text())["components"]["data"]
    assert (saved["epoch"], saved["position"]) == (int(act == "epoch"), 32)
    if act == "rollback":  # the schedule is of steps
        assert [entry[0] for entry in position["stretches"][1]["weights"]] == [8, 40, 88]


@pytest.mark.parametrize("strategy", ["fsdp2", "pipeline"])
def test_strategies_train_on_the_same(strategy: str) -> None:
    words = [
        *QUIET,
        "max_steps=3",
        "data.weight_schedule=[]",
        "per_device_train_batch_size=4",
    ]
    assert forgather("train", "mix.yaml", *words, "output_dir=alone") == 0
    layout = ["n_microbatches=2"] if strategy == "pipeline" else []
    own = ["output_dir=run", f"trainer={strategy}", "nproc_per_node=2", *layout]
    [(code, output), _] = train_in_pool(Path.cwd(), [*words, *own], "mix.yaml")
    assert code == 0, output
    assert np.allclose(training_curve("run"), training_curve("alone"), rtol=1e-4)
    assert forgather("data", "audit", "run") == 0


def test_a_run_keeps_its_bpe_when_a_source_is_added_from_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of files count from where the run was begun."""
    words = ["data.tokenizer=bpe", "data.bpe_vocab_size=300", "data.weight_schedule=[]", "max_steps=2"]
    assert forgather("train", "mix.yaml", *QUIET, *words, "output_dir=run") == 0
    kept = Path("run/checkpoints/step-00000002/model/tokenizer.json").read_bytes()
    more = "+data.sources.more={type: text, files: [" + str(Path("prose.txt").resolve()) + "], weight: 1}"
    root = Path.cwd()
    (root / "elsewhere").mkdir()
    monkeypatch.chdir(root / "elsewhere")
    assert forgather("eval", str(root / "run")) == 0
    assert forgather("resume", str(root / "run"), "max_steps=4", more) == 0
    assert (root / "run/checkpoints/step-00000004/model/tokenizer.json").read_bytes() == kept
    assert [each["begin"] for each in position_of(str(root / "run"))["stretches"]] == [0, 16]


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_chats_and_text_go_on_with_the_template_s_tokens(tokenizer: str) -> None:
    words = [f"data.tokenizer={tokenizer}", "data.weight_schedule=[]", "max_steps=2", "data.chat_template=chatml",
             "+data.sources.chats={type: instruct, files: [chats.jsonl], weight: 1}", "seq_len=128"]  # fmt: skip
    assert forgather("train", "mix.yaml", *QUIET, *words, "output_dir=run") == 0
    assert forgather("resume", "run", "max_steps=3") == 0
    for step in (2, 3):
        files = Path(f"run/checkpoints/step-{step:08}/model").iterdir()
        assert sum("<|im_start|>" in file.read_text() for file in files if "token" in file.name) >= 1
        assert (Path(f"run/checkpoints/step-{step:08}/model") / "chat_template.jinja").exists()
