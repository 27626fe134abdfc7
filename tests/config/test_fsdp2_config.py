"""Settings of fsdp2 that contradict each other, and Accelerate's files as settings."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import paired
import pytest
import yaml
from accelerate_files import WRITTEN, assert_begin, become_rank_0, wrong
from program import Process

from forgather_cli.config.accelerate_file import accelerate_settings
from forgather_cli.config.decode import dump_tree
from forgather_cli.config.load import Loaded, load_config, load_resumed
from forgather_cli.config.schema import AutoSettings, BF16Settings, FP16Settings, FP32Settings, FSDP2Settings
from forgather_cli.errors import ConfigError


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(None, ["trainer=fsdp2", *overrides])
    return caught.value.problems


OF_FSDP: dict[str, Any] = {
    **WRITTEN,
    "distributed_type": "FSDP",
    "dynamo_config": {"dynamo_backend": "NO"},
    "fsdp_config": {
        "fsdp_activation_checkpointing": True, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_cpu_ram_efficient_loading": True, "fsdp_offload_params": True, "fsdp_reshard_after_forward": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
        "fsdp_version": 2,
    },
    "gpu_ids": "all",
    "machine_rank": 1,
    "main_process_ip": "10.0.0.1",
    "main_process_port": 29501,
    "num_machines": 2,
}  # fmt: skip


def written(path: Path, fsdp: dict[str, Any] | None = None, **changes: Any) -> Path:
    """The file with other values; None leaves a key out."""
    inner = {**OF_FSDP["fsdp_config"], **(fsdp or {})}
    tree = {**OF_FSDP, "fsdp_config": {k: v for k, v in inner.items() if v is not None}, **changes}
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return path


def loaded(path: Path, *overrides: str) -> Loaded:
    return load_config(None, ["trainer=fsdp2", f"accelerate_config={path}", *overrides])


def test_a_file_says_what_it_says(tmp_path: Path) -> None:
    path = written(tmp_path / "two.yaml")
    config = loaded(path).config
    assert config.trainer == FSDP2Settings(reshard_after_forward=False, cpu_offload=True, accelerate_config=str(path))
    assert config.gradient_checkpointing
    assert config.precision == BF16Settings()
    assert (config.nnodes, config.nproc_per_node, config.node_rank) == (2, 4, 1)
    assert config.rdzv_endpoint == "10.0.0.1:29501"
    assert config.device == "auto"
    assert loaded(written(tmp_path / "half.yaml", mixed_precision="fp16")).config.precision == FP16Settings()
    # what it does not say stays
    path.write_text("distributed_type: FSDP\nfsdp_config: {fsdp_version: 2}\n")
    config = loaded(path, "replicate=2", "gradient_checkpointing=true", "precision=bf16", "nproc_per_node=2").config
    assert config.trainer == FSDP2Settings(replicate=2, accelerate_config=str(path))
    assert config.gradient_checkpointing
    assert config.precision == BF16Settings()


def test_sharding_strategies(tmp_path: Path) -> None:
    for named, meant in {
        "FULL_SHARD": (True, 1),
        "SHARD_GRAD_OP": (False, 1),
        "HYBRID_SHARD": (True, 2),
        "HYBRID_SHARD_ZERO2": (False, 2),
        1: (True, 1),
        4: (True, 2),
    }.items():
        fsdp = {"fsdp_sharding_strategy": named, "fsdp_reshard_after_forward": None}
        found = accelerate_settings(written(tmp_path / "f.yaml", fsdp), own_decoder=True).settings
        assert (found["trainer.reshard_after_forward"], found["trainer.replicate"]) == meant, named


def test_a_recipe_that_says_otherwise_is_a_mistake(tmp_path: Path) -> None:
    path = written(tmp_path / "f.yaml")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        "# mine\ndefaults: [train, {override trainer: fsdp2}, _self_]\n"
        f"trainer: {{accelerate_config: {path}, cpu_offload: false, reshard_after_forward: false}}\nnnodes: 3\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config(str(recipe), [])
    assert caught.value.problems == [
        f"nnodes: accelerate_config={path} says 2, got 3 too; leave one of them out",
        f"trainer.cpu_offload: accelerate_config={path} says true, got false too; leave one of them out",
    ]


def test_a_resumed_run_has_the_settings_and_needs_no_file(tmp_path: Path) -> None:
    path = written(tmp_path / "f.yaml")
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_tree(loaded(path).tree))
    path.unlink()
    config = load_resumed(saved, ["cpu_offload=false"]).config
    assert config.trainer == FSDP2Settings(reshard_after_forward=False)
    assert (config.precision, config.nnodes) == (BF16Settings(), 2)


def test_every_wrong_key_of_a_file_is_named_with_what_to_do(tmp_path: Path) -> None:
    fsdp = {
        "fsdp_version": 1, "fsdp_sharding_strategy": "NO_SHARD", "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_transformer_layer_cls_to_wrap": "GPT2Block", "fsdp_ofload_params": True, "fsdp_offload_params": "maybe",
    }  # fmt: skip
    changes = {
        "compute_environment": "AMAZON_SAGEMAKER", "distributed_type": "FSDP", "mixed_precision": "fp8",
        "num_process": 2, "num_processes": 7, "gpu_ids": "0,1", "dynamo_config": {"dynamo_backend": "INDUCTOR"},
        "tpu_use_cluster": True,
    }  # fmt: skip
    expected = [
        "compute_environment: must be LOCAL_MACHINE",
        "num_processes: must be a multiple of num_machines=2, got 7",
        "mixed_precision: must be 'no', bf16 or fp16 with trainer=fsdp2, got 'fp8'; set bf16",
        "gpu_ids: nothing reads it, got '0,1'; set CUDA_VISIBLE_DEVICES",
        "fsdp_config.fsdp_offload_params: must be true or false, got 'maybe'",
        "fsdp_config.fsdp_version: must be 2, got 1; run accelerate to-fsdp2",
        "fsdp_config.fsdp_sharding_strategy: must be one of",
        "fsdp_config.fsdp_auto_wrap_policy: must be TRANSFORMER",
        "fsdp_config.fsdp_transformer_layer_cls_to_wrap",
        "fsdp_config.fsdp_ofload_params: no such key; did you mean fsdp_offload",
        "dynamo_config: nothing reads it",
        "tpu_use_cluster: nothing reads it, got True; no TPUs here",
        "num_process: no such key; did you mean num_processes",
    ]
    assert_begin(wrong(written(tmp_path / "f.yaml", fsdp, **changes)), expected)


def test_a_file_that_says_something_else(tmp_path: Path) -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"fsdp_version": None}, {}, "fsdp_config.fsdp_version: must be 2, got 1"),
        ({}, {"distributed_type": "MULTI_GPU"}, "distributed_type: must be FSDP or DEEPSPEED, got 'MULTI_GPU'; set"),
        ({"fsdp_sharding_strategy": "FULL_SHARD"}, {}, "fsdp_config.fsdp_reshard_after_forward: contradicts"),
        ({}, {"num_machines": 0, "machine_rank": 0}, "num_machines: must be a whole number, 1 or more, got 0"),
        ({}, {"fsdp_config": []}, "fsdp_config: must be a mapping with fsdp_version: 2, got []"),
    ]
    for fsdp, changes, start in cases:
        (found,) = wrong(written(tmp_path / "f.yaml", fsdp, **changes))
        assert found.startswith(start), found


@pytest.mark.parametrize("text", [None, "a: [", "- 1", "\x00"])
def test_a_file_that_cannot_be_read(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "f.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=rf"^accelerate_config: {path}"):
        accelerate_settings(path, own_decoder=True)


def test_layer_classes_of_another_model_are_looked_for_where_it_is_built(tmp_path: Path) -> None:
    path = written(tmp_path / "f.yaml", {"fsdp_transformer_layer_cls_to_wrap": "GPT2Block, Other"})
    for words in (
        ("model._target_=torch.nn.Linear", "+model.in_features=2", "+model.out_features=2"),
        ("model=transformers", "model.config={model_type: gpt2, n_layer: 2}"),
    ):
        assert loaded(path, *words).config.trainer.block_classes == ["GPT2Block", "Other"]


HERE = {"main_process_ip": None, "main_process_port": 0, "machine_rank": 0, "num_machines": 1, "num_processes": 2}


def test_a_launcher_that_starts_one_process_though_it_is_asked_for_two_is_told_of(tmp_path: Path) -> None:
    config = {"distributed_type": "NO", "num_processes": 2, "use_cpu": True, "mixed_precision": "no"}
    (tmp_path / "one.yaml").write_text(yaml.safe_dump(config))
    (tmp_path / "notes.py").write_text(
        "import json\n"
        "from forgather_cli.config.load import load_config\n"
        "words = ([], ['trainer=ddp', 'nproc_per_node=2'])\n"
        "print(json.dumps([load_config('default', each).notes for each in words]))\n"
    )
    words = ["--config_file", "one.yaml", "notes.py"]
    with Process(*words, module="accelerate.commands.launch", cwd=tmp_path) as job:
        assert job.finish() == 0, job.output
    [line], of_ddp = json.loads(job.lines[-1])
    assert line.startswith("accelerate launch: num_processes is 2, but for distributed_type NO it starts one process")
    assert line.endswith("forgather train trainer=ddp nproc_per_node=2")
    assert of_ddp == []  # which starts the two itself


@pytest.fixture
def launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """``launch(fsdp, **changes)`` writes a file, which it returns, and sets the variables that accelerate itself
    would set for rank 0."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    def launched(fsdp: dict[str, Any] | None = None, **changes: Any) -> Path:
        path = written(tmp_path / "f.yaml", fsdp, **{**HERE, **changes})
        given = launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
        variables = prepare_multi_gpu_env(_validate_launch_command(given)[0])
        become_rank_0(monkeypatch, variables, 2 * changes.get("num_machines", 1), 2)
        return path

    return launched


