"""The pipeline against the un-split model: gradients, norms, steps, evaluation and generation, on real gloo ranks."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import RankError, refusals, run_ranks
from torch import Tensor, nn

from forgather_cli.config.schema import (
    BF16Settings,
    CrossEntropySettings,
    DecoderSettings,
    LinearCrossEntropySettings,
    PipelineSettings,
    PretrainedSettings,
    RunSettings,
)
from forgather_cli.distributed import clip_grad_norm
from forgather_cli.errors import DataError, ModelError
from forgather_cli.loss.base import Loss
from forgather_cli.loss.build import build_loss
from forgather_cli.loss.losses import CrossEntropy
from forgather_cli.models import files
from forgather_cli.models.build import initialize
from forgather_cli.models.cache import KVCache
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.generate import generate
from forgather_cli.models.init import init_parameters
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.models.transform import apply_activation_checkpointing, compile_blocks
from forgather_cli.shards import local
from forgather_cli.strategies.base import ModelSpec

CPU = torch.device("cpu")
V, T = 64, 12
SPLIT = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
EVERY = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", *SPLIT)
SHAPE: dict[str, Any] = {
    "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64,
    "vocab_size": V, "max_position_embeddings": 64, "attention_bias": True, "qk_norm": True,
}  # fmt: skip
Batch = dict[str, Tensor]


def pipeline_of(spec: ModelSpec, loss: Loss | None = None, precision: Any = None, **settings: Any) -> Any:
    from forgather_cli.strategies.pipeline import Pipeline

    pipeline = Pipeline(PipelineSettings(**settings), CPU, loss or CrossEntropy(), precision)
    pipeline.materialize(spec)
    return pipeline


@dataclass(frozen=True)
class Case:
    """One optimizer step, for the ranks and for the reference."""

    schedule: str = "1F1B"
    layers: int = 4
    n_microbatches: int = 4
    tied: bool = False
    loss: str = "plain"
    checkpointing: bool = False
    compiled: bool = False
    bf16: bool = False
    frozen: str = "nothing"
    """Parameters whose name starts so are not trained."""
    shard: int = 1
    uneven: bool = False
    """With ``shard`` the first slice of the data has all batches, the others none; else each has some rows of all."""
    batches: tuple[Batch, ...] = field(default=(), repr=False)

    def model(self) -> Decoder:
        model = Decoder(DecoderSettings(**SHAPE, num_hidden_layers=self.layers, tie_word_embeddings=self.tied))
        if self.checkpointing:
            apply_activation_checkpointing(model)
        if self.compiled:
            compile_blocks(model, RunSettings(torch_compile=True, torch_compile_backend="eager"))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not name.startswith(self.frozen))
        return model

    def on_meta(self) -> Decoder:
        with torch.device("meta"):
            return self.model()

    def filled(self) -> Decoder:
        model = replace(self, checkpointing=False, compiled=False).model()
        init_parameters(model, 3)
        return model

    def strategy(self) -> Any:
        spec = ModelSpec(self.on_meta, init=partial(init_parameters, seed=3))
        precision = BF16Settings() if self.bf16 else None
        settings = {"schedule": self.schedule, "n_microbatches": self.n_microbatches, "shard": self.shard}
        return pipeline_of(spec, self.loss_of(), precision, **settings)

    def loss_of(self) -> Loss:
        if self.loss == "user":
            return build_loss(loss_fn=mean_squared_surprise)
        fused = LinearCrossEntropySettings(chunk_size=10, z_loss=1e-3)
        loss = build_loss(fused if self.loss == "fused" else CrossEntropySettings(z_loss=1e-3))
        if self.compiled:
            loss.compile(backend="eager", fullgraph=True)
        return loss

    def slice_of(self, data_rank: int) -> list[Batch]:
        if self.uneven:
            return list(self.batches) if data_rank == 0 else []
        return [{k: v[data_rank :: self.shard] for k, v in each.items()} for each in self.batches]

    @property
    def targets(self) -> Tensor:
        return torch.tensor(float(max(1, sum(int((b["labels"][:, 1:] != -100).sum()) for b in self.batches))))


def mean_squared_surprise(logits: Tensor, labels: Tensor) -> Tensor:
    """A loss of a user's: mean over its own targets."""
    counted = labels[:, 1:] != -100
    chosen = logits[:, :-1].gather(-1, labels[:, 1:].clamp(min=0)[..., None])[..., 0]
    return ((chosen - logits[:, :-1].logsumexp(-1)).square() * counted).sum() / counted.sum()


