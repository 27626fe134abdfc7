"""Metrics by source: against plain PyTorch on the same batches, on one rank and two, and what is logged without."""

from __future__ import annotations

import contextlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from mixing import QUIET, config, data, loader, place, settle, write_files
from program import forgather
from ranks import run_ranks
from tiny import metrics
from two_ranks import train_in_pool

from forgather_cli.data.build import load_data
from forgather_cli.data.loaders.loader import EvalLoader
from forgather_cli.data.mixture.stretches import Mixture, Stretch
from forgather_cli.labels import IGNORED, SOURCES
from forgather_cli.pictures.curves import Look, draw_curves
from forgather_cli.pictures.style import drawing
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.summary import summarize

NAMES = ("code", "notes", "prose")


@pytest.fixture(autouse=True)
def _files(own_directory: None) -> None:
    write_files()


def owners() -> dict[bytes, str]:
    """Which source each row is of, from each source read alone."""
    option: Any = config().data
    alone = {name: load_data(option.option(name)).train for name in NAMES}
    return {alone[name][n]["input_ids"].numpy().tobytes(): name for name in NAMES for n in range(len(alone[name]))}


Sums = list[Counter[tuple[str, str]]]
"""Of each step, by (what, source)."""


def trained(folder: str, root: str, smoothing: float, killed: bool) -> tuple[list[Any], Sums, Any]:
    """The logs, what plain PyTorch says of this rank's batches, and the position; of weights that do not change. If it
    is ``killed``, behind a checkpoint between two logs, it goes on from there."""
    with contextlib.chdir(folder):
        logs: list[dict[str, Any]] = []
        sums: Sums = []
        of = owners()

        def stop(state: Any, control: Any, **kwargs: Any) -> None:
            control.should_abort_without_save |= killed and state.global_step == 5

        def note(state: Any, control: Any, **kwargs: Any) -> None:
            logs.append(dict(kwargs["logs"]))

        for last in (4, 6) if killed else (6,):
            trainer = tiny.script(
                root, tiny.decoder(vocab_size=257), data().train, max_steps=6, global_batch_size=8, save_steps=4,
                save_strategy="steps", logging_steps=3, learning_rate=0.0, weight_decay=0.0,
                label_smoothing_factor=smoothing, per_device_train_batch_size=2, resume_from_checkpoint=True,
                callbacks=[tiny.acts(on_step_end=stop, on_log=note)],
            )  # fmt: skip
            noted = tiny.note_batches(trainer.strategy)
            trainer.train()
            killed = False
            for step in noted[: last - len(sums)]:
                sums.append(Counter())
                for batch in step:
                    with torch.no_grad():
                        logits = trainer.model(batch["input_ids"])
                    for ids, labels, each in zip(batch["input_ids"], batch["labels"][:, 1:], logits, strict=True):
                        name, padding = of[ids.numpy().tobytes()], {"ignore_index": IGNORED}
                        sums[-1]["loss", name] += float(
                            F.cross_entropy(each[:-1], labels, reduction="sum", label_smoothing=smoothing, **padding)
                        )
                        sums[-1]["targets", name] += int((labels != IGNORED).sum())
        return logs, sums, trainer.run.epochs.state_dict()


