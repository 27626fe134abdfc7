"""Names of ``TrainingArguments`` and settings that the source documents have: what each does here."""

from __future__ import annotations

import contextlib
import io
import logging
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from program import forgather
from ranks import run_ranks
from torch import Tensor, nn
from torch.distributed.pipelining import ScheduleGPipe

from forgather_cli import PipelineSettings, TrainingArguments
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import RunSettings
from forgather_cli.errors import ConfigError
from forgather_cli.run_dir import RunDir
from forgather_cli.worker import build


class Shifted(nn.Module):
    """With a buffer that no checkpoint has and only the constructor computes, and a tied head."""

    made_on: ClassVar[list[set[str]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(32)
        self.register_buffer("shift", torch.linspace(-1.0, 1.0, 32), persistent=False)
        self.register_buffer("scale", torch.tensor(3.0))
        self.made_on.append({p.device.type for p in self.parameters()})

    def forward(self, input_ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(self.embed(input_ids) + self.shift) * self.scale)
        return logits


SAVES = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "learning_rate": 1e-2}


def shifted(path: Path, **given: Any) -> Any:
    Shifted.made_on.clear()
    settings = {**({} if "model" in given else {"model_init": Shifted}), "max_steps": 4, **SAVES, **given}
    return tiny.script(path, data=None, evaluated=tiny.RandomTokens(8), **settings)


def losses(trainer: Any) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if "loss" in each]


def test_on_meta_a_model_is_filled_from_the_checkpoint(tmp_path: Path) -> None:
    saved = shifted(tmp_path / "run", max_steps=2)
    saved.train()
    weights, checkpoint = saved.model.state_dict(), str(RunDir(tmp_path / "run").checkpoint(2))
    plain = shifted(tmp_path / "plain", resume_from_checkpoint=checkpoint)
    assert Shifted.made_on == [{"cpu"}]
    plain.train()
    for path, resume in ((tmp_path / "other", checkpoint), (tmp_path / "run", True)):
        filled = shifted(path, resume_from_checkpoint=resume, construct_model_on="meta")
        assert Shifted.made_on == [{"meta"}]
        assert filled.model.head.weight is filled.model.embed.weight
        assert torch.equal(filled.model.shift, torch.linspace(-1.0, 1.0, 32))
        assert all(torch.equal(tensor, weights[name]) for name, tensor in filled.model.state_dict().items())
        assert filled.evaluate()["eval_loss"] == saved.evaluate()["eval_loss"]
        filled.train()
        assert losses(filled) == losses(plain)
        assert nn.Linear(1, 1).weight.device.type == "cpu", "what is made afterwards is not on meta"


def test_meta_without_a_checkpoint_is_default_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = {"resume_from_checkpoint": True}
    for n, given in enumerate(({}, checkpoint, {"model": Shifted()})):
        caplog.clear()
        trainer = shifted(tmp_path / str(n), max_steps=2, construct_model_on="meta", **given)
        assert "construct_model_on" in caplog.text
        assert {"meta"} not in Shifted.made_on
        trainer.train()
    caplog.clear()
    shifted(tmp_path / "1", construct_model_on="meta", resume_components=["optimizer"], **checkpoint)
    assert "construct_model_on" in caplog.text, "its weights are left out"
    with pytest.raises(ConfigError, match=r"construct_model_on: .*model_init"):
        shifted(tmp_path / "1", construct_model_on="meta", model=Shifted(), **checkpoint)
    with pytest.raises(ConfigError, match="construct_model_on: must be default, meta or device, got 'cpu'"):
        shifted(tmp_path, construct_model_on="cpu")


def test_on_device_model_init_makes_its_tensors_there(tmp_path: Path) -> None:
    current: list[list[str]] = []

    def make() -> nn.Module:
        current.append([str(mode.device) for mode in torch.overrides._get_current_function_mode_stack()])
        return tiny.decoder()

    for where in ("device", "default"):
        tiny.script(tmp_path, model_init=make, construct_model_on=where)
    assert current == [["cpu"], []]
    assert run_ranks(2, devices_of_stages, str(tmp_path)) == [[]] * 2, "equal models, whatever the device draws"


def devices_of_stages(root: str) -> list[str]:
    current: list[str] = []

    def make() -> nn.Module:
        current.extend(str(mode.device) for mode in torch.overrides._get_current_function_mode_stack())
        return tiny.decoder()

    tiny.script(root, model_init=make, construct_model_on="device", trainer=PipelineSettings())
    return current