FILES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as written": ({}, {}),
    "nothing said": ({key: None for key in OF_FSDP["fsdp_config"] if key != "fsdp_version"}, {"mixed_precision": "no"}),
    "fp16": ({"fsdp_reshard_after_forward": True}, {"mixed_precision": "fp16"}),
    "strategy": ({"fsdp_sharding_strategy": "SHARD_GRAD_OP", "fsdp_reshard_after_forward": None}, {}),
    "in the place of reshard": ({"fsdp_reshard_after_forward": "SHARD_GRAD_OP"}, {}),
    "two nodes": (
        {"fsdp_sharding_strategy": 4, "fsdp_reshard_after_forward": None},
        {"num_machines": 2, "num_processes": 4, "main_process_ip": "localhost", "main_process_port": 29517},
    ),
}


@pytest.mark.parametrize(("fsdp", "changes"), FILES.values(), ids=FILES)
def test_accelerate_launch_says_what_its_file_says(
    launch: Callable[..., Path], fsdp: dict[str, Any], changes: dict[str, Any]
) -> None:
    path = launch(fsdp, **changes)
    config, by_file = load_config(None, []).config, loaded(path).config  # the default recipe has trainer=single
    assert config.trainer == replace(by_file.trainer, accelerate_config=None)
    said = by_file.precision != FP32Settings()  # "no" is what accelerate launch says by default, so no word of its user
    assert config.precision == (by_file.precision if said else AutoSettings())
    assert config.gradient_checkpointing == by_file.gradient_checkpointing


