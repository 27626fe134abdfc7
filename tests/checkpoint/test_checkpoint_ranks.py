"""Checkpoints of several real ranks: any layout to any other, one answer on all ranks, whatever fails on one."""

from __future__ import annotations

import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import saving
import torch
import torch.distributed as dist
from program import Process, until
from ranks import logged, run_ranks
from safetensors.torch import load_file
from saving import Box
from torch import Tensor

from forgather_cli.checkpoint import publish
from forgather_cli.checkpoint.components import Component, LocalShard, Sharing
from forgather_cli.checkpoint.load import Reader, named, newest_valid, restore_components
from forgather_cli.distributed import cpu_group
from forgather_cli.errors import CheckpointError, ReplicationError, SetupError
from forgather_cli.run_dir import RunDir

Layout = dict[str, tuple[int, int]]
"""Tensor name -> the rows [start, stop) that a rank holds."""


def alike(results: list[Any]) -> Any:
    """The answer of all ranks, which is the same."""
    assert all(result == results[0] for result in results), results
    return results[0]


def layouts(seed: int, num_ranks: int, full: dict[str, Tensor]) -> list[Layout]:
    """What each rank holds: tensors whole, or cut at random rows; pieces that are empty, or that several ranks hold;
    and now and then a rank that holds nothing at all.
    """
    rng = random.Random(seed)
    result: list[Layout] = [{} for _ in range(num_ranks)]
    used = rng.sample(range(num_ranks), num_ranks - rng.randint(0, 1))
    for name, tensor in full.items():
        rows = len(tensor) if tensor.ndim else 1
        cuts = sorted(rng.choices(range(rows + 1), k=rng.randint(0, len(used) - 1))) if tensor.ndim else []
        pieces = list(zip([0, *cuts], [*cuts, rows], strict=True))
        for n, rank in enumerate(rng.sample(used, len(used))):
            piece = pieces[n] if n < len(pieces) else rng.choice([*pieces, None])
            if piece is not None:
                result[rank][name] = piece
    return result


def rows_in(layout: Layout, full: dict[str, Tensor]) -> dict[str, LocalShard]:
    held = {}
    for name, (start, stop) in layout.items():
        tensor = full[name]
        held[name] = LocalShard(tensor[start:stop].clone() if tensor.ndim else tensor, start, tuple(tensor.shape))
    return held


def save_and_read_elsewhere(root: str, seeds: list[int]) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    saver = saving.checkpointer(Path(root), max_shard_bytes=5000, async_save=True)
    for seed in seeds:
        full = {"model": saving.tensors(seed), "optimizer": saving.moments(seed)}
        kinds = {kind: rows_in(layouts(seed, size, all_of)[rank], all_of) for kind, all_of in full.items()}
        assert saving.save(saver, seed, **kinds)
    saver.wait()
    assert saver.failures == []
    for seed in seeds:
        reader = named(RunDir(Path(root)).checkpoint(seed), "full", cpu_group())
        for kind in ("model", "optimizer"):
            all_of = saving.tensors(seed) if kind == "model" else saving.moments(seed)
            for name, (start, stop) in layouts(seed + 1000, size, all_of)[rank].items():
                expected = all_of[name][start:stop] if all_of[name].ndim else all_of[name]
                saving.assert_equal(reader.read(name, kind, start, stop), expected)  # type: ignore[arg-type]
    saver.close()


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_any_layout_writes_the_bytes_of_one_rank_and_reads_as_any_other(num_ranks: int, tmp_path: Path) -> None:
    seeds = [num_ranks * 100 + n for n in range(6)]
    run_ranks(num_ranks, save_and_read_elsewhere, str(tmp_path / "ranks"), seeds)
    alone = saving.checkpointer(tmp_path / "alone", max_shard_bytes=5000)
    for seed in seeds:
        saving.save(alone, seed)
        mine, ranks = alone.run.checkpoint(seed), RunDir(tmp_path / "ranks").checkpoint(seed)
        for folder in ("model", "optimizer"):
            names = sorted(path.name for path in (mine / folder).iterdir())
            assert names == sorted(path.name for path in (ranks / folder).iterdir())
            for name in names:
                assert (mine / folder / name).read_bytes() == (ranks / folder / name).read_bytes(), (seed, name)
        saving.assert_content(Reader(ranks), seed)
        index = json.loads((ranks / "model" / "model.safetensors.index.json").read_text())["weight_map"]
        for name, tensor in saving.tensors(seed).items():
            saving.assert_equal(load_file(ranks / "model" / index[name])[name], tensor)


