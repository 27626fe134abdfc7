"""``Trainer.generate``: what the model in training writes."""

from __future__ import annotations

from typing import Any

import torch

from forgather_cli.callbacks.textgen import continued, written
from forgather_cli.config.decode import decode_sampling
from forgather_cli.errors import ConfigError
from forgather_cli.trainer.build import known_vocab_size


def generated(trainer: Any, prompts: Any, given: dict[str, Any]) -> Any:
    """Collective. See ``Trainer.generate``; ``given``: the settings of ``Sampling`` that it was called with."""
    if isinstance(given.get("stop"), str):
        given = {**given, "stop": [given["stop"]]}
    try:
        sampling = decode_sampling(given)
    except ConfigError as error:
        raise ConfigError([f"generate: {problem}" for problem in error.problems]) from error
    tokenizer = trainer.processing_class
    generator = torch.Generator(trainer.strategy.device).manual_seed(sampling.seed)
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # a tensor or an array of tokens
    is_one = isinstance(prompts, str) or (
        isinstance(prompts, list | tuple) and len(prompts) > 0 and all(type(i) is int for i in prompts)
    )
    several = [prompts] if is_one else prompts
    if not isinstance(several, list | tuple):
        raise ConfigError(f"prompts: got a {type(prompts).__name__}; give a text, token ids, or a list of either")
    if tokenizer is None and (sampling.stop or any(isinstance(prompt, str) for prompt in several)):
        raise ConfigError(
            f"{'stop' if sampling.stop else 'prompts'}: texts need a tokenizer; give the Trainer processing_class=, or "
            "token ids alone"
        )
    if not several:
        return []
    if all(isinstance(prompt, str) for prompt in several):
        texts = written(trainer, several, tokenizer, sampling, generator)
        found: list[Any] = [prompt + text for prompt, text in zip(several, texts, strict=True)]
    else:
        rows = [_tokens(prompt, known_vocab_size(trainer.strategy.parts)) for prompt in several]
        new = continued(trainer, rows, tokenizer, sampling, generator)
        found = [row + more for row, more in zip(rows, new, strict=True)]
    return found[0] if is_one else found


def _tokens(prompt: Any, vocab_size: int | None) -> list[int]:
    """A prompt of token ids. Raises ConfigError."""
    ids = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if not isinstance(ids, list | tuple) or not ids or not all(type(i) is int for i in ids):
        raise ConfigError(f"prompts: got {prompt!r:.80}; give texts, or lists of token ids with one at least")
    odd = [i for i in ids if i < 0 or (vocab_size is not None and i >= vocab_size)]
    if odd:
        raise ConfigError(
            f"prompts: the model has {vocab_size} tokens, from 0, got {odd[0]}; give ids of its tokenizer"
        )
    return list(ids)
