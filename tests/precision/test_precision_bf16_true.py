"""``precision=bf16_true``: parameters, gradients and moments in bf16, norms and losses in fp32."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from parity import LAYOUTS, Result, assert_same_samples, composed_of, corpus, go_on, scratch, train
from torch import Tensor

from forgather_cli.config.load import load_config
from forgather_cli.data.build import load_data
from forgather_cli.inference.source import load_source
from forgather_cli.models.build import build_model, construct, fill
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import allocate, init_parameters
from forgather_cli.models.transform import cast_parameters
from forgather_cli.run_dir import RunDir

BF16 = torch.bfloat16
BASE = (
    *corpus(), "tokenizer=bytes", "precision=bf16_true", "model.num_hidden_layers=4", "model.tie_word_embeddings=true",
    "global_batch_size=12", "per_device_train_batch_size=12", "max_grad_norm=0.2", "deterministic=true",
    "max_steps=8", "eval_steps=4", "warmup_steps=2", "+callbacks.probe.save_at=[4]",
)  # fmt: skip


def _full(*values: Any) -> list[Any]:
    return [
        pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.full) for value in values
    ]


PLACES = (
    "single", "ddp 2", "fsdp2 2", "1F1B 2", "ZBVZeroBubble 2",
    *_full("GPipe 2", "Interleaved1F1B 2", "LoopedBFS 2", "InterleavedZeroBubble 2", "DualPipeV 2"),
)  # fmt: skip


@functools.cache
def whole(layout: str, *more: str) -> Result:
    return train(LAYOUTS[layout], (*BASE, *more), scratch() / f"bf16-true-{whole.cache_info().misses}")


def placed(layout: str) -> Result:
    return whole(layout, *own(layout))


def own(layout: str) -> tuple[str, ...]:
    return (f"per_device_train_batch_size={6 if layout.startswith(('ddp', 'fsdp2')) else 12}",)


def fresh() -> Decoder:
    """What the run starts with: drawn in fp32, rounded once."""
    model = build_model(composed_of(BASE).model, vocab_size=257, seq_len=16)
    init_parameters(model, 42)
    return model.to(BF16)


def plain(samples: list[Tensor], lr: float = 1e-3, warmup: int = 2) -> tuple[list[float], list[float], Decoder]:
    """The same steps in plain PyTorch: (losses, norms, trained model)."""
    model, losses, norms = fresh(), [], []
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    for step, ids in enumerate(samples):
        logits = model(ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert {g.dtype for g in grads} == {BF16}
        norm = torch.stack([g.double().square().sum() for g in grads]).sum().sqrt()
        for g in grads:
            g.copy_(g.double() * min(1.0, 0.2 / float(norm)))
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / warmup)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        norms.append(float(norm))
    return losses, norms, model


def test_one_device_is_a_plain_loop_in_bf16() -> None:
    found = whole("single", "weight_decay=0", "lr_scheduler=constant", "data.packing=concat")
    losses, norms, model = plain(found.samples)
    assert found.losses == pytest.approx(losses, rel=1e-5)
    assert found.norms[0] == pytest.approx(norms[0], rel=1e-6), "bf16 sums would be off by 1e-3"
    assert found.norms == pytest.approx(norms, rel=1e-3)
    for name, tensor in model.named_parameters():
        if name != "lm_head.weight":
            torch.testing.assert_close(found.tensors()[name], tensor.detach(), rtol=2**-7, atol=1e-4)


@functools.cache
def apart() -> dict[str, float]:
    """What bf16 allows: 8 times as far as one device is from itself when it adds up gradients in two other orders."""
    distances = [distance(whole("single", f"per_device_train_batch_size={rows}")) for rows in (6, 4)]
    return {key: 8 * max(each[key] for each in distances) for key in distances[0]}


def distance(found: Result) -> dict[str, float]:
    """From the run of one device; of weights in parts of their change."""
    reference = placed("single")
    before, ours, theirs = reference.begin, found.tensors(), reference.tensors()
    moved = torch.cat([(theirs[name].double() - before[name].double()).flatten() for name in before])
    off = torch.cat([(ours[name].double() - theirs[name].double()).flatten() for name in before])
    return {
        "loss": furthest(found.losses, reference.losses),
        "eval loss": furthest(found.eval_losses, reference.eval_losses),
        "norm": furthest(found.norms, reference.norms),
        "weights": float(off.norm() / moved.norm()),
    }


def furthest(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("layout", PLACES)
def test_every_strategy_trains_in_bf16(layout: str) -> None:
    found = placed(layout)
    assert_same_samples(found, placed("single"))
    for name, tensor in fresh().named_parameters():
        assert torch.equal(found.begin[name], tensor), f"{name} is not the fp32 draw, rounded once"
    found_apart = distance(found)
    for key, bound in apart().items():
        assert found_apart[key] <= bound, f"{key} {found_apart[key]:.1e} from one device, at most {bound:.1e}"
    tensors = found.tensors()
    assert {tensors[name].dtype for name in found.begin} == {BF16}
    assert {t.dtype for name, t in tensors.items() if name not in found.begin} == {BF16, torch.float32}
    assert {t.dtype for name, t in tensors.items() if name.endswith((".exp_avg", ".exp_avg_sq"))} == {BF16}


@pytest.mark.parametrize("layout", ["single", "fsdp2 2", *_full("ddp 2", "1F1B 2", "ZBVZeroBubble 2")])
def test_resume_in_the_same_layout_is_exact(tmp_path: Path, layout: str) -> None:
    expected = placed(layout)
    found = go_on(LAYOUTS[layout], (*BASE, *own(layout)), RunDir(expected.path).checkpoint(4), tmp_path)
    assert (found.losses, found.norms) == (expected.losses[4:], expected.norms[4:])
    assert found.eval_losses == expected.eval_losses[1:]
    ours, theirs = found.tensors(), expected.tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize(
    ("writer", "reader"), [("fsdp2 2", "1F1B 2"), *_full(("single", "1F1B 2"), ("1F1B 2", "single"))]
)
def test_another_layout_goes_on_from_the_same_bits(tmp_path: Path, writer: str, reader: str) -> None:
    source = placed(writer)
    found = go_on(LAYOUTS[reader], (*BASE, *own(reader)), RunDir(source.path).checkpoint(4), tmp_path)
    saved = source.tensors(4)
    assert found.begin.keys() == saved.keys()
    assert all(torch.equal(found.begin[name], tensor) for name, tensor in saved.items())
    assert furthest(found.losses, source.losses[4:]) <= apart()["loss"]


@pytest.mark.parametrize(
    "settings", [("loss=linear_cross_entropy", "chunk_size=20"), ("gradient_checkpointing=true",)], ids=" ".join
)
def test_other_ways_to_the_same_gradients(settings: tuple[str, ...]) -> None:
    found, expected = whole("single", *own("single"), *settings), placed("single")
    assert furthest(found.losses, expected.losses) <= apart()["loss"]
    assert furthest(found.norms, expected.norms) <= apart()["norm"]


@pytest.mark.full
def test_adafactor_learns_as_it_does_in_fp32() -> None:
    settings = (*own("single"), "optimizer=adafactor", "learning_rate=0.1", "max_steps=20", "eval_steps=20")
    found, expected = whole("single", *settings), whole("single", *settings, "precision=fp32")
    learned = expected.losses[0] - expected.losses[-1]
    assert learned > 0.3, "the steps are large enough to show"
    assert found.losses[-1] == pytest.approx(expected.losses[-1], abs=0.03 * learned)


def test_moments_follow_weights_into_another_precision(tmp_path: Path) -> None:
    half, full = placed("single"), whole("single", *own("single"), "precision=fp32")
    for source, precision, dtype in ((full, "bf16_true", BF16), (half, "fp32", torch.float32)):
        settings = (*BASE, *own("single"), f"precision={precision}")
        found = go_on(LAYOUTS["single"], settings, RunDir(source.path).checkpoint(4), tmp_path / precision)
        for name, tensor in found.begin.items():
            counter = name.endswith(".step")
            assert tensor.dtype == (torch.float32 if counter else dtype), name
            assert torch.equal(tensor, source.tensors(4)[name].to(tensor.dtype)), name
        assert furthest(found.losses, full.losses[4:]) < 1e-3


def test_checkpoints_are_bf16_models_of_transformers() -> None:
    folder = RunDir(placed("fsdp2 2").path).checkpoint(8) / "model"
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.dtype == BF16
    ids = torch.randint(0, 257, (2, 16), generator=torch.Generator().manual_seed(0))
    ours = load_source(folder, device="cpu").model
    assert {p.dtype for p in ours.parameters()} == {BF16}
    with torch.no_grad():
        apart = (ours(ids) - theirs(ids).logits).float().norm() / ours(ids).float().norm()
    assert apart < 2**-6, "of two implementations that round to bf16 in other places"
    words = ["model=pretrained", f"model.path={folder}", f"data.tokenizer={folder}", "data=synthetic", "seq_len=16"]
    config = load_config(None, [*words, "precision=bf16_true"]).config
    data = load_data(config.data, seed=0)
    model = construct(config, torch.device("cpu"), vocab_size=data.vocab_size, seq_len=data.seq_len)
    cast_parameters(model, BF16)
    allocate(model, "cpu")
    fill(config, torch.device("cpu"), model, 0)
    saved = placed("fsdp2 2").tensors(8)
    assert all(torch.equal(parameter, saved[name]) for name, parameter in model.named_parameters())
