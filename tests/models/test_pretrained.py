"""Hugging Face directories: transformers' are read, ours are loaded by transformers, bad ones are refused. Rows for new
tokens, alike under every strategy; fine-tuning of models whose embedding and head are one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chats import SHAPE, write_model
from hf_models import assert_as_by_hand, load_theirs, newest_model, train
from paired import model as encoder_decoder
from parity import LAYOUTS, Result, assert_near, assert_parity, checkpoint_tensors
from refusals import case, cases, table
from safetensors.torch import load_file, save_file
from test_decoder import SHAPES, decoder, small
from torch import Tensor, nn

from forgather_cli.config.schema import PretrainedSettings, RopeScaling, RunSettings, Target, TransformersSettings
from forgather_cli.config.schema.decoder import family_of
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.inference.source import load_source
from forgather_cli.models import files
from forgather_cli.models.build import build_model, initialize
from forgather_cli.models.init import allocate, init_parameters
from forgather_cli.models.pretrained import decoder_settings_from_hf, hf_config, read_settings, write_model_files
from forgather_cli.models.resize import NOISE, grown_vocabulary, new_rows
from forgather_cli.models.transform import apply_activation_checkpointing, compile_blocks
from forgather_cli.run_dir import RunDir

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
V = 67
COMMON = {**SHAPE, "vocab_size": V, "max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
OLD, TOKENS, NEW = 250, 257, 264  # rows of the model, tokens of data.tokenizer=bytes, a multiple of 8
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
THEIRS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": {**LLAMA3, "rope_theta": 500.0}, "attention_bias": True}),
    "llama-tied": ("llama", {"tie_word_embeddings": True, "mlp_bias": True}),
    "mistral": ("mistral", {"sliding_window": 6}),
    "mistral-full": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 0}),
    "qwen3-tied": ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-yarn": ("qwen3", {"head_dim": 16, "rope_parameters": YARN}),
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
        model = build_model(option := PretrainedSettings(path=str(path)), vocab_size=V, seq_len=20)
    allocate(model, "cpu")
    initialize(option, model, 0)
    return model.eval()


@pytest.mark.parametrize("name", THEIRS)
def test_what_transformers_saves_in_shards_gives_equal_logits(name: str, tmp_path: Path) -> None:
    model_type, changes = THEIRS[name]
    theirs = saved(tmp_path, model_type, shard="20KB", **changes)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    model = loaded(tmp_path)
    assert (model.head.weight is model.model.embed_tokens.weight) is name.endswith("-tied")
    torch.testing.assert_close(model(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


def test_large_tensors_are_read_by_rows_and_halves_as_fp32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = saved(tmp_path)
    with monkeypatch.context() as small, torch.no_grad():
        small.setattr(files, "_PORTION_BYTES", 1000)
        torch.testing.assert_close(loaded(tmp_path)(tokens()), theirs(tokens()).logits)
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


def edit(path: Path, **changes: Any) -> None:
    """Rewrite the weights: None takes a tensor out, a tensor puts one in."""
    tensors = {**load_file(path / "model.safetensors"), **changes}
    save_file({k: v for k, v in tensors.items() if v is not None}, path / "model.safetensors")


def test_a_tied_model_may_store_either_name_and_old_rotary_buffers_pass(tmp_path: Path) -> None:
    theirs = saved(tmp_path, tie_word_embeddings=True)
    edit(tmp_path, **{"model.embed_tokens.weight": None, "lm_head.weight": theirs.lm_head.weight.detach().clone()})
    edit(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    torch.testing.assert_close(loaded(tmp_path)(tokens()), theirs(tokens()).logits, rtol=1e-5, atol=1e-5)


def of_config(changes: dict[str, Any]) -> None:
    Path("config.json").write_text(json.dumps({**COMMON, "model_type": "llama", **changes}))
    build_model(PretrainedSettings(path="."), vocab_size=V, seq_len=20)


def damaged(damage: Any, **settings: Any) -> None:
    saved(Path(), **settings)
    damage(Path("model.safetensors"))
    loaded(Path())


def edited(changes: dict[str, Any]) -> None:
    damaged(lambda _: edit(Path(), **changes))


def not_resized(kind: Any) -> None:
    write_model(Path(), "llama", OLD)
    build_model(kind(path="."), vocab_size=TOKENS, seq_len=16)


def initialised() -> None:
    bare = nn.ModuleDict({"inner": nn.Module()})
    bare["inner"].scale = nn.Parameter(torch.ones(2))
    init_parameters(bare, 0)


def of_config_file(**changes: Any) -> None:
    """An encoder-decoder that is to begin with this model."""
    transformers.AutoConfig.for_model(**changes).save_pretrained(".")
    encoder_decoder(init_from=".")


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("tril", torch.ones(2, 2).tril(), persistent=False)


def sizes(changes: dict[str, Any]) -> None:
    small(**changes)


test_what_is_refused = table(
    *cases(ModelError, of_config, *((changes, rf"model\.path: .*config\.json: {told}") for changes, told in (
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "unsupported .* 'GPT2LMHeadModel'; .*qwen3"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "unsupported architecture 'LlamaForSequenceCl"),
        ({"model_type": None}, "unsupported architecture None"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2}}, "rope_type='longrope' is not supported; .*yarn"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
         "layer_types: sliding and full attention"),
    ))),
    case(ModelError, r"model\.path: no such directory: .*nowhere", loaded, Path("nowhere")),
    case(ModelError, r"has no config\.json; expected a Hugging Face model directory", loaded, Path()),
    case(ModelError, r"has only pytorch_model\.bin, a pickle, which can run code .*NEW",
         damaged, lambda weights: weights.rename("pytorch_model.bin")),
    case(ModelError, r"cannot read .*model\.safetensors", damaged, lambda weights: weights.write_bytes(b"\x10")),
    case(ModelError, r"cannot read .*model-00002-of",
         damaged, lambda _: next(Path().glob("model-00002-*.safetensors")).unlink(), shard="20KB"),
    case(ModelError, r"config\.json: cannot be read", damaged, lambda _: Path("config.json").write_text("{")),
    *cases(ModelError, edited,
        ({"model.norm.weight": None}, r"lacks 1 tensor \(model\.norm\.weight\), by its config\.json; mend"),
        ({"model.norm.weight": torch.ones(31)}, r"model\.norm\.weight in .* has shape \(31,\), expected \(32,\) by"),
        ({f"model.layers.{i}.mlp.extra": torch.ones(1) for i in range(7)},
         r"has 7 tensors \(model\.layers\.0\.mlp\.extra, .*, \.\.\.\) too many"),
    ),
    *(case(ModelError, r"data\.tokenizer: has 257 tokens, .* only 250; set model\.resize_vocab", not_resized, kind)
      for kind in (PretrainedSettings, TransformersSettings)),
    case(ConfigError, r"model\._target_: cannot import nowhere\.Model",
         build_model, Target(path="nowhere.Model"), vocab_size=9, seq_len=4),
    # settings of the decoder
    *cases(ModelError, sizes,
        ({"vocab_size": 100}, r"model\.vocab_size: the tokenizer has 101 tokens, got 100; set model\.vocab_size=null"),
        ({"hidden_size": 30}, r"model\.hidden_size: must be a multiple of model\.num_attention_heads=4, got 30"),
        ({"num_key_value_heads": 3}, r"model\.num_key_value_heads: must divide model\.num_attention_heads=4, got 3"),
        ({"head_dim": 7}, r"model\.head_dim: .* even head size, got 7"),
        ({"qk_norm": True, "mlp_bias": True}, r"model\.qk_norm=true, model\.mlp_bias=true: no Hugging Face"),
        ({"sliding_window": 4, "mlp_bias": True}, r"model\.sliding_window=4, model\.mlp_bias=true: no Hugging Face"),
        ({"attention_output_bias": True}, r"model\.attention_output_bias=true: no Hugging Face architecture"),
    ),
    # modules of the user's
    case(ModelError, r"cannot initialise inner\.scale: Module has no reset_parameters", initialised),
    case(ModelError, r"Masked has no reset_buffers\(\) that computes 0\.tril .*construct_model_on=cpu",
         lambda: allocate(nn.Sequential(Masked().to("meta")), "cpu")),
    case(ModelError, r"gradient_checkpointing: Linear has no nn\.ModuleList .*gradient_checkpointing=false",
         apply_activation_checkpointing, nn.Linear(2, 2)),
    case(ModelError, "torch_compile: Linear has no", compile_blocks, nn.Linear(2, 2), RunSettings()),
    # the model that an encoder-decoder begins with
    case(ModelError, r"model\.init_from: .*is no Qwen3 model but llama", of_config_file, model_type="llama"),
    case(ModelError, r"model\.init_from: no such directory", encoder_decoder, init_from="nothing"),
    case(ModelError, r"model\.init_from: .*sliding window", of_config_file, model_type="qwen3",
         use_sliding_window=True, sliding_window=8, num_hidden_layers=2, layer_types=["sliding_attention"] * 2),
)  # fmt: skip


class Custom(nn.Linear):
    def __init__(self, vocab_size: int, width: int = 3) -> None:
        super().__init__(width, vocab_size)


def test_targets_get_the_sizes_they_name() -> None:
    model = build_model(Target(path=f"{__name__}.Custom", kwargs={"width": 5}), vocab_size=9, seq_len=4)
    assert model.weight.shape == (9, 5)
    given = build_model(Target(path=f"{__name__}.Custom", kwargs={"vocab_size": 2}), vocab_size=9, seq_len=4)
    assert given.weight.shape == (2, 3), "given arguments win"


def test_new_rows_stand_at_the_mean_and_apart() -> None:
    weight = torch.randn(9000, 16, generator=torch.Generator().manual_seed(0)) * 3 + 5
    rows = new_rows(weight, 400, name="a", seed=1)
    torch.testing.assert_close(rows.mean(0), weight.mean(0), atol=0.01, rtol=0)
    torch.testing.assert_close(rows.std(0), NOISE * weight.std(0), rtol=0.2, atol=0)
    assert rows.equal(new_rows(weight, 400, name="a", seed=1))
    assert not rows.equal(new_rows(weight, 400, name="b", seed=1))
    assert not rows.equal(new_rows(weight, 400, name="a", seed=2))
    assert new_rows(ones := torch.ones(5, 4, dtype=torch.bfloat16), 2).equal(ones[:2])
    assert new_rows(torch.arange(5.0), 3).shape == (3,)


@pytest.mark.parametrize(("rows", "multiple", "expected"), [(250, None, 257), (250, 64, 320), (300, None, 300)])
def test_a_vocabulary_grows_and_never_shrinks(rows: int, multiple: int | None, expected: int) -> None:
    option = PretrainedSettings(path="x", resize_vocabulary=True, pad_vocab_to_multiple_of=multiple)
    assert grown_vocabulary(option, rows, tokens=TOKENS) == expected


def grown(path: Path) -> list[str]:
    words = ["data.tokenizer=bytes", "resize_vocabulary=true", "pad_vocab_to_multiple_of=8"]
    return ["model=pretrained", f"model.path={path}", *words]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    kinds = {"tied": {"tie_word_embeddings": True, "num_hidden_layers": 4}, "untied": {}}
    for name, settings in kinds.items():
        write_model(folder / name, "llama", OLD, **settings)
    return {name: folder / name for name in kinds}


@pytest.fixture(scope="module")
def runs(directories: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: train(LAYOUTS["single"], grown(path), folder / name) for name, path in directories.items()}


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_new_rows_are_added_and_trained_as_by_a_plain_loop_and_transformers_loads_them(
    kind: str, directories: dict[str, Path], runs: dict[str, Result]
) -> None:
    stored: dict[str, Tensor] = load_theirs(directories[kind]).state_dict()
    for name in {"tied": [EMBEDDING], "untied": [EMBEDDING, HEAD]}[kind]:
        rows = runs[kind].begin[name]
        assert rows[:OLD].equal(stored[name])
        assert rows[OLD:].equal(new_rows(stored[name], NEW - OLD, name=name, seed=42))
    assert (HEAD in runs[kind].begin) is (kind == "untied")
    run, ids = runs[kind], torch.arange(30, 46)[None]
    assert_as_by_hand(run, ids, trains_padding=True)
    ends = load_theirs(newest_model(run.path))
    assert ends.config.vocab_size == NEW
    torch.testing.assert_close(load_source(run.path, device="cpu").model(ids), ends(ids).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kind", "layout"), [("tied", "ddp 2"), ("tied", "ZBVZeroBubble 2"), ("untied", "fsdp2 2")])
def test_every_strategy_begins_and_learns_alike(
    kind: str, layout: str, directories: dict[str, Path], runs: dict[str, Result], tmp_path: Path
) -> None:
    found = train(LAYOUTS[layout], grown(directories[kind]), tmp_path)
    for name, rows in runs[kind].begin.items():
        assert torch.equal(found.begin[name], rows), name
    assert_parity(found, runs[kind])


def test_a_resized_tied_model_goes_on_in_other_layouts(
    directories: dict[str, Path], runs: dict[str, Result], tmp_path: Path
) -> None:
    train(LAYOUTS["1F1B 2"], grown(directories["tied"]), tmp_path, ["+callbacks.probe.stop_after=1"])
    assert [name for name in checkpoint_tensors(RunDir(tmp_path)) if name in (EMBEDDING, HEAD)] == [EMBEDDING]
    train(LAYOUTS["fsdp2 2"], grown(directories["tied"]), tmp_path, ["+callbacks.probe.stop_after=2"], resume=True)
    found = train(LAYOUTS["single"], grown(directories["tied"]), tmp_path, resume=True)
    assert_near(found.losses, runs["tied"].losses, "loss")


@pytest.mark.parametrize("model_type", ["llama", "mixtral"])
def test_a_model_of_transformers_grows_too(model_type: str, tmp_path: Path) -> None:
    settings = {"num_local_experts": 4} if model_type == "mixtral" else {"tie_word_embeddings": True}
    stored = write_model(tmp_path, model_type, OLD, **settings)
    option = TransformersSettings(path=str(tmp_path), resize_vocabulary=True, pad_vocab_to_multiple_of=8)
    with torch.device("meta"):
        model: Any = build_model(option, vocab_size=TOKENS, seq_len=16)
    allocate(model, "cpu")
    initialize(option, model, 42)
    rows = model.get_parameter(EMBEDDING)
    assert rows[:OLD].equal(stored.get_parameter(EMBEDDING))
    assert rows[OLD:].equal(new_rows(stored.get_parameter(EMBEDDING), NEW - OLD, name=EMBEDDING, seed=42))
    assert model.vocab_size == model.config.vocab_size == NEW
    ids = torch.arange(30, 46)[None]
    torch.testing.assert_close(model(ids)[..., :OLD], stored(ids).logits)
