"""Decoders of transformers in stages: alone and in turn as the whole model, and trained as on one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from chats import SHAPE
from torch import Tensor

from forgather_cli.config.pipeline_layout import stage_layout
from forgather_cli.config.schema import PipelineSettings, TransformersSettings
from forgather_cli.errors import ModelError
from forgather_cli.models.build import build_model, initialize
from forgather_cli.models.cache import KVCache
from forgather_cli.models.hf.model import CausalLM
from forgather_cli.models.hf.stages import decoder_stages
from forgather_cli.models.init import allocate
from forgather_cli.models.stages import hidden_size_of, num_layers_of, splitter_of, stage_of
from forgather_cli.models.transform import numbered_blocks

pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers and what it imports
V = 257
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
COMMON = {**SHAPE, "num_hidden_layers": 3, "max_position_embeddings": 32}
STAGES = stage_layout(PipelineSettings(schedule="1F1B"), 3, 3)


def on_meta(model_type: str, **changes: Any) -> CausalLM:
    option = TransformersSettings(config={"model_type": model_type, **COMMON, **SHAPES.get(model_type, {}), **changes})
    with torch.device("meta"):
        return build_model(option, vocab_size=V, seq_len=16)


def filled(model: Any) -> Any:
    allocate(model, "cpu")
    initialize(TransformersSettings(config={"model_type": "llama"}), model, 7)
    return model.eval()


def in_turn(parts: list[CausalLM], x: Tensor, cache: KVCache | None = None, **inputs: Any) -> Tensor:
    past = 0 if cache is None else cache.length
    for part in parts:
        if cache is not None:
            cache.length = past
        x = part(x, cache=cache, **inputs)
    return x


def tokens(length: int = 16) -> Tensor:
    return torch.randint(0, V, (2, length), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", SHAPES)
def test_stages_in_turn_are_the_whole(model_type: str) -> None:
    """With documents, with padding, and from a cache that each stage has by itself."""
    whole = filled(on_meta(model_type))
    parts = [filled(stage_of(on_meta(model_type), STAGES, index, decoder_stages)) for index in range(3)]
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
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    theirs = LlamaForCausalLM(LlamaConfig(vocab_size=V, **COMMON)).eval()
    assert splitter_of(theirs, None) is decoder_stages
    assert (num_layers_of(theirs), hidden_size_of(theirs)) == (3, 32)
    with torch.no_grad():
        first, second, last = (stage_of(theirs, STAGES, index, decoder_stages).eval() for index in range(3))
        torch.testing.assert_close(last(second(first(tokens()))).logits, theirs(tokens()).logits)


def test_a_class_of_another_shape_is_told_what_it_lacks() -> None:
    option = TransformersSettings(config={"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4})
    with torch.device("meta"):
        model = build_model(option, vocab_size=V, seq_len=16)
    with pytest.raises(ModelError, match=r"model_splitter"):
        splitter_of(model, None)


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [("granite", {"embedding_multiplier": 2.0}), ("nanochat", {}), ("longcat_flash", {"num_layers": 1})],
)
def test_a_class_that_does_more_than_run_its_layers_is_refused(model_type: str, changes: dict[str, Any]) -> None:
    """A scale, a norm before the layers, layers of which each counts as two."""
    model = on_meta(model_type, **changes)
    with pytest.raises(ModelError, match=r"ForCausalLM does more than run its 3 layers .*model_splitter"):
        stage_of(model, STAGES, 0, splitter_of(model, None))
