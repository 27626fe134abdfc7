"""``TrainingArguments`` against Hugging Face's own: every argument, its parser, and what the values do."""

from __future__ import annotations

import dataclasses
import logging
import os
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from program import forgather
from torch import nn
from torch.utils.data import DataLoader

from forgather_cli import BF16TrueSettings, FP8Settings, Trainer, TrainingArguments
from forgather_cli.config.schema import DDPSettings, FSDP2Settings, PostLocalSGD
from forgather_cli.errors import ConfigError, DataError
from forgather_cli.optim.schedules import build_schedule
from forgather_cli.trainer.aliases import ALIASES
from forgather_cli.trainer.arguments import HFSettings
from forgather_cli.trainer.hugging_face import ARGUMENTS

DEFAULTS = {name: argument.default for name, argument in ARGUMENTS.items()}


def test_the_table_has_every_argument_of_the_library_with_its_default() -> None:
    theirs = {
        field.name: field.default_factory() if field.default is dataclasses.MISSING else field.default
        for field in dataclasses.fields(transformers.TrainingArguments)
    }
    assert theirs == DEFAULTS
    assert list(theirs) == list(DEFAULTS)


def test_at_its_default_every_argument_is_accepted() -> None:
    ours = TrainingArguments(**DEFAULTS)
    assert ours == TrainingArguments()
    theirs = transformers.TrainingArguments("trainer_output", use_cpu=True, disable_tqdm=False)
    assert TrainingArguments(**theirs.to_dict()) == TrainingArguments(
        use_cpu=True, disable_tqdm=False, dataloader_pin_memory=False
    )
    differ = {name for name in DEFAULTS if getattr(ours, name) != getattr(theirs, name)}
    assert differ == {
        "use_cpu", "dataloader_pin_memory",  # told to theirs, which derives the second
        "lr_scheduler_kwargs", "gradient_accumulation_steps", "activation_checkpointing", "disable_tqdm", "debug",
        "accelerator_config", "resume_from_checkpoint",  # other words for nothing
        "eval_steps", "metric_for_best_model", "greater_is_better",  # filled in where theirs fills in later
    }  # fmt: skip


def other(name: str) -> Any:
    """A value that is not the default, of a type that the library's parser makes."""
    default, hint = DEFAULTS[name], str(ARGUMENTS[name].type)
    if isinstance(default, bool):
        return not default
    for kind, value in (("int", 3), ("float", 0.5), ("list", ["x"]), ("dict", {"x": 1}), ("bool", True)):
        if kind in hint:
            return value
    return "x"


@pytest.mark.parametrize("name", [name for name, argument in ARGUMENTS.items() if argument.how == "refused"])
def test_what_is_refused_is_named_with_a_remedy(name: str) -> None:
    value = other(name)
    with pytest.raises(ConfigError) as refused:
        TrainingArguments(**{name: value})
    message = str(refused.value)
    assert message.startswith(f"{name}: ")
    assert repr(value) in message
    assert "; " in message


