"""Losses against plain PyTorch: values and gradients, by definition and in chunks."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_ranks
from refusals import case, table
from torch import Tensor, nn

from forgather_cli.callbacks.metrics import take_interval_peak
from forgather_cli.config.schema import CrossEntropySettings, DecoderSettings, LinearCrossEntropySettings, Target
from forgather_cli.errors import ConfigError, ModelError, PartError
from forgather_cli.labels import num_targets, targets_of
from forgather_cli.loss.base import Loss, ModelWithLoss
from forgather_cli.loss.build import build_loss
from forgather_cli.loss.model_io import model_kwargs, model_logits
from forgather_cli.loss.sums import cross_entropy_sum, linear_cross_entropy_sum
from forgather_cli.models.decoder import Decoder, resolve_decoder

B, T, V, E = 3, 17, 53, 16


def labels(ignored: float = 0.3, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, V, (B, T), generator=generator)
    made[torch.rand(B, T, generator=generator) < ignored] = -100
    return made


OPTIONS: dict[str, dict[str, float]] = {
    "plain": {}, "z_loss": {"z_loss": 0.01}, "label_smoothing": {"label_smoothing": 0.1},
    "both": {"z_loss": 0.003, "label_smoothing": 0.2},
}  # fmt: skip
of_options = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


def inputs(seed: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (torch.randn(*s, generator=g) for s in ((B, T, E), (V, E), (V,)))
    return hidden.requires_grad_(), weight.requires_grad_(), bias.requires_grad_()


def gradients(loss: Tensor, *of: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss / 7, of))


def assert_same(loss: Tensor, expected: Tensor, *of: Tensor) -> None:
    """Value and gradients."""
    torch.testing.assert_close(loss.double(), expected.double(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(gradients(loss, *of), gradients(expected, *of), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@of_options
def test_cross_entropy_follows_its_definition(options: dict[str, float]) -> None:
    """Target by target, in float64."""
    hidden, weight, _ = inputs()
    z_loss, smoothing = (options.get(name, 0.0) for name in ("z_loss", "label_smoothing"))
    expected = torch.zeros((), dtype=torch.float64)
    for row, targets in zip((hidden @ weight.t()).double(), labels(), strict=True):
        for scores, target in zip(row[:-1], targets[1:].tolist(), strict=True):
            if target != -100:
                log_p = scores.log_softmax(-1)
                expected = expected - (1 - smoothing) * log_p[target] - smoothing * log_p.mean()
                expected = expected + z_loss * scores.logsumexp(-1) ** 2
    assert_same(cross_entropy_sum(hidden @ weight.t(), labels(), **options), expected, hidden, weight)


@pytest.mark.parametrize("chunk_size", [7, B * T, 1000])
@of_options
def test_chunked_loss_equals_the_plain_one(options: dict[str, float], chunk_size: int) -> None:
    hidden, weight, bias = inputs()
    plain = cross_entropy_sum(F.linear(hidden, weight, bias), labels(), **options)
    fused = linear_cross_entropy_sum(hidden, weight, labels(), bias=bias, chunk_size=chunk_size, **options)
    assert fused.dtype == plain.dtype
    assert_same(fused, plain, hidden, weight, bias)
    with torch.no_grad():
        same = linear_cross_entropy_sum(hidden, weight, labels(), bias=bias, chunk_size=chunk_size, **options)
    torch.testing.assert_close(same, plain, rtol=1e-5, atol=1e-5)


def test_only_wanted_gradients_are_made() -> None:
    hidden, weight, bias = inputs()
    fused = linear_cross_entropy_sum(hidden, weight.detach(), labels(), bias=bias)
    assert_same(fused, cross_entropy_sum(F.linear(hidden, weight, bias), labels()), hidden, bias)
    fused = linear_cross_entropy_sum(hidden.detach(), weight, labels())
    assert torch.autograd.grad(fused, weight)[0].shape == weight.shape
    assert not linear_cross_entropy_sum(hidden.detach(), weight.detach(), labels()).requires_grad


@pytest.mark.parametrize("chunk_size", [8, 1000])
def test_chunked_loss_follows_autocast(chunk_size: int) -> None:
    hidden, weight, bias = inputs()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = linear_cross_entropy_sum(hidden, weight, labels(), bias=bias, chunk_size=chunk_size)
        logits = F.linear(hidden, weight, bias)
    assert logits.dtype == torch.bfloat16
    assert fused.dtype == torch.float32
    exact = cross_entropy_sum(F.linear(hidden, weight, bias), labels())
    product = (hidden.bfloat16() @ weight.bfloat16().t()).float() + bias
    torch.testing.assert_close(fused, cross_entropy_sum(product, labels()), rtol=1e-5, atol=1e-5)
    assert fused != exact, "the products are rounded to bf16"
    for ours, theirs in zip(
        gradients(fused, hidden, weight, bias), gradients(exact, hidden, weight, bias), strict=True
    ):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() < 0.01 * theirs.norm()


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``torch.mm`` and ``torch.addmm`` with ``out_dtype``, which CUDA alone has: products of bf16, summed and given out
    in fp32. Returns the names of those that were called.
    """
    called: list[str] = []
    mm = torch.mm

    def wide_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, out: Tensor | None = None) -> Tensor:
        if out_dtype is None:
            return mm(a, b, out=out)
        assert (a.dtype, b.dtype, out_dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
        called.append("mm")
        return mm(a.float(), b.float(), out=out)

    def wide_addmm(to: Tensor, a: Tensor, b: Tensor, *, out_dtype: torch.dtype, out: Tensor) -> Tensor:
        assert (a.dtype, b.dtype, to.dtype, out.dtype) == (torch.bfloat16, torch.bfloat16, out_dtype, torch.float32)
        called.append("addmm")
        return out.copy_(to + mm(a.float(), b.float()))

    monkeypatch.setattr(torch, "mm", wide_mm)
    monkeypatch.setattr(torch, "addmm", wide_addmm)
    monkeypatch.setattr("forgather_cli.loss.sums._has_wide_sums", lambda x: x.dtype == torch.bfloat16)
    return called


@pytest.mark.parametrize("chunk_size", [7, 16, 1000])
@of_options
def test_on_tensor_cores_logits_and_gradients_are_rounded_to_bf16_once(
    options: dict[str, float], chunk_size: int, tensor_cores: list[str]
) -> None:
    """Products of bf16 numbers are exact in fp32: only logits' gradients are rounded beyond inputs and weight."""
    of = inputs()
    hidden, weight, bias = of
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fused = linear_cross_entropy_sum(hidden, weight, labels(), bias=bias, chunk_size=chunk_size, **options)
    rounded = [each.detach().bfloat16().float().requires_grad_() for each in (hidden, weight)]
    logits = F.linear(*rounded, bias)
    plain = cross_entropy_sum(logits, labels(), **options)
    torch.testing.assert_close(fused, plain, rtol=1e-6, atol=1e-6)
    [dlogits] = torch.autograd.grad(plain, logits, retain_graph=True)
    narrow = dlogits.bfloat16().float().flatten(0, 1)
    expected = ((narrow @ rounded[1]).view(B, T, E), narrow.t() @ rounded[0].flatten(0, 1), narrow.sum(0))
    for ours, theirs in zip(torch.autograd.grad(fused, of), expected, strict=True):
        assert (ours - theirs).norm() < 2e-4 * theirs.norm()  # bf16: 4e-3; a logit may round the other way
    chunks = -(-B * T // chunk_size)
    assert sorted(tensor_cores) == ["addmm"] * chunks + ["mm"] * 2 * chunks
    for ours, exact in zip(
        gradients(linear_cross_entropy_sum(hidden, weight, labels(), bias=bias), *of),
        gradients(cross_entropy_sum(F.linear(hidden, weight, bias), labels()), *of),
        strict=True,
    ):
        torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-6)  # without autocast all is as ever


@pytest.mark.parametrize("fused", [False, True])
def test_no_targets_give_zero_and_no_gradient(fused: bool) -> None:
    hidden, weight, _ = inputs()
    y = torch.full((B, T), -100)
    y[:, 0] = 5  # the first label is nobody's target
    assert num_targets(y) == 0
    loss = linear_cross_entropy_sum(hidden, weight, y) if fused else cross_entropy_sum(hidden @ weight.t(), y)
    assert loss == 0
    assert all((g == 0).all() for g in torch.autograd.grad(loss, (hidden, weight)))


def decoder(**changes: Any) -> Decoder:
    base: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 1, "initializer_range": 0.3}
    torch.manual_seed(0)
    return Decoder(resolve_decoder(DecoderSettings(**{**base, **changes}), vocab_size=V, seq_len=T))


