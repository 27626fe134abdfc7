"""Callbacks of one's own: whole parameters, state that differs between ranks, and what they add to the logs."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import tiny
import torch
from accelerate.tracking import GeneralTracker
from program import SMALL, forgather
from ranks import logged, run_ranks
from safetensors.torch import load_file
from selection import some
from torch import Tensor
from two_ranks import train_in_pool
from users_callbacks import EveryEvent

from forgather_cli import Trainer
from forgather_cli.callbacks.base import EVENTS, TrainerCallback
from forgather_cli.checkpoint.load import Reader
from forgather_cli.errors import TrainingError
from forgather_cli.run_dir import RunDir

WEIGHT = "model.layers.0.mlp.up_proj.weight"
PIPELINE = ("trainer=pipeline", "n_microbatches=4")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "single": (1, ()),
    "ddp 2": (2, ("trainer=ddp",)),
    "1F1B 2": (2, PIPELINE),
    "ZBVZeroBubble 2": (2, (*PIPELINE, "schedule=ZBVZeroBubble")),
    "fsdp2 2": (2, ("trainer=fsdp2",)),
    "fsdp2 3": (3, ("trainer=fsdp2", "global_batch_size=6")),  # rows that three ranks cannot share equally
    "hsdp 2x2": (4, ("trainer=fsdp2", "replicate=2")),
    "1F1B 2x2": (4, ("trainer=pipeline", "n_microbatches=2", "shard=2")),
}


def whole(root: str, *overrides: str) -> list[tuple[str, Tensor]]:
    """What a rank is given of the parameters at the end of a run, which it changes before it asks again."""
    trainer = tiny.train(tiny.config(Path(root), *overrides), RunDir(Path(root)))
    for _, tensor in trainer.full_parameters():
        assert not tensor.requires_grad
        tensor.fill_(7.0)  # a copy
    return list(trainer.full_parameters())


@pytest.mark.parametrize("layout", some(LAYOUTS, "single", "ZBVZeroBubble 2", "fsdp2 2"))
def test_parameters_are_whole_on_every_rank_of_every_layout(layout: str, tmp_path: Path) -> None:
    ranks, words = LAYOUTS[layout]
    words = (*words, "model.num_hidden_layers=4", "precision=bf16_true", "max_steps=2", "warmup_steps=1")
    given = (str(tmp_path), *words)
    results = [whole(*given)] if ranks == 1 else run_ranks(ranks, whole, *given)
    saved = load_file(RunDir(tmp_path).checkpoint(2) / "model/model.safetensors")
    for found in results:
        assert [name for name, _ in found] == [name for name, _ in results[0]]  # so that all ranks send the same
        assert dict(found).keys() == saved.keys()
        for name, tensor in found:
            assert (tensor.dtype, tensor.shape) == (torch.bfloat16, saved[name].shape)
            assert torch.equal(tensor, saved[name]), name


class Looks(EveryEvent):
    """At whole parameters in each event: they are those of the last optimizer step."""

    def __init__(self) -> None:
        self.before: dict[str, Tensor] = {}
        self.seen: set[str] = set()

    def happens(self, event: str, state: Any, kwargs: dict[str, Any]) -> None:
        if event == "on_init_end":
            return
        now = dict(kwargs["trainer"].full_parameters())
        if event != "on_optimizer_step" and self.before:
            assert all(torch.equal(tensor, self.before[name]) for name, tensor in now.items()), event
        self.before = now
        self.seen.add(event)


def looked(root: str) -> set[str]:
    config = tiny.config(
        Path(root), "trainer=fsdp2", "max_steps=2", "eval_steps=1", "save_steps=1", "per_device_train_batch_size=2",
        "+callbacks.looks._target_=test_own_callbacks.Looks",
    )  # fmt: skip
    seen: set[str] = tiny.train(config, RunDir(Path(root))).callbacks.by_name["looks"].seen
    return seen


def test_parameters_are_whole_in_every_event(tmp_path: Path) -> None:
    """Whatever FSDP2 has gathered just then, between micro-batches and in evaluations."""
    rare = {"on_init_end", "on_predict", "on_exception", "on_divergence", "on_rollback"}
    assert run_ranks(2, looked, str(tmp_path)) == [set(EVENTS) - rare] * 2


DOCUMENTED = re.search(
    r"```python\n(# ema\.py\n.*?)```", (Path(__file__).parents[2] / "docs/own_parts.md").read_text(), re.DOTALL
)


def ema_run(folder: Path, *words: str, ranks: int = 2) -> tuple[list[float], dict[str, Any]]:
    """Norms that the documentation's callback has logged, and its state in the newest checkpoint."""
    folder.mkdir(exist_ok=True)
    assert DOCUMENTED is not None
    (folder / "ema.py").write_text(DOCUMENTED[1])
    given = [*SMALL, "max_steps=4", "logging_steps=1", "save_steps=1", "save_total_limit=9", "learning_rate=1e-2",
             "output_dir=run", "+callbacks.ema._target_=ema.Ema", *words]  # fmt: skip
    if ranks == 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            assert forgather("train", *given) == 0
    else:
        assert [code for code, _ in train_in_pool(folder, [*given, "trainer=fsdp2"])] == [0, 0]
    run = RunDir(folder / "run")
    norms = [record["ema_norm"] for record in tiny.metrics(run.root) if "loss" in record]
    return norms, Reader(run.checkpoint(4)).state("callbacks.ema")