def batch(rows: int, *, length: int = T, ragged: bool = False, documents: bool = False, seed: int = 0) -> Batch:
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (rows, length), generator=g)
    labels = ids.clone()
    if ragged:
        for row in labels:
            row[int(torch.randint(1, length + 1, (), generator=g)) :] = -100
    found = {"input_ids": ids, "labels": labels}
    if documents:
        starts = torch.rand(rows, length, generator=g) < 0.3
        found["document_ids"] = starts.long().cumsum(1)
        labels[starts] = -100
    return found


def stepped(case: Case) -> dict[str, Any]:
    pipeline = case.strategy()
    share = pipeline.forward_backward(iter(case.slice_of(pipeline.data_rank)), case.targets)
    named = {n: p for part in pipeline.parts for n, p in part.named_parameters() if p.requires_grad}
    shards = None if pipeline._sharding is None else pipeline._sharding.group
    after = after_backward(named, pipeline.model_group, pipeline.duplicates, shards)
    return {"share": share, "duplicates": len(pipeline.duplicates), **after}


def whole(tensor: Any, shards: Any) -> Tensor:
    """Collective for a sharded tensor, among the ranks that hold its rows. A copy of the full one."""
    rows: list[Any] = [local(tensor.detach())]
    if shards is not None:
        # not by the tensor's mesh, nor full_tensor(): it may be an equal one, whose groups were those of an earlier
        # function of this rank (torch 2.13 keeps layouts of results by meshes that are equal)
        rows *= shards.size()
        dist.all_gather_object(rows, rows[0], group=shards)
    return torch.cat(rows) if len(rows) > 1 else rows[0].clone()


def all_stepped(cases: list[Case]) -> list[dict[str, Any]]:
    return [stepped(case) for case in cases]


def after_backward(
    named: dict[str, nn.Parameter], group: Any = None, duplicates: Any = (), shards: Any = None
) -> dict[str, Any]:
    """Clip, which changes the gradients here, and one step of AdamW."""
    grads = {n: None if p.grad is None else whole(p.grad, shards) for n, p in named.items()}
    norm = clip_grad_norm(list(named.values()), 0.5, group, duplicates)
    # where a gradient is next to nothing AdamW's first step is its sign, and a large eps keeps rounding out of that
    torch.optim.AdamW(named.values(), lr=1e-3, eps=1e-5).step()
    return {"grads": grads, "norm": norm, "weights": {n: whole(p, shards) for n, p in named.items()}}


def reference(case: Case) -> dict[str, Any]:
    """The same step in plain PyTorch: one model, one backward over all batches."""
    model = case.filled()
    total = torch.zeros(())
    for each in case.batches:
        inputs = {k: v for k, v in each.items() if k != "labels"}
        with torch.autocast("cpu", torch.bfloat16, enabled=case.bf16):
            logits = model(**inputs).float()
        total = total + plain_loss(case, logits, each["labels"])
    loss = total / case.targets
    if case.batches:
        loss.backward()
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return {"share": loss.detach(), **after_backward(named)}


def plain_loss(case: Case, logits: Tensor, labels: Tensor) -> Tensor:
    """Sum over the targets."""
    if case.loss == "user":
        count = (labels[:, 1:] != -100).sum()
        return mean_squared_surprise(logits, labels) * count if count else logits.sum() * 0
    targets = nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
    entropy = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
    return entropy + 1e-3 * (logits.logsumexp(-1).square() * (targets != -100)).sum()


def assert_same(case: Case, ranks: list[dict[str, Any]], tolerance: float = 1e-6) -> None:
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    wanted = reference(case)
    close(sum(rank["share"] for rank in ranks), wanted["share"])
    for kind in ("grads", "weights"):
        assert {name for rank in ranks for name in rank[kind]} == wanted[kind].keys()
        for rank in ranks:
            for name, value in rank[kind].items():
                close(value, wanted[kind][name], msg=lambda m, n=name, k=kind: f"{k} of {n}: {m}")
    for rank in ranks:
        close(rank["norm"], wanted["norm"])


