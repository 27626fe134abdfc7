"""Subclasses of ``Trainer``: what they may override is called, and the rest is refused when the object is made."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
import transformers
from ranks import run_ranks
from torch import Tensor
from torch.utils.data import DataLoader

import forgather_cli
from forgather_cli import Trainer, TrainingArguments
from forgather_cli.errors import ConfigError
from forgather_cli.strategies.build import build_strategy
from forgather_cli.trainer import subclass
from forgather_cli.trainer.subclass import HONOURED, REFUSED, private_methods

QUIET: dict[str, Any] = {
    "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "logging_steps": 1, "report_to": [],
}  # fmt: skip
PLAIN: dict[str, Any] = QUIET | {
    "learning_rate": 0.5, "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0,
    "train_sampling_strategy": "sequential", "max_steps": 3,
}  # fmt: skip
ROWS = 8


def halved(logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """A loss that no setting gives."""
    return F.cross_entropy(0.5 * logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction=reduction)


class Mean(Trainer):
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        labels = inputs.pop("labels")
        logits = model(**inputs)
        loss = halved(logits, labels, "mean")
        return (loss, logits) if return_outputs else loss


class Counted(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **counts: Any) -> Any:
        logits = model(inputs["input_ids"])
        loss = halved(logits, inputs["labels"], "sum") / counts["num_items_in_batch"]
        return (loss, logits) if return_outputs else loss


class Old(Trainer):
    """As it was written before transformers 4.46."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
        return Mean.compute_loss(self, model, inputs, return_outputs)


FORMS: dict[str, type[Trainer]] = {"mean": Mean, "counted": Counted, "old": Old}


def samples(length: int = 3 * ROWS) -> tiny.RandomTokens:
    """Ragged, and two of the micro-batches without any target."""
    data = tiny.RandomTokens(length, ragged=True)
    data.lengths[2:4] = 0
    return data


def trained(kind: str, root: str, arguments: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], float]:
    """(losses, weights, evaluation's loss) of three steps of eight rows."""
    args = TrainingArguments(root, global_batch_size=ROWS, **{**PLAIN, **arguments})
    evaluated = tiny.RandomTokens(7, seed=1, ragged=True)
    trainer = FORMS[kind](tiny.decoder(), args, None, samples(), evaluated)
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    whole = {name: getattr(t, "full_tensor", lambda t=t: t)() for name, t in trainer.model.state_dict().items()}
    return losses, {name: tensor.clone() for name, tensor in whole.items()}, trainer.evaluate()["eval_loss"]


@functools.cache
def plain_pytorch() -> tuple[list[float], dict[str, Tensor], float]:
    model, data, losses = tiny.decoder(), samples(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=PLAIN["learning_rate"])
    for step in range(3):
        rows = [data[n] for n in range(step * ROWS, (step + 1) * ROWS)]
        batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
        loss = halved(model(batch["input_ids"]), batch["labels"], "mean")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    data = tiny.RandomTokens(7, seed=1, ragged=True)
    rows = [data[n] for n in range(7)]
    with torch.no_grad():
        evaluated = halved(model(data.tokens), torch.stack([row["labels"] for row in rows]), "mean")
    return losses, dict(model.state_dict()), float(evaluated)


def agree(found: tuple[list[float], dict[str, Tensor], float], atol: float = 1e-6) -> None:
    losses, weights, evaluated = plain_pytorch()
    assert found[0] == pytest.approx(losses, rel=1e-5 + atol)
    for name, value in weights.items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=atol)
    assert found[2] == pytest.approx(evaluated, rel=1e-5 + atol)


@pytest.mark.parametrize("kind", FORMS)
@pytest.mark.parametrize("size", [8, 2])
def test_compute_loss_is_the_mean_of_the_step_with_accumulation_and_without(
    kind: str, size: int, tmp_path: Path
) -> None:
    agree(trained(kind, str(tmp_path), {"per_device_train_batch_size": size, "per_device_eval_batch_size": size}))


@pytest.mark.parametrize(("trainer", "kind"), [("ddp", "mean"), ("fsdp2", "counted")])
def test_compute_loss_on_two_ranks_is_that_of_one(trainer: str, kind: str, tmp_path: Path) -> None:
    arguments = {"trainer": trainer, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3}
    for found in run_ranks(2, trained, kind, str(tmp_path), arguments):
        agree(found)


