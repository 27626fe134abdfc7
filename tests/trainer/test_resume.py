"""A run that is cut off and resumed equals an uninterrupted one bit by bit; and so do components of a user's own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import RankError, run_ranks

from forgather_cli import Sharing, StateComponent, Trainer
from forgather_cli.callbacks.base import Divergence, TrainerCallback
from forgather_cli.checkpoint.load import Reader
from forgather_cli.config.schema import AdafactorSettings
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.optim.build import build_optimizer
from forgather_cli.run_dir import RunDir


class Cut(TrainerCallback):
    """Notes the curve and ends the run like a crash would: nothing is saved after ``at`` steps."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.points: dict[int, tuple[float, float]] = {}
        self.logs: dict[int, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            control.should_abort_without_save = True

    def on_train_metrics(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.points[state.global_step + 1] = (float(kwargs["loss"]), float(kwargs["grad_norm"]))

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if "grad_norm" in kwargs["logs"]:
            self.logs[state.global_step] = kwargs["logs"]["loss"]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation, logging out of step, sgd": {
        "gradient_accumulation_steps": 3, "per_device_train_batch_size": 2, "logging_steps": 7, "optim": "sgd",
    },
    "workers, synchronous": {"dataloader_num_workers": 2, "async_save": False},
    "epoch change, no seed": {"max_steps": 20, "per_device_train_batch_size": 8, "seed": -1},
    "incomplete batches": {"max_steps": 20, "per_device_train_batch_size": 7, "dataloader_drop_last": False},
    "adafactor": {
        "optimizer_factory": lambda named: build_optimizer(AdafactorSettings(), named, lr=1e-2, weight_decay=0.0)
    },
    "in backward": {"fuse_optim_with_backward": True, "max_grad_norm": None},
}  # fmt: skip


def train(path: Path, cut: Cut, resume: bool = False, **changes: Any) -> Trainer:
    settings: dict[str, Any] = {
        "max_steps": 12, "per_device_train_batch_size": 4, "save_strategy": "steps", "save_steps": 5, "warmup_steps": 3,
        "logging_steps": 1, "learning_rate": 1e-2, "deterministic": True, **changes,
    }  # fmt: skip
    model = tiny.decoder(attention_dropout=0.1, residual_dropout=0.1)
    data = tiny.RandomTokens(40, ragged=True)
    trainer = tiny.script(path, model, data, callbacks=[cut], resume_from_checkpoint=resume, **settings)
    trainer.train()
    return trainer


def final_state(trainer: Trainer) -> dict[str, torch.Tensor]:
    weights = {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}
    return {**weights, **trainer.optimizer.state_tensors()}


