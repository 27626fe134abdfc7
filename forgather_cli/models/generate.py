"""Sampling from a language model: what follows on a prompt, or what a decoder says to one.

Legend: B sequences, T prompt tokens, n new tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from forgather_cli.models.beams import beam_search
from forgather_cli.models.choose import Rules
from forgather_cli.models.texts import LogitsFn, Texts


@torch.no_grad()
def generate(
    logits_fn: LogitsFn,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    encoder_inputs: Mapping[str, Tensor] | None = None,
    max_new_tokens: int,
    min_new_tokens: int = 0,
    do_sample: bool = True,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    num_beams: int = 1,
    repetition_penalty: float = 1.0,
    no_repeat_ngram_size: int = 0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    generator: Generator | None = None,
    use_cache: bool = True,
    agree: Callable[[Tensor], Tensor] | None = None,
    on_token: Callable[[Tensor], Tensor | bool | None] | None = None,
    is_over: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Prompts (B, T), padded on the left where ``attention_mask`` (B, T) is 0, with new tokens: (B, T + n).

    n is ``max_new_tokens``, or less once every row has ended; a row that has ended goes on with ``pad_token_id``
    (else its end token). Settings are those of ``config.schema.Sampling``. Random numbers come from ``generator`` alone
    (None: a fresh one, seed 0), so training's are not touched. ``agree`` makes a tensor that of all ranks, where they
    generate together. ``on_token`` sees each column of tokens (B, 1), of several beams that of the best one so far; it
    ends the generation by returning True, and, of one beam, rows by returning which, (B, 1) bool. ``is_over`` tells of
    new tokens (B, C, n) which texts have ended, besides those with an end token: (B, C) bool; C is 1, with several
    beams the number of candidates. A model that does not fill the cache is given the whole sequence each time. With
    ``encoder_inputs``, the batch for the encoder, ``input_ids`` are what the decoder begins with. The model's mode
    (eval) is the caller's business.
    """
    given = [] if eos_token_id is None else eos_token_id
    given = [given] if isinstance(given, int) else list(given)
    ends = torch.tensor(given, dtype=torch.int64, device=input_ids.device)
    filler = pad_token_id if pad_token_id is not None else (given[0] if given else 0)
    rules = Rules(
        ends, min_new_tokens, do_sample, temperature, top_k, top_p, min_p, typical_p, num_beams, repetition_penalty,
        no_repeat_ngram_size,
    )  # fmt: skip
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
    several = {"ids": input_ids, "real": real, **(encoder_inputs or {})}
    if num_beams > 1:
        several = {key: each.repeat_interleave(num_beams, 0) for key, each in several.items()}
    ids, real = several.pop("ids"), several.pop("real")
    texts = Texts(logits_fn, ids, real, several if encoder_inputs is not None else None, use_cache=use_cache)
    generator = generator or Generator().manual_seed(0)
    agree = agree or (lambda tensor: tensor)
    if num_beams > 1:

        def have_ended(candidates: Tensor) -> Tensor:
            over = torch.isin(candidates[..., -1], ends)
            if is_over is not None:
                over |= is_over(candidates).to(over.device)
            is_last = candidates.shape[-1] == max_new_tokens or texts.is_full(1)
            if is_last or (on_token is not None and on_token(candidates[:, 0, -1:]) is True):
                over = torch.ones_like(over)
            return over

        best = beam_search(texts, rules, have_ended, filler, generator, agree)
        return torch.cat((input_ids, best), 1)
    return _in_turn(texts, rules, max_new_tokens, filler, generator, agree, on_token, is_over)


def _in_turn(
    texts: Texts,
    rules: Rules,
    max_new_tokens: int,
    filler: int,
    generator: Generator,
    agree: Callable[[Tensor], Tensor],
    on_token: Callable[[Tensor], Tensor | bool | None] | None,
    is_over: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """``generate`` with one beam."""
    done = torch.zeros_like(texts.ids[:, :1], dtype=torch.bool)
    for n in range(max_new_tokens):
        scores = rules.applied(texts.logits(), texts.ids, texts.real, n)
        if rules.do_sample:
            token = torch.multinomial(scores.softmax(-1).to(generator.device), 1, generator=generator)
        else:
            token = scores.argmax(-1, keepdim=True)
        token = agree(torch.where(done, filler, token.to(texts.ids)))
        texts.add(token)
        told = None if on_token is None else on_token(token)
        if len(rules.ends):
            done |= torch.isin(token, rules.ends)
        if is_over is not None:
            done |= is_over(texts.new[:, None]).to(done.device)
        if isinstance(told, Tensor):
            done |= told.to(done.device)
        may_end = len(rules.ends) > 0 or is_over is not None or isinstance(told, Tensor)
        if told is True or (may_end and bool(done.all())) or texts.is_full():
            break
    return texts.ids


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
