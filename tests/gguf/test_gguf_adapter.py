"""``finalize ADAPTER m --gguf f16``: llama.cpp lays the file beside the base and computes what the source computes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf_files
import pytest
import torch
from gguf_families import made_by_transformers
from gguf_files import STOP, Made, byte_level, made
from lazily import PeftModel
from program import document, refusal

pytestmark = [pytest.mark.usefixtures("own_directory"), pytest.mark.filterwarnings("ignore")]  # peft's


def by_peft(model: Made, path: Path, spread: float = 0.1, **settings: Any) -> Path:
    """An adapter that peft has made of a model, and trained."""
    import peft
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model.directory)
    torch.manual_seed(0)
    settings = {"target_modules": "all-linear", "r": 4, "lora_alpha": 6, **settings}
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0.0, spread)
    adapted.save_pretrained(path)
    return path


def test_try(capsys) -> None:
    model = made(byte_level(Path("base")), STOP)
    adapter = by_peft(model, Path("adapter"))
    import time
    t=time.time()
    report = document(capsys, "finalize", str(adapter), "out/m", "--gguf", "f16,q8_0,f32")
    print(time.time()-t)
    print(json.dumps(report["gguf"], indent=1))
    assert 0
