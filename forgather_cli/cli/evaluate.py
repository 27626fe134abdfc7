"""``forgather eval``: loss, perplexity, bits per byte and accuracy of a trained model."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.output import (
    AsJson,
    human_seconds,
    interruptible,
    only_json,
    print_facts,
    print_json,
    writable,
    write_json,
)
from forgather_cli.cli.source import SourcePath, TrustConfig, check_source, config_to_evaluate
from forgather_cli.cli.words import Overrides, check_overrides
from forgather_cli.errors import ConfigError
from forgather_cli.launch.place import joined
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded
    from forgather_cli.launch.layout import Layout


def evaluate(
    source: SourcePath,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there too, as JSON.")] = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    r"""Loss, perplexity, bits per byte and accuracy of a run, a checkpoint or a model directory.

    On the evaluation split it was trained with, or on the whole of other files: [cyan]data=text
    data.files=\[mine.txt][/] (a share of them: [cyan]data.eval_fraction=0.05[/]); in this process, or on several ranks:
    [cyan]trainer=fsdp2 nproc_per_node=4[/]. Every example counts once.

    Bits per byte: the loss of all targets in bits, over the bytes of text that they stand for.
    Accuracy: the share of targets that are the likeliest token.
    """
    words = check_overrides(overrides)
    check_source(source)
    place = joined(words)
    loaded, own_tokenizer = config_to_evaluate(source, words, trust_config=trust_config)
    if output is not None:
        writable(output, "--output")
    from forgather_cli.launch.layout import plan_layout

    if place is not None and place.size > 1:
        raise ConfigError(f"eval: starts its ranks itself, but {place.by} has started {place.size}; run it once, alone")
    if loaded.config.nnodes > 1:
        raise ConfigError(f"nnodes: eval runs on one machine, got {loaded.config.nnodes}; set nnodes=1")
    layout = replace(plan_layout(loaded.config, loaded.given), restarts=0)
    with interruptible():
        if layout.in_process:
            from forgather_cli.evaluation import evaluate_source

            with only_json(as_json):
                report = evaluate_source(source, loaded.config, own_tokenizer=own_tokenizer, trust_config=trust_config)
        else:
            request = {"source": str(source), "own_tokenizer": own_tokenizer, "trust_config": trust_config}
            code, report = _on_ranks(loaded, layout, request)
            if code:
                raise typer.Exit(code)
    document = {"source": str(source), **report}
    if output is not None:
        write_json(output, document)
    if as_json:
        print_json(document)
    else:
        _print({**document, "split": _split(loaded.config.data)})


def _on_ranks(loaded: Loaded, layout: Layout, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(exit code, what ``evaluation.evaluate_source`` returns) of ``request``, its arguments, on the ranks of a layout.

    Why it failed is shown here, once. Nothing is left of it, but the ranks' logs where they are needed to understand.
    """
    from forgather_cli.config.decode import dump_tree
    from forgather_cli.launch.exit_status import ExitStatus, Kind
    from forgather_cli.launch.rank_log import lasting_output
    from forgather_cli.launch.start import supervised
    from forgather_cli.launch.temporary import keep, temporary_folder

    def leave_directory(status: ExitStatus) -> None:
        if not status.failed or status.kind in (Kind.MISTAKE, Kind.CUT):
            shutil.rmtree(run.root, ignore_errors=True)
        else:
            keep(run.root)

    with lasting_output(), temporary_folder("eval") as folder:
        run = RunDir(folder)
        run.logs.mkdir()
        run.config.write_text(dump_tree({**loaded.tree, "output_dir": str(folder)}), encoding="utf-8")
        run.evaluation.write_text(json.dumps(request), encoding="utf-8")
        status = supervised(layout, run, run.config, leave_directory)
        report = {} if status.failed else json.loads(run.report.read_text(encoding="utf-8"))
        leave_directory(status)
    return status.code, report


_SHOWN = {
    "source": "source",
    "step": "step",
    "split": "data",
    "eval_loss": "loss",
    "eval_perplexity": "perplexity",
    "eval_bits_per_byte": "bits per byte",
    "eval_accuracy": "accuracy",
    "eval_tokens": "tokens",
    "eval_bytes": "bytes",
    "eval_samples": "samples",
    "eval_runtime": "runtime",
    "eval_samples_per_second": "samples per second",
}


def _print(document: dict[str, Any]) -> None:
    shown = {label: (key, document[key]) for key, label in _SHOWN.items() if document.get(key) is not None}
    facts = {label: _shown(key, value) for label, (key, value) in shown.items()}
    in_all = document["data"].get("eval_samples")
    if in_all and document["eval_samples"] < in_all:
        facts["samples"] += f" of {in_all:,} (max_eval_samples, max_eval_steps)"
    print_facts(facts)


def _split(data: Any) -> str | None:
    """What an evaluation takes of a data option, with the setting that says so; None where no setting does."""
    files, held_out = (getattr(data, name, None) for name in ("eval_files", "eval_fraction"))
    if files:
        names = next((name for name in ("files", "data_files") if getattr(data, name, None) == files), "eval_files")
        return f"all of data.{names}"
    if held_out is None or getattr(data, "eval_split", None):
        return None
    return f"{100 * held_out:g} % that are held out (data.eval_fraction)"


def _shown(key: str, value: Any) -> str:
    if key == "eval_runtime":
        return f"{value:.2f}s" if value < 10 else human_seconds(value)
    if key == "eval_accuracy":
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
