"""Fully sharded training on gloo ranks, beside plain PyTorch on the whole batch."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ddp import Buffered, Run
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from whole_batch import CPU, Slices, agree, close, cut, even, global_batch, mean_loss, targets, whole
from whole_batch import reference as steps_of

from forgather_cli.config.schema import (
    AdamWSettings,
    BF16Settings,
    FSDP2Settings,
    PretrainedSettings,
    RunSettings,
    SGDSettings,
)
from forgather_cli.distributed import clip_grad_norm
from forgather_cli.errors import ModelError, SetupError
from forgather_cli.loss.losses import CrossEntropy, LinearCrossEntropy
from forgather_cli.models.build import initialize
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.generate import generate
from forgather_cli.models.init import init_parameters
from forgather_cli.models.transform import apply_activation_checkpointing, compile_blocks
from forgather_cli.optim.build import build_optimizer
from forgather_cli.optim.in_backward import FusedBackward
from forgather_cli.shards import local
from forgather_cli.strategies.base import Batch, ModelSpec
from forgather_cli.strategies.fsdp2 import FullyShard

reference = partial(steps_of, lr=1e-3)


@dataclass(frozen=True)
class Case:
    """What is trained, and how. ``plan``: who gets which rows of each step's batch."""

    plan: Slices
    settings: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    loss: type[CrossEntropy | LinearCrossEntropy] = CrossEntropy
    bf16: bool = False
    change: Callable[[nn.Module], None] | None = None
    """Applied to the built model, as checkpointing and compilation are."""

    def strategy(self) -> FullyShard:
        loss = self.loss() if self.loss is CrossEntropy else LinearCrossEntropy(chunk_size=20)
        if self.change is compiled:  # with the head, whose weight is gathered then
            loss.compile(backend="aot_eager", fullgraph=True)
        strategy = FullyShard(FSDP2Settings(**self.settings), CPU, loss, BF16Settings() if self.bf16 else None)
        init = partial(init_parameters, seed=0)
        strategy.materialize(ModelSpec(lambda: on_meta(self.change, **self.model), init=init))
        return strategy


def on_meta(change: Callable[[nn.Module], None] | None = None, **model: Any) -> Decoder:
    with torch.device("meta"):
        built = Decoder(tiny.decoder_settings(**model))
    if change is not None:
        change(built)
    return built


def named(strategy: FullyShard) -> dict[str, Any]:
    """Parameters by the full model's names."""
    state = strategy.parts[0].state_dict(keep_vars=True)
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, nn.Parameter)}


def trained(strategy: FullyShard, plan: Slices) -> dict[str, Any]:
    run = Run(strategy, named(strategy), lr=1e-3)
    for step in range(3):
        run.step(step, plan)
    return run.result()


TIED = {"tie_word_embeddings": True}
ODD: dict[str, Any] = {
    "vocab_size": 65, "hidden_size": 24, "intermediate_size": 50, "head_dim": 2, "num_key_value_heads": 1,
    "qk_norm": True,
}  # fmt: skip
"""Nothing divides by 4, and some parameters have fewer rows than there are ranks."""


def compiled(model: nn.Module) -> None:
    compile_blocks(model, RunSettings(torch_compile=True, torch_compile_backend="aot_eager"))


UNEVEN: Slices = [[], [slice(0, 3)], [slice(3, 8), slice(8, 10), slice(10, 12)]]
"""Ranks may have no, one or several micro-batches."""
UNEVEN_COPIES: Slices = [[slice(0, 3)], [], [slice(3, 8), slice(8, 10)], [slice(10, 12)]]
CASES = {
    "2": Case(even(2, 1)),
    "2, accumulation 2, tied, linear": Case(even(2, 2), model=TIED, loss=LinearCrossEntropy),
    "2, accumulation 6": Case(even(2, 6)),
    "4, odd shapes": Case(even(4, 1), model=ODD),
    "4, odd shapes, tied, linear": Case(even(4, 3), model=ODD | TIED, loss=LinearCrossEntropy),
    "2x2": Case(even(4, 1), {"replicate": 2}),
    "2x2, accumulation 3, odd shapes": Case(even(4, 3), {"replicate": 2}, ODD),
    "2 copies": Case(even(2, 2), {"replicate": 2}),
    "offload": Case(even(2, 2), {"cpu_offload": True}),
    "gathered until the backward": Case(even(2, 2), {"reshard_after_forward": False}),
    "recomputed": Case(even(2, 1), change=apply_activation_checkpointing),
    "compiled": Case(even(2, 1), change=compiled),
    "compiled, tied, accumulation 2": Case(even(2, 2), model=TIED, change=compiled),
    "whole layers at once": Case(even(2, 1), {"block_classes": ["MLP", "Attention"]}),
    "3, uneven": Case(UNEVEN),
    "2x2, uneven, linear": Case(UNEVEN_COPIES, {"replicate": 2}, loss=LinearCrossEntropy),
}


