"""What Hydra and OmegaConf do here: choose options, merge their files, resolve interpolations.

References to the environment, ``${oc.env:NAME}``, are for what should not be written down (keys) or differs by machine
(folders): ``config.yaml`` has them as typed, and they are resolved at each load, by ranks and later starts from their
own environment.
"""

from __future__ import annotations

import os
import re
import threading
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from forgather_cli.config.options import SearchPath
from forgather_cli.config.paths import walk
from forgather_cli.errors import ConfigError

if TYPE_CHECKING:
    from omegaconf import DictConfig

_COMPOSED: dict[str, tuple[DictConfig, dict[str, str]]] = {}
_LOCK = threading.Lock()
"""Around Hydra, whose search path and stored configs are the process's (hydra-core 1.3, ``GlobalHydra``)."""
_START = re.compile(r"(\\*)\$\{")


def compose(
    primary: str, nodes: dict[str, dict[str, Any]], groups: list[str], path: SearchPath
) -> tuple[DictConfig, dict[str, str]]:
    """``primary`` (one of ``nodes``, or ``train``) with group overrides: the config, and each group's chosen option.

    Makes no output directory, sets up no logging, leaves Hydra's global state as it was. Raises ConfigError with
    Hydra's message.
    """
    # Hydra takes 0.1 s; eval, plan --fit and sweeps compose the same files several times
    files = [file for root in path.conf for names in ("*", "*/*", "*/*/*") for file in root.glob(f"{names}.yaml")]
    own = [file.read_text(errors="replace") for file in files if not file.is_relative_to(path.conf[0])]
    key = repr((primary, nodes, groups, own, [(file, file.stat().st_mtime_ns) for file in files]))
    if "oc.env" in key:  # defaults lists may choose by it
        key += repr(os.environ)
    with _LOCK:
        found = _COMPOSED.pop(key, None) or _compose(primary, nodes, groups, path)
        while len(_COMPOSED) >= 32:
            del _COMPOSED[next(iter(_COMPOSED))]  # which was not asked for the longest
        _COMPOSED[key] = found
        return deepcopy(found)


def _compose(
    primary: str, nodes: dict[str, dict[str, Any]], groups: list[str], path: SearchPath
) -> tuple[DictConfig, dict[str, str]]:
    import hydra
    import yaml
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.types import Quote, QuotedString
    from hydra.errors import HydraException
    from omegaconf import OmegaConf, open_dict
    from omegaconf.errors import OmegaConfBaseException

    further = [QuotedString(f"file://{root}", Quote.single).with_quotes() for root in path.conf[1:]]
    search = [f"hydra.searchpath=[{','.join(further)}]"] if further else []
    # recipes as named configs: Hydra's search path would take every directory beside a recipe for a config group
    store = ConfigStore.instance()
    for name, node in nodes.items():
        store.store(name=name, node=node, provider="recipe")
    # hydra-core 1.3 warns where it is not given, 1.4 where it is
    base = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
    try:
        with hydra.initialize_config_dir(str(path.conf[0]), **base):
            cfg = hydra.compose(primary, [*search, *groups], return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(_in_one_line(error)) from error
    finally:
        for name in nodes:
            store.repo.pop(f"{name}.yaml", None)
    says = {key: value for node in nodes.values() for key, value in walk(node, lists=False)}  # innermost first
    for key in (key for key, value in says.items() if value == "???"):  # a merge takes it for nothing
        OmegaConf.update(cfg, key, "???", force_add=True)
    choices: Any = OmegaConf.to_container(cfg.hydra.runtime.choices)
    with open_dict(cfg):
        del cfg["hydra"]
    return cfg, {
        str(group): f"[{','.join(map(str, choice))}]" if isinstance(choice, list) else str(choice)
        for group, choice in choices.items()
        if not str(group).startswith("hydra/")
    }


def _in_one_line(error: BaseException) -> str:
    """The message of an exception of Hydra's, in one line."""
    text = str(error) or str(error.__cause__ or type(error).__name__)
    return "config cannot be composed: " + " ".join(text.split())


def plain(cfg: DictConfig) -> tuple[dict[str, Any], dict[str, str]]:
    """The config as plain dicts and lists, interpolations resolved; and the problem of each path where that failed.

    Such a path holds ``???``, as a missing value does. Its problem is empty where it only refers to a missing value,
    which is reported itself.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import InterpolationToMissingValueError, OmegaConfBaseException

    OmegaConf.set_struct(cfg, False)
    failed: dict[str, str] = {}
    while True:
        try:
            tree: Any = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=False)
            return tree, failed
        except OmegaConfBaseException as error:
            key, reason = str(error.full_key or ""), str(error).partition("\n")[0]
            if not key or key in failed:
                raise ConfigError([*filter(None, failed.values()), _in_one_line(error)]) from error
            if unset := re.search(r"Environment variable '(.+)' not found", reason):
                remedy = f"export it, or give a default: ${{oc.env:{unset[1]},DEFAULT}}"
                failed[key] = f"{key}: environment variable {unset[1]} is not set; {remedy}"
            elif isinstance(error, InterpolationToMissingValueError):
                failed[key] = ""
            else:
                failed[key] = f"{key}: cannot be resolved ({reason}); mend the ${{...}} in it"
            OmegaConf.update(cfg, key, "???")


def resolved(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree made by ``written``, references resolved in this environment. Raises ConfigError with all mistakes."""
    if not any("${" in text for _, text in walk(tree) if isinstance(text, str)):
        return tree
    from omegaconf import OmegaConf

    found, failed = plain(OmegaConf.create(tree))
    if problems := list(filter(None, failed.values())):
        raise ConfigError(problems)
    return found


def is_reference(text: object) -> bool:
    """True for a text with ``${...}`` in it that is not escaped."""
    return isinstance(text, str) and any(len(match[1]) % 2 == 0 for match in _START.finditer(text))


def references(tree: Any) -> dict[str, str]:
    """Path -> text of each setting of an unresolved tree that depends on the environment, through others too."""
    texts = {path: text for path, text in walk(tree) if is_reference(text)}
    found = {path: text for path, text in texts.items() if "oc.env" in text}

    def reads_one(text: str) -> bool:
        """True if it refers to a setting, absolutely or relatively, that is one of ``found`` or holds one."""
        names = [name.strip().lstrip(".") for name in re.findall(r"\$\{([^{}:]+)\}", text)]
        return any(f".{name}." in f".{path}." for name in names for path in found)

    while more := {path: text for path, text in texts.items() if path not in found and reads_one(text)}:
        found |= more
    return found


def written(tree: Any, typed: dict[str, str], prefix: str = "") -> Any:
    """A resolved tree for ``config.yaml``: references as ``typed``, ``${`` in other texts escaped so that a later load
    leaves it, and without the job's token."""
    if prefix in typed:
        return typed[prefix]
    if prefix == "callbacks.control.auth_token":
        return None
    if isinstance(tree, dict):
        return {key: written(item, typed, f"{prefix}.{key}" if prefix else str(key)) for key, item in tree.items()}
    if isinstance(tree, list):
        return [written(item, typed, f"{prefix}.{number}") for number, item in enumerate(tree)]
    return _START.sub(r"\1\1\\${", tree) if isinstance(tree, str) else tree
