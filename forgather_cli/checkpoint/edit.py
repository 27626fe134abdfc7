"""A published checkpoint with other states in it: its hashes are made anew, and the old one is kept beside it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from forgather_cli.checkpoint.components import shared_file
from forgather_cli.checkpoint.files import remove, sibling, sync_directory, write_file
from forgather_cli.checkpoint.load import Reader
from forgather_cli.checkpoint.manifest import NAME, merge_entries
from forgather_cli.encoding import Encoded
from forgather_cli.errors import CheckpointError, SetupError
from forgather_cli.run_dir import RunDir


def rewrite(reader: Reader, states: Mapping[str, Any], info: Mapping[str, Any]) -> Path:
    """Replace the states of components that all ranks share, and add to the manifest's ``info``; the backup's path.

    The checkpoint keeps its name; the one before becomes its sibling ``<name>.backup-<n>``, which shares all unchanged
    files (hard links) and is no checkpoint of the run until it is moved back. A crash at any instant leaves one of the
    two under the name, or to be given it by the next job. States hold no tensors. Raises SetupError.
    """
    path = reader.path
    temporary = sibling(path, "tmp")
    try:
        for source in [path, *sorted(path.rglob("*"))]:
            copy = temporary / source.relative_to(path)
            if source.is_dir():
                copy.mkdir()
                continue
            try:
                os.link(source, copy)
            except OSError:  # not every file system has hard links
                shutil.copy2(source, copy)
        name = f"{shared_file()}.json"
        document = json.loads((temporary / name).read_bytes())
        for key, state in states.items():
            encoded = Encoded()
            encoded.add(key, state)
            assert not encoded.tensors, key
            document["components"][key] = encoded.documents[key]
        for changed in (name, NAME):  # new files instead of the links: the old ones must not change
            (temporary / changed).unlink()
        content = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
        old, new = reader.manifest, merge_entries([{name: write_file(temporary / name, content)}])
        manifest = replace(old, files={**old.files, **new}, info={**old.info, **info})
        write_file(temporary / NAME, manifest.to_bytes())
        for directory in [temporary, *(path for path in temporary.rglob("*") if path.is_dir())]:
            sync_directory(directory)
        return _swap(temporary, path)
    except OSError as error:
        raise SetupError(f"{path}: cannot be edited ({error.strerror or error}); it is as it was") from error
    finally:
        remove(temporary)


def _swap(temporary: Path, path: Path) -> Path:
    """Give ``temporary`` the name of ``path``, which becomes the backup."""
    aside = sibling(path, "replaced")  # under this name the next job would give it back
    path.rename(aside)
    try:
        temporary.rename(path)
    except OSError:
        aside.rename(path)
        raise
    sync_directory(path.parent)
    number = 1
    while (backup := path.with_name(f"{path.name}.backup-{number}")).exists():
        number += 1
    aside.rename(backup)
    sync_directory(path.parent)
    return backup


def check_idle(run: RunDir) -> None:
    """Raise CheckpointError if a job is writing the run directory."""
    if not run.lock.exists():
        return
    with run.lock.open("r+b") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(
                f"{run.root}: a job is writing it; stop it first with forgather control save_and_stop {run.root}"
            ) from None
