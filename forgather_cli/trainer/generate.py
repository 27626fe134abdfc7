"""``Trainer.generate``: what the model in training writes."""

from __future__ import annotations

from itertools import islice
from typing import Any

import torch

from forgather_cli.callbacks.textgen import continued, encoded, written
from forgather_cli.config.decode import decode_sampling
from forgather_cli.data.loaders.loader import EvalLoader
from forgather_cli.data.loaders.map_style import is_map_style
from forgather_cli.errors import ConfigError
from forgather_cli.labels import IGNORED
from forgather_cli.trainer.build import known_vocab_size
from forgather_cli.trainer.states import RandomState


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
        texts = written(trainer, encoded(trainer, several, tokenizer), tokenizer, sampling, generator)
        found: list[Any] = [prompt + text for prompt, text in zip(several, texts, strict=True)]
    else:
        rows = [_tokens(prompt, known_vocab_size(trainer.strategy.parts)) for prompt in several]
        new = continued(trainer, rows, tokenizer, sampling, generator)
        found = [row + more for row, more in zip(rows, new, strict=True)]
    return found[0] if is_one else found


def beginnings(trainer: Any, collate_fn: Any) -> list[list[int]]:
    """See ``Trainer.held_out_prompts``. Leaves generators of users' code, and the position of training, alone."""
    generators, rows = RandomState(), list[list[int]]()
    before, held_out = generators.state_dict(), trainer.eval_dataset
    for dataset in (held_out, trainer.train_dataset):
        # a stream of ours begins anew with each pass; training's stands where a run resumes
        is_stream = dataset is held_out and type(dataset).__module__.startswith("forgather_cli.")
        if not rows and (len(dataset) > 0 if is_map_style(dataset) else is_stream):
            examples = EvalLoader(dataset, batch_size=1, max_samples=32, collate_fn=collate_fn)
            rows = list(islice(filter(None, map(_beginning, examples)), 2))
    generators.load_state_dict(before)
    return rows or encoded(trainer, [""], trainer.processing_class)


def _beginning(batch: Any) -> list[int]:
    """Of its first document, which ends where there is another one or padding; nothing where it has no targets."""
    ids, labels = batch.get("input_ids"), batch.get("labels")
    if ids is None or labels is None or labels.ndim != 2 or not (labels[0] != IGNORED).any():
        return []
    inside = batch.get("document_ids", batch.get("attention_mask", torch.zeros_like(ids)))[0]
    found: list[int] = ids[0, inside == inside[0]].tolist()
    if "decoder_input_ids" in batch:
        return found
    # what stands before an answer, or, of text, where at most a begin token is no target
    targets = (labels[0] != IGNORED).nonzero().flatten().tolist()
    return found[: targets[0] if targets[0] > 2 else targets[:16][-1] + 1]


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
