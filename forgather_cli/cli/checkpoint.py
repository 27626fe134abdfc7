"""``forgather checkpoint``: look at checkpoints, check and mend them. No torch here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgather_cli.cli.average import average
from forgather_cli.cli.edit import edit
from forgather_cli.cli.output import AsJson, Col, human_bytes, print_facts, print_json, print_table
from forgather_cli.cli.style import Command, Group
from forgather_cli.errors import CheckpointError
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.checkpoint.manifest import Manifest
    from forgather_cli.checkpoint.retention import CheckpointInfo

app = typer.Typer(cls=Group, help="Look at checkpoints and mend them.", no_args_is_help=True)

Source = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or a run for its newest one.", show_default=False)
]
RunOrCheckpoint = Annotated[
    Path, typer.Argument(metavar="SOURCE", help="A checkpoint, or a run for all of its.", show_default=False)
]


@app.command("list", cls=Command)
def list_(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.", show_default=False)],
    as_json: AsJson = False,
) -> None:
    """List a run's checkpoints with the best and the final one marked."""
    found = _of_run(run_dir)
    if as_json:
        print_json([_document(info) for info in found])
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


def _document(info: CheckpointInfo) -> dict[str, Any]:
    document = {key: value for key, value in asdict(info).items() if key not in ("best_by", "foreign")}
    return {**document, "path": str(info.path)}


def _print_list(found: list[CheckpointInfo]) -> None:
    columns = (
        Col("step", right=True),
        Col("loss", right=True),
        Col("eval loss", right=True),
        Col("size", right=True),
        Col("saved (UTC)", droppable=1),
        Col(""),
    )
    rows, styles = [], []
    for info in found:
        losses = [info.metrics.get(key) for key in ("loss", "eval_loss")]
        shown = ["-" if loss is None else f"{loss:.4f}" for loss in losses]
        saved = info.created.replace("T", " ")[:19]
        rows.append((str(info.step), *shown, human_bytes(info.size_bytes), saved, _marks(info)))
        styles.append("red" if info.problem else "bold" if info.best else "")
    print_table(columns, rows, styles)
    typer.echo(f"newest: {found[-1].path}")


def _marks(info: CheckpointInfo) -> str:
    marks = {
        "best": info.best,
        "final": info.final,
        "not healthy": not info.healthy and not info.problem,
        "abandoned": info.abandoned,
    }
    return ", ".join(["damaged"] if info.problem else [mark for mark, holds in marks.items() if holds])


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
        rows = [(t["name"], t["dtype"], _shape(t), human_bytes(t["bytes"])) for t in model]
        print_table((Col("tensor"), Col("dtype", droppable=1), Col("shape"), Col("size", right=True)), rows)
        files = dict.fromkeys(t["file"] for t in tensors)
        sizes = {file: [t["bytes"] for t in tensors if t["file"] == file] for file in files}
        totals = [(file, f"{len(each):,}", human_bytes(sum(each))) for file, each in sizes.items()]
        print_table((Col("file"), Col("tensors", right=True), Col("size", right=True)), totals)


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
            "checkpoint": str(path),
            "step": str(manifest.step),
            "saved": f"{manifest.created.replace('T', ' ')[:19]} UTC",
            "strategy": f"{manifest.strategy}, world size {manifest.world_size}",
            "healthy": "yes" if manifest.healthy else "no",
            "final": "yes" if manifest.final else "no",
            "metrics": ", ".join(f"{key}={value:.6g}" for key, value in manifest.metrics.items()),
            "components": ", ".join(f"{key} ({kind})" for key, kind in kinds.items()),
            "versions": ", ".join(f"{key} {value}" for key, value in manifest.versions.items()),
            "config": manifest.config_fingerprint or "-",
        }
    )


def _shape(tensor: dict[str, Any]) -> str:
    return " x ".join(map(str, tensor["shape"])) or "scalar"


@app.command(cls=Command)
def verify(source: RunOrCheckpoint, as_json: AsJson = False) -> None:
    """Read every byte of a checkpoint and compare it with its manifest; exit code 1 if it is damaged."""
    checked = [(path, _problems(path)) for path in _chosen(source)]
    if as_json:
        print_json([{"path": str(path), "valid": not problems, "problems": problems} for path, problems in checked])
    else:
        for path, problems in checked:
            typer.secho(f"{path}: {'damaged' if problems else 'ok'}", fg="red" if problems else "green")
            typer.echo("".join(f"  {problem}\n" for problem in problems), nl=False)
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


app.command("average", cls=Command)(average)
app.command("edit", cls=Command)(edit)
