"""``forgather plan --fit``: predictions against what torch's allocator hands out, sizes, ways to more, real steps."""

from __future__ import annotations

import gc
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
from program import document, printed
from torch.profiler import ProfilerActivity, profile

from forgather_cli.config.schema import Config, DDPSettings
from forgather_cli.plan.fit import Budget, Fit, budget_of, find_fit
from forgather_cli.plan.run import make_plan
from forgather_cli.run_dir import RunDir

MIB = 2**20
SHORT = ("max_steps=2", "eval_strategy=no", "save_strategy=no", "global_batch_size=null", "~callbacks")
MANY_TOKENS = ("seq_len=128", "per_device_train_batch_size=8")
MANY_WEIGHTS = ("seq_len=32", "per_device_train_batch_size=1", "hidden_size=256", "num_attention_heads=4")

# settings -> predicted over measured, at least and at most: a prediction may be too low by a tenth at most
CASES: dict[tuple[str, ...], tuple[float, float]] = {
    MANY_TOKENS: (0.95, 1.15),
    (*MANY_TOKENS, "gradient_checkpointing=true"): (0.95, 1.2),
    (*MANY_TOKENS, "gradient_checkpointing=true", "gradient_checkpointing_every=2", "num_hidden_layers=5"): (0.9, 1.2),
    (*MANY_TOKENS, "loss=linear_cross_entropy"): (0.9, 1.15),
    (*MANY_TOKENS, "precision=bf16"): (0.95, 1.2),
    (*MANY_TOKENS, "model.vocab_size=4096"): (0.95, 1.15),
    MANY_WEIGHTS: (0.95, 1.15),
    (*MANY_WEIGHTS, "fuse_optim_with_backward=true", "max_grad_norm=null"): (0.95, 1.15),
}  # fmt: skip


