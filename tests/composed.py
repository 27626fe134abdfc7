"""Compositions that all processes of a session share, since Hydra takes 0.15 s for each: ``compose`` keeps its own by
all that they are made of, and finds those of others in a folder. And no process reads the same YAML for Hydra twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any

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
                unfinished = file.with_suffix(f".{os.getpid()}")
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
