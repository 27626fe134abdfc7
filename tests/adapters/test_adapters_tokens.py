"""Rows of some tokens that are trained beside an adapter: against peft, under every strategy, merged, and refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_adapters_peft as against_peft
import torch
from peft import PeftModel
from safetensors.torch import load_file
from test_adapters_peft import IDS, SHAPE
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from forgather_cli.adapters.directory import WEIGHTS, read_adapter
from forgather_cli.adapters.load import with_adapter
from forgather_cli.adapters.merge import MergedRows
from forgather_cli.models.build import build_model, initialize
from forgather_cli.models.init import allocate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("own_directory")]  # peft's, of transformers

ROWS = {"tied": "[9,2,33]", "untied": "{embed_tokens: [9,2], lm_head: [9,2]}", "embedding": "[9,2]"}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("bases")
    for name in ROWS:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=name == "tied")).save_pretrained(root / name)
    return {name: root / name for name in ROWS}


def built(config: Any) -> nn.Module:
    with torch.device("meta"):
        model = build_model(config.model, vocab_size=SHAPE["vocab_size"], seq_len=8)
    allocate(model, "cpu")
    initialize(config.model, model, 0)
    return model


@pytest.mark.parametrize("case", ROWS)
@pytest.mark.parametrize("model", ["pretrained", "transformers"])
def test_forward_gradients_files_and_merge_are_those_of_peft(
    case: str, model: str, bases: dict[str, Path], tmp_path: Path
) -> None:
    words = ("adapter=lora", "target_modules=[q_proj]", f"adapter.trainable_token_indices={ROWS[case]}")
    config = against_peft.config_of(bases[case], *words, model=model)
    mine = against_peft.stirred(against_peft.ours(config))
    files = against_peft.saved(mine, config, tmp_path / "adapter")
    plain = AutoModelForCausalLM.from_pretrained(bases[case])
    theirs = PeftModel.from_pretrained(plain, files, is_trainable=True)
    against_peft.assert_as_peft(mine, theirs)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    written, again = load_file(files / WEIGHTS), load_file(tmp_path / "theirs" / WEIGHTS)
    assert written.keys() == again.keys()
    assert all(torch.equal(written[name], again[name]) for name in written)
    read = with_adapter(built(config), read_adapter(tmp_path / "theirs"))
    torch.testing.assert_close(read(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)
    rows, wanted = MergedRows(mine), dict(theirs.merge_and_unload().named_parameters())
    assert not rows.is_untied
    assert rows.base.keys() == wanted.keys()
    for name in rows.base:
        torch.testing.assert_close(rows[name], wanted[name], rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