def resumed(root: str, trainer: str, where: str, resume: Any) -> tuple[float, list[float], float]:
    """The evaluation's loss before, the losses of training, and the evaluation's loss after."""
    settings = {**SAVES, "max_steps": 4 if resume else 2, "resume_from_checkpoint": resume, "trainer": trainer}
    script = tiny.script(
        root, evaluated=tiny.RandomTokens(8), model_init=tiny.llama, construct_model_on=where, **settings
    )
    before = script.evaluate()["eval_loss"]
    script.train()
    return before, losses(script), script.evaluate()["eval_loss"]


@pytest.mark.parametrize("trainer", ["fsdp2", "pipeline"])
def test_on_meta_ranks_are_filled_together(trainer: str, tmp_path: Path) -> None:
    saved = run_ranks(2, resumed, str(tmp_path / "run"), trainer, "default", False)[0]
    checkpoint = str(RunDir(tmp_path / "run").checkpoint(2))
    plain = run_ranks(2, resumed, str(tmp_path / "plain"), trainer, "device", checkpoint)[0]
    found = run_ranks(2, resumed, str(tmp_path / "found"), trainer, "meta", checkpoint)[0]
    assert found == (saved[2], *plain[1:])
    assert plain[0] == saved[0], "the weights of the constructor, until train() restores the checkpoint"


def stages(schedule: Any, **names: Any) -> str:
    layers, pipeline = partial(tiny.decoder, num_hidden_layers=4), {"type": "pipeline", "schedule": schedule}
    try:
        tiny.script("out", model_init=layers, trainer=pipeline, **names)
    except ConfigError as error:
        return "; ".join(error.problems)
    return ""


def of_stages() -> list[tuple[str, str]]:
    accepted = stages("1F1B", pp_stage_type="loop", is_multistage=False) + stages("Interleaved1F1B", is_multistage=True)
    accepted += stages("ZBVZeroBubble", pp_stage_type="v", is_multistage=True)
    accepted += stages(ScheduleGPipe, pp_stage_type="v", is_multistage=False)  # a user's class may be of either kind
    return [
        ("", accepted),
        ('pp_stage_type: schedule="1F1B"', stages("1F1B", pp_stage_type="v")),
        ('is_multistage: schedule="1F1B"', stages("1F1B", is_multistage=True)),
        ("is_multistage: schedule=", stages(ScheduleGPipe, is_multistage=True)),
        ('pp_stage_type: schedule="ZBVZeroBubble"', stages("ZBVZeroBubble", pp_stage_type="loop")),
        ('is_multistage: schedule="Interleaved1F1B"', stages("Interleaved1F1B", is_multistage=False)),
    ]


def test_names_of_stages_must_be_what_the_schedule_has(tmp_path: Path) -> None:
    for wanted, said in run_ranks(2, of_stages)[0]:
        assert said.startswith(wanted)
        assert bool(said) == bool(wanted)
    tiny.script(tmp_path, pp_stage_type="v", is_multistage=True)  # without a pipeline nobody asks


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ddp": {}, "trainer": "ddp"}, "ddp: trainer says it too"),
        ({"ddp": {}, "fsdp": True}, "ddp: fsdp says it too"),
        (
            {"post_local_sgd": {"enabled": True}, "ddp_bucket_cap_mb": 3},
            "post_local_sgd: ddp_bucket_cap_mb says it too",
        ),
        ({"ddp": True}, "ddp: must be a dict, got True"),
        ({"ddp": {"bukcet_cap_mb": 3}}, r"trainer\.bukcet_cap_mb: .*bucket_cap_mb"),
        ({"fp8_dim_alignment": 32}, "fp8_dim_alignment: nothing reads it without fp8_recipe"),
        ({"fp8_dim_alignment": 32, "precision": "fp8"}, "fp8_dim_alignment: precision says it too"),
        ({"fp8_dim_alignment": "wide", "fp8_recipe": "rowwise"}, "fp8_dim_alignment: must be a whole number"),
        ({"fp8_dim_alignment": 24, "fp8_recipe": "rowwise"}, "must be a multiple of 16, got 24"),
        ({"pp_stage_type": "w"}, "pp_stage_type: must be loop or v"),
    ],
)
def test_what_says_the_same_or_nothing_is_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainingArguments("out", **given)


def test_a_script_releases_the_cache_at_half_of_the_memory_and_a_recipe_never() -> None:
    assert (TrainingArguments("out").gc_threshold, RunSettings().gc_threshold) == (0.5, None)