def test_the_command_line_outranks_accelerate_launch_and_that_the_defaults(
    launch: Callable[..., Path], tmp_path: Path
) -> None:
    launch()
    config = load_config(None, ["precision=fp32", "cpu_offload=false", "trainer=fsdp2"]).config
    assert config.trainer == FSDP2Settings(reshard_after_forward=False)
    assert config.precision == FP32Settings()
    assert config.gradient_checkpointing
    ddp = load_config(None, ["trainer=ddp"]).config
    assert (ddp.trainer.type, ddp.precision, ddp.gradient_checkpointing) == ("ddp", BF16Settings(), False)
    other = written(tmp_path / "other.yaml", {"fsdp_offload_params": False}, mixed_precision="fp16")
    assert loaded(other).config.precision == FP16Settings()


def test_accelerate_launch_and_a_recipe_that_says_otherwise(launch: Callable[..., Path], tmp_path: Path) -> None:
    launch()
    recipe = tmp_path / "mine.yaml"
    start = "# mine\ndefaults: [train, {override trainer: %s}, {override precision: fp16}, _self_]\n"
    of_fsdp2 = "trainer: {cpu_offload: false, reshard_after_forward: false}\n"
    for text, paths in (
        (start % "fsdp2" + of_fsdp2, ["precision", "trainer.cpu_offload"]), (start % "ddp", ["precision", "trainer"]),
    ):  # fmt: skip
        recipe.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_config(str(recipe), [])
        assert sorted(problem.split(":")[0] for problem in caught.value.problems) == paths
        assert all("accelerate launch" in problem for problem in caught.value.problems)