def trained_cases(cases: list[Case]) -> list[dict[str, Any]]:
    return [trained(case.strategy(), case.plan) for case in cases]


@cache
def results(ranks: int) -> dict[str, list[dict[str, Any]]]:
    """Of all cases of so many ranks at once, by case and rank."""
    own = {name: case for name, case in CASES.items() if len(case.plan) == ranks}
    by_rank = run_ranks(ranks, trained_cases, list(own.values()))
    return {name: [found[n] for found in by_rank] for n, name in enumerate(own)}


@pytest.mark.parametrize("name", CASES)
def test_gradients_norms_and_weights_are_those_of_the_whole_batch(name: str) -> None:
    case = CASES[name]
    agree(results(len(case.plan))[name], reference(model=tiny.decoder(**case.model)))


def step_without_targets(plan: Slices) -> tuple[float, float, bool]:
    strategy = Case(plan).strategy()
    batch = global_batch(0)
    batch["labels"] = torch.full_like(batch["labels"], -100)
    mine = iter([cut(batch, rows) for rows in plan[strategy.data_rank]])  # a generator will do too
    loss = strategy.forward_backward(mine, torch.ones(()))
    grads = [local(p.grad) for p in named(strategy).values()]
    return float(loss), float(sum(g.abs().sum() for g in grads)), len(grads) > 0


def test_a_step_without_targets_has_no_gradient() -> None:
    assert run_ranks(2, step_without_targets, even(2, 2)) == [(0.0, 0.0, True)] * 2


class Net(nn.Module):
    """Blocks, a 0-dim parameter, positions in fp32, and two blocks that share a weight."""

    def __init__(self, share: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))
        self.scale = nn.Parameter(torch.empty(()))
        self.out = nn.Linear(8, 64)
        self.register_buffer("positions", torch.empty(16, 8))
        self.reset_parameters()
        if share:
            self.blocks[2][0].weight = self.blocks[0][0].weight

    @torch.no_grad()
    def reset_parameters(self) -> None:
        self.scale.fill_(0.5)
        self.positions.copy_(torch.linspace(0, 1, 16)[:, None].expand(16, 8))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids) + self.positions[: input_ids.shape[1]]
        for block in self.blocks:
            x = x + self.scale * block(x)
        return self.out(x)


def net(seed: int, share: bool) -> Net:
    torch.manual_seed(seed)
    return Net(share)


def trained_net(plan: Slices, settings: dict[str, Any], share: bool, meta: bool) -> dict[str, Any]:
    def build() -> Net:
        with torch.device("meta" if meta else CPU):
            return net(dist.get_rank(), share)  # every rank draws other weights

    strategy = FullyShard(FSDP2Settings(**settings), CPU, CrossEntropy())
    strategy.materialize(ModelSpec(build, init=(lambda part: init_parameters(part, 0)) if meta else None))
    return trained(strategy, plan)


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize(("plan", "settings"), [(even(2, 2), {}), (even(4, 1), {"replicate": 2})], ids=["2", "2x2"])
def test_weights_of_a_constructor_are_those_of_rank_0_also_scalars(
    plan: Slices, settings: dict[str, Any], share: bool
) -> None:
    agree(run_ranks(len(plan), trained_net, plan, settings, share, False), reference(model=net(0, share)))


def test_scalars_of_a_model_built_on_meta() -> None:
    expected = net(1, False)
    init_parameters(expected, 0)
    agree(run_ranks(2, trained_net, even(2, 2), {}, False, True), reference(model=expected))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).bfloat16()) for _ in range(2))


def messages() -> list[str]:
    found = []
    for model, settings in (
        (Net(), {"block_classes": ["Sequential", "Blok"]}),
        (Mixed(), {}),
        (Net(), {"replicate": 3}),
    ):
        with pytest.raises((ModelError, SetupError)) as caught:
            FullyShard(FSDP2Settings(**settings), CPU, CrossEntropy()).materialize(ModelSpec(lambda model=model: model))
        found.append(str(caught.value))
    return found


