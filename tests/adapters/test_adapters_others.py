"""Adapters that peft has written, of every kind: computed as peft does, or refused by name."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import chats
import pytest
import test_adapters_experts as experts
import test_adapters_peft as against_peft
import test_adapters_runs as runs
import test_adapters_strategies as strategies
import tiny
import torch
from finalized import refused
from finalized import theirs as load_theirs
from lazily import (
    AutoModelForCausalLM,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LoraConfig,
    Mamba2Config,
    MambaConfig,
    PeftModel,
    get_peft_model,
)
from program import forgather, refusal
from safetensors.torch import load_file, save_file
from test_adapters_peft import IDS, SHAPE, built, config_of
from torch import nn
from whole_batch import equal

from forgather_cli.adapters import directory
from forgather_cli.adapters.directory import CONFIG, WEIGHTS, read_adapter
from forgather_cli.adapters.load import with_adapter
from forgather_cli.adapters.merge import write_merged
from forgather_cli.adapters.model import adapt
from forgather_cli.checkpoint.load import ADAPTER_PREFIX
from forgather_cli.config.load import reload_config
from forgather_cli.data.chat.template import CHATML
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import ModelError, ProofError
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.finalize.prove import Measured, compare_merge
from forgather_cli.finalize.run import finalize
from forgather_cli.inference.source import locate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_directory")]  # peft's, of transformers

TEXT = ("--text", str(Path(__file__)))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, shape = tmp_path_factory.mktemp("bases"), SHAPE | {"vocab_size": 260}
    small = {"vocab_size": 260, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    state = {"vocab_size": 260, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    made: dict[str, Any] = {
        "llama": lambda: tiny.llama(**shape),
        "tied": lambda: tiny.llama(**shape, tie_word_embeddings=True),
        "gemma": lambda: AutoModelForCausalLM.from_config(GemmaConfig(**shape)),
        "gpt2": lambda: AutoModelForCausalLM.from_config(GPT2Config(**small)),
        "neox": lambda: AutoModelForCausalLM.from_config(
            GPTNeoXConfig(vocab_size=260, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                          num_attention_heads=4, max_position_embeddings=64)
        ),
        "mamba": lambda: AutoModelForCausalLM.from_config(MambaConfig(**state)),
        "mamba2": lambda: AutoModelForCausalLM.from_config(
            Mamba2Config(**state, num_heads=4, head_dim=16, n_groups=1)
        ),
        "mixtral": lambda: AutoModelForCausalLM.from_config(experts.FAMILIES["mixtral"]()),
    }  # fmt: skip
    for name, make in made.items():
        torch.manual_seed(0)
        make().save_pretrained(root / name)
        load_tokenizer("bytes").save(root / name)
    return {name: root / name for name in made}


def of_peft(base: Path, directory: str = "peft", *, start: str | None = None, **settings: Any) -> Any:
    """The model in peft, as if trained, and its adapter in ``directory``. ``start``: saves converted, from there."""
    torch.manual_seed(1)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "task_type": "CAUSAL_LM"} | settings
    theirs = get_peft_model(load_theirs(base), LoraConfig(**settings))
    convert = {}
    if start is not None:
        theirs.peft_config["default"].init_lora_weights = True
        theirs.save_pretrained(start)
        theirs.peft_config["default"].init_lora_weights = settings["init_lora_weights"]
        convert = {"path_initial_model_for_weight_conversion": start}
    against_peft.stirred(theirs)
    theirs.save_pretrained(directory, **convert)
    return theirs.eval()


def edited(directory: str, **changes: Any) -> Path:
    file = Path(directory, CONFIG)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    return Path(directory)


def ours_of(base: Path, directory: str = "peft", model: str = "transformers") -> nn.Module:
    return with_adapter(built(config_of(base, model=model)), read_adapter(Path(directory)))


# ------------------------------------------------------------------------------------------------------------- starts

CHANGING = {
    "pissa": "merge_and_unload", "pissa_niter_4": "path_initial_model_for_weight_conversion",
    "olora": "merge_and_unload", "OLoRA": "merge_and_unload", "corda": "path_initial_model_for_weight_conversion",
    "lora_ga": "path_initial_model_for_weight_conversion", "loftq": "merge_and_unload", "of_tomorrow": "merge",
}  # fmt: skip


@pytest.mark.parametrize("kind", CHANGING)
def test_a_start_that_changes_the_base_is_refused_by_name(
    kind: str, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    of_peft(bases["llama"])
    edited("peft", init_lora_weights=kind, corda_config={"x": 1}, lora_ga_config={"x": 1}, loftq_config={"x": 1})
    with pytest.raises(ModelError) as error:
        read_adapter(Path("peft"))
    assert f"init_lora_weights {kind!r}" in str(error.value)
    assert CHANGING[kind] in str(error.value)
    assert CHANGING[kind] in refused(capsys, "peft", "whole", "--merge", *TEXT)


@pytest.mark.parametrize("kind", ["pissa", "olora"])
def test_the_ways_out_of_it_that_are_said_give_what_was_trained(
    kind: str, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = of_peft(bases["llama"], init_lora_weights=kind)
    assert "init_lora_weights" in refused(capsys, "peft", "whole", "--merge", *TEXT)
    wanted = theirs(IDS).logits
    loaded = PeftModel.from_pretrained(load_theirs(bases["llama"]), "peft")
    torch.testing.assert_close(loaded.merge_and_unload()(IDS).logits, wanted, rtol=1e-4, atol=1e-4)
    theirs = of_peft(bases["llama"], "converted", start="start", init_lora_weights=kind)
    torch.testing.assert_close(ours_of(bases["llama"], "converted")(IDS), theirs(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["eva", "orthogonal", "mica", "gaussian", False])
def test_other_starts_are_plain_lora(kind: Any, bases: dict[str, Path]) -> None:
    theirs = of_peft(bases["llama"], init_lora_weights=kind)
    torch.testing.assert_close(ours_of(bases["llama"])(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------------------ what it means


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapted_embedding_is_scaled_as_the_embedding_is(dtype: torch.dtype, bases: dict[str, Path]) -> None:
    config = config_of(bases["gemma"], "adapter=lora", "target_modules=[embed_tokens,q_proj]", model="transformers")
    mine = against_peft.stirred(against_peft.ours(config, vocab_size=260))
    files = against_peft.saved(mine, config, Path("adapter"))
    against_peft.assert_as_peft(mine, files, bases["gemma"])
    write_merged(locate(files), read_adapter(files), Path("merged"))
    torch.testing.assert_close(load_theirs("merged")(IDS).logits, mine(IDS), rtol=1e-4, atol=1e-4)
    half = PeftModel.from_pretrained(load_theirs(bases["gemma"], dtype=dtype), files).eval()(IDS).logits
    limit = 1e-4 if dtype == torch.float32 else 0.2
    torch.testing.assert_close(half.float(), mine(IDS), rtol=0, atol=limit)


def test_what_peft_writes_without_a_task_is_read(bases: dict[str, Path]) -> None:
    theirs = of_peft(bases["llama"], task_type=None)
    assert json.loads(Path("peft", CONFIG).read_text())["auto_mapping"]
    torch.testing.assert_close(ours_of(bases["llama"])(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)


def test_parameters_without_modules_adapt_no_module(bases: dict[str, Path]) -> None:
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    theirs = of_peft(bases["mixtral"], target_modules=None, target_parameters=parameters)
    edited("peft", target_modules=None)  # as peft 0.17 has written it
    assert read_adapter(Path("peft")).settings.target_modules == []
    again = PeftModel.from_pretrained(load_theirs(bases["mixtral"]), "peft")
    torch.testing.assert_close(again(IDS).logits, theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours_of(bases["mixtral"])(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    on = ("model=transformers", "adapter=lora", "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0")
    assert forgather(*runs.words(bases["mixtral"], *on)) == 0
    assert equal(load_file(runs.newest("run") / WEIGHTS), load_file(f"peft/{WEIGHTS}"))


EMBEDDINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "targeted": ("llama", {"target_modules": ["embed_tokens", "lm_head", "q_proj"]}),
    "tied": ("tied", {"target_modules": ["embed_tokens", "q_proj"]}),
    "asked": ("llama", {}),
    "asked, tied": ("tied", {}),
}


@pytest.mark.parametrize("case", EMBEDDINGS)
def test_copies_of_the_bases_embeddings_are_known_for_what_they_are(
    case: str, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    name, settings = EMBEDDINGS[case]
    theirs = of_peft(bases[name], "peft", **settings)
    theirs.save_pretrained("peft", save_embedding_layers=True)
    copies = [name for name in load_file(Path("peft", WEIGHTS)) if "lora_" not in name]
    assert copies
    for model in ("pretrained", "transformers"):
        torch.testing.assert_close(ours_of(bases[name], model=model)(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    on = ("model=transformers", "adapter=lora", "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0")
    assert forgather(*runs.words(bases[name], *on)) == 0
    kept = load_file(runs.newest("run") / WEIGHTS)
    assert equal(kept, {name: t for name, t in load_file(Path("peft", WEIGHTS)).items() if name in kept})
    assert not kept.keys() & set(copies)
    tensors = load_file(Path("peft", WEIGHTS))
    tensors[copies[0]][3] += 1
    save_file(tensors, Path("peft", WEIGHTS), metadata={"format": "pt"})
    capsys.readouterr()
    assert "holds another" in " ".join(refusal(capsys, *runs.words(bases[name], *on, "output_dir=other")).split())


@pytest.mark.parametrize("layout", ["fsdp2", "pipeline"])
def test_ranks_go_on_from_an_adapter_of_peft(layout: str, bases: dict[str, Path]) -> None:
    """With copies of the embeddings, of which each rank has its part."""
    of_peft(bases["llama"], **EMBEDDINGS["targeted"][1])
    assert any("base_layer" in name for name in load_file(Path("peft", WEIGHTS)))
    on = ("adapter=lora", "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0", *strategies.LAYOUTS[layout])
    assert forgather(*runs.words(bases["llama"], *on)) == 0
    stored = load_file(Path("peft", WEIGHTS))
    assert equal(load_file(runs.newest("run") / WEIGHTS), {n: t for n, t in stored.items() if "base_layer" not in n})


def test_what_was_trained_whole_is_not_dropped_in_silence(
    bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    of_peft(bases["llama"], modules_to_save=["norm"])
    on = ("adapter=lora", "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0")
    said = " ".join(refusal(capsys, *runs.words(bases["llama"], *on)).split())
    assert "holds another model.layers.0.input_layernorm.weight than the base; name it in trainable" in said
    assert forgather(*runs.words(bases["llama"], *on, "trainable=[norm]")) == 0
    assert equal(load_file(runs.newest("run") / WEIGHTS), load_file(f"peft/{WEIGHTS}"))


# --------------------------------------------------------------------------------------------------------- comparison


@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("case", ["as it is", "another"])
def test_finalize_compares_with_peft_what_peft_has_written(case: str, merge: bool, bases: dict[str, Path]) -> None:
    of_peft(bases["llama"], base_model_name_or_path=None)
    Path("base").symlink_to(bases["llama"])
    edited("peft", base_model_name_or_path="../base" if merge else str(bases["llama"]))  # ours and theirs find it

    def change(line: str) -> None:
        """What peft will read is another adapter than ours was, as where one of us has misread it."""
        if case == "another" and "peft makes of" in line:
            edited("peft", lora_alpha=9)
        elif case == "another" and not merge and "comparing" in line:
            (made,) = (path.parent for path in Path().rglob(CONFIG) if path.parent != Path("peft"))
            edited(str(made), lora_alpha=9)

    options = FinalizeOptions(merge=merge, text=Path(__file__))
    if case == "another":
        with pytest.raises(ProofError, match="a logit differs by"):
            finalize(Path("peft"), Path("made"), options, change)
        assert not Path("made").exists()
        return
    proof = finalize(Path("peft"), Path("made"), options, change)["proof"]
    assert (proof["merge"]["max_logit_difference_to_peft"] if merge else proof["max_logit_difference"]) < 1e-4


def test_ours_is_not_compared_a_second_time(bases: dict[str, Path]) -> None:
    assert forgather(*runs.words(bases["llama"], "adapter=lora", "adapter.r=2", "max_steps=1")) == 0
    proof = finalize(Path("run"), Path("made"), FinalizeOptions(merge=True))["proof"]
    assert "max_logit_difference_to_peft" not in proof["merge"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merge_into_a_base_that_rounds_nothing_is_bounded_by_logits(dtype: torch.dtype) -> None:
    logits = torch.zeros(2, 3)
    apart, merged = Measured([1.0], 2, logits), Measured([1.0], 2, logits + 1e-3)
    if dtype == torch.bfloat16:
        assert compare_merge(merged, apart, None, None, 1e-4, rounds=True)["max_logit_difference"] == pytest.approx(
            1e-3
        )
        return
    with pytest.raises(ProofError, match=r"base and adapter apart: a logit differs by 0\.001, the bound is 0\.0001"):
        compare_merge(merged, apart, None, None, 1e-4, rounds=False)
    assert compare_merge(merged, apart, None, None, 2e-3, rounds=False)["max_logit_difference"] == pytest.approx(1e-3)


def test_a_merge_that_differs_without_moving_the_perplexity_is_not_written(bases: dict[str, Path]) -> None:
    of_peft(bases["llama"])

    def change(line: str) -> None:
        if "measuring the source" in line:
            (made,) = Path().rglob("made/model.safetensors")
            tensors = load_file(made)
            tensors["lm_head.weight"][7] += 1e-3
            save_file(tensors, made, metadata={"format": "pt"})

    with pytest.raises(ProofError, match="not base and adapter apart: a logit differs by"):
        finalize(Path("peft"), Path("whole"), FinalizeOptions(merge=True, text=Path(__file__)), change)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma"])
def test_the_start_compares_with_peft_what_peft_has_written(
    family: str, bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import peft

    experts = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]} if family == "mixtral" else {}
    modules = ["embed_tokens", "q_proj"]
    of_peft(bases[family], target_modules=modules, alpha_pattern={"q_proj": 3}, **experts)
    on = ("model=transformers", "adapter=lora", "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0")
    assert forgather(*runs.words(bases[family], *on)) == 0
    monkeypatch.setattr(peft.tuners.lora.model, "get_pattern_key", lambda patterns, name: name)  # another peft's rule
    said = " ".join(refusal(capsys, *runs.words(bases[family], *on, "output_dir=other")).split())
    assert "self_attn.q_proj.weight by 2, and here that is 0.75; merge the adapter with peft" in said


def test_one_that_peft_cannot_load_is_said(bases: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    of_peft(bases["mamba"], target_modules=["in_proj"])
    name = f"{ADAPTER_PREFIX}backbone.layers.0.mixer.out_proj"
    tensors = load_file(f"peft/{WEIGHTS}")
    for number in range(2):
        name = f"{ADAPTER_PREFIX}backbone.layers.{number}.mixer.out_proj"
        tensors |= {f"{name}.lora_A.weight": torch.zeros(4, 64), f"{name}.lora_B.weight": torch.zeros(32, 4)}
    save_file(tensors, f"peft/{WEIGHTS}", metadata={"format": "pt"})
    edited("peft", target_modules=["in_proj", "out_proj"])
    on = ("model=transformers", "adapter=lora", "adapter.from_adapter=peft", "max_steps=1")
    assert "cannot load it" in " ".join(refusal(capsys, *runs.words(bases["mamba"], *on)).split())


# -------------------------------------------------------------------------------------------------------------- mamba


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_layers_that_peft_does_not_adapt_are_said(family: str, bases: dict[str, Path]) -> None:
    def said(*words: str) -> list[str]:
        config = config_of(bases[family], "adapter=lora", "adapter.r=2", *words, model="transformers")
        return [line for line in adapt(against_peft.on_meta(config, 260), config.adapter, config) if "out_proj" in line]

    (line,) = said()
    assert "peft 0.21 refuses" in line
    paste = line.rpartition("set ")[2]
    assert paste.startswith("adapter.target_modules=[in_proj")
    assert not [line for line in said(paste) if "peft" in line]


# ----------------------------------------------------------------------------------------------------------- going on


def test_every_setting_that_differs_is_named_at_once(
    bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    of_peft(bases["mixtral"], target_modules="all-linear")
    found = json.loads(Path("peft", CONFIG).read_text())
    assert found["rank_pattern"]  # by itself, of experts that are fused
    on = ("model=transformers", "adapter=lora", "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0")
    wrong = (
        "adapter.r=3", "lora_alpha=5", "rank_pattern={q_proj: 2}", "alpha_pattern={q_proj: 7}",
        "target_modules=[q_proj]",
    )  # fmt: skip
    said = " ".join(refusal(capsys, *runs.words(bases["mixtral"], *on, *wrong)).split())
    for each in ("r=4 (got 3)", "lora_alpha=8", "rank_pattern={", "alpha_pattern={", "target_modules=["):
        assert f"adapter.{each}" in said
    assert forgather(*runs.words(bases["mixtral"], *on)) == 0
    assert equal(load_file(runs.newest("run") / WEIGHTS), load_file(f"peft/{WEIGHTS}"))
    assert forgather(*runs.words(bases["mixtral"], *on, "adapter.r=3", "output_dir=other")) == 2  # not taken for it
    said = capsys.readouterr().err
    assert "r=4 (got 3)" in said
    assert "target_modules" not in said  # whatever the order in which the file has them
    entry = "+adapter.rank_pattern.q_proj=2"  # the adapter's own does not take its place
    assert "adapter.rank_pattern={" in refusal(capsys, *runs.words(bases["mixtral"], *on, entry, "output_dir=other"))


ENDLESS = "([a-z._0-9]+)+X"
OF_STRANGERS: dict[str, tuple[dict[str, Any], str]] = {
    "targets": ({"target_modules": ENDLESS}, repr(ENDLESS)),
    "ranks": ({"rank_pattern": {ENDLESS: 2}}, repr(ENDLESS)),
    "scales": ({"alpha_pattern": {ENDLESS: 2}}, repr(ENDLESS)),
    "no expression": ({"rank_pattern": {"(q_proj": 2}}, "'(q_proj'"),
    "too deep": ({"target_modules": "(" * 9999 + ")" * 9999}, "'(((("),
    "r": ({"r": 10**9}, "r is 1,000,000,000, and the matrices in adapter_model.safetensors are up to 48 wide"),
    "r of a layer": ({"rank_pattern": {"q_proj": 10**9}}, "r is 1,000,000,000, "),
}


@pytest.mark.parametrize("case", OF_STRANGERS)
def test_settings_of_strangers_end_in_a_sentence(
    case: str, bases: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of_peft(bases["llama"])
    load_tokenizer("bytes").save(Path("peft"))
    changes, named = OF_STRANGERS[case]
    edited("peft", **changes)
    monkeypatch.setattr(directory, "_SECONDS", 0.3)
    train = runs.words(bases["llama"], "adapter=lora", "adapter.from_adapter=peft", "max_steps=1")
    commands = {
        "eval": ["eval", "peft", f"data.files=[{Path(__file__)}]", "data=text", "seq_len=32", "device=cpu"],
        "generate": ["generate", "peft", "--prompt", "a", "--max-new-tokens", "1", "--device", "cpu"],
        "finalize": ["finalize", "peft", "new"],
        "merge": ["finalize", "peft", "new", "--merge"],
        "plan": ["plan", *runs.words(bases["llama"], "adapter=lora", "adapter.from_adapter=peft")[1:]],
        "train": train,
    }
    for name in commands if case == "targets" else ("generate", "train"):
        began = time.process_time()
        said = " ".join(refusal(capsys, *commands[name]).split())
        assert said.count("error: ") == 1
        assert named in said
        assert "peft" in said or name == "train"
        assert time.process_time() - began < 4
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


@pytest.mark.parametrize(
    "wanted",
    [
        r".*\.(q|v)_proj",
        r"model\.layers\.([0-9]|1[0-5])\..*_proj",
        r"(?:.*?(?:language|layers).*?(?:self_attn|mlp).*?(?:q_proj|k_proj|down_proj).*?)|(?:\bmodel\.x.*)",  # unsloth
    ],
)
def test_expressions_that_people_write_are_those_of_peft(wanted: str, bases: dict[str, Path]) -> None:
    """And one for each layer, as peft writes ranks that were found by data: more than ``re`` keeps."""
    each = {rf"model\.layers\.{n}\.self_attn\.q_proj": 2 + n % 2 for n in range(600)}
    theirs = of_peft(bases["llama"], target_modules=wanted, rank_pattern={**dict(reversed(each.items())), "v_proj": 3})
    torch.testing.assert_close(ours_of(bases["llama"])(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)


def test_without_settings_the_adapters_own_are_taken(bases: dict[str, Path]) -> None:
    of_peft(
        bases["mixtral"], target_modules=["q_proj"], target_parameters=["experts.down_proj"],
        rank_pattern={"experts.down_proj": 2}, alpha_pattern={"q_proj": 3, "of_no_layer": 5}, use_rslora=True,
    )  # fmt: skip
    on = ("model=transformers", "adapter=lora", "adapter.from_adapter=peft", "max_steps=1", "learning_rate=0")
    assert forgather(*runs.words(bases["mixtral"], *on)) == 0
    assert equal(load_file(runs.newest("run") / WEIGHTS), load_file(f"peft/{WEIGHTS}"))
    assert forgather("resume", "run", "max_steps=2") == 0
    targets = ("target_modules='.*q_proj'", "output_dir=named")
    assert forgather(*runs.words(bases["mixtral"], *on, *targets)) == 0
    assert reload_config(Path("named"), []).config.adapter.target_modules == ".*q_proj"  # a resume has the run's


@pytest.mark.parametrize("family", ["gpt2", "neox"])
def test_narrower_targets_are_named_for_every_class(
    family: str, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    targets = {"gpt2": ["c_attn", "c_fc"], "neox": ["query_key_value", "dense_h_to_4h"]}[family]
    of_peft(bases[family], target_modules=targets)
    on = ("model=transformers", "adapter=lora", "adapter.from_adapter=peft", "max_steps=1")
    said = "".join(refusal(capsys, *runs.words(bases[family], *on, f"target_modules=[{targets[0]}]")).split())
    assert f"adapter.target_modules=[{','.join(sorted(targets))}]" in said
    assert "belongstonothing" in said


def test_an_adapter_in_the_place_of_a_model_says_how_to_go_on(
    bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    of_peft(bases["llama"])
    words = runs.words(Path("peft"), "max_steps=1", "learning_rate=0")
    said = " ".join(refusal(capsys, *words).split())
    paste = next(word for word in said.split() if word.startswith("adapter.from_adapter="))
    assert forgather(*runs.words(bases["llama"], "adapter=lora", paste, "max_steps=1", "learning_rate=0")) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_turns_whose_end_is_not_learned_are_warned_of(tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    chats.write_chats(Path("chats.jsonl"), 40)
    tokens = len(chats.write_tokenizer(Path("base"), CHATML, ["<|endoftext|>"]))
    chats.write_model(Path("base"), "llama", tokens + 6, tie_word_embeddings=tied)
    words = (
        "train", "lora_finetune", "model.path=base", "data.files=[chats.jsonl]", "seq_len=96", "max_steps=1",
        "global_batch_size=2", "eval_strategy=no", "callbacks=minimal", "device=cpu", "output_dir=run",
        "target_modules=[q_proj]", "gradient_checkpointing=false",
    )  # fmt: skip
    assert forgather(*words) == 0
    (said,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "rows of 2" in r.getMessage()]
    assert "the end of a turn is not learned" in said
    paste = said.rpartition("without '")[2].removesuffix("'")
    assert paste.startswith("adapter.trainable_token_indices={")
    loss = next(word for word in said.replace(";", "").split() if word == "loss=cross_entropy")
    caplog.clear()
    assert forgather(*words, paste, loss, "learning_rate=0", "output_dir=on") == 0
    assert not [r for r in caplog.records if "rows of 2 added" in r.getMessage()]
    rows = {n: t for n, t in load_file(runs.newest("on") / WEIGHTS).items() if "token_adapter" in n}
    assert len(rows) == (1 if tied else 2)
    for name, found in rows.items():  # as where they are trained unasked
        whole = load_file("base/model.safetensors")[name.removeprefix(ADAPTER_PREFIX).split(".token")[0] + ".weight"]
        torch.testing.assert_close(found, whole[:tokens].mean(0).expand(2, -1), rtol=1e-2, atol=1e-3)
