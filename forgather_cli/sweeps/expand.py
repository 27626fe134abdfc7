"""The values that a sweep's overrides name, and the names of its jobs."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgather_cli.config.as_typed import as_typed
from forgather_cli.config.options import search_path
from forgather_cli.config.overrides import parse_lines
from forgather_cli.config.paths import ending_with, is_text
from forgather_cli.errors import ConfigError


def expand(overrides: Sequence[str], *, config_dir: Path | None = None, cwd: Path | None = None) -> list[list[str]]:
    """The overrides of each job of a sweep: the product of all values, the last key varying fastest.

    ``key=a,b``, ``choice(a,b)``, ``range(1,4)``, and ``glob(*)`` over a group's options. Raises ConfigError with every
    override that cannot be read or enumerated.
    """
    parsed, problems = parse_lines(overrides)
    search = search_path(config_dir, cwd)
    choices = []
    for item in parsed:
        line, key = str(item.input_line), item.key_or_group
        if not item.is_sweep_override():
            choices.append([line])
            continue
        values: Any = []
        kind = item.value_type.name if item.value_type is not None else ""
        if kind == "INTERVAL_SWEEP":
            problems.append(f"{line}: an interval has no list of values; write {key}=a,b,c or range(start,stop,step)")
        elif kind == "GLOB_CHOICE_SWEEP":
            names: Any = search.option_names(key)
            if not (values := item.value().filter(names)):  # type: ignore[union-attr]
                known = ", ".join(names) or f"none, {key} is no group"
                problems.append(f"{line}: matches no option; Options: {known}")
        elif not (values := list(item.sweep_string_iterator())):
            problems.append(f"{line}: has no values; give some")
        elif kind == "SIMPLE_CHOICE_SWEEP" and any(map(is_text, [key, *ending_with(key)])):
            parts: Any = item.value()
            pairs, text = zip(values, parts.list, strict=True), f"[{line.partition('=')[2]}]"
            values = [as_typed(part, text) if isinstance(part, int | float) else value for value, part in pairs]
        choices.append([f"{item.get_key_element()}={value}" for value in values])
    if problems:
        raise ConfigError(problems)
    return [list(job) for job in itertools.product(*choices)]


def job_name(recipe_text: str, overrides: Sequence[str]) -> str:
    """A directory name for a job, the same for the same recipe and overrides: readable start, then a hash."""
    content = "\0".join([recipe_text, *overrides]).encode()
    words = re.sub(r"[^\w.=+-]+", "_", ",".join(overrides)).strip("_.")[:80]
    digest = hashlib.sha256(content).hexdigest()[:8]
    return f"{words}-{digest}" if words else digest
