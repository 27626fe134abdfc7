"""Which model is finalized, and where it comes from."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.checkpoint.average import PROVENANCE, average_models, enough_of, last_checkpoints
from forgather_cli.checkpoint.load import Reader, best_valid
from forgather_cli.checkpoint.manifest import NAME
from forgather_cli.checkpoint.retention import better_unsaved, list_checkpoints
from forgather_cli.documents.regular_files import read_json_object
from forgather_cli.errors import ConfigError, SetupError
from forgather_cli.finalize.options import FinalizeOptions
from forgather_cli.inference.source import Located, locate
from forgather_cli.run_dir import RunDir, is_adapter_directory, run_of

if TYPE_CHECKING:
    from forgather_cli.adapters.directory import AdapterDirectory

REPORT = "finalize_report.json"
_TRAINING = ("learning_rate", "weight_decay", "global_batch_size", "seed", "precision", "optimizer", "lr_scheduler")


@dataclass(frozen=True)
class Chosen:
    """The model to finalize, every byte of its checkpoints read; of an average its members."""

    located: Located
    """Of an average the newest member."""
    members: tuple[Path, ...] = ()
    """Checkpoints to average, oldest first; empty for one model."""
    adapter: AdapterDirectory | None = None
    """Where it is one."""
    is_merged: bool = False
    """The adapter is to be merged into its base."""

    @property
    def is_made(self) -> bool:
        """Whether the model is yet to be made."""
        return bool(self.members) or self.is_merged

    @property
    def alone(self) -> AdapterDirectory | None:
        """An adapter that is not to be merged."""
        return None if self.is_merged else self.adapter

    @property
    def in_four_bits(self) -> bool:
        """Whether it is an adapter that was trained beside four bits."""
        return self.adapter is not None and self.adapter.settings.in_four_bits

    @property
    def described_by(self) -> Path:
        """The directory with config.json and weights: of an adapter that of its base."""
        return self.located.directory if self.adapter is None else self.adapter.base

    def model(self, directory: Path) -> Located:
        """The model itself; an average, and a merged one, is made in ``directory``, which must not exist."""
        if self.is_merged:
            from forgather_cli.adapters.merge import write_merged

            assert self.adapter is not None
            write_merged(self.located, self.adapter, directory)
        elif self.members:
            average_models(self.members, directory, verified=True)
        return Located(directory, None, self.located.run) if self.is_made else self.located

    def lineage(self) -> dict[str, Any]:
        """Where the model comes from, for report and README."""
        reader, run = self.located.reader, self.located.run
        lineage: dict[str, Any]
        if reader is None:
            lineage = {"kind": "model directory", "path": str(self.located.directory.resolve())}
            for path in (self.located.directory / REPORT, self.located.directory / PROVENANCE):
                if path.exists():  # what the directory says of its own origin
                    document = read_json_object(path)
                    return {**lineage, "made_from": document.get("source", document)}
            return lineage
        manifest = reader.manifest
        lineage = {
            "kind": "average" if self.members else "checkpoint",
            "path": str(reader.path.resolve()),
            "run": None if run is None else str(run.root),
            "step": reader.step,
            "saved": manifest.created,
            "strategy": manifest.strategy,
            "world_size": manifest.world_size,
            "healthy": manifest.healthy,
            "metrics": dict(manifest.metrics),
            "versions": dict(manifest.versions),
            "manifest_sha256": hashlib.sha256((reader.path / NAME).read_bytes()).hexdigest(),
        }
        if identity := reader.identity():
            config = identity.get("config") or {}
            lineage |= {
                "data": identity.get("data"),
                "training": {key: config[key] for key in _TRAINING if key in config},
            }
        if self.members:
            lineage["members"] = [str(path.resolve()) for path in self.members]
        return lineage


def choose(source: Path, options: FinalizeOptions, say: Callable[[str], None]) -> Chosen:
    """The model that SOURCE and ``--best`` or ``--average`` stand for. Raises ConfigError, SetupError."""
    if not source.is_dir():
        raise SetupError(f"{source}: no such directory; give a run, a checkpoint or a model directory")
    if not options.best and options.average is None:
        return _of_adapter(Chosen(locate(source, trust_config=True)), options)  # none is built that has no config.json
    run = RunDir(source)
    if not run.checkpoints.is_dir():
        given = "--best" if options.best else "--average"
        inside = run_of(source)
        raise ConfigError(
            f"{given}: chooses among the checkpoints of a run, but {source} is not a run's directory; leave {given} out"
            + ("" if inside is None else f", or give {inside.root}")
        )
    if options.best:
        best = best_valid(run)
        if best is None:
            raise SetupError(
                f"--best: no whole and healthy checkpoint of {run.root} has the metric the run was judged by; train "
                "with evaluation (eval_strategy=steps), or leave --best out"
            )
        if better := better_unsaved(list_checkpoints(run)):
            say(f"{best.path.name}: {better}")
        return _of_adapter(Chosen(Located(best.path / "model", best, run_of(best.path))), options)
    assert options.average is not None
    members = last_checkpoints(run, options.average)
    enough_of(run, members, options.average, "--average", say)
    newest = Reader(members[-1])
    if is_adapter_directory(newest.path / "model"):
        raise ConfigError(
            f"--average: the checkpoints of {run.root} are adapters, and the mean of products is no product of means; "
            "finalize each with --merge and average these (forgather checkpoint average)"
        )
    return Chosen(Located(newest.path / "model", newest, run_of(newest.path)), tuple(members))


def _of_adapter(chosen: Chosen, options: FinalizeOptions) -> Chosen:
    """``chosen`` with its adapter, where it is one. Raises ConfigError for options that do not go with what it is."""
    directory = chosen.located.directory
    if not is_adapter_directory(directory):
        if options.merge:
            raise ConfigError(f"--merge: merges an adapter, and {directory} is a whole model; leave --merge out")
        return chosen
    from forgather_cli.adapters.directory import read_adapter

    of_whole = {
        "--dtype": options.dtype, "--quantize": options.quantize, "--add-tokens": options.add_tokens,
        "--chat-template": options.chat_template, "--max-ratio": options.max_ratio,
    }  # fmt: skip
    given = next((name for name, value in of_whole.items() if value is not None), None)
    if given is not None and not options.merge:
        raise ConfigError(f"{given}: is for a whole model, got the adapter {directory}; add --merge, or leave it out")
    return replace(chosen, adapter=read_adapter(directory), is_merged=options.merge)
