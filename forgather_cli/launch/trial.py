"""``python -m forgather_cli.launch.trial CONFIG``: train what a ``config.yaml`` says, in its ``output_dir``.

``forgather plan --fit --confirm`` starts it, so that what runs out of memory is not the process that asks.
"""

from __future__ import annotations

import sys
from pathlib import Path

from forgather_cli.config.decode import load_saved, to_tree
from forgather_cli.config.load import Loaded
from forgather_cli.launch.process import collect_less, leave
from forgather_cli.launch.rank_log import lasting_output


@lasting_output()
def main() -> int:
    from forgather_cli.launch.start import launch

    path = Path(sys.argv[1])
    config = load_saved(path)
    return launch(Loaded(config, to_tree(config), config.recipe, path, "", (), frozenset({"output_dir"})))


if __name__ == "__main__":
    collect_less()
    leave(main())
