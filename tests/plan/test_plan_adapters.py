"""``forgather plan`` of adapters and frozen weights: bytes against what a run holds, and a model of eight billion."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
from program import document, shown
from ranks import run_ranks
from selection import some
from test_plan import Measure, num_bytes, parameters
from test_plan_fit import SHORT, predicted_over_measured

from forgather_cli.adapters.nf4 import packed_layers
from forgather_cli.config.schema import Config
from forgather_cli.plan.run import make_plan
from forgather_cli.run_dir import RunDir

BASE = ("model=pretrained", "data.tokenizer=bytes", "model.replace_tokenizer=true", "device=cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    shape = {"vocab_size": 260, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4}
    tiny.llama(**shape, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256).save_pretrained(path)
    return path


def config_of(base: Path, path: Path, *words: str, callbacks: str = "minimal") -> Config:
    return tiny.config(path, f"model.path={base}", *BASE, *words, callbacks=callbacks)


class Holds(Measure):
    """The scales of weights in four bits too."""

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_end(args, state, control, **kwargs)
        trainer = kwargs["trainer"]
        for _, layer in packed_layers(trainer.strategy.parts[0]):
            state = layer.state
            trainer.measured["weights"] += num_bytes([state.absmax] + ([state.state2.absmax] if state.nested else []))
        assert any(not p.requires_grad for p in parameters(trainer))


def measured(base: Path, path: Path, words: tuple[str, ...]) -> dict[str, int]:
    config = config_of(base, path, *words, "+callbacks.measure._target_=test_plan_adapters.Holds")
    found: dict[str, int] = tiny.train(config, RunDir(path)).measured
    return found


CASES: dict[str, tuple[int, tuple[str, ...]]] = {
    "lora": (1, ("adapter=lora",)),
    "lora, bf16": (1, ("adapter=lora", "precision=bf16", "trainable=[norm]")),
    "dora, ddp": (2, ("adapter=dora", "trainer=ddp", "gradient_as_bucket_view=false")),
    "lora, fsdp2": (2, ("adapter=lora", "trainer=fsdp2", "target_modules=[q_proj,down_proj]")),
    "dora, 1F1B": (2, ("adapter=dora", "trainer=pipeline")),
    "qlora": (1, ("adapter=qlora",)),
    "qlora, scales in fp32": (1, ("adapter=qlora", "double_quant=false", "precision=bf16")),
    "trainable": (1, (r"trainable=['layers\.3\.', lm_head]",)),
}  # fmt: skip


@pytest.mark.parametrize("case", some(CASES, "dora, 1F1B", "qlora", "trainable"))
def test_weights_gradients_and_moments_are_those_of_the_run(base: Path, tmp_path: Path, case: str) -> None:
    world, words = CASES[case]
    words = (*words, "max_steps=1", "eval_strategy=no", "save_strategy=no")
    made = make_plan(config_of(base, tmp_path, *words, *([f"nproc_per_node={world}"] if world > 1 else [])))
    held = [measured(base, tmp_path, words)] if world == 1 else run_ranks(world, measured, base, tmp_path, words)
    for rank, own in zip(made.ranks, held, strict=True):
        for kind, size in own.items():
            assert getattr(rank, kind) == pytest.approx(size, rel=0.02), (rank.rank, kind)


PEAKS = {
    "lora": ("adapter=lora",),
    "dora": ("adapter=dora",),
    "qlora": ("adapter=qlora",),
    "lora, recomputed": ("adapter=lora", "gradient_checkpointing=true"),
    "lora, dropout": ("adapter=lora", "lora_dropout=0.1"),
    "lora, bf16": ("adapter=lora", "precision=bf16"),
    "dora, bf16, recomputed": ("adapter=dora", "precision=bf16", "gradient_checkpointing=true"),
    "two matrices of each layer": ("adapter=lora", "target_modules=[q_proj,v_proj]"),
    "trainable": (r"trainable=['layers\.[23]\.']",),
}  # fmt: skip


@pytest.mark.parametrize("case", some(PEAKS, "qlora", "lora, dropout", "trainable"))
def test_predictions_are_near_what_is_allocated_beside_frozen_weights(base: Path, tmp_path: Path, case: str) -> None:
    words = ("data.seq_len=128", "per_device_train_batch_size=4", *SHORT)
    assert 0.9 <= predicted_over_measured(config_of(base, tmp_path, *words, *PEAKS[case]), tmp_path) <= 1.2


@pytest.mark.parametrize(("adapter", "most"), [("qlora", 12), ("lora", 22)])
@pytest.mark.parametrize("loss", ["cross_entropy", "linear_cross_entropy"])
def test_eight_billion_weights_fit_a_card(tmp_path: Path, adapter: str, most: int, loss: str) -> None:
    """Llama 3's shape, 2,048 tokens at a time; a save of the adapter is in it."""
    shape = {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 8192,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    words = ("data.seq_len=2048", "per_device_train_batch_size=1", "precision=bf16", "gradient_checkpointing=true")
    made = make_plan(config_of(tmp_path, tmp_path / "run", *words, f"adapter={adapter}", f"loss={loss}"))
    assert made.fullest is not None
    assert made.fullest.total < most * 2**30
    assert made.num_parameters - made.num_trained == 8_030_261_248
    assert made.checkpoint_bytes == pytest.approx(3 * 4 * made.num_trained, rel=0.001)


def test_the_command_says_what_is_trained(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"model.path={base}", *BASE, "data=synthetic", "precision=fp32", "adapter=qlora", "adapter.r=4"]
    found = document(capsys, *words, "--params")
    rows = {row["name"]: row for row in found["parameters"]}
    packed, small = rows["model.layers.0.mlp.up_proj.weight"], rows["model.layers.0.mlp.up_proj.lora_A.weight"]
    assert (packed["shape"], packed["trained"], packed["state_bytes"]) == ([344, 128], False, 0)
    assert (small["shape"], small["trained"], small["kind"]) == ([4, 128], True, "adapter")
    assert (
        found["num_trained"]
        == found["parameters_by_kind"]["adapter"]
        == sum(row["numel"] for row in rows.values() if row["trained"])
    )
    assert f"trained {found['num_trained']:,}" in " ".join(shown(capsys, *words).split())
    assert "frozen" in shown(capsys, *words, "--params")
