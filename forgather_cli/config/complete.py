"""Completion of recipes and overrides, from the schema and the directories; nothing is composed."""

from __future__ import annotations

import contextlib
from pathlib import Path

from forgather_cli.config.options import GROUPS, SearchPath, description, recipes, search_path, shipped
from forgather_cli.errors import ConfigError

Candidate = tuple[str, str]


def complete(
    incomplete: str, words: list[str], *, config_dir: Path | None = None, cwd: Path | None = None
) -> list[Candidate]:
    """(text, description) of what ``incomplete`` may become. ``words`` are the arguments before it.

    ``tra`` -> ``trainer=``, ``trainer=`` -> its options, ``max_st`` -> ``max_steps=``, ``packing=`` -> its values.
    """
    try:
        search = search_path(config_dir, cwd)
    except ConfigError:  # an own option with a shipped name: still complete the rest
        search = SearchPath((shipped("conf"),), (shipped("recipes"),))
    sign = incomplete[: len(incomplete) - len(incomplete.lstrip("+~"))]
    key, equals, value = incomplete[len(sign) :].partition("=")
    if equals:
        return [(f"{sign}{key}={text}", about) for text, about in _values(key, search) if text.startswith(value)]
    found = []
    if not sign and all("=" in word or word.startswith(("-", "~", "+")) for word in words):  # no recipe is named yet
        with contextlib.suppress(ConfigError):
            found = [(each.name, each.description) for each in recipes(config_dir, cwd) if each.name.startswith(key)]
    end = "" if sign == "~" else "="
    return found + [(f"{sign}{text}{end}", about) for text, about in _keys(key, words, search)]


def _keys(start: str, words: list[str], search: SearchPath) -> list[Candidate]:
    """Groups, run-level settings and bare keys; full paths once a group's name and a dot are typed."""
    from forgather_cli.config.explain import about
    from forgather_cli.config.paths import root_keys, settings

    known = settings()
    if "." in start:
        return [(path, about(path, search)) for path in known if path.startswith(start)]
    groups = [(group, f"{group} option") for group in GROUPS if group.startswith(start)]
    roots = [(key, about(key, search)) for key in sorted(root_keys()) if key.startswith(start)]
    # what the options that the words before choose do not have is left out: of options called as their type, which
    # sizes of a model are not
    pairs = (word.partition("=") for word in words if "=" in word)
    chosen = {group: name for group, _, name in pairs if group in GROUPS and search.option(group, name)}
    has = {(path.split(".")[0], kind) for path, setting in known.items() for kind in setting.types}
    bare = []
    for path, setting in known.items():
        option = chosen.get(group := path.split(".")[0])
        fits = option is None or option in setting.types or (group, option) not in has
        if setting.types and setting.leaf.startswith(start) and fits:
            bare.append((setting.leaf, about(path, search)))
    return groups + roots + bare


def _values(key: str, search: SearchPath) -> list[Candidate]:
    from forgather_cli.config.paths import ending_with, settings, values

    if search.is_group(key):
        names = search.option_names(key)
        return [(name, description(file)) for name in names if (file := search.option(key, name))]
    known = settings()
    path = key if key in known else next(iter(ending_with(key)), None)
    return [(value, "") for value in values(known[path].annotation)] if path in known else []
