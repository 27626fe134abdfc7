"""Against peft itself: what our adapters compute, and what peft makes of our files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from finalized import theirs as load_theirs
from lazily import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from whole_batch import equal

from forgather_cli.adapters.directory import WEIGHTS, write_config
from forgather_cli.adapters.layers import adapted_layers, is_adapter
from forgather_cli.adapters.load import starting
from forgather_cli.adapters.merge import MergedRows
from forgather_cli.adapters.model import adapt
from forgather_cli.checkpoint.load import ADAPTER_PREFIX
from forgather_cli.config.load import load_config
from forgather_cli.config.schema import Config
from forgather_cli.models.build import build_model, initialize
from forgather_cli.models.init import allocate

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's, of transformers

SHAPE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2, "max_position_embeddings": 64,
}  # fmt: skip
IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]])
CASES = {
    "lora": ("adapter=lora",),
    "dora": ("adapter=dora",),
    "gaussian": ("adapter=lora", "use_rslora=true", "init_lora_weights=gaussian", "adapter.r=4"),
    "named": (
        "adapter=lora", "target_modules=[q_proj,down_proj]", "rank_pattern={q_proj: 3}", "alpha_pattern={down_proj: 7}",
    ),
    "regex": ("adapter=dora", "target_modules='.*layers.1.*(gate|up)_proj'"),
    "tokens": ("adapter=lora", "target_modules=[embed_tokens,lm_head,k_proj]"),
    "norms": ("adapter=lora", "trainable=[norm]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose head is its embedding."""
    path = tmp_path_factory.mktemp("base")
    tiny.llama(**SHAPE, tie_word_embeddings=True).save_pretrained(path)
    return path


def config_of(base: Path, *words: str, model: str = "pretrained") -> Config:
    return load_config("default", [f"model={model}", f"model.path={base}", "precision=fp32", *words]).config


def on_meta(config: Config, vocab_size: int = SHAPE["vocab_size"]) -> nn.Module:
    with torch.device("meta"):
        return build_model(config.model, vocab_size=vocab_size, seq_len=8)


def ours(config: Config, seed: int = 1, vocab_size: int = SHAPE["vocab_size"]) -> nn.Module:
    """The adapted model, filled as a run fills it."""
    model = on_meta(config, vocab_size)
    adapt(model, config.adapter, config)
    allocate(model, "cpu")
    starting(lambda part: initialize(config.model, part, 0), config, seed)(model)
    return model


def built(config: Config, vocab_size: int = SHAPE["vocab_size"]) -> nn.Module:
    """The model of a base's directory, before any adapter."""
    model = on_meta(config, vocab_size)
    allocate(model, "cpu")
    initialize(config.model, model, 0)
    return model


def stirred(model: nn.Module) -> nn.Module:
    """Every trained parameter moved, as training does; DoRA's norms too."""
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def saved(model: nn.Module, config: Config, directory: Path) -> Path:
    directory.mkdir()
    trained = {ADAPTER_PREFIX + n: p.detach().contiguous() for n, p in model.named_parameters() if p.requires_grad}
    save_file(trained, directory / WEIGHTS, metadata={"format": "pt"})
    write_config(directory, model, config)
    return directory


def loss_of(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), IDS[:, 1:].flatten())


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["pretrained", "transformers"])
def test_forward_gradients_files_and_merge_are_those_of_peft(case: str, model: str, base: Path, tmp_path: Path) -> None:
    config = config_of(base, *CASES[case], model=model)
    mine = stirred(ours(config))
    theirs = assert_as_peft(mine, saved(mine, config, tmp_path / "adapter"), base)
    if case in ("lora", "dora"):  # of a tied head peft adds two products into one weight
        assert_merged_as_peft(MergedRows(mine), theirs)


def assert_as_peft(mine: nn.Module, files: Path, base: Path) -> Any:
    """Returns the model in peft."""
    theirs = PeftModel.from_pretrained(load_theirs(base), files, is_trainable=True)
    logits, wanted = mine(IDS), theirs(IDS).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)
    loss_of(logits).backward()
    loss_of(wanted).backward()
    gradients = {
        name.removeprefix(ADAPTER_PREFIX).replace(".default", "").replace(".modules_to_save", ""): p.grad
        for name, p in theirs.named_parameters()
        if p.requires_grad
    }
    gradients = {
        name.replace("lora_magnitude_vector.weight", "lora_magnitude_vector"): g for name, g in gradients.items()
    }
    own = {name: p.grad for name, p in mine.named_parameters() if p.requires_grad}
    assert own.keys() == gradients.keys()
    for name, gradient in own.items():
        # 1e-5 of the largest, where that is above 1 (5 in the gaussian case): on a Zen 4 fp32 rounds to 5e-6 of it
        atol = 1e-5 * max(1.0, float(gradients[name].abs().max()))
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=atol, msg=lambda m, n=name: f"{n}: {m}")
    assert all(p.grad is None for p in mine.parameters() if not p.requires_grad)
    theirs.save_pretrained(files.with_name("theirs"), save_embedding_layers=False)
    assert equal(load_file(files / WEIGHTS), load_file(files.with_name("theirs") / WEIGHTS))
    return theirs


def assert_merged_as_peft(rows: MergedRows, theirs: Any) -> None:
    wanted = dict(theirs.merge_and_unload().named_parameters())
    assert rows.base.keys() == wanted.keys()
    for name in rows.base:
        torch.testing.assert_close(rows[name], wanted[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


def test_dora_gives_a_direction_to_rows_of_zeros(base: Path) -> None:
    model = ours(config_of(base, "adapter=dora", "target_modules=[o_proj]"))
    layers = [layer for _, layer in adapted_layers(model)]
    for layer in layers:
        with torch.no_grad():
            layer.weight[:2] = 0
            layer.lora_magnitude_vector[:2] = 0
    before = model(IDS)
    for _ in range(2):
        loss_of(model(IDS)).backward()
        for parameter in model.parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None
                parameter.data -= 0.1 * parameter.grad
                parameter.grad = None
    after = model(IDS)
    assert after.isfinite().all()
    assert not torch.equal(before, after)
    for layer in layers:
        assert layer.merged()[:2].abs().sum(dim=1).min() > 0


def test_an_adapter_begins_as_the_base_and_by_seed_and_name(base: Path) -> None:
    assert_begins_as_the_base(config_of(base, "adapter=dora"), base)


def assert_begins_as_the_base(config: Config, base: Path) -> None:
    model, plain = ours(config), load_theirs(base)
    torch.testing.assert_close(model(IDS), plain(IDS).logits, rtol=1e-5, atol=1e-5)
    again, other = (dict(ours(config, seed).named_parameters()) for seed in (1, 3))
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, again[name])
        assert torch.equal(parameter, other[name]) == (not name.endswith("lora_A.weight"))
        assert parameter.requires_grad == is_adapter(name)