def batch(**more: Tensor) -> dict[str, Tensor]:
    tokens = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(4))
    return {"input_ids": tokens, "labels": labels(), **more}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "option", [CrossEntropySettings(), LinearCrossEntropySettings(chunk_size=11)], ids=lambda o: o.type
)
def test_model_with_loss_equals_plain_pytorch(option: Any, tied: bool) -> None:
    model = decoder(tie_word_embeddings=tied)
    documents = torch.arange(T).div(5, rounding_mode="floor").expand(B, T)
    total = ModelWithLoss(model, build_loss(option))(batch(document_ids=documents))
    logits = model(batch()["input_ids"], document_ids=documents)
    expected = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels()[:, 1:].flatten(), reduction="sum")
    assert num_targets(labels()) == (labels()[:, 1:] != -100).sum()
    assert_same(total, expected, *model.parameters())


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """A user's: the mean over its own targets."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def counted_loss(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor, factor: float = 1.0) -> Tensor:
    """A user's: normalised by itself."""
    flat = logits[:, :-1].flatten(0, 1)
    return factor * F.cross_entropy(flat, labels[:, 1:].flatten(), reduction="sum") / num_items_in_batch


class CallableLoss:
    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.factor * mean_loss(logits, labels)


def total_of(loss: Loss, b: dict[str, Tensor], *count: Tensor) -> Tensor:
    return ModelWithLoss(decoder(), loss)(b, *count)


