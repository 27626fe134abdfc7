"""``forgather generate``: prompts to texts with a trained model, and conversations with one that has a chat template.

Legend: B prompts, T tokens.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from forgather_cli.config.schema import Sampling
from forgather_cli.data.chat.ends import ending_of
from forgather_cli.data.chat.template import ChatTemplate, Message
from forgather_cli.data.text.detokenize import Detokenizer
from forgather_cli.data.text.tokenizer import Tokenizer
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ForgatherError, ModelError, SetupError
from forgather_cli.inference.source import Source, load_located, locate
from forgather_cli.loss.model_io import model_logits
from forgather_cli.models.generate import generate, masked_prompt, prompt_inputs
from forgather_cli.terminal.bars import doing

Finish = Literal["stop", "length", "limit"]
"""An end token or a stop text; ``max_new_tokens``; the positions the model was trained for."""


@dataclass(frozen=True)
class Text:
    """What a model has written to one prompt."""

    text: str
    num_tokens: int
    finish_reason: Finish


@dataclass
class Generator:
    """A model with its tokenizer, ready to write. ``limit``: positions it was trained for, None where nobody knows."""

    source: Source
    end_tokens: tuple[int, ...]
    chat: ChatTemplate | None
    limit: int | None
    directory: Path
    mode: str | None = None
    """Of an encoder-decoder trained with UL2, which denoiser's examples prompts look like."""
    _draws: torch.Generator | None = field(default=None, init=False, repr=False)

    @property
    def tokenizer(self) -> Tokenizer:
        return self.source.tokenizer

    @property
    def reads_prompts(self) -> bool:
        """Whether an encoder reads prompts, so that they take none of the positions that are written."""
        return bool(getattr(self.source.model, "is_encoder_decoder", False))

    def encode(self, text: str, what: str, *, is_rendered: bool = False) -> list[int]:
        """Tokens of a prompt; an empty one begins with the token that separates documents.

        ``is_rendered``: it is a conversation, in which the template has written a begin token if there is to be one.
        Raises SetupError for one that leaves the model no position to write at; ``what`` names it.
        """
        if self.reads_prompts:
            text = masked_prompt(self.tokenizer, text, self.mode)
        start = self.tokenizer.bos_token_id
        start = self.tokenizer.eos_token_id if start is None else start
        is_text = not (is_rendered or self.reads_prompts)
        ids = self.tokenizer.encode_prompt(text) if is_text else self.tokenizer.encode(text)
        ids = ids or ([] if start is None else [start])
        if not ids:
            raise SetupError(f"{what}: is empty, and the tokenizer has no token to begin with; write some text")
        if self.limit is not None and len(ids) >= self.limit:
            raise SetupError(f"{what}: has {len(ids)} tokens, and the model takes {self.limit} in all; shorten it")
        return ids

    def render(self, messages: Sequence[Message]) -> str:
        """A conversation up to where the assistant is to speak. Raises DataError where there is no template."""
        if self.chat is None:
            raise DataError(
                f"{self.directory}: has no chat template; give it one with "
                "forgather finalize SOURCE DEST --chat-template FILE"
            )
        return self.chat.render(messages, add_generation_prompt=True)

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        in_chat: bool = False,
        show: Callable[[int, str], None] = lambda row, text: None,
    ) -> list[Text]:
        """What the model writes to tokens of prompts, as one batch; ``show(row, text)`` gets the text as it comes.

        ``in_chat``: the end of the assistant's turn is an end too.
        """
        ids, texts = self._ends_of_turn() if in_chat else ((), ())
        ends, stops = {*sampling.ends(self.end_tokens), *ids}, [*sampling.stop, *texts]
        rows = [_Row(self, prompt, sampling.max_new_tokens, ends, stops) for prompt in prompts]
        pad = self.tokenizer.pad_token_id if sampling.pad_token_id is None else sampling.pad_token_id
        device = self.source.device
        inputs = prompt_inputs(self.source.model, [list(prompt) for prompt in prompts], pad)
        input_ids, mask, encoder_inputs = tree_map_only(Tensor, lambda tensor: tensor.to(device), inputs)
        if self._draws is None:  # one for all that a command draws
            self._draws = torch.Generator(device).manual_seed(sampling.seed)

        def on_token(column: Tensor) -> Tensor:
            for number, (row, token) in enumerate(zip(rows, column[:, 0].tolist(), strict=True)):
                if row.finish is None and (new := row.add(token)):
                    show(number, new)
            return torch.tensor([[row.finish is not None] for row in rows])

        def is_over(texts: Tensor) -> Tensor:  # (B, C, n)
            each = zip(rows, texts.tolist(), strict=True)
            return torch.tensor([[row.would_end(tokens) for tokens in candidates] for row, candidates in each])

        several = sampling.num_beams > 1  # which text is the best is known at the end
        made = generate(
            self._logits,
            input_ids,
            mask,
            encoder_inputs=encoder_inputs,
            **{**sampling.choices, "max_new_tokens": max(row.room for row in rows)},
            eos_token_id=sorted(ends),
            pad_token_id=pad,
            generator=self._draws,
            on_token=None if several else on_token,
            is_over=is_over if several else None,
        )
        if several:
            for column in made[:, input_ids.shape[1] :].T:
                on_token(column[:, None])
        return [row.result() for row in rows]

    def _logits(self, batch: dict[str, Any], *, last_only: bool = True, cache: Any = None) -> Tensor:
        model = self.source.model
        try:
            return model_logits(model, batch, last_only=last_only, cache=cache)
        except Exception as error:  # the edge to a model of the user's; what ours raises is reported as it is
            ours = type(model).__module__.split(".")[0] in ("forgather_cli", "transformers")
            if ours or isinstance(error, ForgatherError | torch.OutOfMemoryError):
                raise
            at, shape = traceback.extract_tb(error.__traceback__)[-1], tuple(batch["input_ids"].shape)
            said = " ".join(f"{type(error).__name__}: {error}".removesuffix(": ").split())
            raise ModelError(
                f"{type(model).__name__}: forward failed on input_ids of shape {shape} ({said}, {at.filename}:"
                f"{at.lineno}); to generate it has to take texts of any length"
            ) from error

    def _ends_of_turn(self) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """(tokens, texts) that end the assistant's turn besides the end tokens: what the template writes there."""
        assert self.chat is not None
        with suppress(DataError):  # of a template that does not tell; the end tokens must do
            if mark := ending_of(self.chat):
                ids = self.tokenizer.encode(mark)
                return (tuple(ids), ()) if len(ids) == 1 else ((), (mark,))
        return (), ()


