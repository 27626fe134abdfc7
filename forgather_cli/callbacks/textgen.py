"""TextgenCallback: what the model writes, while it learns.

Legend: B prompts, T tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.console import StreamName, console, is_terminal, printable, say, timestamp
from forgather_cli.callbacks.tensorboard import indented
from forgather_cli.config.schema import Sampling, TextgenSettings
from forgather_cli.data.chat.ends import as_turns
from forgather_cli.distributed import on_rank_0, that_of_rank_0
from forgather_cli.documents.regular_files import append, read_bytes, set_aside, write_whole
from forgather_cli.errors import SetupError
from forgather_cli.models.parts import evaluation_mode
from forgather_cli.terminal.bars import Bar

logger = logging.getLogger(__name__)
ShowBar = Callable[[str, int, int], None]
_MAX_LINES = 6  # on a terminal
_RECORD = re.compile(rb"^(?==== step \d+ ===\r?$)", re.MULTILINE)
"""Where one begins."""
_WHOLE = re.compile(rb".*\n\r?\n", re.DOTALL)
_BAR = "samples"


class TextgenCallback(BuiltIn[TextgenSettings]):
    """Continues the prompts at each evaluation, or every ``generation_steps`` steps, all in one left-padded batch: to
    a tokenizer's chat template, unless ``raw``, each is one turn of the user, which the model answers up to the end of
    its turn. Without prompts those of held-out data (``Trainer.held_out_prompts``).

    Collective: every rank generates the tokens that rank 0 draws, and rank 0 writes to the console, to ``samples.txt``
    and to TensorBoard. Sampling draws from a generator of its own, seeded by (seed, step), and
    leaves training's alone.
    """

    def __init__(self, *args: Any, summary_writer: Any = None, show_bar: ShowBar | None = None, **kwargs: Any) -> None:
        """``summary_writer``: a ResumableSummaryWriter, by default the Trainer's TensorBoard. ``show_bar``: shows how
        many of how many tokens are written, beside other bars; by default the Trainer's progress, else a bar alone.
        ``generation_config`` may be transformers' object.
        """
        if "generation_config" in kwargs:
            kwargs["generation_config"] = as_table(kwargs["generation_config"])
        super().__init__(*args, **kwargs)
        self.prompts, self.sampling = self.settings.texts(), self.settings.sampling()
        self._rows, self._shown = list[list[int]](), list[str]()
        self._summary_writer, self._show_bar = summary_writer, show_bar
        self._writes, self._wrote = True, False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._summary_writer is not None:
            self._summary_writer.begin(self.run, state.resumed_step)
        if state.is_world_process_zero:  # step 0 is repeated too, unless this very process has evaluated there
            cut_samples(self.run.samples, state.resumed_step if state.resumed_step or self._wrote else -1)
        tokenizer = kwargs.get("processing_class")
        self._writes = tokenizer is not None
        if not self._writes:
            logger.warning("callbacks.textgen: there is no tokenizer, so no text is written; give the data one")
            return
        self._encode(kwargs["trainer"], tokenizer)  # a prompt that cannot be encoded: now, not at step 100

    def _encode(self, trainer: Any, tokenizer: Any) -> None:
        """Collective. What is continued, as tokens and as it is shown, and what ends an answer: as rank 0 has it."""
        if not self._rows:
            found = on_rank_0(lambda: self._asked(trainer, tokenizer), trainer.run.cpu_group)
            self._shown, self._rows, ends = found
            self.sampling = replace(self.sampling, stop=[*self.sampling.stop, *ends])

    def _asked(self, trainer: Any, tokenizer: Any) -> tuple[list[str], list[list[int]], list[str]]:
        with TemporaryDirectory() as folder:  # which template a checkpoint has, whoever made the tokenizer
            trainer.run.write_model_files(Path(folder))
            turns = None if self.settings.raw else as_turns(Path(folder), tokenizer, self.prompts or [])
        shown, rows, ends = turns or (self.prompts or [], [], [])
        if self.prompts is None:
            rows = trainer.held_out_prompts()
            shown = [tokenizer.decode(row) for row in rows]
        return shown, rows or encoded(trainer, shown, tokenizer), ends

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.settings.generation_steps is None and self._writes:
            self._sample(state, kwargs)

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        every = self.settings.generation_steps
        if self._writes and every is not None and state.global_step % every == 0:
            self._sample(state, kwargs)

    def _sample(self, state: TrainerState, kwargs: dict[str, Any]) -> None:
        tokenizer, trainer = kwargs.get("processing_class"), kwargs["trainer"]
        self._encode(trainer, tokenizer)
        digest = hashlib.sha256(f"textgen {trainer.run.seed} {state.global_step}".encode()).digest()
        generator = torch.Generator(trainer.strategy.device).manual_seed(int.from_bytes(digest[:7], "little"))
        most, columns = self.sampling.max_new_tokens, count(1)
        with Bar(_BAR, total=most, shown=state.is_world_process_zero) as bar:

            def alone(what: str, done: int, total: int) -> None:
                bar.update(done, total)

            progress = trainer.callbacks.by_name.get("progress")
            show = self._show_bar or getattr(progress, "show_bar", None) or alone

            def on_token() -> None:
                if state.is_world_process_zero:
                    show(_BAR, next(columns), most)

            completions = written(trainer, self._rows, tokenizer, self.sampling, generator, on_token)
            if state.is_world_process_zero:
                show(_BAR, most, most)
        if state.is_world_process_zero:
            writer = self._summary_writer or trainer.tensorboard
            self._write([printable(text) for text in completions], state.global_step, writer)

    def _write(self, completions: list[str], step: int, writer: Any) -> None:
        self.run.samples.parent.mkdir(exist_ok=True)
        pairs = list(zip(self._shown, completions, strict=True))
        text = "\n".join(f"--- {number} ---\n{prompt}{rest}\n" for number, (prompt, rest) in enumerate(pairs, 1))
        record = _RECORD.sub(b" ", text.encode(errors="replace"))  # by which records are told apart
        append(self.run.samples, b"=== step %d ===\n%b\n" % (step, record))
        self._wrote = True
        for number, (prompt, completion) in enumerate(pairs, 1):
            _show(prompt, completion, f"sample {number} at step {step}", self._stream)
            writer.add_text(f"samples/{number}", indented(prompt + completion), step)


def written(
    trainer: Any,
    rows: list[list[int]],
    tokenizer: Any,
    sampling: Sampling,
    generator: torch.Generator,
    on_token: Callable[[], None] = lambda: None,
) -> list[str]:
    """Collective. What the model writes to rows of tokens, before a text of ``sampling.stop``; the same on all ranks.

    ``on_token`` is called after each column of tokens.
    """
    reads = getattr(trainer.strategy.parts[0], "is_encoder_decoder", False)
    texts = []
    for new in continued(trainer, rows, tokenizer, sampling, generator, on_token):
        text = tokenizer.decode(new)
        text = text.removeprefix("<extra_id_0>") if reads else text
        texts.append(text[: min((at for stop in sampling.stop if (at := text.find(stop)) >= 0), default=len(text))])
    return texts


def continued(
    trainer: Any,
    rows: list[list[int]],
    tokenizer: Any,
    sampling: Sampling,
    generator: torch.Generator,
    on_token: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Collective. The tokens that follow on each row of tokens, until the end token, which is left out, or until they
    hold a text of ``sampling.stop``; the same on all ranks, under every strategy. Without a ``tokenizer`` (None) there
    are no ends.
    """
    from forgather_cli.models.generate import generate, prompt_inputs

    strategy, stops, eos = trainer.strategy, sampling.stop, getattr(tokenizer, "eos_token_id", None)
    ends = sampling.ends([] if eos is None else [eos])
    pads = (sampling.pad_token_id, getattr(tokenizer, "pad_token_id", None), *ends)
    pad = next((i for i in pads if i is not None), 0)
    inputs = prompt_inputs(strategy.parts[0], rows, pad)
    input_ids, mask, encoder_inputs = tree_map_only(Tensor, lambda tensor: tensor.to(strategy.device), inputs)

    def before_end(ids: list[int]) -> list[int]:
        return ids[: next((n for n, token in enumerate(ids) if token in ends), len(ids))]

    def has_stop(ids: list[int]) -> bool:
        text = tokenizer.decode(before_end(ids))
        return any(stop in text for stop in stops)

    def is_over(new: Tensor) -> Tensor:  # (B, candidates, tokens)
        return torch.tensor([[has_stop(ids) for ids in candidates] for candidates in new.tolist()])

    def on_column(_: Tensor) -> bool:
        on_token()
        ends: bool = trainer.run.sync.poll()  # all ranks end it together
        return ends

    with evaluation_mode(strategy.parts):
        output = generate(
            strategy.logits,
            input_ids,
            mask,
            encoder_inputs=encoder_inputs,
            **sampling.choices,
            eos_token_id=ends,
            pad_token_id=pad,
            generator=generator,
            agree=that_of_rank_0(trainer.run.cpu_group),
            on_token=on_column,
            is_over=is_over if stops else None,
        )
    new = [before_end(ids) for ids in output[:, input_ids.shape[1] :].tolist()]
    # behind a text that stops a row there is padding
    sizes = [next((n for n in range(1, len(ids)) if stops and has_stop(ids[:n])), len(ids)) for ids in new]
    return [ids[:size] for ids, size in zip(new, sizes, strict=True)]


