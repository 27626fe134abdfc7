"""DeepSpeed's settings in Accelerate's files, in a JSON of its own and in the environment, as settings of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import paired
import pytest
import yaml
from program import Process

from forgather_cli.config.load import Loaded, load_config
from forgather_cli.config.schema import (
    AdamWSettings,
    BF16Settings,
    ConstantSettings,
    CosineSettings,
    DDPSettings,
    FP16Settings,
    FSDP2Settings,
    LinearSettings,
    SGDSettings,
)
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir

ZERO3: dict[str, Any] = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "deepspeed_config": {
        "deepspeed_multinode_launcher": "standard",
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 0.5,
        "offload_optimizer_device": "cpu",
        "offload_param_device": "cpu",
        "zero3_init_flag": True,
        "zero3_save_16bit_model": True,
        "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "enable_cpu_affinity": False,
    "fsdp_config": {},
    "machine_rank": 0,
    "main_training_function": "main",
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "rdzv_backend": "static",
    "same_network": True,
    "tpu_env": [],
    "tpu_use_cluster": False,
    "tpu_use_sudo": False,
    "use_cpu": False,
}
"""What ``accelerate config`` of accelerate 1.15 writes for ZeRO-3 with offload."""

JSON: dict[str, Any] = {
    "bf16": {"enabled": "auto"},
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.98], "eps": 1e-6, "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": 20, "total_num_steps": "auto"},
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "contiguous_gradients": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
    "flops_profiler": {"enabled": False, "profile_step": 1},
}
"""The ZeRO-3 example of Hugging Face's documentation, with some numbers for auto."""


def loaded(path: Path, *overrides: str) -> Loaded:
    return load_config(None, [f"trainer.accelerate_config={path}", *overrides])