def test_a_users_mean_is_weighted_by_its_targets_and_without_any_zero_with_zero_gradient() -> None:
    expected = total_of(build_loss(), batch())
    torch.testing.assert_close(total_of(build_loss(loss_fn=mean_loss), batch()), expected)
    torch.testing.assert_close(total_of(build_loss(loss_fn=mean_loss), batch(), torch.tensor(1000)), expected)
    model, empty = decoder(), {**batch(), "labels": torch.full((B, T), -100)}
    total = ModelWithLoss(model, build_loss(loss_fn=mean_loss))(empty)
    assert total == 0
    total.backward()
    assert all((p.grad == 0).all() for p in model.parameters())


def test_a_users_loss_with_the_count_is_used_as_it_is() -> None:
    plain, loss = total_of(build_loss(), batch()), build_loss(loss_fn=counted_loss)
    torch.testing.assert_close(total_of(loss, batch(), torch.tensor(1000)) / 1000, plain / 1000)
    torch.testing.assert_close(total_of(loss, batch()), plain, msg="without a step's count, this batch's")


def test_targets_are_functions_with_arguments_or_classes() -> None:
    plain = total_of(build_loss(), batch())
    for name, kwargs in {"mean_loss": {}, "counted_loss": {"factor": 1.0}, "CallableLoss": {"factor": 1.0}}.items():
        torch.testing.assert_close(
            total_of(build_loss(Target(path=f"{__name__}.{name}", kwargs=kwargs)), batch()), plain
        )
    doubled = build_loss(Target(path=f"{__name__}.counted_loss", kwargs={"factor": 2.0}))
    torch.testing.assert_close(total_of(doubled, batch()), 2 * plain)


