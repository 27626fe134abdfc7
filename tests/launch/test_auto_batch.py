"""``auto_find_batch_size``: out of memory in the first steps, and the run starts again with a smaller micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import yaml
from hungry import model as hungry_model
from program import Process, forgather
from two_ranks import ended

from forgather_cli.config.batch import BatchPlan, smaller_micro_batch
from forgather_cli.config.load import load_config
from forgather_cli.errors import OutOfMemoryError
from forgather_cli.trainer.script import Trainer

RUN = (
    "model._target_=hungry.model", "precision=fp32", "data=synthetic", "data.seq_len=16", "data.num_samples=256",
    "data.num_eval_samples=8", "callbacks=minimal", "eval_strategy=no", "save_strategy=no", "global_batch_size=8",
    "max_steps=3", "logging_steps=1", "warmup_steps=1", "optimizer=adamw",
)  # fmt: skip
FOUND = "auto_find_batch_size: found per_device_train_batch_size={}, which forgather resume uses too"


def saved(run: str, file: str = "config.yaml") -> tuple[int, int | None]:
    tree = yaml.safe_load(Path(run, file).read_text())
    return tree["per_device_train_batch_size"], tree["gradient_accumulation_steps"]


def test_one_device_starts_again_until_it_fits_and_the_result_is_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("train", *RUN, "auto_find_batch_size=true", "save_strategy=steps", "output_dir=found") == 0
    told = capsys.readouterr()
    assert [line for line in told.err.splitlines() if "auto_find" in line] == [
        "auto_find_batch_size: out of memory with 8 sequences at a time; starting again with 4",
        "auto_find_batch_size: out of memory with 4 sequences at a time; starting again with 2",
    ]
    assert "error" not in told.err
    assert FOUND.format(2) in told.out
    assert saved("found") == (2, None)
    assert forgather("train", *RUN, "model.limit=8", "output_dir=whole") == 0
    for (step, *found), (also, *whole) in zip(
        tiny.training_curve(Path("found")), tiny.training_curve(Path("whole")), strict=True
    ):
        assert (step, found) == (also, pytest.approx(whole, rel=1e-5))
    assert forgather("resume", "found", "max_steps=4") == 0
    assert "out of memory" not in capsys.readouterr().err
    assert saved("found", "config.1.yaml") == (2, None)
    assert [step for step, *_ in tiny.training_curve(Path("found"))] == [1, 2, 3, 4]


def test_without_a_global_batch_the_accumulation_grows(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("global_batch_size=null", "per_device_train_batch_size=6", "gradient_accumulation_steps=2", "max_steps=1")
    assert forgather("train", *RUN, *words, "auto_find_batch_size=true", "output_dir=run") == 0
    assert saved("run") == (1, 12)
    assert "with 6 sequences at a time; starting again with 3" in (told := capsys.readouterr().err)
    assert "with 3 sequences at a time; starting again with 1" in told
    assert tiny.metrics(Path("run"))[-1]["effective_batch_size"] == 12


def test_ranks_start_again_together_from_what_was_saved() -> None:
    """The second of two ranks has no memory in its third step; the first one waits for it in a collective."""
    words = ("trainer=ddp", "nproc_per_node=2", "model.rank=1", "model.step=2", "save_strategy=steps", "save_steps=1")
    with Process("train", *RUN, *words, "auto_find_batch_size=true", "output_dir=run") as job:
        assert job.finish() == 0, job.output
    assert "auto_find_batch_size: out of memory with 4 sequences at a time; starting again with 2" in job.output
    assert "resumed from run/checkpoints/step-00000002" in job.output
    assert FOUND.format(2) in job.output
    assert "Traceback" not in job.output
    assert ended().reason == "done"
    assert [step for step, *_ in tiny.training_curve(Path("run"))] == [1, 2, 3]
    assert "out of memory in step 3" in Path("run/logs/rank-1.log").read_text()


LIMITED = """
import resource, sys
import torch, torch._dynamo, forgather_cli.worker, forgather_cli.trainer.script  # what these map is not counted
from forgather_cli.config.load import load_config
from forgather_cli.launch.start import launch

torch.set_num_threads(1)
mapped = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (mapped + (700 << 20), resource.RLIM_INFINITY))
sys.exit(launch(lambda: load_config(None, {words!r}), forgather_cli.worker.work))
"""


@pytest.mark.full
def test_memory_that_the_cpus_allocator_does_not_get() -> None:
    """128 sequences of 512 tokens are more than 1 GiB of activations; 0.7 GiB are left to the process."""
    big = ["data.seq_len=512", "global_batch_size=128", "per_device_train_batch_size=128", "max_steps=1"]
    big += ["model._target_=hungry.large", "output_dir=run", "auto_find_batch_size=true"]
    words = [word for word in RUN if word.partition("=")[0] not in {each.partition("=")[0] for each in big}]
    with Process(code=LIMITED.format(words=[*words, *big])) as job:
        assert job.finish() == 0, job.output
    assert "auto_find_batch_size: out of memory with 128 sequences at a time; starting again with 64" in job.output
    assert saved("run")[0] in (8, 16, 32, 64)
    assert "can't allocate memory" in Path("run/logs/rank-0.log").read_text()


def test_past_its_first_steps_a_run_ends_with_the_remedies(tmp_path: Path) -> None:
    config = load_config(None, [*RUN, f"output_dir={tmp_path}", "auto_find_batch_size=true", "max_steps=20"]).config
    for forwards, expected in ((9, 4), (10, None)):
        model = hungry_model(64, limit=2, step=forwards)
        with pytest.raises(OutOfMemoryError, match=f"out of memory in step {forwards + 1}") as caught:
            Trainer(model, config, train_dataset=tiny.RandomTokens(256)).train()
        assert (caught.value.batch, caught.value.smaller_batch) == (8, expected)


def test_sizes_that_are_left() -> None:
    assert smaller_micro_batch(BatchPlan(96, 12, 8)) == 6
    assert smaller_micro_batch(BatchPlan(30, 15, 2)) == 6  # 30 sequences per rank in fives
    assert smaller_micro_batch(BatchPlan(27, 9, 3)) == 3
    assert smaller_micro_batch(BatchPlan(8, 1, 8)) is None
    assert smaller_micro_batch(BatchPlan(32, 16, 2), multiple_of=4) == 8
    assert smaller_micro_batch(BatchPlan(32, 4, 8), multiple_of=4) is None


def test_nothing_smaller_is_an_error_as_without_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("per_device_train_batch_size=1", "model.limit=0", "auto_find_batch_size=true", "output_dir=run")
    assert forgather("train", *RUN, *words) == 1
    told = capsys.readouterr().err
    assert "error: out of memory in step 1, micro-batches of 1 x 16 tokens" in told
    assert "starting again" not in told
