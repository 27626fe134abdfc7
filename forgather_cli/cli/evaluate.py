"""``forgather eval``: loss, perplexity, bits per byte and accuracy of a trained model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
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
from forgather_cli.cli.words import Overrides, SourcePath, TrustConfig, check_overrides, local_source, quoted
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError, ModelError
from forgather_cli.launch.place import joined
from forgather_cli.run_dir import RunDir, is_adapter_directory, is_model_directory, model_in, run_of
from forgather_cli.terminal.bars import doing

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded
    from forgather_cli.config.schema import Config
    from forgather_cli.launch.layout import Layout


def evaluate(
    source: SourcePath,
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the report there too, as JSON.")] = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
    tasks: Annotated[str | None, typer.Option(metavar="A,B", help="Benchmarks instead, of lm-eval.")] = None,
    tasks_dir: Annotated[Path | None, typer.Option(metavar="DIR", help="Tasks of your own, as YAML files.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Examples of each task.")] = None,
    fewshot: Annotated[int | None, typer.Option(min=0, metavar="K", help="Solved examples before each.")] = None,
    apply_chat_template: Annotated[bool, typer.Option("--apply-chat-template", help="Ask in turns.")] = False,
    samples: Annotated[Path | None, typer.Option(metavar="FILE", help="Write each example and answer there.")] = None,
) -> None:
    r"""Loss, perplexity, bits per byte and accuracy of a run, a checkpoint, a model directory or a GGUF file.

    On the evaluation split it was trained with, or on the whole of other files: [cyan]data=text
    data.files=\[mine.txt][/] (a share of them: [cyan]data.eval_fraction=0.05[/]); in this process, or on several ranks:
    [cyan]trainer=fsdp2 nproc_per_node=4[/]. Every example counts once.

    Bits per byte: the loss of all targets in bits, over the bytes of text that they stand for.
    Accuracy: the share of targets that are the likeliest token.

    With [cyan]--tasks arc_easy,hellaswag[/] these benchmarks instead; a run keeps their results in tasks.jsonl.
    """
    words = check_overrides(overrides)
    asked = None
    if any((tasks is not None, tasks_dir, limit, fewshot, apply_chat_template, samples)):
        from forgather_cli.tasks.command import request as asked_for

        choices = {"limit": limit, "fewshot": fewshot, "apply_chat_template": apply_chat_template}
        asked = asked_for(source, tasks, tasks_dir, samples, choices)
    if source.suffix == ".gguf" and source.is_file():
        _of_gguf(source, words, output, as_json=as_json)
        return
    source = local_source(source)
    place = joined(words)
    loaded, own_tokenizer = config_to_evaluate(source, words, trust_config=trust_config)
    if output is not None:
        writable(output, "--output")
    from forgather_cli.launch.layout import plan_layout
    from forgather_cli.worker import evaluated

    if place is not None and place.size > 1:
        raise ConfigError(f"eval: starts its ranks itself, but {place.by} has started {place.size}; run it once, alone")
    if loaded.config.nnodes > 1:
        raise ConfigError(f"nnodes: eval runs on one machine, got {loaded.config.nnodes}; set nnodes=1")
    layout = replace(plan_layout(loaded.config, loaded.given), restarts=0)
    request = {"source": str(source), "own_tokenizer": own_tokenizer, "trust_config": trust_config}
    request |= {"tasks": asked} if asked else {}
    if layout.in_process:
        with interruptible(), only_json(as_json):
            report = evaluated(request, loaded.config)
    else:
        with interruptible():
            code, report = _on_ranks(loaded, layout, request)
        if code:
            raise typer.Exit(code)
    _tell({"source": str(source), **report}, loaded.config, output, as_json=as_json)


def _of_gguf(file: Path, words: list[str], output: Path | None, *, as_json: bool) -> None:
    """A file for llama.cpp, with the tokenizer that lies beside it."""
    if not (file.parent / "tokenizer.json").is_file():
        raise ModelError(f"{file}: no tokenizer.json lies beside it; give it in the directory that finalize wrote")
    loaded, _ = config_to_evaluate(file.parent, words)
    if output is not None:
        writable(output, "--output")
    with interruptible(), only_json(as_json), doing("importing torch"):
        from forgather_cli.gguf.evaluate import evaluate_gguf

        report = evaluate_gguf(file, loaded.config)
    _tell({"source": str(file), **report}, loaded.config, output, as_json=as_json)


def _tell(document: dict[str, Any], config: Config, output: Path | None, *, as_json: bool) -> None:
    if output is not None:
        write_json(output, document)
    if as_json:
        print_json(document)
        return
    if "metrics" in document:
        from forgather_cli.tasks.command import show

        show(document)
        return
    shown = {**document, "split": _split(config.data, document["data"])}
    facts = {label: _shown(key, value) for key, label in _SHOWN.items() if (value := shown.get(key)) is not None}
    in_all = document["data"].get("eval_samples")
    if in_all and document["eval_samples"] < in_all:
        facts["samples"] += f" of {in_all:,} (max_eval_samples, max_eval_steps)"
    print_facts(facts)


_READ = {
    "per_device_eval_batch_size", "max_eval_samples", "max_eval_steps", "dataloader_num_workers",
    "dataloader_prefetch_factor", "dataloader_pin_memory", "dataloader_persistent_workers", "seed", "device",
    "nproc_per_node", "nnodes", "rdzv_endpoint", "hang_timeout", "data", "trainer", "loss", "precision",
}  # fmt: skip
"""Settings and groups that an evaluation reads."""
_GROUPS_READ = ("data", "trainer", "loss", "precision")  # the model is that of the checkpoint
_RANKS = {"trainer", "nproc_per_node", "nnodes", "rdzv_endpoint"}
_SAME_TEXT = {"data.seq_len", "data.packing", "data.isolate_documents", "data.cache_dir", "data.tokenize_processes"}
"""Settings of data that leave the corpus as it was, and with it a tokenizer that was trained on it."""
_OF_TRAINING = (
    "global_batch_size=null",
    "gradient_accumulation_steps=null",
    "per_device_train_batch_size=720720",  # divisible by any n_microbatches up to 16
    "fuse_optim_with_backward=false",
    "gradient_checkpointing=false",
    "auto_find_batch_size=false",
    "eval_strategy=steps",
    "load_best_model_at_end=false",
)
"""What a run was trained with must not keep its model from being evaluated in another layout."""


def config_to_evaluate(source: Path, overrides: list[str], *, trust_config: bool = False) -> tuple[Loaded, bool]:
    """The config of an evaluation, and whether to use the model's own tokenizer in place of the config's.

    In this process unless the overrides say otherwise, however the run was trained. Raises ConfigError.
    """
    neutral = [*_OF_TRAINING, *([] if run_of(source) else ["max_eval_samples=null"])]  # no run: the whole split
    reads = None if trust_config else _GROUPS_READ
    loaded = _config_for(source, [*neutral, *overrides], reads)
    base = _config_for(source, neutral, reads and ())
    typed = {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides}
    if whole := _whole(loaded, typed):
        overrides = [*whole, *overrides]
        loaded = _config_for(source, [*neutral, *overrides], reads)
    given = (loaded.given - base.given) | typed
    unread = [path for path in sorted(given & loaded.given) if path.partition(".")[0] not in _READ]
    if unread:
        of_model = "eval takes the model of SOURCE as it is"
        other = "nothing reads it in eval, which trains nothing"
        raise ConfigError(
            [f"{path}: {of_model if path.split('.')[0] == 'model' else other}; leave it out" for path in unread]
        )
    if not base.config.trainer.is_one_process and not any(path.partition(".")[0] in _RANKS for path in given):
        loaded = _config_for(source, [*neutral, *overrides, "trainer=single"], reads)
    # where the text is not the run's, a tokenizer chosen or trained for that would make other tokens of it
    other_text = {path for path in given if path.partition(".")[0] == "data"} - _SAME_TEXT
    names = {getattr(each.config.data, "tokenizer", None) for each in (base, loaded)}
    return loaded, bool(other_text) and "data.tokenizer" not in given and names != {"bytes"}


def _whole(loaded: Loaded, typed: set[str]) -> list[str]:
    """What makes an evaluation on files of the user's take all of them, unless the words say what is to be held out.

    Of data to train on a share is held out, and only that would be evaluated on.
    """
    names = {name.removeprefix("data.") for name in typed}
    if names & {"eval_files", "eval_split", "eval_fraction"}:
        return []
    given = next((name for name in ("files", "data_files") if name in names), None)
    patterns = getattr(loaded.config.data, given or "", [])
    if not patterns:
        return []
    return [f"data.eval_files=[{','.join(map(quoted, patterns))}]", "max_eval_samples=null", "max_eval_steps=-1"]


def _config_for(source: Path, overrides: list[str], reads: Collection[str] | None) -> Loaded:
    """The run's config with overrides; for a model directory the default recipe in fp32 with that model and tokenizer.

    ``reads``: None trusts the run's config; else the groups that the command reads.
    """
    run = run_of(source)
    if run is not None:
        from forgather_cli.config.load import load_resumed

        # without callbacks, which nobody who does not train reads
        return load_resumed(run.newest_config(), overrides, reads=reads, edited={"callbacks": {}})
    from forgather_cli.config.load import load_config

    directory = model_in(source.resolve())
    if is_adapter_directory(directory) and not (directory / "tokenizer.json").is_file():  # one of peft's
        settings = read_json_object(directory / "adapter_config.json", ModelError)
        directory = Path(str(settings.get("base_model_name_or_path")))
    elif not (is_model_directory(directory) or is_adapter_directory(directory)):
        raise ModelError(f"{source}: has no config.json, and no run's config.yaml says how to build the model")
    where = quoted(directory)
    model = ["model=pretrained", f"model.path={where}", f"data.tokenizer={where}", "precision=fp32"]
    return load_config("default", [*model, *overrides])


def _on_ranks(loaded: Loaded, layout: Layout, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(exit code, what ``evaluation.evaluate_source`` returns) of ``request``, its arguments, on the ranks of a layout.

    Why it failed is shown here, once. Nothing is left of it, but the ranks' logs where they are needed to understand.
    """
    from forgather_cli.config.decode import dump_saved
    from forgather_cli.launch.exit_status import ExitStatus, Kind
    from forgather_cli.launch.processes import keep, temporary_folder
    from forgather_cli.launch.rank_log import lasting_output
    from forgather_cli.launch.start import launch_ranks

    def conclude_run(status: ExitStatus) -> None:
        if not status.failed or status.kind in (Kind.MISTAKE, Kind.CUT):
            shutil.rmtree(run.root, ignore_errors=True)
        else:
            keep(run.root)

    with lasting_output(), temporary_folder("eval") as folder:
        run = RunDir(folder)
        run.logs.mkdir()
        run.config.write_text(dump_saved({**loaded.tree, "output_dir": str(folder)}), encoding="utf-8")
        run.evaluation.write_text(json.dumps(request), encoding="utf-8")
        status = launch_ranks(layout, run, run.config, conclude_run)
        report = {} if status.failed else json.loads(run.report.read_text(encoding="utf-8"))
        conclude_run(status)
    return status.code, report


