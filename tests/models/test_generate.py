"""Generation: cached equals uncached, padding, stops, filters, and numbers that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from forgather_cli.config.schema import DecoderSettings, RopeScaling
from forgather_cli.loss import model_logits
from forgather_cli.models.decoder import Decoder, resolve_decoder
from forgather_cli.models.generate import generate
from forgather_cli.models.init import init_parameters

V = 61


def decoder(**changes: Any) -> Decoder:
    base: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    model = Decoder(resolve_decoder(DecoderSettings(**{**base, **changes}), vocab_size=V, seq_len=16)).eval()
    init_parameters(model, 1)
    return model


def logits_of(model: torch.nn.Module) -> Any:
    def logits(batch: dict[str, torch.Tensor], *, last_only: bool = False, cache: Any = None) -> torch.Tensor:
        return model_logits(model, batch, last_only=last_only, cache=cache)

    return logits


def fixed(*rows: list[float]) -> Any:
    """A model whose last logits are always these."""
    return lambda batch, last_only, cache: torch.tensor(rows)[:, None]


PROMPTS = torch.randint(0, V, (3, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 2},
        {"sliding_window": 5},
        {"rope_scaling": RopeScaling(rope_type="dynamic", factor=2.0), "max_position_embeddings": 9},
    ],
    ids=["gqa", "window", "dynamic"],
)
@pytest.mark.parametrize("options", [{"do_sample": False}, {"temperature": 0.8, "top_k": 9, "top_p": 0.9}])
def test_cached_tokens_equal_uncached(changes: dict[str, Any], options: dict[str, Any]) -> None:
    logits = logits_of(decoder(**changes))
    made = [generate(logits, PROMPTS, max_new_tokens=20, use_cache=c, **options) for c in (True, False)]
    assert torch.equal(*made)
    assert made[0].shape == (3, 27)
    assert torch.equal(made[0][:, :7], PROMPTS)


def test_only_the_new_token_is_fed_with_a_cache() -> None:
    model, widths = decoder(), []
    model.model.embed_tokens.register_forward_pre_hook(lambda m, a: widths.append(a[0].shape[1]))
    generate(logits_of(model), PROMPTS, max_new_tokens=4)
    assert widths == [7, 1, 1, 1]


@pytest.mark.parametrize("use_cache", [True, False])
def test_left_padded_prompts_give_the_tokens_they_give_alone(use_cache: bool) -> None:
    logits, lengths = logits_of(decoder(num_key_value_heads=2)), [7, 3, 5]
    mask = torch.stack([(torch.arange(7) >= 7 - n).long() for n in lengths])
    prompts = PROMPTS * mask
    options: dict[str, Any] = {"max_new_tokens": 15, "do_sample": False, "repetition_penalty": 1.3}
    together = generate(logits, prompts, mask, use_cache=use_cache, **options)
    for row, n in enumerate(lengths):
        alone = generate(logits, PROMPTS[row : row + 1, 7 - n :], **options)
        assert torch.equal(together[row, 7:], alone[0, n:])


def test_a_model_without_cache_gets_the_whole_sequence() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = decoder()

        def forward(self, input_ids: torch.Tensor) -> tuple[torch.Tensor]:
            return (self.inner(input_ids),)

    expected = generate(logits_of(decoder()), PROMPTS, max_new_tokens=6, do_sample=False)
    assert torch.equal(generate(logits_of(Plain()), PROMPTS, max_new_tokens=6, do_sample=False), expected)


def test_rows_end_early_and_are_filled() -> None:
    calls = []

    def counting(batch: Any, last_only: bool, cache: Any) -> torch.Tensor:
        calls.append(1)
        scores = torch.zeros(2, 1, 5)
        scores[0, 0, 3 if len(calls) == 2 else 1] = 9.0  # row 0 ends at its second token
        scores[1, 0, 4 if len(calls) == 4 else 2] = 9.0  # row 1 at its fourth, with the other end token
        return scores

    prompt = torch.zeros(2, 1, dtype=torch.int64)
    made = generate(counting, prompt, max_new_tokens=10, do_sample=False, eos_token_id=[3, 4], pad_token_id=0)
    assert made[:, 1:].tolist() == [[1, 3, 0, 0], [2, 2, 2, 4]]
    calls.clear()
    made = generate(counting, prompt, max_new_tokens=10, do_sample=False, eos_token_id=[3, 4])
    assert made[0, 1:].tolist() == [1, 3, 3, 3], "without a pad token the end token fills"


def test_on_token_sees_each_column_and_can_stop() -> None:
    seen: list[torch.Tensor] = []

    def on_token(column: torch.Tensor) -> bool:
        seen.append(column)
        return len(seen) == 3

    made = generate(logits_of(decoder()), PROMPTS, max_new_tokens=10, on_token=on_token)
    assert torch.equal(torch.cat(seen, 1), made[:, 7:])


def test_sampling_has_its_own_generator() -> None:
    logits = logits_of(decoder())
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    one = generate(logits, PROMPTS, max_new_tokens=8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(one, generate(logits, PROMPTS, max_new_tokens=8, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(one, generate(logits, PROMPTS, max_new_tokens=8, generator=torch.Generator().manual_seed(2)))


def drawn(scores: list[float], **options: Any) -> list[int]:
    """How often each token comes up in 4000 draws."""
    rows = torch.zeros(4000, 1, dtype=torch.int64)
    made = generate(lambda *a, **k: torch.tensor(scores).expand(4000, 1, -1), rows, max_new_tokens=1, **options)
    return torch.bincount(made[:, 1], minlength=len(scores)).tolist()


def test_filters_and_temperature() -> None:
    scores = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert drawn(scores, top_k=2)[2:] == [0, 0]
    assert drawn(scores, top_p=0.6)[2:] == [0, 0], "the smallest set with at least this mass"
    assert drawn(scores, top_p=0.49)[1:] == [0, 0, 0]
    assert drawn(scores, top_p=1e-9)[0] == 4000, "the best token always stays"
    plain, hot = drawn(scores), drawn(scores, temperature=5.0)
    assert [abs(n / 4000 - p) < 0.03 for n, p in zip(plain, (0.5, 0.3, 0.15, 0.05), strict=True)] == [True] * 4
    assert hot[3] > 3 * plain[3]


def test_repetition_penalty_divides_positive_and_multiplies_negative_scores() -> None:
    prompt = torch.tensor([[0]])
    assert generate(fixed([1.1, 1.0]), prompt, max_new_tokens=1, do_sample=False)[0, 1] == 0
    penalized = generate(fixed([1.1, 1.0]), prompt, max_new_tokens=1, do_sample=False, repetition_penalty=1.2)
    assert penalized[0, 1] == 1
    negative = generate(fixed([-1.0, -1.1]), prompt, max_new_tokens=1, do_sample=False, repetition_penalty=1.2)
    assert negative[0, 1] == 1
    padding = torch.tensor([[0, 2]]), torch.tensor([[0, 1]])
    kept = generate(fixed([1.1, 1.0, 0.0]), *padding, max_new_tokens=1, do_sample=False, repetition_penalty=1.2)
    assert kept[0, 2] == 0, "padding is not text"


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("do_sample", [False, True])
def test_non_finite_logits_survive(do_sample: bool) -> None:
    rows = [[NAN, 3.0, NAN], [INF, 0.0, 1.0], [-INF, -INF, 2.0], [NAN, NAN, NAN], [-INF, -INF, -INF], [NAN, -INF, INF]]
    prompt = torch.zeros(6, 1, dtype=torch.int64)
    made = generate(
        fixed(*rows), prompt, max_new_tokens=1, do_sample=do_sample, temperature=0.5, repetition_penalty=1.1, top_p=0.9
    )[:, 1].tolist()
    assert made[:3] == [1, 0, 2]
    assert made[5] == 2
    assert set(made) <= {0, 1, 2}