TWO_BATCHES = (batch(8, ragged=True, documents=True), batch(8, seed=1))
NO_TARGETS = {**batch(8, seed=2), "labels": torch.full((8, T), -100)}
SHAPES = (batch(8), batch(4, length=7), batch(3, ragged=True), batch(8, length=1), batch(8, seed=3))
MASKED = {
    **batch(8),
    "attention_mask": torch.ones(8, T, dtype=torch.int64).index_fill(1, torch.arange(2), 0),
    "position_ids": torch.arange(5, 5 + T)[None],
}
STEPS: dict[str, Case] = {
    **{s: Case(s, batches=TWO_BATCHES) for s in EVERY},
    **{f"{s} tied, fused": Case(s, tied=True, loss="fused", batches=TWO_BATCHES) for s in EVERY},
    **{f"{s} of other shapes": Case(s, loss="fused", batches=SHAPES) for s in ("1F1B", "DualPipeV")},
    **{f"{s} recomputed": Case(s, checkpointing=True, tied=True, batches=TWO_BATCHES) for s in ("GPipe", *SPLIT)},
    "user's loss": Case("ZBVZeroBubble", loss="user", batches=(*TWO_BATCHES, NO_TARGETS)),
    "fused": Case("InterleavedZeroBubble", loss="fused", batches=TWO_BATCHES),
    "8 accumulated": Case("ZBVZeroBubble", batches=tuple(batch(4, seed=s, ragged=True) for s in range(8))),
    "odd n_microbatches": Case("Interleaved1F1B", layers=6, n_microbatches=3, batches=(batch(6),)),
    "no targets": Case(tied=True, batches=(NO_TARGETS,)),
    "no micro-batches": Case(tied=True),
    "masks": Case("LoopedBFS", batches=(MASKED,)),
    "frozen first stage": Case(frozen="model.embed_tokens", layers=2, n_microbatches=2, batches=TWO_BATCHES),
    "compiled": Case(compiled=True, batches=(batch(8),)),
    "bf16": Case(bf16=True, batches=TWO_BATCHES),
    "DualPipeV in bf16, fused": Case("DualPipeV", bf16=True, loss="fused", batches=TWO_BATCHES),
}
ON_FOUR: dict[str, Case] = {
    s: Case(s, layers=8, n_microbatches=8, tied=True, batches=(batch(8, ragged=True), batch(8, seed=1)))
    for s in ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV")
}
SHARDED = ("1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS")
"""Schedules whose stages may be sharded."""
BY_TWO = {"shard": 2, "n_microbatches": 2}
ON_FOUR |= {
    **{f"{s}, sharded": Case(s, batches=TWO_BATCHES, **BY_TWO) for s in SHARDED},
    "sharded, tied, fused": Case(tied=True, loss="fused", batches=TWO_BATCHES, **BY_TWO),
    "sharded, interleaved, tied, recomputed": Case(
        "Interleaved1F1B", tied=True, checkpointing=True, batches=TWO_BATCHES, **BY_TWO
    ),
    "sharded, compiled": Case(compiled=True, batches=(batch(8),), **BY_TWO),
    "sharded, other shapes": Case(tied=True, batches=SHAPES[:3], **BY_TWO),
    "sharded, one slice is empty": Case("LoopedBFS", tied=True, uneven=True, batches=TWO_BATCHES, **BY_TWO),
    "sharded, bf16": Case(bf16=True, batches=TWO_BATCHES, **BY_TWO),
    "sharded, frozen first stage": Case(frozen="model.embed_tokens", layers=2, batches=TWO_BATCHES, **BY_TWO),
}


CASES = [(2, name) for name in STEPS] + [(4, name) for name in ON_FOUR]


@cache
def results(world: int) -> dict[str, list[dict[str, Any]]]:
    """Of all cases at once, per case and rank."""
    cases = STEPS if world == 2 else ON_FOUR
    ranks = run_ranks(world, all_stepped, list(cases.values()))
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(cases)}


@pytest.mark.parametrize(("world", "name"), CASES)
def test_a_step_equals_the_unsplit_models(world: int, name: str) -> None:
    case = (STEPS if world == 2 else ON_FOUR)[name]
    assert_same(case, results(world)[name], tolerance=2e-2 if case.bf16 else 1e-6)


def test_torch_still_forgets_gradients_when_a_schedule_is_made_anew() -> None:
    """Else the subclass of torch's stage that keeps them can go."""
    from torch.distributed.pipelining import PipelineStage

    assert ".grad = None" in inspect.getsource(PipelineStage._post_metadata_inference_cleanup)


def test_tied_weights_stay_equal_and_are_counted_once() -> None:
    first, last = results(2)["1F1B tied, fused"]
    tied = "model.embed_tokens.weight"
    assert torch.equal(first["weights"][tied], last["weights"][tied])
    assert (first["duplicates"], last["duplicates"]) == (0, 1)
    both_ends, neither = results(2)["ZBVZeroBubble tied, fused"]
    assert tied in both_ends["weights"]
    assert tied not in neither["weights"]
    assert both_ends["duplicates"] == 0