@pytest.mark.parametrize(("ranks", "smoothing", "killed"), [(1, 0.0, True), (1, 0.1, False), (2, 0.0, True)])
def test_sums_by_source_are_plain_pytorchs(ranks: int, smoothing: float, killed: bool) -> None:
    given = str(Path.cwd()), "run", smoothing, killed
    found = [trained(*given)] if ranks == 1 else run_ranks(ranks, trained, *given)
    logs, position = [each for each in found[0][0] if "tokens" in each], found[0][2]
    mixture = Mixture([Stretch.from_state(each) for each in position["stretches"]])
    assert len(logs) == 2
    for number, log in enumerate(logs):
        whole: Counter[tuple[str, str]] = Counter()
        for _, sums, _ in found:
            for step in sums[3 * number : 3 * number + 3]:
                whole.update(step)
        for name in NAMES:
            assert log[f"loss/{name}"] == pytest.approx(whole["loss", name] / whole["targets", name], rel=1e-6)
        assert log["targets"] == sum(whole["targets", name] for name in NAMES)
        assert log["loss"] * log["targets"] == pytest.approx(
            sum(log[f"loss/{name}"] * whole["targets", name] for name in NAMES)
        )
        assert log["tokens"] == sum(log[f"tokens/{name}"] for name in NAMES)
        dealt = {name: n - mixture.counts(24 * number)[name] for name, n in mixture.counts(24 * number + 24).items()}
        assert log["tokens/prose"] == 32 * dealt["prose"]
        sizes = {name: mixture.stretches[0].sources[name].samples for name in NAMES}
        for name in NAMES:
            assert log[f"epoch/{name}"] == pytest.approx(mixture.counts(24 * number + 24)[name] / sizes[name])


def test_a_loss_that_gives_one_sum_is_not_logged_by_source(capfd: pytest.CaptureFixture[str]) -> None:
    words = [*QUIET, "loss=linear_cross_entropy", "max_steps=2", "data.weight_schedule=[]"]
    assert forgather("train", "mix.yaml", *words, "output_dir=run") == 0
    assert capfd.readouterr().err.count("loss/NAME is not logged") == 1
    first = metrics("run")[0]
    assert {name for name in first if "/" in name} == {
        f"{each}/{name}" for each in ("tokens", "epoch") for name in NAMES
    }


def test_a_pipeline_logs_tokens_once_and_evaluates_by_source() -> None:
    words = [*QUIET, "max_steps=2", "data.weight_schedule=[]", "eval_steps=2", "per_device_train_batch_size=4"]
    assert forgather("train", "mix.yaml", *words, "output_dir=alone") == 0
    own = ["output_dir=run", "trainer=pipeline", "nproc_per_node=2", "n_microbatches=2"]
    [(code, output), _] = train_in_pool(Path.cwd(), [*words, *own], "mix.yaml")
    assert code == 0, output
    for one, alone in zip(metrics("run"), metrics("alone"), strict=True):
        assert not any(name.startswith("loss/") for name in one)
        for name in alone:
            if name.startswith(("tokens/", "epoch/", "eval_loss")):
                assert one[name] == pytest.approx(alone[name], rel=1e-4), name


@pytest.mark.parametrize("ranks", [1, 2])
def test_evaluation_by_source_adds_up_to_the_whole(ranks: int) -> None:
    given = str(Path.cwd()), "run"
    for most in (None, 2):
        found, wanted, whole = evaluated(*given, most) if ranks == 1 else run_ranks(ranks, evaluated, *given, most)[0]
        assert {name for name in found if name.startswith("eval_loss/")} == {f"eval_loss/{name}" for name in NAMES}
        for name in NAMES:
            assert found[f"eval_loss/{name}"] == pytest.approx(wanted[name], rel=1e-5)
        assert found["eval_loss"] == pytest.approx(whole, rel=1e-5)


