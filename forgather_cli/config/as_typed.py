"""What was typed for a value that YAML and Hydra read as another: 2023_09, of which they make 202309, 1e5, yes."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from forgather_cli.documents.regular_files import read_text
from forgather_cli.errors import ConfigError


def as_typed(value: object, text: str) -> str:
    """``value`` as it stands in ``text``, typed for it or a list or mapping that holds it; else as ``str`` has it."""
    words = re.findall(r"[^\s,:\[\]{}]+", text) if text[:1] in ("[", "{", "-") else [text]
    return next((word for word in words if _is_read_as(value, word)), "true" if value is True else str(value))


def _is_read_as(value: object, word: str) -> bool:
    import yaml
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    with contextlib.suppress(yaml.YAMLError, ValueError, OmegaConfBaseException):
        read: Any = OmegaConf.to_container(OmegaConf.create(f"- {word}"))
        return type(read[0]) is type(value) and read == [value]
    return False


def text_in(file: Path, *names: str) -> str:
    """What stands in a YAML file for the first of the settings that it has, each a dotted path; empty if for none."""
    import yaml

    text = read_text(file, ConfigError)
    root: Any = yaml.compose(text, yaml.SafeLoader)
    for name in names:
        node = root
        for part in name.split("."):
            pairs = node.value if isinstance(node, yaml.MappingNode) else []
            node = next((value for key, value in pairs if key.value == part), None)
        if node is not None:
            return text[node.start_mark.index : node.end_mark.index].strip()
    return ""
