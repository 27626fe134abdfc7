"""What a Trainer from Python is refused for, in a sentence before training; and what its arguments do."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
import transformers
from ranks import run_ranks
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from forgather_cli import DDPSettings, FSDP2Settings, PipelineSettings, Trainer, TrainerCallback, TrainingArguments
from forgather_cli.config.schema import GroupSettings
from forgather_cli.errors import ConfigError, DataError, SetupError
from forgather_cli.launch.exit_status import read_exit_record
from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.base import check_supported
from forgather_cli.strategies.build import build_strategy

DATA = tiny.RandomTokens()


def arguments(**changes: Any) -> TrainingArguments:
    quiet = {"output_dir": "out", "max_steps": 2, "use_cpu": True, "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(**{**quiet, **changes})


@pytest.fixture(autouse=True)
def _here(own_directory: None) -> None: ...


def made(changes: dict[str, Any] | None = None, **given: Any) -> Trainer:
    model = {} if "model_init" in given else {"model": tiny.decoder()}
    return Trainer(args=arguments(**(changes or {})), **{"train_dataset": DATA, **model, **given})


def refusal(changes: dict[str, Any] | None = None, **given: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        made(changes, **given)
    return refused.value.problems


MISPLACED: list[tuple[Callable[[], Any], str]] = [
    (lambda: TrainingArguments({"max_steps": 2}), r"output_dir: .*TrainingArguments\(\*\*"),
    (lambda: TrainingArguments(5), "output_dir: .*int"),
    (lambda: TrainingArguments("out", 5), "TrainingArguments: .*output_dir.*by name"),
    (lambda: Trainer(arguments(), tiny.decoder()), "model: got a TrainingArguments.*model="),
    (lambda: Trainer("nano", arguments()), r"model: got a str.*nn\.Module.*compose"),
    (lambda: Trainer({"model": "nano"}, arguments()), r"model: got a dict.*nn\.Module"),
    (lambda: Trainer(nn.Linear, arguments()), "model: got the class Linear.*model_init"),
    (lambda: Trainer(None, arguments(), model_init=tiny.decoder()), "model_init: got a Decoder.*model="),
    (lambda: Trainer(tiny.decoder(), "out"), r"args: got a str.*TrainingArguments\("),
    (lambda: Trainer(tiny.decoder(), DATA), "args: got a RandomTokens.*TrainingArguments"),
    (lambda: Trainer(tiny.decoder(), transformers.TrainingArguments("theirs")),
     "args: .*transformers.*from forgather_cli"),
    (lambda: Trainer(tiny.decoder(), arguments(), DATA), "data_collator: got a RandomTokens.*train_dataset="),
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
    (lambda: TrainingArguments("out", max_steps="many"), "max_steps.*'many'"),
]  # fmt: skip


@pytest.mark.parametrize(("act", "said"), MISPLACED)
def test_what_is_misplaced_says_what_to_write(act: Callable[[], Any], said: str) -> None:
    with pytest.raises((ConfigError, DataError), match=said):
        act()


def test_the_defaults_of_hugging_face_s_trainer_are_accepted() -> None:
    given: dict[str, Any] = dict.fromkeys(("callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_metrics"))
    Trainer(tiny.decoder(), arguments(), None, DATA, None, None, None, **given)
    assert str(TrainingArguments(Path("somewhere")).output_dir) == "somewhere"


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
    rows, others = ([{"input_ids": row, name: labels} for row in DATA.tokens] for name in ("labels", "label"))
    for data in (rows, tiny.stream(others)):
        with pytest.raises(DataError, match=rf"train_dataset: labels .*{got}.*(expected|must)") as refused:
            made(train_dataset=data, callbacks=[notes]).train()
        assert "\n" not in str(refused.value)
        with pytest.raises(DataError, match=rf"eval_dataset: labels .*{got}.*(expected|must)"):
            made(train_dataset=None, eval_dataset=data).evaluate()
    assert begun == []
    assert not Path("out").exists()  # put back as it was found, as after other mistakes


@pytest.mark.parametrize("trainer", ["ddp", "fsdp2", DDPSettings(), FSDP2Settings()])
def test_a_strategy_of_several_ranks_in_a_process_that_nobody_started_as_one(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"trainer: .*torchrun"):
        made({"trainer": trainer})
    with pytest.raises(ConfigError, match=r"strategy: .*torchrun"):
        made(strategy=trainer)
    for name, value in (("WORLD_SIZE", "1"), ("RANK", "0")):  # torchrun --nproc_per_node=1
        monkeypatch.setenv(name, value)
    assert made({"trainer": trainer}).strategy.data_size == 1
    if dist.is_initialized():  # fsdp2's, of this rank
        dist.destroy_process_group()


def with_strategy(rank_and_size: list[tuple[int, int]]) -> str:
    given = build_strategy(TrainingArguments("x", use_cpu=True))
    rank = int(os.environ["RANK"])
    given.data_rank, given.data_size = rank_and_size[rank]
    return "; ".join(refusal(strategy=given))


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
    made({"overwrite_output_dir": True}).train()  # it was given back


REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"fuse_optim_with_backward": True}, ("fuse_optim_with_backward", "max_grad_norm=1", "max_grad_norm=None")),
    ({"fuse_optim_with_backward": True, "max_grad_norm": None, "gradient_accumulation_steps": 2},
     ("fuse_optim_with_backward", "gradient_accumulation_steps=1")),
    ({"fuse_optim_with_backward": True, "max_grad_norm": 0, "fp16": True}, ("fuse_optim_with_backward", "fp16=True")),
    ({"fuse_optim_with_backward": True, "max_grad_norm": None, "optimizer": "muon"}, ('optimizer="muon"',)),
    ({"load_best_model_at_end": True, "save_strategy": "steps"}, ("load_best_model_at_end", 'eval_strategy="steps"')),
    ({"activation_memory_budget": 0.5}, ("activation_memory_budget", "torch_compile=True")),
    ({"trainer": "pipeline"}, ("trainer", "torchrun")),
    ({"fsdp": "full_shard"}, ("fsdp: ", "torchrun")),
    ({"trainer": {"type": "fsdp2", "param_dtype": "fp16"}}, ("param_dtype", 'precision="fp16"')),
    ({"global_batch_size": 7, "gradient_accumulation_steps": 2}, ("gradient_accumulation_steps", "global_batch_size")),
    ({"nproc_per_node": 2}, ("nproc_per_node", "torchrun")),
    ({"optimizer": {"type": "adamw", "groups": {"a": {"regex": "("}}}}, ("optimizer_groups.a.regex",)),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), REFUSED)
def test_what_a_recipe_is_refused_for_a_script_is_too(arguments: dict[str, Any], words: tuple[str, ...]) -> None:
    problems = refusal(arguments)
    assert any(all(word in problem for word in words) for problem in problems), problems


def test_a_given_strategy_is_asked_what_it_can() -> None:
    cannot = build_strategy(TrainingArguments("x", use_cpu=True))
    [problem] = refusal({"fp16": True}, strategy=cannot)
    assert problem.startswith("precision: fp16 scales the loss, which the given strategy does not")
    cannot.supports_fp16 = cannot.supports_compile = cannot.supports_optimizer_in_backward = False
    [problem] = refusal({"fuse_optim_with_backward": True, "max_grad_norm": None}, strategy=cannot)
    assert "fuse_optim_with_backward" in problem
    [problem] = refusal({"torch_compile": True}, strategy=cannot)
    assert "torch_compile" in problem
    with pytest.raises(ConfigError, match="precision: "):  # one that a recipe names; no object is given the scaler
        check_supported(TrainingArguments("x", use_cpu=True, fp16=True), cannot)


ON_TWO_RANKS: list[tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = [
    ({"fuse_optim_with_backward": True, "max_grad_norm": None}, {}, ("fuse_optim_with_backward", 'trainer="ddp"')),
    ({"trainer": "single"}, {}, ("trainer", "ddp")),
    ({"fp16": True}, {"strategy": "pipeline"}, ("fp16", 'strategy="pipeline"', 'precision="bf16"')),
    ({"torch_compile": True, "trainer": PipelineSettings(schedule="ZBVZeroBubble")}, {},
     ("torch_compile", 'schedule="ZBVZeroBubble"')),
    ({"trainer": PipelineSettings(n_microbatches=1)}, {}, ("n_microbatches", 'schedule="1F1B"')),
    ({"trainer": PipelineSettings()}, {}, ("model_init", 'trainer="pipeline"')),
    ({"per_device_train_batch_size": 6, "trainer": "pipeline"}, {}, ("per_device_train_batch_size", "6")),
    ({"global_batch_size": 7}, {}, ("global_batch_size", "2 ranks")),
    ({"optimizer": "adafactor", "trainer": "fsdp2"}, {}, ("optimizer", "adafactor")),
]  # fmt: skip


def test_rules_of_several_ranks_and_a_checkpointing_function_gets_a_stage_after_it_is_cut() -> None:
    for found, layers in run_ranks(2, on_two_ranks):
        for problems, (_, _, words) in zip(found, ON_TWO_RANKS, strict=True):
            assert any(all(word in problem for word in words) for problem in problems), problems
        assert layers == [1]


def on_two_ranks() -> tuple[list[list[str]], list[int]]:
    layers: list[int] = []
    made(
        {"gradient_checkpointing": True, "trainer": "pipeline"},
        model_init=tiny.decoder,
        enable_activation_checkpoint_fn=lambda model: layers.append(len(model.model.layers)),
    )
    return [refusal(arguments, **given) for arguments, given, _ in ON_TWO_RANKS], layers


def test_arguments_that_exclude_each_other() -> None:
    model = tiny.decoder()
    optimizer = SGD(model.parameters(), lr=0.1)
    schedule = StepLR(optimizer, 1)
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"optimizers": (optimizer, None), "optimizer_factory": SGD}, "optimizers"),
        ({}, {"optimizers": (None, schedule)}, "optimizers"),
        ({}, {"optimizers": (optimizer, schedule), "lr_scheduler_factory": StepLR}, "lr_scheduler_factory"),
        ({}, {"optimizers": (optimizer, schedule), "optimizer_groups": {"a": {"regex": "a"}}}, "optimizer_groups"),
        ({}, {"optimizers": (optimizer, None), "model_init": tiny.decoder}, "optimizers"),
        ({"optimizer": "sgd"}, {"optimizer_factory": SGD}, "optimizer"),
        ({"warmup_steps": 2}, {"lr_scheduler_factory": StepLR}, "warmup_steps"),
        ({"loss": "cross_entropy"}, {"loss_fn": len}, "loss"),
        ({}, {"loss_fn": len, "fused_loss_factory": len}, "loss_fn"),
        ({"trainer": "ddp"}, {"strategy": "fsdp2"}, "strategy"),
        ({"precision": "bf16", "fp16": True}, {}, "fp16"),
        ({"fuse_optim_with_backward": True, "max_grad_norm": 0}, {"optimizer_factory": SGD}, "optimizer_factory"),
        ({}, {"enable_activation_checkpoint_fn": len}, "enable_activation_checkpoint_fn"),
        ({"gradient_checkpointing": True}, {"enable_activation_checkpoint_fn": setattr},
         "enable_activation_checkpoint_fn"),
        ({}, {"optimizer_groups": [{"params": []}]}, "optimizer_groups"),
        ({}, {"optimizer_groups": {"a": {"rgx": "a"}}}, "optimizer_groups.a.rgx"),
        ({}, {"optimizer_groups": {"a": {"regex": "("}}, "optimizer_factory": SGD}, "optimizer_groups.a.regex"),
    ]  # fmt: skip
    for arguments, given, name in cases:
        problems = refusal(arguments, **({} if "model_init" in given else {"model": model}), **given)
        assert any(problem.startswith(name) for problem in problems), (arguments, given, problems)


ONE = [tiny.RandomTokens(1, ragged=True)[0]] * 24  # one sample, so that the order is no matter


def norms_without_decay(named: list[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in named if "norm" in n], "weight_decay": 0.0, "lr": 0.05},
        {"params": [(n, p) for n, p in named if "norm" not in n]},
    ]


GROUPS: dict[str, Any] = {
    "dict": {"norms": {"regex": "norm", "settings": {"weight_decay": 0.0, "lr": 0.05}}},
    "settings": {"norms": GroupSettings(regex="norm", settings={"weight_decay": 0.0, "lr": 0.05})},
    "function": norms_without_decay,
}


def trained(path: Path | str, **given: Any) -> dict[str, Tensor]:
    """Whole weights after three steps of at most eight rows."""
    settings = {"max_steps": 3, "per_device_train_batch_size": 8, "max_grad_norm": None, **given}
    trainer = tiny.script(path, settings.pop("model", None), ONE, **settings)
    trainer.train()
    full = {n: getattr(p, "full_tensor", lambda p=p: p)() for n, p in trainer.model.named_parameters()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def by_hand(factor: Callable[[int], float] = lambda step: 1 - step / 3) -> dict[str, Tensor]:
    """Three steps of plain SGD: norms at 0.05 without decay, the rest at 0.2 with 0.5."""
    model = tiny.decoder()
    tokens, labels = (ONE[0][key][None] for key in ("input_ids", "labels"))
    for step in range(3):
        nn.functional.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                lr, decay = (0.05, 0.0) if "norm" in name else (0.2, 0.5)
                p -= lr * factor(step) * (p.grad + decay * p)
                p.grad = None
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(weights[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


GIVEN = [
    ("settings", "settings"), ("settings", "function"), ("factory", "dict"), ("class", "function"), ("object", "dict"),
]  # fmt: skip


@pytest.mark.parametrize(("way", "groups"), GIVEN)
def test_groups_are_in_effect_with_every_way_to_give_an_optimizer(tmp_path: Path, way: str, groups: str) -> None:
    model = tiny.decoder()
    rates = {"learning_rate": 0.2, "weight_decay": 0.5}
    sgd = partial(SGD, lr=0.2, weight_decay=0.5)
    arguments, given = {
        "settings": ({**rates, "optimizer": "sgd"}, {}),
        "factory": ({}, {"optimizer_factory": sgd}),
        "class": (rates, {"optimizer_cls_and_kwargs": (SGD, {})}),
        "object": ({}, {"optimizers": (sgd(model.parameters()), None)}),
    }[way]
    weights = trained(tmp_path, **arguments, model=model, optimizer_groups=GROUPS[groups], **given)
    assert_close(weights, by_hand())


def test_weight_decay_reaches_an_optimizer_class_without_norms_and_biases(tmp_path: Path) -> None:
    own = (AdamW, {"betas": (0.5, 0.6)})
    trainer = tiny.script(tmp_path, None, ONE, max_steps=1, weight_decay=0.5, optimizer_cls_and_kwargs=own)
    trainer.train()
    decays = {group["name"]: (group["weight_decay"], group["betas"]) for group in trainer.optimizer.param_groups}
    assert decays == {"no_decay": (0.0, (0.5, 0.6)), "default": (0.5, (0.5, 0.6))}


def test_a_setting_that_the_optimizer_does_not_know_is_refused(tmp_path: Path) -> None:
    groups = {"norms": {"regex": "norm", "settings": {"wieght_decay": 0.0}}}
    with pytest.raises(ConfigError, match=r"optimizer_groups\.norms\.settings\.wieght_decay"):
        trained(tmp_path, optimizer_groups=groups, optimizer_cls_and_kwargs=(SGD, {}))
    with pytest.raises(ConfigError, match=r"optimizer_groups.*lm_head|optimizer_groups.*model\."):
        trained(tmp_path, optimizer_groups=lambda named: norms_without_decay(named)[:1])


def two_optimizers(named: list[tuple[str, nn.Parameter]]) -> list[Optimizer]:
    norms = [p for n, p in named if "norm" in n]
    rest = [p for n, p in named if "norm" not in n]
    return [SGD(rest, lr=0.2, weight_decay=0.5), SGD(norms, lr=0.05)]


def test_a_scheduler_factory_schedules_every_optimizer(tmp_path: Path) -> None:
    halves = partial(StepLR, step_size=1, gamma=0.5)
    weights = trained(tmp_path, optimizer_factory=two_optimizers, lr_scheduler_factory=halves)
    assert_close(weights, by_hand(lambda step: 0.5**step))


def test_schedulers_that_leave_out_an_optimizer_are_refused(tmp_path: Path) -> None:
    model = tiny.decoder()
    both = two_optimizers(list(model.named_parameters()))
    with pytest.raises(ConfigError, match="2 optimizers"):
        trained(tmp_path, model=model, optimizers=(both, StepLR(both[0], 1)))


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("takes_rank", [True, False])
def test_a_function_of_the_user_s_checkpoints_activations(tmp_path: Path, returns: bool, takes_rank: bool) -> None:
    calls, ranks = [], []

    def recompute(model: nn.Module) -> nn.Module | None:
        for layer in model.get_submodule("model.layers").children():
            layer.forward = partial(count, layer.forward)
        return model if returns else None

    def count(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward(*args, **kwargs)

    def with_rank(rank: int, model: nn.Module) -> nn.Module | None:
        ranks.append(rank)
        return recompute(model)

    settings = {"gradient_checkpointing": True}
    trained(tmp_path, **settings, enable_activation_checkpoint_fn=with_rank if takes_rank else recompute)
    assert (len(calls), ranks) == (2 * 3, [0] * takes_rank)
    [problem] = refusal({**settings, "gradient_checkpointing_every": 2}, enable_activation_checkpoint_fn=recompute)
    assert "gradient_checkpointing_every" in problem
    assert "enable_activation_checkpoint_fn" in problem


def fused_on_two_ranks(path: str) -> dict[str, Tensor]:
    ranks: list[int] = []  # a checkpointing function gets its own
    made({"gradient_checkpointing": True}, enable_activation_checkpoint_fn=lambda rank, model: ranks.append(rank))
    assert ranks == [dist.get_rank()]
    rates = {"optimizer": "sgd", "learning_rate": 0.2, "weight_decay": 0.5, "optimizer_groups": GROUPS["dict"]}
    return trained(path, **rates, strategy="fsdp2", per_device_train_batch_size=4, fuse_optim_with_backward=True)


def test_the_optimizer_in_the_backward_on_two_ranks(tmp_path: Path) -> None:
    for weights in run_ranks(2, fused_on_two_ranks, str(tmp_path)):
        assert_close(weights, by_hand())
    ended = read_exit_record(RunDir(tmp_path))
    assert (ended.code, ended.step) == (0, 3)
