"""Losses in kernels of other packages: the calls, against modules that stand in for them, and what is refused.

The real packages need a GPU for some kernels. Head and hidden states come to them as to ``linear_cross_entropy``, which
the parity suite trains with under every strategy.
"""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from program import refusal
from test_loss import OPTIONS, B, E, T, V, labels, of_options
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from forgather_cli.config.schema import CutCrossEntropySettings, LigerSettings, LossSettings
from forgather_cli.errors import ModelError, SetupError
from forgather_cli.loss.base import Loss, ModelWithLoss
from forgather_cli.loss.build import build_loss
from forgather_cli.loss.eval_metrics import EvalMetrics
from forgather_cli.loss.kernels import CutCrossEntropy, Liger
from forgather_cli.strategies.base import Batch

CPU = torch.device("cpu")
STANDINS = Path(__file__).parents[1] / "standins"
PACKAGES = ("liger_kernel", "cut_cross_entropy")


@contextmanager
def standing_in() -> Iterator[None]:
    """The packages' names mean the modules in ``standins``."""
    theirs = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] in PACKAGES}
    sys.path.insert(0, str(STANDINS))
    try:
        yield
    finally:
        sys.path.remove(str(STANDINS))
        for name in [name for name in sys.modules if name.split(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.modules.update(theirs)


@pytest.fixture
def standins() -> Iterator[None]:
    with standing_in():
        yield


class Head(nn.Module):
    """A model whose hidden states are its own parameter."""

    def __init__(self, *, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Parameter(torch.randn(B, T, E))
        self.head = nn.Linear(E, V, bias=bias)

    def hidden_states(self, input_ids: Tensor) -> Tensor:
        return self.hidden

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden_states(input_ids))
        return logits


def batch(ignored: float = 0.3) -> Batch:
    drawn = labels(ignored, seed=1)
    return {"input_ids": drawn.clamp(min=0), "labels": drawn}


def results(loss: Loss, model: nn.Module, given: Batch) -> list[Tensor]:
    """Sum over targets, and the gradients of a seventh of it."""
    total = ModelWithLoss(model, loss)(given)
    assert (total.dim(), total.dtype) == (0, torch.float32)
    trained = [p for p in model.parameters() if p.requires_grad]
    return [total.detach(), *torch.autograd.grad(total / 7, trained)]


def defined(model: nn.Module, given: Batch, z_loss: float = 0.0, label_smoothing: float = 0.0) -> list[Tensor]:
    """The same by torch's cross entropy of the model's logits."""
    logits = model(given["input_ids"])[:, :-1].flatten(0, 1).float()
    targets = given["labels"][:, 1:].flatten()
    total = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=label_smoothing)
    total = total + z_loss * (logits.logsumexp(-1).square() * (targets != -100)).sum()
    trained = [p for p in model.parameters() if p.requires_grad]
    return [total.detach(), *torch.autograd.grad(total / 7, trained)]


def assert_equal(found: list[Tensor], expected: list[Tensor], near: float = 1e-5) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        assert (ours - theirs).norm() <= near * theirs.norm() + 1e-6


@pytest.mark.parametrize("bias", [False, True])
@of_options
def test_liger_gets_the_options_the_head_and_the_next_labels(
    standins: None, options: dict[str, float], bias: bool
) -> None:
    loss, model = build_loss(LigerSettings(**options)), Head(bias=bias)
    assert loss.is_likelihood == (not options)
    assert_equal(results(loss, model, batch()), defined(model, batch(), **options))
    with torch.no_grad():
        total = ModelWithLoss(model, loss)(batch())
    assert_equal([total], defined(model, batch(), **options)[:1])


of_kernels = pytest.mark.parametrize("option", [LigerSettings(), CutCrossEntropySettings()], ids=lambda o: o.type)


@of_kernels
def test_tied_and_above_a_frozen_body_a_head_gets_the_gradients_of_plain_pytorch(
    standins: None, option: LossSettings
) -> None:
    frozen = Head()
    frozen.hidden.requires_grad_(False)
    for model in (tiny.decoder(tie_word_embeddings=True), frozen):
        assert_equal(results(build_loss(option), model, batch()), defined(model, batch()))


@of_kernels
def test_no_targets_give_zero_and_no_gradient(standins: None, option: LossSettings) -> None:
    found = results(build_loss(option), Head(), batch(ignored=1.0))
    assert len(found) == 3
    assert not any(t.any() for t in found)


@of_kernels
def test_products_follow_autocast(standins: None, option: LossSettings) -> None:
    model, exact = Head(), defined(Head(), batch())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = results(build_loss(option), model, batch()), defined(model, batch())
    assert found[0] != exact[0], "rounded to bf16"
    assert_equal(found[:1], expected[:1])
    assert_equal(found, exact, near=0.01)


def test_an_evaluation_counts_predictions_beside_them(standins: None) -> None:
    model, given = Head(), batch()
    right = (model(given["input_ids"]).argmax(-1)[:, :-1] == given["labels"][:, 1:]).sum()
    for loss in (Liger(), CutCrossEntropy()):
        loss.eval_metrics = seen = EvalMetrics(CPU)
        ModelWithLoss(model, loss)(given)
        assert seen.correct == right


def test_what_they_cannot_do_is_said_by_name(standins: None) -> None:
    with pytest.raises(SetupError, match="loss=liger: needs a CUDA GPU and Triton, got device cpu; set loss=linear_cr"):
        build_loss(LigerSettings(), device=CPU)
    with pytest.raises(ModelError, match=r"loss=cut_cross_entropy: takes no bias, .* Head has one; set loss=liger or"):
        ModelWithLoss(Head(bias=True), CutCrossEntropy())
    for loss, name in ((Liger(), "liger"), (CutCrossEntropy(), "cut_cross_entropy")):
        with pytest.raises(ModelError, match=rf"loss={name}: Linear has no hidden_states\(\) and no head"):
            ModelWithLoss(nn.Linear(2, 2), loss)


def test_fp32_is_refused_where_the_backward_is_a_kernel(standins: None) -> None:
    with FakeTensorMode():
        hidden, labels = torch.empty(B, T, E, device="cuda"), torch.zeros(B, T, dtype=torch.int64, device="cuda")
        head = SimpleNamespace(weight=torch.empty(V, E, device="cuda"), bias=None)
        model: Any = SimpleNamespace(head=head, hidden_states=lambda: hidden)
        with pytest.raises(ModelError, match="takes hidden states in bf16 or fp16, got fp32; set precision=bf16 or"):
            CutCrossEntropy().total(model, {}, labels, None)


@pytest.mark.parametrize(
    ("option", "missing", "message"),
    [
        ("liger", "liger_kernel", "loss=liger: needs the package liger-kernel; pip install 'forgather[kernels]'"),
        ("liger", "triton", "loss=liger: needs the package triton; pip install 'forgather[kernels]'"),
        ("cut_cross_entropy", "cut_cross_entropy", "loss=cut_cross_entropy: needs the package cut-cross-entropy; pip"),
    ],
)
@pytest.mark.usefixtures("standins", "own_directory")
def test_a_missing_package_is_named_with_the_command_before_anything_starts(
    option: str, missing: str, message: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    assert message in refusal(capfd, "train", "model=nano", "data=synthetic", f"loss={option}", "output_dir=run")
    assert not any(Path().iterdir())


CALLED = {
    "liger_kernel": ("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss"),
    "cut_cross_entropy": ("cut_cross_entropy", "linear_cross_entropy"),
}


@pytest.mark.parametrize("package", CALLED)
def test_the_packages_give_the_gradients_of_plain_pytorch(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: it brings Triton, 280 MB")
    # another process: Triton reads the variable at its import, and then runs kernels without a GPU
    command = [sys.executable, "-c", f"import test_loss_kernels as t; t.compare({package!r})"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path])}
    done = subprocess.run(command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def compare(package: str) -> None:
    """The real one against plain PyTorch, and its arguments with those of what stands in for it."""
    module, name = CALLED[package]
    signature = inspect.signature(getattr(import_module(module), name))
    if package == "liger_kernel":
        for options in OPTIONS.values():
            model = Head(bias=True)
            assert_equal(results(Liger(**options), model, batch()), defined(model, batch(), **options))
    else:
        assert_equal(results(CutCrossEntropy(), Head(), batch()), defined(Head(), batch()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = results(Liger() if package == "liger_kernel" else CutCrossEntropy(), Head(), batch())
    assert_equal(found, defined(Head(), batch()), near=0.01)
    with standing_in():
        known = inspect.signature(getattr(import_module(module), name)).parameters
        assert [n for n in known if n in signature.parameters] == [n for n in signature.parameters if n in known]
