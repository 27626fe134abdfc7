"""``python -m forgather_cli`` is the ``forgather`` command."""

from __future__ import annotations

from typing import NoReturn

from forgather_cli.cli.app import main
from forgather_cli.launch.processes import collect_less, keep_heap, leave


def run() -> NoReturn:
    """The command as a process of its own."""
    collect_less()
    keep_heap()
    try:
        main()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            leave(end.code or 0)
        raise


if __name__ == "__main__":
    run()