def recomputations(schedule: str) -> int:
    pipeline = Case(schedule, checkpointing=True).strategy()
    calls = []
    for part in pipeline.parts:
        for layer in part.model.layers.values():
            layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    pipeline.forward_backward([batch(8)], torch.tensor(1.0))
    return len(calls)


def test_a_split_backward_does_not_recompute_again_and_again() -> None:
    assert run_ranks(2, recomputations, "ZBVZeroBubble") == [2 * 2 * 4] * 2  # twice, 2 layers, 4 micro-batches


ODD = [batch(rows, length=length, ragged=True, documents=True) for rows, length in ((1, 9), (3, T), (5, 1), (8, T))]
PROMPTS = torch.tensor([[0, 0, 7, 9, 11], [3, 1, 4, 1, 5]])
PROMPT_MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


def evaluated(cases: list[Case]) -> list[dict[str, Any]]:
    """After a training step, which evaluation must not disturb, nor be disturbed by."""
    found = []
    for case in cases:
        pipeline = case.strategy()
        pipeline.forward_backward(iter(case.batches), case.targets)
        with evaluation_mode(pipeline.parts):
            shares = [pipeline.loss(each) for each in ODD]
            full = [pipeline.logits({k: v for k, v in each.items() if k != "labels"}) for each in ODD]
            say = partial(generate, pipeline.logits, PROMPTS, PROMPT_MASK, max_new_tokens=6, do_sample=False)
            kept = KVCache()
            pipeline.logits({"input_ids": PROMPTS}, last_only=True, cache=kept)
            texts = [say(use_cache=True), say(use_cache=False)]
            beams = [say(num_beams=3), say(num_beams=3, use_cache=False)]
        again = pipeline.forward_backward(iter(case.batches), case.targets)
        found.append(
            {"shares": shares, "full": full, "texts": texts, "beams": beams, "cached": kept.length, "again": again}
        )
    return found


EVALUATED = [Case(s, tied=i % 2 == 0, loss="fused", batches=(batch(8),)) for i, s in enumerate(EVERY)]


@cache
def evaluations() -> list[list[dict[str, Any]]]:
    return run_ranks(2, evaluated, EVALUATED)


@pytest.mark.parametrize("index", range(len(EVERY)), ids=EVERY)
def test_any_batch_is_evaluated_and_generation_is_that_of_one_device(index: int) -> None:
    case, ranks = EVALUATED[index], [rank[index] for rank in evaluations()]
    model = case.filled().eval()
    with torch.no_grad():
        for number, each in enumerate(ODD):
            inputs = {k: v for k, v in each.items() if k != "labels"}
            total = sum(rank["shares"][number][0] for rank in ranks)
            count = sum(rank["shares"][number][1] for rank in ranks)
            assert count == (each["labels"][:, 1:] != -100).sum()
            torch.testing.assert_close(total, plain_loss(case, model(**inputs), each["labels"]), rtol=1e-5, atol=1e-5)
            logits = [rank["full"][number] for rank in ranks if rank["full"][number] is not None]
            assert len(logits) == 1
            torch.testing.assert_close(logits[0], model(**inputs), rtol=1e-5, atol=1e-5)

        def alone(batch: Batch, last_only: bool, cache: Any) -> Tensor:
            return model(**batch, last_only=last_only, cache=cache)

        text, best = (
            generate(alone, PROMPTS, PROMPT_MASK, max_new_tokens=6, do_sample=False, num_beams=n) for n in (1, 3)
        )
    for rank in ranks:
        assert rank["cached"] == PROMPTS.shape[1]
        assert all(torch.equal(each, text) for each in rank["texts"])
        assert all(torch.equal(each, best) for each in rank["beams"])
    torch.testing.assert_close(sum(rank["again"] for rank in ranks), reference(case)["share"])


def loaded_parts(folder: Path) -> tuple[set[str], dict[str, Tensor]]:
    """The tensors this rank reads, and its parameters."""
    read: set[str] = set()
    opened = files.opened

    @contextmanager
    def noting(path: Path) -> Iterator[Any]:
        with opened(path) as tensors:
            noted = Mock(wraps=tensors)
            yield noted
            read.update(call.args[0] for call in noted.get_slice.call_args_list)

    with patch.object(files, "opened", noting):
        pipeline = pipeline_of(
            ModelSpec(Case(tied=True).on_meta, init=partial(initialize, PretrainedSettings(path=str(folder)), seed=0))
        )
    return read, {n: p.detach() for part in pipeline.parts for n, p in part.named_parameters()}


