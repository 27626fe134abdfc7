"""Model and loss compiled as one, and head and loss behind compiled blocks, beside the same in eager mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import paired
import pytest
import tiny
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from forgather_cli.errors import ModelError, PartError
from forgather_cli.loss.base import Loss, ModelWithLoss
from forgather_cli.loss.eval_metrics import EvalMetrics
from forgather_cli.loss.losses import CrossEntropy, LinearCrossEntropy
from forgather_cli.models.transform import apply_activation_checkpointing, blocks_of

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch 2.13's dynamo reads it itself

Batch = dict[str, Tensor]
OPTIONS: dict[str, Any] = {"z_loss": 1e-3, "label_smoothing": 0.1}


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def tokens(rows: int, length: int) -> Tensor:
    return torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(rows))


def one_side(rows: int = 4, length: int = 16) -> Batch:
    labels = tokens(rows, length)
    return {"input_ids": labels, "labels": labels.masked_fill(labels < 9, -100)}


def documents() -> Batch:
    return one_side() | {"document_ids": (torch.arange(16) // 5).expand(4, -1).contiguous()}


def two_sides() -> Batch:
    mask = torch.ones(3, 11, dtype=torch.int64)
    mask[0, :4] = 0
    return {
        "input_ids": tokens(3, 11), "decoder_input_ids": tokens(3, 9), "attention_mask": mask, "labels": tokens(3, 9),
    }  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch]] = {
    "decoder": (tiny.decoder, one_side()),
    "decoder, documents, tied": (lambda: tiny.decoder(tie_word_embeddings=True), documents()),
    "encoder-decoder": (lambda: paired.model(vocab_size=64, initializer_range=0.3), two_sides()),
}


def computed(module: ModelWithLoss, batch: Batch, steps: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses, and gradients added up over so many steps."""
    count = (batch["labels"] != -100).sum()
    losses = [module(batch, count) / count for _ in range(steps)]
    torch.stack(losses).sum().backward()
    return torch.stack(losses).detach(), {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def agree(module: ModelWithLoss, reference: ModelWithLoss, batch: Batch) -> None:
    (losses, gradients), (expected, theirs) = computed(module, batch), computed(reference, batch)
    torch.testing.assert_close(losses, expected, rtol=1e-6, atol=0)
    assert gradients.keys() == theirs.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=0, atol=1e-6, msg=name)


def in_blocks(model: nn.Module, loss: Loss, **options: Any) -> ModelWithLoss:
    for block in blocks_of(model):
        block.compile(**options)
    loss.compile(**options)
    return ModelWithLoss(model, loss)


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_of_model_and_loss_is_one_graph(name: str, recomputed: bool) -> None:
    build, batch = MODELS[name]
    model, counter = build(), CompileCounterWithBackend("aot_eager")
    if recomputed:
        apply_activation_checkpointing(model)
    module = ModelWithLoss(model, CrossEntropy(**OPTIONS), {"backend": counter, "fullgraph": True})
    reference = ModelWithLoss(build(), CrossEntropy(**OPTIONS))
    assert list(module.state_dict()) == list(reference.state_dict())
    agree(module, reference, batch)
    inputs = {key: value for key, value in batch.items() if key != "labels"}
    torch.testing.assert_close(model(**inputs), reference.model(**inputs))
    assert counter.frame_count == 1, "generation and the second step compile nothing"


def test_a_fused_loss_stays_beside_the_graph_of_the_model_and_its_chunks_are_a_graph() -> None:
    graph, chunks = CompileCounterWithBackend("aot_eager"), CompileCounterWithBackend("aot_eager")
    loss, reference = (LinearCrossEntropy(chunk_size=8, **OPTIONS) for _ in range(2))
    loss.compile(backend=chunks)
    agree(ModelWithLoss(tiny.decoder(), loss, {"backend": graph}), ModelWithLoss(tiny.decoder(), reference), one_side())
    assert (graph.frame_count, chunks.frame_count) == (1, 1)


@pytest.mark.parametrize("name", MODELS)
def test_behind_compiled_blocks_head_and_loss_are_one_more_graph(name: str) -> None:
    build, batch = MODELS[name]
    counter = CompileCounterWithBackend("aot_eager")
    module = in_blocks(build(), CrossEntropy(**OPTIONS), backend=counter, fullgraph=True)
    agree(module, ModelWithLoss(build(), CrossEntropy(**OPTIONS)), batch)
    assert counter.frame_count == (3 if name == "encoder-decoder" else 2)
    [heads] = [g for g in counter.graphs if any("cross_entropy" in str(node.target) for node in g.graph.nodes)]
    assert any("linear" in str(node.target) for node in heads.graph.nodes)
    assert tuple(heads.graph.find_nodes(op="output")[0].args[0][0].meta["example_value"].shape) == ()


