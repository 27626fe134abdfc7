"""model=transformers: any causal language model of the library, trained as by hand and alike under every strategy; its
stages alone and in turn are the whole model."""

from __future__ import annotations

import json
import logging
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import chats
import pytest
import tiny
import torch
import yaml
from hf_models import CONFIGS, assert_as_by_hand, fresh, load_theirs, newest_model, train
from parity import LAYOUTS, Result, assert_near, assert_parity
from refusals import case, cases, table
from torch import Tensor

from forgather_cli.config.pipeline_layout import stage_layout
from forgather_cli.config.schema import AdamWSettings, PipelineSettings, TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.inference.source import load_source
from forgather_cli.loss.model_io import model_logits
from forgather_cli.models import attention
from forgather_cli.models.build import build_model, initialize
from forgather_cli.models.cache import KVCache
from forgather_cli.models.generate import generate
from forgather_cli.models.hf.build import library
from forgather_cli.models.hf.model import CausalLM
from forgather_cli.models.hf.stages import decoder_stages
from forgather_cli.models.init import allocate
from forgather_cli.models.stages import hidden_size_of, num_layers_of, splitter_of, stage_of
from forgather_cli.models.transform import numbered_blocks
from forgather_cli.optim.groups import describe
from forgather_cli.trainer.metrics import Flops

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
V = 257
FRESH = TransformersSettings(config={"model_type": "llama"})


def on_meta(option: TransformersSettings) -> CausalLM:
    with torch.device("meta"):
        return build_model(option, vocab_size=V, seq_len=16)


def filled(model: Any, option: TransformersSettings = FRESH, seed: int = 7) -> Any:
    allocate(model, "cpu")
    initialize(option, model, seed)
    return model.eval()


def model_of(option: TransformersSettings, seed: int = 7) -> CausalLM:
    """Built on meta and filled, as in a run."""
    return filled(on_meta(option), option, seed)


def settings_of(model_type: str, **settings: object) -> TransformersSettings:
    config = yaml.safe_load(f"{{model_type: {model_type}, {CONFIGS[model_type]}}}")
    return TransformersSettings(config={**config, **settings})


def tokens() -> Tensor:
    return torch.randint(0, V, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    folder = tmp_path_factory.mktemp("single")
    return {name: train(LAYOUTS["single"], ["model=transformers", fresh(name)], folder / name) for name in CONFIGS}


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_and_norms_are_those_of_a_plain_loop(name: str, runs: dict[str, Result]) -> None:
    assert_as_by_hand(runs[name], tokens())


@pytest.mark.parametrize(
    ("name", "layout"), [("gpt2", "ddp 2"), ("opt", "fsdp2 2"), ("qwen3_moe", "fsdp2 2"), ("gpt2", "single")]
)
def test_strategies_agree(name: str, layout: str, runs: dict[str, Result], tmp_path: Path) -> None:
    """GPT-2 and OPT without dropout; on one device with accumulation."""
    accumulates = ["gradient_accumulation_steps=4", "per_device_train_batch_size=1"] if layout == "single" else []
    found = train(LAYOUTS[layout], ["model=transformers", fresh(name)], tmp_path, accumulates)
    for key, value in runs[name].begin.items():
        assert torch.equal(found.begin[key], value), key
    assert_parity(found, runs[name])


def test_a_checkpoint_goes_on_in_another_layout(runs: dict[str, Result], tmp_path: Path) -> None:
    model = ["model=transformers", fresh("gpt2")]
    train(LAYOUTS["fsdp2 2"], model, tmp_path, ["+callbacks.probe.stop_after=2"])
    found = train(LAYOUTS["single"], model, tmp_path, resume=True)
    assert len(found.losses) == 2
    assert_near(found.losses, runs["gpt2"].losses, "loss")


def test_options_that_change_how_it_runs(runs: dict[str, Result], tmp_path: Path) -> None:
    settings = ["loss=linear_cross_entropy", "gradient_checkpointing=true", "attn_implementation=eager"]
    found = train(LAYOUTS["single"], ["model=transformers", fresh("gpt2")], tmp_path, settings)
    assert_near(found.losses, runs["gpt2"].losses, "loss")
    assert_near(found.norms, runs["gpt2"].norms, "gradient norm")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_cache_and_padding_change_nothing(name: str) -> None:
    model, ids = model_of(settings_of(name)), tokens()
    with torch.no_grad():
        whole = model(ids)
        cache, steps = KVCache(), []
        for part in (ids[:, :9], *ids[:, 9:].split(1, dim=1)):
            steps.append(model(part, cache=cache, last_only=True))
        assert cache.length == 16
        torch.testing.assert_close(torch.cat(steps, 1), whole[:, 8:], rtol=1e-4, atol=1e-5)
        mask = torch.ones_like(ids)
        mask[0, :5] = 0
        padded, alone = model(ids, attention_mask=mask), model(ids[:1, 5:])
        torch.testing.assert_close(padded[:1, 5:], alone, rtol=1e-4, atol=1e-5)


def test_a_class_that_takes_no_cache_says_so_once_and_writes_the_same(caplog: pytest.LogCaptureFixture) -> None:
    config = library().AutoConfig.for_model("openai-gpt", vocab_size=V, n_embd=32, n_layer=1, n_head=2)
    theirs = library().AutoModelForCausalLM.from_config(config)
    model = CausalLM(theirs, lambda: theirs).eval()
    caplog.set_level(logging.INFO, "forgather_cli")

    def written(**options: bool) -> Tensor:
        return generate(partial(model_logits, model), tokens(), max_new_tokens=4, do_sample=False, **options)

    assert torch.equal(written(use_cache=False), first := written())
    assert torch.equal(written(), first)
    said = [record.getMessage() for record in caplog.records if "keeps no keys" in record.getMessage()]
    assert len(said) == 1
    assert type(model.theirs).__name__ in said[0]


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "qwen3_moe"])
def test_documents_are_kept_apart(name: str) -> None:
    model, ids = model_of(settings_of(name)), tokens()
    with torch.no_grad():
        found = model(ids, document_ids=torch.tensor([[0] * 6 + [1] * 10, [0] * 16]))
        torch.testing.assert_close(found[:1, 6:], model(ids[:1, 6:]), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[1], model(ids)[1], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["qwen3_moe", "llama", "gpt2"])
