"""``forgather cache``: what the data cache holds, and removing what is no longer needed. No torch here."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from forgather_cli.callbacks.console import TIME
from forgather_cli.cli.output import (
    AsJson,
    Col,
    Yes,
    ask,
    check_answerable,
    human,
    human_bytes,
    print_json,
    print_table,
)
from forgather_cli.cli.style import Command, Group
from forgather_cli.data.cache import Cache, CacheEntry, entries, remove_entry
from forgather_cli.errors import ConfigError
from forgather_cli.terminal.bars import doing

_AGE = re.compile(r"(\d+)([mhdw])")
_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}  # seconds

app = typer.Typer(
    cls=Group,
    help="List and prune the data cache: tokenized corpora and what belongs to them, GGUF files that are served."
    "\n\nWhat is removed there is made again when a run needs it.",
    no_args_is_help=True,
)

CacheDir = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="As data.cache_dir; else $XDG_CACHE_HOME/forgather or ~/.cache/forgather."),
]


@app.command("list", cls=Command)
@doing("measuring what is cached")
def list_(cache_dir: CacheDir = None, as_json: AsJson = False) -> None:
    """List tokenized corpora, trained tokenizers and the like with size and last use, the last used first."""
    root = Cache(cache_dir).root
    found = entries(root)
    if as_json:
        print_json([_document(entry) for entry in found])
        return
    if not found:
        typer.echo(f"{root}: nothing is cached")
        return
    columns = (Col("kind"), Col("what", fold=True), Col("tokens", right=True, droppable=2), Col("size", right=True),
               Col("last used", droppable=1), Col("state"))  # fmt: skip
    hashes = [entry for entry in found if entry.kind == "content"]  # small and many: one row
    rows = []
    for entry in [entry for entry in found if entry.kind != "content"] + hashes[:1]:
        parts = entry.meta.get("origin", {}).items()
        splits = [entry.meta.get(split, {}) for split in ("train", "eval")]
        counts = [split["tokens"] for split in splits if "tokens" in split]  # a packing has rows of them
        rows.append((
            entry.kind,
            f"hashes of files: {len(hashes)}" if entry in hashes else " ".join(f"{k} {v}" for k, v in parts) or "-",
            human(sum(counts)) if counts else "-",
            human_bytes(sum(each.size_bytes for each in hashes) if entry in hashes else entry.size_bytes),
            datetime.fromtimestamp(entry.last_used).strftime(TIME),
            "in use" if entry.in_use else "unfinished" if entry.is_unfinished else "",
        ))  # fmt: skip
    print_table(columns, rows)
    typer.echo(f"{root}: {human_bytes(sum(entry.size_bytes for entry in found))}")


@app.command(cls=Command)
def prune(
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="What was last used longer ago than that: 12h, 30d, 8w.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Whatever no process uses now.")] = False,
    cache_dir: CacheDir = None,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Remove what was not used for a time, or all. What a running job uses stays."""
    if (older_than is None) == (not everything):
        raise ConfigError("cache prune: takes either --older-than AGE, such as 30d, or --all")
    match = _AGE.fullmatch(older_than or "0m")
    if match is None:
        raise ConfigError(f"--older-than: must be a number with m, h, d or w, such as 30d, got {older_than!r}")
    root, before = Cache(cache_dir).root, time.time() - int(match[1]) * _UNITS[match[2]]
    with doing("measuring what is cached"):
        chosen = [entry for entry in entries(root) if entry.last_used <= before]
    used = [entry for entry in chosen if entry.in_use]
    chosen = [entry for entry in chosen if not entry.in_use]
    if chosen and not yes:
        check_answerable("cache prune", "--yes", as_json=as_json)
        ask(f"Remove {_told(chosen)} from {root}?")
    with doing(f"removing {_told(chosen)}"):
        removed = [entry for entry in chosen if remove_entry(root, entry)]
    if as_json:
        print_json([_document(entry) for entry in removed])
        return
    if used:
        typer.echo(f"{_told(used)} stay, since a process uses them")
    typer.echo(f"removed {_told(removed)}" if removed else f"{root}: nothing to remove")


def _told(found: Sequence[CacheEntry]) -> str:
    size = human_bytes(sum(entry.size_bytes for entry in found))
    return f"{len(found)} {'entry' if len(found) == 1 else 'entries'} ({size})"


def _document(entry: CacheEntry) -> dict[str, Any]:
    used = datetime.fromtimestamp(entry.last_used, UTC).isoformat(timespec="seconds")
    return {"kind": entry.kind, "path": str(entry.path), "size_bytes": entry.size_bytes, "last_used": used,
            "in_use": entry.in_use, "unfinished": entry.is_unfinished, "origin": entry.meta.get("origin")}  # fmt: skip