@pytest.mark.parametrize("overrides", CASES, ids=lambda words: " ".join(words[1:]))
def test_predictions_are_near_what_is_allocated(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    low, high = CASES[overrides]
    assert low <= predicted_over_measured(tiny.config(tmp_path, *SHORT, *overrides), tmp_path) <= high


def predicted_over_measured(config: Config, path: Path) -> float:
    """Of the bytes of all tensors together at the fullest moment of a training."""
    gc.collect()  # models of earlier tests that went meanwhile would count as given back
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        tiny.train(config, RunDir(path))
    events = [(e.start_ns(), e.nbytes()) for e in trace.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for _, size in sorted(events):
        now += size
        most = max(most, now)
    return make_plan(config).fullest.tensors / most


WORDS = ("device=cpu", "seq_len=256", "global_batch_size=96", "per_device_train_batch_size=4", "async_save=false")


def fit(tmp_path: Path, mib: int, *overrides: str) -> Fit:
    def load(more: Sequence[str]) -> Config:
        return tiny.config(tmp_path, *WORDS, *overrides, *more)

    config = load(())
    return find_fit(config, make_plan(config).micro_batch, Budget(mib * MIB, 0, False, "the test"), load)


def test_the_largest_is_the_largest_divisor_that_is_predicted_to_fit(tmp_path: Path) -> None:
    found = fit(tmp_path, 58)
    assert found.largest.micro_batch == 12
    assert predicted(tmp_path, 12) <= 58 * MIB < predicted(tmp_path, 16)
    assert found.largest.memory == predicted(tmp_path, 12)
    assert (found.now, found.fits, found.most) == (4, True, 96)
    assert found.sizes == [1, 2, 3, 4, 6, 8, 12]
    assert (found.limit, found.beyond) == ("memory", (16, predicted(tmp_path, 16)))
    assert found.free == 58 * MIB - predicted(tmp_path, 12)
    everything = fit(tmp_path, 10_000)
    assert (everything.largest.micro_batch, everything.ways) == (96, [])
    assert (everything.limit, everything.beyond) == ("global_batch_size", None)
    assert everything.free == 10_000 * MIB - predicted(tmp_path, 96)


def predicted(tmp_path: Path, size: int) -> int:
    return make_plan(tiny.config(tmp_path, *WORDS, f"per_device_train_batch_size={size}")).fullest.total


def test_ways_to_more_are_listed_cheapest_first_with_what_they_bring(tmp_path: Path) -> None:
    found = fit(tmp_path, 32, "model.vocab_size=2048")
    names = [" ".join(way.overrides) for way in found.ways]
    assert names[0] == "loss=linear_cross_entropy"
    assert "precision=bf16_true" in names[1:]
    assert not any("trainer=" in name for name in names)  # a single device shares nothing
    times = {" ".join(way.overrides): way.step_time for way in found.ways}
    assert times["loss=linear_cross_entropy"] == 1
    for way in found.ways:
        assert (way.micro_batch or 0) > (found.largest.micro_batch or 0)
        assert (way.memory or 0) <= 32 * MIB
    ranks = fit(
        tmp_path, 32, "trainer=ddp", "nproc_per_node=2", "hidden_size=256", "num_attention_heads=4", "seq_len=64"
    )
    assert ("trainer=fsdp2",) in [way.overrides for way in ranks.ways]


def test_where_nothing_fits_ways_are_put_together(tmp_path: Path) -> None:
    found = fit(tmp_path, 5, "model.vocab_size=4096", "seq_len=32")
    assert found.largest.micro_batch is None
    assert found.needed > 5 * MIB
    [together] = found.ways
    assert {"loss=linear_cross_entropy", "precision=bf16_true"} <= set(together.overrides) - {"precision=bf16"}
    assert (together.memory or 0) <= 5 * MIB


def test_pipelines_take_multiples_of_their_microbatches(tmp_path: Path) -> None:
    found = fit(tmp_path, 1000, "trainer=pipeline", "n_microbatches=4", "nproc_per_node=2", "global_batch_size=null")
    assert found.most is None
    assert all(size % 4 == 0 for size in found.sizes)
    assert found.largest.micro_batch == found.sizes[-1]


def test_sizes_are_read_as_people_write_them_and_ranks_share_the_machines(tmp_path: Path) -> None:
    config = tiny.config(tmp_path, "device=cpu")
    for text, size in {"24GiB": 24 * 2**30, "24G": 24 * 2**30, "0.5 gb": 2**29, "800MiB": 800 * MIB}.items():
        budget = budget_of(config, text)
        assert budget.total == size
        assert budget.usable == size - budget.kept_back < size
    one, four = budget_of(config, None), budget_of(replace(config, trainer=DDPSettings(), nproc_per_node=4), None)
    assert one.total / four.total == pytest.approx(4, rel=0.2)
    assert "shared by 4 ranks" in four.source


def test_the_command_confirms_by_real_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """The prediction is far off for the process, which is larger than the memory it is given."""
    words = ["model=nano", "data=synthetic", "seq_len=16", "device=cpu", "global_batch_size=4"]
    found = document(capsys, "plan", "--fit", "--memory", "2GiB", "--confirm", *words)
    assert found["confirmed"]["micro_batch"] == found["largest"]["micro_batch"] == 4
    assert 100 * MIB < found["confirmed"]["peak"] < 2048 * MIB
    assert found["confirmed"]["too_large"] == []
    assert (found["fits"], found["limit"]) == (True, "global_batch_size")
    assert found["free"] == found["budget"]["usable"] - found["largest"]["memory"]


def test_the_command_in_words_and_its_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=nano", "data=synthetic", "device=cpu"]
    for memory, batch, said in (
        ("500MiB", 64, r"now 8 sequences at a time, about .* largest per_device_train_batch_size="
                       r".*limited by memory: the next size, \d+, needs about .* stay free"),
        ("24GiB", 4, r"limited by global_batch_size=4, not memory; 2\d\.\d GiB stay free"),
    ):  # fmt: skip
        shown = printed(capsys, "plan", "--fit", "--memory", memory, *words, f"global_batch_size={batch}").out
        assert re.search(said, " ".join(shown.split()))
    for options, told in (
        (["--memory", "1GiB"], "--memory: needs --fit"),
        (["--confirm"], "--confirm: needs --fit"),
        (["--step-time", "1"], "--step-time: needs +callbacks.diloco={} or settings of its server"),
        (
            ["diloco.compression=int8", "callbacks.diloco.compression=int4"],
            "callbacks.diloco.compression: is int4, and",
        ),
        (["--fit", "--memory", "much"], "--memory: must be a size such as 24GiB or 800MiB, got 'much'"),
        (["--fit", "--params"], "--params: says nothing to --fit"),
    ):
        code, _, err = printed(capsys, "plan", *options, *words)
        assert (code, told in err) == (2, True)
    own = ["--fit", "model._target_=torch.nn.Identity", *words[1:]]
    assert "--fit: the activations of this model are not known" in printed(capsys, "plan", *own).err
