"""Hugging Face directories: transformers' are read, ours are loaded by transformers, bad ones are refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chats import SHAPE
from safetensors.torch import load_file, save_file
from test_decoder import SHAPES, decoder
from torch import nn

from forgather_cli.config.schema import PretrainedSettings, RopeScaling, Target
from forgather_cli.config.schema.decoder import family_of
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.models import files
from forgather_cli.models.build import build_model, load_pretrained
from forgather_cli.models.init import allocate
from forgather_cli.models.pretrained import decoder_settings_from_hf, hf_config, read_settings, write_model_files

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
V = 67
COMMON = {**SHAPE, "vocab_size": V, "max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, "attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": (
        "qwen3",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
        },
    ),
}


def tokens() -> torch.Tensor:
    return torch.randint(0, V, (2, 20), generator=torch.Generator().manual_seed(0))


def saved(path: Path, model_type: str = "llama", *, shard: str | None = None, **changes: Any) -> Any:
    """A small transformers model with every parameter drawn, saved by transformers."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**COMMON, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for p in model.parameters():
        nn.init.normal_(p, std=0.2)
    model.save_pretrained(path, **({"max_shard_size": shard} if shard else {}))
    return model


def loaded(path: Path) -> nn.Module:
    with torch.device("meta"):
        model = build_model(PretrainedSettings(path=str(path)), vocab_size=V, seq_len=20)
    allocate(model, "cpu")
    load_pretrained(model, path)
    return model.eval()


@pytest.mark.parametrize("name", THEIRS)
def test_what_transformers_saves_in_shards_gives_equal_logits(name: str, tmp_path: Path) -> None:
    model_type, changes = THEIRS[name]
    theirs = saved(tmp_path, model_type, shard="20KB", **changes)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = loaded(tmp_path)
    assert (model.head.weight is model.model.embed_tokens.weight) is name.endswith("-tied")
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_large_tensors_are_read_some_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = saved(tmp_path)
    monkeypatch.setattr(files, "_PORTION_BYTES", 1000)
    with torch.no_grad():
        torch.testing.assert_close(loaded(tmp_path)(tokens()), theirs(tokens()).logits)


def test_half_precision_files_and_modules(tmp_path: Path) -> None:
    theirs = saved(tmp_path)
    theirs.to(torch.bfloat16).save_pretrained(tmp_path)
    model = loaded(tmp_path)
    assert model.get_parameter("lm_head.weight").dtype == torch.float32
    assert torch.equal(model.get_parameter("lm_head.weight"), theirs.lm_head.weight.float())
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


class Tokenizer:
    bos_token_id, eos_token_id, pad_token_id = None, 5, 6

    def save(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{}")


WRITTEN = ["llama-biases", "llama-gqa-tied", "linear", "llama3", "dynamic-beyond", "mistral", "qwen2",
           "qwen3-biases-window", "yarn-mscale"]  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_what_we_write_loads_in_transformers_with_equal_logits_and_here_as_it_was(name: str, tmp_path: Path) -> None:
    model = decoder(**SHAPES[name], attention_dropout=0.1)
    save_file({n: p.detach() for n, p in model.named_parameters()}, tmp_path / "model.safetensors", {"format": "pt"})
    write_model_files(model, Tokenizer(), tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    assert theirs.config.model_type == family_of(model.settings).model_type
    torch.testing.assert_close(theirs.eval()(tokens()).logits, model(tokens()), rtol=1e-5, atol=1e-5)
    assert theirs.generation_config.eos_token_id == 5
    assert theirs.generation_config.pad_token_id == 6
    assert (tmp_path / "tokenizer.json").exists()
    assert read_settings(tmp_path) == model.settings
    torch.testing.assert_close(loaded(tmp_path)(tokens()), model(tokens()), rtol=0, atol=0)


def test_both_forms_of_the_rotary_settings_are_written_and_read() -> None:
    llama = {**COMMON, "model_type": "llama"}
    settings = decoder_settings_from_hf({**llama, "rope_theta": 123.0, "rope_scaling": {"type": "linear", "factor": 3}})
    assert (settings.rope_theta, settings.rope_scaling) == (123.0, RopeScaling(rope_type="linear", factor=3.0))
    new = {"rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 123.0}}
    assert decoder_settings_from_hf(llama | new) == settings
    config = hf_config(settings)
    for left_out in ("rope_parameters", "rope_scaling"):
        assert decoder_settings_from_hf({k: v for k, v in config.items() if k != left_out}) == settings
    assert decoder_settings_from_hf({**llama, "rope_theta": 5.0}).rope_scaling is None


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3"])
def test_left_out_keys_mean_what_they_mean_to_transformers(model_type: str) -> None:
    ours = decoder_settings_from_hf({"model_type": model_type})
    theirs = transformers.AutoConfig.for_model(model_type)
    for field in dataclasses.fields(ours):
        if hasattr(theirs, field.name) and field.name not in ("head_dim", "attention_bias", "rope_scaling"):
            assert getattr(ours, field.name) == getattr(theirs, field.name), field.name
    assert ours.head_dim == getattr(theirs, "head_dim", None) or 4096 // 32
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "unsupported .* 'GPT2LMHeadModel'; .*qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "unsupported architecture 'LlamaForSequenceCl"),
        ({"model_type": None}, "unsupported architecture None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type='longrope' is not supported; .*yarn"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
            "layer_types: sliding and full attention",
        ),
    ],
)
def test_what_the_decoder_lacks_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**COMMON, "model_type": "llama", **changes}))
    with pytest.raises(ModelError, match=rf"model\.path: .*config\.json: {message}"):
        build_model(PretrainedSettings(path=str(tmp_path)), vocab_size=V, seq_len=20)


