"""Generation: what is fed to the model, padding, stops, draws, and numbers that are not."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import tiny
import torch

from forgather_cli.config.schema import RopeScaling
from forgather_cli.loss import model_logits
from forgather_cli.models.generate import generate

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
    prompts = PROMPTS * mask
    options: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False, "repetition_penalty": 1.3}
    together = generate(logits, prompts, mask, use_cache=use_cache, **options)
    for row, n in enumerate(lengths):
        alone = generate(logits, PROMPTS[row : row + 1, 7 - n :], **options)
        assert torch.equal(together[row, 7:], alone[0, n:])


def test_on_token_sees_each_column_and_can_stop() -> None:
    seen: list[torch.Tensor] = []

    def on_token(column: torch.Tensor) -> bool:
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
