"""The tokens on which source and result are compared: a bounded piece of an evaluation split, or of a text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forgather_cli.config.schema import Config
from forgather_cli.data.build import load_data
from forgather_cli.data.loaders.loader import EvalLoader
from forgather_cli.data.text.tokenizer import Tokenizer, unspelled
from forgather_cli.errors import DataError, ForgatherError
from forgather_cli.finalize.options import read_given
from forgather_cli.labels import IGNORED, label_shift, num_targets, shifted
from forgather_cli.models.build import most_tokens
from forgather_cli.models.pretrained import num_sentinels

MAX_TOKENS = 2048
"""Of a sample; a model of a billion parameters takes a minute for as many on a few cores."""
_MAX_LENGTH = 256  # tokens of one sequence: the logits of as many are in memory
_MIN_TOKENS = 8

BUILT_IN = '''\
The river had risen in the night, and by morning the lower fields lay under brown water. Nobody in the village spoke of
leaving. They carried the seed corn up to the church, two sacks at a time, and put the children to bed in the loft.
"It was higher in my grandfather's day," said the miller, who said so every spring. In 1913 it had reached the third
step of the school; a line of white paint still marked the place.

def moving_average(values, width):
    """Means of all windows of a sequence, in one pass."""
    if width < 1:
        raise ValueError(f"width must be at least 1, got {width}")
    total, means = 0.0, []
    for index, value in enumerate(values):
        total += value
        if index >= width:
            total -= values[index - width]
        if index >= width - 1:
            means.append(total / width)
    return means

What is the capital of France? The capital of France is Paris. Water boils at 100 degrees Celsius at sea level, and at
about 93 degrees in Denver. Der Zug nach Berlin fährt um 7:45 Uhr von Gleis 3 ab. Le musée est fermé le mardi.
'''

MESSAGES = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4."},
    {"role": "user", "content": "Why?\n"},
]


@dataclass(frozen=True)
class Sample:
    """Sequences of token ids (1, T) with labels, -100 where nothing is to be predicted.

    Of an encoder-decoder they are what the decoder reads, and ``sources`` (1, S) what the encoder reads for each.
    """

    sequences: tuple[tuple[Tensor, Tensor], ...]
    origin: str
    """What it is taken from, for people."""
    sources: tuple[Tensor, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(ids.shape[1] for ids, _ in self.sequences)

    @property
    def num_targets(self) -> int:
        return sum(int((each != IGNORED).sum()) for name, each in self.tensors().items() if name.endswith("targets"))

    def tensors(self) -> dict[str, Tensor]:
        """What a model gets for sequence N, ``N.input_ids`` and ``N.decoder_input_ids``, and its ``N.targets`` (T,)."""
        found: dict[str, Tensor] = {}
        for number, (ids, labels) in enumerate(self.sequences):
            sides = {"input_ids": ids}
            if self.sources:
                sides = {"input_ids": self.sources[number], "decoder_input_ids": ids}
            sides["targets"] = shifted(labels, label_shift(sides))
            found |= {f"{number}.{key}": tensor.contiguous() for key, tensor in sides.items()}
        return found


def choose_sample(
    text: Path | None,
    config: Config | None,
    tokenizer: Tokenizer,
    longest: int | None,
    untrusted: str | None = None,
    *,
    is_paired: bool = False,
) -> Sample:
    """Of ``text`` where it is given, else of the evaluation split of a run's ``config``, else built in.

    ``is_paired``: for an encoder-decoder, which is to continue the first half of each piece of a text.
    ``longest``: positions the model knows. ``untrusted``: why the run's data is not loaded.
    Raises DataError for a text that cannot be read or is too short.
    """
    limit = min(_MAX_LENGTH, longest or _MAX_LENGTH)
    if text is not None:
        return _of_text(read_given("--text", text, "plain text"), tokenizer, limit, str(text), is_paired)
    if config is None:
        return _of_text(BUILT_IN, tokenizer, limit, "a built-in text, as the source belongs to no run", is_paired)
    if untrusted is not None:
        why = f"as the run's config {untrusted}, which --trust-config allows"
        return _of_text(BUILT_IN, tokenizer, limit, f"a built-in text, {why}", is_paired)
    try:
        return _of_run(config, limit, tokenizer)
    except ForgatherError as error:
        why = str(error).splitlines()[0]
        return _of_text(
            BUILT_IN, tokenizer, limit, f"a built-in text, as the run's data cannot be read ({why})", is_paired
        )


def _of_text(text: str, tokenizer: Tokenizer, limit: int, origin: str, is_paired: bool) -> Sample:
    ids = tokenizer.encode(text[: 32 * MAX_TOKENS])[:MAX_TOKENS]
    ids = ids[len(tokenizer.prefix_tokens) - len(unspelled(tokenizer.prefix_tokens, ids)) :]
    if len(ids) < _MIN_TOKENS:
        raise DataError(f"--text: {origin} has {len(ids)} tokens, which prove nothing; give a longer text")
    whole = torch.tensor(ids)[None]
    if is_paired:
        halves = [part.chunk(2, 1) for part in whole.split(limit, 1) if part.shape[1] > 1]  # type: ignore[no-untyped-call]
        begins = torch.full((1, 1), tokenizer.pad_token_id)
        decoded = tuple((torch.cat((begins, second[:, :-1]), 1), second) for _, second in halves)
        return Sample(decoded, origin, tuple(first for first, _ in halves))
    begin = torch.tensor(tokenizer.prefix_tokens, dtype=torch.int64)[None]
    parts = [part for part in whole.split(limit - begin.shape[1], 1) if part.shape[1] > 1]  # type: ignore[no-untyped-call]
    return Sample(tuple((ids, ids) for ids in (torch.cat((begin, part), 1) for part in parts)), origin)


def _of_run(config: Config, limit: int, tokenizer: Tokenizer) -> Sample:
    one_each: dict[str, Any] = {"packing": "pad", "pack_encoder": None, "pack_decoder": None}
    option = replace(config.data, **one_each if config.data.is_paired else {})
    sentinels, most = num_sentinels(config.model), most_tokens(config)
    data = load_data(option, seed=max(config.seed, 0), num_sentinels=sentinels, model_tokens=most)
    if data.eval is None:
        raise DataError("it has no evaluation split")
    if data.tokenizer is not None and data.tokenizer.encode(BUILT_IN) != tokenizer.encode(BUILT_IN):
        raise DataError("its tokenizer is another one than the source's")
    sequences: list[tuple[Tensor, Tensor]] = []
    sources: list[Tensor] = []
    left = MAX_TOKENS
    for batch in EvalLoader(data.eval, batch_size=1, device=torch.device("cpu")):
        read = "decoder_input_ids" if option.is_paired else "input_ids"
        documents = batch.get("document_ids", torch.zeros_like(batch[read]))[0]
        counts = torch.unique_consecutive(documents, return_counts=True)[1]  # each is by itself, as in training
        for parts in zip(*(torch.split(batch[key], counts.tolist(), 1) for key in (read, "labels")), strict=True):
            ids, labels = (part[:, : min(limit, left)] for part in parts)
            if num_targets(labels, label_shift(batch)):
                sequences.append((ids, labels))
                left -= ids.shape[1]
                if option.is_paired:
                    sources.append(batch["input_ids"][:, :limit])
        if left < 2:
            break
    if not sequences:
        raise DataError("its evaluation split has no targets")
    return Sample(tuple(sequences), "the run's evaluation split", tuple(sources))
