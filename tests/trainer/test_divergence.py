"""Runs that diverge: what the detector sees, how a run is stopped or rolled back, and what a kill leaves."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import saving
import tiny
import torch
from parity import LAYOUTS, LOSS, Share, composed_of, corpus, go_on, run_rank, scratch, train
from program import Process, forgather
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import IterableDataset
from two_ranks import SMALL

from forgather_cli.callbacks.base import Divergence, TrainerCallback, TrainerControl, TrainerState
from forgather_cli.callbacks.divergence import DivergenceDetector
from forgather_cli.checkpoint.load import newest_valid
from forgather_cli.checkpoint.manifest import read_manifest
from forgather_cli.checkpoint.retention import delete_abandoned, list_checkpoints
from forgather_cli.checkpoint.rollbacks import Rollback, append_rollback, read_rollbacks
from forgather_cli.config.decode import load_saved
from forgather_cli.config.schema import DivergenceSettings
from forgather_cli.data.build import load_data
from forgather_cli.data.order import Order
from forgather_cli.errors import CheckpointError, DivergenceError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.run_dir import RunDir
from forgather_cli.runs.summary import summarize
from forgather_cli.trainer import recovery

RUN = RunDir(Path("run"))


def detector(action: str = "rollback", **changes: object) -> list[str]:
    settings = {"threshold": 0.5, "patience": 1, "warmup": 1, "smoothing": 0.6, "action": action, **changes}
    return [f"+callbacks.divergence.{name}={value}" for name, value in settings.items()]


def add(name: str, cls: str, **settings: object) -> list[str]:
    return [f"+callbacks.{name}.{key}={value}" for key, value in {"_target_": cls, **settings}.items()]


SPIKE = add("spike", "diverging.Spike", at=8)
POISON = add("poison", "diverging.Poison", at=16)


class Fed:
    """A detector that is fed values, one per step."""

    def __init__(self, **settings: Any) -> None:
        self.detector = DivergenceDetector(DivergenceSettings(**settings))
        self.state, self.control = TrainerState(), TrainerControl()

    def feed(self, *values: float, key: str = "loss") -> int | None:
        """The step at which it acted."""
        for value in values:
            self.state.global_step += 1
            self.detector.on_log(None, self.state, self.control, logs={key: value, "learning_rate": 0.1})
            if self.control.divergence is not None:
                return self.state.global_step
        return None


def test_a_rise_of_the_mean_for_patience_values_is_a_divergence_and_one_bad_value_is_not() -> None:
    fed = Fed(warmup=3, action="stop")
    assert fed.feed(5.0, 4.0, 3.0, 2.0, 2.0, 2.0, 8.0, 2.0, 2.0, 2.0, 2.0, 2.0) is None
    assert fed.control == TrainerControl()
    assert fed.state.healthy
    assert fed.feed(9.0, 9.0) is None
    assert not fed.state.healthy
    assert fed.feed(9.0) == 15
    assert fed.control.should_training_stop
    assert not fed.control.should_abort_without_save
    divergence = fed.control.divergence
    assert divergence.sound_step == 12
    mean = 5.0
    means = [mean := 0.3 * v + 0.7 * mean for v in [5.0, 4.0, 3.0, 2, 2, 2, 8, 2, 2, 2, 2, 2, 9, 9, 9]]
    best = min(means)
    assert divergence.reason == (
        f"loss diverged by step 15: smoothed {means[-1]:.6g}, the best was {best:.6g} at step "
        f"{means.index(best) + 1}, and 3 values in a row were above {best + 1:.6g} (threshold=1)"
    )


def test_the_first_values_are_not_judged_and_thresholds_are_also_by_share() -> None:
    assert Fed(warmup=10, smoothing=1.0).feed(1.0, *[9.0] * 9) is None
    assert Fed(warmup=10, smoothing=1.0).feed(1.0, *[9.0] * 12) == 13
    values = (2.0, 2.0, 2.9, 2.9, 2.9)
    quick = {"warmup": 0, "smoothing": 1.0}
    assert Fed(threshold=None, relative_threshold=1.5, **quick).feed(*values) is None
    assert Fed(threshold=None, relative_threshold=1.4, **quick).feed(*values) == 5
    assert Fed(threshold=0.8, relative_threshold=1.5, **quick).feed(*values) == 5


def test_what_is_not_finite_is_one_at_once_and_leaves_nothing_to_save() -> None:
    for value in (math.nan, math.inf):
        fed = Fed()
        assert fed.feed(2.0, value) == 2
        assert fed.control.should_abort_without_save
        assert f"loss became {value} by step 2" in str(fed.control.divergence)


def test_other_metrics_are_judged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    quick: dict[str, Any] = {"warmup": 0, "smoothing": 1.0, "patience": 1}
    assert Fed(use_eval_loss=True, **quick).feed(2.0, 9.0) is None
    assert Fed(use_eval_loss=True, **quick).feed(2.0, 9.0, key="eval_loss") == 2
    assert Fed(metric_key="weight_norm", **quick).feed(2.0, 9.0, key="weight_norm") == 2
    Fed(metric_key="lose", **quick).feed(2.0, 9.0)
    assert caplog.text.count("logs have no 'lose' and are not judged; they have loss, learning_rate") == 1


def test_its_state_goes_on() -> None:
    values = (3.0, 2.0, 4.0, 2.5, 7.0, 7.0, 7.0, 7.0)
    for cut in range(len(values)):
        before, after = Fed(warmup=2), Fed(warmup=2)
        assert before.feed(*values[:cut]) is None or cut > 6
        if before.control.divergence is None:
            after.detector.load_state_dict(json.loads(json.dumps(before.detector.state_dict())))
            after.state.global_step = cut
            assert after.feed(*values[cut:]) == 7


BATCH = 8
SETTINGS = (*corpus(), "tokenizer=bytes", f"global_batch_size={BATCH}", "max_steps=24", "logging_steps=4",
            "save_steps=4", "save_total_limit=null", "callbacks.json={}")  # fmt: skip


def shares_of(layout: str, settings: tuple[str, ...], path: Path) -> list[Share]:
    config = composed_of((*settings, *LAYOUTS[layout].overrides))
    config = dataclasses.replace(config, output_dir=str(path))
    ranks = LAYOUTS[layout].ranks
    return [run_rank(config, path)] if ranks == 1 else run_ranks(ranks, run_rank, config, path)


@functools.cache
def expected_losses() -> list[float]:
    """Without the faults: three runs, of which the later begin behind the samples that are to be skipped."""
    single, root = LAYOUTS["single"], scratch() / "expected"
    first = train(single, (*SETTINGS, "+callbacks.probe.stop_after=8"), root / "1")
    seek = add("seek", "diverging.Seek", sample=12 * BATCH)
    settings = (*SETTINGS, "+callbacks.probe.stop_after=16", *seek)
    second = go_on(single, settings, RunDir(first.path).checkpoint(8), root / "2")
    seek = add("seek", "diverging.Seek", sample=23 * BATCH)
    third = go_on(single, (*SETTINGS, *seek), RunDir(second.path).checkpoint(16), root / "3")
    return first.losses + second.losses + third.losses


@pytest.mark.parametrize("layout", ["single", "ddp 2", "1F1B 2", "fsdp2 2"])
def test_a_run_goes_back_twice_and_ends_as_if_it_had_never_seen_the_skipped_samples(
    layout: str, tmp_path: Path
) -> None:
    shares, run = shares_of(layout, (*SETTINGS, *detector(), *SPIKE, *POISON), tmp_path), RunDir(tmp_path)
    data = load_data(composed_of(SETTINGS).data, seed=42).train
    order = Order(len(data), 42, 0)
    first, second = read_rollbacks(run)
    assert (first.number, first.from_step, first.to_step) == (1, 12, 8)
    assert first.reason.startswith("loss diverged by step 12: ")
    assert first.skipped_sample_ids == order[8 * BATCH : 12 * BATCH]
    assert (second.number, second.from_step, second.to_step) == (2, 19, 16)
    assert second.reason == "the gradient norm became nan by step 19"
    assert second.skipped_sample_ids == order[20 * BATCH : 23 * BATCH]
    assert (first.num_skipped_samples, second.num_skipped_samples) == (4 * BATCH, 3 * BATCH)

    by_data_rank = {share.data_rank: share for share in reversed(shares)}
    slices = [by_data_rank[rank].samples for rank in sorted(by_data_rank)]
    trained = [torch.cat(step) for step in zip(*slices, strict=True)]
    samples = torch.stack([data[number]["input_ids"] for number in order[: 31 * BATCH]])
    assert torch.equal(torch.cat(trained), samples), "some were not trained on once"

    losses = [sum(step) for step in zip(*(share.losses for share in shares), strict=True)]
    lasting = losses[:8] + losses[12:20] + losses[23:]
    for step, (ours, theirs) in enumerate(zip(lasting, expected_losses(), strict=True), 1):
        assert ours == theirs if layout == "single" else abs(ours - theirs) <= LOSS * theirs, f"step {step}"
    assert lasting[-1] < min(lasting[:8]), "it ends no better than it was before"

    assert [info.step for info in list_checkpoints(run)] == [4, 8, 12, 16, 20, 24]
    manifests = [read_manifest(run.checkpoint(step)) for step in run.checkpoint_steps()]
    assert [(m.healthy, m.rollbacks) for m in manifests] == [(True, n) for n in (0, 0, 1, 1, 2, 2)]
    records = [record for record in tiny.metrics(tmp_path) if "grad_norm" in record]
    assert [r["step"] for r in records if not r.get("abandoned")] == [1, 4, 8, 12, 16, 20, 24]
    assert [r["step"] for r in records if r.get("abandoned") is True] == [12]
    assert summarize(run).last_loss == pytest.approx(sum(lasting[20:]) / 4, rel=1e-5)


def test_what_only_the_last_norms_tell_takes_the_run_back_too(tmp_path: Path) -> None:
    words = ("max_steps=16", "logging_steps=5", *add("poison", "diverging.Poison", at=15))
    [share] = shares_of("single", (*SETTINGS, *detector(), *words), tmp_path)
    assert len(share.losses) == 20
    assert [math.isfinite(loss) for loss in share.losses] == [True] * 15 + [False] + [True] * 4
    [record] = read_rollbacks(RunDir(tmp_path))
    assert (record.from_step, record.to_step) == (16, 12)
    newest = list_checkpoints(RunDir(tmp_path))[-1]
    assert (newest.step, newest.final, newest.rollbacks) == (16, True, 1)
    assert all(math.isfinite(value) for value in newest.metrics.values())


@pytest.mark.parametrize("kind", ["weight", "moment"])
@pytest.mark.parametrize("async_save", [True, False])
def test_void_weights_and_moments_are_never_published(tmp_path: Path, kind: str, async_save: bool) -> None:
    """One number of them, after the last gradient norm was found finite."""

    def void(state: Any, control: Any, trainer: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == state.max_steps:
            tensors = trainer.model.state_dict() if kind == "weight" else trainer.optimizer.state_tensors()
            next(t for t in tensors.values() if t.ndim == 2)[-1, -1] = math.nan

    saves = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "async_save": async_save}
    trainer = tiny.script(tmp_path, callbacks=[tiny.acts(on_optimizer_step=void)], **saves)
    with pytest.raises(DivergenceError, match=r"step 4: .*not finite; .*were not saved; forgather resume"):
        trainer.train()
    [kept] = list_checkpoints(RunDir(tmp_path))
    assert (kept.step, kept.healthy, kept.final) == (2, True, False)


def test_a_buffer_may_hold_infinities(tmp_path: Path) -> None:
    model = tiny.decoder()
    model.register_buffer("mask", torch.full((4, 4), -math.inf).triu(1))
    tiny.script(tmp_path, model, max_steps=1, save_strategy="steps").train()
    assert RunDir(tmp_path).checkpoint_steps() == [1]


def test_after_max_rollbacks_the_run_is_stopped(tmp_path: Path) -> None:
    words = (*SETTINGS, *detector(max_rollbacks=2), *add("spike", "diverging.Spike", at=8, times=9))
    with pytest.raises(DivergenceError, match=r"step 12: .*; max_rollbacks=2 are used up; .* step-00000008: give it"):
        shares_of("single", words, tmp_path)
    run = RunDir(tmp_path)
    assert [(each.number, each.to_step) for each in read_rollbacks(run)] == [(1, 8), (2, 4)]
    with pytest.raises(DivergenceError, match="max_rollbacks=2 are used up"):  # over the life of the run
        shares_of("single", (*words, "resume_from_checkpoint=true"), tmp_path)
    assert len(read_rollbacks(run)) == 2


WORDS = [*SMALL, "trainer=single", "optimizer=adamw", "learning_rate=2e-3", "max_steps=24", "logging_steps=4",
         "save_steps=4"]  # fmt: skip
"""16 steps of 4 samples to an epoch; SMALL ends with the run directory."""
RESTARTED = ("trainer=ddp", "nproc_per_node=1", "max_restarts=2")
"""A rank of torchrun's; that all ranks end at one step, test_trainer_ranks asks."""


