"""Loggers of gradient, parameter and weight norms: under every strategy those of one device's tensors."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import run_ranks
from selection import some
from torch import Tensor, nn

from forgather_cli import Trainer
from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.callbacks.parameter_norms import SpectralNorms
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir

Norms = dict[str, float]

PIPELINE = ("trainer=pipeline", "n_microbatches=4")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ()),
    "ddp 2": (2, ("trainer=ddp",)),
    "1F1B 2": (2, PIPELINE),
    "ZBVZeroBubble 2": (2, (*PIPELINE, "schedule=ZBVZeroBubble")),
    "fsdp2 2": (2, ("trainer=fsdp2",)),
    "hsdp 2x2": (4, ("trainer=fsdp2", "replicate=2")),
}
MODEL = (
    "model.zero_init_outputs=false",
    "model.num_hidden_layers=4", "model.hidden_size=32", "model.intermediate_size=72", "model.num_key_value_heads=1",
    "model.tie_word_embeddings=true", "data.ragged=true", "max_grad_norm=0.05", "learning_rate=1e-3", "warmup_steps=1",
    "logging_steps=1", "eval_steps=2", "save_steps=2",
)  # fmt: skip
LOGGERS = ("+callbacks.grad_norms={every: 1}", "+callbacks.parameter_norms={}", "+callbacks.weight_norm={}")
REFERENCE = "+callbacks.reference._target_=test_norm_loggers.Reference"


class Reference(TrainerCallback):
    """What the loggers write, by plain PyTorch from the whole tensors of this process's model."""

    def __init__(self) -> None:
        self.gradients: list[Norms] = []
        self.weights: list[Norms] = []
        self.spectral: list[Norms] = []
        self.totals: list[float] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        named = kwargs["model"].named_parameters()
        self.gradients.append({name: float(p.grad.norm()) for name, p in named if p.grad is not None})

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        whole = {name: p.detach() for name, p in kwargs["model"].named_parameters()}
        self.weights.append({name: float(p.norm()) for name, p in whole.items()})
        matrices = {name: p for name, p in whole.items() if p.ndim == 2}
        self.spectral.append({name: float(torch.linalg.matrix_norm(p, 2)) for name, p in matrices.items()})

    def on_log_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if kwargs["interval"] is not None:
            everything = nn.utils.parameters_to_vector(kwargs["model"].parameters())
            self.totals.append(float(everything.detach().norm()))


def trained(root: str, *overrides: str) -> Trainer:
    run = Path(root)
    return tiny.train(tiny.config(run, *MODEL, *overrides), RunDir(run))


def on_a_rank(root: str, *overrides: str) -> Reference | None:
    trainer = trained(root, *overrides)
    return trainer.callbacks.by_name.get("reference")


def train(layout: str, path: Path, *overrides: str) -> None:
    ranks, own = LAYOUTS[layout]
    if ranks == 1:
        trained(str(path), *own, *overrides)
    else:
        run_ranks(ranks, on_a_rank, str(path), *own, *overrides)


def records(path: Path, name: str) -> list[dict[str, Any]]:
    return tiny.metrics(path, f"{name}.jsonl")


def steps(path: Path, name: str) -> list[int]:
    return [record["step"] for record in records(path, name)]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return on_a_rank(str(tmp_path_factory.mktemp("reference")), REFERENCE)


def assert_near(found: list[Norms], expected: list[Norms], rel: float) -> None:
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        assert ours == {name: pytest.approx(value, rel=rel) for name, value in theirs.items()}


@pytest.mark.parametrize("layout", some(LAYOUTS, "single", "1F1B 2", "fsdp2 2"))
def test_norms_are_those_of_one_device(layout: str, reference: Reference, tmp_path: Path) -> None:
    """Tied embeddings counted once, rows that ranks do not hold alike, gradients after clipping."""
    train(layout, tmp_path, *LOGGERS)
    gradients, parameters = records(tmp_path, "gradient_norms"), records(tmp_path, "parameter_norms")
    assert [record["step"] for record in gradients] == [1, 2, 3, 4]
    assert [record["step"] for record in parameters] == [2, 4]
    assert list(gradients[0]) == ["time", "step", "epoch", "norms"]
    assert list(parameters[0]) == ["time", "step", "epoch", "norms", "spectral_norms"]
    assert_near([record["norms"] for record in gradients], reference.gradients, 1e-5)
    assert_near([record["norms"] for record in parameters], reference.weights, 1e-5)
    assert_near([record["spectral_norms"] for record in parameters], reference.spectral, 1e-3)
    logs = [record for record in tiny.metrics(tmp_path) if "grad_norm" in record]
    assert [record["weight_norm"] for record in logs] == pytest.approx(reference.totals, rel=1e-5)
    for record in gradients:
        assert math.dist(record["norms"].values(), [0.0] * len(record["norms"])) == pytest.approx(0.05, rel=1e-4)
    assert not any("weight_norm" in record for record in tiny.metrics(tmp_path) if "grad_norm" not in record)