def test_compute_loss_runs_under_autocast(tmp_path: Path) -> None:
    agree(trained("mean", str(tmp_path / "bf16"), {"bf16": True, "per_device_train_batch_size": 2}), atol=2e-2)
    exact = trained("mean", str(tmp_path / "fp32"), {"per_device_train_batch_size": 2})
    assert trained("mean", str(tmp_path / "again"), {"bf16": True})[0] != exact[0]


def test_the_settings_loss_by_super_and_own_functions_give_the_settings_loss(tmp_path: Path) -> None:
    seen: list[tuple[bool, float, bool]] = []

    class Same(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **kwargs)
            assert outputs.shape == (*inputs["labels"].shape, 64)
            seen.append((return_outputs, float(kwargs["num_items_in_batch"]), outputs.requires_grad))
            return (loss, outputs) if return_outputs else loss

    def own(logits: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def counted(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor) -> Tensor:
        total = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        return total / num_items_in_batch

    runs, settings = [], [{"loss": "cross_entropy"}, {"loss": "linear_cross_entropy"}]
    for kind, losses in ((Trainer, [*settings, {"loss_fn": own}, {"loss_fn": counted}]), (Same, settings)):
        for n, loss in enumerate(losses):
            sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
            trainer = made(kind, tmp_path / f"{kind.__name__}-{n}", **{**PLAIN, **sizes, **loss})
            trainer.train()
            runs.append([log["loss"] for log in trainer.state.log_history if "loss" in log])
            runs[-1].append(trainer.evaluate()["eval_loss"])
    for run in runs[1:]:
        assert run == pytest.approx(runs[0], rel=1e-5)
    data = samples()
    targets = [sum(int((data[n]["labels"][1:] != -100).sum()) for n in range(s * 8, s * 8 + 8)) for s in range(3)]
    training = [count for evaluates, count, _ in seen if not evaluates]
    assert training[:12] == [count for count in targets for _ in range(4)]  # of the step, not of the micro-batch
    assert {(evaluates, grad) for evaluates, _, grad in seen} == {(False, True), (True, False)}


class Everything:
    """A subclass's body as it is written for Hugging Face's Trainer."""

    logged: list[dict[str, float]]

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs, num_items_in_batch=num_items_in_batch)
        loss = outputs.loss + 0.1 * outputs.logits.square().mean(-1).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self):
        if self.optimizer is None:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        return self.optimizer

    def create_scheduler(self, num_training_steps, optimizer=None):
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, num_training_steps)
        return self.lr_scheduler

    def get_train_dataloader(self):
        return DataLoader(self.train_dataset, batch_size=2)

    def get_eval_dataloader(self, eval_dataset=None):
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        return DataLoader([{**row, "labels": row["input_ids"]} for row in data], batch_size=4)

    def log(self, logs, start_time=None):
        logs["mine"] = 1.0
        super().log(logs, start_time)
        self.logged.append(dict(logs))


@pytest.mark.filterwarnings("default")
def test_a_subclass_written_for_hugging_face_s_trainer_gives_the_same_run(tmp_path: Path) -> None:
    rows, found = [*tiny.RandomTokens(32, ragged=True)], []
    settings = {"max_steps": 4, "per_device_train_batch_size": 2, "eval_strategy": "steps", "eval_steps": 2, **QUIET}
    for library in (transformers, forgather_cli):
        kind = type("Mine", (Everything, library.Trainer), {"logged": []})
        root = str(tmp_path / library.__name__)
        args = library.TrainingArguments(root, gradient_accumulation_steps=4, **settings)
        trainer = kind(model=tiny.llama(), args=args, train_dataset=rows, eval_dataset=rows[:8])
        trainer.train()
        logged = [each for each in kind.logged if "train_runtime" not in each]
        found.append((logged, trainer.model.state_dict(), trainer.state.log_history))
    (theirs, their_weights, _), (mine, my_weights, history) = found
    for key, rel in (("loss", 1e-4), ("learning_rate", 1e-6), ("eval_loss", 1e-4)):
        expected, found = ([each[key] for each in logged if key in each] for logged in (theirs, mine))
        assert found == pytest.approx(expected, rel=rel), key
    for name, value in their_weights.items():
        torch.testing.assert_close(my_weights[name], value, rtol=1e-4, atol=1e-5)
    assert all(record["mine"] == 1.0 for record in history)
    assert [record.get("mine") for record in tiny.metrics(tmp_path / "forgather_cli")] == [1.0] * 7


