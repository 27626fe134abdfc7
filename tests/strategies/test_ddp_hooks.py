"""Data parallel with less communication: compressed gradients, and ranks that train by themselves."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ddp import Buffered, Run, strategy_of, trained
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from whole_batch import Slices, close, cut, equal, even, global_batch, mean_loss, reference, weights_of

from forgather_cli import DDPSettings
from forgather_cli.config.schema import PostLocalSGD
from forgather_cli.documents.encoding import Encoded, decode
from forgather_cli.errors import ConfigError, TrainingError


@pytest.mark.parametrize(("hook", "atol"), [("bf16_compress", 2e-3), ("fp16_compress", 2e-4)])
def test_half_formats_round_gradients_alike_on_all_ranks(hook: str, atol: float) -> None:
    first, second = run_ranks(2, trained, [even(2, 2)], {"comm_hook": hook})
    expected = reference(1)
    close(first["grads"][0], expected["grads"][0], atol)
    assert not equal(first["grads"][0], expected["grads"][0])
    assert equal(first["weights"], second["weights"])
    rounded = torch.bfloat16 if hook == "bf16_compress" else torch.float16
    assert all(torch.equal(grad, grad.to(rounded).float()) for grad in first["grads"][0].values())


def powersgd(resume_at: int, steps: int = 6) -> dict[str, Any]:
    """Steps from shortly before compression starts; at ``resume_at`` everything is made anew from the saved state."""
    run = Run(strategy_of(comm_hook="powersgd"))
    state = run.strategy.own_state.state_dict()
    run.strategy.own_state.load_state_dict({**state, "iter": 998})
    grads = []
    for number in range(steps):
        if number == resume_at:
            run = resumed(run, comm_hook="powersgd")
        run.step(number, even(dist.get_world_size(), 1))
        grads.append(run.grads[-1])
    return {**run.result(), "grads": grads, "state": run.strategy.own_state.state_dict()}


def resumed(run: Run, **settings: Any) -> Run:
    """A run made anew, which goes on from the other's weights, moments and own state as they come from a checkpoint."""
    encoded = Encoded()
    encoded.add("strategy", (run.strategy.own_state or run.outer).state_dict())
    document = json.loads(json.dumps(encoded.documents))["strategy"]
    again = Run(strategy_of(lambda: copy.deepcopy(run.model), **settings))
    again.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
    (again.strategy.own_state or again.outer).load_state_dict(decode(document, encoded.tensors.__getitem__))
    return again