class Capped(nn.Module):
    """Does more to its logits than its head, and says so when it is asked for hidden states."""

    def __init__(self, admits: bool) -> None:
        super().__init__()
        self.embedding, self.head, self.admits = nn.Embedding(64, 8), nn.Linear(8, 64), admits
        if admits:
            self.has_plain_head = True

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        if self.admits:
            self.has_plain_head = False
            raise ModelError("loss: Capped does more")
        hidden: Tensor = self.embedding(input_ids)
        return hidden

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.embedding(input_ids)).tanh()


@pytest.mark.parametrize("admits", [False, True])
def test_a_head_that_is_not_plain_keeps_its_loss(admits: bool) -> None:
    torch.manual_seed(0)
    model = Capped(admits)
    expected = float(ModelWithLoss(model, CrossEntropy())(one_side()).detach())
    loss = CrossEntropy()
    loss.compile(backend=CompileCounterWithBackend("eager"))
    module = ModelWithLoss(model, loss)
    assert [float(module(one_side()).detach()) for _ in range(2)] == [expected] * 2


@torch.no_grad()
def evaluated(module: ModelWithLoss, rows: int, length: int = 16) -> float:
    return float(module.evaluate(one_side(rows, length)))


@pytest.mark.parametrize("first", ["training", "evaluation"])
def test_shapes_of_evaluations_compile_once_each_and_leave_training_its_own(first: str) -> None:
    counter = CompileCounterWithBackend("eager")
    module = ModelWithLoss(tiny.decoder(), CrossEntropy(), {"backend": counter, "fullgraph": True})
    if first == "training":
        computed(module, one_side())
        evaluated(module, 2)
    else:
        evaluated(module, 2)
        computed(module, one_side())
    assert counter.frame_count == 2
    whole = [node.meta.get("example_value") for graph in counter.graphs for node in graph.graph.nodes]
    assert not any(isinstance(each, torch.SymInt) for each in whole), "code for one shape each"
    plain = ModelWithLoss(tiny.decoder(), CrossEntropy())
    for rows, length in ((3, 16), (5, 16), (3, 12), (6, 11), (7, 9), (2, 16)):
        assert evaluated(module, rows, length) == pytest.approx(evaluated(plain, rows, length), rel=1e-6)
    assert counter.frame_count == 4, "another number of rows, another length"
    computed(module, one_side())
    assert counter.frame_count == 4


@torch.no_grad()
def test_what_an_evaluation_counts_it_counts_in_python() -> None:
    counter, loss = CompileCounterWithBackend("eager"), CrossEntropy()
    module = ModelWithLoss(tiny.decoder(), loss, {"backend": counter})
    loss.eval_metrics = EvalMetrics(torch.device("cpu"))
    evaluated(module, 2)
    assert counter.frame_count == 0
    plain = CrossEntropy()
    plain.eval_metrics = EvalMetrics(torch.device("cpu"))
    ModelWithLoss(tiny.decoder(), plain)(one_side(2))
    assert int(loss.eval_metrics.correct) == int(plain.eval_metrics.correct)


@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_what_does_not_fit_is_told_as_without_compilation(scope: str) -> None:
    options = {"backend": "aot_eager"}
    as_one = ModelWithLoss(tiny.decoder(), CrossEntropy(), options) if scope == "model" else None
    module = as_one or in_blocks(tiny.decoder(), CrossEntropy(), **options)
    good, batch = one_side(), one_side()
    module(good).backward()
    with pytest.raises(PartError, match="a label is 64, and the model has 64 tokens"):
        module(batch | {"labels": torch.full_like(batch["labels"], 64)})
    with pytest.raises(PartError, match="4 x 16 tokens where the labels have 4 x 9"):
        module(batch | {"labels": batch["labels"][:, :9]})
    torch.testing.assert_close(module(good), ModelWithLoss(tiny.decoder(), CrossEntropy())(good))


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor imports
@pytest.mark.parametrize("scope", ["model", "blocks"])
def test_code_of_inductor_computes_the_same(scope: str) -> None:
    options = {"backend": "inductor"}
    as_one = ModelWithLoss(tiny.decoder(), CrossEntropy(**OPTIONS), options) if scope == "model" else None
    module = as_one or in_blocks(tiny.decoder(), CrossEntropy(**OPTIONS), **options)
    agree(module, ModelWithLoss(tiny.decoder(), CrossEntropy(**OPTIONS)), one_side())