def of_two_ranks(root: str, trainer: str) -> tuple[list[float], str, list[int]]:
    """Losses, the optimizer's class, and how many batches this rank saw of the loaders that the subclass made."""
    seen: list[int] = []
    counts = tiny.acts(on_forward_backward_begin=lambda state, *_, **kwargs: seen.append(state.global_step))
    rows = [*tiny.RandomTokens(32, ragged=True)]
    kind = type("Mine", (Everything, Trainer), {"logged": [], "compute_loss": Trainer.compute_loss})
    args = TrainingArguments(
        root, max_steps=4, per_device_train_batch_size=2, global_batch_size=8, eval_strategy="steps", eval_steps=2,
        trainer=trainer, **QUIET,
    )  # fmt: skip
    made = kind(model=tiny.decoder(), args=args, train_dataset=rows, eval_dataset=rows[:8], callbacks=[counts])
    made.train()
    logged = [each[key] for each in kind.logged for key in ("loss", "eval_loss") if key in each]
    return logged, type(made.optimizer.optimizers[0]).__name__, seen


def test_what_a_subclass_makes_serves_several_ranks(tmp_path: Path) -> None:
    alone = of_two_ranks(str(tmp_path / "one"), "single")
    assert len(alone[2]) == 16
    for trainer in ("ddp", "fsdp2"):
        for losses, optimizer, seen in run_ranks(2, of_two_ranks, str(tmp_path / trainer), trainer):
            assert losses == pytest.approx(alone[0], rel=1e-5)
            assert (optimizer, len(seen)) == ("SGD", 8)  # each batch is one rank's


