"""The Trainer on several real ranks: what they agree on, what they count, save and write together."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import torch.distributed as dist
from parity import scratch
from ranks import RankError, run_ranks
from saving import damage, flip
from selection import some

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.callbacks.base import TrainerCallback, TrainerControl
from forgather_cli.checkpoint.load import Reader
from forgather_cli.data.loaders.collate import Counts, Step
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ConfigError
from forgather_cli.models.decoder import Decoder
from forgather_cli.run_dir import RunDir
from forgather_cli.trainer.from_python import ScriptJob
from forgather_cli.trainer.step_sync import Agreed, StepSync, Sum

LAYOUTS = {"ddp": ("trainer=ddp",), "fsdp2": ("trainer=fsdp2",), "pipeline": ("trainer=pipeline", "n_microbatches=2")}


def trained(root: str, *overrides: str) -> dict[str, Any]:
    ranks = "nproc_per_node=2" if dist.is_initialized() else "seed=42"
    trainer = tiny.train(tiny.config(Path(root), ranks, *overrides), RunDir(Path(root)))
    return {
        "step": trainer.state.global_step, "history": trainer.state.log_history,
        "tokens": trainer.run.metrics.total_tokens, "samples": trainer.run.metrics.total_samples,
        "flops": trainer.run.metrics.total_flops, "parameters": trainer.num_parameters,
        "rank_0": trainer.state.is_world_process_zero,
    }  # fmt: skip


@functools.cache
def single(*overrides: str) -> dict[str, Any]:
    return trained(str(scratch() / f"single-{single.cache_info().misses}"), *overrides)


def values(result: dict[str, Any], key: str) -> list[float]:
    return [record[key] for record in result["history"] if key in record]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_count_and_log_together_what_one_rank_does(layout: str, tmp_path: Path) -> None:
    settings = ("logging_steps=2", "logging_first_step=false", "data.ragged=true", "eval_steps=4", "save_strategy=no")
    alone = single(*settings)
    ranks = run_ranks(2, trained, str(tmp_path / layout), *LAYOUTS[layout], *settings)
    keys = ("loss", "grad_norm", "max_grad_norm", "eval_loss", "train_loss", "bits_per_byte", "eval_bits_per_byte")
    for result in ranks:
        for key in ("step", "tokens", "samples", "parameters"):
            assert result[key] == alone[key], key
        assert result["flops"] == pytest.approx(alone["flops"])
        for key in ("tokens", "eval_tokens"):
            assert values(result, key) == values(alone, key)
        for key in keys:
            assert values(alone, key)
            assert values(result, key) == pytest.approx(values(alone, key), rel=1e-5), key
    assert [result["rank_0"] for result in ranks] == [True, False]


def recomputing(root: str, *overrides: str) -> tuple[list[str], list[float]]:
    """(this rank's layers that recompute, gradient norms), under anomaly mode, which changes no number either."""
    run = Path(root)
    more = ("gradient_checkpointing=true", "gradient_checkpointing_every=2", "detect_anomaly=true", "nproc_per_node=2")
    trainer = tiny.train(tiny.config(run, *EVERY, *more, *overrides), RunDir(run))
    parts = [part for part in trainer.strategy.parts if isinstance(part, Decoder)]
    names = [name for part in parts for name, layer in part.model.layers.items() if "forward" in vars(layer)]
    return names, values({"history": trainer.state.log_history}, "grad_norm")


EVERY = ("num_hidden_layers=5", "residual_dropout=0.0", "logging_steps=1", "save_strategy=no", "eval_strategy=no")


@pytest.mark.parametrize("layout", some([*LAYOUTS, "ZBVZeroBubble"], "fsdp2"))
def test_every_second_layer_of_the_full_model_is_recomputed(layout: str, tmp_path: Path) -> None:
    words = LAYOUTS.get(layout) or ("trainer=pipeline", f"schedule={layout}", "n_microbatches=4")
    ranks = run_ranks(2, recomputing, str(tmp_path / "ranks"), *words)
    found = [names for names, _ in ranks]
    assert sorted(found[0] + found[1]) == ["0", "2", "4"] if "pipeline" in words[0] else found == [["0", "2", "4"]] * 2
    for _, norms in ranks:
        assert norms == pytest.approx(values(single(*EVERY), "grad_norm"), rel=1e-5)


def test_an_open_log_interval_goes_on_with_the_sums_of_all_ranks(tmp_path: Path) -> None:
    settings = ("max_steps=6", "logging_steps=6", "logging_first_step=false", "eval_strategy=no")
    alone = single(*settings)
    run_ranks(2, trained, str(tmp_path / "ranks"), "trainer=ddp", "save_steps=3", *settings)
    saved = RunDir(tmp_path / "ranks").checkpoint(3)
    went_on = single(*settings, f"resume_from_checkpoint={saved}")
    assert values(went_on, "loss") == pytest.approx(values(alone, "loss"), rel=1e-6)
    assert values(went_on, "grad_norm") == pytest.approx(values(alone, "grad_norm"), rel=1e-6)


def weights_and_moments(root: str, *overrides: str) -> tuple[list[float], dict[str, Any]]:
    run = Path(root)
    trainer = tiny.train(tiny.config(run, *overrides), RunDir(run))
    moments = {name: tensor.clone() for name, tensor in trainer.optimizer.state_tensors().items()}
    return values({"history": trainer.state.log_history}, "grad_norm"), moments


def test_ranks_that_train_by_themselves_resume_with_their_own_moments(tmp_path: Path) -> None:
    """Post-local SGD: a save waits for the next average, which is at steps 4, 6 and 8."""
    settings = (
        "trainer=ddp", "nproc_per_node=2", "post_local_sgd.enabled=true", "post_local_sgd.start_step=2",
        "post_local_sgd.period=2", "logging_steps=1", "eval_strategy=no", "max_steps=8", "deterministic=true",
        "data.ragged=true",
    )  # fmt: skip
    through = run_ranks(2, weights_and_moments, str(tmp_path / "through"), "save_steps=5", *settings)
    assert RunDir(tmp_path / "through").checkpoint_steps() == [6, 8]
    assert through[0][0] == through[1][0]  # the mean square over ranks is logged
    saved = RunDir(tmp_path / "through").checkpoint(6)
    again = run_ranks(2, weights_and_moments, str(tmp_path / "again"), f"resume_from_checkpoint={saved}", *settings)
    for rank in range(2):
        assert again[rank][0] == through[rank][0][6:]
        assert all(torch.equal(value, through[rank][1][name]) for name, value in again[rank][1].items())
    different = [n for n, value in through[0][1].items() if not torch.equal(value, through[1][1][n])]
    assert different
    alone = single("max_steps=8", f"resume_from_checkpoint={saved}", "data.ragged=true")
    assert alone["step"] == 8  # with the mean of both


def measured(root: str) -> dict[str, Any]:
    told: list[Any] = []

    def measures(prediction: Any) -> dict[str, float]:
        told.append(list(prediction))
        counted = prediction.label_ids[:, 1:] != -100
        right = prediction.predictions.argmax(-1)[:, :-1] == prediction.label_ids[:, 1:]
        return {"accuracy": right[counted].mean(), "rows": len(right), "losses": prediction.losses.mean()}

    trainer = tiny.script(
        f"{root}/out", None, evaluated=tiny.RandomTokens(23, ragged=True), model_init=tiny.decoder,
        compute_metrics=measures, per_device_eval_batch_size=3, include_for_metrics=["inputs", "loss"], seed=-1,
    )  # fmt: skip
    metrics = trainer.evaluate()
    trainer.save_model(f"{root}/saved")
    trainer.compute_metrics = None
    predicted = trainer.predict(tiny.RandomTokens(7, ragged=True))
    return {
        "metrics": {name: metrics[f"eval_{name}"] for name in ("accuracy", "rows", "loss")},
        "given": told[0],
        "predicted": (predicted.predictions, predicted.label_ids, predicted.metrics["test_loss"]),
        "strategy": trainer.strategy.name,
        "seed": trainer.run.seed,
    }


def test_evaluate_predict_and_save_model_on_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    one = measured(str(tmp_path / "one"))
    assert one["metrics"]["rows"] == 23
    ranks = run_ranks(2, measured, str(tmp_path / "two"))
    assert ranks[0]["seed"] == ranks[1]["seed"] != one["seed"], "rank 0's, drawn"
    for two in ranks:
        assert two["strategy"] == "ddp"
        assert two["metrics"] == pytest.approx(one["metrics"], rel=1e-6)
        assert len(two["given"]) == len(one["given"]) == 4  # predictions, labels, inputs, losses
        found, wanted = ((*each["given"][:3], *each["predicted"]) for each in (two, one))
        for mine, expected in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, expected, atol=1e-6)
    weights = [(tmp_path / run / "saved" / "model.safetensors").read_bytes() for run in ("one", "two")]
    assert weights[0] == weights[1]


