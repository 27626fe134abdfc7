"""Sampling from a language model: what follows on a prompt, or what a decoder says to one.

Legend: B sequences, T prompt tokens, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from forgather_cli.errors import ModelError
from forgather_cli.models.cache import KVCache

LogitsFn = Callable[..., Tensor | None]
"""``(batch, last_only=True, cache=KVCache | None) -> (B, 1, V)``: ``Strategy.logits``."""


@torch.no_grad()
def generate(
    logits_fn: LogitsFn,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    encoder_inputs: Mapping[str, Tensor] | None = None,
    max_new_tokens: int,
    do_sample: bool = True,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    generator: Generator | None = None,
    use_cache: bool = True,
    agree: Callable[[Tensor], Tensor] | None = None,
    on_token: Callable[[Tensor], Tensor | bool | None] | None = None,
) -> Tensor:
    """Prompts (B, T), padded on the left where ``attention_mask`` (B, T) is 0, with new tokens: (B, T + n).

    n is ``max_new_tokens``, or less once every row has ended; a row that has ended goes on with ``pad_token_id``
    (else its end token). Random numbers come from ``generator`` alone (None: a fresh one, seed 0), so training's are
    not touched. ``agree`` makes a column of tokens (B, 1) that of all ranks, where they generate together. ``on_token``
    sees each column; it ends the generation by returning True, and rows by returning which, (B, 1) bool. A model that
    does not fill the cache is given the whole sequence each time. With ``encoder_inputs``, the batch for the encoder,
    ``input_ids`` are what the decoder begins with. The model's mode (eval) is the caller's business.
    """
    ids, given = input_ids, [] if eos_token_id is None else eos_token_id
    ends = torch.tensor([given] if isinstance(given, int) else list(given), dtype=torch.int64, device=ids.device)
    generator = generator or Generator().manual_seed(0)
    real = torch.ones_like(ids) if attention_mask is None else attention_mask.to(ids)
    padded = not bool(real.all())
    cache = KVCache() if use_cache else None
    done = torch.zeros_like(ids[:, :1], dtype=torch.bool)
    side = "" if encoder_inputs is None else "decoder_"
    filler = pad_token_id if pad_token_id is not None else (int(ends[0]) if len(ends) else 0)
    for _ in range(max_new_tokens):
        batch = {**(encoder_inputs or {}), f"{side}input_ids": ids[:, cache.length :] if cache is not None else ids}
        if padded:
            batch[f"{side}attention_mask"] = real
        logits = logits_fn(batch, last_only=True, cache=cache)
        if logits is None:
            raise ModelError("generation needs the logits on every rank, but this rank got none")
        scores = _finite(logits[:, -1].float())  # (B, V)
        if repetition_penalty != 1.0:  # tokens seen in the row are less likely (Keskar et al. 2019, arXiv:1909.05858)
            seen = torch.zeros_like(scores).scatter_add_(1, ids, real.to(scores.dtype)) > 0
            lowered = torch.where(scores < 0, scores * repetition_penalty, scores / repetition_penalty)
            scores = torch.where(seen, lowered, scores)
        if do_sample:
            odds = _filtered(scores / temperature, top_k, top_p).softmax(-1)
            token = torch.multinomial(odds.to(generator.device), 1, generator=generator)  # a generator of any device
        else:
            token = scores.argmax(-1, keepdim=True)
        token = torch.where(done, filler, token.to(ids))
        token = token if agree is None else agree(token)
        ids, real = torch.cat((ids, token), dim=1), torch.cat((real, torch.ones_like(token)), dim=1)
        told = None if on_token is None else on_token(token)
        if len(ends):
            done |= torch.isin(token, ends)
        if isinstance(told, Tensor):
            done |= told.to(done.device)
        elif told:
            break
        if (len(ends) or isinstance(told, Tensor)) and bool(done.all()):
            break
        if cache is not None and cache.limit is not None and ids.shape[1] > cache.limit:
            break  # the next position has no embedding
    return ids


def left_padded(rows: list[list[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """(input_ids, attention_mask), both (B, T) int64; rows end together, so that all go on at the same position."""
    length = max(map(len, rows))
    ids = [[pad_token_id] * (length - len(row)) + row for row in rows]
    mask = [[0] * (length - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(ids), torch.tensor(mask)


def prompt_inputs(
    model: Any, rows: list[list[int]], pad_token_id: int
) -> tuple[Tensor, Tensor | None, dict[str, Tensor] | None]:
    """``input_ids``, ``attention_mask`` and ``encoder_inputs`` of ``generate`` for prompts of tokens, on the CPU.

    The decoder of an encoder-decoder begins with the padding token.
    """
    ids, mask = left_padded(rows, pad_token_id)
    if not getattr(model, "is_encoder_decoder", False):
        return ids, mask, None
    return torch.full((len(rows), 1), pad_token_id), None, {"input_ids": ids, "attention_mask": mask}


def masked_prompt(tokenizer: Any, text: str, mode: str | None = None) -> str:
    """A prompt as a UL2 model has seen text: the token of a denoiser, the text, and a sentinel for what follows on it.

    ``mode``: the token without its brackets; None: the prefix language model's, and the text as it is where the
    tokenizer has none.
    """
    modes = ("S", "S2S") if mode is None else (mode,)
    known = (each for each in modes if len(tokenizer.encode(f"[{each}]")) == 1)
    found = next(known, None)
    return text if found is None else f"[{found}]{text}<extra_id_0>"


def _finite(logits: Tensor) -> Tensor:
    """Logits (B, V) that can be sampled: NaN is never chosen, a row without any finite value becomes uniform."""
    if bool(torch.isfinite(logits.amax(-1)).all()):  # which shows NaN and inf too, in one pass over V
        return logits
    logits = torch.nan_to_num(logits, nan=-torch.inf, posinf=1e30, neginf=-torch.inf)
    return logits.masked_fill((logits == -torch.inf).all(-1, keepdim=True), 0.0)


def _filtered(scores: Tensor, top_k: int, top_p: float) -> Tensor:
    """Scores (B, V) with all but the ``top_k`` best and the nucleus of mass ``top_p`` at -inf; 0 and 1.0 are off.

    Source of the nucleus: Holtzman et al. 2019, arXiv:1904.09751. The best token always stays.
    """
    if 0 < top_k < scores.shape[-1]:
        worst = scores.topk(top_k).values[:, -1:]
        scores = scores.masked_fill(scores < worst, -torch.inf)
    if top_p < 1.0:
        ordered, order = scores.sort(descending=True)
        mass_before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        cut = (mass_before >= top_p).index_fill(-1, torch.zeros(1, dtype=torch.int64, device=scores.device), False)
        scores = scores.masked_fill(torch.zeros_like(cut).scatter(-1, order, cut), -torch.inf)
    return scores
