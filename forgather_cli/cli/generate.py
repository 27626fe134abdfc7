"""``forgather generate``: text from a trained model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.common import AsJson, only_json, print_json
from forgather_cli.cli.source import SourcePath, check_source
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from forgather_cli.source import Source


def generate(
    source: SourcePath,
    prompt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Text to go on from; without it standard input is read.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens to make at most.")] = 200,
    temperature: Annotated[float, typer.Option(min=0.01, metavar="X", help="Below 1 likelier, above 1 wilder.")] = 0.7,
    top_k: Annotated[int, typer.Option(min=0, metavar="N", help="Draw from the N likeliest tokens; 0: from all.")] = 20,
    top_p: Annotated[
        float, typer.Option(min=0.0, max=1.0, metavar="X", help="Draw from the likeliest tokens that sum up to X.")
    ] = 1.0,
    greedy: Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")] = False,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the draws.")] = 42,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")] = "auto",
    as_json: AsJson = False,
) -> None:
    """Write text with a run, a checkpoint or a model directory."""
    check_source(source)
    text = _prompt(prompt)
    from forgather_cli.source import load_source

    with only_json(as_json):
        found = load_source(source, device=device)
        show = None if as_json else _Printer(found.tokenizer, text)
        settings = {
            "max_new_tokens": max_new_tokens,
            "do_sample": not greedy,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
        }
        tokens = _generate(found, text, seed, settings, show)
    if as_json:
        made = found.tokenizer.decode(tokens, skip_special_tokens=True)
        print_json({"source": str(source), "step": found.step, "prompt": text, "text": made, "num_tokens": len(tokens)})


def _prompt(given: str | None) -> str:
    if given is not None:
        return given
    if sys.stdin.isatty():
        raise ConfigError("--prompt: missing; give --prompt TEXT or pipe a text into the command")
    return sys.stdin.read()


def _generate(
    source: Source, text: str, seed: int, settings: dict[str, Any], show: Callable[[int], None] | None
) -> list[int]:
    """The new tokens."""
    import torch

    from forgather_cli.loss import model_logits
    from forgather_cli.models.generate import generate as sample

    tokenizer, device = source.tokenizer, source.device
    ids = tokenizer.encode(text) or [tokenizer.bos_token_id if tokenizer.bos_token_id is not None else 0]
    input_ids = torch.tensor([ids], device=device)  # (1, T)

    def logits(batch: dict[str, Any], *, last_only: bool = True, cache: Any = None) -> torch.Tensor:
        return model_logits(source.model, batch, last_only=last_only, cache=cache)

    with torch.no_grad():
        made = sample(
            logits,
            input_ids,
            torch.ones_like(input_ids),
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            generator=torch.Generator(device).manual_seed(seed),
            repetition_penalty=1.0,
            on_token=None if show is None else lambda new: show(int(new.reshape(-1)[0])),
            **settings,
        )
    if show is not None:
        typer.echo()
    return [int(token) for token in made[0, len(ids) :]]


class _Printer:
    """Writes the text as its tokens come; a character of several tokens appears when it is whole."""

    def __init__(self, tokenizer: Any, prompt: str) -> None:
        from forgather_cli.callbacks.console import printable

        self._printable = printable if sys.stdout.isatty() else str  # no bytes of a model's drive a terminal
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._written = 0
        typer.echo(prompt, nl=False)

    def __call__(self, token: int) -> None:
        self._tokens.append(token)
        text: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        whole = text.rstrip("\N{REPLACEMENT CHARACTER}")
        typer.echo(self._printable(whole[self._written :]), nl=False)
        self._written = max(self._written, len(whole))