@pytest.mark.parametrize("name", [name for name, argument in ARGUMENTS.items() if argument.how == "no meaning"])
def test_what_has_no_meaning_is_kept_for_the_script(name: str) -> None:
    assert getattr(TrainingArguments(**{name: other(name)}), name) == other(name)


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"logging_steps": 0.1, "max_steps": 45}, {"logging_steps": 0.1}),
        ({"logging_steps": 20.0, "eval_strategy": "steps"}, {"logging_steps": 20, "eval_steps": 20}),
        ({"save_steps": 0.5, "max_steps": 9, "eval_steps": 3}, {"save_steps": 0.5, "eval_steps": 3}),
        ({"metric_for_best_model": "accuracy"}, {"greater_is_better": True}),
        ({"metric_for_best_model": "eval_loss"}, {"greater_is_better": False}),
        ({"metric_for_best_model": "error", "greater_is_better": False}, {"greater_is_better": False}),
        ({"full_determinism": True}, {"deterministic": True}),
        ({"group_by_length": True}, {"train_sampling_strategy": "group_by_length", "length_column_name": "length"}),
        ({"use_cpu": True}, {"device": "cpu", "use_cpu": True}),
        ({"no_cuda": True}, {"device": "cpu"}),
        ({"evaluation_strategy": "epoch"}, {"eval_strategy": "epoch"}),
        ({"warmup_ratio": 0.1}, {"warmup_steps": 0.1}),
        ({"ddp_timeout": 60}, {"hang_timeout": 60.0}),
        ({"activation_checkpointing": True}, {"gradient_checkpointing": True}),
        ({"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"every_n_layers": 2}},
         {"gradient_checkpointing_every": 2}),
        ({"torch_compile_mode": "max-autotune"}, {"torch_compile": True}),
        ({"accelerator_config": {"dispatch_batches": False, "even_batches": True}}, {"dispatch_batches": False}),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": '{"num_cycles": 2}'},
         {"lr_scheduler_kwargs": {"num_cycles": 2}}),
        ({"report_to": "tensorboard"}, {"report_to": ["tensorboard"]}),
        ({"num_train_epochs": 2}, {"num_train_epochs": 2.0}),
    ],
)  # fmt: skip
def test_values_are_read_as_there(given: dict[str, Any], read: dict[str, Any]) -> None:
    args = TrainingArguments("out", **given)
    assert {name: getattr(args, name) for name in read} == read


def test_fsdp_arguments_select_the_strategy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert TrainingArguments(fsdp=True).trainer == FSDP2Settings()
    legacy = TrainingArguments(fsdp="shard_grad_op auto_wrap offload").trainer
    assert legacy == FSDP2Settings(reshard_after_forward=False, cpu_offload=True)
    file = tmp_path / "fsdp.json"
    file.write_text('{"transformer_layer_cls_to_wrap": "Block", "activation_checkpointing": true, "version": 2}')
    args = TrainingArguments(fsdp=True, fsdp_config=str(file))
    assert (args.trainer, args.gradient_checkpointing) == (FSDP2Settings(block_classes=["Block"]), True)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"optim": "adafactor"}, ("optim",)),
        ({"optim": transformers.training_args.OptimizerNames.LION}, ("optim",)),
        ({"lr_scheduler_type": "reduce_lr_on_plateau"}, ("'reduce_lr_on_plateau'; it follows a metric",)),
        ({"lr_scheduler_type": "none"}, ("lr_scheduler_type: got 'none'; use",)),
        ({"lr_scheduler_kwargs": {"power": 2}}, ("lr_scheduler_kwargs.power",)),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, ("min_lr_rate",)),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1, "min_lr_rate": 1}},
            ("min_lr_rate",),
        ),
        ({"lr_scheduler_type": "warmup_stable_decay"}, ("num_decay_steps",)),
        ({"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"decay_type": "x"}}, ("decay_type",)),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 1e-7}, ("lr_end",)),
        ({"accelerator_config": {"split_batches": True}}, ("accelerator_config.split_batches",)),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": True}}, ("gradient_checkpointing_kwargs.use_reentrant",)),
        ({"gradient_checkpointing_kwargs": '{"use_reentrant": '}, ("gradient_checkpointing_kwargs",)),
        ({"fsdp_config": {"version": 2}}, ("fsdp_config",)),
        ({"fsdp": "hybrid_shard"}, ("fsdp",)),
        ({"fsdp": True, "fsdp_config": {"version": 1}}, ("fsdp_config.fsdp_version",)),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, ("fsdp_config.fsdp_xla",)),
        ({"report_to": "wandbb"}, ("did you mean wandb",)),
        ({"label_names": ["start_positions", "end_positions"]}, ("label_names",)),
        ({"train_sampling_strategy": "batch_rebalance"}, ("train_sampling_strategy",)),
        ({"include_for_metrics": ["outputs"]}, ("include_for_metrics",)),
        ({"debug": "underflow_overflow"}, ("debug",)),
        # a further name excludes what it stands for
        ({"mixed_precision": "bf16", "bf16": True}, ("mixed_precision", "bf16")),
        ({"mixed_precision": "no", "precision": "fp32"}, ("mixed_precision", "precision")),
        ({"mixed_precision": "int8"}, ("mixed_precision", "no, bf16 or fp16", "'int8'")),
        ({"default_dtype": "bfloat16", "precision": "bf16_true"}, ("default_dtype", "precision")),
        ({"default_dtype": "bfloat16", "mixed_precision": "fp16"}, ("default_dtype", "mixed_precision")),
        ({"default_dtype": torch.float16}, ("default_dtype", "float16", "mixed_precision")),
        ({"float32_matmul_precision": "high", "tf32": True}, ("float32_matmul_precision", "tf32")),
        ({"torch_compile_full_graph": True, "torch_compile_fullgraph": True}, ("torch_compile_full_graph",)),
        ({"fp8_recipe": "rowwise", "qat_recipe": "int8-weight-only"}, ("fp8_recipe", "qat_recipe")),
        ({"fp8_recipe": "columnwise"}, ("fp8_recipe", "tensorwise, rowwise or rowwise_with_gw_hp")),
        ({"preserve_best_model": True, "preserve_n_best": 1}, ("preserve_best_model", "preserve_n_best")),
        ({"best_model_metric": "eval_loss", "metric_for_best_model": "eval_loss"}, ("metric_for_best_model",)),
    ],
)
def test_values_that_cannot_be_had_are_named(given: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainingArguments("out", **given)
    assert all(word in refused.value.problems[0] for word in words), refused.value.problems


def test_all_that_is_refused_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        TrainingArguments(push_to_hub=True, use_liger_kernel=True, report_to="azure_ml")
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "push_to_hub", "use_liger_kernel", "report_to"
    ]  # fmt: skip