def agreed() -> list[Any]:
    rank, group = dist.get_rank(), dist.new_group(backend="gloo")
    batch = {"input_ids": torch.zeros(2, 4, dtype=torch.int64), "labels": torch.zeros(2, 4, dtype=torch.int64)}

    def step_of(batches: list[Any]) -> Step:
        return Step(batches, Counts.of(batches))

    def started(step: Any, stop: int | None, saved: bool, copies: int) -> StepSync:
        sync = StepSync(TrainerControl(), ScriptJob(lambda: stop), group=group, world_size=2, copies=copies)
        sync.start(step, save_done=saved)
        return sync

    def read(sync: StepSync) -> tuple[Agreed, int | None]:
        agreed = sync.read()
        assert agreed is sync.read()
        sync.apply_requests(agreed.requests)
        sync.clear()
        assert sync.read() is None
        return agreed, sync.signum

    first = started(step_of([batch] * (rank + 1)), None, True, 1)
    second = started(step_of([batch]), 2 if rank else 15, rank == 0, 2)
    third = started(step_of([batch]) if rank else None, 10 if rank == 0 else None, True, 1)
    return [read(third), read(first), read(second), Sum([rank, 1], group).read()]


def test_sums_under_way_together_are_read_in_any_order() -> None:
    both = run_ranks(2, agreed)
    assert both[0] == both[1]
    (third, third_stop), (first, first_stop), (second, second_stop), numbers = both[0]
    assert first.counts == Counts(targets=18, tokens=24, square_lengths=96, samples=6, positions=24, units=18)
    assert (first.has_data, first_stop, first.saves_done) == (True, None, True)
    assert second.counts == Counts(
        targets=6, tokens=8, square_lengths=32, samples=2, positions=8, units=6
    )  # read by two
    assert (second.has_data, second_stop, second.saves_done) == (True, 15, False)
    assert (third.has_data, third_stop) == (False, 10)
    assert numbers == [1, 2]