def test_a_resume_under_accelerate_launch_takes_over_what_it_says(launch: Callable[..., Path], tmp_path: Path) -> None:
    saved = tmp_path / "config.yaml"
    saved.write_text(dump_tree(load_config(None, ["trainer=ddp", "precision=fp16", "learning_rate=0.5"]).tree))
    launch()
    config = load_resumed(saved, []).config
    assert config.trainer == FSDP2Settings(reshard_after_forward=False, cpu_offload=True)
    assert (config.precision, config.learning_rate) == (BF16Settings(), 0.5)


def test_accelerate_launch_with_what_its_file_may_not_say(launch: Callable[..., Path]) -> None:
    fsdp = {"fsdp_version": 1, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
            "fsdp_transformer_layer_cls_to_wrap": "GPT2Block"}  # fmt: skip
    path = launch(fsdp, dynamo_config={"dynamo_backend": "INDUCTOR"}, debug=True)
    assert len(problems(f"accelerate_config={path}")) == 5
    expected = [
        "ACCELERATE_DYNAMO_BACKEND in the environment",
        "ACCELERATE_DEBUG_MODE in the environment: nothing reads it",
        "FSDP_VERSION in the environment: must be 2",
        "FSDP_AUTO_WRAP_POLICY in the environment: must be",
        "FSDP_TRANSFORMER_CLS_TO_WRAP in the env",
    ]
    assert_begin(problems(), expected)


def test_variables_of_accelerate_without_its_ranks_count_for_nothing(
    launch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    launch({"fsdp_version": 1}, debug=True)
    monkeypatch.delenv("RANK")  # as transformers' TrainingArguments leaves some of them in a process
    config = load_config(None, []).config
    assert (config.trainer.type, config.precision) == ("single", AutoSettings())


def test_accumulation_of_accelerate_counts(launch: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    launch()
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    assert load_config(None, ["global_batch_size=null"]).config.gradient_accumulation_steps == 2
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "two")
    (found,) = problems()
    assert found.startswith("ACCELERATE_GRADIENT_ACCUMULATION_STEPS")


def test_accelerate_launch_starts_a_run_as_its_file_says(tmp_path: Path) -> None:
    """An encoder-decoder, by the names of its two kinds of layers, which accelerate hands on as a list's repr."""
    classes = ["Qwen3EncoderLayer", "Qwen3DecoderLayer"]
    fsdp = {"fsdp_offload_params": False, "fsdp_transformer_layer_cls_to_wrap": classes}
    path = written(tmp_path / "f.yaml", fsdp, **{**HERE, "main_process_port": None}, use_cpu=True)
    (tmp_path / "pairs.jsonl").write_text('{"input": "one two three", "target": "three two one"}\n' * 40)
    data = ["data=seq2seq", "data.files=[pairs.jsonl]", "max_encoder_length=16", "max_decoder_length=16"]
    data += ["eval_strategy=no", "warmup_steps=1"]
    settings = [*paired.SHAPE, *data, "max_steps=2", "global_batch_size=4", "save_steps=2", "callbacks=minimal"]
    command = ["launch", "--config_file", str(path), "-m", "forgather_cli", "train", "output_dir=run", *settings]
    with Process(*command, module="accelerate.commands.accelerate_cli", cwd=tmp_path) as job:
        assert job.finish() == 0, job.output
    assert job.output.count(f"FSDP_TRANSFORMER_CLS_TO_WRAP: {classes}") == 1
    assert json.loads((tmp_path / "run/checkpoints/step-00000002/manifest.json").read_text())["world_size"] == 2
    saved = yaml.safe_load((tmp_path / "run/config.yaml").read_text())
    assert (saved["trainer"]["type"], saved["precision"]["type"]) == ("fsdp2", "bf16")
    assert saved["trainer"]["reshard_after_forward"] is False
    assert saved["trainer"]["block_classes"] == classes
    assert saved["gradient_checkpointing"] is True