def noted() -> list[tuple[int, list[list[int]]]]:
    """(step, token ids) of every step that any process has trained, in the order of time."""
    return [tuple(json.loads(line)) for line in Path("notes-0.jsonl").read_text().splitlines()]


def in_order(start: int, stop: int) -> list[list[int]]:
    """Token ids at places of the global order, epoch after epoch."""
    data = load_data(load_saved(RUN.config).data, seed=42).train
    numbers = [number for epoch in range(2) for number in Order(len(data), 42, epoch)[:]]
    return [data[number]["input_ids"].tolist() for number in numbers[start:stop]]


class Dies(TrainerCallback):
    """Its process is killed as soon as a rollback is recorded."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        def dies(run: RunDir, rollback: Rollback) -> None:
            append_rollback(run, rollback)
            os.kill(os.getpid(), signal.SIGKILL)

        recovery.append_rollback = dies


@pytest.mark.usefixtures("own_directory")
def test_a_kill_right_after_the_rollback_repeats_neither_it_nor_the_skipped_samples() -> None:
    more = [*add("notes", "diverging.Notes"), *add("dies", "test_divergence.Dies")]
    with Process("train", *WORDS, *detector(), *SPIKE, *more) as job:
        assert job.finish() == -signal.SIGKILL, job.output
    before = noted()
    assert forgather("resume", "run", "~callbacks.dies") == 0
    [record] = read_rollbacks(RUN)
    assert (record.from_step, record.to_step, record.num_skipped_samples) == (12, 8, 16)
    assert record.data == [{"epoch": 0, "sample": 48}]

    after = noted()[len(before) :]
    assert after[0][0] == 9, "it did not go on from the checkpoint of the rollback"
    assert [step for step, _ in after] == list(range(9, 25))
    assert [row for _, rows in before[:12] for row in rows] == in_order(0, 48)
    assert [row for _, rows in after for row in rows] == in_order(48, 112), "data behind the skipped samples"
    assert list_checkpoints(RUN)[-1].rollbacks == 1
    lasting = [r for r in tiny.metrics(RUN.root) if "grad_norm" in r and not r.get("abandoned")]
    assert [r["step"] for r in lasting] == [1, 4, 8, 12, 16, 20, 24]
    assert [r["step"] for r in tiny.metrics(RUN.root) if r.get("abandoned")][:1] == [12]
    assert lasting[-1]["loss"] < min(r["loss"] for r in lasting[:3])


@pytest.mark.usefixtures("own_directory")
@pytest.mark.parametrize(("action", "ranks"), [("stop", ()), ("abort", RESTARTED)])
def test_a_divergence_ends_the_run_as_failed(action: str, ranks: tuple[str, ...]) -> None:
    """And is not restarted: from the same checkpoint it would come again."""
    with Process("train", *WORDS, *ranks, *detector(action), *SPIKE) as job:
        assert job.finish() == 1, job.output
    (last,) = [line for line in job.lines if re.match(r"error: (rank \d: )?loss diverged by step 12: smoothed ", line)]
    last = re.sub(r"rank \d: ", "", last)
    assert job.lines[-2:] == ["to resume from step 8:", "forgather resume run"], job.output
    assert "restart 1" not in job.output
    assert "forgather resume run resumes from the newest healthy checkpoint, step-00000008" in last
    ended = read_exit_record(RUN)
    assert (ended.code, ended.reason) == (1, last.removeprefix("error: "))
    assert [(info.step, info.healthy) for info in list_checkpoints(RUN)][-1] == (
        (12, False) if action == "stop" else (8, True)
    )
    if action == "stop":
        assert forgather("resume", "run") == 0
        assert [(info.step, info.healthy) for info in list_checkpoints(RUN)][-1] == (24, True)
        assert [r["step"] for r in tiny.metrics(RUN.root) if "grad_norm" in r] == [1, 4, 8, 12, 16, 20, 24]


class Shard(IterableDataset[dict[str, Tensor]]):
    """Samples of a rank's own, numbered by their first two tokens, with a position of their own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank, self._next = rank, 0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        while self._next < 60:
            tokens = torch.tensor([self._rank, self._next, *range(2, 8)])
            self._next += 1
            yield {"input_ids": tokens, "labels": tokens.clone()}

    def state_dict(self) -> dict[str, Any]:
        return {"next": torch.tensor(self._next)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next = int(state["next"])


def asks(at: int | None) -> TrainerCallback:
    """Has the run rolled back after a step, once in this process."""
    left = [at]

    def ask(state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == left[0]:
            left[0] = None
            control.divergence = Divergence("asked for", "rollback")

    return tiny.acts(on_step_end=ask)


def streamed(root: str, at: int | None, steps: int) -> tuple[list[list[int]], int]:
    rank = torch.distributed.get_rank()
    trainer = tiny.script(
        root, None, Shard(rank), callbacks=[asks(at)], max_steps=steps, global_batch_size=4, save_steps=2,
        save_strategy="steps", dispatch_batches=False, logging_steps=1, resume_from_checkpoint=True,
    )  # fmt: skip
    noted = tiny.note_batches(trainer.strategy)
    trainer.train()
    numbers = [[int(number) for batch in step for number in batch["input_ids"][:, 1]] for step in noted]
    return numbers, trainer.run.metrics.total_samples


def test_ranks_with_streams_of_their_own_each_go_on_behind_what_they_skipped(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for numbers, samples in run_ranks(2, streamed, str(tmp_path), 5, 5):
        assert numbers == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]]  # steps 1 to 5, and 5 once more
        assert samples == 20
    [record] = read_rollbacks(run)
    assert (record.from_step, record.to_step, record.num_skipped_samples) == (5, 4, 4)
    assert record.skipped_sample_ids is None
    assert len(record.data) == len(record.tensors) == 2

    shutil.rmtree(run.checkpoint(5))  # as if it had been killed before it was saved
    for numbers, _ in run_ranks(2, streamed, str(tmp_path), None, 6):
        assert numbers == [[10, 11], [12, 13]]


def test_checkpoints_that_the_run_has_gone_back_from_are_never_resumed_from(tmp_path: Path) -> None:
    run = saving.saved_run(tmp_path, 1, 2, 3)
    record = Rollback(1, "2026-01-01T00:00:00+00:00", "x", 3, 1, 2, [5, 6], [{"epoch": 0, "sample": 3}])
    append_rollback(run, record)
    with run.rollbacks.open("ab") as file:
        file.write(b'{"number": 2, "to_')  # of a job that was killed while it wrote
    assert read_rollbacks(run) == [record]
    assert [info.abandoned for info in list_checkpoints(run)] == [False, True, True]
    newest = newest_valid(run)
    assert newest.step == 1

    saver = saving.checkpointer(tmp_path)
    info = {"strategy": "single", "config_fingerprint": "f1", "rollbacks": 1}
    assert saving.save(saver, 2, info=info)  # of the same config, and yet another one
    assert [(each.abandoned, each.rollbacks) for each in list_checkpoints(run)] == [(False, 0), (False, 1), (True, 0)]
    delete_abandoned(run)
    assert run.checkpoint_steps() == [1, 2]
    append_rollback(run, dataclasses.replace(record, number=2, from_step=4, to_step=2))
    assert [each.number for each in read_rollbacks(run)] == [1, 2]
    run.rollbacks.write_bytes(b"{}\n")
    with pytest.raises(CheckpointError, match=r"rollbacks.jsonl:1: is damaged"):
        newest_valid(run)


def test_without_a_healthy_checkpoint_a_rollback_is_refused(tmp_path: Path) -> None:
    trainer = tiny.script(tmp_path, max_steps=4, save_strategy="steps", save_steps=100, callbacks=[asks(2)])
    with pytest.raises(DivergenceError, match="asked for; there is no healthy checkpoint to roll back to"):
        trainer.train()
    assert read_rollbacks(RunDir(tmp_path)) == []
