"""One rounded copy of the weights for all micro-batches of a step: bit by bit what autocast computes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from ranks import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from forgather_cli.config.schema import BF16Settings, DDPSettings, PipelineSettings, RunSettings, SingleSettings
from forgather_cli.loss.base import Loss
from forgather_cli.loss.losses import CrossEntropy, LinearCrossEntropy
from forgather_cli.models import transform
from forgather_cli.models.transform import apply_activation_checkpointing, compile_blocks
from forgather_cli.strategies.base import ModelSpec

BF16, CPU = torch.bfloat16, torch.device("cpu")
TARGETS = torch.tensor(3 * 60.0)
MODELS = {
    "own": tiny.decoder, "tied": partial(tiny.decoder, tie_word_embeddings=True),
    "biases": partial(tiny.decoder, attention_bias=True, qk_norm=True), "transformers": tiny.llama,
}  # fmt: skip


def batches() -> list[dict[str, Tensor]]:
    """Three of 4 x 16 tokens."""
    tokens = torch.randint(0, 64, (3, 4, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in tokens]


class Casts(TorchDispatchMode):
    """Counts how often each of the tensors ``watched`` is rounded to bf16."""

    def __init__(self, watched: dict[str, Tensor]) -> None:
        super().__init__()
        self._names = {tensor.data_ptr(): name for name, tensor in watched.items()}
        self.counts = dict.fromkeys(watched, 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        rounds = func.overloadpacket is torch.ops.aten._to_copy and out.dtype == BF16
        if rounds and (name := self._names.get(args[0].data_ptr())) is not None:
            self.counts[name] += 1
        return out


def matrices(part: nn.Module) -> dict[str, Tensor]:
    return {name: layer.weight for name, layer in part.named_modules() if isinstance(layer, nn.Linear)}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def plain(model: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The step as everybody writes it: a context of autocast for each micro-batch."""
    total = torch.zeros(())
    for batch in batches():
        with torch.autocast("cpu", BF16):
            out = model(batch["input_ids"])
            flat, labels = (
                getattr(out, "logits", out).flatten(0, 1).float(),
                F.pad(batch["labels"][:, 1:], (0, 1), value=-100),
            )
            loss = F.cross_entropy(flat, labels.flatten(), reduction="sum") / TARGETS
        loss.backward()
        total += loss.detach()
    return total, gradients(model)


def stepped(made: Any, option: Any = None, loss: Loss | None = None, **changes: Any):
    """(share of the loss, gradients, how often each matrix was rounded, the strategy) of one step."""
    option = option or SingleSettings()
    strategy = option.load_maker()(option, CPU, loss or CrossEntropy(), BF16Settings())
    strategy.materialize(ModelSpec(made, **changes))
    with Casts({name: w for part in strategy.parts for name, w in matrices(part).items()}) as casts:
        share = strategy.forward_backward(batches(), TARGETS)
    return share, {n: g for part in strategy.parts for n, g in gradients(part).items()}, casts.counts, strategy


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], gradient), name


@pytest.fixture
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transform, "_WORTH_SHARING", 1)


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_autocast_and_weights_are_rounded_once(kind: str, checkpointing: bool) -> None:
    made: Any = MODELS[kind]
    changes = {"checkpoint": checkpointed} if checkpointing and kind != "transformers" else {}
    share, found, rounded, strategy = stepped(made, **changes)
    total, expected = plain(made())
    assert torch.equal(share, total)
    assert_same(found, expected)
    assert set(rounded.values()) == {1}
    assert not any(tensor.dtype == BF16 for module in strategy.parts[0].modules() for tensor in kept(module)), "dropped"


@pytest.mark.usefixtures("small_ones_too")
def test_no_gradient_is_held_back_to_the_end_of_the_backward() -> None:
    strategy = stepped(tiny.decoder)[3]
    model: Any = strategy.parts[0]
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    model.model.layers["0"].register_forward_pre_hook(
        lambda _, args: args[0].register_hook(lambda _: order.append("first layer is done")) and None
    )
    strategy.forward_backward(batches(), TARGETS)
    last = order[2 * len(order) // 3 :]
    assert last[-2:] == ["first layer is done", "model.embed_tokens.weight"], last


def checkpointed(part: nn.Module) -> nn.Module:
    apply_activation_checkpointing(part)
    return part


def kept(module: nn.Module) -> list[Tensor]:
    return [value for value in vars(module).values() if isinstance(value, Tensor)]


def test_small_matrices_and_a_head_that_the_loss_multiplies_with_are_left_alone(monkeypatch: Any) -> None:
    assert set(stepped(tiny.decoder)[2].values()) == {3}
    monkeypatch.setattr(transform, "_WORTH_SHARING", 1)
    _, _, rounded, _ = stepped(tiny.decoder, loss=LinearCrossEntropy())
    assert {name: n for name, n in rounded.items() if n != 1} == {"lm_head": 3}


@pytest.mark.usefixtures("small_ones_too")
@pytest.mark.parametrize(
    ("backend", "checkpointing"),
    [
        ("aot_eager", False),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [("aot_eager", True), ("inductor", False)]),
    ],
)
def test_compiled_blocks_share_them_too(backend: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._dynamo.utils import counters

    def compiled(part: nn.Module) -> nn.Module:
        compile_blocks(part, RunSettings(torch_compile=True, torch_compile_backend=backend, device="cpu"))
        return part

    changes: dict[str, Any] = {"checkpoint": checkpointed if checkpointing else None, "compile": compiled}
    torch.compiler.reset()
    counters.clear()
    share, found, rounded, strategy = stepped(tiny.decoder, **changes)
    assert set(rounded.values()) == {1}
    graphs = counters["stats"]["unique_graphs"]
    for _ in range(2):
        strategy.forward_backward(batches(), TARGETS)
    assert counters["stats"]["unique_graphs"] == graphs
    assert not counters["graph_break"]
    monkeypatch.setattr(transform, "_WORTH_SHARING", 1 << 30)
    share_apart, apart, *_ = stepped(tiny.decoder, **changes)
    assert torch.equal(share, share_apart)
    assert_same(found, apart)
    torch.compiler.reset()


def on_ranks(option: Any) -> tuple[dict[str, int], list[str]]:
    """How often each matrix was rounded; what differs from a step in which nothing is shared."""
    model = partial(tiny.decoder, num_hidden_layers=4)
    worth, transform._WORTH_SHARING = transform._WORTH_SHARING, 1
    share, found, rounded, _ = stepped(model, option)
    transform._WORTH_SHARING = 1 << 30
    share_apart, apart, *_ = stepped(model, option)
    transform._WORTH_SHARING = worth
    differing = [name for name, gradient in apart.items() if not torch.equal(found[name], gradient)]
    return rounded, differing + ["loss"] * (not torch.equal(share, share_apart))


@pytest.mark.parametrize(
    "option",
    [
        DDPSettings(),
        DDPSettings(static_graph=True),
        PipelineSettings(n_microbatches=2),
        PipelineSettings(n_microbatches=4, schedule="ZBVZeroBubble"),
    ],
    ids=["ddp", "ddp, static graph", "1F1B", "ZBVZeroBubble"],
)
def test_every_strategy_computes_with_them_what_it_computes_without(option: Any) -> None:
    for rounded, differing in run_ranks(2, on_ranks, option):
        assert differing == []
        assert set(rounded.values()) == {1}