def loaded_elsewhere(state: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    run = Run(strategy_of(comm_hook="powersgd"))
    run.strategy.own_state.load_state_dict(state)
    loaded = run.strategy.own_state.state_dict()
    run.step(0, even(3, 1))
    return loaded, run.result()


def test_powersgd_approximates_after_its_start_and_goes_on_after_a_resume_by_more_ranks_with_its_counters() -> None:
    straight, other = run_ranks(2, powersgd, -1)
    expected = reference(6)
    for number in range(2):
        close(straight["grads"][number], expected["grads"][number], 1e-6)
    compressed = straight["grads"][3]
    (name,) = [key for key in compressed if "layers.0" in key and "up_proj" in key]
    assert torch.linalg.matrix_rank(compressed[name], rtol=1e-4) == 1
    assert equal(straight["weights"], other["weights"])
    for ours, theirs in zip(run_ranks(2, powersgd, 4), (straight, other), strict=True):
        assert equal(ours["weights"], theirs["weights"])
        assert ours["state"]["iter"] == theirs["state"]["iter"] == 1004
    state = straight["state"]
    ranks = run_ranks(3, loaded_elsewhere, state)
    assert state["error_dict"]
    assert [(loaded["iter"], loaded["error_dict"]) for loaded, _ in ranks] == [(1004, {})] * 3
    assert all(equal(result["weights"], ranks[0][1]["weights"]) for _, result in ranks)


LOCAL = PostLocalSGD(enabled=True, start_step=2, period=3)


def local_sgd(settings: PostLocalSGD, steps: int, resume_at: int = -1, slices: Slices | None = None) -> dict[str, Any]:
    run = Run(strategy_of(post_local_sgd=settings))
    settled, norms = [], []
    for number in range(steps):
        if number == resume_at:
            run = resumed(run, post_local_sgd=settings)
        run.step(number, slices or even(dist.get_world_size(), 2))
        settled.append(run.outer.weights_are_equal)
        norms.append(run.norms[-1])
    apart = weights_of(run.model)
    run.outer.average_weights()
    return {"settled": settled, "norms": norms, "apart": apart, "weights": weights_of(run.model)}


def local_sgd_by_hand(
    ranks: int, steps: int, settings: PostLocalSGD, group: int = 1, slices: Slices | None = None
) -> list[dict[str, Any]]:
    """One model per rank in one process. Ordinary steps use the whole batch; local ones a group's mean gradient."""
    slices = slices or even(ranks, 1)
    models = [tiny.decoder() for _ in range(ranks)]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    norms: list[list[float]] = [[] for _ in models]
    for number in range(steps):
        batch, local = global_batch(number), number >= settings.start_step
        for rank, model in enumerate(models):
            mean_loss(model, cut(batch, slices[rank][0]) if local else batch).backward()  # type: ignore[no-untyped-call]
        if local:
            for first in range(0, ranks, group):
                average(models[first : first + group], of=lambda p: p.grad)
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            norms[rank].append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
        if local and (number + 1 - settings.start_step) % settings.period == 0:
            average(models, of=lambda p: p)
    return [{"norms": n, "apart": weights_of(m)} for n, m in zip(norms, models, strict=True)]


@torch.no_grad()
def average(models: list[nn.Module], of: Callable[[Tensor], Tensor]) -> None:
    """What ``of`` finds for each parameter becomes the mean of all models."""
    for same in zip(*(model.parameters() for model in models), strict=True):
        mean = torch.stack([of(p) for p in same]).mean(0)
        for p in same:
            of(p).copy_(mean)


def same_local_run(ranks: list[dict[str, Any]], by_hand: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(ranks, by_hand, strict=True):
        assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-5)
        close(ours["apart"], theirs["apart"], 1e-5)
        assert equal(ours["weights"], ranks[0]["weights"])


def test_ranks_train_by_themselves_average_their_weights_and_are_resumed_with_counter_and_moments() -> None:
    ranks = run_ranks(2, local_sgd, LOCAL, 7)
    assert [result["settled"] for result in ranks] == [[True, True, False, False, True, False, False]] * 2
    same_local_run(ranks, local_sgd_by_hand(2, 7, LOCAL))
    assert not equal(ranks[0]["apart"], ranks[1]["apart"])
    mean = {name: (value + ranks[1]["apart"][name]) / 2 for name, value in ranks[0]["apart"].items()}
    close(ranks[0]["weights"], mean, 1e-7)
    again = run_ranks(2, local_sgd, LOCAL, 7, 5)  # made anew at an average
    assert [result["settled"] for result in again] == [result["settled"] for result in ranks]
    assert all(equal(ours["apart"], theirs["apart"]) for ours, theirs in zip(again, ranks, strict=True))


def test_gradients_may_still_be_averaged_within_a_subgroup() -> None:
    pairs = dataclasses.replace(LOCAL, subgroup=2, period=4)
    same_local_run(run_ranks(4, local_sgd, pairs, 5, -1, even(4, 1)), local_sgd_by_hand(4, 5, pairs, group=2))
    whole = dataclasses.replace(LOCAL, post_local_gradient_allreduce=True)
    same_local_run(run_ranks(2, local_sgd, whole, 4), local_sgd_by_hand(2, 4, whole, group=2))


def refused_subgroup() -> str:
    with pytest.raises(ConfigError) as caught:
        strategy_of(post_local_sgd=dataclasses.replace(LOCAL, subgroup=2))
    return str(caught.value)


def test_a_subgroup_must_divide_the_ranks() -> None:
    (message, *_) = run_ranks(3, refused_subgroup)
    assert message == ("post_local_sgd.subgroup: 3 ranks cannot be divided into groups of 2; set it to a divisor of 3")


def buffers_of_local_steps() -> list[float]:
    model = Buffered()
    run = Run(strategy_of(lambda: model, find_unused_parameters=True, post_local_sgd=LOCAL))
    seen = []
    for number in range(6):
        model.number.fill_(dist.get_rank())
        run.step(number, even(2, 1))
        seen.append(float(model.number))
    return seen


def test_buffers_are_sent_only_where_weights_were_averaged() -> None:
    assert run_ranks(2, buffers_of_local_steps)[1] == [0, 0, 0, 1, 1, 0]


def exported(root: str, ending: str) -> tuple[dict[int, str], dict[str, Tensor]]:
    """Steps whose weights could not be written; this rank's weights at the end. Averages are at steps 2 and 5."""
    directory, refused = Path(root), {}

    def write(state: Any, control: Any, trainer: Any, **_: Any) -> None:
        control.should_abort_without_save |= ending == "aborted" and state.global_step == 6
        try:
            trainer.save_model(str(directory / str(state.global_step)))
        except TrainingError as error:
            refused[state.global_step] = str(error)

    trainer = tiny.script(
        directory / "run", None, tiny.RandomTokens(ragged=True), max_steps=6 if ending == "done" else 9,
        learning_rate=1e-2, per_device_train_batch_size=2, callbacks=[tiny.acts(on_step_end=write)],
        strategy=DDPSettings(post_local_sgd=LOCAL),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(directory / "end"))
    return refused, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("ending", ["done", "aborted"])
def test_weights_are_averaged_at_the_end_without_a_save_and_never_written_before(ending: str, tmp_path: Path) -> None:
    (refused, mine), (_, theirs) = run_ranks(2, exported, str(tmp_path), ending)
    assert equal(mine, theirs)
    saved = load_file(tmp_path / "end" / "model.safetensors")
    assert all(torch.equal(saved[name], mine[name]) for name in saved)
    assert list(refused) == [3, 4, 6]
    assert "post_local_sgd" in refused[3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2", "5", "end", "run"]
