"""``Trainer.generate``: what the model in training writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from forgather_cli.callbacks.textgen import continued, written
from forgather_cli.config.decode import decode_settings
from forgather_cli.config.schema import TextgenSettings
from forgather_cli.errors import ConfigError
from forgather_cli.trainer.build import known_vocab_size

_DEFAULTS = {"repetition_penalty": 1.0}
"""Of ``forgather generate``, where ``callbacks.textgen`` has others."""


def generated(trainer: Any, prompts: Any, seed: int, stop: str | Sequence[str], given: dict[str, Any]) -> Any:
    """Collective. See ``Trainer.generate``; ``given``: the settings of ``TextgenSettings`` that it was called with."""
    settings, tokenizer = _settings(given), trainer.processing_class
    stop = [stop] if isinstance(stop, str) else list(stop)
    generator = torch.Generator(trainer.strategy.device).manual_seed(seed)
    prompts = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # a tensor or an array of tokens
    is_one = isinstance(prompts, str) or (
        isinstance(prompts, list | tuple) and len(prompts) > 0 and all(type(i) is int for i in prompts)
    )
    several = [prompts] if is_one else prompts
    if not isinstance(several, list | tuple):
        raise ConfigError(f"prompts: got a {type(prompts).__name__}; give a text, token ids, or a list of either")
    if tokenizer is None and (stop or any(isinstance(prompt, str) for prompt in several)):
        raise ConfigError(
            f"{'stop' if stop else 'prompts'}: texts need a tokenizer; give the Trainer processing_class=, or "
            "token ids alone"
        )
    if not several:
        return []
    if all(isinstance(prompt, str) for prompt in several):
        texts = written(trainer, several, tokenizer, settings, generator, stop)
        found: list[Any] = [prompt + text for prompt, text in zip(several, texts, strict=True)]
    else:
        rows = [_tokens(prompt, known_vocab_size(trainer.strategy.parts)) for prompt in several]
        new = continued(trainer, rows, tokenizer, settings, generator, stop)
        found = [row + more for row, more in zip(rows, new, strict=True)]
    return found[0] if is_one else found


def _settings(given: dict[str, Any]) -> TextgenSettings:
    """Raises ConfigError for what is no setting of a generation."""
    greedy = {"do_sample": False, "temperature": 1.0} if given.get("temperature") == 0 else {}
    for name in ("prompts", "generation_steps"):
        if name in given:
            raise ConfigError(f"generate: {name} is no setting of it; leave it out")
    try:
        return decode_settings(TextgenSettings, {**_DEFAULTS, **given, **greedy})
    except ConfigError as error:
        raise ConfigError([f"generate: {problem}" for problem in error.problems]) from error


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
