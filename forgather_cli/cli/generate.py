"""``forgather generate``: text from a trained model, to one prompt, to a file of prompts, or in a conversation."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from forgather_cli.cli.chat import continue_texts, converse
from forgather_cli.cli.output import (
    AsJson,
    interruptible,
    on_screen,
    only_json,
    print_json,
    show,
    tell_of_limit,
    writable,
    write_json,
)
from forgather_cli.cli.prompts import Prompt, read_prompts, write_all
from forgather_cli.cli.words import SourcePath, TrustConfig, local_source
from forgather_cli.config.decode import decode_sampling
from forgather_cli.config.schema import Meaning, Sampling, wrong_device
from forgather_cli.errors import ConfigError
from forgather_cli.terminal.bars import doing

if TYPE_CHECKING:
    from forgather_cli.inference.generation import Generator, Text

_INPUT, _DRAW, _CHAT = "Input and output", "Choosing tokens", "Conversation"
_TABLE = get_type_hints(Sampling, include_extras=True)


def _option(name: str, panel: str | None, more: str = "") -> Any:
    """An option with the meaning that the table of ``Sampling`` gives; ``decode_sampling`` knows its bounds."""
    kind, *about = get_args(_TABLE[name])
    [meaning] = (each.text for each in about if isinstance(each, Meaning))
    metavar = {int: "N", float: "X"}.get(kind, "TEXT")
    return typer.Option(metavar=metavar, help=meaning + more, rich_help_panel=panel)


def generate(
    ctx: typer.Context,
    source: SourcePath,
    prompt: Annotated[
        str | None,
        typer.Option(
            metavar="TEXT", help="Text to continue, or to answer; without it a pipe is read, or what you type."
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Many prompts: one a line of .txt; .jsonl with prompt or messages; .yaml with a list.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, metavar="N", help="Prompts at a time.", rich_help_panel=_INPUT)] = 8,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write JSON there.", rich_help_panel=_INPUT)
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue texts as they are, chat template or not.")] = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Talk to the model; lines of a pipe are turns.", rich_help_panel=_CHAT)
    ] = False,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="What the model is told before the conversation.", rich_help_panel=_CHAT),
    ] = None,
    max_new_tokens: Annotated[int, _option("max_new_tokens", None)] = Sampling.max_new_tokens,
    min_new_tokens: Annotated[int, _option("min_new_tokens", None)] = Sampling.min_new_tokens,
    stop: Annotated[list[str] | None, _option("stop", None)] = None,
    num_samples: Annotated[int, typer.Option(min=1, metavar="N", help="Texts for each prompt.")] = 1,
    temperature: Annotated[float, _option("temperature", _DRAW, more=" 0: greedy.")] = Sampling.temperature,
    top_k: Annotated[int, _option("top_k", _DRAW)] = Sampling.top_k,
    top_p: Annotated[float, _option("top_p", _DRAW)] = Sampling.top_p,
    min_p: Annotated[float, _option("min_p", _DRAW)] = Sampling.min_p,
    typical_p: Annotated[float, _option("typical_p", _DRAW)] = Sampling.typical_p,
    num_beams: Annotated[int, _option("num_beams", _DRAW)] = Sampling.num_beams,
    repetition_penalty: Annotated[float, _option("repetition_penalty", _DRAW)] = Sampling.repetition_penalty,
    no_repeat_ngram_size: Annotated[int, _option("no_repeat_ngram_size", _DRAW)] = Sampling.no_repeat_ngram_size,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Always take the likeliest token.", rich_help_panel=_DRAW)
    ] = False,
    seed: Annotated[int, _option("seed", _DRAW)] = Sampling.seed,
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Of a UL2 model: the denoiser whose token the prompts begin with (S, R, X).",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar="NAME", help="auto, cpu, cuda or cuda:N.")] = "auto",
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    """Write text with a run, a checkpoint or a model directory.

    On a terminal without a prompt it asks for one after another, and the text appears as it is written. A model with a
    chat template is talked to, as with [cyan]--chat[/]: a prompt is one turn of its user, which it answers;
    [cyan]--raw[/] continues the text as it is.
    """
    greedy = greedy or temperature == 0.0
    sampling = _checked(ctx, greedy)
    source = local_source(source)
    if output is not None:
        writable(output, "--output")
    asks = sys.stdin.isatty() and sys.stdout.isatty() and not as_json and output is None and num_samples == 1
    asks = asks and not chat and prompt is None and prompts is None
    given = [] if asks else _given(prompt, prompts, chat)
    with interruptible():
        with only_json(as_json), doing("importing torch"):
            from forgather_cli.inference.generation import load_generator

            model = load_generator(source, device=device, trust_config=trust_config, mode=mode)
        if model.chat is not None and not raw:
            given = [each.as_turn() for each in given]
        if chat or (asks and model.chat is not None and not raw):
            converse(model, sampling, system=system, prompt=prompt, as_json=as_json)
        elif asks:
            continue_texts(model, sampling)
        elif prompts is not None:
            write_all(model, given, sampling, batch_size, num_samples, output, as_json)
        else:
            _one(source, model, given[0], sampling, num_samples, output, as_json)


def _checked(ctx: typer.Context, greedy: bool) -> Sampling:
    """How tokens are chosen. Raises ConfigError for options out of their bounds, that contradict each other, or that
    nothing would read.
    """
    values, omit, problems = ctx.params, "leave it out", []
    unread: dict[str, tuple[str, str]] = {}  # option -> why nothing reads it, what to do
    if greedy:
        unread |= dict.fromkeys(("top_k", "top_p", "min_p", "typical_p"), ("where nothing is drawn (greedy)", omit))
        unread |= {"temperature": ("with --greedy", "give one of the two")} if values["greedy"] else {}
    if values["prompts"] is not None:
        unread["prompt"] = ("with --prompts", "give one of the two")
    else:
        unread["batch_size"] = ("without --prompts", omit)
    if values["chat"]:
        unread |= dict.fromkeys(("prompts", "num_samples", "output", "batch_size", "raw"), ("with --chat", omit))
    else:
        unread["system"] = ("without --chat", "add --chat")
    for name, (why, remedy) in unread.items():
        origin = ctx.get_parameter_source(name)
        if origin is not None and origin.name == "COMMANDLINE":
            problems.append(f"--{name.replace('_', '-')}: nothing reads it {why}; {remedy}")
    if greedy and values["num_samples"] > 1:
        problems.append("--num-samples: all texts would be equal where nothing is drawn (greedy); leave it out")
    given = {name: values[name] for name in _TABLE if values.get(name) is not None}
    try:
        sampling = decode_sampling({**given, **({"temperature": 0} if greedy else {})})
    except ConfigError as error:
        told = (problem.partition(":") for problem in error.problems)  # top_p: must be ...
        problems += [f"--{name.replace('_', '-')}:{rest}" for name, _, rest in told]
    if problem := wrong_device(values["device"]):
        problems.append(f"--device: {problem}")
    if problems:
        raise ConfigError(problems)
    return sampling


def _given(prompt: str | None, prompts: Path | None, chat: bool) -> list[Prompt]:
    """The prompts; none for a conversation, which reads its questions one by one."""
    if prompts is not None:
        return read_prompts(prompts)
    if chat:
        return []
    if prompt is None:
        if sys.stdin.isatty():
            raise ConfigError(
                "--prompt: missing; give --prompt TEXT or --prompts FILE, or pipe a text into the command"
            )
        prompt = sys.stdin.read()
    return [Prompt("--prompt", text=prompt)]


def _one(
    source: Path, model: Generator, prompt: Prompt, sampling: Sampling, samples: int, output: Path | None, as_json: bool
) -> None:
    """One prompt: the text as it comes, or a document; several texts to it one after another. Answers stand alone."""
    ids, in_chat = prompt.tokens(model), prompt.messages is not None
    shown = "" if in_chat else prompt.text
    if samples == 1 and not as_json:
        typer.echo(on_screen(shown), nl=False)
        sys.stdout.flush()
        try:
            texts = model.write([ids], sampling, in_chat=in_chat, show=lambda row, new: show(new))
        finally:
            typer.echo()  # an error begins a line of its own
    else:
        with only_json(as_json), doing("writing the text"):
            texts = model.write([ids] * samples, sampling, in_chat=in_chat)
    document = _document(source, model, prompt.text, texts)
    if output is not None:
        write_json(output, document)
    if as_json:
        print_json(document)
    elif samples > 1:
        for number, each in enumerate(texts, 1):
            typer.echo(f"--- {number} ---\n{on_screen(shown + each.text)}")
    tell_of_limit(model, texts)


def _document(source: Path, model: Generator, prompt: str, texts: list[Text]) -> dict[str, Any]:
    said = [{"text": t.text, "num_tokens": t.num_tokens, "finish_reason": t.finish_reason} for t in texts]
    head: dict[str, Any] = {"source": str(source), "step": model.source.step, "prompt": prompt}
    return {**head, **said[0]} if len(said) == 1 else {**head, "samples": said}
