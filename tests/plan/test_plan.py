"""``forgather plan`` under every strategy: memory per rank against measured bytes, stages, batches, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
from processors import pretend
from program import document, shown
from ranks import run_ranks
from selection import some
from torch import Tensor

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.config.decided import decided
from forgather_cli.plan.run import RunPlan, make_plan
from forgather_cli.run_dir import RunDir
from forgather_cli.shards import local

# embeddings whose rows 2 and 4 do not divide, so that shards differ and are padded
SMALL = ("model.num_hidden_layers=4", "model.vocab_size=259", "max_steps=1", "eval_strategy=no", "save_strategy=no")
TIED = "model.tie_word_embeddings=true"

CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ("trainer=single",)),
    "ddp": (2, ("trainer=ddp",)),
    "ddp with buckets of its own": (2, ("trainer=ddp", "gradient_as_bucket_view=false")),
    "fsdp2": (2, ("trainer=fsdp2",)),
    "hsdp": (4, ("trainer=fsdp2", "replicate=2")),
    "1F1B": (2, ("trainer=pipeline",)),
    "1F1B, sharded": (4, ("trainer=pipeline", "shard=2")),
    "1F1B, tied": (2, ("trainer=pipeline", TIED)),
    "ZBVZeroBubble": (2, ("trainer=pipeline", "schedule=ZBVZeroBubble")),
    "bf16_true": (1, ("trainer=single", "precision=bf16_true")),
    "bf16_true, fsdp2": (2, ("trainer=fsdp2", "precision=bf16_true")),
    "fp16": (1, ("trainer=single", "precision=fp16")),
    "ZBVZeroBubble, tied": (2, ("trainer=pipeline", "schedule=ZBVZeroBubble", TIED)),
}


class Measure(TrainerCallback):
    """Bytes of gradients before the first step and of weights and optimizer state after it."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.gradients = num_bytes([p.grad for p in parameters(kwargs["trainer"]) if p.grad is not None])

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = kwargs["trainer"]
        states = [each for optimizer in trainer.optimizer.optimizers for each in optimizer.state.values()]
        trainer.measured = {
            "weights": num_bytes(parameters(trainer)),
            "gradients": self.gradients,
            "optimizer": num_bytes([t for each in states for t in each.values() if isinstance(t, Tensor)]),
        }


def parameters(trainer: Any) -> list[Any]:
    return [p for part in trainer.strategy.parts for p in part.parameters()]