def test_an_optimizer_of_the_settings_by_super_and_one_that_is_set_before(tmp_path: Path) -> None:
    class Slower(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            super().create_optimizer()
            assert isinstance(self.optimizer, torch.optim.AdamW)  # as torch's schedulers want it
            for group in self.optimizer.param_groups:
                group["weight_decay"] = 0.25
            return self.optimizer

        def create_scheduler(self, num_training_steps: int | None, optimizer: Any = None) -> Any:
            return super().create_scheduler(2 * (num_training_steps or 0), optimizer)

    trainer = made(Slower, tmp_path / "super", max_steps=4, learning_rate=1.0)
    for _ in range(2):  # each training makes its own
        trainer.train()
        assert {group["weight_decay"] for group in trainer.optimizer.param_groups} == {0.25}
        assert trainer.lr_scheduler.get_last_lr() == [0.5, 0.5]
    trainer = made(Trainer, tmp_path / "set", max_steps=2)
    assert (trainer.optimizer, trainer.lr_scheduler) == (None, None)
    trainer.optimizer = torch.optim.SGD(trainer.model.parameters(), lr=0.5)
    trainer.train()
    assert isinstance(trainer.optimizer.optimizers[0], torch.optim.SGD)


def test_the_list_of_names_is_that_of_the_installed_library(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = {name for name, each in vars(transformers.Trainer).items()
              if not name.startswith("_") and (inspect.isroutine(each) or name == "loss_is_scaled_for_ga")}  # fmt: skip
    assert HONOURED | REFUSED.keys() == theirs
    private = {name for name, each in vars(transformers.Trainer).items()
               if name.startswith("_") and not name.startswith("__") and inspect.isfunction(each)}  # fmt: skip
    assert private_methods() == private
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    listed = private_methods()
    assert {"_save_optimizer_and_scheduler", "_load_best_model", "_get_num_items_in_batch"} <= listed
    if f"from transformers {transformers.__version__}." in Path(subclass.__file__).read_text():
        assert listed == private


@pytest.mark.parametrize("mixed_in", [False, True])
def test_other_names_of_that_library_are_refused_by_name(mixed_in: bool, tmp_path: Path) -> None:
    def override(self: Any, *args: Any, **kwargs: Any) -> None: ...

    names = sorted(REFUSED.keys() | private_methods())
    own = dict.fromkeys([*names, "a_method_of_mine"], override)
    kind = type("Mine", (type("Mixin", (), own), Trainer), {}) if mixed_in else type("Mine", (Trainer,), own)
    with pytest.raises(ConfigError) as refused:
        made(kind, tmp_path)
    assert [problem.split(":")[0] for problem in refused.value.problems] == [f"Mine.{name}" for name in names]
    assert all(";" in problem for problem in refused.value.problems)  # what to do instead


@pytest.mark.parametrize("make", [staticmethod, classmethod, property, lambda function: 5])
def test_a_private_name_is_refused_whatever_it_is_made(make: Any, tmp_path: Path) -> None:
    """And one of its own is the subclass's to choose."""

    def own(*args: Any) -> None: ...

    between = type("Between", (Trainer,), {"_load_best_model": lambda self: None})
    for base, names in ((Trainer, ["_save_rng_state"]), (between, ["_load_best_model", "_save_rng_state"])):
        kind = type("Mine", (base,), {"_save_rng_state": make(own), "_mine": make(own)})
        with pytest.raises(ConfigError) as refused:
            made(kind, tmp_path)
        assert [problem.split(":")[0] for problem in refused.value.problems] == [f"Mine.{name}" for name in names]


def test_an_optimizer_and_a_scheduler_that_are_only_returned(tmp_path: Path) -> None:
    class Returns(Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            return torch.optim.SGD(self.model.parameters(), lr=0.5)

    class ReturnsBoth(Returns):
        def create_scheduler(self, num_training_steps: int | None, optimizer: Any = None) -> Any:
            assert isinstance(self.optimizer, torch.optim.SGD)
            return torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.5, 2)

    for kind, rate in ((Returns, 0.0), (ReturnsBoth, 0.25)):
        trainer = made(kind, tmp_path / kind.__name__, max_steps=2)
        for _ in range(2):  # each training makes its own
            trainer.train()
            assert type(trainer.optimizer.optimizers[0]) is torch.optim.SGD
            assert trainer.lr_scheduler.get_last_lr() == [rate]


def made(kind: type[Trainer], root: Path, **given: Any) -> Trainer:
    return tiny.script(root, None, samples(), samples(4), kind=kind, **{"logging_steps": 1, **given})


def in_a_pipeline(root: str) -> list[str]:
    class Both(Mean):
        def create_optimizer(self, model: Any = None) -> Any: ...

    args = TrainingArguments(root, trainer="pipeline", per_device_train_batch_size=4, max_steps=1, **QUIET)
    with pytest.raises(ConfigError) as refused:
        Both(None, args, None, samples(), model_init=tiny.decoder)
    return refused.value.problems


def test_what_a_strategy_cannot_call_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def create_optimizer(self, model: Any = None) -> Any: ...

    for loss, optimizer in run_ranks(2, in_a_pipeline, str(tmp_path)):
        assert "compute_loss" in loss
        assert "loss_fn" in loss
        assert "create_optimizer" in optimizer
        assert "optimizer_factory" in optimizer
    given = build_strategy(TrainingArguments("x", use_cpu=True))
    with pytest.raises(ConfigError, match=r"compute_loss.*strategy"):
        made(Mean, tmp_path, strategy=given)
    with pytest.raises(ConfigError, match=r"create_optimizer.*fuse_optim_with_backward"):
        made(Own, tmp_path, fuse_optim_with_backward=True, max_grad_norm=None)
    with pytest.raises(ConfigError, match=r"create_optimizer.*self\.optimizer"):
        made(Own, tmp_path, max_steps=1).train()


@pytest.mark.parametrize("answer", [None, 1.0, torch.ones(2), (torch.ones(()), None)])
def test_what_is_no_loss_is_said(answer: Any, tmp_path: Path) -> None:
    class Wrong(Trainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **kwargs: Any) -> Any:
            return (answer, None) if return_outputs else answer

    trainer = made(Wrong, tmp_path, max_steps=1)
    for act in (trainer.train, trainer.evaluate):
        with pytest.raises(ConfigError, match=r"compute_loss: must return a tensor .*got"):
            act()


def test_a_metric_of_compute_loss_is_logged_with_the_others(tmp_path: Path) -> None:
    class Auxiliary(Mean):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"auxiliary": torch.tensor(2.0)})
            return super().compute_loss(*args, **kwargs)

    trainer = made(Auxiliary, tmp_path, max_steps=2, per_device_train_batch_size=8, disable_tqdm=False)
    trainer.train()
    assert [(r["step"], r["auxiliary"]) for r in tiny.metrics(tmp_path) if "auxiliary" in r] == [(0, 2.0), (1, 2.0)]
    assert "auxiliary" in trainer.state.log_history[0]
