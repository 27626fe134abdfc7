"""Files of other libraries, key by key as settings of ours: each key is used, told, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from forgather_cli.config.schema import typed
from forgather_cli.errors import ConfigError, did_you_mean

ALWAYS_SO = "always so here"
NO_EFFECT = "without effect here"
AS_SET = "as set here"
_IN_SHORT = (AS_SET, ALWAYS_SO, NO_EFFECT)


@dataclass
class Translation:
    """What a file says: ``settings`` of ours by dotted path, an option by its group's name; and ``problems``."""

    settings: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, list[str]] = field(default_factory=dict)
    """Path -> the lines of the file that say it, as ``key: value``."""
    told: dict[str, str] = field(default_factory=dict)
    """Line -> what becomes of it that is no setting."""
    problems: list[str] = field(default_factory=list)

    def checked(self) -> Translation:
        """Itself. Raises ConfigError with every problem."""
        if self.problems:
            raise ConfigError(self.problems)
        return self

    def notes(self, outcomes: Mapping[str, str]) -> list[str]:
        """What became of each line, for people. ``outcomes``: path -> what it is now, where that is not as the file has
        it.
        """
        meanings: dict[str, list[str]] = {}
        for path, value in self.settings.items():
            for line in self.lines[path]:
                meanings.setdefault(line, []).append(outcomes.get(path, f"{path}={typed(value)}"))
        in_short: dict[str, list[str]] = {meaning: [] for meaning in _IN_SHORT}
        for line, meaning in self.told.items():
            if meaning in in_short:
                in_short[meaning].append(line.partition(":")[0])
            else:
                meanings[line] = [meaning]
        return [
            *(f"{line} -> {', '.join(each)}" for line, each in meanings.items()),
            *(f"{meaning}: {', '.join(keys)}" for meaning, keys in in_short.items() if keys),
        ]


@dataclass
class Section:
    """A mapping of the file that is being read: ``left`` are its keys not read yet, ``name`` formats one for messages.

    ``shown``: key -> what notes call it, where that is another name.
    """

    name: Callable[[str], str]
    left: dict[str, Any]
    found: Translation = field(default_factory=Translation)
    shown: Mapping[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    _taken: dict[str, Any] = field(default_factory=dict)

    def take(self, key: str, default: Any = None) -> Any:
        self.asked.append(key)
        if key not in self.left:
            return default
        self._taken[key] = self.left[key]
        return self.left.pop(key)

    def default(self, key: str, value: Any, whose: str) -> None:
        """A key that the file may leave out means this to the library ``whose`` file it is."""
        if key not in self.left:
            self.left[key] = value
            self.shown = {**self.shown, key: f"{self.shown.get(key, key)} ({whose} default)"}

    def wrong(self, key: str, problem: str) -> None:
        self.found.problems.append(f"{self.name(key)}: {problem}")

    def tell(self, key: str, meaning: str) -> None:
        """Say what becomes of a key, if it was there."""
        if key in self._taken:
            self.found.told[self._line(key)] = meaning

    def put(self, path: str, value: Any, key: str) -> None:
        """The key that was taken says that our setting ``path`` is ``value``; nothing if that is None."""
        if value is None:
            return
        settings, lines = self.found.settings, self.found.lines
        if settings.setdefault(path, value) != value:
            self.wrong(key, f"contradicts {lines[path][0]}; keep one of them")
        else:
            lines.setdefault(path, []).append(self._line(key))

    def boolean(self, key: str) -> bool | None:
        """None where the key is missing. Also as text, which accelerate writes."""
        value = self.take(key)
        text = str(value).lower()
        if value is not None and text not in ("true", "false"):
            self.wrong(key, f"must be true or false, got {value!r}")
            return None
        return None if value is None else text == "true"

    def number(self, key: str, least: int) -> int | None:
        value = self.take(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
            self.wrong(key, f"must be a whole number, {least} or more, got {value!r}")
            return None
        return value

    def leave(self, keys: Collection[str], meaning: str) -> None:
        """Tell of those of ``keys`` that are there."""
        for key in keys:
            if key in self.left:
                self.take(key)
                self.tell(key, meaning)

    def refuse(self, remedies: Mapping[str, str]) -> None:
        """Those of the keys that ask for something are wrong."""
        for key, remedy in remedies.items():
            if key not in self.left:
                continue
            if is_set(value := self.take(key)):
                self.wrong(key, f"nothing reads it, got {value!r}; {remedy}, and leave it out")
            else:
                self.tell(key, ALWAYS_SO)

    def finish(self, known: Collection[str] = ()) -> None:
        """What is left is unknown, and what was taken without a word (null, false) leaves things as they are set.
        ``known``: more keys to suggest.
        """
        for key in self.left:
            self.wrong(key, f"no such key;{did_you_mean(key, [*self.asked, *known])} leave it out")
        said = {line for lines in self.found.lines.values() for line in lines} | self.found.told.keys()
        for key, value in self._taken.items():
            if self._line(key) not in said and not isinstance(value, dict):
                self.tell(key, AS_SET)

    def _line(self, key: str) -> str:
        return f"{self.shown.get(key, key)}: {typed(self._taken.get(key))}"


def is_set(value: Any) -> bool:
    """True for what is neither empty nor one of these libraries' words for no."""
    if isinstance(value, dict):
        return value.get("enabled", True) is not False and any(is_set(item) for item in value.values())
    return bool(value) and str(value).lower() not in ("no", "false", "none")
