"""The encoder-decoder: against transformers' Qwen3, packed against padded, with and without a cache."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from chats import write_model
from paired import mixture, model

from forgather_cli.data.paired.rows import Shape, batch_of_rows
from forgather_cli.loss.base import ModelWithLoss
from forgather_cli.loss.losses import CrossEntropy, LinearCrossEntropy
from forgather_cli.loss.model_io import model_logits
from forgather_cli.models.generate import generate, prompt_inputs

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 directory, made by transformers."""
    path = tmp_path_factory.mktemp("qwen3")
    write_model(path, "qwen3", 70, head_dim=16, max_position_embeddings=64, tie_word_embeddings=True)
    return path


def sides(rows: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(2)
    return torch.randint(0, 64, (rows, 11), generator=draws), torch.randint(0, 64, (rows, 9), generator=draws)


@torch.no_grad()
def test_with_zero_cross_attention_the_decoder_is_the_source_bit_for_bit(source: Path) -> None:
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(source).eval()
    ours = model(vocab_size=90, init_from=str(source))
    ids, decoder_ids = sides()
    expected = theirs(decoder_ids).logits
    assert torch.equal(ours(ids, decoder_input_ids=decoder_ids)[..., :70], expected)
    mask = torch.ones_like(ids)
    mask[1, :4], mask[2] = 0, 0  # padding on the left, and a source without a token
    assert torch.equal(ours(ids, decoder_input_ids=decoder_ids, attention_mask=mask)[..., :70], expected)
    left = torch.ones_like(decoder_ids)
    left[1, :3] = 0
    padded = ours(ids, decoder_input_ids=decoder_ids, decoder_attention_mask=left)[..., :70]
    torch.testing.assert_close(padded[left.bool()], theirs(decoder_ids, attention_mask=left).logits[left.bool()])


@torch.no_grad()
def test_both_stacks_and_the_cross_attention_begin_as_asked(source: Path) -> None:
    made = {
        kind: model(90, init_from=str(source), cross_attention=kind).state_dict() for kind in ("zero", "self", "fresh")
    }
    kept = "model.encoder.layers.1.self_attn.q_proj.weight"
    own, cross = "model.decoder.layers.1.self_attn.{}.weight", "model.decoder.layers.1.cross_attn.{}.weight"
    for kind, state in made.items():
        assert torch.equal(state[kept], state[own.format("q_proj")])
        assert (kind == "fresh") != torch.equal(state[cross.format("q_proj")], state[own.format("q_proj")])
        assert torch.equal(state[cross.format("o_proj")], state[own.format("o_proj")]) == (kind == "self")
    assert not made["zero"][cross.format("o_proj")].any()
    table = made["zero"]["model.embed_tokens.weight"]
    mean, spread = table[:70].mean(0), table[:70].std(0)
    assert ((table[70:] - mean).abs() < 0.1 * spread).all(), "new rows begin near the mean of the old"


@torch.no_grad()
def test_a_source_without_tokens_adds_nothing_and_padding_is_not_read() -> None:
    ours = model()
    ids, decoder_ids = sides(2)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1] = 0, 0
    found = ours(ids, decoder_input_ids=decoder_ids, attention_mask=mask)
    assert found.isfinite().all()
    alone = ours(ids[:1, 4:], decoder_input_ids=decoder_ids[:1])
    torch.testing.assert_close(found[:1], alone, rtol=1e-5, atol=1e-6)
    other = torch.where(mask.bool(), ids, 3)
    torch.testing.assert_close(ours(other, decoder_input_ids=decoder_ids, attention_mask=mask), found)


def test_packed_examples_are_as_if_alone() -> None:
    ours = model(vocab_size=120)
    window = np.arange(80) % 64
    examples = [each for n in range(4) for each in mixture().examples(window, np.random.default_rng([n]))]
    packed = batch_of_rows([examples], Shape("best_fit", 512, 384, 0))
    padded = batch_of_rows([[each] for each in examples], Shape("pad", 96, 64, 0))
    found = []
    for loss in (CrossEntropy(), LinearCrossEntropy(chunk_size=32)):
        for batch in (packed, padded):
            ours.zero_grad()
            total = ModelWithLoss(ours, loss)(batch)
            total.backward()
            norm = torch.stack([p.grad.norm() for p in ours.parameters() if p.grad is not None]).norm()
            found.append((float(total.detach()), float(norm)))
    assert found[1:] == [pytest.approx(found[0], rel=1e-5)] * 3
    assert int((packed["labels"] != -100).sum()) == sum(len(each.target) for each in examples)


def test_texts_of_the_decoder_are_those_of_the_class_that_is_written_with_a_cache_and_without(tmp_path: Path) -> None:
    from forgather_cli.models.modeling_qwen3_encdec import Qwen3EncDecConfig, Qwen3ForSeq2SeqLM
    from forgather_cli.models.pretrained import write_model_files

    ours = model(initializer_range=0.3)  # so large that no text repeats one token
    write_model_files(ours, None, tmp_path)
    theirs = Qwen3ForSeq2SeqLM(Qwen3EncDecConfig.from_pretrained(tmp_path)).eval()
    theirs.load_state_dict(ours.state_dict(), strict=False)
    begin, mask, encoder_inputs = prompt_inputs(ours, [[1, 2, 3], [4], [5, 6, 7, 8, 9]], 2)
    rules = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 3, "eos_token_id": [*range(10, 40)],
             "pad_token_id": 2}  # fmt: skip
    for beams, cached in itertools.product((1, 3), (True, False)):
        chosen = {**rules, "num_beams": beams, "use_cache": cached}
        made = generate(partial(model_logits, ours), begin, mask, encoder_inputs=encoder_inputs, **chosen)
        assert made.tolist() == theirs.generate(**encoder_inputs, decoder_start_token_id=2, **chosen).tolist()
    assert len({row.index(2, 1) if 2 in row[1:] else 13 for row in made.tolist()}) > 1
    alone, _, inputs = prompt_inputs(ours, [[4]], 2)
    one = generate(partial(model_logits, ours), alone, encoder_inputs=inputs, **chosen)[0].tolist()
    assert one == made[1].tolist()[: len(one)]