def bytes_written(root: str) -> int:
    saver = saving.checkpointer(Path(root))
    weights = saving.rows({"embed": torch.ones(3 << 20), "small": torch.ones(1000)})
    before = saving.io_bytes("wchar")
    assert saving.save(saver, 1, model=weights, optimizer={})
    return saving.io_bytes("wchar") - before


def test_replicas_write_a_part_each(tmp_path: Path) -> None:
    for written in run_ranks(3, bytes_written, str(tmp_path)):
        assert written == pytest.approx(4 << 20, rel=0.05)


def flipped_on(rank: int, tensor: Tensor) -> Tensor:
    """``tensor``, which has another bit on one rank."""
    if dist.get_rank() == rank:
        tensor.view(-1)[-1:].view(torch.uint8)[0] ^= 1
    return tensor


DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)


def refused(root: str, level: str) -> list[str]:
    """What is said of states that differ on one rank, and of one that does not."""
    saver = saving.checkpointer(Path(root), replication_check=level, async_save=True)
    rank, steps, told = dist.get_rank(), iter(range(1, 100)), []

    def attempt(**changes: Any) -> None:
        step = next(steps)
        try:
            told.append(str(saving.save(saver, step, **changes)))
        except ReplicationError as error:
            told.append(str(error).partition("training ends: ")[2].partition("; find")[0])
        saver.wait()

    for dtype in DTYPES:
        attempt(model=saving.rows({"a": torch.ones(3), "b": flipped_on(1, torch.ones(6).to(dtype))}))
    exchanged = [0, 2, 1, 3, 4] if rank == 2 else range(5)
    attempt(optimizer=saving.rows({"a.exp_avg": torch.tensor(exchanged).bfloat16()}))
    start = 4 * (rank % 2)  # HSDP 2x2
    part = flipped_on(3, torch.arange(8.0)[start : start + 4].clone())
    attempt(model={"w": LocalShard(part, start, (8,))}, optimizer={})
    attempt(model=saving.rows({"w": torch.ones(2 + (rank == 2))}), optimizer={})
    attempt(components=[Component("scheduler", Box({"lr": [0.1 if rank else 0.2]}), Sharing.REPLICATED)])
    attempt(components=[Component("scheduler", Box({"lr": torch.ones(1 + rank)}), Sharing.REPLICATED)])
    attempt()
    saver.close()
    return [*told, str(saver.run.checkpoint_steps()), str(saving.debris(saver.run))]


@pytest.mark.parametrize("level", ["none", "quick", "tensor", "full"])
def test_what_must_be_equal_is_compared(level: str, tmp_path: Path) -> None:
    *told, steps, debris = alike(run_ranks(4, refused, str(tmp_path), level))
    bits = ["b (ranks 0, 2, 3 unlike rank 1)"] * len(DTYPES)
    bits += ["a.exp_avg (ranks 0, 1, 3 unlike rank 2)", "w rows 4 to 8 (rank 1 unlike rank 3)"]
    shape = "w (ranks 0, 1, 3: F32 [2]; rank 2: F32 [3])"
    value = "scheduler (rank 0 unlike ranks 1, 2, 3)"
    structure = "scheduler (rank 0 unlike rank 1 unlike rank 2 unlike rank 3)"
    expected = {
        "none": ["True"] * 9 + ["False", "True", "True"], "quick": ["True"] * 9 + [shape, "True", structure],
        "tensor": [*bits, shape, value, structure], "full": [*bits, shape, value, structure],
    }[level]  # fmt: skip
    assert told == [*expected, "True"]
    assert steps == str([n for n, answer in enumerate(told, 1) if answer == "True"])
    assert debris == "[]"


