"""What a rank builds from typed settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import tiny
import torch

from forgather_cli.run_dir import RunDir
from forgather_cli.strategies.single import SingleDevice


class EchoStrategy(SingleDevice):
    """A strategy of a user's, named by ``_target_`` in an option file."""

    def __init__(self, device: torch.device, loss: object, autocast: object, *, note: str) -> None:
        super().__init__(device, loss, autocast)  # type: ignore[arg-type]
        self.note = note


def test_a_strategy_of_the_users_is_one_class_and_one_option_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    option = tmp_path / "conf" / "trainer" / "echo.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("_target_: test_worker.EchoStrategy\nnote: hello\n")
    config = tiny.config(tmp_path / "run", "trainer=echo")
    trainer = tiny.train(config, RunDir(tmp_path / "run"))
    assert type(trainer.strategy).__name__ == "EchoStrategy"
    assert trainer.strategy.note == "hello"  # type: ignore[attr-defined]
    reference = tiny.train(tiny.config(tmp_path / "single"), RunDir(tmp_path / "single"))
    for mine, theirs in zip(trainer.model.parameters(), reference.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_logging_dir_takes_metrics_and_leaves_checkpoints(tmp_path: Path) -> None:
    tiny.train(tiny.config(tmp_path / "run", f"logging_dir={tmp_path / 'logs'}"), RunDir(tmp_path / "run"))
    assert tiny.training_curve(tmp_path / "logs")
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["checkpoints"]


@pytest.mark.parametrize("where", ["meta", "device", "cpu"])
def test_construction_on_meta_device_and_cpu_gives_the_same_weights_on_a_cpu(tmp_path: Path, where: str) -> None:
    config = tiny.config(tmp_path, f"construct_model_on={where}", "max_steps=1", "learning_rate=0", "weight_decay=0")
    trainer = tiny.train(config, RunDir(tmp_path))
    name = "model.layers.0.mlp.up_proj.weight"
    generator = torch.Generator().manual_seed(_seed(config.seed, name))
    expected = torch.empty(192, 64).normal_(0.0, 0.02, generator=generator)
    assert torch.equal(trainer.model.get_parameter(name), expected)


def _seed(seed: int, name: str) -> int:
    import hashlib

    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "little") >> 1


def test_accumulation_follows_from_the_global_batch(tmp_path: Path) -> None:
    curves = []
    for bound in (8, 4, 3, 1):
        run = tmp_path / str(bound)
        settings = (f"per_device_train_batch_size={bound}", "data.ragged=true", "data.packing=pad", "logging_steps=1")
        tiny.train(tiny.config(run, *settings), RunDir(run))
        curves.append(tiny.training_curve(run))
    for curve in curves[1:]:
        for (_, loss, norm), (_, expected_loss, expected_norm) in zip(curve, curves[0], strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-5)
            assert norm == pytest.approx(expected_norm, rel=1e-5)


def test_a_run_is_described(tmp_path: Path) -> None:
    trainer = tiny.train(tiny.config(tmp_path), RunDir(tmp_path))
    info = trainer.info()
    assert f"{sum(p.numel() for p in trainer.model.parameters()):,} parameters" in info["model"]
    assert "sequences of 16" in info["train split"]
    assert info["batch"].startswith("8 ")