# 12: told to stop by what is no stop signal
@pytest.mark.parametrize(("asked", "signum"), [(None, None), (2, 2), (1, 1), (12, 15)])
def test_one_rank_needs_no_group(asked: int | None, signum: int | None) -> None:
    heard: list[int] = []
    sync = StepSync(TrainerControl(), ScriptJob(lambda: asked, heard.append))
    assert [sync.poll(), sync.poll()] == [asked is not None] * 2
    assert heard == ([] if signum is None else [signum])
    assert sync.signum == signum


class DamagesTheLast(TrainerCallback):
    """Flips a bit of the weights of the checkpoint of step 4, on rank 0."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and kwargs["checkpoint"].name == "step-00000004":
            damage(kwargs["checkpoint"] / "model/model.safetensors", flip(-1))


class AccuracyOfRank0(TrainerCallback):
    def __init__(self, by_step: dict[int, float]) -> None:
        self.by_step = by_step

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero and state.global_step in self.by_step:
            kwargs["metrics"]["eval_accuracy"] = self.by_step[state.global_step]


def compares(root: str, callback: TrainerCallback, *settings: str) -> dict[str, Any]:
    config = tiny.config(Path(root), "trainer=ddp", "nproc_per_node=2", "eval_steps=2", *settings)
    data, refused = tiny.RandomTokens(8), ""
    trainer = Trainer(model_init=tiny.decoder, args=config, train_dataset=data, eval_dataset=data, callbacks=[callback])
    try:
        trainer.train()
    except ConfigError as error:
        refused = str(error)
    best = Path(trainer.state.best_model_checkpoint or "none").name
    found = {"step": trainer.state.global_step, "refused": refused, "saved": trainer.run_dir.checkpoint_steps()}
    return {**found, "best": (trainer.state.best_global_step, best), "weights": trainer.model.state_dict()}


LOADS_BEST = ("load_best_model_at_end=true", "save_steps=2")
BY_ACCURACY = ("metric_for_best_model=accuracy", "greater_is_better=true")


def test_a_damaged_best_checkpoint_is_loaded_by_no_rank(tmp_path: Path) -> None:
    settings = (*LOADS_BEST, "learning_rate=1e-2", "warmup_steps=0")
    ranks = run_ranks(2, compares, str(tmp_path), DamagesTheLast(), *settings)
    saved = Reader(RunDir(tmp_path).checkpoint(2))
    for found in ranks:
        assert found["best"] == (4, saved.path.name)
        assert all(torch.equal(saved.read(name), found["weights"][name]) for name in saved.model_names())


@pytest.mark.parametrize(
    ("accuracies", "step", "best", "told"),
    [({2: 0.5, 4: 0.5}, 4, (2, "step-00000002"), ""), ({}, 2, (None, "none"), "at step 2 has no accuracy; set")],
)
def test_ranks_miss_the_best_metric_together(
    tmp_path: Path, accuracies: dict[int, float], step: int, best: tuple[int | None, str], told: str
) -> None:
    """What rank 0 has counts: a callback may add a metric there alone."""
    callback = AccuracyOfRank0(accuracies)
    for found in run_ranks(2, compares, str(tmp_path), callback, *LOADS_BEST, *BY_ACCURACY):
        assert (found["step"], found["best"]) == (step, best)
        assert told in found["refused"]
        assert bool(told) == bool(found["refused"])


def test_ranks_save_the_best_of_rank_0_together(tmp_path: Path) -> None:
    callback = AccuracyOfRank0({2: 0.1, 4: 0.54, 6: 0.1, 8: 0.58})
    settings = ("save_strategy=best", "max_steps=9", "save_total_limit=null", *BY_ACCURACY)
    for found in run_ranks(2, compares, str(tmp_path), callback, *settings):
        assert (found["saved"], found["best"][0]) == ([2, 4, 8, 9], 8)


def test_divergence_ends_all_ranks_at_one_step(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, trained, str(tmp_path), "trainer=ddp", "learning_rate=1e30", "max_grad_norm=null", "max_steps=40")
    first, second = caught.value.causes.values()
    assert type(first).__name__ == type(second).__name__ == "DivergenceError"
    assert str(first) == str(second)


@pytest.mark.parametrize("epochs", [-1, 2])
def test_shards_of_uneven_length_end_training_together(tmp_path: Path, epochs: int) -> None:
    once, again = zip(*run_ranks(2, shards, str(tmp_path), epochs), strict=True)
    assert once[0] == once[1]
    assert once[0][1] == 6 * abs(epochs)  # of 2 samples each, the last of one: the shorter shard has 11
    assert again == (([], once[0][1]),) * 2  # there is nothing left


def shards(root: str, epochs: int) -> list[tuple[list[float], int]]:
    """(losses, steps) of a run, and of one that goes on with it."""
    rank, found = dist.get_rank(), []
    data = tiny.stream(tiny.RandomTokens((11, 30)[rank], rank))
    for resume in (False, True):
        trainer = tiny.script(
            root, None, data, num_train_epochs=epochs, save_strategy="epoch", logging_steps=1,
            global_batch_size=4, per_device_train_batch_size=2, lr_scheduler_type="constant", dispatch_batches=False,
        )  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
        losses = [record["loss"] for record in trainer.state.log_history if "grad_norm" in record]
        found.append((losses, trainer.state.global_step))
    return found


IDS = [[5, 9, 200, 31], [7]]


def written(root: str, *overrides: str) -> dict[str, Any]:
    run = Path(root)
    more = ("nproc_per_node=2",) if dist.is_initialized() else ()
    trainer = tiny.train(tiny.config(run, "save_strategy=no", "eval_strategy=no", *more, *overrides), RunDir(run))
    before = torch.get_rng_state()
    found = {
        "greedy": trainer.generate(IDS, max_new_tokens=12, temperature=0),
        "drawn": trainer.generate(["def ", ""], max_new_tokens=12, temperature=1.5, top_p=0.9, seed=7),
        "other seed": trainer.generate("def ", max_new_tokens=12, temperature=1.5, seed=8),
        "tensor": trainer.generate(torch.tensor(IDS[0]), max_new_tokens=3, do_sample=False),
    }
    assert torch.equal(torch.get_rng_state(), before)
    assert all(part.training for part in trainer.strategy.parts)
    if not dist.is_initialized():
        found["reference"] = [greedy(trainer.model, row, 12) for row in IDS]
    return found


def greedy(model: Any, row: list[int], count: int) -> list[int]:
    model.eval()
    ids = list(row)
    for _ in range(count):
        with torch.no_grad():
            token = int(model(input_ids=torch.tensor([ids]))[0, -1].argmax())
        if token == ByteTokenizer().eos_token_id:
            break
        ids.append(token)
    return ids


def test_every_strategy_writes_the_same_on_all_ranks(tmp_path: Path) -> None:
    alone = written(str(tmp_path / "single"))
    assert alone["greedy"] == alone.pop("reference")
    assert alone["drawn"][0].startswith("def ")
    assert alone["drawn"][0] != alone["other seed"]
    assert alone["tensor"] == alone["greedy"][0][:7]
    for layout, words in LAYOUTS.items():
        first, second = run_ranks(2, written, str(tmp_path / layout), *words)
        assert first == second, layout
        assert first == alone, layout


class Says(torch.nn.Module):
    """Writes the bytes of a text one after another, whatever the prompt."""

    def __init__(self, text: str, start: int) -> None:
        super().__init__()
        self.text, self.start, self.weight = text.encode(), start, torch.nn.Parameter(torch.zeros(()))

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*input_ids.shape, 257)
        logits[:, -1, (*self.text, 256)[input_ids.shape[1] - self.start]] = 9.0
        return logits + self.weight


def speaking(text: str, path: Path, start: int = 2, **given: Any) -> Trainer:
    return Trainer(Says(text, start), TrainingArguments(str(path)), processing_class=ByteTokenizer(), **given)


def test_texts_end_before_a_stop_and_at_the_end_token(tmp_path: Path) -> None:
    assert speaking("one two.", tmp_path).generate("ab", temperature=0) == "abone two."
    assert speaking("one two.", tmp_path).generate("ab", temperature=0, stop="tw") == "abone "
    assert speaking("one two.", tmp_path).generate(["ab", "cd"], temperature=0, stop=["x", "e"]) == ["abon", "cdon"]
    assert speaking("one", tmp_path).generate([1, 2], temperature=0) == [1, 2, *b"one"]
    assert speaking("one", tmp_path).generate([]) == []
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompts": "ab", "top_kk": 3}, ("generate: top_kk", "top_k")),
        ({"prompts": "ab", "generation_steps": 3}, ("generation_steps",)),
        ({"prompts": 3}, ("prompts: got a int",)),
        ({"prompts": [1, 999]}, ("prompts", "64 tokens", "999")),
        ({"prompts": [[1], []]}, ("prompts", "[]")),
        ({"prompts": [[1], "ab"]}, ("prompts",)),
        ({"prompts": "ab", "tokenizer": None}, ("prompts", "processing_class")),
        ({"prompts": [1], "stop": "x", "tokenizer": None}, ("stop", "processing_class")),
    ],
)
def test_what_it_cannot_continue_is_named(tmp_path: Path, given: dict[str, Any], words: tuple[str, ...]) -> None:
    tokenizer = given.pop("tokenizer", ByteTokenizer())
    trainer = Trainer(tiny.decoder(), TrainingArguments(str(tmp_path)), processing_class=tokenizer)
    with pytest.raises(ConfigError) as refused:
        trainer.generate(**given)
    assert all(word in str(refused.value) for word in words), str(refused.value)