def test_what_cannot_be_sharded_is_said_by_name() -> None:
    unknown, mixed, copies = run_ranks(2, messages)[0]
    assert unknown.startswith("trainer.block_classes (in an accelerate_config: fsdp_transformer_layer_cls_to_wrap): ")
    assert unknown.endswith("Net has no Blok; name its repeated blocks, Sequential, or leave it out")
    assert "Mixed mixes torch.bfloat16 and torch.float32" in mixed
    assert copies == "replicate: 2 ranks cannot be divided into 3 copies of the model; set it to a divisor of 2"


def written(logits: Any) -> Tensor:
    """Greedily, and by beams."""
    prompts, real = torch.tensor([[5, 6, 7], [0, 8, 9]]), torch.tensor([[1, 1, 1], [0, 1, 1]])
    return torch.cat([
        generate(logits, prompts, real, max_new_tokens=6, do_sample=False, num_beams=beams) for beams in (1, 3)
    ])  # fmt: skip


def evaluated(settings: dict[str, Any]) -> dict[str, Any]:
    case = Case(even(2, 1), settings, TIED)
    strategy = case.strategy()
    optimizer = torch.optim.SGD(strategy.parts[0].parameters(), lr=0.5)
    losses, tokens, logits = [], [], []
    for step in range(3):
        shares = strategy.loss(cut(global_batch(9), case.plan[strategy.data_rank][0]))
        losses.append([float(share) for share in shares])
        tokens.append(written(strategy.logits))
        logits.append(strategy.logits(cut(global_batch(9), slice(0, 2))))
        assert all(isinstance(p, DTensor) for p in strategy.parts[0].parameters())
        batch = global_batch(step)
        mine = [cut(batch, rows) for rows in case.plan[strategy.data_rank]]
        strategy.forward_backward(mine, targets(batch))
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "tokens": tokens, "logits": logits}


