"""A user's optimizer or scheduler, named by ``_target_``: imported, inspected and called with clear errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from forgather_cli.errors import ConfigError


def import_target(path: str, group: str) -> Callable[..., Any]:
    """The class or function at ``package.module.name``. Raises ConfigError naming ``<group>._target_``."""
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"{group}._target_: cannot import {path!r} ({error}); give package.module.Class") from error
    if not callable(found):
        raise ConfigError(f"{group}._target_: {path!r} is a {type(found).__name__}; give a class or a function")
    return found  # type: ignore[no-any-return]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """True if ``function`` takes a keyword argument ``name``; also where it has no readable signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def call(function: Callable[..., Any], group: str, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``; its complaints about arguments become a ConfigError naming ``group``."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"{group}: {name} refused its settings: {error}") from error
