"""What breaks inside a user's part is said in one sentence, and the traceback of the user's code stands below."""

from __future__ import annotations

import dataclasses
import functools
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import users_parts
from program import Process, forgather, refusal
from users_parts import Halves, NoRate, Rows, Signs, Words

from forgather_cli import Trainer, TrainingArguments, compose
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.errors import ConfigError, PartError
from forgather_cli.launch.exit_status import from_error, read_exit_record
from forgather_cli.run_dir import RunDir, name_file

PARTS = {
    "model": "Words", "data": "rows", "loss": "loss", "optimizer": "Signs", "lr_scheduler": "Halves",
    "callbacks": "Tell",
}  # fmt: skip
WORDS = ["precision=fp32", "device=cpu", "max_steps=3", "global_batch_size=4", "per_device_train_batch_size=2",
         "save_strategy=no", "eval_steps=2", "output_dir=run"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all tests: what is composed of the same files is composed once."""
    root = tmp_path_factory.mktemp("own parts")
    for group, name in PARTS.items():
        file = root / "conf" / group / "mine.yaml"
        file.parent.mkdir(parents=True)
        target = f"_target_: users_parts.{name}\n"
        file.write_text(target if group != "callbacks" else f"tell:\n  {target}")
    (root / "conf/model/wide.yaml").write_text("_target_: users_parts.Words\nvocab_size: 60\n")
    (root / "conf/model/fixed.yaml").write_text("_target_: users_parts.Fixed\n")
    (root / "conf/optimizer/norate.yaml").write_text("_target_: users_parts.NoRate\n")
    return root


@pytest.fixture(autouse=True)
def _there(folder: Path, monkeypatch: pytest.MonkeyPatch, one_thread: None) -> Iterator[None]:
    monkeypatch.chdir(folder)
    yield
    for name in ("run", "out"):
        shutil.rmtree(name, ignore_errors=True)


def words(part: str = "", fault: str = "", *more: str, trainer: str = "single") -> list[str]:
    chosen = {"model": "mine", "data": "mine", "optimizer": "adamw", "callbacks": "minimal", "trainer": trainer}
    chosen |= {part: "mine"} if part else {}
    setting = "callbacks.tell" if part == "callbacks" else part
    faulty = [f"+{setting}.fault={fault}"] if fault else []
    return [*WORDS, *(f"{group}={option}" for group, option in chosen.items()), *faulty, *more]


def assert_told(text: str, part: str, *said: str, traceback: bool) -> None:
    """The message is one line, and below it the traceback begins in the user's code."""
    message, _, below = text.partition("error: ")[2].partition("\n")
    setting = "callbacks.tell" if part == "callbacks" else part
    assert message.startswith(f"{setting}: users_parts.{PARTS[part]} (conf/{part}/mine.yaml) "), text
    for each in said:
        assert each in message, message
    assert below.startswith("Traceback") == traceback, text
    if traceback:
        assert re.search(r'File "(.+)"', below)[1] == users_parts.__file__


OOPS = "KeyError: 'oops in "
FAULTS: list[tuple[str, str, tuple[str, ...], bool]] = [
    ("model", "constructor", (OOPS, "made"), True),
    ("model", "forward", (OOPS, "step 1"), True),
    ("model", "tokens", ("step 1", "2 x 15 tokens", "2 x 16 tokens"), False),
    ("model", "vocabulary", ("step 1", "5 tokens"), False),
    ("model", "places", ("step 1", "embedding of 8 rows", "15"), True),
    ("model", "gradient", ("step 1", "logits without a gradient", "detach()"), False),
    ("model", "nothing", ("step 1", "logits", "NoneType"), False),
    ("data", "constructor", (OOPS, "made"), True),
    ("data", "sample", (OOPS, "step 1"), True),
    ("data", "beyond", ("step 1", "token id 50", "50 tokens"), False),
    ("data", "negative", ("step 1", "token id -1", "50 tokens"), False),
    ("data", "float", ("step 1", "float32", "int64"), False),
    ("data", "label", ("step 1", "a label is 50", "50 tokens"), False),
    ("data", "negative label", ("step 1", "a label is -7"), False),
    ("loss", "call", (OOPS, "step 1"), True),
    ("loss", "vector", ("step 1", "shape (3,)", "one number"), False),
    ("loss", "gradient", ("step 1", "without a gradient", "detach()"), False),
    ("loss", "float", ("step 1", "a float", "tensor"), False),
    ("loss", "nothing", ("step 1", "NoneType", "tensor"), False),
    ("optimizer", "constructor", (OOPS, "made"), True),
    ("optimizer", "step", (OOPS, "step 1"), True),
    ("lr_scheduler", "constructor", (OOPS, "made"), True),
    ("callbacks", "constructor", (OOPS, "made"), True),
]


@pytest.mark.parametrize(("part", "fault", "said", "traceback"), FAULTS, ids=lambda value: str(value)[:20])
def test_a_part_that_breaks_before_a_step_is_done(
    part: str, fault: str, said: tuple[str, ...], traceback: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    if (part, fault) in [("model", "forward"), ("loss", "gradient"), ("callbacks", "constructor")]:  # by the command
        assert_told(refusal(capsys, "train", *words(part, fault)), part, *said, traceback=traceback)
        return
    config = composed(part)
    sound = getattr(config, part)
    faulty = dataclasses.replace(sound, kwargs={**sound.kwargs, "fault": fault})
    with pytest.raises(PartError) as caught:
        tiny.train(dataclasses.replace(config, **{part: faulty}), RunDir(Path("run")))
    name_file(caught.value, {part: f"conf/{part}/mine.yaml"})
    status = from_error(0, caught.value)
    assert status.code == 2
    assert_told(f"error: {status.message}\n{status.traceback}", part, *said, traceback=traceback)


@functools.cache
def composed(part: str) -> Config:
    return load_config(None, words(part)).config


@pytest.mark.parametrize("name", ["wide", "fixed"])
def test_a_model_that_knows_more_tokens_than_its_data_say_trains(name: str) -> None:
    """The data say 50 tokens, and have one more. The fixed one is not asked how many it knows."""
    assert forgather("train", *words("data", "beyond"), f"model={name}") == 0


@pytest.mark.parametrize(
    ("part", "fault", "said"),
    [
        ("model", "forward 4", (OOPS, "step 2")),
        ("lr_scheduler", "step", (OOPS, "step 2")),
        ("data", "eval sample", (OOPS, "evaluation at step 2")),
    ],
)
def test_a_part_that_breaks_later(
    part: str, fault: str, said: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert forgather("train", *words(part, fault)) == 1
    assert_told(capsys.readouterr().err, part, *said, traceback=True)


def test_data_that_break_in_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("train", *words("data", "sample", "dataloader_num_workers=1")) == 2
    message, _, below = capsys.readouterr().err.partition("error: ")[2].partition("\n")
    assert message == f"data: users_parts.rows (conf/data/mine.yaml) failed in step 1: {OOPS}sample'"
    assert below.count("Traceback (most recent call last)") == 1, "the worker's"
    assert users_parts.__file__ in below


def test_a_callback_that_breaks_in_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("train", *words("callbacks", "event")) == 1
    message, _, below = capsys.readouterr().err.partition("error: ")[2].partition("\n")
    assert message == f"callback tell (conf/callbacks/mine.yaml) failed in on_step_end: {OOPS}event'"
    assert re.search(r'File "(.+)"', below)[1] == users_parts.__file__


def test_a_model_without_room_and_an_optimizer_without_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    assert "error: model: out of memory" in refusal(capsys, "train", *words("model", "memory")), "as one of ours"
    message = refusal(capsys, "train", *words(), "optimizer=norate").partition("error: ")[2]
    assert message.startswith("optimizer: users_parts.NoRate (conf/optimizer/norate.yaml) ")
    assert "no lr" in message


def test_a_recipe_is_the_file_of_a_part_that_it_names_itself(capsys: pytest.CaptureFixture[str]) -> None:
    Path("recipes").mkdir(exist_ok=True)
    Path("recipes/mine.yaml").write_text("defaults: [train]\nmodel: {_target_: users_parts.Words, fault: forward}\n")
    assert forgather("train", "mine", *words()[:-5], "data=synthetic", "trainer=single", "callbacks=minimal") == 2
    assert "error: model: users_parts.Words (recipes/mine.yaml) " in capsys.readouterr().err


def on_two_ranks(*words: str) -> tuple[int, str]:
    with Process("train", *words, "nproc_per_node=2") as job:
        return job.finish(), job.output


def test_on_two_ranks() -> None:
    code, text = on_two_ranks(*words("model", "forward 4", trainer="ddp"))
    assert_told(re.sub("rank [01]: ", "", text), "model", OOPS, "step 3", traceback=True)
    record = read_exit_record(RunDir(Path("run")))
    assert record.code == code == 1


@pytest.mark.parametrize(("part", "fault", "traceback"), [("loss", "call", True), ("data", "label", False)])
def test_on_the_stages_of_a_pipeline(part: str, fault: str, traceback: bool) -> None:
    """Torch's schedule puts errors of its own around those of a stage."""
    settings = words(part, fault, "trainer.n_microbatches=2", trainer="pipeline")
    settings[settings.index("model=mine")] = "model=nano"
    code, text = on_two_ranks(*settings)
    assert code == 2
    assert_told(text, part, "step 1", traceback=traceback)


def made(**changes: Any) -> Trainer:
    quiet: dict[str, Any] = {"output_dir": "out", "max_steps": 3, "use_cpu": True, "disable_tqdm": True}
    args = TrainingArguments(**quiet, save_strategy="no", per_device_train_batch_size=2)
    return Trainer(**{"model": tiny.decoder(vocab_size=50), "args": args, "train_dataset": Rows(""), **changes})


SCRIPTS: list[tuple[Callable[[], Trainer], str]] = [
    (lambda: made(model=Words(50, fault="forward 2")), f"model: Words failed in step 2: {OOPS}"),
    (lambda: made(train_dataset=Rows("sample")), f"train_dataset: Rows failed in step 1: {OOPS}"),
    (lambda: made(model=Words(50), train_dataset=Rows("beyond")), "train_dataset: Rows failed in step 1: .* id is 50"),
    (lambda: made(train_dataset=Rows("label")), "train_dataset: Rows failed in step 1: .*label is 50"),
    (lambda: made(loss_fn=lambda logits, labels: logits.sum(-1)), r"loss_fn: .* failed in step 1: .*shape \(2, 16\)"),
    (lambda: made(optimizer_cls_and_kwargs=(Signs, {"fault": "step"})), f"optimizer: Signs failed in step 1: {OOPS}"),
    (lambda: made(optimizer_cls_and_kwargs=(Signs, {"fault": "constructor"})), "optimizer_cls_and_kwargs: .*made"),
    (lambda: made(optimizer_factory=lambda named: NoRate([{"params": [p for _, p in named]}])), "NoRate .*no lr"),
    (lambda: made(lr_scheduler_factory=lambda each: Halves(each, fault="step")), "lr_scheduler: Halves .*step 2"),
]


@pytest.mark.parametrize(("script", "told"), SCRIPTS, ids=[told[:40] for _, told in SCRIPTS])
def test_of_a_script(script: Callable[[], Trainer], told: str) -> None:
    with pytest.raises(PartError, match=f"^{told}" if ":" in told else told) as caught:
        script().train()
    assert "\n" not in str(caught.value)
    record = read_exit_record(RunDir(Path("out")))
    assert record is None or record.code == caught.value.exit_code == (1 if "step 2" in told else 2)


def test_of_a_recipe_in_a_script_and_of_a_mistyped_argument() -> None:
    for fault, when in (("constructor", "when it was made"), ("forward", "in step 1")):
        with pytest.raises(PartError, match=rf"^model: users_parts.Words \(conf/model/mine.yaml\) failed {when}"):
            compose(*words("model", fault)).train()
    with pytest.raises(ConfigError, match=r"^optimizer_cls_and_kwargs.fualt: Signs takes no .*did you mean fault\?"):
        made(optimizer_cls_and_kwargs=(Signs, {"fualt": "x"})).train()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["model=mine", "model.widht=3"], r"model.widht: users_parts.Words takes no .* mean width\?"),
        (["model=mine", "widht=3"], r"widht: unknown setting; did you mean model.width\?"),
        (["model=mine", "width=3"], r"width: unknown setting; did you mean model.width\?"),
        (["lr_scheduler=mine", "lr_scheduler.warmup_step=3"], r"lr_scheduler.warmup_step: .*mean warmup_steps\?"),
        (["lr_scheduler=mine", "warmup_step=3"], r"warmup_step: .*did you mean lr_scheduler.warmup_steps\?"),
    ],
)
def test_a_mistyped_argument(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.match(f"error: {told}", refusal(capsys, "train", *words()[: len(WORDS)], "data=synthetic", *given))


def test_an_error_of_ours_is_not_said_to_be_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken connection, say, comes out of a collective of ours as it is."""

    def broken(*args: Any, **kwargs: Any) -> torch.Tensor:
        raise RuntimeError("ours")

    monkeypatch.setattr("forgather_cli.trainer.trainer.clip_grad_norm", broken)
    with pytest.raises(RuntimeError, match=r"^ours$"):
        made(model=Words(50)).train()
