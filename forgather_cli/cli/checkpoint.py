"""``forgather checkpoint``: look at checkpoints, check, average and edit them. No torch at module level."""

from __future__ import annotations

import json
import shlex
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.output import (
    AsJson,
    Col,
    console,
    human_bytes,
    interruptible,
    local_time,
    only_json,
    print_facts,
    print_json,
    print_table,
)
from forgather_cli.cli.style import Command, Group
from forgather_cli.cli.words import Overrides, RunPath, TrustConfig, check_overrides, or_latest, quoted
from forgather_cli.errors import CheckpointError, ConfigError
from forgather_cli.run_dir import RunDir, run_of, shown, step_of
from forgather_cli.terminal.bars import doing
from forgather_cli.terminal.folding import escaped, tell

if TYPE_CHECKING:
    from forgather_cli.checkpoint.load import Reader
    from forgather_cli.checkpoint.manifest import Manifest
    from forgather_cli.checkpoint.retention import CheckpointInfo
    from forgather_cli.config.load import Loaded

app = typer.Typer(
    cls=Group, help="Look at checkpoints, average them, and change the settings in them.", no_args_is_help=True
)

Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A checkpoint, or a run (latest: the newest here) for its newest one.",
        callback=or_latest,
        show_default=False,
    ),
]
RunOrCheckpoint = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        help="A checkpoint, or a run (latest: the newest here) for all of its checkpoints.",
        callback=or_latest,
        show_default=False,
    ),
]


