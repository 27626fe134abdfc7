"""``forgather data``: what a model sees of its data, counts of them, and their caches made before a run."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from forgather_cli.bars import doing
from forgather_cli.cli.output import AsJson, console, interruptible, json_text, only_json, writable, write_file
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import ConfigDir, TrustConfig, Words, load
from forgather_cli.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from forgather_cli.config.schema import Config
    from forgather_cli.data.splits import DataSplits
    from forgather_cli.data.tokens import Split

app = typer.Typer(
    cls=Group,
    help="Show what a model sees of its data, count it, and make its caches.\n\nThe data are those of RECIPE and "
    "OVERRIDEs, or of a run, and are tokenized and cached as for training.",
    no_args_is_help=True,
)
_SPLITS = ("train", "eval")


@app.command(cls=Command)
def show(
    words: Words = None,
    split: Annotated[str, typer.Option("--split", metavar="train|eval", help="The split.")] = "train",
    sample: Annotated[
        int | None,
        typer.Option(
            "--sample", metavar="N", min=0, show_default=False,
            help="The first one shown, by its number in the split's global order, from 0.",
        ),
    ] = None,
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE:LINE", help="Those with this record, or with any of FILE."),
    ] = None,
    count: Annotated[int, typer.Option("--count", metavar="N", min=1, help="How many are shown.")] = 3,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write them as one page for a browser.")
    ] = None,
    config_dir: ConfigDir = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Show samples as the model sees them: tokens, targets, documents, padding, and what was cut.

    Targets, which the loss counts, are coloured, or between \\[ and ] where there is no
    colour. Samples of training come in the order of the run's first epoch, which
    [cyan]seed[/] gives, those of evaluation in the order of the data.
    """
    if split not in _SPLITS:
        near = did_you_mean(split, _SPLITS)
        raise ConfigError(f"--split: must be train or eval, got {split!r}{';' if near else ''}{near}")
    if sample is not None and origin is not None:
        raise ConfigError("--sample: names a sample, and --from does so too; leave one of them out")
    if html is not None and as_json:
        raise ConfigError("--json: prints what --html writes as a page; leave one of them out")
    if html is not None:
        writable(html, "--html")
    with only_json(as_json):
        config, data = _read(words, config_dir, trust_config=trust_config)
    from forgather_cli.inspection.samples import Samples

    samples = Samples(config, data, cast("Split", split))
    with doing("reading samples"):
        if origin is None:
            found = list(islice(samples.read(sample or 0), count))
        else:
            found = [next(samples.read(number)) for number in samples.holding(*_record(origin))[:count]]
    if as_json:
        documents = [each.document() for each in found]
        print(json_text({"split": split, "seq_len": data.seq_len, "samples": documents}, indent=None), flush=True)
    elif html is not None:
        from forgather_cli.inspection.page import page_of

        write_file(html, page_of(found, split, samples.length))
        typer.echo(html)
    else:
        from forgather_cli.inspection.terminal import print_sample

        screen = console()
        for each in found:
            print_sample(each, split, samples.length, screen)


def _read(words: list[str] | None, config_dir: Path | None, *, trust_config: bool) -> tuple[Config, DataSplits]:
    """The config that words stand for, with models of the hub as directories here, and its data, cached now."""
    from forgather_cli.hub import with_local_model
    from forgather_cli.worker import read_data

    config = load(words, config_dir, trust_config=trust_config).config
    with doing("importing torch"), interruptible():
        config = with_local_model(config, weights=False)
        return config, read_data(config)


def _record(text: str) -> tuple[Path, int | None]:
    """The file and line of ``FILE:LINE``, or a file alone. Raises ConfigError."""
    name, _, line = text.rpartition(":")
    path, number = (Path(name), int(line)) if name and line.isdecimal() else (Path(text), None)
    if not path.expanduser().is_file():
        raise ConfigError(f"--from: no file {path}; write FILE:LINE, as in --from chats.jsonl:17")
    return path.expanduser().resolve(), number