@pytest.mark.parametrize("settings", [{}, {"reshard_after_forward": False}], ids=["freed", "kept"])
def test_evaluation_and_generation_see_the_weights_of_the_moment(settings: dict[str, Any]) -> None:
    ranks = run_ranks(2, evaluated, settings)
    model = tiny.decoder(**TIED)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def plain(batch: Batch, last_only: bool, cache: Any) -> Tensor:
        return model(**batch, last_only=last_only, cache=cache)

    for step in range(3):
        held_out = global_batch(9)
        sums = [sum(rank["losses"][step][n] for rank in ranks) for n in (0, 1)]
        assert sums[1] == targets(held_out)
        with torch.no_grad():
            assert sums[0] / sums[1] == pytest.approx(mean_loss(model, held_out).item(), rel=1e-6)
            expected = model(held_out["input_ids"][:2])
        for rank in ranks:
            assert torch.equal(rank["tokens"][step], written(plain))
            torch.testing.assert_close(rank["logits"][step], expected, rtol=0, atol=1e-5)
        mean_loss(model, global_batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def in_bf16(loss: Any, settings: dict[str, Any]) -> dict[str, Any]:
    case = Case(even(2, 2), settings, TIED, loss, bf16=True)
    strategy = case.strategy()
    seen: dict[str, Any] = {}
    layer: Any = strategy.parts[0].get_submodule("model.layers.1")
    layer.mlp.register_forward_hook(
        lambda module, args, out: seen.update(weight=module.up_proj.weight.dtype, hidden=args[0].dtype)
    )
    layer.self_attn.register_forward_pre_hook(lambda module, args: seen.update(angles=args[1].cos.dtype))
    batch = global_batch(0)
    mine = [cut(batch, rows) for rows in case.plan[strategy.data_rank]]
    share = strategy.forward_backward(mine, targets(batch))
    grads = {name: whole(p.grad) for name, p in named(strategy).items()}
    total, _ = strategy.loss(batch)
    dtypes = {"share": share.dtype, "loss": total.dtype, "grad": next(iter(grads.values())).dtype, **seen}
    return {"dtypes": dtypes, "share": float(share), "grads": grads}


@pytest.mark.parametrize("loss", [CrossEntropy, LinearCrossEntropy])
@pytest.mark.parametrize("settings", [{}, {"reduce_dtype": "bf16"}], ids=["", "reduced in bf16"])
def test_bf16_is_a_policy(loss: Any, settings: dict[str, Any]) -> None:
    ranks = run_ranks(2, in_bf16, loss, settings)
    f32, bf16 = torch.float32, torch.bfloat16
    expected = {"share": f32, "loss": f32, "grad": f32, "weight": bf16, "hidden": bf16, "angles": f32}
    assert [rank["dtypes"] for rank in ranks] == [expected] * 2
    plain = reference(1, tiny.decoder(**TIED))
    assert sum(rank["share"] for rank in ranks) == pytest.approx(plain["losses"][0], rel=1e-3)
    for name, grad in plain["grads"][0].items():
        apart = (ranks[0]["grads"][name] - grad).norm() / grad.norm()
        assert 1e-5 < apart < 0.03, name


def bf16_net() -> float:
    strategy = FullyShard(FSDP2Settings(), CPU, CrossEntropy(), BF16Settings())
    strategy.materialize(ModelSpec(lambda: net(0, False)))
    batch = global_batch(0)
    return float(strategy.forward_backward([batch], 2 * targets(batch)))


def test_hidden_states_in_fp32_enter_blocks_in_bf16() -> None:
    assert sum(run_ranks(2, bf16_net)) == pytest.approx(mean_loss(net(0, False), global_batch(0)).item(), rel=1e-2)


def fused(option: Any, fuse: bool, replicate: int) -> tuple[list[float], dict[str, Tensor], bool]:
    strategy = FullyShard(FSDP2Settings(replicate=replicate), CPU, CrossEntropy())
    strategy.materialize(ModelSpec(lambda: net(0, False)))
    parameters = named(strategy)
    build = FusedBackward if fuse else build_optimizer
    optimizer: Any = build(option, parameters.items(), lr=1e-2, weight_decay=0.1)
    norms, freed = [], True
    for step in range(3):
        batch = global_batch(step)
        strategy.forward_backward([cut(batch, even(strategy.data_size, 1)[strategy.data_rank][0])], targets(batch))
        freed &= all(p.grad is None for p in parameters.values())
        norm = (
            optimizer.grad_norm(strategy.model_group, strategy.duplicates)
            if fuse
            else clip_grad_norm(list(parameters.values()), None, strategy.model_group, strategy.duplicates)
        )
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms, {name: whole(p) for name, p in parameters.items()}, freed


@pytest.mark.parametrize(
    ("option", "ranks", "replicate"), [(AdamWSettings(), 2, 1), (SGDSettings(momentum=0.9), 4, 2)], ids=["2", "2x2"]
)
def test_the_optimizer_in_the_backward_equals_the_ordinary_one(option: Any, ranks: int, replicate: int) -> None:
    ordinary, in_backward = (run_ranks(ranks, fused, option, fuse, replicate) for fuse in (False, True))
    for (norms, weights, _), (fused_norms, fused_weights, freed) in zip(ordinary, in_backward, strict=True):
        assert freed
        assert fused_norms == pytest.approx(norms, rel=1e-6)
        close(fused_weights, weights, 0.0)


def script(folder: str, sharded: bool) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    trainer = tiny.script(
        folder, None, tiny.RandomTokens(ragged=True), max_steps=4, logging_steps=1, fuse_optim_with_backward=True,
        max_grad_norm=None, per_device_train_batch_size=4 if sharded else 8,
        strategy=FullyShard(FSDP2Settings(), CPU, CrossEntropy()) if sharded else None,
    )  # fmt: skip
    trainer.train()
    return trainer.state.log_history, {n: whole(p) for n, p in trainer.model.state_dict().items()}


def test_a_trainer_with_the_optimizer_in_the_backward(tmp_path: Path) -> None:
    records, weights = script(str(tmp_path / "one"), False)
    for found, ours in run_ranks(2, script, str(tmp_path / "two"), True):
        for key in ("loss", "grad_norm"):
            expected = [record[key] for record in records if key in record]
            assert [record[key] for record in found if key in record] == pytest.approx(expected, rel=1e-5)
            assert len(expected) == 4
        close(ours, weights, 1e-5)


LARGE = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 12}