@pytest.mark.usefixtures("one_thread")
def test_the_documented_mean_of_weights_is_that_of_one_device_and_goes_on_in_any_layout(tmp_path: Path) -> None:
    """Its norm in the logs, and its state to the last bit where the layout is the same."""
    alone, _ = ema_run(tmp_path / "single", ranks=1)
    norms, state = ema_run(tmp_path / "fsdp2")
    assert norms == pytest.approx(alone, rel=1e-5)
    run = RunDir(tmp_path / "fsdp2/run")
    weights = [load_file(run.checkpoint(step) / "model/model.safetensors") for step in (1, 2, 3, 4)]
    assert state["mean"].keys() == weights[0].keys()
    for name, mean in state["mean"].items():
        wanted = weights[0][name]
        for later in weights[1:]:
            wanted = wanted.lerp(later[name], 1 - 0.9)
        assert torch.equal(mean, wanted), name
    assert norms[-1] == pytest.approx(torch.cat([m.flatten() for m in state["mean"].values()]).double().norm().item())

    checkpoint = run.checkpoint(2)
    assert Reader(checkpoint).manifest.components["callbacks.ema"] == "replicated"
    later, resumed = ema_run(tmp_path / "resumed", f"resume_from_checkpoint={checkpoint}")
    assert later == norms[2:]
    assert resumed["mean"].keys() == state["mean"].keys()
    assert all(torch.equal(mean, state["mean"][name]) for name, mean in resumed["mean"].items())
    later, _ = ema_run(tmp_path / "elsewhere", f"resume_from_checkpoint={checkpoint}", ranks=1)
    assert later == pytest.approx(norms[2:], rel=1e-5)


class Notes(TrainerCallback):
    """``rows`` are what this rank holds of a parameter; ``best`` what rank 0 alone keeps, or every rank."""

    def __init__(self, alike: bool = False) -> None:
        self.alike, self.state, self.given = alike, {"steps": 0}, {}

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        from forgather_cli.shards import local

        self.state = {"steps": self.state["steps"] + 1}
        if not self.alike:
            weight = kwargs["model"].get_parameter(WEIGHT)
            self.state["rows"] = local(weight).detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state, self.given = dict(state), dict(state)


NOTES = [f"+callbacks.{name}._target_=test_own_callbacks.Notes" for name in ("mine", "same")]


