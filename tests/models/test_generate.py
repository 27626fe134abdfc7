"""Generation: what is fed to the model, padding, stops, and numbers that are not; tokens are chosen as transformers'
``generate`` chooses them on the same model: beams, bans, filters and draws."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tiny
import torch
import transformers
from torch import Tensor

from forgather_cli.config.schema import RopeScaling
from forgather_cli.loss.model_io import model_logits
from forgather_cli.models.generate import generate, left_padded

decoder = partial(tiny.decoder, 1, initializer_range=0.3)
PROMPTS = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(0))


def test_only_the_new_token_is_fed_with_a_cache() -> None:
    model, widths = decoder(), []
    model.model.embed_tokens.register_forward_pre_hook(lambda m, a: widths.append(a[0].shape[1]))
    generate(partial(model_logits, model), PROMPTS, max_new_tokens=4)
    assert widths == [7, 1, 1, 1]


def test_where_angles_change_with_the_length_the_whole_text_is_fed() -> None:
    rope = RopeScaling(rope_type="dynamic", factor=2.0)
    logits = partial(model_logits, decoder(rope_scaling=rope, max_position_embeddings=9))
    made = [generate(logits, PROMPTS, max_new_tokens=20, do_sample=False, use_cache=c) for c in (True, False)]
    assert torch.equal(*made)


@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padded_prompts_give_the_tokens_they_give_alone(use_cache: bool) -> None:
    logits, lengths = partial(model_logits, decoder(num_key_value_heads=1)), [7, 3, 5]
    mask = torch.stack([(torch.arange(7) >= 7 - n).long() for n in lengths])
    options: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False, "repetition_penalty": 1.3}
    together = generate(logits, PROMPTS * mask, mask, use_cache=use_cache, **options)
    for row, n in enumerate(lengths):
        alone = generate(logits, PROMPTS[row : row + 1, 7 - n :], **options)
        assert torch.equal(together[row, 7:], alone[0, n:])


def test_on_token_sees_each_column_and_can_stop() -> None:
    seen: list[Tensor] = []

    def on_token(column: Tensor) -> bool:
        seen.append(column)
        return len(seen) == 3

    made = generate(partial(model_logits, decoder()), PROMPTS, max_new_tokens=10, on_token=on_token)
    assert torch.equal(torch.cat(seen, 1), made[:, 7:])


def test_sampling_has_its_own_generator() -> None:
    logits = partial(model_logits, decoder())
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one = generate(logits, PROMPTS, max_new_tokens=8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, generate(logits, PROMPTS, max_new_tokens=8, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(one, generate(logits, PROMPTS, max_new_tokens=8, generator=torch.Generator().manual_seed(2)))
    likeliest = generate(logits, PROMPTS, max_new_tokens=8, do_sample=False)
    assert torch.equal(generate(logits, PROMPTS, max_new_tokens=8, top_p=1e-9), likeliest), "the best always stays"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("do_sample", [False, True])
def test_non_finite_logits_survive(do_sample: bool) -> None:
    rows = [[NAN, 3.0, NAN], [INF, 0.0, 1.0], [-INF, -INF, 2.0], [NAN, NAN, NAN], [-INF, -INF, -INF], [NAN, -INF, INF]]
    prompt = torch.zeros(6, 1, dtype=torch.int64)
    made = generate(
        lambda batch, last_only, cache: torch.tensor(rows)[:, None], prompt,
        max_new_tokens=1, do_sample=do_sample, temperature=0.5, repetition_penalty=1.1, top_p=0.9,
    )[:, 1].tolist()  # fmt: skip
    assert made[:3] == [1, 0, 2]
    assert made[5] == 2
    assert set(made) <= {0, 1, 2}


PAD, ENDS = 1, [3, 9]
TEXTS = [[5, 6, 7, 6, 7, 6, 8], [11], [40, 41, 42], [20, 21, 22, 23, 24]]


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """Ours, and a Llama of transformers with the same weights, whose tokens are neither certain nor alike."""
    ours = tiny.decoder(3, initializer_range=0.25).eval()
    shape = {name: getattr(ours.settings, name) for name in (
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "intermediate_size", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings",
    )}  # fmt: skip
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, eos_token_id=None)).eval()
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def both(models: Any, seed: int = 0, *, expect: bool = True, **options: Any) -> tuple[Tensor, Tensor]:
    """What ours and theirs write to the prompts as one batch, both with draws of torch's generator from ``seed``."""
    ours, theirs = models
    ids, mask = left_padded(TEXTS, PAD)
    options = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": ENDS, "pad_token_id": PAD, **options}
    torch.manual_seed(seed)
    made = generate(partial(model_logits, ours), ids, mask, generator=torch.default_generator, **options)
    if not expect:
        return made, made
    torch.manual_seed(seed)
    # of sampling, theirs has a top_k of 50 and refuses what greedy choices do not read
    unread = {} if options["do_sample"] else {"temperature": None, "top_p": None, "top_k": None}
    config = transformers.GenerationConfig(**{"top_k": 0, **unread, **options})
    return made, theirs.generate(ids, attention_mask=mask, generation_config=config)


RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one_end": {"eos_token_id": 9},
    "no_end": {"eos_token_id": None},
    "no_pad": {"pad_token_id": None},
    "min_new_tokens": {"min_new_tokens": 9},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "max_new_tokens": 30},
    "repetition_penalty": {"repetition_penalty": 1.4},
    "all": {"min_new_tokens": 5, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2, "max_new_tokens": 30},
}


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("rules", RULES)
def test_the_likeliest_texts_are_those_of_transformers(models: Any, rules: str, num_beams: int) -> None:
    made, expected = both(models, num_beams=num_beams, **RULES[rules])
    assert made.tolist() == expected.tolist()


def test_beams_find_other_texts_which_end_at_different_places(models: Any) -> None:
    greedy, beams = (both(models, num_beams=number)[0] for number in (1, 3))
    assert greedy.tolist() != beams.tolist()
    assert len({sum(token == PAD for token in row[7:]) for row in beams.tolist()}) > 1


DRAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.6},
    "min_p": {"min_p": 0.3},
    "typical_p": {"typical_p": 0.4},
    "all": {
        "temperature": 1.5, "top_k": 9, "top_p": 0.9, "min_p": 0.05, "typical_p": 0.8, "min_new_tokens": 4,
        "no_repeat_ngram_size": 2,
    },
}  # fmt: skip


@pytest.mark.parametrize("num_beams", [1, 3])
@pytest.mark.parametrize("draws", DRAWS)
def test_draws_are_those_of_transformers(models: Any, draws: str, num_beams: int) -> None:
    found = [both(models, seed, do_sample=True, num_beams=num_beams, **DRAWS[draws]) for seed in (0, 1)]
    assert [made.tolist() for made, _ in found] == [expected.tolist() for _, expected in found]
    assert num_beams > 1 or found[0][0].tolist() != found[1][0].tolist()


@pytest.mark.parametrize("num_beams", [1, 3])
def test_single_tokens_that_may_not_come_twice(models: Any, num_beams: int) -> None:
    made = both(models, num_beams=num_beams, no_repeat_ngram_size=1, eos_token_id=None)[0]
    for row, prompt in zip(made.tolist(), TEXTS, strict=True):
        text = row[7 - len(prompt) :]
        assert len({*text[len(prompt) :]}) == 16, "and padding is no text"
        assert not {*prompt} & {*text[len(prompt) :]}


def test_a_text_that_is_over_ends_and_the_best_of_those_is_taken(models: Any) -> None:
    def after_five(texts: Tensor) -> Tensor:
        return (texts[..., -1] >= 30) & torch.tensor(texts.shape[-1] >= 5)

    free, one, beams = (
        both(models, num_beams=number, eos_token_id=None, is_over=each, expect=False)[0][:, 7:]
        for number, each in ((1, None), (1, after_five), (3, after_five))
    )
    for before, row in zip(free.tolist(), one.tolist(), strict=True):
        end = next(n for n, token in enumerate(before) if n >= 4 and token >= 30) + 1
        assert row[:end] == before[:end]
        assert {*row[end:]} <= {PAD}
    texts = [[token for n, token in enumerate(row) if n < 5 or token != PAD] for row in beams.tolist()]
    assert all(5 <= len(text) <= 16 and (text[-1] >= 30 or len(text) == 16) for text in texts)
    assert all(token < 30 for text in texts for token in text[4:-1])
