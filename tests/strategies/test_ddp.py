"""Data parallel on gloo ranks, beside plain PyTorch on the concatenated batch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ddp import Buffered, Run, strategy_of, trained
from ranks import logged, run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from two_ranks import free_port
from whole_batch import (
    CPU,
    Slices,
    agree,
    close,
    cut,
    equal,
    even,
    global_batch,
    grads_of,
    mean_loss,
    reference,
    targets,
    weights_of,
)

from forgather_cli import TrainingArguments
from forgather_cli.config.schema import DDPSettings, PostLocalSGD, RunSettings, SingleSettings
from forgather_cli.errors import ConfigError
from forgather_cli.loss.losses import CrossEntropy, LinearCrossEntropy
from forgather_cli.models.transform import apply_activation_checkpointing, compile_blocks
from forgather_cli.strategies import ddp
from forgather_cli.strategies.base import Batch
from forgather_cli.strategies.ddp import DataParallel


def compiled_and_checkpointed() -> nn.Module:
    model = tiny.decoder()
    apply_activation_checkpointing(model)
    compile_blocks(model, RunSettings(torch_compile=True, torch_compile_backend="aot_eager"))
    return model


def checkpointed(**changes: Any) -> nn.Module:
    model = tiny.decoder(**changes)
    apply_activation_checkpointing(model)
    return model


UNEVEN: list[Slices] = [
    [[], [slice(0, 5)], [slice(5, 7), slice(7, 12)]], [[slice(0, 3), slice(3, 6)], [], [slice(6, 12)]],
    [[], [], [slice(0, 4), slice(4, 8), slice(8, 12)]], [[slice(0, 4)], [slice(4, 8)], [slice(8, 12)]],
]  # fmt: skip
"""Ranks may have no, one or several micro-batches."""
SETTINGS: dict[str, dict[str, Any]] = {
    "no buffers": {"broadcast_buffers": False},
    "no init_sync": {"init_sync": False},
    "small buckets": {"bucket_cap_mb": 1},
    "unused": {"find_unused_parameters": True},
    "unused skipped": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},
    "own gradients": {"gradient_as_bucket_view": False},
    "static": {"static_graph": True},
    "fused loss": {"loss": LinearCrossEntropy(chunk_size=7)},
}
CASES: dict[str, tuple[list[Slices], dict[str, Any], bool]] = {
    **{f"{ranks}, accumulation {n}": ([even(ranks, n)] * 3, {}, True) for ranks, n in ((2, 1), (2, 2), (3, 1), (3, 4))},
    "3, uneven": (UNEVEN, {}, True),
    "3, uneven, a generator": (UNEVEN, {}, False),
    **{f"3, uneven, {name}": (UNEVEN, SETTINGS[name], True) for name in ("unused", "static")},
    **{name: ([even(2, 1), even(2, 2), even(2, 1)], each, True) for name, each in SETTINGS.items()},
    **{
        f"compiled with the loss, {name}": (plan, {"compile_with_loss": {"backend": "aot_eager"}, **each}, True)
        for name, plan, each in (
            ("accumulation 2", [even(2, 2)] * 2, {}),
            ("3, uneven", UNEVEN[:2], {}),
            ("recomputed", [even(2, 2)] * 2, {"build": checkpointed}),
            ("static", [even(2, 2)] * 2, SETTINGS["static"]),
            ("static, recomputed", [even(2, 2)] * 2, {**SETTINGS["static"], "build": checkpointed}),
            ("unused", [even(2, 1)] * 2, SETTINGS["unused"]),
            ("fused loss", [even(2, 2)] * 2, {"loss": LinearCrossEntropy(chunk_size=7)}),
        )
    },
    "compiled, recomputed": ([even(2, 2)] * 2, {"build": compiled_and_checkpointed}, True),
}


def trained_cases(ranks: int) -> list[dict[str, Any]]:
    return [trained(plan, settings, sized=sized) for plan, settings, sized in CASES.values() if len(plan[0]) == ranks]


@cache
def results(ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Of all cases of so many ranks at once, by case and rank."""
    by_rank = run_ranks(ranks, trained_cases, ranks)
    names = [name for name, (plan, *_) in CASES.items() if len(plan[0]) == ranks]
    return {name: [found[n] for found in by_rank] for n, name in enumerate(names)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_norms_and_weights_are_those_of_the_whole_batch(name: str) -> None:
    plan, *_ = CASES[name]
    agree(results(len(plan[0]))[name], reference(len(plan)))


def split_at_buckets(accumulation: int) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Steps of a model of several buckets under bf16_compress, compiled with its loss and not; graphs of each split."""
    from torch._dynamo.backends.distributed import DDPOptimizer

    split, numbers = DDPOptimizer.compile_fn, []

    def counted(self: Any, graph: Any, inputs: Any) -> Any:
        made = split(self, graph, inputs)
        numbers.append(len(self.buckets))
        return made

    build = partial(tiny.decoder, hidden_size=256, intermediate_size=512)
    settings: dict[str, Any] = {"build": build, "bucket_cap_mb": 1, "comm_hook": "bf16_compress"}
    DDPOptimizer.compile_fn = counted
    try:
        compiled = trained([even(2, accumulation)], {**settings, "compile_with_loss": {"backend": "aot_eager"}})
    finally:
        DDPOptimizer.compile_fn = split
    return compiled, trained([even(2, accumulation)], settings), numbers


def test_the_graph_of_model_and_loss_is_split_at_the_buckets_and_sends_what_a_hook_makes_of_them() -> None:
    for compiled, plain, numbers in run_ranks(2, split_at_buckets, 2):
        assert numbers
        assert min(numbers) > 2
        for ours, theirs in zip(compiled["grads"], plain["grads"], strict=True):
            close(ours, theirs, 1e-6)
        assert compiled["losses"] == pytest.approx(plain["losses"], rel=1e-6)


def without_exchange() -> tuple[list[dict[str, Tensor]], list[str]]:
    """Gradients as they stand when the strategy asks for each micro-batch, and the order of events."""
    strategy, batch = strategy_of(), global_batch(0)
    seen: list[dict[str, Tensor]] = []
    events: list[str] = []

    class Watched:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Batch]:
            for n, rows in enumerate(even(2, 2)[strategy.data_rank]):
                events.append(f"begin {n}")
                yield cut(batch, rows)
                events.append(f"end {n}")
                seen.append(grads_of(strategy.parts[0]))

    strategy.parts[0].register_forward_hook(lambda *_: events.append("forward"))
    strategy.forward_backward(Watched(), targets(batch))
    return seen, events


def test_gradients_are_exchanged_once_and_the_next_batch_is_asked_for_when_the_last_is_done() -> None:
    (first, events), (second, _) = run_ranks(2, without_exchange)
    assert events == ["begin 0", "forward", "end 0", "begin 1", "forward", "end 1"]
    assert not equal(first[0], second[0])
    assert equal(first[1], second[1])


def after_a_step(settings: dict[str, Any]) -> tuple[float, bool, bool]:
    """The buffer, whether the weights at the start are this rank's own, whether gradients live in a bucket."""
    torch.manual_seed(dist.get_rank())
    model = Buffered()
    own = model.embedding.weight.detach().clone()
    strategy = strategy_of(lambda: model, find_unused_parameters=True, **settings)
    model.number.fill_(dist.get_rank())
    at_start = bool(torch.equal(own, model.embedding.weight))
    batch = global_batch(0)
    strategy.forward_backward([cut(batch, even(2, 1)[dist.get_rank()][0])], targets(batch))
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert len(grads) == 1  # the unused layer has none
    view = grads[0].untyped_storage().nbytes() > grads[0].nbytes
    return float(model.number), at_start, view


def test_buffers_and_weights_come_from_rank_0_where_that_is_wanted() -> None:
    assert run_ranks(2, after_a_step, {})[1] == (0.0, False, True)
    off = {"broadcast_buffers": False, "init_sync": False, "gradient_as_bucket_view": False}
    assert run_ranks(2, after_a_step, off)[1] == (1.0, True, False)


class OldWrapper:
    """DDP of a torch that lacks what newer ones have."""

    def __init__(self, module: nn.Module, broadcast_buffers: bool = True) -> None: ...


def test_what_the_installed_torch_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "DistributedDataParallel", OldWrapper)
    with pytest.raises(ConfigError, match=r"skip_all_reduce_unused_params: torch .* cannot do it; set it to false"):
        DataParallel(CPU, CrossEntropy(), nullcontext, DDPSettings(skip_all_reduce_unused_params=True))
    DataParallel(CPU, CrossEntropy(), nullcontext, DDPSettings())


