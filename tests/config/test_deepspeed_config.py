"""DeepSpeed's settings in Accelerate's files, in a JSON of its own and in the environment, as settings of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate_files import WRITTEN, assert_begin, become_rank_0, wrong

from forgather_cli.config.accelerate_file import accelerate_settings
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

ZERO3: dict[str, Any] = {
    **WRITTEN,
    "deepspeed_config": {
        "deepspeed_multinode_launcher": "standard", "gradient_accumulation_steps": 8, "gradient_clipping": 0.5,
        "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero3_init_flag": True,
        "zero3_save_16bit_model": True, "zero_stage": 3,
    },
    "distributed_type": "DEEPSPEED",
    "fsdp_config": {},
}  # fmt: skip
NO_OFFLOAD = {"offload_optimizer_device": "none", "offload_param_device": "none"}
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


def test_other_stages(tmp_path: Path) -> None:
    for stage in (2, 1):
        found = accelerate_settings(yaml_file(tmp_path / "f.yaml", zero_stage=stage), own_decoder=True).settings
        assert (found["trainer"], found["trainer.reshard_after_forward"]) == ("fsdp2", False)
    for words in ([], ["trainer=fsdp2"]):  # which the file cannot be named without
        found = loaded(yaml_file(tmp_path / "f.yaml", zero_stage=0, **NO_OFFLOAD), *words)
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
    (found,) = problems(json_file(tmp_path / "ds.json", train_micro_batch_size_per_gpu="many"))
    assert "per_device_train_batch_size" in found
    assert "ds.json" in found


def test_every_wrong_key_of_a_json_is_named_with_what_to_do(tmp_path: Path) -> None:
    zero, nvme = JSON["zero_optimization"], {"device": "nvme", "nvme_path": "/nvme"}
    wrong_zero = {"stage": 5, "offload_param": nvme, "overlap_com": True, "zero_hpz_partition_size": 8}
    changes = {
        "zero_optimization": {**zero, **wrong_zero}, "gradient_cliping": 1.0, "wandb": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "adam_w_mode": False}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2}},
        "fp16": {"enabled": True, "loss_scale": 128}, "bf16": {"enabled": True},
    }  # fmt: skip
    expected = [
        "zero_optimization.stage: must be 0, 1, 2 or 3, got 5",
        "zero_optimization.offload_param.device: must be none",
        "zero_optimization.offload_param.nvme_path: nothing reads it",
        "zero_optimization.overlap_com: no such key; did you mean zero_opt",
        "zero_optimization.zero_hpz_partition_size: must be 1",
        "gradient_cliping: no such key; did you mean gradient_clipping",
        "fp16.loss_scale: must be 0, got 128",
        "fp16.enabled: contradicts bf16.enabled",
        "optimizer.params.adam_w_mode: must be true, got false",
        "scheduler.params.warmup_max_lr: contradicts optimizer.params.lr: 0.1",
        "wandb: nothing reads it",
    ]
    assert_begin(wrong(json_file(tmp_path / "ds.json", **changes)), expected)
    first, *_ = wrong(json_file(tmp_path / "ds.json", zero_optimization={**zero, "stage": 0}))
    assert first.startswith("zero_optimization.offload_optimizer.device: needs zero_stage")


def test_a_file_that_says_something_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("broken.json").write_text('{"zero_optimization": ')
    Path("list.json").write_text("[]")
    json_file(Path("ds.json"), optimizer=None, scheduler=None)
    for changes, start in (
        ({"zero_stage": 5}, "deepspeed_config.zero_stage: must be 0, 1, 2 or 3, got 5"),
        ({"offload_param_device": "nvme"}, "deepspeed_config.offload_param_device: must be none or cpu"),
        ({"zero_stag": 3}, "deepspeed_config.zero_stag: no such key; did you mean zero_stage"),
        ({"deepspeed_moe_layer_cls_names": "Moe"}, "deepspeed_config.deepspeed_moe_layer_cls_names"),
        ({"deepspeed_config_file": "none.json"}, "deepspeed_config.deepspeed_config_file: none.json: cannot be read"),
        ({"deepspeed_config_file": "broken.json"}, "deepspeed_config.deepspeed_config_file: broken.json"),
        ({"deepspeed_config_file": "list.json"}, "deepspeed_config.deepspeed_config_file: list.json: must"),
        ({"deepspeed_config_file": "ds.json", "zero_stage": 2}, "zero_optimization.stage in ds.json: con"),
    ):
        (found,) = wrong(yaml_file(tmp_path / "f.yaml", **changes))
        assert found.startswith(start), found
    for name, section in (("deepspeed_config", None), ("fsdp_config", {"fsdp_version": 2})):
        (tmp_path / "f.yaml").write_text(yaml.safe_dump({**ZERO3, name: section}))
        (found,) = wrong(tmp_path / "f.yaml")
        assert found.startswith(name)


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
        become_rank_0(monkeypatch, prepare_deepspeed_cmd_env(args)[1], 8, 8)
        return path

    return launched


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
