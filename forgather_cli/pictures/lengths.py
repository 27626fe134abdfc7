"""The picture of how long documents are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from forgather_cli.pictures import style
from forgather_cli.pictures.picture import save

_BINS = 60


def draw_lengths(lengths: Mapping[str, Sequence[int]], seq_len: int, path: Path) -> None:
    """A histogram for each split of ``lengths`` (tokens), with a line at ``seq_len``. Raises SetupError."""
    with style.drawing("--plot"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8, 4.5), layout="constrained")
        axes = figure.subplots()
        longest = max((max(each) for each in lengths.values() if each), default=1)
        for number, (split, values) in enumerate(lengths.items()):
            axes.hist(values, bins=_BINS, range=(0, longest + 1), label=f"{split}, {len(values):,}",
                      color=style.colour(number), alpha=0.6)  # fmt: skip
        axes.axvline(seq_len, label=f"seq_len {seq_len:,}", **style.RESUMED)
        axes.set_xlabel("tokens")
        axes.set_yscale("log")
        axes.set_title("lengths")
        axes.legend()
        save(figure, path, "--plot")
