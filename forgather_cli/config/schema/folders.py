"""Options that lie in folders of the package: each folder with a ``settings.py`` brings those of its groups."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator
from importlib import import_module
from inspect import getsourcefile, getsourcelines
from pathlib import Path
from typing import ClassVar, get_origin, get_type_hints

from forgather_cli.config.schema.base import Option, all_options
from forgather_cli.errors import ConfigError

_PACKAGE = Path(__file__).parents[2]


def import_options() -> list[type[Option]]:
    """Import every ``settings.py``; the options of all groups.

    Raises ConfigError for a name that its file lacks.
    """
    for file in sorted(_PACKAGE.rglob("settings.py")):
        name = ".".join(file.relative_to(_PACKAGE.parent).with_suffix("").parts)
        if name in sys.modules and not any(option.__module__ == name for option in all_options()):
            del sys.modules[name]  # it was imported first of all, and waits for the schema: begin it anew
        try:
            import_module(name)
        except NameError as error:
            at = traceback.extract_tb(error.__traceback__)[-1]
            raise ConfigError(f"{at.filename}:{at.lineno}: {error}; import it there") from error
    for cls in (option for option in all_options() if option.__module__.endswith(".settings")):
        # pydantic (2.14) says of a name that it does not know that the class is not fully defined
        for name, annotation in vars(cls).get("__annotations__", {}).items():
            field = type(cls.__name__, (), {"__annotations__": {name: annotation}, "__module__": cls.__module__})
            try:
                get_type_hints(field)
            except NameError as error:
                raise ConfigError(f"{_field_at(cls, name)}: {error}; import it there") from error
    return all_options()


def undecodable(cls: type[Option]) -> Iterator[str]:
    """The fields of an option that pydantic has no type for."""
    from pydantic import PydanticUserError, TypeAdapter

    for name, hint in get_type_hints(cls, include_extras=True).items():
        try:
            if name in vars(cls).get("__annotations__", {}) and get_origin(hint) is not ClassVar:
                TypeAdapter(hint)
        except PydanticUserError as error:
            yield f"{_field_at(cls, name)}: {str(error).partition('. ')[0]}"


def _field_at(cls: type, name: str) -> str:
    lines, first = getsourcelines(cls)
    line = next((n for n, text in enumerate(lines) if text.strip().startswith(f"{name}:")), 0)
    return f"{getsourcefile(cls)}:{first + line}: {cls.__name__}.{name}"