class PeakMemory(TorchDispatchMode):
    """The most bytes at a time behind the tensors that operations inside make, rows of DTensors among them."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, weakref.ref[Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in (local(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor) and not leaf.is_meta):
            number = id(made)
            self._alive[number] = weakref.ref(made, lambda _, number=number: self._alive.pop(number, None))
        alive = [tensor for ref in list(self._alive.values()) if (tensor := ref()) is not None]
        self.peak = max(self.peak, stored(alive))
        return out


def memory(directory: Path | None) -> dict[str, float]:
    """Bytes over those of a whole fp32 model."""
    strategy = FullyShard(FSDP2Settings(), CPU, CrossEntropy())
    init = (
        (lambda part: initialize(PretrainedSettings(path=str(directory)), part, 0))
        if directory
        else (lambda part: init_parameters(part, 0))
    )
    with PeakMemory() as sharded:
        strategy.materialize(ModelSpec(lambda: on_meta(**LARGE), init=init))
    with PeakMemory() as plain:
        tiny.decoder(**LARGE)
    parameters = named(strategy)
    optimizer = build_optimizer(AdamWSettings(), parameters.items(), lr=1e-3, weight_decay=0.1)
    batch = cut(global_batch(0), slice(0, 2))
    strategy.forward_backward([batch, batch], targets(batch))
    gradients = [p.grad for p in parameters.values()]
    optimizer.step()
    moments = [t for name, t in optimizer.state_tensors().items() if not name.endswith(".step")]
    used = {"parameters": stored(parameters.values()), "gradients": stored(gradients), "moments": stored(moments)}
    full = sum(p.numel() for p in parameters.values())
    return {kind: b / 4 / full for kind, b in {**used, "peak": sharded.peak, "peak of one device": plain.peak}.items()}


def stored(tensors: Iterable[Tensor]) -> int:
    """Bytes of this rank's memory behind ``tensors``, which may share it."""
    storages = [local(t).untyped_storage() for t in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("source", ["drawn", "pretrained"])
def test_a_rank_holds_its_share_and_never_a_whole_model(tmp_path: Path, source: str) -> None:
    directory = tiny.pretrained(tmp_path, tiny.decoder(7, **LARGE)) if source == "pretrained" else None
    for found in run_ranks(4, memory, directory):
        assert found["parameters"] == pytest.approx(0.25, rel=0.1)
        assert found["gradients"] == pytest.approx(0.25, rel=0.1)
        assert found["moments"] == pytest.approx(0.5, rel=0.1)
        assert found["peak"] < 0.5
        assert found["peak of one device"] > 1.0


def loaded(directory: Path, model: dict[str, Any]) -> dict[str, Tensor]:
    strategy = FullyShard(FSDP2Settings(), CPU, LinearCrossEntropy())
    strategy.materialize(
        ModelSpec(
            lambda: on_meta(**model), init=lambda part: initialize(PretrainedSettings(path=str(directory)), part, 0)
        )
    )
    return {name: whole(p) for name, p in named(strategy).items()}


@pytest.mark.parametrize("model", [ODD, ODD | TIED], ids=["untied", "tied"])
def test_pretrained_weights_are_read_by_rows(tmp_path: Path, model: dict[str, Any]) -> None:
    whole_model = tiny.decoder(7, **model)
    for found in run_ranks(4, loaded, tiny.pretrained(tmp_path, whole_model), model):
        close(found, dict(whole_model.named_parameters(remove_duplicate=False)), 0.0)


def constructed(offload: bool) -> dict[str, Tensor]:
    strategy = FullyShard(FSDP2Settings(cpu_offload=offload), CPU, CrossEntropy())
    strategy.materialize(ModelSpec(lambda: tiny.decoder(3, **ODD), init=lambda part: init_parameters(part, 0)))
    return {name: whole(p) for name, p in named(strategy).items()}


@pytest.mark.parametrize("offload", [False, True])
def test_a_model_built_with_memory_gets_the_same_weights(offload: bool) -> None:
    for found in run_ranks(4, constructed, offload):
        close(found, dict(tiny.decoder(0, **ODD).named_parameters()), 0.0)


@pytest.fixture
def no_group() -> Iterator[None]:
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("no_group")
def test_one_process_makes_a_group_for_itself(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        case = Case(even(1, 2), {"cpu_offload": True}, ODD | TIED)
        agree(trained_cases([case]), reference(model=tiny.decoder(**case.model)))
    assert "this process trains alone" in caplog.text


@pytest.mark.usefixtures("no_group")
def test_a_model_without_blocks_is_gathered_at_once(caplog: pytest.LogCaptureFixture) -> None:
    strategy = FullyShard(FSDP2Settings(), CPU, CrossEntropy())
    strategy.materialize(ModelSpec(Buffered))
    total, count = strategy.loss(global_batch(0))
    assert math.isfinite(total / count)
    assert "Buffered has no list of equal blocks" in caplog.text
