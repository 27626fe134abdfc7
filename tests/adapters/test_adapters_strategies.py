"""Adapters under every strategy: as on one device, over a base that changes by no bit; resumed under another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
import tiny
import torch
from finalized import theirs as load_theirs
from ranks import run_ranks
from safetensors.torch import load_file
from test_adapters_peft import SHAPE
from test_adapters_runs import WORDS, newest
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from forgather_cli.adapters.directory import WEIGHTS
from forgather_cli.config.load import load_config
from forgather_cli.models.parts import named_tensors
from forgather_cli.run_dir import RunDir
from forgather_cli.shards import box_of, local

LAYOUTS = {
    "ddp": ("trainer=ddp",),
    "fsdp2": ("trainer=fsdp2",),
    "pipeline": ("trainer=pipeline", "n_microbatches=2"),
    "zero bubble": ("trainer=pipeline", "n_microbatches=4", "schedule=ZBVZeroBubble"),
}
KINDS = {
    "lora": ("adapter=lora",),
    "dora": ("adapter=dora", "loss=linear_cross_entropy", "gradient_checkpointing=true"),
    "transformers": ("adapter=dora", "model=transformers", "trainable=[norm.weight]"),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base")
    tiny.llama(**SHAPE | {"vocab_size": 260, "num_hidden_layers": 4, "initializer_range": 0.1}).save_pretrained(path)
    return path


def train(root: Path, base: Path, *words: str) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """As one rank: (gradient norms, what the checkpoint has of the model, this rank's rows that differ from the base's
    files of what is frozen)."""
    usual = [
        "model=pretrained", f"model.path={base}", *WORDS, "precision=fp32", "optimizer.eps=1e-6", "learning_rate=1e-3",
        "global_batch_size=8", "per_device_train_batch_size=4", "max_steps=8", "warmup_steps=1", "logging_steps=1",
    ]  # fmt: skip
    config = load_config(None, [*usual, f"output_dir={root}", *words]).config
    trainer = tiny.train(config, RunDir(root))
    files = load_theirs(base).state_dict()
    changed = {
        name: tensor.detach()
        for name, tensor in named_tensors(trainer.run.strategy.parts).items()
        if not tensor.requires_grad
        and not torch.equal(local(tensor.detach()), files[name][box_of(tensor).slices].to(tensor.dtype))
    }
    return [norm for _, _, norm in tiny.training_curve(root)], load_file(newest(root) / WEIGHTS), changed


@pytest.fixture(scope="module", params=KINDS)
def alone(request: pytest.FixtureRequest, base: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("alone")
    return request.param, root, train(root, base, *KINDS[request.param])


def assert_as_alone(norms: list[float], saved: dict[str, Tensor], alone: Any) -> None:
    parity.assert_near(norms, alone[0], "gradient norm")
    assert saved.keys() == alone[1].keys()
    for name, tensor in alone[1].items():
        apart = float((saved[name] - tensor).norm() / tensor.norm())
        assert apart <= 1e-5, f"{name}: {apart:.1e}"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_strategy_agrees_with_one_device_and_leaves_the_base(
    layout: str, alone: Any, base: Path, tmp_path: Path
) -> None:
    kind, _, reference = alone
    assert_ranks_as_alone(reference, tmp_path, base, *KINDS[kind], *LAYOUTS[layout])


def assert_ranks_as_alone(alone: Any, root: Path, base: Path, *words: str) -> None:
    for norms, saved, changed in run_ranks(2, train, root, base, *words):
        assert changed == alone[2] == {}
        assert_as_alone(norms, saved, alone)


@pytest.mark.parametrize("model", ["pretrained", "transformers"])
def test_bf16_sharded_agrees_to_its_rounding(model: str, base: Path, tmp_path: Path) -> None:
    words = (f"model={model}", "adapter=dora", "precision=bf16", "max_steps=3")
    norms, _, changed = train(tmp_path / "alone", base, *words)
    assert changed == {}
    found = run_ranks(2, train, tmp_path / "sharded", base, *words, *LAYOUTS["fsdp2"])
    assert found[0][0] == pytest.approx(norms, rel=1e-2)
    assert [rank[2] for rank in found] == [{}, {}]


def _train_unsummed(root: Path, base: Path, *words: str) -> Any:
    """Without the sum over ranks of one adapter's gradient."""
    made = DistributedDataParallel.__init__

    def broken(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        names = [name for name, _ in module.named_parameters() if "layers.0.self_attn.q_proj.lora_B" in name]
        assert names
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
        made(self, module, *args, **kwargs)

    DistributedDataParallel.__init__ = broken
    try:
        return train(root, base, *words)
    finally:
        DistributedDataParallel.__init__ = made


def test_a_gradient_that_is_not_summed_is_seen(alone: Any, base: Path, tmp_path: Path) -> None:
    kind, _, reference = alone
    found = run_ranks(2, _train_unsummed, tmp_path, base, *KINDS[kind], *LAYOUTS["ddp"], "replication_check=none")
    with pytest.raises(AssertionError):
        assert_as_alone(*found[0][:2], reference)
