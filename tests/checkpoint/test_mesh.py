"""Tensor parallel x FSDP2 by torch's own functions: trains as one device does, saves, and resumes in any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.distributed as dist
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from forgather_cli import Trainer, TrainingArguments
from forgather_cli.callbacks.base import TrainerCallback
from forgather_cli.callbacks.norms import FullParameters
from forgather_cli.callbacks.parameter_norms import SpectralNorms
from forgather_cli.config.schema import MuonSettings
from forgather_cli.distributed import gather, rank_in
from forgather_cli.errors import SetupError
from forgather_cli.labels import num_targets
from forgather_cli.loss.base import ModelWithLoss
from forgather_cli.loss.losses import CrossEntropy
from forgather_cli.loss.model_io import model_kwargs, model_logits
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import allocate, init_parameters
from forgather_cli.models.parts import named_tensors, trainable_parameters
from forgather_cli.optim.build import build_optimizer
from forgather_cli.run_dir import RunDir
from forgather_cli.shards import box_of, local, needs_exchange
from forgather_cli.strategies.base import Batch, ModelSpec, Strategy

PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
    "self_attn.o_proj": RowwiseParallel(),
    **{f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
    "mlp.down_proj": RowwiseParallel(),
}


class TensorParallelFSDP2(Strategy):
    """A strategy of a user's. Every rank is given all data and takes the sequences of its place along ``shard``."""

    name = "mesh"
    data_rank, data_size = 0, 1

    def __init__(self, shard: int, tensor: int) -> None:
        """Collective."""
        self.device, self._loss = torch.device("cpu"), CrossEntropy()
        self.mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))
        self.model_group = dist.group.WORLD
        self.batch_multiple = shard
        self._units: list[Any] = []

    def materialize(self, spec: ModelSpec) -> None:
        model: Any = spec.whole()
        for layer in model.model.layers.values():
            parallelize_module(layer, self.mesh["tensor"], PLAN)
            self._shard(layer)
        self._with_loss = ModelWithLoss(model, self._loss)
        self._root = _Root(self._with_loss)
        self._shard(self._root)
        allocate(model, self.device)
        if spec.init is not None:
            spec.init(model)
        self.parts = [model]
        # a lower rank with the same box counts it in norms: tied weights, and what a mesh dimension leaves whole
        named = dict(model.named_parameters())
        mine = {name: (box_of(p).offsets, box_of(p).sizes) for name, p in named.items()}
        lower = gather(mine, self.model_group)[: rank_in(self.model_group)]
        self.duplicates = frozenset(p for n, p in named.items() if any(each.get(n) == mine[n] for each in lower))

    def _shard(self, module: nn.Module) -> None:
        unit = fully_shard(module, mesh=self.mesh["shard"])
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        self._units.append(unit)

    def _mine(self, batch: Batch) -> Batch:
        return {key: value[self.mesh.get_local_rank("shard") :: self.batch_multiple] for key, value in batch.items()}

    def _share(self, total: Tensor) -> Tensor:
        """Ranks along ``tensor`` have the same loss, which the first of them tells."""
        return total.detach() if self.mesh.get_local_rank("tensor") == 0 else torch.zeros_like(total)

    def forward_backward(self, microbatches: Iterable[Batch], step_targets: Tensor) -> Tensor:
        share = torch.zeros(())
        for batch in microbatches:
            total = self._root(lambda batch=batch: self._with_loss(self._mine(batch), step_targets))
            (total / step_targets).backward()
            share += self._share(total / step_targets)
        return share

    @torch.no_grad()
    def loss(self, batch: Batch) -> tuple[Tensor, Tensor]:
        mine = self._mine(batch)
        total = self._evaluated(lambda: self._with_loss(mine))
        return self._share(total), self._share(num_targets(mine["labels"]))

    @torch.no_grad()
    def logits(self, batch: Batch, *, last_only: bool = False, cache: Any = None) -> Tensor | None:
        found: Tensor = self._evaluated(lambda: model_logits(self.parts[0], model_kwargs(batch), last_only=last_only))
        return found

    def _evaluated(self, run: Callable[[], Any]) -> Any:
        """Weights are freed again, which otherwise a backward does."""
        found = self._root(run)
        for unit in self._units:
            unit.reshard()
        return found


class _Root(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, run: Callable[[], Any]) -> Any:
        return run()


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


def norms_of_a_mesh() -> tuple[dict[str, float], dict[str, float], str, dict[str, Tensor]]:
    """And what Muon says, and the whole parameters."""
    strategy = TensorParallelFSDP2(2, 2)
    with torch.device("meta"):
        model = Decoder(tiny.decoder_settings(**HEADS))
    strategy.materialize(ModelSpec(build=lambda: model, init=lambda part: init_parameters(part, 0)))
    with pytest.raises(SetupError) as refusal:
        build_optimizer(MuonSettings(), trainable_parameters(strategy.parts), lr=1e-3, weight_decay=0.0)
    trainer: Any = SimpleNamespace(strategy=strategy, run=SimpleNamespace(cpu_group=dist.group.WORLD))
    parameters = FullParameters(trainer)
    spectral = SpectralNorms(parameters)
    weights: Tensor = parameters.weights().sqrt()
    found = dict(zip(parameters.shapes, weights.tolist(), strict=True))
    of_matrices = dict(zip(spectral.names, spectral.measure(20).tolist(), strict=True))
    return found, of_matrices, str(refusal.value), dict(parameters.tensors())


def test_initial_weights_and_norms_are_those_of_one_device_and_muon_refuses_a_second_sharded_dimension() -> None:
    full = {name: p.detach() for name, p in tiny.decoder(**HEADS).named_parameters()}
    ranks = run_ranks(4, norms_of_a_mesh)
    assert len({refusal for _, _, refusal, _ in ranks}) == 1
    for norms, spectral, refusal, whole in ranks:
        assert whole.keys() == full.keys()
        assert all(torch.equal(whole[name], p) for name, p in full.items())
        assert norms == pytest.approx({name: float(p.norm()) for name, p in full.items()}, rel=1e-6)
        matrices = {name: float(torch.linalg.matrix_norm(p, 2)) for name, p in full.items() if p.ndim == 2}
        assert spectral == pytest.approx(matrices, rel=5e-3)
        assert all(word in refusal for word in ("optimizer=muon", "_proj.weight", "optimizer=adamw"))
