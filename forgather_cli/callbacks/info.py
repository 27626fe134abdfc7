"""InfoCallback: what is about to be trained, once at the start."""

from __future__ import annotations

from typing import Any

import yaml

from forgather_cli.callbacks.base import BuiltIn, TrainerControl, TrainerState
from forgather_cli.callbacks.console import StreamName, console, is_terminal, printable, say
from forgather_cli.config.schema import InfoSettings
from forgather_cli.terminal.folding import fold


class InfoCallback(BuiltIn[InfoSettings]):
    """Writes ``trainer.info()`` at the start: a panel on a terminal, ``key  value`` lines elsewhere.

    ``verbose`` adds the resolved config, where ``config_tree`` is given, and the module tree.
    """

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        facts = {key: str(value) for key, value in kwargs["trainer"].info().items() if value is not None}
        if is_terminal(self._stream):
            _panel(facts, self._stream)
        else:
            say(_lines(facts), self._stream)
        if self.settings.verbose:
            if self._tree is not None:
                say(yaml.safe_dump(self._tree, sort_keys=False, allow_unicode=True).rstrip(), self._stream)
            say(str(kwargs.get("model")), self._stream)


def _lines(facts: dict[str, str]) -> str:
    width = max(map(len, facts), default=0)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in facts.items())


def _panel(facts: dict[str, str], stream: StreamName) -> None:
    from rich.cells import cell_len
    from rich.panel import Panel
    from rich.table import Table
    from rich.text import Text

    screen, label = console(stream), max(map(len, facts), default=0)
    room = screen.width - label - 6  # between the panel's sides
    table, below = Table.grid(padding=(0, 2)), []
    for key, value in facts.items():
        rows = fold(printable(value, stream), room)
        if max(map(cell_len, rows)) > room:  # a path, say, which the panel would break
            below.append(f"{key:<{label}}  {value}")
        else:
            table.add_row(Text(key, "cyan"), Text("\n".join(rows)))
    panel = Panel(table, title="Forgather", title_align="left", border_style="dim", expand=False)
    screen.print(panel, soft_wrap=False)
    for line in below:
        say("\n".join(fold(line, screen.width)), stream)
