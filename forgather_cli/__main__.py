"""``python -m forgather_cli`` is the ``forgather`` command."""

from __future__ import annotations

import signal
from typing import NoReturn


def run() -> NoReturn:
    """The command as a process of its own."""
    # Ctrl-C ends it at once, unless what it runs handles that itself (``interruptible``, ``launch.signals``): as an
    # exception it would be a traceback of these imports, and numpy 2.4 and torch 2.13 swallow it in theirs and go on
    # half imported.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from forgather_cli.terminal.bars import doing
    from forgather_cli.terminal.folding import show_all_text

    show_all_text()

    with doing("importing the commands"):
        from forgather_cli.cli.app import main
        from forgather_cli.launch.processes import collect_less, keep_heap, leave

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