def edit(path: Path, **changes: Any) -> None:
    """Rewrite the weights: None takes a tensor out, a tensor puts one in."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")


def test_tensors_that_do_not_fit_are_named_but_old_rotary_buffers_pass(tmp_path: Path) -> None:
    saved(tmp_path)
    for norm, message in (
        (None, r"lacks 1 tensor \(model\.norm\.weight\), by its config\.json; mend"),
        (torch.ones(31), r"model\.norm\.weight in .* has shape \(31,\), expected \(32,\) by"),
    ):
        edit(tmp_path, **{"model.norm.weight": norm})
        with pytest.raises(ModelError, match=message):
            loaded(tmp_path)
    edit(tmp_path, **{"model.norm.weight": torch.ones(32)})
    edit(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    loaded(tmp_path)
    edit(tmp_path, **{f"model.layers.{i}.mlp.extra": torch.ones(1) for i in range(7)})
    with pytest.raises(ModelError, match=r"has 7 tensors \(model\.layers\.0\.mlp\.extra, .*, \.\.\.\) too many"):
        loaded(tmp_path)


def test_a_tied_model_may_store_either_name(tmp_path: Path) -> None:
    theirs = saved(tmp_path, tie_word_embeddings=True)
    edit(tmp_path, **{"model.embed_tokens.weight": None, "lm_head.weight": theirs.lm_head.weight.detach().clone()})
    torch.testing.assert_close(loaded(tmp_path)(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_directories_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.path: no such directory: .*nowhere"):
        loaded(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"has no config\.json; expected a Hugging Face model directory"):
        loaded(tmp_path)
    saved(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has only pytorch_model\.bin, a pickle, which can run code .*NEW"):
        loaded(tmp_path)
    weights.write_bytes(b"\x10")
    with pytest.raises(ModelError, match=r"cannot read .*model\.safetensors"):
        loaded(tmp_path)
    weights.unlink()
    saved(tmp_path, shard="20KB")
    next(tmp_path.glob("model-00002-*.safetensors")).unlink()
    with pytest.raises(ModelError, match=r"cannot read .*model-00002-of"):
        loaded(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json: cannot be read"):
        loaded(tmp_path)


class Custom(nn.Linear):
    def __init__(self, vocab_size: int, width: int = 3) -> None:
        super().__init__(width, vocab_size)


def test_targets_get_the_sizes_they_name() -> None:
    model = build_model(Target(path=f"{__name__}.Custom", kwargs={"width": 5}), vocab_size=9, seq_len=4)
    assert model.weight.shape == (9, 5)
    given = build_model(Target(path=f"{__name__}.Custom", kwargs={"vocab_size": 2}), vocab_size=9, seq_len=4)
    assert given.weight.shape == (2, 3), "given arguments win"
    with pytest.raises(ConfigError, match=r"model\._target_: cannot import nowhere\.Model"):
        build_model(Target(path="nowhere.Model"), vocab_size=9, seq_len=4)
