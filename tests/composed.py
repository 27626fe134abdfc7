"""Compositions that all processes of a session share, since Hydra takes 0.15 s for each: ``compose`` keeps its own by
all that they are made of, and finds those of others in a folder. And no process reads the same YAML, or an override of
the same text, for Hydra twice.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import os
import pickle
import threading
from pathlib import Path
from typing import Any

from hydra._internal import defaults_list
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from forgather_cli.config import compose


class _Found:
    """A composition, of which ``deepcopy`` makes one in a tenth of the time that OmegaConf takes."""

    def __init__(self, pickled: bytes) -> None:
        self._pickled = pickled

    def __deepcopy__(self, memo: Any) -> Any:
        return pickle.loads(self._pickled)


class _Composed(dict[str, Any]):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def pop(self, key: str, default: Any = None) -> Any:
        found = super().pop(key, None)
        if found is None:
            with contextlib.suppress(FileNotFoundError):
                found = _Found(self._file(key).read_bytes())
        return found or default

    def __setitem__(self, key: str, found: Any) -> None:
        if isinstance(found, _Found):
            super().__setitem__(key, found)
            return
        pickled = pickle.dumps(found)
        super().__setitem__(key, _Found(pickled))
        file = self._file(key)
        if not file.exists():
            with contextlib.suppress(OSError):  # a test lets disks be full
                unfinished = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
                unfinished.write_bytes(pickled)
                unfinished.rename(file)

    def _file(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode()).hexdigest()


def share() -> None:
    """Have this process, and those forked from it, do so."""
    folder = Path(os.environ["FORGATHER_TESTS_COMPOSED"])
    folder.mkdir(exist_ok=True)
    compose._COMPOSED = _Composed(folder)
    load, loaded = OmegaConf.load, {}

    def load_once(file: Any) -> Any:
        text = file.read()
        file.seek(0)
        if text not in loaded:
            loaded[text] = pickle.dumps(load(file))
        return pickle.loads(loaded[text])

    OmegaConf.load = load_once  # type: ignore[method-assign]
    parse, parsed = OverridesParser.parse_rule, {}

    def parse_once(self: OverridesParser, text: str, rule: str) -> Any:
        if (text, rule) not in parsed:
            parsed[text, rule] = parse(self, text, rule)
        return copy.copy(parsed[text, rule])

    OverridesParser.parse_rule = parse_once  # type: ignore[method-assign]
    if (choices := getattr(defaults_list, "_create_interpolation_map", None)) is None:
        return  # hydra-core 1.4 makes none

    def choices_where_read(overrides: Any, defaults: list[Any], self_added: bool) -> Any:
        """A fifth of Hydra's time goes into these, which only an interpolation in a defaults list reads."""
        is_read = any(not default.is_self() and default.is_interpolation() for default in defaults)
        return choices(overrides, defaults, self_added) if is_read else None

    defaults_list._create_interpolation_map = choices_where_read