ONE_STEP = ("+callbacks.grad_norms={every: 1}", "+callbacks.parameter_norms={power_iter_steps: 1}")


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run whose spectral norms take two steps and one, and so tell where the second began."""
    path = tmp_path_factory.mktemp("through")
    train("single", path, *ONE_STEP)
    return path


@pytest.mark.parametrize("layout", some(["single", "1F1B 2", "fsdp2 2"], "fsdp2 2"))
def test_a_resume_cuts_the_files_and_goes_on_warm(layout: str, through: Path, tmp_path: Path) -> None:
    path = tmp_path / "again"
    shutil.copytree(through, path)
    shutil.rmtree(RunDir(path).checkpoint(4))
    train(layout, path, *ONE_STEP, "resume_from_checkpoint=true")
    assert steps(path, "gradient_norms") == [1, 2, 3, 4]
    assert steps(path, "parameter_norms") == [2, 4]
    for name in ("gradient_norms", "parameter_norms"):
        before, after = records(through, name), records(path, name)
        assert [r for r in before if r["step"] <= 2] == [r for r in after if r["step"] <= 2]
        for key in {"norms", "spectral_norms"} & before[0].keys():
            assert_near([r[key] for r in after], [r[key] for r in before], 1e-5)


def test_the_second_evaluation_of_a_cold_start_would_be_another(through: Path, reference: Reference) -> None:
    """Else the test above could not fail: one step from anywhere is far from the value, one more comes nearer."""
    found = [record["spectral_norms"] for record in records(through, "parameter_norms")]
    gaps = [[1 - ours[n] / theirs[n] for n in ours] for ours, theirs in zip(found, reference.spectral, strict=True)]
    assert all(max(gap) > 1e-3 for gap in gaps)
    assert sum(gaps[1]) < sum(gaps[0])


def test_another_training_of_one_trainer_begins_its_files_anew(tmp_path: Path) -> None:
    trainer = trained(str(tmp_path), *LOGGERS, "save_steps=100", "max_steps=2")
    trainer.train()
    assert steps(tmp_path, "gradient_norms") == [1, 2]
    assert steps(tmp_path, "parameter_norms") == [2]
    trainer.evaluate()
    assert steps(tmp_path, "parameter_norms") == [2, 2]


def test_records_that_the_run_has_gone_back_from_are_marked(through: Path, tmp_path: Path) -> None:
    path = tmp_path / "again"
    shutil.copytree(through, path)
    trainer = trained(str(path), *ONE_STEP, "resume_from_checkpoint=true")
    trainer.state.global_step = 3
    trainer.emit("on_rollback")
    for name, expected in (("gradient_norms", [1, 2, 3]), ("parameter_norms", [2])):
        assert [record["step"] for record in records(path, name) if not record.get("abandoned")] == expected
        assert [record["step"] for record in records(path, name) if record.get("abandoned")] == [4]


@pytest.mark.parametrize(
    ("every", "words", "expected"),
    [
        ("eval", ("eval_strategy=epoch", "epoch_train_steps=3", "num_train_epochs=2", "max_steps=-1"), [3, 6]),
        ("eval", ("eval_strategy=no", "eval_on_save=true", "save_steps=3"), [3, 4]),
        ("log", ("logging_steps=3",), [1, 3, 4]),
        ("log", ("logging_strategy=epoch", "epoch_train_steps=2"), [2, 4]),
        ("eval", ("eval_steps=2", "eval_on_start=true"), [2, 4]),
        ("3", ("eval_steps=2", "logging_steps=1"), [3]),
    ],
)
def test_when_gradients_are_recorded(every: str, words: tuple[str, ...], expected: list[int], tmp_path: Path) -> None:
    config = tiny.config(tmp_path, f"+callbacks.grad_norms={{every: {every}}}", *words)
    tiny.train(config, RunDir(tmp_path))
    assert steps(tmp_path, "gradient_norms") == expected


def test_what_leaves_nothing_to_record_is_told_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny.config(
        tmp_path, "fuse_optim_with_backward=true", "max_grad_norm=null", "+callbacks.grad_norms={every: 1}",
        "max_steps=1", "per_device_train_batch_size=8", "eval_strategy=no", "+callbacks.parameter_norms={}",
    )  # fmt: skip
    tiny.train(config, RunDir(tmp_path))
    assert not RunDir(tmp_path).gradient_norms.exists()
    assert "grad_norms: off, since fuse_optim_with_backward=true" in caplog.text
    assert "parameter_norms: written at evaluations, of which eval_strategy=no leaves none" in caplog.text
    config = tiny.config(tmp_path, "eval_strategy=no", "max_steps=1", "+callbacks.grad_norms={}")
    tiny.train(config, RunDir(tmp_path / "next"))
    assert "grad_norms.every: eval, of which eval_strategy=no leaves none" in caplog.text
    config = tiny.config(tmp_path, "+callbacks.parameter_norms={log_norms: false, log_spectral_norms: false}")
    with pytest.raises(ConfigError, match=r"callbacks\.parameter_norms: .* both false"):
        tiny.train(config, RunDir(tmp_path / "none"))


def test_ranks_that_train_by_themselves_have_root_mean_squares(tmp_path: Path) -> None:
    """Post-local SGD: from step 2 on each rank has a gradient of its own, and at step 3 weights of its own."""
    words = (
        "trainer=ddp", "post_local_sgd.enabled=true", "post_local_sgd.start_step=1", "post_local_sgd.period=3",
        "eval_steps=1", REFERENCE, *LOGGERS,
    )  # fmt: skip
    ranks = run_ranks(2, on_a_rank, str(tmp_path), *words)
    first, second = (found for found in ranks if found is not None)

    def of_both(each: str) -> list[Norms]:
        pairs = zip(getattr(first, each), getattr(second, each), strict=True)
        return [{n: math.sqrt((a[n] ** 2 + b[n] ** 2) / 2) for n in a} for a, b in pairs]

    assert first.gradients[1] != second.gradients[1]
    assert first.weights[2] != second.weights[2]
    assert_near([record["norms"] for record in records(tmp_path, "gradient_norms")], of_both("gradients"), 1e-5)
    assert_near([record["norms"] for record in records(tmp_path, "parameter_norms")], of_both("weights"), 1e-5)
    assert_near([r["spectral_norms"] for r in records(tmp_path, "parameter_norms")], of_both("spectral"), 1e-3)


class Matrices(nn.Module):
    def __init__(self, **values: Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


def test_spectral_norms_of_all_kinds_of_matrices(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {
        "square": torch.randn(512, 512) * 0.02,  # the largest singular values of random matrices lie close together
        "tall": torch.randn(800, 64),
        "wide": torch.randn(48, 700).to(torch.bfloat16),
        "row": torch.randn(1, 9),
        "column": torch.randn(9, 1),
        "orthogonal": torch.linalg.qr(torch.randn(24, 24)).Q,
        "rank_one": torch.outer(torch.randn(30), torch.randn(20)),
        "zeros": torch.zeros(4, 4),
        "large": torch.randn(16, 16) * 1e8,
        "small": torch.randn(16, 16) * 1e-9,
        "broken": torch.full((3, 3), math.nan),
        "vector": torch.randn(7),
        "scalar": torch.tensor(3.0),
    }
    spectral = SpectralNorms(FullParameters(tiny.script(tmp_path, Matrices(**values))))
    assert spectral.names == [name for name, value in values.items() if value.ndim == 2]
    for number, steps in enumerate((20, 10, 10)):
        found = dict(zip(spectral.names, spectral.measure(steps).tolist(), strict=True))
        assert math.isnan(found.pop("broken"))
        truth = {n: float(torch.linalg.matrix_norm(values[n].double(), 2)) for n in found}
        assert found == {n: pytest.approx(norm, rel=0.01 if number == 0 else 1e-3) for n, norm in truth.items()}
        lengths = {name: float(vector.norm()) for name, vector in spectral.vectors().items()}
        assert lengths == {name: pytest.approx(1.0, abs=1e-5) for name in spectral.names}


def test_what_was_broken_or_zero_recovers(tmp_path: Path) -> None:
    model = Matrices(a=torch.full((6, 5), math.nan), b=torch.zeros(6, 5))
    spectral = SpectralNorms(FullParameters(tiny.script(tmp_path, model)))
    assert spectral.measure(10).isnan().tolist() == [True, False]
    weight = torch.randn(6, 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(weight)
    truth = float(torch.linalg.matrix_norm(weight, 2))
    assert spectral.measure(10).tolist() == pytest.approx([truth, truth], rel=1e-5)


def test_a_vector_that_no_longer_fits_is_replaced(tmp_path: Path) -> None:
    parameters = FullParameters(tiny.script(tmp_path, Matrices(a=torch.randn(6, 5), b=torch.randn(4, 3))))
    before = SpectralNorms(parameters)
    before.measure(5)
    kept = before.vectors()
    after = SpectralNorms(parameters)
    assert after.load(kept)
    assert not after.load({"a": kept["a"], "b": torch.ones(7)})
    assert torch.equal(after.vectors()["a"], kept["a"])
    assert after.vectors()["b"].shape == (3,)


def test_frozen_parameters_have_weights_and_no_gradients(tmp_path: Path) -> None:
    model = Matrices(a=torch.ones(2, 2), b=torch.full((3,), 2.0), c=torch.ones(1))
    model.get_parameter("a").requires_grad_(False)
    trainer = tiny.script(tmp_path, model)
    assert FullParameters(trainer).weights().tolist() == pytest.approx([4.0, 12.0, 1.0])
    trained_ones = FullParameters(trainer, trained_only=True)
    assert list(trained_ones.shapes) == ["b", "c"]
    model.get_parameter("b").grad = torch.full((3,), 5.0)
    assert trained_ones.gradients().tolist() == pytest.approx([75.0, 0.0])