def test_dataset_is_the_data_component() -> None:
    words = ["resume_from_checkpoint=true", "resume_components=[model,dataset]"]
    assert load_config(None, words).config.resume_components == ["model", "data"]
    assert TrainingArguments(resume_from_checkpoint=True, resume_components=["dataset"]).resume_components == ["data"]


def counted(root: str) -> tuple[int, int]:
    trainer = tiny.script(root, max_steps=1, per_device_train_batch_size=4)
    trainer.train()
    return trainer.state.num_processes, trainer.state.epoch_train_steps


def test_the_state_tells_ranks_and_the_steps_of_an_epoch(tmp_path: Path) -> None:
    assert counted(str(tmp_path / "one")) == (1, 16)
    assert run_ranks(2, counted, str(tmp_path / "two")) == [(2, 8)] * 2
    trainer = tiny.script(tmp_path / "set", None, tiny.stream(tiny.RandomTokens()), max_steps=1, epoch_train_steps=7)
    trainer.train()
    assert trainer.state.epoch_train_steps == 7
    trainer = tiny.script(tmp_path / "unknown", None, tiny.stream(tiny.RandomTokens()), max_steps=1)
    trainer.train()
    assert trainer.state.epoch_train_steps == 0


# ---------------------------------------------------------------------------------------------------------- debug_*


def test_parameters_and_the_steps_of_their_making_are_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told() -> list[str]:
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("rank 0: ")]

    tiny.script(tmp_path / "a", precision="bf16_true", debug_model_params=True)
    printed = told()
    model = tiny.decoder()
    assert printed[0] == "rank 0: model: model.embed_tokens.weight (64, 32) torch.bfloat16 cpu"
    assert len(printed) == len([*model.parameters(), *model.buffers()])
    assert any("rotary_emb.inv_freq" in line for line in printed)
    tiny.script(tmp_path / "b", debug_model_init=True)
    assert {line.split(": ")[1] for line in told()} == {"build"}, "a script's model comes with its weights"
    config = tiny.config(tmp_path / "c", "debug_model_init=true", "gradient_checkpointing=true")
    build(config, RunDir(tmp_path / "c"))
    printed = told()
    steps = [line.split(": ")[1] for line in printed]
    assert list(dict.fromkeys(steps)) == ["build", "checkpoint", "init"]
    assert "lm_head.weight" in " ".join(printed)
    devices = {
        step: {line.split()[-1] for line, of in zip(printed, steps, strict=True) if of == step} for step in steps
    }
    assert devices == {"build": {"meta"}, "checkpoint": {"meta"}, "init": {"cpu"}}


def of_a_pipeline(root: str, recipe: bool) -> tuple[str, str]:
    """Standard output, and torch's log of its schedules."""
    logger, log, out = logging.getLogger("torch.distributed.pipelining"), io.StringIO(), io.StringIO()
    handler = logging.StreamHandler(log)
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(out):
            if recipe:
                words = ["trainer=pipeline", "n_microbatches=2", "nproc_per_node=2", "max_steps=1", "eval_strategy=no"]
                words += ["debug_split_model=true", "debug_pipeline=true", "save_strategy=no"]
                tiny.train(tiny.config(Path(root), *words), RunDir(Path(root)))
            else:
                told = {"debug_split_model": True, "debug_pipeline": True}
                pipeline = PipelineSettings(n_microbatches=2)
                tiny.script(root, model_init=tiny.decoder, trainer=pipeline, max_steps=1, **told).train()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.CRITICAL)
    return out.getvalue(), log.getvalue()


@pytest.mark.parametrize("recipe", [True, False])
def test_stages_and_what_they_do_are_printed(recipe: bool, tmp_path: Path) -> None:
    for rank, (printed, log) in enumerate(run_ranks(2, of_a_pipeline, str(tmp_path), recipe)):
        assert f"rank {rank}: stage: Decoder(" in printed
        assert ("(lm_head): None" in printed) == (rank == 0)
        assert ("(embed_tokens): None" in printed) == (rank == 1)
        assert all(
            f"[Stage {rank}] {did} chunk {part}" in log for did in ("Forwarded", "Backwarded") for part in (0, 1)
        )


def test_a_recipe_without_a_pipeline_has_no_stages_to_print(capsys: pytest.CaptureFixture[str]) -> None:
    assert forgather("train", "model=nano", "data=synthetic", "debug_pipeline=true", "debug_split_model=true") == 2
    said = capsys.readouterr().err
    assert "debug_pipeline: nothing reads it with trainer=single" in said
    assert "debug_split_model: nothing reads it" in said