def evaluated(folder: str, root: str, most: int | None) -> tuple[dict[str, float], dict[str, float], float]:
    """An evaluation, what plain PyTorch says of each source alone, and of their union."""
    with contextlib.chdir(folder):
        option: Any = config().data
        trainer = tiny.script(root, tiny.decoder(vocab_size=257), evaluated=data().eval, max_eval_samples=most,
                              per_device_eval_batch_size=3)  # fmt: skip
        found = trainer.evaluate()
        sums: dict[str, tuple[float, int]] = {}
        for name in NAMES:
            alone = load_data(option.option(name)).eval
            rows = [alone[n] for n in range(len(alone))][:most]
            ids, labels = (torch.stack([row[key] for row in rows]) for key in ("input_ids", "labels"))
            with torch.no_grad():
                logits = trainer.model(ids)[:, :-1].flatten(0, 1)
            targets = labels[:, 1:].flatten()
            total = float(F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum"))
            sums[name] = total, int((targets != IGNORED).sum())
        whole = sum(total for total, _ in sums.values()) / sum(count for _, count in sums.values())
        return found, {name: total / count for name, (total, count) in sums.items()}, whole


def test_batches_of_evaluation_hold_one_source() -> None:
    split = data().eval
    for size in (1, 2, 3):
        for most in (None, 1, 4):
            ranks = [EvalLoader(split, batch_size=4, rank=rank, size=size, max_samples=most) for rank in range(size)]
            batches = [batch for each in ranks for batch in each]
            assert all(len(set(batch[SOURCES][:, 0].tolist())) == 1 for batch in batches)
            rows = torch.cat([batch["input_ids"] for batch in batches])
            wanted = [n for part in split.parts_by_source.values() for n in part[:most]]
            assert torch.equal(rows, split.__getitems__(wanted)["input_ids"])
            assert [len(each) for each in ranks] == [sum(1 for _ in each) for each in ranks]


def test_padding_is_no_token() -> None:
    chats = "+data.sources.chats={type: instruct, files: [chats.jsonl], packing: pad, weight: 2}"
    dataset = data(chats, "+data.chat_template=chatml", "data.weight_schedule=[]", "seq_len=128").train
    made = loader(dataset, 8, 4)
    settle(made, made.state_dict(), 0, 9)
    step = next(iter(made))
    of = dict(zip(made.data.names, step.counts.by_source, strict=True))
    assert sum(of.values()) == step.counts.tokens
    mixture = Mixture([Stretch.from_state(each) for each in made.state_dict()["stretches"]])
    places = [place(mixture, p)[0] for p in range(8)]
    assert 0 < of["chats"] < 128 * places.count("chats")
    assert of["prose"] == 128 * places.count("prose")
    assert not any(SOURCES in batch for batch in step.microbatches)


def test_what_is_shown() -> None:
    words = [*QUIET, "max_steps=4", "eval_steps=4", "logging_steps=2"]
    assert forgather("train", "mix.yaml", *words, "callbacks=default", "callbacks.textgen=null", "output_dir=run",
                     "callbacks.control.enable_http=false") == 0  # fmt: skip
    curves = tiny.tensorboard(Path("run/tensorboard")).Tags()["scalars"]
    for name in NAMES:
        assert {f"train/loss/{name}", f"train/tokens/{name}", f"train/epoch/{name}", f"eval/loss/{name}"} <= {*curves}
    log = Path("run/logs/rank-0.log").read_text()
    last, evaluation = (each for each in metrics("run")[-3:] if "loss/prose" in each or "eval_loss/prose" in each)
    assert f"loss/prose {last['loss/prose']:.4f}" in log
    assert f"loss/prose {evaluation['eval_loss/prose']:.4g}" in log
    found = summarize(RunDir(Path("run"))).sources
    assert found == {
        **{f"{what}/{name}": last[f"{what}/{name}"] for what in ("epoch", "loss") for name in NAMES},
        **{f"eval_loss/{name}": evaluation[f"eval_loss/{name}"] for name in NAMES},
    }
    with drawing():
        titles = [axes.get_title(loc="left") for axes in draw_curves([RunDir(Path("run"))], Look()).get_axes()]
    assert {f"loss/{name}" for name in NAMES} <= {*titles}


def test_without_a_mixture_nothing_new_is_logged() -> None:
    words = ["train", "model=nano", "data=text", "data.files=[prose.txt]", "data.tokenizer=bytes", "seq_len=32",
             *QUIET, "max_steps=2", "eval_steps=2", "global_batch_size=4"]  # fmt: skip
    assert forgather(*words, "output_dir=run") == 0
    assert not [name for record in metrics("run") for name in record if "/" in name]
