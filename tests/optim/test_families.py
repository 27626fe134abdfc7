"""What decays, and what Muon takes, of models of transformers: by what a parameter is there, not by its name."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from forgather_cli.config.schema import AdamWSettings, GroupSettings, MuonSettings
from forgather_cli.optim.groups import ParameterRow, describe

FAMILIES = (
    "afmoe", "apertus", "bamba", "biogpt", "bloom", "codegen", "cohere", "cohere2", "deepseek_v3", "diffllama", "doge",
    "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "falcon_mamba", "gemma2", "gemma3_text", "glm4_moe", "gpt2",
    "gpt_bigcode", "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granitemoehybrid", "jamba", "lfm2",
    "llama", "mamba", "mamba2", "mixtral", "mpt", "olmo2", "opt", "persimmon", "phi", "phi3", "qwen2_moe", "qwen3",
    "qwen3_5_text", "qwen3_next", "recurrent_gemma", "rwkv", "stablelm", "xglm", "xlstm", "zamba", "zamba2",
)  # fmt: skip
OLDER = {
    "no_decay": GroupSettings(
        regex=r"(norm|embed|wte|wpe)\w*\.weight$|(^|\.)ln_\w+\.weight$|\.bias$", settings={"weight_decay": 0.0}
    )
}
"""What ``config.yaml`` of a run that began before has."""
NAMES = ("mlp.experts.down_proj_bias", "self_attn.sinks", "self_attn.q_proj.bias")


@functools.cache
def model_of(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.CONFIG_MAPPING[family]()
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config)


def vectors_and_tables(model: nn.Module) -> set[str]:
    """What has no matrix's part: norms, embeddings, biases, one dimension."""
    found = {name for name, p in model.named_parameters() if p.dim() < 2 or name.endswith("bias")}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or "norm" in type(module).__name__.lower():
            found |= {f"{name}.{own}" for own, _ in module.named_parameters(recurse=False)}
    return found


def rows_of(option: AdamWSettings | MuonSettings, model: nn.Module) -> dict[str, ParameterRow]:
    return {row.name: row for row in describe(option, model.named_parameters(), lr=1e-3, weight_decay=0.1)}


@pytest.mark.parametrize("family", FAMILIES)
def test_matrices_decay_and_nothing_else_does(family: str) -> None:
    model = model_of(family)
    apart = vectors_and_tables(model)
    for option in (AdamWSettings(), MuonSettings()):
        rows = rows_of(option, model)
        assert {name for name, row in rows.items() if not row.weight_decay} == apart & rows.keys()
    assert not apart & {name for name, row in rows.items() if row.optimizer == "muon"}
    assert any(row.optimizer == "muon" for row in rows.values())


def test_a_run_that_began_before_keeps_its_groups() -> None:
    """Also one of which a group has an optimizer of its own: its groups, which nothing reads, are in its config."""
    rows = rows_of(MuonSettings(groups=OLDER), model_of("gpt_oss"))
    layer = "model.layers.0.{}"
    assert [rows[layer.format(name)].group for name in NAMES] == ["default.muon", "default.adamw", "no_decay.adamw"]
    rows = rows_of(MuonSettings(), model_of("gpt_oss"))
    assert {rows[layer.format(name)].group for name in NAMES} == {"no_decay.adamw"}
    for option in (AdamWSettings(groups=OLDER), MuonSettings(groups=MuonSettings().groups | OLDER)):
        own = GroupSettings(regex="mlp", optimizer=option)
        assert not list(AdamWSettings(groups={"mlp": own, **OLDER}).group_problems())