def after(root: str, what: str) -> tuple[list[Any], list[str], list[int], bool]:
    """Save steps 1, 2 and 3; something goes wrong on one rank in step 2, while training goes on.

    Returns (failures, errors in the log, published steps, True if training never waited for the writer).
    """
    saver = saving.checkpointer(Path(root), async_save=True)
    # a disk that others use takes its time too, where it is not what is looked at
    short = saving.settings_of(async_save=True, **({"save_timeout": 2.0} if LATE in WRONG[what][1] else {}))
    with logged() as messages:
        saving.save(saver, 1)
        saver.wait()
        with WRONG[what][0]() as changes, patch.object(publish, "GRACE", 1.0), patch.object(saver, "_args", short):
            started = time.monotonic()
            saving.save(saver, 2, **changes)
            for _ in range(5):
                dist.all_reduce(torch.ones(1000))
            trained = time.monotonic() - started < 2.0
            saver.wait()
        saving.save(saver, 3)
        saver.close()
    return saver.failures, messages, saver.run.checkpoint_steps(), trained


@contextmanager
def full_disk_on(rank: int, limit: int, **changes: Any) -> Iterator[dict[str, Any]]:
    with saving.full_disk(limit) if dist.get_rank() == rank else nullcontext():
        yield changes


def manifest_too_large_on_0() -> AbstractContextManager[dict[str, Any]]:
    """Rank 0 writes small files only, the manifest is the largest of them."""
    held = saving.rows(saving.tensors(2)) if dist.get_rank() == 1 else {}
    return full_disk_on(0, 1000, model=held, optimizer={})


@contextmanager
def disk_hangs_on(rank: int, seconds: float) -> Iterator[dict[str, Any]]:
    """os.fsync of one rank's writer takes so long, at most until this is left."""
    release, fsync = threading.Event(), os.fsync

    def hang(fd: int) -> None:
        release.wait(seconds)
        fsync(fd)

    with patch.object(os, "fsync", hang if dist.get_rank() == rank else fsync):
        yield {}
        release.set()
        for thread in threading.enumerate():
            if thread.name == "checkpoint":
                thread.join(30)
    dist.barrier()


