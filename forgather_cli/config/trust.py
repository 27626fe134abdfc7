"""A saved config that somebody else may have written: what it imports or reads from the environment is taken out.

A prefix of a ``_target_`` is no boundary: whatever can be imported has functions that import or run what they are told.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forgather_cli.config.decode import decode_saved, load_tree
from forgather_cli.config.options import GROUPS
from forgather_cli.config.references import is_reference
from forgather_cli.config.schema import Config


def load_untrusted(path: Path) -> tuple[Config, dict[str, str]]:
    """The config a run was started with, but for what ``take_out_code`` takes out and returns. Raises ConfigError."""
    tree = load_tree(path)
    wanted = take_out_code(tree)
    return decode_saved(tree, path), wanted


def take_out_code(tree: dict[str, Any]) -> dict[str, str]:
    """Put the default recipe's option in the place of each group that names code or reads the environment.

    Returns what each of these groups wants, by group, and so for settings of the run itself. Callbacks, which can name
    code in more ways, go without a word: whoever does not train reads none of them.
    """
    tree["callbacks"] = {}
    of_run = {key: want for key in tree if key not in GROUPS and (want := next(_wants(tree[key]), None)) is not None}
    for key in of_run:
        del tree[key]
    found = {group: want for group in GROUPS if (want := next(_wants(tree.get(group)), None)) is not None}
    if found:
        from forgather_cli.config.load import load_config

        default = load_config("default", []).tree
        tree.update({group: default[group] for group in found})
    return {**found, **of_run}


def untrusted(group: str, want: str) -> str:
    """The mistake of a command that reads a group which was taken out."""
    another = "data=text 'data.files=[...]'" if group == "data" else f"{group}=..."
    return f"{group}: the saved config {want}; give {another}, or add --trust-config if you trust who wrote it"


def _wants(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if "_target_" in value:
            yield f"imports {value['_target_']!s} (_target_)"
        for item in value.values():
            yield from _wants(item)
    elif isinstance(value, list):
        for item in value:
            yield from _wants(item)
    elif is_reference(value):
        yield f"reads the environment ({value})"
