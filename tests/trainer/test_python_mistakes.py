"""What a script gives in the wrong place, of the wrong kind or twice is said in a sentence before training."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
import transformers
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD

from forgather_cli import DDPSettings, FSDP2Settings, Trainer, TrainerCallback, TrainingArguments
from forgather_cli.errors import ConfigError, DataError, SetupError
from forgather_cli.strategies.build import build_strategy

DATA = tiny.RandomTokens()


def arguments(**changes: Any) -> TrainingArguments:
    quiet = {"output_dir": "out", "max_steps": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(**{**quiet, **changes})


@pytest.fixture(autouse=True)
def _here(own_directory: None) -> None: ...


# --------------------------------------------------------------------------------------------- places, names and kinds

MISPLACED: list[tuple[Callable[[], Any], str]] = [
    (lambda: TrainingArguments({"max_steps": 2}), r"output_dir: .*TrainingArguments\(\*\*"),  # type: ignore[arg-type]
    (lambda: TrainingArguments(5), "output_dir: .*int"),  # type: ignore[arg-type]
    (lambda: TrainingArguments("out", 5), "TrainingArguments: .*output_dir.*by name"),
    (lambda: Trainer(arguments(), tiny.decoder()), "model: got a TrainingArguments.*model="),  # type: ignore[arg-type]
    (lambda: Trainer("nano", arguments()), r"model: got a str.*nn\.Module.*compose"),  # type: ignore[arg-type]
    (lambda: Trainer({"model": "nano"}, arguments()), r"model: got a dict.*nn\.Module"),  # type: ignore[arg-type]
    (lambda: Trainer(nn.Linear, arguments()), "model: got the class Linear.*model_init"),  # type: ignore[arg-type]
    (lambda: Trainer(None, arguments(), model_init=tiny.decoder()), "model_init: got a Decoder.*model="),
    (lambda: Trainer(tiny.decoder(), "out"), r"args: got a str.*TrainingArguments\("),  # type: ignore[arg-type]
    (lambda: Trainer(tiny.decoder(), DATA), "args: got a RandomTokens.*TrainingArguments"),  # type: ignore[arg-type]
    (lambda: Trainer(tiny.decoder(), transformers.TrainingArguments("theirs")),  # type: ignore[arg-type]
     "args: .*transformers.*from forgather_cli"),
    (lambda: Trainer(tiny.decoder(), arguments(), DATA), "data_collator: got a RandomTokens.*train_dataset="),  # type: ignore[arg-type]
    (lambda: Trainer(tiny.decoder(), arguments(), None, DATA, None, None, None, len), "Trainer: .*model_init.*by name"),
    (lambda: made(tokenizer=object()), "tokenizer: .*processing_class"),
    (lambda: made(compute_loss_func=len), r"compute_loss_func: .*loss_fn"),
    (lambda: made(trian_dataset=DATA), "trian_dataset: .*train_dataset"),
    (lambda: made(callbacks=TrainerCallback()), "callbacks: got a TrainerCallback.*list"),
    (lambda: made(callbacks="wandb"), "callbacks: .*str"),
    (lambda: made(optimizers=SGD([nn.Parameter(torch.zeros(1))], 1.0)), r"optimizers: got a SGD.*\(optimizer, "),
    (lambda: made(optimizers=(None,)), r"optimizers: got .*\(optimizer, "),
    (lambda: made(optimizer_cls_and_kwargs=SGD), r"optimizer_cls_and_kwargs: .*\(cls, "),
    (lambda: made(optimizer_factory=3), "optimizer_factory: got a int.*function"),
    (lambda: made(loss_fn="cross_entropy"), "loss_fn: got a str.*function"),
    (lambda: made(train_dataset={"train": DATA}).train(), r"train_dataset: got a dict of train; give one dataset"),
    (lambda: made(train_dataset="wikitext").train(), "train_dataset: got a str.*dataset"),
    (lambda: made(eval_dataset={"a": DATA, "b": DATA}).evaluate(), r"eval_dataset: got a dict of a, b.*evaluate\("),
    (lambda: made().evaluate("test.txt"), "eval_dataset: got a str"),
    (lambda: made(strategy=7), "7; types: single"),
    (lambda: made(train_dataset=None).train(), "train_dataset"),
    (lambda: Trainer(), "model"),
    (lambda: made(eval_dataset=DATA, compute_metrics=lambda told: 0.5).evaluate(), "compute_metrics"),
    (lambda: made(eval_dataset=DATA, compute_metrics=len, preprocess_logits_for_metrics=lambda *both: both).evaluate(),
     "preprocess_logits_for_metrics"),
    (lambda: TrainingArguments("out", trainer="fsdp"), "trainer.*ddp.*fsdp2"),
    (lambda: TrainingArguments("out", trainer={"type": "pipeline", "n_microbatch": 3}), r"trainer\.n_microbatch"),
    (lambda: TrainingArguments("out", learning_rte=1e-3), "learning_rate"),
    (lambda: TrainingArguments("out", max_steps="many"), "max_steps.*'many'"),  # type: ignore[arg-type]
]  # fmt: skip


def made(**given: Any) -> Trainer:
    return Trainer(tiny.decoder(), arguments(), **{"train_dataset": DATA, **given})


@pytest.mark.parametrize(("act", "said"), MISPLACED)
def test_what_is_misplaced_says_what_to_write(act: Callable[[], Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        act()


def test_the_defaults_of_hugging_face_s_trainer_are_accepted() -> None:
    given: dict[str, Any] = dict.fromkeys(("callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_metrics"))
    Trainer(tiny.decoder(), arguments(), None, DATA, None, None, None, **given)
    assert str(TrainingArguments(Path("somewhere")).output_dir) == "somewhere"


# ---------------------------------------------------------------------------------------------------------- labels


class Labelled(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __init__(self, labels: Any, name: str = "labels") -> None:
        self._labels, self._name = labels, name

    def __len__(self) -> int:
        return 32

    def __getitem__(self, n: int) -> dict[str, Any]:
        return {"input_ids": DATA.tokens[n], self._name: self._labels}


LABELS = {
    "of the sequence": (1, r"\(8,\)"),
    "of the sequence, in a column": (torch.tensor([1]), r"\(8, 1\)"),
    "of another length": (torch.tensor([1, 2, 3]), r"\(8, 3\)"),
    "several of a token": (torch.ones(16, 3, dtype=torch.int64), r"\(8, 16, 3\)"),
    "not whole numbers": (torch.ones(16), "float32"),
}


@pytest.mark.parametrize(("labels", "got"), LABELS.values(), ids=LABELS)
def test_labels_that_are_not_per_token_are_said_at_the_first_batch(labels: Any, got: str) -> None:
    begun: list[int] = []
    notes = tiny.acts(on_step_begin=lambda state, *_, **kwargs: begun.append(state.global_step))
    for data in (Labelled(labels), tiny.stream(Labelled(labels, "label"))):
        with pytest.raises(DataError, match=rf"train_dataset: labels .*{got}.*(expected|must)") as refused:
            Trainer(tiny.decoder(), arguments(), None, data, callbacks=[notes]).train()
        assert "\n" not in str(refused.value)
        with pytest.raises(DataError, match=rf"eval_dataset: labels .*{got}.*(expected|must)"):
            Trainer(tiny.decoder(), arguments(), None, None, data).evaluate()
    assert begun == []
    assert not Path("out").exists()  # put back as it was found, as after other mistakes


# --------------------------------------------------------------------------------------- ranks, strategies, directories


@pytest.mark.parametrize("trainer", ["ddp", "fsdp2", DDPSettings(), FSDP2Settings()])
def test_a_strategy_of_several_ranks_in_a_process_that_nobody_started_as_one(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"trainer: .*torchrun"):
        Trainer(tiny.decoder(), arguments(trainer=trainer), None, DATA)
    with pytest.raises(ConfigError, match=r"strategy: .*torchrun"):
        Trainer(tiny.decoder(), arguments(), None, DATA, strategy=trainer)
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0")):  # torchrun --nproc_per_node=1
        monkeypatch.setenv(name, value)
    assert Trainer(tiny.decoder(), arguments(trainer=trainer), None, DATA).strategy.data_size == 1
    if dist.is_initialized():  # fsdp2's, of this rank
        dist.destroy_process_group()


def test_fsdp_of_hugging_face_s_arguments_needs_ranks_too() -> None:
    with pytest.raises(ConfigError, match=r"fsdp: .*torchrun"):
        Trainer(tiny.decoder(), arguments(fsdp="full_shard"), None, DATA)


def with_strategy(rank_and_size: list[tuple[int, int]]) -> str:
    """What is said of a strategy of the user's, which tells (data_rank, data_size) by rank."""
    given = build_strategy(TrainingArguments("x", use_cpu=True))
    rank = int(os.environ["RANK"])
    given.data_rank, given.data_size = rank_and_size[rank]
    with pytest.raises(ConfigError) as refused:
        Trainer(tiny.decoder(), arguments(), None, DATA, strategy=given)
    return str(refused.value)