def num_bytes(tensors: list[Any]) -> int:
    """Of the memory behind ``tensors``; what several of them share counts once."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def measured(path: Path, overrides: tuple[str, ...]) -> dict[str, int]:
    config = tiny.config(path, *SMALL, *overrides, "+callbacks.measure._target_=test_plan.Measure")
    found: dict[str, int] = tiny.train(config, RunDir(path)).measured
    return found


def plan(path: Path, world: int, *overrides: str) -> RunPlan:
    ranks = (f"nproc_per_node={world}",) if world > 1 else ()
    return make_plan(tiny.config(path, *SMALL, *overrides, *ranks))


@pytest.mark.parametrize(
    "case", some(CASES, "single", "ddp", "fsdp2", "1F1B, sharded", "ZBVZeroBubble, tied", "bf16_true")
)
def test_memory_is_within_15_percent_of_what_ranks_hold(tmp_path: Path, case: str) -> None:
    world, overrides = CASES[case]
    made = plan(tmp_path, world, *overrides)
    held = [measured(tmp_path, overrides)] if world == 1 else run_ranks(world, measured, tmp_path, overrides)
    assert len(made.ranks) == world
    for rank, own in zip(made.ranks, held, strict=True):
        for kind, size in own.items():
            assert getattr(rank, kind) == pytest.approx(size, rel=0.15), (case, rank.rank, kind)


def test_data_ranks_share_the_batch(tmp_path: Path) -> None:
    batch = ("global_batch_size=24", "per_device_train_batch_size=4")
    for world, words, expected in (
        (3, ("trainer=ddp",), (4, 2)), (3, ("trainer=fsdp2",), (4, 2)), (2, ("trainer=pipeline",), (4, 6)),
        (4, ("trainer=pipeline", "shard=2"), (4, 3)),
    ):  # fmt: skip
        made = plan(tmp_path, world, *words, *batch)
        assert (made.micro_batch, made.accumulation, made.global_batch) == (*expected, 24)
    assert plan(tmp_path, 1, "trainer=single", *batch).tokens_per_step == made.tokens_per_step


@pytest.mark.parametrize("case", ["single", "ddp", "hsdp", "1F1B, sharded", "ZBVZeroBubble"])
def test_ranks_share_the_copy_that_a_save_makes(tmp_path: Path, case: str) -> None:
    world, overrides = CASES[case]
    saving = plan(tmp_path, world, *overrides, "save_strategy=epoch")
    assert sum(rank.save_copy for rank in saving.ranks) == pytest.approx(saving.checkpoint_bytes, rel=0.02)
    assert all(rank.save_copy > 0 for rank in saving.ranks)
    for words in ((), ("save_strategy=epoch", "async_save=false")):
        without = plan(tmp_path, world, *overrides, *words)
        assert [rank.save_copy for rank in without.ranks] == [0] * world
    assert saving.fullest.total > without.fullest.total


def test_fsdp2_with_offload_and_without_resharding(tmp_path: Path) -> None:
    normal = plan(tmp_path, 2, "trainer=fsdp2").fullest
    kept = plan(tmp_path, 2, "trainer=fsdp2", "reshard_after_forward=false").fullest
    half = plan(tmp_path, 2, "trainer=fsdp2", "reshard_after_forward=false", "param_dtype=bf16").fullest
    assert normal.buffers < kept.buffers
    assert kept.buffers - half.buffers == plan(tmp_path, 1, "trainer=single").fullest.weights // 2
    offloaded = plan(tmp_path, 2, "trainer=fsdp2", "cpu_offload=true").fullest
    assert offloaded.in_host_memory == normal.weights + normal.gradients + (normal.optimizer or 0)
    assert offloaded.tensors == normal.tensors - offloaded.in_host_memory


def test_memory_is_what_tensors_take_and_fragments_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan(tmp_path, 1, "trainer=single", "async_save=false").fullest
    kinds = (made.weights, made.gradients, made.optimizer, made.activations, made.buffers)
    assert made.tensors == sum(kind or 0 for kind in kinds)
    assert 0.1 * made.tensors < made.fragments == made.total - made.tensors < 0.2 * made.tensors
    monkeypatch.setattr("forgather_cli.plan.memory.uses_gpu", lambda config: True)
    on_gpu = plan(tmp_path, 1, "trainer=single").fullest
    assert on_gpu.tensors == made.tensors, "the copy of a save is in host memory"
    assert 0 < on_gpu.fragments < 0.06 * on_gpu.tensors


def test_a_cuda_device_that_is_not_here_is_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)  # a processor that is slow in bf16
    words = ["precision=auto", "loss=auto", "trainer=single"]
    here, there = (plan(tmp_path, 1, *words, f"device={name}") for name in ("cpu", "cuda"))
    assert (here.precision, there.precision) == ("fp32", "bf16")
    said = plan(tmp_path, 1, *words[1:], "precision=bf16", "device=cuda")
    assert there.fullest == said.fullest
    assert "none here" in there.auto_because
    assert 20 * there.fullest.fragments <= there.fullest.tensors < here.fullest.tensors
    # as on a GPU that is here: the logits of all tokens are never in memory
    assert decided(tiny.config(tmp_path, *words, "device=cuda"))[0].loss.type != "cross_entropy"


def test_half_precisions(tmp_path: Path) -> None:
    full, half, true = (plan(tmp_path, 1, f"precision={name}").fullest for name in ("fp32", "fp16", "bf16_true"))
    matrices = sum(row.numel for row in plan(tmp_path, 1).parameters if len(row.shape) == 2 and row.kind != "embedding")
    assert half.buffers == 2 * matrices, "autocast keeps a copy of what it multiplies"
    assert (half.weights, half.gradients, half.optimizer) == (full.weights, full.gradients, full.optimizer)
    assert (2 * true.weights, 2 * true.gradients, true.buffers) == (full.weights, full.gradients, 0)
    assert (true.activations or 0) < (half.activations or 0) < (full.activations or 0)
    checkpoints = [plan(tmp_path, 1, f"precision={name}").checkpoint_bytes or 0 for name in ("fp32", "bf16_true")]
    assert checkpoints[1] == pytest.approx(checkpoints[0] / 2, rel=0.01)


def test_buckets_of_their_own_are_a_second_copy_of_the_gradients(tmp_path: Path) -> None:
    views = plan(tmp_path, 2, "trainer=ddp").fullest
    copies = plan(tmp_path, 2, "trainer=ddp", "gradient_as_bucket_view=false").fullest
    assert copies.tensors - views.tensors == copies.gradients
    fused = plan(tmp_path, 2, "trainer=fsdp2", "fuse_optim_with_backward=true", "max_grad_norm=null").fullest
    assert fused.gradients < views.gradients / 2


def test_stages_add_up_to_the_model(tmp_path: Path) -> None:
    made = plan(tmp_path, 2, "trainer=pipeline", "schedule=Interleaved1F1B")
    assert [(s.index, s.rank, s.first_layer, s.last_layer) for s in made.stages] == [
        (0, 0, 0, 0), (1, 1, 1, 1), (2, 0, 2, 2), (3, 1, 3, 3),
    ]  # fmt: skip
    assert sum(s.parameters for s in made.stages) == made.num_parameters
    assert sum(s.share for s in made.stages) == pytest.approx(1)
    tied = plan(tmp_path, 2, "trainer=pipeline", TIED)
    embedding = next(row.numel for row in tied.parameters if row.kind == "embedding")
    assert sum(s.parameters for s in tied.stages) == tied.num_parameters + embedding


def test_checkpoints_are_as_large_under_every_strategy(tmp_path: Path) -> None:
    names = ("single", "ddp", "fsdp2", "pipeline")
    made = [plan(tmp_path, 1 if name == "single" else 2, f"trainer={name}", TIED) for name in names]
    assert len({each.checkpoint_bytes for each in made}) == 1


def test_early_ranks_of_1f1b_keep_more_activations(tmp_path: Path) -> None:
    made = plan(tmp_path, 4, "trainer=pipeline", "n_microbatches=8", "input_weight=0", "output_weight=0")
    first, second, third, _ = (rank.activations or 0 for rank in made.ranks)
    assert first - second == second - third > third / 4
    all_at_once = plan(tmp_path, 4, "trainer=pipeline", "n_microbatches=8", "schedule=GPipe")
    assert all_at_once.ranks[0].activations == first + 4 * (first - second)


def test_the_command_prints_every_rank_and_stage(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "model=nano", "data=synthetic", "trainer=pipeline", "nproc_per_node=2"]
    found = document(capsys, *words)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert found["memory_bytes"] == max(rank["memory_bytes"] for rank in found["ranks"])
    assert [stage["rank"] for stage in found["stages"]] == [0, 1]
    assert (found["trainer"], found["schedule"], found["world_size"]) == ("pipeline", "1F1B", 2)
    assert 0 < found["bubble"] < 1
    table = shown(capsys, *words)
    assert all(text in table for text in ("pipeline on 2 ranks, schedule 1F1B, 2 stages, bubble", "1, head"))