def test_classes_of_transformers_keep_documents_apart_by_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import masking_utils
    from transformers.integrations import flex_attention as theirs

    monkeypatch.setattr(attention, "DEVICES", ("cpu",))
    monkeypatch.setattr(theirs, "compile_friendly_flex_attention", lambda *args, training, **kwargs: (
        theirs.flex_attention(*args, **kwargs)
    ))  # fmt: skip
    create = masking_utils.create_block_mask
    masks: list[Any] = []

    def noted(*args: Any, **kwargs: Any) -> Any:
        masks.append(create(*args, **kwargs | {"_compile": False}))
        return masks[-1]

    monkeypatch.setattr(masking_utils, "create_block_mask", noted)
    model = model_of(settings_of(name))
    ids, found = tokens(), torch.tensor([[0] * 6 + [1] * 10, [0] * 9 + [1] * 7])
    with monkeypatch.context() as patch:
        patch.setattr(attention, "DEVICES", ())
        expected = model(ids, document_ids=found)
        plain = model(ids)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(model(ids, document_ids=found), expected, rtol=1e-4, atol=1e-5)
    assert bool(masks) == (name != "gpt2")  # which has a mask
    changed = ids.clone()
    changed[:, 1] = (changed[:, 1] + 1) % V
    moved = (model(changed, document_ids=found) != model(ids, document_ids=found)).any(-1)
    assert not moved[found == 1].any()
    assert moved[:, 1:6].all()
    masks.clear()
    torch.testing.assert_close(model(ids), plain)  # without documents it is SDPA's
    assert not masks
    assert model.twin() is not None


def test_first_values_depend_on_name_and_seed_alone() -> None:
    model, shorter = model_of(settings_of("gpt2")), model_of(settings_of("gpt2", n_layer=1))
    name = "transformer.h.0.attn.c_proj.weight"
    unscaled = "transformer.h.0.mlp.c_fc.weight"
    assert model.get_parameter(unscaled).equal(shorter.get_parameter(unscaled))
    assert model.get_parameter(name).std().item() == pytest.approx(0.02 / 2, rel=0.1)  # 1 / sqrt(2 layers), the class's
    assert not model.get_parameter(name).equal(model_of(settings_of("gpt2"), seed=8).get_parameter(name))


