"""Quantized model directories: what transformers makes of them, their size, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import tiny
import torch
from finalized import theirs
from safetensors.torch import save_file

from forgather_cli.config.schema import QuantizeRecipe
from forgather_cli.data.text.tokenizer import ByteTokenizer
from forgather_cli.errors import ModelError, SetupError
from forgather_cli.finalize.quantize import check_recipe, load_quantized, quantize_directory
from forgather_cli.inference.source import load_source
from forgather_cli.models.decoder import Decoder
from forgather_cli.models.init import init_parameters
from forgather_cli.models.pretrained import write_config

CPU = torch.device("cpu")
EVERYWHERE: tuple[QuantizeRecipe, ...] = (
    "int8-weight-only", "int8-dynamic-act-int8-weight", "int8-dynamic-act-int4-weight",
)  # fmt: skip
BIG = {"hidden_size": 128, "intermediate_size": 320, "head_dim": 64, "vocab_size": 300}
TOKENS = torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(0))


def plain(directory: Path, **changes: Any) -> Decoder:
    """Write a model directory; returns its model."""
    model = Decoder(tiny.decoder_settings(**{**BIG, **changes}))
    init_parameters(model, 0)
    directory.mkdir(exist_ok=True)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    write_config(directory, model.settings)
    ByteTokenizer().save(directory)
    return model.eval()


@pytest.mark.parametrize(("recipe", "tied"), [*((recipe, False) for recipe in EVERYWHERE), (EVERYWHERE[0], True)])
def test_transformers_computes_the_same_from_smaller_files(tmp_path: Path, recipe: QuantizeRecipe, tied: bool) -> None:
    model = plain(tmp_path, tie_word_embeddings=tied)
    file = tmp_path / "model.safetensors"
    before = file.stat().st_size
    quantize_directory(tmp_path, recipe)
    assert list(tmp_path.glob("*.safetensors")) == [file]
    ratio = file.stat().st_size / before
    # int4 lies in bytes of its own, and its groups have scales of their own
    assert 0.25 < ratio <= (0.30 if recipe.endswith("int4-weight") else 0.28), ratio
    ours, loaded = load_source(tmp_path, device="cpu").model, theirs(tmp_path)
    assert type(loaded.lm_head.weight).__name__ == type(loaded.model.embed_tokens.weight).__name__ == "Int8Tensor"
    with torch.no_grad():
        exact, found = model(TOKENS), ours(TOKENS)
        torch.testing.assert_close(loaded(TOKENS).logits, found, rtol=1e-5, atol=1e-5)
    apart = (found - exact).norm() / exact.norm()
    assert 1e-4 < apart < (0.3 if recipe.endswith("int4-weight") else 0.03), apart


def test_several_files_with_an_index(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    plain(whole)
    plain(parts)
    quantize_directory(whole, "int8-weight-only")
    quantize_directory(parts, "int8-weight-only", shard_bytes=300_000)
    names = sorted(path.name for path in parts.glob("*.safetensors"))
    assert names[0] == f"model-00001-of-{len(names):05d}.safetensors"
    assert len(names) > 2
    assert {path.stat().st_mode for path in parts.iterdir()} == {(parts / "config.json").stat().st_mode}
    index = json.loads((parts / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(names)
    with torch.no_grad():
        wanted = load_quantized(whole, CPU)(TOKENS)
        assert torch.equal(load_quantized(parts, CPU)(TOKENS), wanted)
        torch.testing.assert_close(theirs(parts)(TOKENS).logits, wanted, rtol=1e-5, atol=1e-5)


def test_exclusions_and_odd_groups_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = plain(tmp_path, intermediate_size=336)
    caplog.set_level("INFO")
    quantize_directory(tmp_path, "int8-dynamic-act-int4-weight", exclude=["lm_head", r"layers\.0\.mlp"], tables=False)
    messages = [record.message for record in caplog.records]
    assert messages[0].startswith("10 of 15 linear layers are stored as int8-dynamic-act-int4-weight in groups of 32: ")
    assert "left as they are, groups of 32 do not divide their rows: model.layers.1.mlp.down_proj" in messages
    stored = load_quantized(tmp_path, CPU)
    for name in ("model.embed_tokens", "lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"):
        assert torch.equal(stored.get_submodule(name).weight, model.get_submodule(name).weight), name  # type: ignore[arg-type]
    left = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["modules_to_not_convert"]
    assert "model.layers.1.mlp.down_proj" in left


@pytest.mark.parametrize("recipe", sorted({*get_args(QuantizeRecipe)} - {*EVERYWHERE}))
def test_a_recipe_this_device_cannot_run_is_refused_before_anything_is_written(
    tmp_path: Path, recipe: QuantizeRecipe
) -> None:
    told = rf"--quantize {recipe}: its kernels need a CUDA device .* got device cpu; choo"
    with pytest.raises(SetupError, match=told):
        check_recipe(recipe, CPU)
    if torch.cuda.is_available():
        return
    plain(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(SetupError, match="its kernels need"):
        quantize_directory(tmp_path, recipe)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_cannot_be_quantized_or_read_is_named(tmp_path: Path) -> None:
    plain(tmp_path)
    with pytest.raises(ModelError, match=r"no linear layer of LlamaForCausalLM can be quantized \(.*exclude has "):
        quantize_directory(tmp_path, "int8-weight-only", exclude=["proj", "lm_head"])
    quantize_directory(tmp_path, "int8-weight-only")
    with pytest.raises(ModelError, match="is quantized already"):
        quantize_directory(tmp_path, "int8-weight-only")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="quantize the model again"):
        load_quantized(tmp_path, CPU)
    config["quantization_config"]["quant_method"] = "gptq"
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is quantized by gptq, which is not read here"):
        load_quantized(tmp_path, CPU)