def test_the_library_s_argument_parser_makes_ours(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class ModelArguments:
        model_name: str = "gpt2"

    parser = transformers.HfArgumentParser((ModelArguments, TrainingArguments))
    words = ["--model_name", "mine", "--output_dir", "out", "--learning_rate", "1e-3", "--do_train", "--bf16"]
    words += ["--logging_steps", "10", "--eval-strategy", "steps", "--full_determinism", "--ddp_timeout", "77"]
    words += ["--report_to", "none", "--lr_scheduler_type", "cosine_with_restarts", "--no_dataloader_pin_memory"]
    words += ["--lr_scheduler_kwargs", '{"num_cycles": 2}', "--max_grad_norm", "0.5", "--global_batch_size", "32"]
    model, args = parser.parse_args_into_dataclasses(words)
    assert model.model_name == "mine"
    assert args == TrainingArguments(
        "out", learning_rate=1e-3, do_train=True, bf16=True, logging_steps=10, eval_strategy="steps",
        full_determinism=True, ddp_timeout=77, lr_scheduler_type="cosine_with_restarts", max_grad_norm=0.5,
        lr_scheduler_kwargs={"num_cycles": 2}, dataloader_pin_memory=False, global_batch_size=32,
    )  # fmt: skip
    assert (args.do_train, args.do_eval, args.eval_steps, args.hang_timeout) == (True, True, 10, 77)
    file = tmp_path / "args.yaml"
    file.write_text("output_dir: out\nlearning_rate: 1.0e-3\nsave_strategy: epoch\nsave_total_limit: 2\n")
    [args] = transformers.HfArgumentParser(TrainingArguments).parse_yaml_file(file)
    assert (args.save_strategy, args.save_total_limit) == ("epoch", 2)
    assert "--label_smoothing_factor" in parser.format_help()


@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("warmup", [0, 1, 2, 0.1, 49])
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("linear", {}),
        ("constant", {}),
        ("constant_with_warmup", {}),
        ("cosine", {}),
        ("cosine", {"num_cycles": 1.5}),
        ("cosine_with_restarts", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("cosine_with_min_lr", {"min_lr": 3e-4}),
        ("cosine_with_min_lr", {"min_lr_rate": 0.2, "num_cycles": 0.7}),
        ("cosine_warmup_with_min_lr", {"min_lr_rate": 0.1}),
        ("cosine_warmup_with_min_lr", {"min_lr": 1e-4, "warmup_lr_rate": 0.05}),
        ("polynomial", {}),
        ("polynomial", {"lr_end": 1e-4, "power": 2.0}),
        ("polynomial", {"lr_end": 1e-4, "power": 0.0}),
        ("inverse_sqrt", {}),
        ("inverse_sqrt", {"timescale": 20}),
        ("warmup_stable_decay", {"num_decay_steps": 0, "min_lr_ratio": 0.1}),
        ("warmup_stable_decay", {"num_decay_steps": 12, "num_cycles": 1.0}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "num_stable_steps": 20, "min_lr_ratio": 0.1,
                                 "warmup_type": "cosine", "decay_type": "1-sqrt"}),
        ("warmup_stable_decay", {"num_decay_steps": 9, "warmup_type": "1-sqrt", "decay_type": "linear"}),
    ],
)  # fmt: skip
def test_schedules_have_the_library_s_values(name: str, kwargs: dict[str, Any], warmup: float) -> None:
    total, rates = 50, []
    settings = {"lr_scheduler_type": name, "lr_scheduler_kwargs": kwargs, "warmup_steps": warmup, "max_steps": total}
    for mine in (True, False):
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1e-3)
        if mine:
            optimizer.optimizers = [optimizer]
            option = TrainingArguments("out", learning_rate=1e-3, **settings).lr_scheduler
            scheduler = build_schedule(option, optimizer, total_steps=total)
        else:
            theirs = transformers.TrainingArguments("out", learning_rate=1e-3, use_cpu=True, **settings)
            scheduler = transformers.get_scheduler(
                name, optimizer, theirs.get_warmup_steps(total), total, scheduler_specific_kwargs=kwargs
            )
        rates.append([])
        for _ in range(total + 3):
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert rates[0] == pytest.approx(rates[1], rel=1e-9, abs=1e-15)


