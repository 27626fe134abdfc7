"""Hydra's part: choose options, merge their files, resolve interpolations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from forgather_cli.config.options import SearchPath
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig


@dataclass(frozen=True)
class Composed:
    """What Hydra composed, and the chosen option of each group."""

    cfg: DictConfig
    options: dict[str, str]


def compose(primary: str, nodes: dict[str, dict[str, Any]], groups: list[str], path: SearchPath) -> Composed:
    """Compose ``primary`` (one of ``nodes``, or ``train``) with group overrides.

    No output directory, no logging, and no trace in Hydra's global state. Raises ConfigError with what Hydra says.
    """
    import yaml
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        with _stored(nodes), initialize_config_dir(str(path.conf[0]), version_base="1.3"):
            cfg = hydra_compose(primary, [*_search(path), *groups], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(_said(error)) from error
    return _without_hydra(cfg)


@dataclass(frozen=True)
class Plain:
    """A resolved config. ``unresolved`` paths hold ``???`` since their interpolation failed; ``problems`` says why."""

    tree: dict[str, Any]
    unresolved: frozenset[str]
    problems: list[str]


def plain(cfg: DictConfig) -> Plain:
    """The config as plain dicts and lists with interpolations resolved; missing values stay ``???``."""
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    OmegaConf.set_struct(cfg, False)
    unresolved: set[str] = set()
    problems: list[str] = []
    while True:
        try:
            tree: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
            return Plain(tree, frozenset(unresolved), problems)
        except OmegaConfBaseException as error:
            key = str(error.full_key or "")
            if not key or key in unresolved:
                raise ConfigError([*problems, _said(error)]) from error
            if not isinstance(error, InterpolationToMissingValueError):  # the missing value itself is reported
                problems.append(f"{key}: {_unresolved(str(error).splitlines()[0])}")
            unresolved.add(key)
            OmegaConf.update(cfg, key, "???")


def _unresolved(reason: str) -> str:
    if unset := re.search(r"Environment variable '(.+)' not found", reason):
        name = unset[1]
        return f"environment variable {name} is not set; export it, or give a default: ${{oc.env:{name},DEFAULT}}"
    return f"cannot be resolved ({reason}); mend the ${{...}} in it"


@contextmanager
def _stored(nodes: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Recipes as named configs. Hydra's search path would take every directory beside a recipe for a config group."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    for name, node in nodes.items():
        store.store(name=name, node=node, provider="recipe")
    try:
        yield
    finally:
        for name in nodes:
            store.repo.pop(f"{name}.yaml", None)


def _search(path: SearchPath) -> list[str]:
    from hydra.core.override_parser.types import Quote, QuotedString

    further = [QuotedString(f"file://{root}", Quote.single).with_quotes() for root in path.conf[1:]]
    return [f"hydra.searchpath=[{','.join(further)}]"] if further else []


def _without_hydra(cfg: DictConfig) -> Composed:
    from omegaconf import OmegaConf, open_dict

    choices = OmegaConf.to_container(cfg.hydra.runtime.choices)
    assert isinstance(choices, dict)
    with open_dict(cfg):
        del cfg["hydra"]
    return Composed(
        cfg, {str(key): _named(value) for key, value in choices.items() if not str(key).startswith("hydra/")}
    )


def _named(choice: object) -> str:
    return "[" + ",".join(map(str, choice)) + "]" if isinstance(choice, list) else str(choice)


def _said(error: BaseException) -> str:
    """An exception of Hydra's in one line."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return "config cannot be composed: " + " ".join(text.split())
