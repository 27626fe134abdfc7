"""What lm-evaluation-harness asks of a model, answered by any strategy as its own ``hf`` model answers (lm_eval 0.4.13,
``models/huggingface.py``).

Legend: R rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs  # type: ignore[import-untyped]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-untyped]
from torch import Tensor

from forgather_cli.data.chat.ends import stop_tokens
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.distributed import gather, joined, rank_in, that_of_rank_0, world
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ModelError
from forgather_cli.models.cache import KVCache
from forgather_cli.models.generate import generate, left_padded
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.models.pretrained import read_config
from forgather_cli.strategies.base import Strategy
from forgather_cli.targets import accepts

T = TypeVar("T")
Beginning = tuple[int, ...]
Rows = dict[tuple[int, ...], list[tuple[int, list[int]]]]
"""What follows on a beginning: tokens, and the requests, (number, continuation), whose continuations they predict."""
_SAMPLING = {
    "top_k", "top_p", "min_p", "typical_p", "num_beams", "repetition_penalty", "no_repeat_ngram_size", "min_new_tokens",
}  # fmt: skip
_ON_CPU = 1024
"""Tokens of a batch whose logits are all looked at: more of them cost more each (``scripts/bench/tasks.py``)."""


class StrategyLM(TemplateLM):  # type: ignore[misc]
    """A model in eval mode, under any strategy, with its tokenizer.

    Every rank is asked for the same: to lm-eval the world is one rank (``world_size`` 1). Where each rank holds the
    whole model (ddp) they share the batches; else every pass is collective. Either way all return all answers.
    """

    max_gen_toks = 256  # as hf's, where a task says nothing

    def __init__(
        self,
        strategy: Strategy,
        tokenizer: Any,
        directory: Path,
        *,
        max_length: int,
        max_tokens: int,
        group: Any,
        on_batch: Callable[[str, int, int], None] = lambda what, done, total: None,
    ) -> None:
        """Collective.

        ``tokenizer``: ours, or one of transformers. ``directory``: a model directory, of which the chat template and
        generation_config.json are read. ``max_length``: positions of the model; longer texts are cut on the left.
        ``max_tokens``: of one batch, padding included. ``group``: a CPU group of all ranks. ``on_batch(what, done,
        total)`` is called on all ranks after each round of batches, equally often: there they may agree on a stop.
        """
        super().__init__()
        if getattr(strategy.parts[0], "is_encoder_decoder", False):
            raise ModelError(f"{directory}: is an encoder-decoder, and tasks are asked of decoders; give one")
        self.strategy, self.tokenizer, self.max_length, self.group = strategy, tokenizer, max_length, group
        self._max_tokens, self._on_batch = max_tokens, on_batch
        self._chat, self._directory = ChatTemplate.of(directory), directory
        self._ends = stop_tokens(directory, tokenizer, None)
        self._pad = self._ends[0] if self._ends else tokenizer.pad_token_id or 0
        ids = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        self._begins: int | None = next((i for i in ids if i is not None), None)
        self._begin = "" if self._begins is None else tokenizer.decode([self._begins])
        self._alone = {"add_special_tokens": False} if accepts(tokenizer.encode, "add_special_tokens") else {}
        self._holds_whole = strategy.model_group is None
        probe = KVCache()
        with evaluation_mode(strategy.parts):
            self._logits({"input_ids": torch.tensor([[self._pad]])}, last_only=True, cache=probe)
        self._keeps_cache = probe.length > 0

    # -------------------------------------------------------------------------------------------------------- tokens

    @property
    def eot_token_id(self) -> int | None:
        found: int | None = self.tokenizer.eos_token_id
        return found

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text without a context."""
        if self._begins is None:
            raise DataError(f"{self._directory}: its tokenizer has no begin or end token, and a task begins with one")
        return self._begins

    @property
    def tokenizer_name(self) -> str:
        return str(self._directory)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """With the tokens that the tokenizer puts before a text, unless it begins with one by itself."""
        if add_special_tokens is None and not string.startswith(self._begin):
            return list(getattr(self.tokenizer, "encode_prompt", self.tokenizer.encode)(string))
        return list(self.tokenizer.encode(string, **self._alone))

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        return self._chat.source if self._chat and chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation up to where the assistant is to speak, or to where it goes on with its last message."""
        if self._chat is None:
            raise DataError(
                f"{self._directory}: has no chat template; leave --apply-chat-template out, or give it one with "
                "forgather finalize SOURCE DEST --chat-template FILE"
            )
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:  # as transformers (5.24, chat_template_utils.py) finds the place
            messages[-1]["content"] += _HERE
        try:
            text = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        except DataError:  # hf leaves out what a template knows no place for
            messages = [message for message in messages if message["role"] != "system"]
            text = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        before, _, after = text.rpartition(_HERE.strip())
        return before if after.startswith(_HERE[-1]) else before.rstrip()

    # ------------------------------------------------------------------------------------------------ log-likelihoods

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=True)
        return found

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows: list[tuple[None, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            rolled = get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, self.max_length, context_len=1
            )
            windows += [(None, *make_disjoint_window(window)) for window in rolled]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        for owner, (score, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += score
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of each continuation, and whether it is what greedy decoding writes.

        All tokens but those that predict a continuation are its beginning, which is computed once for all that follow
        on it, without their logits.
        """
        groups: dict[tuple[Beginning, tuple[int, ...]], Rows] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise DataError(
                    f"request {number}: a continuation of {len(continuation)} tokens, where the model takes 1 to "
                    f"{self.max_length}; mend the task"
                )
            tokens = (*context, *continuation)[-(self.max_length + 1) : -1]
            cut = len(tokens) - len(continuation) if self._keeps_cache else 0
            begun, row = tokens[:cut], tokens[cut:]
            rows = groups.setdefault((begun, () if begun else row), {})
            rows.setdefault(row, []).append((number, continuation))

        def size(group: tuple[Beginning, Rows]) -> tuple[int, int, int]:
            return len(group[0]), len(group[1]), max(map(len, group[1]))

        most = min(self._max_tokens, _ON_CPU) if self.strategy.device.type == "cpu" else self._max_tokens
        batches = self._batches([(begun, rows) for (begun, _), rows in groups.items()], size, most)
        found = self._answers("log-likelihoods", batches, self._scores, shared=self._holds_whole)
        return [found[number] for number in range(len(requests))]

    def _scores(self, batch: list[tuple[Beginning, Rows]]) -> dict[int, tuple[float, bool]]:
        rows = [(nth, row, wanted) for nth, (_, follow) in enumerate(batch) for row, wanted in follow.items()]
        longest = max(len(row) for _, row, _ in rows)
        ids = torch.tensor([[*row, *[self._pad] * (longest - len(row))] for _, row, _ in rows])
        inputs, cache = {"input_ids": ids}, None
        if batch[0][0]:
            cache = KVCache()
            begun, real = left_padded([list(each) for each, _ in batch], self._pad)
            is_padded = not bool(real.all())
            mask = {"attention_mask": real} if is_padded else {}
            self._logits({"input_ids": begun, **mask}, last_only=True, cache=cache)
            nth = torch.tensor([nth for nth, _, _ in rows])
            if len(rows) > len(batch):
                cache.select(nth.to(self.strategy.device))
            if is_padded:
                inputs["attention_mask"] = torch.cat((real[nth], torch.ones_like(ids)), 1)
        logits = self._logits(inputs, cache=cache)
        if logits is None:  # the last layer lives elsewhere
            return {}
        asked = [(r, row, number, tokens) for r, (_, row, each) in enumerate(rows) for number, tokens in each]
        places = [
            (r, len(row) - len(tokens) + n, token, which)
            for which, (r, row, _, tokens) in enumerate(asked)
            for n, token in enumerate(tokens)
        ]
        r, t, token, which = torch.tensor(places, device=logits.device).T
        logits = logits.float()
        scores = logits[r, t, token] - logits.logsumexp(-1)[r, t]
        wrong = logits.argmax(-1)[r, t] != token
        sums = torch.zeros((2, len(asked)), dtype=torch.float64, device=logits.device)
        sums.index_add_(1, which, torch.stack((scores.double(), wrong.double())))
        answers = zip(asked, *sums.tolist(), strict=True)
        return {number: (score, not missed) for (_, _, number, _), score, missed in answers}

    # ----------------------------------------------------------------------------------------------------- generation

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        found: dict[int, str] = {}
        for numbers in kinds.values():
            settings = normalize_gen_kwargs(requests[numbers[0]].args[1], self.max_gen_toks)
            what = f"task {requests[numbers[0]].task_name}: generation_kwargs"
            end = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
            stops = [stop for stop in handle_stop_sequences(settings.pop("until"), end) if stop]
            most, warmth = settings.pop("max_gen_toks"), settings.pop("temperature", 0.0)
            draws = bool(settings.pop("do_sample")) and warmth > 0
            room = self.max_length - most
            if room <= 0:
                raise DataError(f"{what}: max_gen_toks={most} leaves no room in {self.max_length} tokens; lower it")
            if unknown := sorted(set(settings) - _SAMPLING):
                raise DataError(f"{what}: {unknown[0]} is not known; take it out ({', '.join(sorted(_SAMPLING))} are)")
            drawn = {"temperature": warmth, "top_k": 50} if draws else {}  # 50: transformers' default (5.24)
            choices = {"max_new_tokens": most, "do_sample": draws, **drawn, **settings}
            generator = torch.Generator(self.strategy.device).manual_seed(1234)
            write = partial(self._texts, stops=stops, choices=choices, generator=generator)
            prompts = [(n, self.tok_encode(requests[n].args[0])[-room:] or [self.prefix_token_id]) for n in numbers]
            batches = self._batches(prompts, partial(_size_of_prompt, most), self._max_tokens)
            # ranks that drew for batches of their own would write other texts than one device
            found |= self._answers("texts", batches, write, shared=self._holds_whole and not draws)
        return [found[number] for number in range(len(requests))]

    def _texts(
        self,
        batch: list[tuple[int, list[int]]],
        *,
        stops: list[str],
        choices: dict[str, Any],
        generator: torch.Generator,
    ) -> dict[int, str]:
        ids, real = left_padded([tokens for _, tokens in batch], self._pad)
        tail = max((len(stop.encode()) for stop in stops), default=0) + 1  # tokens that a stop may span

        def is_over(new: Tensor) -> Tensor:  # (R, candidates, T)
            texts = [[self.tokenizer.decode(tokens) for tokens in each] for each in new[..., -tail:].tolist()]
            return torch.tensor([[any(stop in text for stop in stops) for text in each] for each in texts])

        made = generate(
            self.strategy.logits,
            ids.to(self.strategy.device),
            real.to(self.strategy.device),
            **choices,
            eos_token_id=self._ends,
            pad_token_id=self._pad,
            generator=generator,
            agree=None if self._holds_whole else that_of_rank_0(self.group),
            is_over=is_over if stops else None,
        )
        found: dict[int, str] = {}
        for (number, _), tokens in zip(batch, made[:, ids.shape[1] :].tolist(), strict=True):
            text = self.tokenizer.decode(tokens, skip_special_tokens=True)
            for stop in stops:
                text = text.split(stop)[0]
            found[number] = text
        return found

    # -------------------------------------------------------------------------------------------------------- batches

    def _logits(self, inputs: dict[str, Tensor], **kwargs: Any) -> Tensor | None:
        inputs = {name: tensor.to(self.strategy.device) for name, tensor in inputs.items()}
        return self.strategy.logits(inputs, **kwargs)

    def _batches(self, items: Sequence[T], size: Callable[[T], tuple[int, int, int]], most: int) -> list[list[T]]:
        """Items, the longest first, in batches of at most ``most`` tokens, padding included. ``size``: tokens of an
        item's beginning, rows that follow on it, tokens of the longest. Without a beginning: in batches of their own.
        """
        batches: list[list[T]] = []
        widest = rows = longest = 0
        for item in sorted(items, key=size, reverse=True):
            width, more, length = size(item)
            if batches:
                longest = max(longest, length)
                tokens = (len(batches[-1]) + 1) * widest + (rows + more) * longest
            if not batches or tokens > most or widest + longest > self.max_length or (widest and not width):
                batches.append([])
                widest, rows, longest = width, 0, length
            batches[-1].append(item)
            rows += more
        return batches

    def _answers(
        self, what: str, batches: list[list[T]], answer: Callable[[list[T]], dict[int, Any]], *, shared: bool
    ) -> dict[int, Any]:
        """Collective. The answers to all batches, by the requests' numbers; ``shared``: each rank has its part."""
        rank, size = (rank_in(self.group), world().size) if shared else (0, 1)
        found: dict[int, Any] = {}
        failure: Exception | None = None
        for first in range(0, len(batches), size):
            try:
                if first + rank < len(batches) and failure is None:
                    found |= answer(batches[first + rank])
            except Exception as error:
                if size == 1:
                    raise
                failure = error  # the others may have none, and wait for this rank where all meet
            self._on_batch(what, min(first + size, len(batches)), len(batches))
        if failed := joined(gather(None if failure is None else f"{type(failure).__name__}: {failure}", self.group)):
            raise ModelError(failed) from failure
        parts = gather(found, self.group)
        return {number: value for part in parts for number, value in part.items()}


def _size_of_prompt(most: int, prompt: tuple[int, list[int]]) -> tuple[int, int, int]:
    return len(prompt[1]), 1, most


_HERE = "<|goes on here|> "


def max_length_of(directory: Path, otherwise: int) -> int:
    """Positions that a model directory's files give it, where hf looks (``resolve_max_length``), else its 2048;
    ``otherwise`` where there is no config.json."""
    if not (directory / "config.json").is_file():
        return otherwise
    config = read_config(directory, "model")
    config = config.get("text_config") or config
    places = [config.get(name) for name in ("n_positions", "max_position_embeddings", "n_ctx")]
    if (directory / "tokenizer_config.json").is_file():
        most = read_json_object(directory / "tokenizer_config.json", DataError).get("model_max_length")
        places.append(most if most != int(1e30) else None)
    return next((int(each) for each in places if each is not None), 2048)
