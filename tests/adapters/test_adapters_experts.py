"""Adapters of experts, parameters of three dimensions: against peft, under every strategy, merged, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_adapters_peft as against_peft
import test_adapters_runs as runs
import test_adapters_strategies as strategies
import torch
from finalized import theirs as load_theirs
from lazily import (
    AutoModelForCausalLM,
    GptOssConfig,
    LoraConfig,
    MixtralConfig,
    PeftModel,
    Qwen3MoeConfig,
    get_peft_model,
)
from program import forgather
from safetensors.torch import load_file
from selection import some
from test_adapters_peft import IDS
from whole_batch import equal

from forgather_cli.adapters.directory import WEIGHTS, read_adapter
from forgather_cli.adapters.load import with_adapter
from forgather_cli.adapters.merge import MergedRows
from forgather_cli.adapters.model import adapt
from forgather_cli.data.text.tokenizer import load_tokenizer
from forgather_cli.errors import ModelError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_directory")]  # peft's, of transformers

SHAPE = against_peft.SHAPE | {"vocab_size": 260, "intermediate_size": 24, "num_experts_per_tok": 2}
FAMILIES: dict[str, Any] = {
    # a dense layer before one of experts, under names that experts' layers had
    "qwen": lambda: Qwen3MoeConfig(**SHAPE, moe_intermediate_size=24, num_experts=4, mlp_only_layers=[0]),
    "mixtral": lambda: MixtralConfig(**SHAPE, num_local_experts=4, tie_word_embeddings=True),
    "transposed": lambda: GptOssConfig(**SHAPE, num_local_experts=4),
}
EXPERTS = "target_parameters=[experts.gate_up_proj,experts.down_proj]"
CASES = {
    "all": ("qwen", EXPERTS, "rank_pattern={gate_up_proj: 3, gate_proj: 5}", "alpha_pattern={down_proj: 7}"),
    "alone": ("mixtral", "target_modules=[]", EXPERTS, "use_rslora=true"),
    "gate": (
        "mixtral", "adapter.r=4", "target_modules=[v_proj]", "target_parameters=[gate.weight,down_proj,q_proj.weight]",
    ),
    "transposed": ("transposed", EXPERTS, "init_lora_weights=gaussian"),
    "whole": ("mixtral", "target_modules=[q_proj]", "trainable=[experts]"),
    "regex": ("qwen", "target_modules='.*layers.0.*(q|up)_proj'", "target_parameters=[experts.down_proj]"),
}  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for name, config in FAMILIES.items():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config()).save_pretrained(root / name)
        load_tokenizer("bytes").save(root / name)
    return {name: root / name for name in FAMILIES}


@pytest.mark.parametrize("case", CASES)
def test_forward_gradients_files_and_merge_are_those_of_peft(case: str, bases: dict[str, Path], tmp_path: Path) -> None:
    family, *words = CASES[case]
    config = against_peft.config_of(bases[family], "adapter=lora", *words, model="transformers")
    mine = against_peft.stirred(against_peft.ours(config))
    files = against_peft.saved(mine, config, tmp_path / "adapter")
    theirs = against_peft.assert_as_peft(mine, files, bases[family])
    against_peft.assert_merged_as_peft(MergedRows(mine), theirs)


def test_an_adapter_begins_as_the_base_and_by_seed_and_name(bases: dict[str, Path]) -> None:
    config = against_peft.config_of(bases["qwen"], "adapter=lora", "adapter.r=4", EXPERTS, model="transformers")
    against_peft.assert_begins_as_the_base(config, bases["qwen"])


def test_an_adapter_of_peft_is_read(bases: dict[str, Path], tmp_path: Path) -> None:
    """With all that it takes for all-linear of a model with experts: these, and the routers."""
    settings = LoraConfig(r=3, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = against_peft.stirred(get_peft_model(load_theirs(bases["mixtral"]), settings))
    theirs.save_pretrained(tmp_path)
    config = against_peft.config_of(bases["mixtral"], model="transformers")
    mine = with_adapter(against_peft.built(config), read_adapter(tmp_path))
    wanted = theirs.eval()(IDS).logits
    torch.testing.assert_close(mine(IDS), wanted, rtol=1e-5, atol=1e-5)


def account(config: Any) -> str:
    return "\n".join(adapt(against_peft.on_meta(config, 260), config.adapter, config))


def test_the_start_says_what_is_not_adapted(bases: dict[str, Path]) -> None:
    lora = ("adapter=lora", "adapter.r=4")
    said = account(against_peft.config_of(bases["mixtral"], *lora, model="transformers"))
    attention, experts, whole = 2 * (2 * 32 * 32 + 2 * 16 * 32), 2 * 4 * 3 * 24 * 32, 5 * 32 + 260 * 32 + 2 * 4 * 32
    assert f"beside 8 matrices with {attention / (attention + experts + whole):.1%} of the weights" in said
    left = (
        "model.embed_tokens.weight = lm_head.weight", "model.layers.*.mlp.gate.weight (2)",
        "model.layers.*.mlp.experts.gate_up_proj (2)", "model.layers.*.mlp.experts.down_proj (2)",
    )  # fmt: skip
    assert sorted(said.split("not adapted: ")[1].splitlines()[0].split(", ")) == sorted(left)
    assert "adapter.target_parameters=[experts.gate_up_proj,experts.down_proj]" in said
    said = account(against_peft.config_of(bases["mixtral"], *lora, EXPERTS, "trainable=[gate.w]", model="transformers"))
    assert f"beside 12 matrices with {(attention + experts) / (attention + experts + whole):.1%} of the weights" in said
    assert "trained whole: model.layers.*.mlp.gate.weight (2)\n" in said
    assert "not adapted: model.embed_tokens.weight = lm_head.weight\n" in said


MISTAKES = {
    ("target_modules=[q_proj]", "trainable=[down_proj]"): "but gate_up_proj is not; name it too",
    ("target_parameters=[experts.gate_up]",): "did you mean experts.gate_up_proj?",
    ("target_parameters=[q_proj.weight]",): "q_proj is a layer, got its weight; name it in target_modules",
    ("target_parameters=[embed_tokens.weight]",): "embed_tokens is a layer",
    ("target_parameters=[norm.weight]",): "no matrix of MixtralForCausalLM is 'norm.weight'",
    (EXPERTS, "target_modules=[q_proj]", "adapter.r=25"): "above the width of model.layers.0.mlp.experts.down_proj, 24",
    (EXPERTS, "trainable=[down_proj]"): "trainable: model.layers.0.mlp.experts.down_proj has an adapter",
}  # fmt: skip


@pytest.mark.parametrize("given", MISTAKES)
def test_parameters_that_cannot_be_adapted(given: tuple[str, ...], bases: dict[str, Path]) -> None:
    with pytest.raises(ModelError) as error:
        account(against_peft.config_of(bases["mixtral"], "adapter=lora", *given, model="transformers"))
    assert MISTAKES[given] in str(error.value)


EVERYTHING = (
    "adapter=lora", "model=transformers", "adapter.r=4", EXPERTS, "trainable=[norm.weight]",
    "adapter.trainable_token_indices={embed_tokens: [101,97], lm_head: [101,97]}",
)  # fmt: skip


@pytest.fixture(scope="module")
def alone(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return strategies.train(tmp_path_factory.mktemp("alone"), bases["qwen"], *EVERYTHING)


@pytest.mark.parametrize("layout", ["ddp", "fsdp2", "pipeline"])
def test_every_strategy_agrees_with_one_device(layout: str, alone: Any, bases: dict[str, Path], tmp_path: Path) -> None:
    strategies.assert_ranks_as_alone(alone, tmp_path, bases["qwen"], *EVERYTHING, *strategies.LAYOUTS[layout])


@pytest.mark.parametrize("family", some(["qwen", "transposed"], "transposed"))
def test_a_run_is_finalized_both_ways_and_gone_on_from(
    family: str, bases: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*runs.words(bases[family], *EVERYTHING, "max_steps=4"), "precision=bf16")
    assert forgather(*words) == 0
    assert forgather("finalize", "run", "adapter") == 0
    assert forgather("finalize", "run", "merged", "--merge", "--text", str(Path(__file__))) == 0
    apart = PeftModel.from_pretrained(load_theirs(bases[family]), "adapter").eval()
    merged, plain = load_theirs("merged"), load_theirs(bases[family])
    logits = apart(IDS).logits
    torch.testing.assert_close(merged(IDS).logits, logits, rtol=1e-4, atol=1e-4)
    assert (plain(IDS).logits - logits).abs().max() > 0.01
    written, known = merged.state_dict(), [id for id in range(SHAPE["vocab_size"]) if id not in (101, 97)]
    for name, tensor in plain.state_dict().items():
        rows = known if "embed_tokens" in name or "lm_head" in name else slice(None)
        is_trained = any(part in name for part in ("norm.weight", "_proj"))
        assert is_trained or torch.equal(tensor[rows], written[name][rows]), name
    runs.assert_same_eval_losses(capsys, ("run", "adapter", "merged"), *words[3:5], "data.seq_len=16")
    assert forgather(*words, "adapter.from_adapter=adapter", "learning_rate=0", "max_steps=1", "output_dir=on") == 0
    assert equal(load_file(runs.newest("on") / WEIGHTS), load_file("adapter/adapter_model.safetensors"))


def test_experts_stay_in_half_precision_beside_four_bits(bases: dict[str, Path]) -> None:
    pytest.importorskip("bitsandbytes")
    config = against_peft.config_of(
        bases["qwen"], "adapter=qlora", "adapter.r=4", EXPERTS, "precision=bf16", model="transformers"
    )
    said = account(config)
    assert "not in four bits, but in bfloat16: model.layers.*.mlp.experts.gate_up_proj, " in said
    assert "peft 0.21 may take gate_proj, up_proj, down_proj for layers of experts" in said
    model = against_peft.stirred(against_peft.ours(config))
    plain = load_theirs(bases["qwen"]).state_dict()
    experts = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    assert experts
    for name in experts:
        assert torch.equal(model.get_parameter(name), plain[name].bfloat16())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        against_peft.loss_of(model(IDS)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
