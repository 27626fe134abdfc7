"""``forgather data``: what a model sees of its data, counts of them, and their caches made before a run."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from forgather_cli.cli.output import (
    AsJson,
    Col,
    console,
    human_bytes,
    interruptible,
    only_json,
    print_facts,
    print_json,
    print_table,
    writable,
    write_file,
)
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import ConfigDir, RunPath, TrustConfig, Words, load
from forgather_cli.errors import ConfigError, did_you_mean
from forgather_cli.run_dir import RunDir, shown
from forgather_cli.terminal.bars import Bar, doing
from forgather_cli.terminal.folding import tell

if TYPE_CHECKING:
    from forgather_cli.config.schema import Config
    from forgather_cli.data.splits import DataSplits
    from forgather_cli.data.tokens import Split
    from forgather_cli.inspection.stats import SplitStats

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
    source: Annotated[
        str | None, typer.Option("--source", metavar="NAME", help="Those of one source of a mixture.")
    ] = None,
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
        config, data = _read(load(words, config_dir, trust_config=trust_config).config)
    from forgather_cli.inspection.samples import Samples

    samples = Samples(config, data, cast("Split", split))
    if source is not None and source not in samples.sources:
        near = did_you_mean(source, samples.sources) or f" sources: {', '.join(samples.sources) or 'none'}"
        raise ConfigError(f"--source: the {split} split has no source {source!r};{near}")
    with doing("reading samples"):
        if origin is None:
            wanted = (each for each in samples.read(sample or 0) if source in (None, each.mixture_source))
            found = list(islice(wanted, count))
        else:
            found = [next(samples.read(number)) for number in samples.holding(*_record(origin))[:count]]
    if as_json:
        documents = [each.document() for each in found]
        print_json({"split": split, "seq_len": data.seq_len, "samples": documents}, indent=None)
    elif html is not None:
        from forgather_cli.inspection.page import page_of

        write_file(html, page_of(found, split, samples.length))
        typer.echo(html)
    else:
        from forgather_cli.inspection.terminal import print_sample

        screen = console()
        for each in found:
            print_sample(each, split, samples.length, screen)
        pairs = ", what only one side of a pair has is underlined, or between { and }" if found[0].sides else ""
        tell(f"targets, which the loss counts, are on green, or between [ and ]{pairs}; \\n ends a line")


def _read(config: Config) -> tuple[Config, DataSplits]:
    """The config, with models of the hub as directories here, and its data, cached now."""
    from forgather_cli.hub import with_local_model
    from forgather_cli.worker import read_data

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


@app.command(cls=Command)
def stats(
    words: Words = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the lengths into a .png or .svg.")
    ] = None,
    config_dir: ConfigDir = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    """Count documents, tokens, targets and what was cut or left out, by split and source.

    Every sample is read once, as in one epoch.
    """
    from forgather_cli.pictures.picture import check_name

    if plot is not None:
        check_name(plot, "--plot")
    with only_json(as_json):
        config, data = _read(load(words, config_dir, trust_config=trust_config).config)
    from forgather_cli.inspection.stats import stats_of

    with Bar("counting samples") as bar, interruptible():
        found = stats_of(config, data, bar.update)
    if plot is not None:
        from forgather_cli.pictures.lengths import draw_lengths

        draw_lengths({split: each.lengths for split, each in found.items()}, data.seq_len, plot)
    if as_json:
        print_json({"seq_len": data.seq_len, "splits": {split: each.document() for split, each in found.items()}})
        return
    for split, each in found.items():
        print_facts({"split": split, **_facts(each), **_left_out(each, data, split)})
        _print_histogram(each)
        _print_sources(each)
    if plot is not None:
        typer.echo(plot)


def _facts(counts: SplitStats) -> dict[str, str]:
    """What there is of a split."""
    facts = {}
    if counts.documents is not None:
        facts["documents"] = f"{counts.documents:,} of {counts.document_tokens:,} tokens"
    room = counts.tokens + counts.padding
    padded = f", and {counts.padding:,} of padding ({counts.padding / room:.1%})" if counts.padding else ""
    facts["samples"] = f"{counts.samples:,} of {counts.tokens:,} tokens{padded}"
    facts["targets"] = f"{counts.targets:,} ({counts.targets / max(counts.tokens, 1):.1%} of the samples' tokens)"
    if counts.bytes_per_token is not None:
        facts["bytes per token"] = f"{counts.bytes_per_token:.2f}"
    facts["unknown tokens"] = f"{counts.unknown:,}"
    quantiles = {name: f"{value:,.0f}" for name, value in counts.quantiles().items()}
    facts["lengths"] = ", ".join(f"{name} {value}" for name, value in quantiles.items())
    return facts


def _left_out(counts: SplitStats, data: DataSplits, split: str) -> dict[str, str]:
    """What of a split is in no sample."""
    facts = {"cut": f"{counts.cut:,} documents", "dropped": f"{counts.dropped:,} documents"}
    if counts.document_tokens is not None and data.tokenized is not None and counts.tokens < counts.document_tokens:
        facts["in no sample"] = f"{counts.document_tokens - counts.tokens:,} tokens"
    named = {"skipped": "bad rows", "replaced": "replaced"}
    return facts | {label: str(data.description[key]) for key, label in named.items() if key in data.description}


_WIDTH = 40  # characters of the longest bar


def _print_histogram(counts: SplitStats) -> None:
    """How many lengths lie between powers of two."""
    bins = Counter((length - 1).bit_length() if length > 0 else 0 for length in counts.lengths)
    if not bins:
        return
    most, mark = max(bins.values()), "█" if (sys.stdout.encoding or "").lower().startswith("utf") else "#"
    rows = [
        (
            f"{2 ** (power - 1) + 1 if power else 0:,} - {2**power:,}",
            f"{bins[power]:,}",
            mark * -(-_WIDTH * bins[power] // most),
        )
        for power in range(min(bins), max(bins) + 1)
    ]
    what = "documents" if counts.documents is not None else "samples"
    print_table((Col("tokens", right=True), Col(what, right=True), Col("")), rows)


_MOST = 20  # sources that are shown one by one


def _print_sources(counts: SplitStats) -> None:
    ordered = sorted(counts.sources.items(), key=lambda item: -item[1].tokens)
    rows = [
        (shown(name), f"{each.documents:,}", f"{each.tokens:,}", "-" if each.targets is None else f"{each.targets:,}")
        for name, each in ordered[:_MOST]
    ]
    if rest := [each for _, each in ordered[_MOST:]]:
        tokens = sum(each.tokens for each in rest)
        rows.append((f"{len(rest):,} others", f"{sum(each.documents for each in rest):,}", f"{tokens:,}", ""))
    if rows:
        numbers = (Col(name, right=True) for name in ("documents", "tokens", "targets"))
        print_table((Col("source", copied=True), *numbers), rows)


@app.command(cls=Command)
def build(words: Words = None, config_dir: ConfigDir = None, trust_config: TrustConfig = False) -> None:
    """Make every cache that training needs, of evaluation too, before devices are held for it.

    What is there already is left as it is. [cyan]forgather cache list[/] shows it.
    """
    from forgather_cli.data.cache import Cache, entries

    config = load(words, config_dir, trust_config=trust_config).config
    root = Cache(config.data.cache_dir).root
    with doing("looking into the cache"):
        before = {entry.path for entry in entries(root)}
    _, data = _read(config)
    made = [entry for entry in entries(root) if entry.path not in before and entry.kind != "content"]
    if data.tokenized is None and not made:
        tell("nothing to make: these data are read, and tokenized, while a run trains on them")
        return
    sizes = ", ".join(f"{entry.kind} {human_bytes(entry.size_bytes)}" for entry in made)
    tell(f"made: {sizes}, in {root}" if made else f"everything is there already, in {root}")


@app.command(cls=Command)
def audit(run_dir: RunPath, as_json: AsJson = False) -> None:
    """Compare what a run on data=mixture has read, up to its last save, with what it was to read; exit code 1 if
    sequences were lost or repeated.

    A later pass over a source is no repeat. [cyan]RUN_DIR/mixture.jsonl[/] has what was read.
    """
    from forgather_cli.data.mixture.dataset import audit as audited

    with doing("reading the run"):
        found = audited(RunDir(run_dir).mixture)
    if as_json:
        print_json(found)
    else:
        sources = {name: f"{each['sequences']:,} ({each['share']:.4%})" for name, each in found["sources"].items()}
        print_facts({**sources, "lost": f"{found['lost']:,}", "repeated": f"{found['repeated']:,}"})
    if found["lost"] or found["repeated"]:
        raise typer.Exit(1)
