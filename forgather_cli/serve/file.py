"""The GGUF file that is served: the one that SOURCE is or has, or one that is made of it once, and proved.

<cache_dir>/gguf/<key>/model.gguf      the key is of the source's files, the type, and the versions of what makes it
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

from forgather_cli import __version__
from forgather_cli.checkpoint.choice import choose
from forgather_cli.checkpoint.files import remove
from forgather_cli.cli.words import local_source
from forgather_cli.data.cache import Cache, Meta, digest
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError, ModelError, SetupError
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.hub import is_hub_name
from forgather_cli.run_dir import (
    RunDir,
    is_adapter_directory,
    is_checkpoint,
    is_model_directory,
    model_in,
    run_of,
    shown,
)
from forgather_cli.terminal.bars import doing

_VERSION = 1  # of what else decides what a file holds
_FILE = "model.gguf"
_READ = (".json", ".jinja", ".model", ".safetensors", ".txt")  # of a model's files


def name_of(source: Path) -> str:
    """The model's name for clients."""
    if is_hub_name(str(source)):
        return str(source)
    return source.stem if source.suffix == ".gguf" else source.resolve().name


def choose_file(source: Path, kind: str | None, say: Callable[[str], None]) -> Path:
    """The file to serve; ``kind`` None: q8_0, or what ``finalize`` has written into SOURCE first. Raises SetupError."""
    if source.suffix == ".gguf" and not is_hub_name(str(source)) and not source.is_dir():
        if not source.is_file():
            raise SetupError(f"{source}: no such file; give a GGUF file, a run, a checkpoint or a model directory")
        if kind is not None:
            raise ConfigError(f"--gguf: {source} is a GGUF file already; leave --gguf out")
        return source
    directory, name = local_source(source), Path(name_of(source)).name
    report = directory / "finalize_report.json"
    for proof in read_json_object(report).get("gguf", []) if report.exists() else []:
        if kind in (None, proof["type"]) and (directory / proof["file"]).is_file():
            return directory / str(proof["file"])
    kind = kind or "q8_0"
    chosen = _model_of(directory)
    parts = [chosen]
    if is_adapter_directory(chosen):
        with doing("importing torch"):
            from forgather_cli.adapters.directory import read_adapter
        parts.append(read_adapter(chosen).base)
    files = [path for part in parts for path in sorted(part.iterdir()) if path.suffix in _READ]
    if (run := run_of(chosen)) is not None:  # whose config says what stands before a text
        files.append(run.newest_config())
    cache = Cache(None)
    with doing("hashing the model"):
        from forgather_cli.data.text.corpus import content_hash
        from forgather_cli.data.text.read import SourceFile

        content = content_hash(cache, [SourceFile(each, each.name) for each in files])
    versions = [__version__, *map(importlib.metadata.version, ("gguf", "xllamacpp"))]
    key = digest([_VERSION, content, kind, versions])

    def make(folder: Path) -> Meta:
        with doing("importing torch"):
            from forgather_cli.finalize.run import finalize
        options = FinalizeOptions(gguf=kind, merge=len(parts) > 1)
        report = finalize(directory, folder / name, options, say)
        (folder / name / report["gguf"][0]["file"]).rename(folder / _FILE)
        remove(folder / name)
        return {"origin": {"model": report["source"]["path"], "type": kind}}

    is_known = cache.find("gguf", key) is not None
    at, meta = cache.build_once("gguf", key, make)
    say(f"{kind} of {shown(meta['origin']['model'])}, {'from the cache' if is_known else 'kept in the cache'}")
    return at / _FILE


def _model_of(directory: Path) -> Path:
    """The files of the model that a run, a checkpoint or a directory stands for. Raises SetupError."""
    if is_checkpoint(directory) or is_model_directory(directory) or is_adapter_directory(directory):
        return model_in(directory)
    chosen = choose(RunDir(directory))
    if chosen is None:
        raise ModelError(f"{directory}: the run has no checkpoint yet; train it with save_strategy=steps or epoch")
    return model_in(chosen.path)