def problems(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(path, *overrides)
    return caught.value.problems


def yaml_file(path: Path, **deepspeed: Any) -> Path:
    """The Accelerate file with other values of ``deepspeed_config``; None leaves a key out."""
    inner = {key: value for key, value in {**ZERO3["deepspeed_config"], **deepspeed}.items() if value is not None}
    path.write_text(yaml.safe_dump({**ZERO3, "deepspeed_config": inner}))
    return path


def json_file(path: Path, **changes: Any) -> Path:
    tree = {key: value for key, value in {**JSON, **changes}.items() if value is not None}
    path.write_text(json.dumps(tree))
    return path


def notes(loaded: Loaded) -> dict[str, str]:
    """Line -> what it is here; of lines told together, the meaning -> the keys."""
    found = [note.strip() for note in loaded.notes[1:]]
    split = [note.split(" -> ", 1) if " -> " in note else note.split(": ", 1) for note in found]
    return {first: second for first, second in split}


def test_zero_3_with_offload(tmp_path: Path) -> None:
    path = yaml_file(tmp_path / "zero3.yaml")
    found = loaded(path)  # the recipe's trainer is single
    config, told = found.config, notes(found)
    assert config.trainer == FSDP2Settings(reshard_after_forward=True, cpu_offload=True, accelerate_config=str(path))
    assert (config.max_grad_norm, config.precision, config.nproc_per_node) == (0.5, BF16Settings(), 8)
    assert config.gradient_accumulation_steps is None
    assert told["gradient_accumulation_steps: 8"] == "follows from global_batch_size=8"
    assert "finalize" in told["zero3_save_16bit_model: true"]
    assert "zero3_init_flag" in told["always so here"]
    text = "\n".join(found.notes)
    assert all(key in text for key in (*ZERO3["deepspeed_config"], *ZERO3) if key != "deepspeed_config")


def test_the_command_line_outranks_the_file(tmp_path: Path) -> None:
    path = yaml_file(tmp_path / "zero3.yaml")
    found = loaded(path, "nproc_per_node=2", "max_grad_norm=2", "cpu_offload=false", "global_batch_size=null")
    config = found.config
    assert config.trainer == FSDP2Settings(accelerate_config=str(path))
    assert (config.max_grad_norm, config.nproc_per_node, config.gradient_accumulation_steps) == (2, 2, 8)
    assert notes(found)["gradient_clipping: 0.5"] == "max_grad_norm=2, as the command line says"


STAGES = {3: True, 2: False, 1: False}


@pytest.mark.parametrize("stage", STAGES)
def test_stages(tmp_path: Path, stage: int) -> None:
    trainer = loaded(yaml_file(tmp_path / "f.yaml", zero_stage=stage)).config.trainer
    assert isinstance(trainer, FSDP2Settings)
    assert trainer.reshard_after_forward is STAGES[stage]


def test_stage_0_is_ddp(tmp_path: Path) -> None:
    path = yaml_file(tmp_path / "f.yaml", zero_stage=0, offload_optimizer_device="none", offload_param_device="none")
    for words in ([], ["trainer=fsdp2"]):  # which the file cannot be named without
        found = loaded(path, *words)
        assert found.config.trainer == DDPSettings()
        assert notes(found)["zero_stage: 0"] == "trainer=ddp"


def test_the_json_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    json_file(tmp_path / "ds_config.json")
    path = tmp_path / "f.yaml"
    keys = {"deepspeed_config_file": "ds_config.json", "zero3_init_flag": True, "gradient_clipping": 0.5}
    path.write_text(yaml.safe_dump({**ZERO3, "deepspeed_config": keys}))
    found = loaded(path, "warmup_steps=20")
    config, told = found.config, notes(found)
    assert config.trainer == FSDP2Settings(cpu_offload=True, accelerate_config=str(path))
    assert (config.optimizer, config.precision) == (AdamWSettings(betas=(0.9, 0.98), eps=1e-6), BF16Settings())
    assert config.lr_scheduler == LinearSettings(warmup_steps=20)
    assert config.max_grad_norm == 0.5
    assert "train_batch_size" in told["as set here"]
    assert "zero_optimization.sub_group_size" in told["without effect here"]
    assert "flops_profiler" in told["always so here"]


def test_a_json_itself(tmp_path: Path) -> None:
    numbers = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8}
    fp16 = {"enabled": True, "initial_scale_power": 12, "loss_scale_window": 500}
    scheduler = {"type": "WarmupCosineLR", "params": {"total_num_steps": 300, "warmup_num_steps": 10}}
    path = json_file(tmp_path / "ds.json", **numbers, fp16=fp16, scheduler=scheduler, bf16=None, gradient_clipping=3)
    config = loaded(path, "nproc_per_node=2").config
    assert (config.global_batch_size, config.per_device_train_batch_size, config.max_steps) == (64, 4, 300)
    assert config.precision == FP16Settings(init_scale=4096.0, growth_interval=500)
    assert config.lr_scheduler == CosineSettings(warmup_steps=10, min_lr_ratio=1e-4)
    assert config.max_grad_norm == 3
    nothing = json_file(tmp_path / "plain.json", zero_optimization=None, communication_data_type=None)
    assert loaded(nothing).config.trainer == DDPSettings()


def test_other_optimizers_and_schedules(tmp_path: Path) -> None:
    optimizer = {"type": "SGD", "params": {"lr": 0.25, "momentum": 0.9}}
    path = json_file(tmp_path / "ds.json", optimizer=optimizer, scheduler={"type": "WarmupLR"})
    config = loaded(path, "optimizer.nesterov=true").config
    assert (config.optimizer, config.learning_rate) == (SGDSettings(momentum=0.9, nesterov=True), 0.25)
    assert config.lr_scheduler == ConstantSettings(warmup_steps=1000)
    assert loaded(path, "optimizer=adamw").config.optimizer == AdamWSettings()
    for block, kind, remedy in (("optimizer", "Lamb", "optimizer=..."), ("scheduler", "OneCycle", "lr_scheduler=...")):
        (found,) = problems(json_file(tmp_path / "other.json", **{block: {"type": kind, "params": {"x": 1}}}))
        assert remedy in found


def zero(**changes: Any) -> dict[str, Any]:
    return {"zero_optimization": {**JSON["zero_optimization"], **changes}}