def fresh_and_stepped(settings: dict[str, Any]) -> tuple[bool, bool]:
    """Whether a fresh wrapper's gradients equal those of one that has stepped: of ours, and of bare DDP."""
    slices = even(3, 1)
    stepped = Run(strategy_of(**settings))
    for number in range(2):
        stepped.step(number, slices)
    fresh = Run(strategy_of(lambda: copy.deepcopy(stepped.model), **settings))
    for run in (stepped, fresh):
        run.step(2, slices)
    bare = [grads_of_bare_ddp(steps, slices) for steps in (1, 2)]
    return equal(stepped.grads[-1], fresh.grads[-1]), equal(*bare)


def grads_of_bare_ddp(steps: int, slices: Slices) -> dict[str, Tensor]:
    model = tiny.decoder()
    wrapped = DistributedDataParallel(model)
    batch = cut(global_batch(0), slices[dist.get_rank()][0])
    for _ in range(steps):
        model.zero_grad()
        mean_loss(wrapped, batch).backward()  # type: ignore[no-untyped-call]
    return grads_of(model)


@pytest.mark.parametrize("setting", ["gradient_as_bucket_view", "find_unused_parameters", "static_graph"])
def test_a_fresh_wrapper_computes_the_bits_of_one_that_has_stepped(setting: str) -> None:
    for ours, bare in run_ranks(3, fresh_and_stepped, {setting: True}):
        assert ours
        assert not bare, "the throwaway backward in DataParallel._rebuild_buckets is no longer needed"


