"""Scores of the next token before one is chosen: penalties, bans and filters, as transformers (5.24) has them.

Legend: B texts, T tokens so far, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rules:
    """The settings of ``config.schema.Sampling`` that change scores; ``ends`` are the tokens that end a text."""

    ends: Tensor
    min_new_tokens: int
    do_sample: bool
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    num_beams: int
    repetition_penalty: float
    no_repeat_ngram_size: int

    def applied(self, scores: Tensor, ids: Tensor, real: Tensor, num_new: int) -> Tensor:
        """Scores (B, V) of what follows on ``ids`` (B, T), the last ``num_new`` of which are new; see ``penalized``."""
        if self.repetition_penalty != 1.0:
            scores = penalized(scores, ids, real, self.repetition_penalty)
        if self.no_repeat_ngram_size:
            scores = without_repeats(scores, ids, real, self.no_repeat_ngram_size)
        if num_new < self.min_new_tokens:
            scores = scores.index_fill(-1, self.ends, -torch.inf)
        if self.num_beams == 1 and (self.no_repeat_ngram_size or self.min_new_tokens):
            scores = finite(scores)  # of a small vocabulary all may be banned
        if not self.do_sample:
            return scores
        keep = 1 if self.num_beams == 1 else 1 + len(self.ends)  # so that a beam can go on
        return filtered(scores / self.temperature, self.top_k, self.top_p, self.min_p, self.typical_p, keep=keep)


def finite(logits: Tensor) -> Tensor:
    """Logits (B, V) that can be sampled: NaN is never chosen, a row without any finite value becomes uniform."""
    if bool(torch.isfinite(logits.amax(-1)).all()):  # which shows NaN and inf too, in one pass over V
        return logits
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=1e30, neginf=-torch.inf)
    return logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)


def penalized(scores: Tensor, ids: Tensor, real: Tensor, penalty: float) -> Tensor:
    """Scores (B, V) with tokens that were seen in the row less likely; padding (0 in ``real`` (B, T)) is none.

    Source: Keskar et al. 2019, arXiv:1909.05858.
    """
    seen = torch.zeros_like(scores).scatter_add_(1, ids, real.to(scores.dtype)) > 0
    lowered = torch.where(scores < 0, scores * penalty, scores / penalty)
    return torch.where(seen, lowered, scores)


def without_repeats(scores: Tensor, ids: Tensor, real: Tensor, size: int) -> Tensor:
    """Scores (B, V) with -inf for tokens that would make ``size`` tokens in a row stand there a second time."""
    if ids.shape[1] < size:
        return scores
    rows = ids.unfold(1, size, 1)  # (B, T - size + 1, size), all that have stood there
    begun = ids[:, ids.shape[1] - size + 1 :]  # (B, size - 1)
    repeats = (rows[..., :-1] == begun[:, None]).all(-1) & (real[:, : rows.shape[1]] > 0)
    return scores.masked_fill(
        torch.zeros_like(scores).scatter_add_(1, rows[..., -1], repeats.to(scores.dtype)) > 0, -torch.inf
    )


def filtered(
    scores: Tensor, top_k: int, top_p: float, min_p: float = 0.0, typical_p: float = 1.0, *, keep: int = 1
) -> Tensor:
    """Scores (B, V) with -inf for all but, one after another, the ``top_k`` best, the nucleus of mass ``top_p``, those
    at least ``min_p`` times as likely as the best, and the mass ``typical_p`` of those whose information is nearest to
    the entropy; 0, 1.0, 0.0 and 1.0 are off, and the ``keep`` first always stay.

    Sources: Holtzman et al. 2019, arXiv:1904.09751; Nguyen et al. 2024, arXiv:2407.01082; Meister et al. 2022,
    arXiv:2202.00666.
    """
    if 0 < top_k < scores.shape[-1]:
        worst = scores.topk(min(max(top_k, keep), scores.shape[-1])).values[:, -1:]
        scores = scores.masked_fill(scores < worst, -torch.inf)
    if top_p < 1.0:
        ordered, order = scores.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = mass_before >= top_p
        cut[:, :keep] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    if min_p > 0.0:
        odds = scores.softmax(-1)
        cut = odds < min_p * odds.amax(-1, keepdim=True)
        cut.scatter_(-1, odds.topk(min(keep, odds.shape[-1])).indices, False)
        scores = scores.masked_fill(cut, -torch.inf)
    if typical_p < 1.0:
        logs = scores.log_softmax(-1)
        odds, entropy = logs.exp(), -(logs * logs.exp()).nansum(-1, keepdim=True)
        order = (-logs - entropy).abs().argsort()
        cut = odds.gather(-1, order).cumsum(-1) - odds.gather(-1, order) >= typical_p
        cut[:, :keep] = False
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    return scores
