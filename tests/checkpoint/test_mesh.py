"""Tensor parallel x FSDP2 by torch's own functions: trains as one device does, saves, and resumes in any layout."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from mesh import TensorParallelFSDP2
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.callbacks.parameter_norms import SpectralNorms
from forgather_cli.config.schema import MuonSettings
from forgather_cli.errors import SetupError
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.models.parts import named_tensors, trainable_parameters
from forgather_cli.optim.build import build_optimizer
from forgather_cli.run_dir import RunDir
from forgather_cli.shards import box_of, local, needs_exchange
from forgather_cli.strategies.base import ModelSpec
from forgather_cli.trainer import Trainer, TrainingArguments

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
Mesh = tuple[int, int] | None
"""Ranks along shard and tensor; None: one device."""


def assert_held(trainer: Trainer, checkpoint: str) -> set[str]:
    """What this rank has of weights and moments is what the checkpoint's files have there, to the last bit."""
    files = {kind: load_file(Path(checkpoint) / kind / f"{kind}.safetensors") for kind in ("model", "optimizer")}
    kinds = {"model": named_tensors(trainer.strategy.parts), "optimizer": trainer.optimizer.state_tensors()}
    cut = set()
    for kind, tensors in kinds.items():
        assert tensors.keys() <= files[kind].keys()
        for name, tensor in tensors.items():
            assert torch.equal(local(tensor.detach()), files[kind][name][box_of(tensor).slices]), name
            cut |= {name} if needs_exchange(tensor) else set()
    return cut


class Resumed(TrainerCallback):
    def __init__(self, checkpoint: str) -> None:
        self._checkpoint = checkpoint

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert_held(kwargs["trainer"], self._checkpoint)


def curve(root: str, mesh: Mesh, steps: int, checkpoint: str | None = None) -> dict[str, list[float]]:
    """Losses, norms and evaluation losses of a run whose last step is saved."""
    args = TrainingArguments(
        root, max_steps=steps, per_device_train_batch_size=8, per_device_eval_batch_size=4, learning_rate=1e-3,
        logging_steps=1, eval_strategy="steps", eval_steps=steps, save_steps=1000, report_to="none", use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(
        model_init=partial(tiny.decoder, **HEADS),
        args=args,
        train_dataset=tiny.RandomTokens(64, ragged=True),
        eval_dataset=tiny.RandomTokens(8, seed=1),
        strategy=None if mesh is None else TensorParallelFSDP2(*mesh),
        callbacks=[] if checkpoint is None else [Resumed(checkpoint)],
        optimizer_cls_and_kwargs=(torch.optim.AdamW, {"lr": 1e-3}),  # fused kernels take DTensors of one mesh alone
    )
    trainer.train(resume_from_checkpoint=checkpoint)
    cut = assert_held(trainer, str(RunDir(Path(root)).checkpoint(steps)))
    assert any("exp_avg" in name for name in cut) == (mesh is not None and mesh[1] > 1)
    history = trainer.state.log_history
    return {key: [r[key] for r in history if key in r] for key in ("loss", "grad_norm", "eval_loss")}


def agree(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    assert all(expected.values())
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-5), key


def test_a_mesh_trains_as_one_device_saves_and_resumes_on_another_mesh_and_on_one(tmp_path: Path) -> None:
    alone = curve(str(tmp_path / "alone"), None, 3)
    for ranks in run_ranks(4, curve, str(tmp_path / "mesh"), (2, 2), 3):
        agree(ranks, alone)
    checkpoint = str(RunDir(tmp_path / "mesh").checkpoint(3))
    alone = curve(str(tmp_path / "to one"), None, 6, checkpoint)
    for mesh in ((4, 1), (1, 4), (2, 2)):
        for ranks in run_ranks(4, curve, str(tmp_path / f"to {mesh}"), mesh, 6, checkpoint):
            agree(ranks, alone)


def materialized(shard: int, tensor: int) -> Any:
    strategy = TensorParallelFSDP2(shard, tensor)
    with torch.device("meta"):
        model = Decoder(tiny.decoder_settings(**HEADS))
    strategy.materialize(ModelSpec(build=lambda: model, init=lambda part: init_parameters(part, 0)))
    return strategy


class _Trainer:
    """What ``FullParameters`` reads of one."""

    def __init__(self, strategy: Any) -> None:
        self.run = self
        self.strategy, self.cpu_group = strategy, dist.group.WORLD


def norms_of_a_mesh() -> tuple[dict[str, float], dict[str, float]]:
    parameters = FullParameters(_Trainer(materialized(2, 2)))
    spectral = SpectralNorms(parameters)
    weights: Tensor = parameters.weights().sqrt()
    found = dict(zip(parameters.shapes, weights.tolist(), strict=True))
    return found, dict(zip(spectral.names, spectral.measure(20).tolist(), strict=True))


def test_initial_weights_and_their_norms_are_those_of_one_device() -> None:
    full = {name: p.detach() for name, p in tiny.decoder(**HEADS).named_parameters()}
    for norms, spectral in run_ranks(4, norms_of_a_mesh):
        assert norms == pytest.approx({name: float(p.norm()) for name, p in full.items()}, rel=1e-6)
        matrices = {name: float(torch.linalg.matrix_norm(p, 2)) for name, p in full.items() if p.ndim == 2}
        assert spectral == pytest.approx(matrices, rel=5e-3)


def refusal_of_muon() -> str:
    parameters = trainable_parameters(materialized(2, 2).parts)
    with pytest.raises(SetupError) as error:
        build_optimizer(MuonSettings(), parameters, lr=1e-3, weight_decay=0.0)
    return str(error.value)


def test_muon_refuses_a_second_sharded_dimension_by_name() -> None:
    (told,) = set(run_ranks(4, refusal_of_muon))
    assert "optimizer=muon" in told
    assert "_proj.weight" in told
    assert "optimizer=adamw" in told
