"""An evaluation on several ranks: a directory of its own, the ranks of this node, and what they have found."""

from __future__ import annotations

import json
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forgather_cli.errors import ConfigError
from forgather_cli.launch.exit_status import ExitStatus, Kind
from forgather_cli.launch.layout import Layout, plan_layout
from forgather_cli.launch.place import Place
from forgather_cli.launch.rank_log import lasting_output
from forgather_cli.launch.start import check_port, supervised
from forgather_cli.run_dir import RunDir

if TYPE_CHECKING:
    from forgather_cli.config.load import Loaded


def plan_evaluation(loaded: Loaded, place: Place | None) -> Layout:
    """Where the ranks of an evaluation are to be. Raises ConfigError for what is not one node of ours."""
    if place is not None and place.size > 1:
        raise ConfigError(f"eval: starts its ranks itself, but {place.by} has started {place.size}; run it once, alone")
    if loaded.config.nnodes > 1:
        raise ConfigError(f"nnodes: eval runs on one machine, got {loaded.config.nnodes}; set nnodes=1")
    return replace(plan_layout(loaded.config, loaded.given), restarts=0)


@lasting_output()
def evaluate_on_ranks(loaded: Loaded, layout: Layout, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """(exit code, what ``evaluation.evaluate_source`` returns) of ``request``, its arguments, on the ranks of a layout.

    Why it failed is shown here, once. Nothing is left of it, but the ranks' logs where they are needed to understand.
    """
    check_port(layout)
    run = RunDir(Path(tempfile.mkdtemp(prefix="forgather-eval-")))

    def settle(status: ExitStatus) -> None:
        if not status.failed or status.kind in (Kind.MISTAKE, Kind.CUT):
            shutil.rmtree(run.root, ignore_errors=True)

    _write(run, loaded, request)
    status = supervised(layout, run, run.config, settle)
    report = {} if status.failed else json.loads(run.report.read_text(encoding="utf-8"))
    settle(status)
    return status.code, report


def _write(run: RunDir, loaded: Loaded, request: dict[str, Any]) -> None:
    """What ranks read."""
    from forgather_cli.config.decode import dump_tree

    run.logs.mkdir()
    run.lock.touch()
    run.config.write_text(dump_tree({**loaded.tree, "output_dir": str(run.root)}), encoding="utf-8")
    run.evaluation.write_text(json.dumps(request), encoding="utf-8")
