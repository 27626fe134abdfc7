"""``python -m forgather_cli`` is the ``forgather`` command."""

from __future__ import annotations

from forgather_cli.cli.app import main

if __name__ == "__main__":
    main()
