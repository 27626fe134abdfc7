"""The settings of ``forgather diloco server`` from ``conf/diloco/server.yaml``, a run's own, and the command line."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forgather_cli.config.decode import decode_part, dump_tree, to_tree
from forgather_cli.config.mistakes import Naming
from forgather_cli.config.options import shipped
from forgather_cli.config.overrides import parse_lines
from forgather_cli.config.paths import walk
from forgather_cli.config.schema import DilocoServerSettings
from forgather_cli.documents.regular_files import read_yaml
from forgather_cli.errors import ConfigError

log = logging.getLogger(__name__)

_OURS = re.compile(r"[+~]*diloco([.=@]|$)")


def split_server_overrides(overrides: Sequence[str]) -> tuple[list[str], list[str]]:
    """Those of the recipe, and those of the server (``diloco.workers=2``)."""
    ours = [text for text in overrides if _OURS.match(text)]
    return [text for text in overrides if text not in ours], ours


def load_server_settings(overrides: Sequence[str], saved: Path | None = None) -> DilocoServerSettings:
    """The shipped settings, or a run's ``saved`` ones, with overrides. Raises ConfigError with all mistakes."""
    tree: Any = {"diloco": read_yaml(saved or shipped("conf") / "diloco" / "server.yaml", ConfigError)}
    (parsed, problems), texts = parse_lines(overrides), {}
    for item in parsed:
        line, key = item.input_line or item.key_or_group, item.key_or_group
        if item.is_delete() or item.is_add() or item.is_force_add() or item.is_sweep_override() or "." not in key:
            problems.append(f"{line}: the server's settings are set one by one; write diloco.NAME=VALUE")
            continue
        *above, last = key.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {}) if isinstance(place, dict) else {}
        if isinstance(place, dict):
            place[last] = item.value()
            texts[key] = line.partition("=")[2].strip()
    if isinstance(tree["diloco"], dict) and "max_change" in tree["diloco"]:  # of versions before 0.3
        del tree["diloco"]["max_change"]
        log.warning("diloco.max_change: counts no more, no change is rejected for its size; see diloco.max_share")
    typed = {path: path for path, _ in walk(tree)} if saved is None else {}
    try:
        settings = decode_part("diloco", DilocoServerSettings, tree, Naming(typed=typed, texts=texts))
    except ConfigError as error:
        raise ConfigError([*problems, *error.problems]) from error
    if problems := [*problems, *settings.problems()]:
        raise ConfigError(problems)
    return settings


def server_settings_text(settings: DilocoServerSettings) -> str:
    """For ``RUN/diloco.yaml``, which ``load_server_settings`` reads."""
    return dump_tree(to_tree(settings))