_SHOWN = {
    "source": "source",
    "step": "step",
    "split": "data",
    "eval_loss": "loss",
    "eval_perplexity": "perplexity",
    "eval_bits_per_byte": "bits per byte",
    "eval_rewards/accuracies": "accuracy of pairs",
    "eval_rewards/margins": "margin of pairs",
    "eval_accuracy": "accuracy",
    "eval_tokens": "tokens",
    "eval_targets": "targets",
    "eval_bytes": "bytes",
    "eval_samples": "samples",
    "eval_runtime": "runtime",
    "eval_samples_per_second": "samples per second",
}


def _split(data: Any, facts: dict[str, Any]) -> str | None:
    """What an evaluation takes of a data option, with the setting that says so; None where no setting does.

    The fraction is of documents, whose lengths differ: in ``facts`` are the tokens.
    """
    files, held_out = (getattr(data, name, None) for name in ("eval_files", "eval_fraction"))
    if files:
        names = next((name for name in ("files", "data_files") if getattr(data, name, None) == files), "eval_files")
        return f"all of data.{names}"
    if held_out is None or getattr(data, "eval_split", None):
        return None
    train, tokens = facts.get("train_tokens"), facts.get("eval_tokens")
    share = f"{tokens / (train + tokens):.2%} of the tokens, " if train and tokens else ""
    return f"{share}held out by data.eval_fraction={held_out:g}"


def _shown(key: str, value: Any) -> str:
    if key == "eval_runtime":
        return f"{value:.2f}s" if value < 10 else human_seconds(value)
    if key in ("eval_accuracy", "eval_rewards/accuracies"):
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.1f}" if abs(value) >= 1000 else f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