class Order(tiny.RandomTokens):
    """Samples that note when they are read, with a column that no model takes."""

    def __init__(self) -> None:
        super().__init__(16)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.read.append(index)
        return {**super().__getitem__(index), "weight": 1.0}


def order(tmp_path: Path, **settings: Any) -> list[int]:
    data = Order()
    tiny.script(tmp_path, tiny.llama(), data, max_steps=2, overwrite_output_dir=True, **settings).train()
    return data.read


def test_data_seed_and_sampling_strategy_set_the_order(tmp_path: Path) -> None:
    usual = order(tmp_path)
    assert sorted(usual) == list(range(16)) != usual
    assert order(tmp_path, data_seed=7) == order(tmp_path, seed=7) != usual
    assert order(tmp_path, train_sampling_strategy="sequential") == list(range(16))


def test_samples_are_grouped_by_length_and_a_stream_cannot_be(tmp_path: Path) -> None:
    rows = [
        {name: tokens[: 1 + number] for name, tokens in row.items()} for number, row in enumerate(tiny.RandomTokens(16))
    ]
    seen: list[int] = []

    def padded(samples: list[Any]) -> dict[str, Any]:
        seen.extend(len(each["input_ids"]) for each in samples)
        return {name: nn.utils.rnn.pad_sequence([each[name] for each in samples], True) for name in samples[0]}

    settings = {"max_steps": 2, "group_by_length": True}
    tiny.script(tmp_path, tiny.llama(), rows, data_collator=padded, **settings).train()
    groups = [seen[at : at + 4] for at in range(0, 16, 4)]
    assert sorted(seen) == list(range(1, 17))
    assert seen[0] == 16
    assert all(group[1:] == sorted(group[1:], reverse=True) for group in groups)
    stream = DataLoader(rows, batch_size=4, collate_fn=padded)
    with pytest.raises(DataError, match="train_sampling_strategy"):
        tiny.script(tmp_path / "stream", tiny.llama(), stream, **settings).train()


