"""References to the environment, ``${oc.env:NAME}``: resolved at each load, kept as they are typed.

They hold what should not be written down (keys) or differs by machine (folders); ranks and later starts read
them from their own environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

_NODE = re.compile(r"\$\{([^{}:]+)\}")
_START = re.compile(r"(\\*)\$\{")


def is_reference(text: object) -> bool:
    """True for a text with ``${...}`` in it that is not escaped."""
    return isinstance(text, str) and any(len(match[1]) % 2 == 0 for match in _START.finditer(text))


def references(tree: Any) -> dict[str, str]:
    """Path -> text of each setting of an unresolved tree that the environment is part of, if through others."""
    texts = {path: text for path, text in texts_of(tree) if is_reference(text)}
    found = {path: text for path, text in texts.items() if "oc.env" in text}
    while more := {p: t for p, t in texts.items() if p not in found and any(_names(n, found) for n in _names_in(t))}:
        found |= more
    return found


def as_typed(tree: Any, typed: dict[str, str], prefix: str = "") -> Any:
    """A resolved tree with the texts of ``typed`` in their places."""
    if prefix in typed:
        return typed[prefix]
    if isinstance(tree, dict):
        return {key: as_typed(item, typed, f"{prefix}.{key}" if prefix else str(key)) for key, item in tree.items()}
    if isinstance(tree, list):
        return [as_typed(item, typed, f"{prefix}.{number}") for number, item in enumerate(tree)]
    return tree


def escaped(tree: Any) -> Any:
    """A resolved tree whose texts a later load takes as they are."""
    if isinstance(tree, dict):
        return {key: escaped(item) for key, item in tree.items()}
    if isinstance(tree, list):
        return [escaped(item) for item in tree]
    return _START.sub(r"\1\1\\${", tree) if isinstance(tree, str) else tree


def without_token(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree to be written: the job's token is null in it."""
    control = (tree.get("callbacks") or {}).get("control")
    if not control or not control.get("auth_token"):
        return tree
    return {**tree, "callbacks": {**tree["callbacks"], "control": {**control, "auth_token": None}}}


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree that ``as_typed`` has made, with the values of this environment. Raises ConfigError with all mistakes."""
    if not any("${" in text for _, text in texts_of(tree)):
        return tree
    from omegaconf import OmegaConf

    from forgather_cli.config.compose import plain
    from forgather_cli.errors import ConfigError

    found = plain(OmegaConf.create(tree))
    if found.problems:
        raise ConfigError(found.problems)
    return found.tree


def texts_of(tree: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(path, text) of every text in a tree, places in lists by number."""
    if isinstance(tree, dict | list):
        for key, item in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from texts_of(item, f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(tree, str):
        yield prefix, tree


def _names_in(text: str) -> list[str]:
    return [name.strip().lstrip(".") for name in _NODE.findall(text)]


def _names(name: str, found: dict[str, str]) -> bool:
    """True if a setting called ``name``, from the root or from where it is named, is or holds one of ``found``."""
    return any(f".{path}.".endswith(f".{name}.") or f".{path}.".find(f".{name}.") >= 0 for path in found)