BROKEN = saving.failing(ValueError("tokenizer is broken"))
LATE = "it took longer than save_timeout=2 seconds"
WRONG: dict[str, tuple[Callable[[], AbstractContextManager[dict[str, Any]]], str]] = {
    "disk of 1 full": (lambda: full_disk_on(1, 500), "rank 1: File too large"),
    "manifest": (manifest_too_large_on_0, "File too large"),
    "model files": (lambda: nullcontext({"write_model_files": BROKEN}), "ValueError: tokenizer is broken"),
    "1 is slow": (lambda: disk_hangs_on(1, 2.3), f"rank 1: {LATE}"),
    "1 hangs": (lambda: disk_hangs_on(1, 60), f"rank 1: {LATE}"),
    "0 hangs": (lambda: disk_hangs_on(0, 60), f"rank 0: {LATE}"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_failure_on_one_rank_is_known_to_all_and_the_next_save_works(what: str, tmp_path: Path) -> None:
    why = WRONG[what][1]
    failures, messages, steps, trained = alike(run_ranks(3, after, str(tmp_path), what))
    assert failures == [(2, why)]
    newest = tmp_path / "checkpoints" / "step-00000001"
    assert messages == [f"the checkpoint of step 2 was not saved: {why}; the newest one is {newest}"]
    assert steps == [1, 3]
    assert trained
    assert saving.debris(RunDir(tmp_path)) == []
    saving.assert_content(Reader(RunDir(tmp_path).checkpoint(3)), 3)


def saves_while_a_writer_hangs(root: str) -> tuple[list[Any], float]:
    saver = saving.checkpointer(Path(root), async_save=True, save_timeout=2.0)
    with patch.object(publish, "GRACE", 0.2), disk_hangs_on(1, 60):
        saving.save(saver, 1)
        saver.wait()
        started = time.monotonic()
        for step in (2, 3):
            assert not saving.save(saver, step)
        took = time.monotonic() - started
    with patch.object(saver, "_args", saving.settings_of(async_save=True)):
        saving.save(saver, 4)
        saver.close()
    return saver.failures, took


def test_while_a_writer_hangs_saves_fail_at_once(tmp_path: Path) -> None:
    """Each would hold another copy of the state in memory."""
    for failures, took in run_ranks(2, saves_while_a_writer_hangs, str(tmp_path)):
        stuck = "the writer of a save before still hangs"
        assert failures == [(1, f"rank 1: {LATE}"), (2, f"rank 1: {stuck}"), (3, f"rank 1: {stuck}")]
        assert took < 2.0
    assert RunDir(tmp_path).checkpoint_steps() == [4]


def non_finite_on_one_rank(root: str) -> list[Any]:
    saver = saving.checkpointer(Path(root))
    metrics = {"loss": float("nan") if dist.get_rank() == 1 else 1.0}
    unstorable = Component("data", Box({"seen": {1} if dist.get_rank() == 1 else 1}), Sharing.PER_RANK)
    own = LocalShard(torch.zeros(2), dist.get_rank(), (4,))
    assert not saving.save(saver, 1, metrics=metrics)
    assert not saving.save(saver, 2, components=[unstorable])
    assert not saving.save(saver, 3, model={"w": own})
    assert not saving.save(saver, 4, model={"w": LocalShard(torch.zeros(1), 3 * dist.get_rank(), (4,))})
    assert saving.save(saver, 5)
    return saver.failures


def test_what_one_rank_cannot_save_no_rank_saves(tmp_path: Path) -> None:
    (_, finite), (_, storable), (_, overlap), (_, hole) = alike(run_ranks(2, non_finite_on_one_rank, str(tmp_path)))
    assert finite == "rank 1: loss is nan, so the weights are not worth keeping"
    assert storable.startswith("rank 1: data.state['seen']: cannot store a value of type set")
    assert overlap == "w: rows 1 to 2 are held in pieces that overlap"
    assert hole == "w: rows 1 to 3 are held by no rank"
    assert RunDir(tmp_path).checkpoint_steps() == [5]


def train_and_save(root: str) -> tuple[list[tuple[int, str]], list[int]]:
    """A loop as the trainer's: ranks agree each step on whether all are done, then all tell what was published."""
    saver, told = saving.checkpointer(Path(root), async_save=True, save_total_limit=2), []
    for step in range(60):
        done = torch.tensor(int(saver.is_done))
        dist.all_reduce(done, dist.ReduceOp.MIN)
        if done:
            told += [(step, path.name) for path in saver.newly_published()]
        if step % 20 == 0:
            assert saving.save(saver, step, size=256)
        time.sleep(0.005 * dist.get_rank())
        dist.all_reduce(torch.ones(10_000))
    saver.wait()
    told += [(60, path.name) for path in saver.newly_published()]
    saver.close()
    assert saver.failures == []
    return told, saver.run.checkpoint_steps()


def test_a_publication_is_told_on_all_ranks_at_one_step(tmp_path: Path) -> None:
    told, kept = alike(run_ranks(3, train_and_save, str(tmp_path)))
    assert [name for _, name in told] == ["step-00000000", "step-00000020", "step-00000040"]
    assert kept == [20, 40]
    for step in kept:
        saving.assert_content(Reader(RunDir(tmp_path).checkpoint(step)), step, size=256)


def left_by_an_error(root: str) -> list[int]:
    """Rank 1 leaves while a checkpoint is being written, as after an exception; rank 0 cannot write before it has."""
    saver, has_left, fsync = saving.checkpointer(Path(root), async_save=True), Path(root) / "left", os.fsync

    def hang(fd: int) -> None:
        until(has_left.exists)
        fsync(fd)

    with patch.object(os, "fsync", hang if dist.get_rank() == 0 else fsync):
        saving.save(saver, 1)
        saver.close(patience=0.05 if dist.get_rank() == 1 else None)
        steps = saver.run.checkpoint_steps()
        has_left.touch()
    return steps


def test_closing_asks_nobody(tmp_path: Path) -> None:
    assert run_ranks(2, left_by_an_error, str(tmp_path)) == [[1], []]
    saving.assert_content(Reader(RunDir(tmp_path).checkpoint(1)), 1)


def loaded(root: str, level: Any, step: int | None = None) -> tuple[int | str | None, list[str], int]:
    """(step or error, warnings, bytes read) of the newest valid one, or of the one that is named"""
    run, group, before = RunDir(Path(root)), cpu_group(), saving.io_bytes("rchar")
    with logged() as messages:
        try:
            reader = newest_valid(run, level, group) if step is None else named(run.checkpoint(step), level, group)
            result: int | str | None = reader.step if reader else None
        except CheckpointError as error:
            result = str(error)
    return result, messages, saving.io_bytes("rchar") - before


def found(num_ranks: int, root: Path, *step: int) -> Any:
    return alike([step_or_error for step_or_error, *_ in run_ranks(num_ranks, loaded, str(root), "full", *step)])


def spoil(path: Path) -> None:
    saving.damage(path, saving.flip(-1))


def test_all_ranks_take_the_same_checkpoint_and_read_a_part_each_to_verify_it(tmp_path: Path) -> None:
    saver = saving.checkpointer(tmp_path, max_shard_bytes=100_000)
    assert all(saving.save(saver, step, size=512) for step in (1, 2, 3))
    run = saver.run
    spoil(run.checkpoint(3) / "optimizer" / "optimizer-00002-of-00003.safetensors")
    spoil(run.checkpoint(2) / "state.json")
    results = run_ranks(3, loaded, str(tmp_path), "full")
    assert [step for step, *_ in results] == [1, 1, 1]
    assert results[1][1] == results[2][1] == []
    assert len(results[0][1]) == 2
    assert any("step-00000003: is damaged: optimizer/optimizer-00002-of-00003.safetensors" in m for m in results[0][1])
    assert all(message.endswith(f"{run.checkpoint(1)} is used") for message in results[0][1])
    size = sum(path.stat().st_size for step in (1, 2, 3) for path in run.checkpoint(step).rglob("*") if path.is_file())
    assert all(bytes_read for *_, bytes_read in results)
    assert sum(bytes_read for *_, bytes_read in results) < size * 1.1
    assert [step for step, *_ in run_ranks(3, loaded, str(tmp_path), "size")] == [3, 3, 3]
    assert found(2, tmp_path / "none") is None


def test_errors_of_loading_are_equal_on_all_ranks_also_of_one_that_is_named(tmp_path: Path) -> None:
    run = saving.saved_run(tmp_path, 1, 2)
    spoil(run.checkpoint(2) / "model" / "model.safetensors")
    whole, damaged, missing = (found(2, tmp_path, step) for step in (1, 2, 3))
    assert whole == 1
    assert "resume_from_checkpoint: " in damaged
    assert "model/model.safetensors has other content" in damaged
    assert "no such checkpoint directory" in missing
    spoil(run.checkpoint(2) / "manifest.json")
    (run.checkpoint(1) / "state.json").unlink()
    message = found(3, tmp_path)
    assert "no usable checkpoint is left in" in message
    assert "step-00000002/manifest.json: cannot be read" in message
    assert "state.json is missing (found by rank" in message
    (run.checkpoint(2) / "manifest.json").write_text('{"format": "forgather-checkpoint", "format_version": 7}')
    assert "upgrade forgather" in found(2, tmp_path)


def shared_components(num_nodes: int) -> list[Component]:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ["GROUP_RANK"] = str(rank * num_nodes // size)
    group = f"data{rank % 2}"
    return [
        Component("own", Box({"rank": rank, "t": torch.full((2,), rank)}), Sharing.PER_RANK),
        Component("group", Box({"group": group, "t": torch.full((3,), rank % 2)}), Sharing.PER_GROUP, group_id=group),
        Component("node", Box({"node": rank * num_nodes // size}), Sharing.PER_NODE),
        Component("all", Box({"lr": 0.1}), Sharing.REPLICATED),
    ]


def save_components(root: str) -> None:
    saver = saving.checkpointer(Path(root), async_save=True)
    saving.save(saver, 1, components=shared_components(num_nodes=2))
    saver.wait()
    assert saver.failures == []
    saver.close()


def restore_shared(root: str, num_nodes: int) -> tuple[list[str], list[Any]]:
    reader = named(RunDir(Path(root)).checkpoint(1), "full", cpu_group())
    components = shared_components(num_nodes)
    boxes = [component.object for component in components]
    for box in boxes:
        box.state = None  # type: ignore[attr-defined]
    fresh = restore_components(reader, components, rank=dist.get_rank(), world_size=dist.get_world_size())
    return fresh, [box.state for box in boxes]  # type: ignore[attr-defined]


def test_groups_and_nodes_store_once_and_any_of_their_ranks_finds_it(tmp_path: Path) -> None:
    run_ranks(4, save_components, str(tmp_path))
    path = RunDir(tmp_path).checkpoint(1)
    stored = {
        rank: sorted(json.loads((path / f"state-rank-{rank:05d}.json").read_text())["components"]) for rank in range(4)
    }
    assert stored == {0: ["group", "node", "own"], 1: ["group", "own"], 2: ["node", "own"], 3: ["own"]}
    for rank, (fresh, (own, group, node, everybody)) in enumerate(run_ranks(4, restore_shared, str(tmp_path), 2)):
        assert fresh == []
        assert (own["rank"], own["t"].tolist()) == (rank, [rank] * 2)
        assert (group["group"], group["t"].tolist()) == (f"data{rank % 2}", [rank % 2] * 3)
        assert (node, everybody) == ({"node": rank // 2}, {"lr": 0.1})
    # with other ranks and nodes only what is theirs
    for rank, (fresh, (own, group, node, everybody)) in enumerate(run_ranks(3, restore_shared, str(tmp_path), 3)):
        assert fresh == (["own", "node"] if rank == 2 else ["own"])
        assert own is None
        assert group["group"] == f"data{rank % 2}"
        assert (node, everybody) == (None if rank == 2 else {"node": rank}, {"lr": 0.1})


def test_what_starts_fresh_is_one_line_unless_it_is_required(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = saving.saved_run(tmp_path, 1)
    reader = Reader(run.checkpoint(1))
    rng = Component("rng", Box(), Sharing.PER_RANK)
    caplog.set_level(logging.INFO, "forgather_cli")
    assert restore_components(reader, [rng, Component("trainer", Box(), Sharing.GLOBAL)], world_size=2) == ["rng"]
    assert [record.getMessage() for record in caplog.records] == [
        f"{reader.path}: each rank has its own rng, which starts fresh, since the ranks are others (then 1, now 2)"
    ]
    with pytest.raises(CheckpointError, match="rng was saved by each of 1 ranks for itself"):
        restore_components(reader, [Component("rng", Box(), Sharing.PER_RANK, required=True)], world_size=2)


def tried(root: str, what: str) -> str:
    rank = dist.get_rank()
    saver, home = saving.checkpointer(Path(root)), os.getcwd()
    if what == "not shared":  # the same path is another directory on another node
        (Path(root) / str(rank)).mkdir(parents=True)
        os.chdir(Path(root) / str(rank))
        saver = saving.checkpointer(Path("run"))
    state: Any = {"seen": {1}} if what == "state" and rank == 1 else {}
    rows = {"w": LocalShard(torch.empty(2, 3, device="meta"), (2 * rank) if what != "overlap" else rank, (4, 3))}
    if what == "large":
        rows = {f"w{rank}": LocalShard(torch.empty(1 << 20, 1 << 28, device="meta"))}
    later = 3 << 50 if what == "large" and rank == 0 else 0  # three times as much as rank 0 has
    try:
        saver.trial([Component("data", Box(state), Sharing.PER_RANK)], rows=rows, num_bytes=later)
    except SetupError as error:
        return str(error)
    finally:
        os.chdir(home)
    return "good"


def test_what_fails_on_one_rank_at_start_is_an_error_on_all(tmp_path: Path) -> None:
    def answer(what: str) -> str:
        return str(alike(run_ranks(2, tried, str(tmp_path / what.replace(" ", "_")), what)))

    assert answer("good") == "good"
    assert answer("state").startswith("data.state['seen']: cannot store a value of type set")
    assert answer("overlap") == "w: rows 1 to 2 are held in pieces that overlap"
    assert "needs 9.01e+06 GB" in answer("large")
    assert "does not see" in answer("not shared")


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist
import saving
from forgather_cli.checkpoint.components import LocalShard
from forgather_cli.checkpoint.load import newest_valid
from forgather_cli.distributed import cpu_group
from forgather_cli.run_dir import RunDir

run, draw = RunDir(Path(sys.argv[1])), random.Random(int(sys.argv[2]))

def held(tensors, rank, size):  # large ones cut in two, the others on all ranks
    def rows(tensor):
        if len(tensor.shape) < 2 or not len(tensor):
            return LocalShard(tensor)
        start, stop = (len(tensor) * n // size for n in (rank, rank + 1))
        return LocalShard(tensor[start:stop], start, tuple(tensor.shape))
    return {name: rows(tensor) for name, tensor in tensors.items()}

def train(rank, size, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    saver = saving.checkpointer(run.root, async_save=True, save_total_limit=2, save_timeout=20)
    saver.clean()
    reader = newest_valid(run, "full", cpu_group())
    step = reader.step if reader else 0
    Path(f"{store}.{rank}").touch()
    try:
        while True:
            step += 1
            model, optimizer = (held(t, rank, size) for t in (saving.tensors(step, 128), saving.moments(step, 128)))
            saving.save(saver, step, model=model, optimizer=optimizer)
            dist.all_reduce(torch.ones(100))
            if step % 5 == 0:  # the same step again
                saving.save(saver, step, model=model, optimizer=optimizer)
    finally:
        saver.close(patience=2)

def start(rank, size, store):
    child = os.fork()
    if child == 0:
        try:
            train(rank, size, store)
        except RuntimeError as error:
            os._exit(7)
        finally:
            os._exit(8)
    return child

reached, round, in_a_save = 0, 0, False
run.checkpoints.mkdir(parents=True)
while round < 10 or (round < 40 and not in_a_save):  # where saves are short, few kills meet one
    size, store = draw.choice((2, 3)), f"{sys.argv[1]}.{round}"
    children = [start(rank, size, store) for rank in range(size)]
    while not all(os.path.exists(f"{store}.{rank}") for rank in range(size)):
        time.sleep(0.005)
    while round % 2 and (run.checkpoint_steps() or [0])[-1] == reached:
        time.sleep(0.002)
    time.sleep(draw.uniform(0.0, 0.3))
    doomed = children if round % 4 == 3 else [draw.choice(children)]
    for child in doomed:
        os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert time.monotonic() - killed < 15, "the others hang"  # until save_timeout
    assert codes == [-9 if child in doomed else 7 for child in children], codes
    in_a_save |= bool(saving.debris(run))
    reached = saving.after_a_kill(run, reached, size=128)
    round += 1
print("reached", reached)
"""


def test_ranks_killed_at_random_moments_leave_whole_checkpoints(tmp_path: Path) -> None:
    with Process(str(tmp_path / "run"), str(os.getpid()), code=KILLED) as job:
        assert job.finish() == 0, job.output
    assert job.lines.count("killed in a save") >= 1
    assert int(job.lines[-1].split()[-1]) >= 4