@pytest.mark.parametrize("case", CASES)
def test_resume_is_exact(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.urandom", lambda n: b"\x07" * n)  # seed=-1 draws the same seed in the run compared with
    whole, first, second = Cut(), Cut(at=8), Cut()
    expected = train(tmp_path / "whole", whole, **CASES[case])
    train(tmp_path / "cut", first, **CASES[case])
    monkeypatch.setattr("os.urandom", lambda n: b"\x09" * n)
    resumed = train(tmp_path / "cut", second, resume=True, **CASES[case])
    assert resumed.state.resumed_step == 5
    assert {**first.points, **second.points} == whole.points
    assert {**first.logs, **second.logs} == whole.logs
    a, b = final_state(expected), final_state(resumed)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_save_that_was_cut_off_leaves_the_one_before(tmp_path: Path) -> None:
    whole, second = Cut(), Cut()
    train(tmp_path / "whole", whole)
    train(tmp_path / "cut", Cut(at=11))
    newest = tmp_path / "cut" / "checkpoints" / "step-00000010"
    newest.rename(newest.with_name(".tmp-step-00000010-99.0"))
    (newest.with_name(".tmp-step-00000010-99.0") / "manifest.json").unlink()
    resumed = train(tmp_path / "cut", second, resume=True)
    assert resumed.state.resumed_step == 5
    assert all(whole.points[step] == second.points[step] for step in range(6, 13))
    assert not [p for p in newest.parent.iterdir() if p.name.startswith(".")]


def test_only_the_components_asked_for_are_restored_and_ignore_data_skip_begins_the_data_anew(tmp_path: Path) -> None:
    train(tmp_path, Cut(at=8))
    cut = Cut(at=1)
    trainer = train(tmp_path, cut, resume=True, resume_components=["model"], save_steps=500, save_strategy="no")
    assert trainer.state.resumed_step == 0
    assert min(cut.points) == 1
    trainer = train(tmp_path, Cut(at=6), resume=True, ignore_data_skip=True)
    assert trainer.run.train_loader.state_dict() == {"epoch": 0, "sample": 4}


@pytest.mark.parametrize("save_strategy", ["steps", "no"])  # a signal saves whatever it says
def test_state_that_cannot_be_saved_is_found_before_the_first_step(tmp_path: Path, save_strategy: str) -> None:
    class Odd(TrainerCallback):
        def state_dict(self) -> dict[str, Any]:
            return {"seen": [1, {2, 3}]}

    cut = Cut()
    with pytest.raises(SetupError, match=r"callbacks.*Odd.*seen.*1.*set"):
        tiny.script(tmp_path, max_steps=5, save_strategy=save_strategy, callbacks=[Odd, cut]).train()
    assert not cut.points


LAYOUTS = {"ddp": ("trainer=ddp",), "fsdp2": ("trainer=fsdp2",), "pipeline": ("trainer=pipeline", "n_microbatches=2")}


class Walk:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.place, self.path = torch.zeros(3, dtype=torch.float64), [("start", b"\x00")]

    def step(self) -> None:
        self.place += torch.randn(3, generator=self.generator, dtype=torch.float64)
        self.path.append((f"{float(self.place[0]):.3f}", bytes([len(self.path)])))

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "place": self.place, "path": self.path}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.place, self.path = state["place"], state["path"]


class Walks(Trainer):
    """A subclass with a component of each kind; the callback below moves them."""

    def get_process_groups(self) -> dict[str, Any]:
        return {"mine": dist.new_subgroups(1)[0]} if dist.is_initialized() else {}

    def get_state_components(self) -> list[StateComponent]:
        rank = dist.get_rank() if dist.is_initialized() else 0
        grouped = {"process_group": "mine"} if dist.is_initialized() else {"group_id": "ranks 0"}
        seeds = {"one": 1, "equal": 2, "each": 3 + rank, "grouped": 10 + rank, "of_node": 20}
        self.walks = {name: Walk(seed) for name, seed in seeds.items()}
        kinds = (Sharing.GLOBAL, "replicated", Sharing.PER_RANK, "per_group", "per_node")
        return [
            StateComponent(key, walk, kind, **(grouped if kind == "per_group" else {}))
            for (key, walk), kind in zip(self.walks.items(), kinds, strict=True)
        ]


