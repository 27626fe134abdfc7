"""Samples on a terminal. Targets are coloured, or where there is no colour between ``[`` and ``]``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.text import Text

from forgather_cli.inspection.samples import Excerpt, ShownSample
from forgather_cli.run_dir import shown

_TARGET = "black on green"
_SPECIAL = "magenta"  # begin and end tokens and the like; among targets they are bold


def print_sample(sample: ShownSample, split: str, length: int | None, screen: Console) -> None:
    """``length``: samples in the split, where that is known."""
    marks = not screen.is_terminal or screen.no_color or screen.is_dumb_terminal
    of = "" if length is None else f" of {length:,}"
    screen.print(Text(f"sample {sample.index:,}{of} ({split}): {counts_of(sample)}", style="bold"))
    if sample.encoder is not None:
        screen.print(_rule("encoder", screen))
        screen.print(Text("".join(map(visible, sample.encoder.letters)).removesuffix("\n")))
    for number, part in enumerate(sample.parts):
        tokens = [at for at, document in enumerate(sample.documents) if document == number]
        screen.print(_rule(heading_of(part, number, sample), screen))
        screen.print(_tokens(sample, tokens, marks=marks))
        if part.is_cut:
            screen.print(Text(f"(cut: {part.behind:,} more tokens of it are in no sample)", style="dim"))
        elif part.behind:
            screen.print(Text(f"({part.behind:,} more tokens of it in other samples)", style="dim"))
    if sample.num_padding:
        screen.print(Text(f"(padding: {sample.num_padding:,} tokens)", style="dim"))
    screen.print()


def counts_of(sample: ShownSample) -> str:
    """``256 tokens, 3 documents, 57 targets``."""
    counts = {
        "token": len(sample.ids), "document": len(sample.parts), "target": sum(sample.targets),
        "token of the encoder": None if sample.encoder is None else len(sample.encoder.ids),
    }  # fmt: skip
    named = ((name.split(" "), count) for name, count in counts.items() if count is not None)
    return ", ".join(f"{n:,} {' '.join([f'{word}s' if n != 1 else word, *rest])}" for (word, *rest), n in named)


def heading_of(part: Excerpt, number: int, sample: ShownSample) -> str:
    what = "decoder" if sample.encoder is not None else "document"
    named = f"{what} {number}" if sample.sides is None else f"pair {number // 2}, {sample.sides[number]}"
    source = "" if part.place is None else shown(part.source or "")
    begins = f"from its token {part.before:,} on" if part.before else ""
    return ", ".join(filter(None, (named, sample.mixture_source, source, begins)))


def _rule(text: str, screen: Console) -> Text:
    width = screen.width if screen.is_terminal else 80
    return Text(f"── {text} ".ljust(width, "─"), style="dim", no_wrap=True, overflow="ignore")


def _tokens(sample: ShownSample, tokens: Sequence[int], *, marks: bool) -> Text:
    found, differs = Text(), sample.differs or [False] * len(sample.ids)
    for is_target, group in groupby(tokens, key=lambda at: sample.targets[at]):
        found.append("[" if marks and is_target else "")
        for is_other, some in groupby(group, key=lambda at: differs[at]):
            found.append("{" if marks and is_other else "")
            for at in some:
                style = ("bold " if sample.special[at] else "") + _TARGET if is_target else ""
                style = _SPECIAL if sample.special[at] and not is_target else style
                found.append(visible(sample.letters[at]), style + " underline" * is_other)
            found.append("}" if marks and is_other else "")
        found.append("]" if marks and is_target else "")
    if found.plain.endswith("\n"):
        found.right_crop(1)
    return found


def visible(text: str) -> str:
    """``text`` with an escape for what a terminal obeys or cannot show; a line ends behind its ``\\n``."""
    if text.isprintable():
        return text
    parts = (each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)
    return "".join(f"{part}\n" if part == "\\n" else part for part in parts)