@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_is_what_cuda_s_products_are_told(tmp_path: Path, tf32: bool) -> None:
    backends = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = not tf32
        if tf32 and not torch.cuda.is_available():
            with pytest.raises(ConfigError, match="tf32"):
                tiny.script(tmp_path, tf32=True)
            return
        tiny.script(tmp_path, tf32=tf32)
        assert [backend.allow_tf32 for backend in backends] == [tf32, tf32]
        # both of torch's ways to ask, of which torch.compile uses each, answer
        assert torch.get_float32_matmul_precision() == ("high" if tf32 else "highest")
        assert torch.backends.cuda.matmul.fp32_precision == ("tf32" if tf32 else "ieee")
        assert (torch.backends.cudnn.conv.fp32_precision == "tf32") is tf32
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


@pytest.mark.usefixtures("one_thread")
def test_full_determinism_is_also_that_of_the_library_s_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("CUBLAS_WORKSPACE_CONFIG", "FLASH_ATTENTION_DETERMINISTIC"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    tiny.script(tmp_path, full_determinism=True)
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] in (":4096:8", ":16:8")
    assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1"


def test_columns_that_the_model_does_not_take_are_left_out(tmp_path: Path) -> None:
    data = Order()
    tiny.script(tmp_path, None, data, max_steps=1).train()
    with pytest.raises(TypeError, match="weight"):
        tiny.script(tmp_path / "again", None, data, max_steps=1, remove_unused_columns=False).train()


def test_labels_may_have_another_name(tmp_path: Path) -> None:
    rows = [{"input_ids": row["input_ids"], "targets": row["labels"]} for row in tiny.RandomTokens(16)]
    trainer = tiny.script(tmp_path, tiny.llama(), rows, tiny.RandomTokens(16), max_steps=1, label_names=["targets"])
    trainer.train()
    assert trainer.evaluate(rows)["eval_loss"] == trainer.evaluate()["eval_loss"]


def test_save_only_model_leaves_the_moments_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny.script(tmp_path, tiny.llama(), max_steps=2, save_strategy="steps", save_only_model=True).train()
    [checkpoint] = (tmp_path / "checkpoints").iterdir()
    assert not list(checkpoint.glob("optimizer/*"))
    transformers.AutoModelForCausalLM.from_pretrained(checkpoint / "model")
    again = tiny.script(tmp_path, tiny.llama(), max_steps=4)
    assert again.train(resume_from_checkpoint=True).global_step == 4
    assert "moments start at zero" in caplog.text


def test_reports_and_progress_are_those_asked_for(tmp_path: Path) -> None:
    def shown(**settings: Any) -> set[str]:
        trainer = Trainer(tiny.llama(), TrainingArguments(str(tmp_path), **settings), None, tiny.RandomTokens())
        return {"progress", "tensorboard", "trackers"} & trainer.callbacks.by_name.keys()

    assert shown() == {"progress"}
    assert shown(disable_tqdm=True, report_to="tensorboard") == {"tensorboard"}
    args = TrainingArguments(report_to=["wandb", "tensorboard"], project="mine", run_name="first")
    trackers = args.callbacks.trackers
    assert (trackers.names, trackers.project, trackers.run_name) == (["wandb"], "mine", "first")


def test_log_level_is_that_of_our_logs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "forgather_cli")  # and back at the end
    tiny.script(tmp_path, log_level="error")
    assert logging.getLogger("forgather_cli").getEffectiveLevel() == logging.ERROR