def test_each_rank_reads_its_own_stages_of_a_pretrained_model(tmp_path: Path) -> None:
    model = Case(tied=True).filled()
    (first, _), (last, weights) = run_ranks(2, loaded_parts, tiny.pretrained(tmp_path, model))
    assert first & last == {"model.embed_tokens.weight"}
    assert first | last == {n for n, _ in model.named_parameters()}
    assert all(torch.equal(weights[name], model.get_parameter(name)) for name in last)


class Residual(nn.Module):
    """A model of a user's that can be cut, with weights drawn by its constructor."""

    num_hidden_layers, hidden_size = 4, 16

    def __init__(self) -> None:
        super().__init__()
        self.embed: nn.Module | None = nn.Embedding(V, 16)
        self.blocks = nn.ModuleDict({str(i): nn.Linear(16, 16) for i in range(4)})
        self.head: nn.Module | None = nn.Linear(16, V)

    def cut(self, first: int, last: int, *, is_first: bool, is_last: bool) -> None:
        for index in set(range(4)) - set(range(first, last + 1)):
            del self.blocks[str(index)]
        self.embed = self.embed if is_first else None
        self.head = self.head if is_last else None

    def forward(self, input_ids: Tensor) -> Tensor:
        x = input_ids if self.embed is None else self.embed(input_ids)
        for block in self.blocks.values():
            x = x + block(x).relu()
        return x if self.head is None else self.head(x)


class Narrow(Residual):
    hidden_size = 8


def materialized(build: Callable[[], nn.Module], **settings: Any) -> Any:
    torch.manual_seed(5)
    return pipeline_of(ModelSpec(build), **settings)


def users_model() -> tuple[dict[str, Tensor], Tensor, float]:
    pipeline = materialized(Residual, schedule="ZBVZeroBubble")
    after = torch.rand(()).item()
    grads = {}
    pipeline.forward_backward([batch(8)], torch.tensor(1.0))
    for part in pipeline.parts:
        grads.update({n: p.grad for n, p in part.named_parameters()})
    return grads, pipeline.logits({"input_ids": PROMPTS}, last_only=True), after


def test_a_users_model_is_the_one_its_constructor_draws() -> None:
    ranks = run_ranks(2, users_model)
    torch.manual_seed(5)
    model = Residual()
    assert [after for *_, after in ranks] == [torch.rand(()).item()] * 2
    logits = model(batch(8)["input_ids"])
    nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch(8)["labels"][:, 1:].flatten(), reduction="sum"
    ).backward()
    for grads, last, _ in ranks:
        torch.testing.assert_close(last, model(PROMPTS)[:, -1:])
        for name, grad in grads.items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad)


class OneBackward(CrossEntropy):
    is_separable = False


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a model as an object": (lambda: materialized(cache(Residual)), ModelError,
        "give the Trainer a model_init, a function that makes the model"),
    "a loss that cannot be split": (lambda: pipeline_of(ModelSpec(Residual), OneBackward(), schedule="DualPipeV"),
        ModelError, "loss: OneBackward has one backward for inputs and weights, which schedule=DualPipeV splits; set "
        "loss=linear"),
    "other tensors": (lambda: materialized(Residual).loss({**batch(2), "token_type_ids": batch(2)["input_ids"]}),
        DataError, "position_ids and no other tensors, got token_type_ids; leave them out"),
    "no labels": (lambda: materialized(Residual).forward_backward([{"input_ids": PROMPTS}], torch.tensor(1.0)),
        DataError, "the batch has no labels, only input_ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_said_on_every_rank(name: str) -> None:
    _, kind, told = REFUSED[name]
    for rank in refusals(2, __name__):
        assert re.search(told, str(rank[name]))
        assert isinstance(rank[name], kind)


def wrong_width() -> None:
    materialized(Narrow, schedule="ZBVZeroBubble", n_microbatches=2).forward_backward([batch(2)], torch.tensor(1.0))


def test_hidden_states_of_another_width_are_refused_where_they_are_made() -> None:
    with pytest.raises(RankError, match=r"hidden states of shape \(1, 12, 8\), got shape \(1, 12, 16\)") as failed:
        run_ranks(2, wrong_width)
    assert isinstance(failed.value.first, ModelError)