WRONG_JSON: dict[str, tuple[dict[str, Any], str]] = {
    "stage 5": (zero(stage=5), "zero_optimization.stage in {}: must be 0, 1, 2 or 3, got 5"),
    "nvme": (
        zero(offload_param={"device": "nvme"}),
        "zero_optimization.offload_param.device in {}: must be none",
    ),
    "nvme_path": (
        zero(offload_param={"device": "cpu", "nvme_path": "/nvme"}),
        "zero_optimization.offload_param.nvme_path in {}: nothing reads it",
    ),
    "misspelt": (zero(overlap_com=True), "zero_optimization.overlap_com in {}: no such key; did you mean zero_opt"),
    "unknown": ({"gradient_cliping": 1.0}, "gradient_cliping in {}: no such key; did you mean gradient_clipping"),
    "static scale": ({"fp16": {"enabled": True, "loss_scale": 128}}, "fp16.loss_scale in {}: must be 0, got 128"),
    "both": ({"fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled in {}: contradicts bf16.enabled"),
    "adam": (
        {"optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        "optimizer.params.adam_w_mode in {}: must be true, got false",
    ),
    "rates": (
        {
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}},
        },
        "scheduler.params.warmup_max_lr in {}: contradicts optimizer.params.lr: 0.1",
    ),
    "wandb": ({"wandb": {"enabled": True}}, "wandb in {}: nothing reads it"),
    "offload without shards": (zero(stage=0), "zero_optimization.offload_optimizer.device in {}: needs zero_stage"),
    "hierarchical": (zero(zero_hpz_partition_size=8), "zero_optimization.zero_hpz_partition_size in {}: must be 1"),
}


@pytest.mark.parametrize(("changes", "problem"), WRONG_JSON.values(), ids=WRONG_JSON)
def test_a_json_that_says_something_else(tmp_path: Path, changes: dict[str, Any], problem: str) -> None:
    path = json_file(tmp_path / "ds.json", **changes)
    assert problems(path)[0].startswith("accelerate_config: " + problem.format(path))


def test_values_of_the_wrong_kind_name_the_file(tmp_path: Path) -> None:
    (found,) = problems(json_file(tmp_path / "ds.json", train_micro_batch_size_per_gpu="many"))
    assert "per_device_train_batch_size" in found
    assert "ds.json" in found


WRONG_YAML = {
    "stage": ({"zero_stage": 5}, "deepspeed_config.zero_stage in {}: must be 0, 1, 2 or 3, got 5"),
    "nvme": ({"offload_param_device": "nvme"}, "deepspeed_config.offload_param_device in {}: must be none or cpu"),
    "misspelt": ({"zero_stag": 3}, "deepspeed_config.zero_stag in {}: no such key; did you mean zero_stage"),
    "experts": ({"deepspeed_moe_layer_cls_names": "Moe"}, "deepspeed_config.deepspeed_moe_layer_cls_names in {}"),
    "no JSON": (
        {"deepspeed_config_file": "none.json"},
        "deepspeed_config.deepspeed_config_file in {}: none.json: cannot be read",
    ),
    "broken": ({"deepspeed_config_file": "broken.json"}, "deepspeed_config.deepspeed_config_file in {}: broken.json"),
    "a list": ({"deepspeed_config_file": "list.json"}, "deepspeed_config.deepspeed_config_file in {}: list.json: must"),
    "contradiction": (
        {"deepspeed_config_file": "ds.json", "zero_stage": 2},
        "zero_optimization.stage in ds.json: con",
    ),
}


@pytest.mark.parametrize(("changes", "problem"), WRONG_YAML.values(), ids=WRONG_YAML)
def test_a_file_that_says_something_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text('{"zero_optimization": ')
    Path("list.json").write_text("[]")
    json_file(Path("ds.json"), optimizer=None, scheduler=None)
    path = yaml_file(tmp_path / "f.yaml", **changes)
    (found,) = problems(path)
    assert found.startswith("accelerate_config: " + problem.format(path))


def test_a_section_that_is_none(tmp_path: Path) -> None:
    path = tmp_path / "f.yaml"
    path.write_text(yaml.safe_dump({**ZERO3, "deepspeed_config": None}))
    (found,) = problems(path)
    assert "deepspeed_config in" in found
    path.write_text(yaml.safe_dump({**ZERO3, "fsdp_config": {"fsdp_version": 2}}))
    (found,) = problems(path)
    assert "fsdp_config in" in found