def test_a_users_fused_loss_gets_head_and_hidden_states() -> None:
    loss = build_loss(fused_loss_factory=lambda head: lambda hidden, labels: mean_loss(head(hidden), labels))
    torch.testing.assert_close(total_of(loss, batch()), total_of(build_loss(), batch()))


def test_labels_beside_decoder_input_ids_are_not_shifted() -> None:
    class Model(nn.Module):
        def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
            return F.one_hot(decoder_input_ids, V).float()

    both = batch(decoder_input_ids=batch()["input_ids"].flip(1))
    logits = F.one_hot(both["decoder_input_ids"], V).float()
    expected = F.cross_entropy(logits.flatten(0, 1), labels().flatten(), reduction="sum")
    torch.testing.assert_close(ModelWithLoss(Model(), build_loss())(both), expected)
    assert targets_of(both) == (labels() != -100).sum()


@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: (x, None), lambda x: SimpleNamespace(logits=x), lambda x: {"logits": x}]
)
def test_models_return_logits_a_tuple_or_an_object(wrap: Any) -> None:
    class Model(nn.Module):
        def forward(self, input_ids: Tensor) -> Any:
            return wrap(F.one_hot(input_ids, V).float())

    inputs = model_kwargs(batch())
    assert model_logits(Model(), inputs).shape == (B, T, V)
    assert model_logits(Model(), inputs, last_only=True, cache=object()).shape == (B, 1, V)


class Odd(nn.Module):
    def forward(self, input_ids: Tensor) -> Any:
        return input_ids


test_what_is_refused = table(
    case(PartError, r"Odd.*: forward must return logits .*, got a tensor of shape \(3, 17\)",
         lambda: model_logits(Odd(), model_kwargs(batch()))),
    case(ModelError, r"loss=linear_cross_entropy: Odd has no hidden_states\(\) and no head; .*loss=cross_entropy",
         lambda: ModelWithLoss(Odd(), build_loss(LinearCrossEntropySettings()))),
    case(ModelError, "fused_loss_factory: Odd has no hidden_states",
         lambda: ModelWithLoss(Odd(), build_loss(fused_loss_factory=lambda head: mean_loss))),
    case(ModelError, r"the batch has no labels, only input_ids; add labels \(B, T\)",
         lambda: ModelWithLoss(decoder(), build_loss())(model_kwargs(batch()))),
    case(ConfigError, r"loss\._target_: cannot import nowhere\.loss", build_loss, Target(path="nowhere.loss")),
)  # fmt: skip


def peaks_over_base() -> list[float]:
    """MiB that a forward and backward of 512 tokens and 50,304 logits each take: in chunks of 256 tokens, plain."""
    weight = torch.empty(50304, 64).normal_(std=0.02).requires_grad_()
    hidden, targets = torch.randn(1, 512, 64), torch.randint(0, 50304, (1, 512))
    # load the matrix library and start autograd before the base is read
    (torch.ones(64, 64, requires_grad=True) @ torch.ones(64, 64)).sum().backward()
    losses: list[Callable[[Tensor], Tensor]] = [
        lambda x: linear_cross_entropy_sum(x, weight, targets, chunk_size=256),
        lambda x: cross_entropy_sum(F.linear(x, weight), targets),
    ]
    peaks = []
    for loss_of in losses:
        weight.grad = None
        take_interval_peak(hidden.device)
        base = take_interval_peak(hidden.device)  # of now, since the peak before is forgotten
        loss_of(hidden.clone().requires_grad_()).backward()
        peaks.append((take_interval_peak(hidden.device) - base) / 2**20)
    return peaks


def test_memory_is_bounded() -> None:
    """Peak beyond the weights: plain makes several N x V tensors, the chunked loss one gradient and one chunk."""
    [(chunked, plain)] = run_ranks(1, peaks_over_base)
    one = 256 * 50304 * 4 / 2**20 + 50304 * 64 * 4 / 2**20  # a chunk of logits, the weight's gradient
    assert chunked < one + 30, "small tensors, gaps in the heap"
    assert plain > 2 * 512 * 50304 * 4 / 2**20