def as_table(generation_config: Any) -> Any:
    """A ``GenerationConfig`` of transformers as settings of ``Sampling`` by name: what it has been given that
    changes a text; others as they are.
    """
    if not hasattr(generation_config, "to_diff_dict"):
        return generation_config
    aside = ("transformers_version", "bos_token_id", "use_cache")  # a tokenizer knows how prompts begin
    given = generation_config.to_diff_dict().items()
    return {name: value for name, value in given if name not in aside and not name.startswith(("_", "output_"))}


def cut_samples(path: Path, last_step: int) -> None:
    """Keep the records up to ``last_step``, in place and atomically, without what a crash left half-written behind the
    last blank line; a file that does not begin with a record is set aside.
    """
    try:
        content = read_bytes(path)
        before, *records = _RECORD.split((_WHOLE.match(content) or [b""])[0])
        if before or content[:9] != b"=== step "[: len(content)]:
            raise ValueError("it does not begin with a sample's step")
        kept = b"".join(record for record in records if int(record.split(maxsplit=3)[2]) <= last_step)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        set_aside(path, f"{path}: cannot be read ({error})")
        return
    if kept != content:
        write_whole(path, kept, durable=True)


def encoded(trainer: Any, prompts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt; an empty one begins with the token that separates documents."""
    from forgather_cli.models.generate import masked_prompt

    if getattr(trainer.strategy.parts[0], "is_encoder_decoder", False):
        prompts = [masked_prompt(tokenizer, prompt) for prompt in prompts]
    start = getattr(tokenizer, "bos_token_id", None)
    start = tokenizer.eos_token_id if start is None else start
    encode = getattr(tokenizer, "encode_prompt", tokenizer.encode)  # a user's has encode
    rows = [list(encode(prompt)) or [start] for prompt in prompts]
    if any(ids == [None] for ids in rows):
        raise SetupError(
            "prompts: an empty prompt needs a tokenizer with a bos or eos token; write at least one character"
        )
    return rows


def _show(prompt: str, completion: str, title: str, stream: StreamName) -> None:
    """On a terminal the first lines of a sample, each cut to the width (all of it is in ``samples.txt``); else all."""
    text = printable(prompt + completion, stream)
    lines = [line.expandtabs(4) for line in text.splitlines() if line.strip()]
    if is_terminal(stream):
        from rich.text import Text

        more = f" (first {_MAX_LINES} of {len(lines)} lines)" if len(lines) > _MAX_LINES else ""
        say(f"{title}{more}", stream, "magenta")
        for number, line in enumerate(lines[:_MAX_LINES]):
            bold = len(prompt.split("\n")[0]) if number == 0 else 0  # the prompt's first line
            bar = ("  \N{BOX DRAWINGS LIGHT VERTICAL} ", "magenta")
            cut = Text.assemble(bar, (line[:bold], "bold"), line[bold:])
            console(stream).print(cut, no_wrap=True, overflow="ellipsis", soft_wrap=False)
    else:
        say("\n".join([f"{timestamp()} {title}:", *(f"    {line}" for line in lines)]), stream)