class _Row:
    """One prompt of a batch: its text so far, and whether it has ended."""

    def __init__(
        self, generator: Generator, prompt: Sequence[int], max_new_tokens: int, ends: set[int], stops: Sequence[str]
    ) -> None:
        self._ends, self._stops = ends, stops
        begun = [] if generator.reads_prompts else prompt
        self._new_text = partial(Detokenizer, generator.tokenizer, begun, stops)
        self._text = self._new_text()
        self._shown: list[str] = []
        self.num_tokens = 0
        self.finish: Finish | None = None
        positions = max_new_tokens if generator.limit is None else generator.limit - (len(begun) or 1)
        self.room = min(max_new_tokens, positions)
        self._last: Finish = "length" if self.room == max_new_tokens else "limit"

    def add(self, token: int) -> str:
        """Take the next token; returns what may be shown now."""
        self.num_tokens += 1
        new = "" if token in self._ends else self._text.add(token)
        if token in self._ends or self._text.stopped:
            self.finish = "stop"
        elif self.num_tokens == self.room:
            self.finish = self._last
        if self.finish is not None:
            new += self._text.rest()
        self._shown.append(new)
        return new

    def would_end(self, tokens: Sequence[int]) -> bool:
        """Whether a text of these tokens ends with the last of them, end tokens aside."""
        if len(tokens) == self.room or not self._stops:
            return len(tokens) == self.room
        text = self._new_text()
        for token in tokens:
            text.add(token)
        return text.stopped

    def result(self) -> Text:
        return Text("".join(self._shown), self.num_tokens, self.finish or self._last)


def load_generator(source: Path, *, device: str, trust_config: bool = False, mode: str | None = None) -> Generator:
    """The model that ``source`` stands for; ``mode``: see ``Generator``. Raises SetupError."""
    with doing("reading the model"):
        found = locate(source, trust_config=trust_config)
        loaded = load_located(found, device=device)
    if mode is not None and not getattr(loaded.model, "is_encoder_decoder", False):
        raise SetupError(f"--mode: {source} is no encoder-decoder, got {mode}; leave it out")
    if mode is not None and len(loaded.tokenizer.encode(f"[{mode}]")) != 1:
        raise SetupError(
            f"--mode: the tokenizer has no token [{mode}], got {mode}; give a denoiser that it was trained with"
        )
    return Generator(
        loaded,
        _end_tokens(found.directory, loaded.tokenizer),
        ChatTemplate.of(found.directory),
        _limit(loaded.model),
        found.directory,
        mode,
    )


def _end_tokens(directory: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokenizer's end token, and those of generation_config.json: of chat models also the end of a turn."""
    named: Any = []
    path = directory / "generation_config.json"
    if path.exists():
        found = read_json_object(path, lambda why: SetupError(f"{why}; mend it or remove it"))
        named = found.get("eos_token_id") or []
    ids = [tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
    return tuple(dict.fromkeys(i for i in ids if isinstance(i, int)))


def _limit(model: Any) -> int | None:
    """Positions a model was trained for; None for rotary embeddings that stretch by themselves, and where unknown."""
    config = getattr(model, "settings", None) or getattr(model, "config", None)
    scaling = getattr(config, "rope_scaling", None)
    if getattr(scaling, "rope_type", None) == "dynamic":
        return None
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) else None