@app.command("list", cls=Command)
@doing("reading the run")
def list_(
    run_dir: RunPath,
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints with the best and the final one marked."""
    found = _of_run(run_dir)
    if as_json:
        hidden = ("best_by", "foreign")
        kept = [{key: value for key, value in asdict(info).items() if key not in hidden} for info in found]
        print_json([{**each, "path": str(info.path)} for each, info in zip(kept, found, strict=True)])
    else:
        _print_list(found)


def _of_run(run_dir: Path) -> list[CheckpointInfo]:
    """The run's checkpoints. Raises CheckpointError for a directory without any."""
    from forgather_cli.checkpoint.retention import list_checkpoints

    if not run_dir.is_dir():
        raise CheckpointError(f"{run_dir}: no such directory; give a run's directory")
    run = RunDir(run_dir)
    found = list_checkpoints(run)
    if not found and (note := run.note_set_aside()) is not None:
        raise CheckpointError(note)
    if not found:
        raise CheckpointError(f"{run_dir}: has no checkpoints; give the directory of a run that has saved one")
    return found


def _print_list(found: list[CheckpointInfo]) -> None:
    from forgather_cli.checkpoint.retention import better_unsaved

    columns = (
        Col("step", right=True),
        Col("step loss", right=True),
        Col("eval loss", right=True),
        Col("size", right=True, droppable=2),
        Col("saved", droppable=1),
        Col("note", fold=True),
    )
    rows, styles, best = [], [], better_unsaved(found) or "best"
    for info in found:
        losses = [info.metrics.get(key) for key in ("loss", "eval_loss")]
        numbers = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
        marks = {best: info.best, "final": info.final, "not healthy": not info.healthy, "abandoned": info.abandoned}
        marks[f"named {info.path.name}"] = step_of(info.path) != info.step
        told = "damaged" if info.problem else ", ".join(mark for mark, holds in marks.items() if holds)
        rows.append((str(info.step), *numbers, human_bytes(info.size_bytes), local_time(info.created), told))
        styles.append("red" if info.problem else "bold" if info.best else "")
    print_table(columns, rows, styles)
    tell(f"newest: {shown(found[-1].path)}")


@app.command(cls=Command)
def inspect(source: Source, as_json: AsJson = False) -> None:
    """Show a checkpoint's manifest and its tensors."""
    from forgather_cli.checkpoint.manifest import read_manifest

    path = _chosen(source)[-1]
    manifest = read_manifest(path)
    tensors = list(_tensors(path, manifest))
    if as_json:
        print_json({"path": str(path), "manifest": json.loads(manifest.to_bytes()), "tensors": tensors})
    else:
        _print_manifest(path, manifest)
        model = [t for t in tensors if t["file"].startswith("model/")]  # of others how many; --json lists all
        shapes = [" x ".join(map(str, t["shape"])) or "scalar" for t in model]
        rows = [(t["name"], t["dtype"], s, human_bytes(t["bytes"])) for t, s in zip(model, shapes, strict=True)]
        columns = (Col("tensor", copied=True), Col("dtype", droppable=1), Col("shape"), Col("size", right=True))
        print_table(columns, rows)
        files = dict.fromkeys(t["file"] for t in tensors)
        sizes = {file: [t["bytes"] for t in tensors if t["file"] == file] for file in files}
        totals = [(file, f"{len(each):,}", human_bytes(sum(each))) for file, each in sizes.items()]
        print_table((Col("file", copied=True), Col("tensors", right=True), Col("size", right=True)), totals)


def _tensors(path: Path, manifest: Manifest) -> Iterator[dict[str, Any]]:
    """Name, dtype, shape, bytes and file of every tensor, from the files' headers."""
    from forgather_cli.checkpoint.format import read_header

    for name in sorted(manifest.files):
        if name.endswith(".safetensors"):
            for tensor, (spec, _) in read_header(path / name).items():
                shape = list(spec.shape)
                yield {"name": tensor, "dtype": spec.dtype, "shape": shape, "bytes": spec.num_bytes, "file": name}


def _print_manifest(path: Path, manifest: Manifest) -> None:
    kinds = {key: kind.lower().replace("_", " ") for key, kind in manifest.components.items()}
    print_facts(
        {
            "checkpoint": path,
            "step": str(manifest.step),
            "saved": local_time(manifest.created),
            "strategy": f"{manifest.strategy}, world size {manifest.world_size}",
            "healthy": "yes" if manifest.healthy else "no",
            "final": "yes" if manifest.final else "no",
            "step metrics": ", ".join(f"{key}={value:.6g}" for key, value in manifest.metrics.items()),
            "components": ", ".join(f"{key} ({kind})" for key, kind in kinds.items()),
            "versions": ", ".join(f"{key} {value}" for key, value in manifest.versions.items()),
            "config": manifest.config_fingerprint or "-",
        }
    )


@app.command(cls=Command)
def verify(source: RunOrCheckpoint, as_json: AsJson = False) -> None:
    """Read every byte of a checkpoint and compare it with its manifest; exit code 1 if it is damaged."""
    with doing("reading the run"):
        checked = [(path, _problems(path)) for path in _chosen(source)]
    if as_json:
        print_json([{"path": str(path), "valid": not problems, "problems": problems} for path, problems in checked])
    else:
        for path, problems in checked:
            typer.secho(escaped(f"{shown(path)}: {'damaged' if problems else 'ok'}"), fg="red" if problems else "green")
            typer.echo(escaped("".join(f"  {problem}\n" for problem in problems)), nl=False)
    if any(problems for _, problems in checked):
        raise typer.Exit(1)


def _chosen(source: Path) -> list[Path]:
    """``source`` if it is a checkpoint, else all checkpoints of the run, the newest last."""
    if (source / "checkpoints").is_dir() or not source.is_dir() or RunDir(source).note_set_aside():
        return [info.path for info in _of_run(source)]
    return [source]


def _problems(path: Path) -> list[str]:
    """What is wrong with a checkpoint, file by file. Raises CheckpointError where there is none."""
    from forgather_cli.checkpoint.manifest import NAME, NewerFormatError, read_manifest

    if not (path / NAME).exists():
        read_manifest(path)
    try:
        return read_manifest(path).problems(path, "full")
    except NewerFormatError:
        raise
    except CheckpointError as error:
        return [str(error)]


@app.command(cls=Command)
def average(
    sources: Annotated[
        list[Path],
        typer.Argument(
            metavar="SOURCE...",
            help="Checkpoints or model directories; with --last one run.",
            callback=or_latest,
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option("-o", "--out", metavar="OUT", help="A directory that does not exist.", show_default=False)
    ],
    last: Annotated[
        int | None,
        typer.Option("--last", metavar="K", min=2, help="The last K checkpoints of a run.", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write the mean of several checkpoints' weights as a model directory.

    The sum is made in fp32, tensor by tensor; the result has the checkpoints' dtype. OUT has config and tokenizer, and
    [cyan]provenance.json[/] says what it is the mean of.
    """
    from forgather_cli.checkpoint.files import check_absent
    from forgather_cli.checkpoint.sources import check_sources

    with only_json(as_json), doing("importing torch"):
        check_absent(out)
        members = sources if last is None else _last_of(sources, last)
        check_sources(members)
        from forgather_cli.checkpoint.average import average_models

        with interruptible():
            average_models(members, out, verified=last is not None)
    if as_json:
        print_json({"path": str(out), "sources": [str(member) for member in members]})
    else:
        tell(f"mean of {', '.join(member.name for member in members)}")
        tell(shown(out))


def _last_of(sources: list[Path], count: int) -> list[Path]:
    """The run's last ``count`` healthy checkpoints, oldest first."""
    if len(sources) != 1:
        raise ConfigError(f"--last: takes the checkpoints of one run, got {len(sources)} sources; name one run")
    run = RunDir(sources[0])
    if not run.checkpoints.is_dir():
        raise CheckpointError(
            f"{run.root}: has no checkpoints; --last takes the directory of a run that has saved some"
        )
    from forgather_cli.checkpoint.average import enough_of, last_checkpoints

    members = last_checkpoints(run, count)
    enough_of(run, members, count, "--last", console(stderr=True).print)
    return members


@app.command(cls=Command)
def edit(
    source: Source,
    overrides: Overrides = None,
    trust_config: TrustConfig = False,
    as_json: AsJson = False,
) -> None:
    """Change the learning rate, weight decay, optimizer settings (betas, eps, ...) or schedule of a saved state.

    [cyan]forgather checkpoint edit RUN learning_rate=1e-4 lr_scheduler=linear[/]

    The next [cyan]forgather resume[/] goes on with the edited values, unless its command line has others; [cyan]train
    resume_from_checkpoint=...[/] takes those of its own config and says which differ. The checkpoint as it was stays
    beside it as [cyan]step-....backup-1[/]: to undo the edit, remove the edited one and move the backup back.
    """
    words = check_overrides(overrides)
    if not words:
        raise ConfigError("checkpoint edit: nothing to change; give settings as key=value, such as learning_rate=1e-4")
    with only_json(as_json), doing("reading and writing the state"):
        from forgather_cli.checkpoint.choice import would_resume
        from forgather_cli.checkpoint.edit import edit_checkpoint

        reader = _reader(source)
        loaded = _composed(reader, words, trust_config)
        made = edit_checkpoint(reader, loaded.config, loaded.tree)
    if as_json:
        changes = {name: {"before": before, "after": after} for name, (before, after) in made.changes.items()}
        print_json({"path": str(reader.path), "backup": str(made.backup), "changes": changes})
        return
    for name, values in made.changes.items():
        tell(f"{name}: " + " -> ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values))
    tell(f"as it was: {shown(made.backup)}")
    path = reader.path.resolve()
    run = run_of(reader.path)
    newest = would_resume(run) if run is not None else None
    if run is not None and newest is not None and newest.path.resolve() != path:
        command = ["forgather", "resume", shown(run.root), f"resume_from_checkpoint={quoted(path)}", *words]
        what = f"a plain forgather resume starts from {newest.path.name}; to resume from the edited one"
        tell(f"{what}: {shlex.join(command)}")
    tell(shown(reader.path))


def _reader(source: Path) -> Reader:
    """The checkpoint, verified."""
    from forgather_cli.checkpoint.load import newest_valid, open_whole

    if not (source / "checkpoints").is_dir():
        return open_whole(source)
    newest = newest_valid(RunDir(source))
    if newest is None:
        raise CheckpointError(f"{source}: has no checkpoints; give the directory of a run that has saved one")
    return newest


def _composed(reader: Reader, words: list[str], trust_config: bool) -> Loaded:
    """The checkpoint's own config with the changes. Raises ConfigError, also for a setting that no state holds."""
    from forgather_cli.checkpoint.edit import EDITABLE, saved_config
    from forgather_cli.config.decode import dump_tree
    from forgather_cli.config.load import load_resumed

    with tempfile.TemporaryDirectory() as folder:
        saved = Path(folder) / "config.yaml"
        saved.write_text(dump_tree(saved_config(reader)), encoding="utf-8")
        loaded = load_resumed(saved, words, reads=None if trust_config else EDITABLE)
    outside = sorted(path for path in loaded.given if path.split(".")[0] not in EDITABLE)
    if outside:
        here = "learning_rate, weight_decay, optimizer.* and lr_scheduler"
        raise ConfigError(
            [f"{path}: is not in a saved state; give it to forgather resume. Here: {here}" for path in outside]
        )
    return loaded