@pytest.mark.parametrize("shares", [[(0, 1), (0, 1)], [(0, 4), (1, 4)], [(0, 2), (0, 2)], [(0, 2), (2, 2)]])
def test_a_strategy_whose_shares_of_the_data_do_not_make_the_world_is_refused(shares: list[tuple[int, int]]) -> None:
    for said in run_ranks(2, with_strategy, shares):
        assert "data_size" in said
        assert "2 ranks" in said
        assert "\n" not in said


def test_two_trainers_of_one_process_do_not_write_one_directory() -> None:
    said: list[str] = []

    def second(state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            thread = threading.Thread(target=train)
            thread.start()
            thread.join()

    def train() -> None:
        for root in ("out", "link"):
            with pytest.raises(SetupError) as refused:
                tiny.script(root, max_steps=2, overwrite_output_dir=True).train()
            said.append(str(refused.value))

    Path("link").symlink_to("out")
    made(callbacks=[tiny.acts(on_step_end=second)]).train()
    assert len(said) == 2
    assert all("another job" in text and str(os.getpid()) in text for text in said)
    assert [record["step"] for record in tiny.metrics(Path("out"))][-1] == 2  # the first one's, untouched
    Trainer(tiny.decoder(), arguments(overwrite_output_dir=True), None, DATA).train()  # it was given back
