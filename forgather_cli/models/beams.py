"""Beam search: the likeliest texts are followed side by side, and the best of those that have ended is taken.

Legend: B prompts, K beams, C candidates of a prompt at a step, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from forgather_cli.models.choose import Rules, finite
from forgather_cli.models.texts import Texts

_NEVER = -1e9  # added to scores of what must not be chosen


def beam_search(
    texts: Texts,
    rules: Rules,
    have_ended: Callable[[Tensor], Tensor],
    filler: int,
    generator: Generator,
    agree: Callable[[Tensor], Tensor],
) -> Tensor:
    """New tokens (B, n) of the best text to each prompt, filled up with ``filler``.

    ``texts``: each prompt K times. ``have_ended``: which of the candidates (B, C, n) have, (B, C) bool; the search ends
    at the latest where all have. The rest is as in ``generate``.

    A text that has ended is worth the mean of its tokens' log-probabilities; the search ends where no beam can become
    better. With ``do_sample`` candidates are drawn, by the odds of the whole texts. The same as in transformers (5.24,
    ``_beam_search``) with ``length_penalty`` 1 and ``early_stopping`` false.
    """
    K, device = rules.num_beams, texts.ids.device
    B, C = len(texts.ids) // K, max(2, 1 + len(rules.ends)) * K  # so many, so that K go on even if others end
    first_rows = torch.arange(B, device=device)[:, None] * K
    scores = torch.full((B, K), _NEVER, device=device)
    ended, ended_scores = texts.new.reshape(B, K, 0), scores.clone()  # (B, K, n), the best that have ended
    scores[:, 0] = 0.0  # at first all beams are one text
    lengths = torch.zeros((B, K), dtype=torch.int64, device=device)
    has_ended = torch.zeros((B, K), dtype=torch.bool, device=device)
    can_improve = torch.ones((B, 1), dtype=torch.bool, device=device)
    for n in count(1):
        odds = rules.applied(texts.logits().log_softmax(-1), texts.ids, texts.real, n - 1)
        odds = (odds.reshape(B, K, -1) + scores[..., None]).flatten(1)  # (B, K x V)
        if rules.do_sample:
            drawn = torch.multinomial(finite(odds).softmax(-1).to(generator.device), C, generator=generator).to(device)
            values, order = odds.gather(1, drawn).sort(descending=True)
            picks = drawn.gather(1, order)
        else:
            values, picks = odds.topk(C)
        values, picks = agree(values), agree(picks)
        vocabulary = odds.shape[1] // K
        beams, tokens = picks // vocabulary, picks % vocabulary  # (B, C)
        candidates = torch.cat((_chosen(texts.new.reshape(B, K, n - 1), beams), tokens[..., None]), -1)
        over = have_ended(candidates)

        scores, going_on = (values + over * _NEVER).topk(K)
        texts.select((first_rows + beams.gather(1, going_on)).flatten())
        texts.add(tokens.gather(1, going_on).flatten()[:, None])

        # of the candidates that have ended only the K best count; the others stand in for them
        newly = over & (torch.arange(C, device=device) < K)
        means = values / n + ~newly * _NEVER + ~can_improve * _NEVER
        ended_scores, best = torch.cat((ended_scores, means), 1).topk(K)
        ended = _chosen(torch.cat((pad(ended, (0, 1), value=filler), candidates), 1), best)
        lengths = torch.cat((lengths, torch.full_like(picks, n)), 1).gather(1, best)
        has_ended = torch.cat((has_ended, newly), 1).gather(1, best)

        worst = torch.where(has_ended, ended_scores.amin(1, keepdim=True), _NEVER)
        can_improve &= (scores[:, :1] / n > worst).any(1, keepdim=True)
        if not bool(can_improve.any() & ~over.all()):
            break
    best_texts: Tensor = ended[:, 0, : int(lengths[:, 0].max())]
    return best_texts


def _chosen(texts: Tensor, which: Tensor) -> Tensor:
    """``texts`` (B, K, n) at ``which`` (B, C): (B, C, n)."""
    return texts.gather(1, which[..., None].expand(*which.shape, texts.shape[-1]))