class Moves(TrainerCallback):
    """Brings a component itself, as a callback of a recipe may."""

    def __init__(self) -> None:
        self.walk = Walk(5)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        kwargs["trainer"].add_state_component("of_callback", self.walk, "replicated", required=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for walk in (self.walk, *kwargs["trainer"].walks.values()):
            walk.step()


def walked(root: str, steps: int, *overrides: str, more: Any = ()) -> dict[str, Any]:
    """The components at the end of a run of ``steps``, which goes on with what is there."""
    ranks = ("nproc_per_node=2",) if dist.is_initialized() else ()
    config = tiny.config(
        Path(root), f"max_steps={steps}", "save_steps=2", "resume_from_checkpoint=true", "lr_scheduler=constant",
        "eval_strategy=no", *ranks, *overrides,
    )  # fmt: skip
    moves = Moves()
    trainer = Walks(
        model_init=tiny.decoder, args=config, train_dataset=tiny.RandomTokens(128), callbacks=[moves, *more]
    )
    trainer.train()
    return {key: walk.path for key, walk in trainer.walks.items()} | {"of_callback": moves.walk.path}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_go_on_exactly_and_in_another_layout_as_they_are_shared(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole = run_ranks(2, walked, str(tmp_path / "whole"), 4, *LAYOUTS[layout])
    run_ranks(2, walked, str(tmp_path / "cut"), 2, *LAYOUTS[layout])
    assert run_ranks(2, walked, str(tmp_path / "cut"), 4, *LAYOUTS[layout]) == [
        {**whole[0]}, {**whole[1], "one": whole[0]["one"]}
    ]  # fmt: skip
    assert whole[0]["each"] != whole[1]["each"]
    assert whole[0]["grouped"] != whole[1]["grouped"]
    manifest = Reader(RunDir(tmp_path / "cut").checkpoint(4)).manifest
    assert {key: manifest.components[key] for key in whole[0]} == {
        "one": "global", "equal": "replicated", "each": "per_rank", "grouped": "per_group", "of_node": "per_node",
        "of_callback": "replicated",
    }  # fmt: skip
    run_ranks(2, walked, str(tmp_path / "other"), 2, *LAYOUTS[layout])
    alone = walked(str(tmp_path / "other"), 4)
    fresh = alone.pop("each")
    assert alone == {key: path for key, path in whole[0].items() if key != "each"}
    assert len(fresh) == 3, "two steps, from its start"
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    [fresh_line] = [line for line in warned if "starts fresh" in line]
    assert "each rank has its own each, which starts fresh" in fresh_line


def test_one_device_goes_on_exactly_a_rollback_takes_them_back_and_they_may_be_left_out(tmp_path: Path) -> None:
    asked = [Divergence("the test wants it", "rollback")]

    def go_back(state: Any, control: Any, **kwargs: Any) -> None:
        control.divergence = asked.pop() if state.global_step == 3 and asked else None

    whole = walked(str(tmp_path / "whole"), 4)
    assert walked(str(tmp_path / "back"), 4, more=[tiny.acts(on_step_end=go_back)]) == whole
    walked(str(tmp_path / "cut"), 2)
    assert walked(str(tmp_path / "cut"), 4) == whole
    walked(str(tmp_path / "without"), 2)
    without = walked(str(tmp_path / "without"), 4, "resume_components=[model,optimizer,trainer,data]")
    assert [len(path) for path in without.values()] == [3] * 6


def adds_on_one_rank(root: str) -> None:
    trainer = trainer_at(Path(root), "trainer=ddp", "nproc_per_node=2")
    if dist.get_rank() == 1:
        trainer.add_state_component("walk", Walk(0))
    trainer.train()


def test_ranks_must_have_the_same(tmp_path: Path) -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(2, adds_on_one_rank, str(tmp_path))
    assert {str(each) for each in caught.value.causes.values()} == {str(caught.value.first)}
    assert re.search("same.*rank 0.*walk.*on rank 1", str(caught.value.first))


def trainer_at(path: Path, *overrides: str) -> Trainer:
    config = tiny.config(path, "max_steps=2", "eval_strategy=no", *overrides)
    return Trainer(model_init=tiny.decoder, args=config, train_dataset=tiny.RandomTokens(128))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (("model", Walk(0)), ("'model'", "Forgather's own")),
        (("a b", Walk(0)), ("'a b'", "letters")),
        (("walk", object()), ("'walk'", "no state_dict and no load_state_dict")),
        (("walk", Walk(0), "per_rnk"), ("per_rnk", "per_rank")),
        (("walk", Walk(0), "per_group"), ("process_group or group_id",)),
        (("walk", Walk(0), "per_group", {"process_group": "mine"}), ("get_process_groups", "'mine'")),
        (("walk", Walk(0), "global", {"group_id": "mine"}), ("only sharing=per_group",)),
    ],
)
def test_what_cannot_be_one_is_named(tmp_path: Path, given: tuple[Any, ...], words: tuple[str, ...]) -> None:
    trainer = trainer_at(tmp_path)
    more = given[3] if len(given) > 3 else {}
    trainer.add_state_component(*given[:3], **more)
    with pytest.raises(ConfigError) as refused:
        trainer.train()
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_they_are_added_before_training_and_a_required_one_must_be_there(tmp_path: Path) -> None:
    trainer = trainer_at(tmp_path / "late")
    late = tiny.acts(on_step_end=lambda *_, **kwargs: kwargs["trainer"].add_state_component("walk", Walk(0)))
    trainer.add_callback(late)
    with pytest.raises(ConfigError, match="'walk': training has begun"):
        trainer.train()
    trainer_at(tmp_path / "run").train()
    lacks = trainer_at(tmp_path / "run")
    lacks.add_state_component("walk", Walk(0), required=True)
    with pytest.raises(Exception, match="has no walk"):
        lacks.train(resume_from_checkpoint=True)