def untouched(settings: dict[str, Any]) -> tuple[bool, bool, bool]:
    """Random state, buffers and gradients after construction are those of before."""
    torch.manual_seed(dist.get_rank())
    model = tiny.decoder(attention_dropout=0.5)
    model.register_buffer("calls", torch.zeros(()))
    model.register_forward_hook(lambda *_: model.calls.add_(1))
    before = torch.get_rng_state()
    strategy_of(lambda: model, **settings)
    return torch.equal(before, torch.get_rng_state()), float(model.calls) == 0, not grads_of(model)


def test_construction_leaves_no_trace() -> None:
    assert run_ranks(2, untouched, {}) == [(True, True, True)] * 2
    assert run_ranks(2, untouched, {"static_graph": True}) == [(True, True, True)] * 2


class NeedsMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 64)

    def forward(self, input_ids: Tensor, extra: Tensor) -> Tensor:
        logits: Tensor = self.embedding(input_ids) * extra
        return logits


def needing_more(settings: dict[str, Any]) -> list[str]:
    with logged() as messages:
        strategy = strategy_of(NeedsMore, **settings)
    batch = {**global_batch(0), "extra": torch.ones(())}
    for step in range(3):
        has_data = step == 0 or strategy.data_rank == 0
        strategy.forward_backward([batch] if has_data else [], targets(batch))
    return messages


def test_a_model_that_takes_more_than_tokens() -> None:
    assert run_ranks(2, needing_more, {}) == [[], []]
    assert run_ranks(2, needing_more, {"find_unused_parameters": True}) == [[], []]
    (message,), _ = run_ranks(2, needing_more, {"static_graph": True})
    assert message.startswith("static_graph: NeedsMore cannot be tried with two tokens")


def evaluated_by_rank_1() -> float | None:
    """Only rank 1 evaluates and generates: nobody answers it."""
    strategy = strategy_of()
    if strategy.data_rank == 0:
        return None
    logits = strategy.logits({"input_ids": global_batch(0)["input_ids"]}, last_only=True)
    assert logits.shape == (12, 1, 64)
    total, count = strategy.loss(global_batch(0))
    return float(total / count)


def test_evaluation_and_logits_need_no_other_rank() -> None:
    _, loss = run_ranks(2, evaluated_by_rank_1)
    assert loss == pytest.approx(reference(1)["losses"][0], rel=1e-6)


@pytest.mark.parametrize(
    "settings", [{}, {"comm_hook": "bf16_compress"}, {"post_local_sgd": PostLocalSGD(enabled=True, start_step=1)}]
)
def test_one_rank_is_a_single_device(settings: dict[str, Any]) -> None:
    (in_a_group,) = run_ranks(1, trained, [even(1, 2)] * 4, settings)
    alone = trained([even(1, 2)] * 4, settings)
    agree([in_a_group], reference(4))
    assert equal(in_a_group["weights"], alone["weights"])
    strategy = strategy_of(**settings)
    assert (strategy.data_size, strategy.gradient_sharing, strategy.own_state) == (1, None, None)


def script(folder: str, **arguments: Any) -> dict[str, Any]:
    """What a user of Hugging Face's Trainer would run under torchrun."""
    sizes = {"max_steps": 3, "logging_steps": 1, "per_device_train_batch_size": 4}
    trainer = tiny.script(folder, None, tiny.RandomTokens(24, ragged=True), **sizes, **arguments)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    return {"strategy": trainer.strategy.name, "losses": losses, "weights": weights_of(trainer.model)}


def test_hugging_face_names_reach_the_wrapper(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 7, "ddp_broadcast_buffers": False}
    assert isinstance(TrainingArguments("out", **asked).trainer, SingleSettings)
    monkeypatch.setenv("WORLD_SIZE", "2")
    expected = DDPSettings(find_unused_parameters=True, bucket_cap_mb=7, broadcast_buffers=False)
    assert TrainingArguments("out", **asked).trainer == expected


def joining(root: str, port: int) -> tuple[dict[str, Any], int, int]:
    """As a script that torchrun has started: there is no process group yet."""
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(port))
        return script(root), dist.get_rank(), dist.get_world_size()


def test_a_script_joins_the_world_that_its_launcher_describes_and_trains_data_parallel(tmp_path: Path) -> None:
    ranks = run_ranks(2, joining, str(tmp_path / "two"), free_port())
    assert [place for _, *place in ranks] == [[0, 2], [1, 2]]
    alone = script(str(tmp_path / "one"), gradient_accumulation_steps=2)
    assert alone["strategy"] == "single"
    for result, *_ in ranks:
        assert result["strategy"] == "ddp"
        assert result["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        close(result["weights"], alone["weights"], 1e-5)


def test_torchs_wrapper_still_asks_its_compiler() -> None:
    """Else ``ddp._unguarded`` can go."""
    assert "torch._dynamo" in inspect.getsource(DistributedDataParallel.__init__)
    guard = DistributedDataParallel._inside_ddp_forward.__wrapped__
    assert "_disable_dynamo" in guard.__code__.co_qualname