def test_generation_ends_where_learned_positions_do() -> None:
    model = model_of(settings_of("gpt2"))
    found = generate(partial(model_logits, model), tokens(), max_new_tokens=100, do_sample=False)
    assert found.shape == (2, 33)  # the 33rd token comes from the 32nd position
    with pytest.raises(ModelError, match=r"GPT2LMHeadModel has 32 learned positions, got a sequence of 33 tokens"):
        model(found)


def test_experts_count_by_the_share_that_a_token_takes() -> None:
    model = model_of(settings_of("qwen3_moe"))
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    multiplied = sum(sizes.values()) - sizes["model.embed_tokens.weight"] - experts / 2  # 2 of 4 experts per token
    assert Flops.of([model]).weights == 6 * multiplied


def test_norms_and_embeddings_are_not_decayed() -> None:
    rows = describe(AdamWSettings(), model_of(settings_of("gpt2")).named_parameters(), lr=1e-3, weight_decay=0.1)
    decayed = {row.name.split(".", 3)[-1] for row in rows if row.weight_decay}
    assert decayed == {"attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight"}


def test_what_is_saved_is_read_by_rows_or_by_transformers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, whole in (("gpt2", False), ("qwen3_moe", True)):
        theirs = model_of(settings_of(name)).theirs
        theirs.save_pretrained(tmp_path / name)
        caplog.clear()
        with caplog.at_level("INFO"):
            loaded = model_of(TransformersSettings(path=str(tmp_path / name)))
        assert ("has transformers read them all" in caplog.text) is whole
        torch.testing.assert_close(loaded(tokens()), theirs(tokens()).logits)
    theirs = model_of(settings_of("gpt2")).theirs
    theirs.transformer.save_pretrained(tmp_path / "base")  # without the prefix, as the files of OpenAI's are
    shutil.copy(tmp_path / "gpt2/config.json", tmp_path / "base")
    loaded = model_of(TransformersSettings(path=str(tmp_path / "base")))
    torch.testing.assert_close(loaded(tokens()), theirs(tokens()).logits)


def test_runs_and_foreign_directories_are_sources(runs: dict[str, Result]) -> None:
    path = newest_model(runs["gpt2"].path)
    source = load_source(runs["gpt2"].path, device="cpu")
    assert isinstance(source.model, CausalLM)
    torch.testing.assert_close(source.model(tokens()), load_theirs(path)(tokens()).logits)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["eos_token_id"] == 256


def of_config(config: dict[str, Any] | str) -> None:
    model_of(TransformersSettings(config=config))


def staged(model_type: str, changes: dict[str, Any]) -> None:
    model = shaped(model_type, **changes)
    stage_of(model, STAGES, 0, splitter_of(model, None))


test_what_is_refused = table(
    *cases(ModelError, of_config,
        ({"model_type": "gtp2"}, r"model\.config: transformers \S+ has no model_type 'gtp2'; did you mean gpt2\?"),
        ({"model_type": "vit"}, r"model_type 'vit' has no causal language model"),
        ({"model_type": "gpt2", "n_layr": 2}, r"model\.config\.n_layr: GPT2Config has no such .*; did you mean n_"),
        ({"model_type": "llama", "hidden_size": 33}, r"model\.config: LlamaConfig refused it: .*33"),
        ({"model_type": "gpt2", "vocab_size": 9}, r"model\.config\.vocab_size: the tokenizer has 257 tokens, got 9"),
        ({"model_type": "gpt2", "n_positions": 8}, r"data\.seq_len: GPT2LMHeadModel has 8 learned positions .* got 16"),
        ({"model_type": "bert"}, r"model\.config\.is_decoder: BertLMHeadModel .* sees the tokens"),
        ("/nowhere", r"model\.config: no such directory: /nowhere; names on the hub are not downloaded"),
    ),
    case(ModelError, r"isolate_documents: OPTForCausalLM .* set isolate_documents=false",
         lambda: model_of(settings_of("opt"))(tokens(), document_ids=torch.zeros_like(tokens()))),
    case(ModelError, r"loss: Gemma2ForCausalLM does more to its logits .*; set loss=cross_entropy",
         lambda: model_of(settings_of("gemma2")).hidden_states(tokens())),
    case(ModelError, r"model_splitter", lambda: splitter_of(model_of(settings_of("gpt2")), None)),
    # a scale, a norm before the layers, layers of which each counts as two
    *(case(ModelError, "ForCausalLM does more than run its 3 layers .*model_splitter", staged, *given) for given in (
        ("granite", {"embedding_multiplier": 2.0}), ("nanochat", {}), ("longcat_flash", {"num_layers": 1}),
    )),
)  # fmt: skip


