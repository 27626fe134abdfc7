#!/usr/bin/env python3
"""Write the tables of arguments in docs/python_api.md anew, from those in the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from forgather_cli.trainer.aliases import ALIASES
from forgather_cli.trainer.hugging_face import ARGUMENTS

PAGE = Path(__file__).parents[1] / "docs/python_api.md"


def updated(page: str) -> str:
    """The page with the tables as the code has them."""
    arguments = [(f"`{name}`", each.how, each.note) for name, each in ARGUMENTS.items()]
    aliases = [
        (f"`{name}`", each.stands_for, _words(each.type), "None" if each.default is None else f"`{each.default}`")
        for name, each in ALIASES.items()
    ]
    page = _with_table(page, "arguments", ("argument", "here", ""), arguments)
    return _with_table(page, "further names", ("name", "stands for", "type", "default"), aliases)


def _with_table(page: str, name: str, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """``page`` with a table between the two comments that have its ``name``."""
    begin, end = f"<!-- {name}: written by scripts/python_api_table.py -->\n", f"<!-- end of {name} -->"
    lines = [f"| {' | '.join(cell.replace('|', ' or ') for cell in row)} |" for row in (head, *rows)]
    lines[0] = lines[0].replace("|  |", "| |")
    table = "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]])
    return re.sub(f"{re.escape(begin)}.*?{re.escape(end)}", lambda _: f"{begin}\n{table}\n\n{end}", page, flags=re.S)


def _words(hint: Any) -> str:
    """A type for people: the words of a Literal, else names."""
    kinds = [kind for kind in get_args(hint) if kind is not type(None)] if get_origin(hint) is not Literal else [hint]
    kind = kinds[0] if kinds else hint
    return ", ".join(map(str, get_args(kind))) if get_args(kind) else str(kind.__name__)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