@pytest.mark.parametrize(
    ("alias", "original"),
    [
        ({"mixed_precision": "no"}, {"precision": "fp32"}),
        ({"mixed_precision": "bf16"}, {"bf16": True}),
        ({"default_dtype": torch.bfloat16}, {"precision": "bf16_true"}),
        ({"default_dtype": "bfloat16", "mixed_precision": "no"}, {"precision": BF16TrueSettings()}),
        ({"default_dtype": torch.float32, "bf16": True}, {"bf16": True}),
        ({"torch_compile": True, "torch_compile_full_graph": True},
         {"torch_compile": True, "torch_compile_fullgraph": True}),
        ({"fp8_recipe": "rowwise"}, {"precision": FP8Settings(fp8_recipe="rowwise")}),
        ({"fp8_recipe": "rowwise", "fp8_dim_alignment": 32},
         {"precision": FP8Settings(fp8_recipe="rowwise", fp8_dim_alignment=32)}),
        ({"ddp": {"bucket_cap_mb": 5}}, {"trainer": DDPSettings(bucket_cap_mb=5)}),
        ({"ddp": {"static_graph": True}, "post_local_sgd": {"enabled": True, "period": 8}},
         {"trainer": DDPSettings(static_graph=True, post_local_sgd=PostLocalSGD(enabled=True, period=8))}),
        ({"pp_stage_type": "v", "is_multistage": True}, {}),
        ({"qat_recipe": "int8-weight-only"}, {"precision": {"type": "qat", "qat_recipe": "int8-weight-only"}}),
        ({"preserve_best_model": True}, {"preserve_n_best": 1}),
        ({"best_model_metric": "error", "greater_is_better": False},
         {"metric_for_best_model": "error", "greater_is_better": False}),
    ],
)  # fmt: skip
def test_an_alias_is_what_it_stands_for(alias: dict[str, Any], original: dict[str, Any]) -> None:
    first, second = TrainingArguments("out", **alias), TrainingArguments("out", **original)
    settings = vars(HFSettings()).keys() - {"bf16", "fp16"}
    assert {name: getattr(first, name) for name in settings} == {name: getattr(second, name) for name in settings}
    assert (first.precision, first.trainer) == (second.precision, second.trainer)
    for name in ALIASES.keys() & alias.keys():
        assert getattr(first, name) == alias[name], "scripts read it back"


def test_rules_name_the_alias_that_was_given() -> None:
    args = TrainingArguments("out", torch_compile_full_graph=True, use_cpu=True)
    with pytest.raises(ConfigError, match=r"^torch_compile_full_graph: nothing reads it with torch_compile=False"):
        Trainer(tiny.decoder(), args, None, tiny.RandomTokens())


@pytest.mark.parametrize("words", [["--mixed_precision", "bf16", "--bf16", "False"], ["--bf16"], []])
def test_the_librarys_parser_gives_all_names_and_only_those_typed_count(words: list[str]) -> None:
    parser = transformers.HfArgumentParser(TrainingArguments)
    [args] = parser.parse_args_into_dataclasses(["--output_dir", "out", *words])
    assert args.precision.type == ("bf16" if words else "fp32")
    assert args.preserve_n_best == 1


def test_groups_of_the_optimizer_are_printed_as_plan_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shape = [f"{name}={value}" for name, value in tiny.SHAPE.items()]
    words = ["model=decoder", "data.seq_len=16", "data=synthetic", *shape, "optimizer=muon", "--params"]
    assert forgather("plan", *words) == 0
    planned = capsys.readouterr().out
    settings = {"max_steps": 1, "optimizer": "muon", "weight_decay": 0.1}
    tiny.script(tmp_path, debug_optimizer_groups=True, **settings).train()
    printed = capsys.readouterr().out

    def table(text: str) -> list[tuple[str, ...]]:
        """Name, kind, group, optimizer and decay of each parameter."""
        rows = [line.split() for line in text.splitlines() if line.strip().startswith(("model.", "lm_head."))]
        return [(row[0], *row[-4:]) for row in rows]

    assert len(table(printed)) > 10
    assert table(printed) == table(planned)
