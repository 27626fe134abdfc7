#!/usr/bin/env python3
"""Write the table of Hugging Face's arguments in docs/python_api.md anew, from the one in the code."""

from __future__ import annotations

from pathlib import Path

from forgather_cli.trainer.hugging_face import ARGUMENTS

PAGE = Path(__file__).parents[1] / "docs/python_api.md"
BEGIN, END = "<!-- arguments: written by scripts/python_api_table.py -->\n", "<!-- end of arguments -->\n"


def updated(page: str) -> str:
    """The page with the table as the code has it."""
    rows = [
        f"| `{name}` | {argument.how} | {argument.note.replace('|', ' or ')} |" for name, argument in ARGUMENTS.items()
    ]
    before, rest = page.split(BEGIN)
    table = "\n".join(["| argument | here | |", "|---|---|---|", *rows])
    return f"{before}{BEGIN}\n{table}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
