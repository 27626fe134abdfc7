"""What lm-evaluation-harness asks of a model, answered by any strategy as its own ``hf`` model answers (lm_eval 0.4.13,
``models/huggingface.py``).

Legend: R rows, T tokens, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from lm_eval.api.model import TemplateLM  # type: ignore[import-untyped]
from lm_eval.models import utils as hf  # type: ignore[import-untyped]
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from forgather_cli.data.chat.ends import stop_tokens
from forgather_cli.data.chat.template import ChatTemplate
from forgather_cli.distributed import gather, joined, rank_in, that_of_rank_0, world
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import DataError, ModelError
from forgather_cli.models.cache import KVCache
from forgather_cli.models.generate import generate, left_padded
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.strategies.base import Strategy
from forgather_cli.targets import accepts

T = TypeVar("T")
Tokens = tuple[int, ...]
Group = tuple[Tokens, list[tuple[int, Tokens, list[int]]]]
"""A beginning, and the requests that go on from it: number, what follows on it, and the continuation it predicts."""
_ON_CPU = 1024
"""Tokens of a batch whose logits are all looked at: more of them cost more each (``scripts/bench/tasks.py``)."""
_HERE = "<|goes on here|> "


class StrategyLM(TemplateLM):  # type: ignore[misc]
    """A model under any strategy, with its tokenizer.

    Every rank is asked for the same: to lm-eval the world is one rank (``world_size`` 1). Where each rank holds the
    whole model (ddp) they share the batches; else every pass is collective. Either way all return all answers.
    """

    eot_token_id: int | None = None
    prefix_token_id = 0
    """What stands before a text that has no context, and fills rows up."""
    tokenizer_name = ""

    def __init__(
        self, strategy: Strategy, tokenizer: Any, directory: Path, *, max_length: int, max_tokens: int, group: Any,
        on_batch: Callable[[int, int], None],
    ) -> None:  # fmt: skip
        """Collective.

        ``tokenizer``: ours, or one of transformers. ``directory``: a model directory, of which the chat template and
        generation_config.json are read. ``max_length``: positions of the model (``max_length_of``); longer texts are
        cut on the left. ``max_tokens``: of one batch, padding included, or one text. ``group``: a CPU group of all
        ranks. ``on_batch(done, total)`` is called on all ranks after each round of batches, equally often: there they
        may agree on a stop, by raising.
        """
        super().__init__()
        if getattr(strategy.parts[0], "is_encoder_decoder", False):
            raise ModelError(f"{directory}: is an encoder-decoder, and tasks are asked of decoders; give one")
        self.strategy, self.tokenizer, self.max_length, self.group = strategy, tokenizer, max_length, group
        self._max_tokens, self._on_batch, self._directory = max(max_tokens, max_length), on_batch, directory
        self.eot_token_id = tokenizer.eos_token_id
        begin = self.eot_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
        if begin is None:
            raise DataError(f"{directory}: its tokenizer has no begin token and no end token, one of which tasks need")
        self.prefix_token_id, self._begin = begin, tokenizer.decode([begin])
        self._alone = {"add_special_tokens": False} if accepts(tokenizer.encode, "add_special_tokens") else {}
        self._chat, self._ends = ChatTemplate.of(directory), stop_tokens(directory, tokenizer, None)
        self.holds_whole = strategy.model_group is None
        ids, probe = torch.tensor([[begin]], device=strategy.device), KVCache()
        with evaluation_mode(strategy.parts):
            strategy.logits({"input_ids": ids}, last_only=True, cache=probe)
        self._keeps_cache = probe.length > 0  # a model of the user's may not

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """With the tokens that the tokenizer puts before a text, unless it begins with one by itself."""
        if add_special_tokens is None and not string.startswith(self._begin):
            return list(getattr(self.tokenizer, "encode_prompt", self.tokenizer.encode)(string))
        return list(self.tokenizer.encode(string, **self._alone))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation up to where the assistant is to speak, or to where it goes on with its last message."""
        if self._chat is None:
            raise DataError(f"{self._directory}: has no chat template; leave --apply-chat-template out")
        messages = [dict(message) for message in chat_history]
        if not add_generation_prompt:  # as transformers (5.24, chat_template_utils.py) finds the place
            messages[-1]["content"] += _HERE
        try:
            text = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        except DataError:  # hf then leaves out what many templates know no place for
            messages = [message for message in messages if message["role"] != "system"]
            text = self._chat.render(messages, add_generation_prompt=add_generation_prompt)
        if add_generation_prompt:
            return text
        before, _, after = text.rpartition(_HERE.strip())
        return before if after.startswith(_HERE[-1]) else before.rstrip()

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = True) -> list[float]:
        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            rolled = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            windows += [(number, *make_disjoint_window(window)) for window in rolled]
        totals = [0.0] * len(requests)
        for (number, _, _), (score, _) in zip(windows, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += score
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """Sum of log-probabilities of each continuation, and whether it is what greedy decoding writes.

        All tokens but those that predict a continuation are its beginning, which is computed once for all that follow
        on it, without their logits.
        """
        groups: dict[Any, Group] = {}
        for number, (_, context, continuation) in enumerate(requests):
            if not 0 < (count := len(continuation)) <= self.max_length:
                raise DataError(f"--tasks: a continuation has {count} tokens, the model takes 1 to {self.max_length}")
            tokens = (*context, *continuation)[-(self.max_length + 1) : -1]
            begun = tokens[: len(tokens) - count if self._keeps_cache else 0]
            groups.setdefault(begun or number, (begun, []))[1].append((number, tokens[len(begun) :], continuation))
        sized = [
            ((len(begun), len(rows), max(len(row) for _, row, _ in rows)), (begun, rows))
            for begun, rows in groups.values()
        ]
        most = min(self._max_tokens, _ON_CPU) if self.strategy.device.type == "cpu" else self._max_tokens
        answers = self._answers(self._batches(sized, most), self._scores, shared=self.holds_whole)
        return [answers[number] for number in range(len(requests))]

    def _scores(self, batch: list[Group]) -> dict[int, tuple[float, bool]]:
        rows, device = [row for _, rows in batch for row in rows], self.strategy.device
        ids = pad_sequence([torch.tensor(row) for _, row, _ in rows], True, self.prefix_token_id).to(device)
        wanted = [torch.tensor([*[-1] * (len(row) - len(tokens)), *tokens]) for _, row, tokens in rows]
        targets = pad_sequence(wanted, True, -1).to(device)
        inputs, cache = {"input_ids": ids}, None
        if batch[0][0]:
            padded = left_padded([list(begun) for begun, _ in batch], self.prefix_token_id)
            begun, real = (tensor.to(device) for tensor in padded)
            nth = torch.tensor([nth for nth, (_, rows) in enumerate(batch) for _ in rows], device=device)
            cache, mask = KVCache(), {} if bool(real.all()) else {"attention_mask": real}
            self.strategy.logits({"input_ids": begun, **mask}, last_only=True, cache=cache)
            if len(nth) > len(batch):
                cache.select(nth)
            if mask:
                inputs["attention_mask"] = torch.cat((real[nth], torch.ones_like(ids)), 1)
        logits = self.strategy.logits(inputs, cache=cache)
        if logits is None:  # the last layer lives elsewhere
            return {}
        logits, counts = logits.float(), targets >= 0
        scores = logits.gather(-1, targets.clamp(min=0)[..., None])[..., 0] - logits.logsumexp(-1)
        totals = scores.double().where(counts, 0.0).sum(1).tolist()
        is_greedy = (~counts | (logits.argmax(-1) == targets)).all(1).tolist()
        return {number: (total, flag) for (number, *_), total, flag in zip(rows, totals, is_greedy, strict=True)}

    def generate_until(self, requests: list[Any], disable_tqdm: bool = True) -> list[str]:
        kinds: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            kinds.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        answers: dict[int, str] = {}
        end = None if self.eot_token_id is None else self.tokenizer.decode([self.eot_token_id])
        for numbers in kinds.values():
            first = requests[numbers[0]]
            settings, what = hf.normalize_gen_kwargs(first.args[1]), f"task {first.task_name}"
            stops = list(filter(None, hf.handle_stop_sequences(settings.pop("until"), end)))
            most, temperature = settings.pop("max_gen_toks"), settings.pop("temperature", 0.0)
            draws = bool(settings.pop("do_sample")) and temperature > 0
            if (room := self.max_length - most) <= 0:
                raise DataError(f"{what}: max_gen_toks={most} leaves no room in {self.max_length} tokens; lower it")
            if unknown := [name for name in settings if not accepts(generate, name)]:
                raise DataError(f"{what}: generation_kwargs has {unknown[0]}, which is not known; take it out")
            drawn = {"temperature": temperature, "top_k": 50} if draws else {}  # 50: transformers' default (5.24)
            generator = torch.Generator(self.strategy.device).manual_seed(1234)
            choices = {"max_new_tokens": most, "do_sample": draws, "generator": generator, **drawn, **settings}
            prompts = [(n, self.tok_encode(requests[n].args[0])[-room:] or [self.prefix_token_id]) for n in numbers]
            batches = self._batches([((len(each[1]), 1, most), each) for each in prompts], self._max_tokens)
            # ranks that drew for batches of their own would write other texts than one device
            shared = self.holds_whole and not draws
            answers |= self._answers(batches, partial(self._texts, stops, choices), shared=shared)
        return [answers[number] for number in range(len(requests))]

    def _texts(self, stops: list[str], choices: dict[str, Any], batch: list[tuple[int, list[int]]]) -> dict[int, str]:
        rows = left_padded([tokens for _, tokens in batch], self.prefix_token_id)
        ids, real = (each.to(self.strategy.device) for each in rows)
        tail = max((len(stop.encode()) for stop in stops), default=0) + 1  # tokens that a stop may span

        def is_over(new: Tensor) -> Tensor:  # (R, candidates, T)
            texts = [[self.tokenizer.decode(tokens) for tokens in each] for each in new[..., -tail:].tolist()]
            return torch.tensor([[any(stop in text for stop in stops) for text in each] for each in texts])

        made = generate(
            self.strategy.logits, ids, real, **choices, eos_token_id=self._ends, pad_token_id=self.prefix_token_id,
            agree=None if self.holds_whole else that_of_rank_0(self.group), is_over=is_over if stops else None,
        )  # fmt: skip
        texts = [self.tokenizer.decode(new, skip_special_tokens=True) for new in made[:, ids.shape[1] :].tolist()]
        return {n: hf.postprocess_generated_text(text, stops, None) for (n, _), text in zip(batch, texts, strict=True)}

    def _batches(self, sized: list[tuple[tuple[int, int, int], T]], most: int) -> list[list[T]]:
        """Items, the longest first, in batches of at most ``most`` tokens, padding included; each comes with the tokens
        of its beginning, rows that follow on it, tokens of the longest. Without a beginning: in batches of their own.
        """
        batches: list[list[T]] = []
        widest = rows = longest = 0
        for (width, more, length), item in sorted(sized, key=itemgetter(0), reverse=True):
            high = max(longest, length)
            tokens = (len(batches[-1]) + 1) * widest + (rows + more) * high if batches else 0
            if not batches or tokens > most or widest + high > self.max_length or (widest and not width):
                batches.append([])
                widest, rows, high = width, 0, length
            batches[-1].append(item)
            rows, longest = rows + more, high
        return batches

    def _answers(self, batches: list[list[T]], answer: Callable[[list[T]], dict[int, Any]], *, shared: bool) -> Any:
        """Collective. The answers to all batches, by the requests' numbers; ``shared``: each rank has its part."""
        rank, size = (rank_in(self.group), world().size) if shared else (0, 1)
        found, failed = dict[int, Any](), ""
        for first in range(0, len(batches), size):
            try:
                found |= answer(batches[first + rank]) if first + rank < len(batches) and not failed else {}
            except Exception as error:
                if self.group is None or not self.holds_whole:
                    raise
                failed = f"{type(error).__name__}: {error}"  # the others may have none, and wait where all meet
            self._on_batch(min(first + size, len(batches)), len(batches))
        parts = gather((failed, found), self.group)
        if failure := joined([each or None for each, _ in parts]):
            raise ModelError(failure)
        return {number: value for _, part in parts for number, value in part.items()}


def max_length_of(directory: Path, otherwise: int) -> int:
    """Positions that a model directory's config.json gives it, where hf looks; ``otherwise`` where it gives none."""
    file = directory / "config.json"
    config = read_json_object(file, ModelError) if file.is_file() else {}
    return int(hf.resolve_max_length(SimpleNamespace(**(config.get("text_config") or config)), default=otherwise))