def noted(root: str, steps: int, *overrides: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Of a rank what the callbacks were given back, the state of the first at the end, and warnings."""
    words = [*NOTES, "+callbacks.same.alike=true", "save_steps=2", "lr_scheduler=constant", *overrides]
    with logged() as messages:
        trainer = tiny.train(tiny.config(Path(root), f"max_steps={steps}", *words), RunDir(Path(root)))
    mine, same = (trainer.callbacks.by_name[name] for name in ("mine", "same"))
    return {"mine": mine.given, "same": same.given}, mine.state, "\n".join(messages)


@pytest.mark.parametrize("check", ["tensor", "none"])
def test_state_that_differs_by_rank_is_each_rank_s_own_and_never_another_s(check: str, tmp_path: Path) -> None:
    first = run_ranks(2, noted, str(tmp_path), 2, "trainer=fsdp2", f"replication_check={check}")
    saved = [state for _, state, _ in first]
    assert not torch.equal(saved[0]["rows"], saved[1]["rows"])
    checkpoint = RunDir(tmp_path).checkpoint(2)
    kinds = Reader(checkpoint).manifest.components
    assert (kinds["callbacks.mine"], kinds["callbacks.same"]) == ("per_rank", "replicated")
    go_on = (4, "trainer=fsdp2", f"resume_from_checkpoint={checkpoint}")
    for rank, (given, state, told) in enumerate(run_ranks(2, noted, str(tmp_path / "again"), *go_on)):
        assert given["mine"]["steps"] == 2
        assert torch.equal(given["mine"]["rows"], saved[rank]["rows"])
        assert (given["same"], state["steps"]) == ({"steps": 2}, 4)
        assert "callbacks.mine" not in told
    if check == "none":
        return
    elsewhere = (4, f"resume_from_checkpoint={checkpoint}")
    others = [
        noted(str(tmp_path / "single"), *elsewhere),
        *run_ranks(2, noted, str(tmp_path / "ddp"), *elsewhere, "trainer=ddp"),
        *run_ranks(2, noted, str(tmp_path / "replicas"), *elsewhere, "trainer=fsdp2", "replicate=2"),
    ]
    for given, state, told in others:
        assert (given, state["steps"]) == ({"mine": {}, "same": {"steps": 2}}, 2)
        assert "callbacks.mine, which starts fresh" in told
        assert "callbacks.same" not in told


class Talks(Notes):
    """Its state is a sum over ranks, which all of them make."""

    def __init__(self) -> None:
        super().__init__(alike=True)

    def state_dict(self) -> dict[str, Any]:
        total = torch.tensor(float(self.state["steps"]))
        torch.distributed.all_reduce(total)
        return {"steps": int(total)}


def sharded(root: str) -> list[tuple[int, str]]:
    """Why saves have failed of a callback that keeps DTensors."""
    mean: dict[str, Tensor] = {}

    def keep(state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        mean.update({name: p.detach().clone() for name, p in model.named_parameters()})

    callback = tiny.acts(on_optimizer_step=keep)
    type(callback).state_dict = lambda self: mean
    config = tiny.config(Path(root), "trainer=fsdp2", "max_steps=1", "save_steps=1")
    trainer = Trainer(model_init=tiny.decoder, args=config, train_dataset=tiny.RandomTokens(), callbacks=[callback])
    trainer.train()
    return trainer.checkpoints.failures


def test_a_state_of_sharded_tensors_is_refused_by_name(tmp_path: Path) -> None:
    for failures in run_ranks(2, sharded, str(tmp_path)):
        assert {step for step, _ in failures} == {1}
        assert all(word in failures[0][1] for word in ("callbacks.Acts.state", "DTensor", "full_tensor()"))


def test_a_state_dict_is_asked_for_on_all_ranks(tmp_path: Path) -> None:
    target = "+callbacks.mine._target_=test_own_callbacks.Talks"
    run_ranks(2, talked, str(tmp_path), target)
    assert Reader(RunDir(tmp_path).checkpoint(2)).state("callbacks.mine") == {"steps": 4}


def talked(root: str, *overrides: str) -> None:
    tiny.train(tiny.config(Path(root), "trainer=ddp", "max_steps=2", "save_steps=2", *overrides), RunDir(Path(root)))


class Adds(TrainerCallback):
    """To the logs of training and evaluations; ``only_first``: on rank 0 alone."""

    def __init__(self, only_first: bool = False) -> None:
        self.only_first = only_first
        self.seen: list[tuple[int, list[str]]] = []

    def on_log_step(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        logs["of_step"] = torch.tensor(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.seen.append((state.global_step, [name for name in logs if name.startswith("my_")]))
        if not self.only_first or state.is_world_process_zero:
            number = 0.5 + state.global_step
            logs |= {"my_float": number, "my_tensor": torch.tensor(number), "my_numpy": np.float32(number)}
        if "eval_loss" in logs:
            logs["eval_mine"] = torch.tensor(1.25)
        logs["of_rows"] = kwargs["model"].get_parameter(WEIGHT).norm()  # a DTensor under fsdp2


class Takes(TrainerCallback):
    """As transformers' PrinterCallback does, which takes a number out; and one that rounds for itself."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        self.seen.append([name for name in logs if name.startswith("my_")])
        logs.pop("total_flos", None)
        if "loss" in logs:
            logs["loss"] = 0.0


class Keeps(GeneralTracker):
    name, requires_logging_directory, tracker = "keeps", False, None
    told: ClassVar[list[tuple[int, dict[str, Any]]]] = []

    def __init__(self, project: str) -> None:
        super().__init__()

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self.told.append((step or 0, values))


MINE = {"my_float", "my_tensor", "my_numpy"}
REPORTED = [
    "logging_steps=2", "eval_steps=2", "save_steps=2", "async_save=false", "callbacks.progress.use_tqdm=false",
    "callbacks.progress.step_columns={my_tensor: {}, my_numpy: {}}", "+callbacks.tensorboard={}",
    "callbacks.progress.final_metrics={my_float: {label: at the end}}",
    "+callbacks.trackers.names=[test_own_callbacks.Keeps]", "+callbacks.trackers.project=mine",
    "+callbacks.adds._target_=test_own_callbacks.Adds", "+callbacks.takes._target_=test_own_callbacks.Takes",
]  # fmt: skip


@pytest.mark.filterwarnings("default")  # of TensorBoard's dependencies
def test_what_is_added_to_the_logs_arrives_everywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Keeps.told.clear()
    trainer = tiny.train(tiny.config(tmp_path, *REPORTED), RunDir(tmp_path))
    records = tiny.metrics(tmp_path)
    trained = [record for record in records if "loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 4]
    for record in [*records, *trainer.state.log_history]:
        assert {name: record[name] for name in MINE} == dict.fromkeys(MINE, 0.5 + record["step"])
        assert all(type(record[name]) is float for name in MINE)
    assert all(record["loss"] > 1 and record["total_flos"] > 0 for record in trained)  # whatever is changed after
    told = tiny.tensorboard(tmp_path / "tensorboard")
    assert [(each.step, each.value) for each in told.Scalars("train/of_step")] == [(1, 1), (2, 2), (4, 4)]
    for name in MINE:
        assert {(each.step, each.value) for each in told.Scalars(f"train/{name}")} == {(1, 1.5), (2, 2.5), (4, 4.5)}
    assert {(step, values["train/my_tensor"], values["train/my_numpy"]) for step, values in Keeps.told} == {
        (1, 1.5, 1.5), (2, 2.5, 2.5), (4, 4.5, 4.5)
    }  # fmt: skip
    shown = capsys.readouterr().out
    assert all(text in shown for text in ("my_tensor 2.5", "my_numpy 4.5", "mine 1.25"))
    assert re.search("at the end +4.5", shown)
    assert Reader(RunDir(tmp_path).checkpoint(4)).manifest.metrics["eval_mine"] == 1.25
    assert told.Scalars("eval/mine")[-1].value == 1.25
    by_name = trainer.callbacks.by_name
    assert all(not names for _, names in by_name["adds"].seen)
    assert all(set(names) == MINE for names in by_name["takes"].seen)


def added(root: str, only_first: bool) -> tuple[list[Any], list[Any], list[dict[str, Any]]]:
    words = [word for word in REPORTED if "trackers" not in word and "tensorboard" not in word]
    words += ["trainer=fsdp2", f"callbacks.adds.only_first={only_first}"]
    trainer = tiny.train(tiny.config(Path(root), *words), RunDir(Path(root)))
    by_name = trainer.callbacks.by_name
    return by_name["adds"].seen, by_name["takes"].seen, trainer.state.log_history


def test_ranks_add_in_one_order_and_rank_0_may_add_alone(tmp_path: Path) -> None:
    first, second = run_ranks(2, added, str(tmp_path / "all"), False)
    assert first[:2] == second[:2]
    assert [record["my_numpy"] for record in first[2]] == [record["my_numpy"] for record in second[2]]
    weight = load_file(RunDir(tmp_path / "all").checkpoint(4) / "model/model.safetensors")[WEIGHT]
    assert tiny.metrics(tmp_path / "all")[-1]["of_rows"] == pytest.approx(float(weight.norm()), rel=1e-5)
    first, second = run_ranks(2, added, str(tmp_path / "first"), True)
    assert all(set(names) == MINE for names in first[1])
    assert not any(second[1])
    assert all(record.keys() >= MINE for record in tiny.metrics(tmp_path / "first"))


def test_an_evaluation_with_a_text_among_its_metrics_is_saved(tmp_path: Path) -> None:
    def add(state: Any, control: Any, logs: dict[str, Any], **kwargs: Any) -> None:
        logs |= {"my_words": "of a sample", "my_list": [1, 2], "my_number": torch.tensor(2.0)}

    data = tiny.RandomTokens(16)
    steps = {"max_steps": 2, "eval_steps": 2, "save_steps": 2, "eval_strategy": "steps", "save_strategy": "steps"}
    tiny.script(tmp_path, data=data, evaluated=data, callbacks=[tiny.acts(on_log=add)], **steps).train()
    metrics = Reader(RunDir(tmp_path).checkpoint(2)).manifest.metrics
    assert metrics["my_number"] == 2
    assert not {"my_words", "my_list"} & metrics.keys()


def test_what_judges_logs_reads_what_was_added(tmp_path: Path) -> None:
    words = ["eval_steps=1", "max_steps=8", "logging_steps=1", "+callbacks.adds._target_=test_own_callbacks.Adds"]
    judges = {
        "divergence": [
            "+callbacks.divergence={metric_key: my_tensor, threshold: 1.0, patience: 1, smoothing: 1.0, warmup: 0}"
        ],
        "early_stopping": ["+callbacks.early_stopping={metric: my_numpy, patience: 2}"],
    }
    steps = []
    for name, more in judges.items():
        run = RunDir(tmp_path / name)
        with contextlib.suppress(TrainingError):
            tiny.train(tiny.config(run.root, *words, *more), run)
        steps.append(max(record["step"] for record in tiny.metrics(run.root)))
    assert steps == [3, 3]
