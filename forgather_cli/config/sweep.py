"""Sweeps: Hydra's syntax for several values of a key, expanded to one list of overrides per job."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from forgather_cli.config.options import SearchPath, search_path
from forgather_cli.config.overrides import parse_lines
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override


def expand(overrides: Sequence[str], *, config_dir: Path | None = None, cwd: Path | None = None) -> list[list[str]]:
    """The overrides of each job: the product of all values, the last key varying fastest.

    ``key=a,b``, ``choice(a,b)``, ``range(1,4)``, and ``glob(*)`` over a group's options. Raises ConfigError with every
    override that cannot be read or enumerated.
    """
    parsed, problems = parse_lines(overrides)
    search = search_path(config_dir, cwd)
    choices = []
    for item in parsed:
        lines, problem = _lines(item, search)
        choices.append(lines)
        problems += [problem] if problem else []
    if problems:
        raise ConfigError(problems)
    return [list(job) for job in itertools.product(*choices)]


def job_name(recipe_text: str, overrides: Sequence[str]) -> str:
    """A directory name for a job, the same for the same recipe and overrides: readable start, then a hash."""
    content = "\0".join([recipe_text, *overrides]).encode()
    words = re.sub(r"[^\w.=+-]+", "_", ",".join(overrides)).strip("_.")[:80]
    digest = hashlib.sha256(content).hexdigest()[:8]
    return f"{words}-{digest}" if words else digest


def _lines(item: Override, search: SearchPath) -> tuple[list[str], str | None]:
    """The single-valued overrides that a swept one stands for."""
    from hydra.core.override_parser.types import ValueType

    line = str(item.input_line)
    if not item.is_sweep_override():
        return [line], None
    if item.value_type == ValueType.INTERVAL_SWEEP:
        return (
            [],
            f"{line}: an interval has no list of values; write {item.key_or_group}=a,b,c or range(start,stop,step)",
        )
    if item.value_type == ValueType.GLOB_CHOICE_SWEEP:
        names = item.value().filter(search.option_names(item.key_or_group))  # type: ignore[union-attr]
        known = ", ".join(search.option_names(item.key_or_group)) or f"none, {item.key_or_group} is no group"
        problem = None if names else f"{line}: matches no option; Options: {known}"
        return [f"{item.get_key_element()}={name}" for name in names], problem
    values = list(item.sweep_string_iterator())
    return [
        f"{item.get_key_element()}={value}" for value in values
    ], None if values else f"{line}: has no values; give some"