# --------------------------------------------------------------------------------------------------- accelerate launch


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``launch(**deepspeed)`` writes a file, which it returns, and sets the variables that accelerate itself would set
    for rank 0, had it found the package deepspeed."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env

    def launched(**deepspeed: Any) -> Path:
        path = yaml_file(tmp_path / "f.yaml", **deepspeed)
        given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        args, defaults, _ = _validate_launch_command(given)
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        args.main_process_port = 0
        for name, value in prepare_deepspeed_cmd_env(args)[1].items():
            if name.startswith("ACCELERATE_"):
                monkeypatch.setenv(name, value)
        place = {"RANK": 0, "WORLD_SIZE": 8, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 8, "MASTER_ADDR": "localhost"}
        for name, number in place.items():
            monkeypatch.setenv(name, str(number))
        return path

    return launched


NO_OFFLOAD = {"offload_optimizer_device": "none", "offload_param_device": "none"}


@pytest.mark.parametrize(
    "changes", [{}, {"zero_stage": 2, "gradient_clipping": "auto"}, {"zero_stage": 0, **NO_OFFLOAD}]
)
def test_accelerate_launch_says_what_its_file_says(launch: Callable[..., Path], changes: dict[str, Any]) -> None:
    by_file = loaded(launch(**changes), "global_batch_size=null").config
    config = load_config(None, ["global_batch_size=null"]).config
    expected, trainer = vars(by_file.trainer) | {"accelerate_config": None}, vars(config.trainer)
    assert trainer == {key: expected[key] for key in trainer}
    for name in ("precision", "max_grad_norm", "gradient_accumulation_steps"):
        assert getattr(config, name) == getattr(by_file, name)


def test_accelerate_launch_with_a_json(launch: Callable[..., Path], tmp_path: Path) -> None:
    ds = json_file(tmp_path / "ds.json", bf16={"enabled": True}, gradient_clipping=0.25)
    launch(**dict.fromkeys(ZERO3["deepspeed_config"]), deepspeed_config_file=str(ds))
    config = load_config(None, []).config
    assert config.trainer == FSDP2Settings(cpu_offload=True)
    assert (config.max_grad_norm, config.precision) == (0.25, BF16Settings())
    assert load_config(None, ["trainer=ddp"]).config.max_grad_norm == 0.25
    ds.unlink()
    with pytest.raises(ConfigError, match=r"^ACCELERATE_DEEPSPEED_CONFIG_FILE in the environment: .*ds\.json"):
        load_config(None, [])


def test_variables_that_cannot_be(launch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    launch(offload_param_device="nvme")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_SPARSE", "true")
    with pytest.raises(ConfigError) as caught:
        load_config(None, [])
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "ACCELERATE_DEEPSPEED_SPARSE"
    ]  # fmt: skip


def test_a_file_starts_a_run_as_it_stands(tmp_path: Path) -> None:
    """ZeRO-3 with offload, on an encoder-decoder that ends with an average of its checkpoints."""
    path = yaml_file(tmp_path / "zero3.yaml")
    (tmp_path / "pairs.jsonl").write_text('{"input": "one two three", "target": "three two one"}\n' * 40)
    data = ["data=seq2seq", "data.files=[pairs.jsonl]", "max_encoder_length=16", "max_decoder_length=16"]
    data += ["eval_strategy=no", "warmup_steps=1"]
    settings = [*paired.SHAPE, *data, "max_steps=3", "global_batch_size=4", "save_steps=1", "callbacks=minimal"]
    words = [f"trainer.accelerate_config={path}", "nproc_per_node=2", "average_last=3", "output_dir=run", "device=cpu"]
    with Process("train", *settings, *words, cwd=tmp_path) as job:
        assert job.finish() == 0, job.output
    assert job.output.count("zero_stage: 3 -> ") == 1
    run = RunDir(tmp_path / "run")
    saved = yaml.safe_load(run.config.read_text())
    assert (saved["trainer"]["type"], saved["precision"]["type"], saved["max_grad_norm"]) == ("fsdp2", "bf16", 0.5)
    assert json.loads((run.checkpoint(3) / "manifest.json").read_text())["world_size"] == 2
    assert saved["trainer"]["cpu_offload"] is saved["trainer"]["reshard_after_forward"] is True
    assert (run.average(3, 3) / "provenance.json").is_file()