def test_weights_of_another_model_are_refused(runs: dict[str, Result], tmp_path: Path) -> None:
    shutil.copytree(newest_model(runs["gpt2"].path), tmp_path / "a")
    shutil.copy(newest_model(runs["llama"].path) / "model.safetensors", tmp_path / "a")
    with pytest.raises(ModelError, match=r"has \d+ missing keys \(.*by its config\.json"):
        model_of(TransformersSettings(path=str(tmp_path / "a")))


def test_a_missing_package_says_what_to_install(runs: dict[str, Result], monkeypatch: pytest.MonkeyPatch) -> None:
    library.cache_clear()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        with pytest.raises(ModelError, match=r"model=transformers: needs .* pip install 'forgather\[transformers\]'"):
            model_of(settings_of("gpt2"))
        with pytest.raises(ModelError, match=r"unsupported architecture 'GPT2LMHeadModel'.*; for others .*pip install"):
            load_source(runs["gpt2"].path, device="cpu")
        assert load_source(runs["llama"].path, device="cpu").step == 4  # a shape of the own decoder needs no package


SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "sliding_window": 4},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
}
COMMON = {**chats.SHAPE, "num_hidden_layers": 3, "max_position_embeddings": 32}
STAGES = stage_layout(PipelineSettings(schedule="1F1B"), 3, 3)


def shaped(model_type: str, **changes: Any) -> CausalLM:
    """On meta."""
    config = {"model_type": model_type, **COMMON, **SHAPES.get(model_type, {}), **changes}
    return on_meta(TransformersSettings(config=config))


def in_turn(parts: list[CausalLM], x: Tensor, cache: KVCache | None = None, **inputs: Any) -> Tensor:
    past = 0 if cache is None else cache.length
    for part in parts:
        if cache is not None:
            cache.length = past
        x = part(x, cache=cache, **inputs)
    return x


@pytest.mark.parametrize("model_type", SHAPES)
def test_stages_in_turn_are_the_whole(model_type: str) -> None:
    """With documents, with padding, and from a cache that each stage has by itself."""
    whole = filled(shaped(model_type))
    parts = [filled(stage_of(shaped(model_type), STAGES, index, decoder_stages)) for index in range(3)]
    for part, stage in zip(parts, STAGES, strict=True):
        assert [number for number, _ in numbered_blocks(part)] == [stage.first_layer]
        for name, parameter in part.named_parameters():
            assert torch.equal(parameter, whole.get_parameter(name)), name
    x, documents = tokens(), torch.tensor([[0] * 5 + [1] * 11, [0] * 9 + [1] * 7])
    padding = torch.tensor([[0] * 3 + [1] * 13, [1] * 16])
    with torch.no_grad():
        torch.testing.assert_close(in_turn(parts, x), whole(x))
        torch.testing.assert_close(in_turn(parts, x, document_ids=documents), whole(x, document_ids=documents))
        cache, kept = KVCache(), KVCache()
        for end in (10, 11, 12, 16):
            seen, mask = x[:, cache.length : end], padding[:, :end]
            torch.testing.assert_close(
                in_turn(parts, seen, cache, attention_mask=mask), whole(seen, cache=kept, attention_mask=mask)
            )
        for each in (cache, kept):
            each.select(torch.tensor([1, 1]))
        torch.testing.assert_close(in_turn(parts, x[:, :1], cache), whole(x[:, :1], cache=kept))


def test_a_model_of_a_script_is_cut_too() -> None:
    theirs = tiny.llama(vocab_size=V, **COMMON).eval()
    assert splitter_of(theirs, None) is decoder_stages
    assert (num_layers_of(theirs), hidden_size_of(theirs)) == (3, 32)
    with torch.no_grad():
        first, second, last = (stage_of(theirs, STAGES, index, decoder_stages).eval() for index in range(3))
        torch.testing.assert_close(last(second(first(tokens()))).logits, theirs(tokens()).logits)
