"""What a config names by ``_target_``, a class or function of the user's: imported and called with clear errors.

Needs no torch.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from forgather_cli.errors import ConfigError, ForgatherError, PartError, did_you_mean

_GIVEN: dict[str, Any] = {}
"""Functions and classes of a script by the names that stand for them in its settings."""


def name_of(given: Any) -> str:
    """The name, in angle brackets, of an object that no file can hold; of one that has none, its class's."""
    named = given if inspect.isroutine(given) or isinstance(given, type) else type(given)
    return f"<{named.__module__}.{named.__qualname__}>"


def kept(given: Callable[..., Any]) -> str:
    """The same, by which ``import_target`` finds this object in this process."""
    name = name_of(given)
    while _GIVEN.setdefault(name, given) is not given:
        name = f"{name[:-1]}'>"
    return name


def import_target(path: str, where: str) -> Callable[..., Any]:
    """The class or function at ``package.module.name``; modules in the working directory are found too.

    Raises ConfigError naming ``<where>._target_``, whatever the user's module raises.
    """
    return import_path(path, f"{where}._target_")


def import_path(path: str, setting: str) -> Callable[..., Any]:
    """The same; raises ConfigError naming ``setting``."""
    if path in _GIVEN:
        return _GIVEN[path]  # type: ignore[no-any-return]
    if path.startswith("<"):
        raise ConfigError(f"{setting}: {path} was made by a Python script; run the script again")
    if (here := str(Path.cwd())) not in sys.path and "" not in sys.path:
        sys.path.append(here)
    try:
        return _locate(path)
    except Exception as error:
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{setting}: cannot import {path} ({reason}); mend the path or install what it needs"
        ) from error


def _locate(path: str) -> Callable[..., Any]:
    module, _, name = path.rpartition(".")
    if not module or module.startswith("."):
        raise ImportError(f"it names no module; write package.module.{name}")
    found = import_module(module)
    if not hasattr(found, name):
        raise ImportError(f"module {module} has no {name}")
    factory = getattr(found, name)
    if not callable(factory):
        raise ImportError(f"it is a {type(factory).__name__}, no class or function")
    return factory  # type: ignore[no-any-return]


def accepts(function: Callable[..., Any], name: str) -> bool:
    """True if ``function`` takes a keyword argument ``name``; also where it has no readable signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def argument_problem(
    where: str,
    path: str,
    factory: Callable[..., Any],
    arguments: Mapping[str, Any],
    positional: Sequence[str] = (),
    offered: Sequence[str] = (),
) -> str | None:
    """Why ``factory``, which ``path`` names, cannot be called: the first of the user's ``arguments`` that does not fit,
    with the names there are.

    It is called with ``positional`` ones first, and with the keywords ``offered`` where it takes them.
    """
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):  # some C functions have none
        return None
    if problem := unknown_argument(factory, where, path, len(positional), arguments):
        return problem
    for name in free_arguments(parameters, len(positional)):
        if parameters[name].default is inspect.Parameter.empty and name not in (*arguments, *offered):
            return f"{where}.{name}: {path} requires it; set {where}.{name}=..."
    return None


def call(function: Callable[..., Any], where: str, /, *args: Any, **kwargs: Any) -> Any:
    """``function(*args, **kwargs)``; its complaints about arguments become a ConfigError naming ``where``."""
    try:
        return function(*args, **kwargs)
    except (TypeError, ValueError, RuntimeError) as error:
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(f"{where}: {name} refused its settings: {error}") from error


def make(function: Callable[..., Any], where: str, name: str, /, *args: Any, **kwargs: Any) -> Any:
    """A part of the user's own: ``function(*args, **kwargs)``, named ``name`` in messages.

    Raises ConfigError for an argument that it does not take, PartError for what it raises.
    """
    try:
        return function(*args, **kwargs)
    except ForgatherError:
        raise
    except Exception as error:
        if isinstance(error, TypeError) and (problem := unknown_argument(function, where, name, len(args), kwargs)):
            raise ConfigError(problem) from error
        raise PartError(where, name, raised(error), "when it was made") from error


def raised(error: BaseException) -> str:
    """An exception in one line, as the last line of its traceback has it."""
    first, *more = "".join(traceback.format_exception_only(error)).strip().splitlines()
    # a data loader puts the traceback of its worker into the message (torch 2.13, ExceptionWrapper)
    return more[-1] if "in DataLoader worker process" in first and more else first


def unknown_argument(
    function: Callable[..., Any], where: str, name: str, num_positional: int, given: Iterable[str]
) -> str | None:
    """The message for the first of the ``given`` keywords that ``function`` does not take beside ``num_positional``
    arguments, with what it takes; None if it takes all, or does not tell.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some C functions have none
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return None
    free = free_arguments(parameters, num_positional)
    for key in given:
        if key not in free:
            known = f"{did_you_mean(key, free)} Arguments: {', '.join(free) or 'none'}"
            return f"{where}.{key}: {name} takes no such argument;{known}"
    return None


def free_arguments(parameters: Mapping[str, inspect.Parameter], num_positional: int) -> list[str]:
    """Names of the arguments that can be given by keyword beside ``num_positional`` that are given by position."""
    taken = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    names = [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return [name for name in names if name not in taken[:num_positional]]


def is_installed(package: str) -> bool:
    """True for a package that can be imported; imports nothing. A folder of that name, such as wandb leaves in the
    working directory, is found by Python too, and has no origin.
    """
    return getattr(importlib.util.find_spec(package), "origin", None) is not None
